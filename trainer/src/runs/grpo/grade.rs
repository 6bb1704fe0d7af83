//! Grades of rollouts, sent to the log as feedback events of the policy's tenant, to which the
//! rollouts belong as well.
//!
//! A rollout that cannot be graded is left out. It is counted by the code of the cause, and the code
//! is its disposition.

use super::Failed;
use super::rollout::{Rolled, Rollout};
use crate::api::Config;
use crate::judge::RunJudges;
use crate::runs::claim;
use crate::runs::executor::Executor;
use crate::runs::grader::{self, Grader, Sample};
use crate::runs::trainer::Trainer;
use anyhow::Context;
use edge::tenant;
use futures::{FutureExt, StreamExt, TryStreamExt};
use ingest::event::{Feedback, Target, Value};
use serde_json::json;
use std::collections::BTreeMap;
use time::OffsetDateTime;
use uuid::Uuid;

/// The metric that is the reward of the surface `rollout`.
const METRIC: &str = "reward";
/// Events in flight to the log.
const SENDS_MAX: usize = 64;

/// What the run's graders work with. Fails if one names a judge that there is not.
pub(super) async fn context(trainer: &Trainer, run: Uuid, config: &Config) -> anyhow::Result<grader::Context> {
    for name in config.grader.judges() {
        if !trainer.judges.has(name) {
            let reason = format!("grader: there is no [[trainer.judge]] {name:?} in the configuration of `train`");
            return Err(Failed(reason).into());
        }
    }
    let (pool, replay) = (trainer.pool.clone(), config.replay);
    let judges = RunJudges::open(trainer.judges.clone(), pool, &trainer.policy, run, replay).await?;
    Ok(grader::Context::new(Some(judges)))
}

/// Grades every rollout, and removes those that have no grade. Resolves when the log has acknowledged
/// all grades.
pub(super) async fn grade_and_post(
    executor: &Executor<'_>,
    grading: &grader::Context,
    grader: &Grader,
    rolled: &mut Rolled,
) -> anyhow::Result<()> {
    let ungraded = std::mem::take(&mut rolled.rollouts);
    let grades = ungraded
        .into_iter()
        .map(|rollout| async move { (grade(grading, grader, &rollout).await, rollout) }.boxed());
    let grades_max = executor.trainer.options.offline.grades_max;
    let mut grades = futures::stream::iter(grades).buffer_unordered(grades_max);
    let mut rewards = Vec::new();
    let mut failures = Failures::default();
    while let Some((grade, rollout)) = grades.next().await {
        match grade {
            Ok(reward) => {
                rewards.push((rollout.generation, reward));
                rolled.rollouts.push(rollout);
            }
            Err(error) if error.cause.ends_the_run() => return Err(Failed(error.reason).into()),
            Err(error) => failures.add(&rollout, &error),
        }
    }
    drop(grades);
    post(executor, rewards).await?;
    failures.tell(executor, rolled).await
}

async fn grade(grading: &grader::Context, grader: &Grader, rollout: &Rollout) -> Result<f64, grader::Error> {
    let task = &rollout.task;
    let sample = Sample {
        generation: rollout.generation,
        id: &task.id,
        prompt: &task.prompt,
        answer: &task.answer,
        text: &rollout.text,
    };
    grader.grade(grading, &sample).await
}

/// Rollouts without a grade.
#[derive(Debug, Default)]
struct Failures {
    generations: BTreeMap<&'static str, Vec<Uuid>>,
    first: Option<String>,
}

impl Failures {
    fn add(&mut self, rollout: &Rollout, error: &grader::Error) {
        let code = error.cause.code();
        self.generations.entry(code).or_default().push(rollout.generation);
        self.first
            .get_or_insert_with(|| format!("{code}: task {}: {error}", rollout.task.id));
    }

    /// Gives the generations their disposition, and counts them in an event and in `rolled`.
    async fn tell(self, executor: &Executor<'_>, rolled: &mut Rolled) -> anyhow::Result<()> {
        let Some(first) = self.first else {
            return Ok(());
        };
        executor.drop_generations(&self.generations).await?;
        rolled.ungraded = self.generations.iter().map(|(code, ids)| (*code, ids.len())).collect();
        let count: usize = rolled.ungraded.values().sum();
        let message = format!("{count} rollouts have no grade, the first one because of {first}");
        let data = json!({"ungraded": rolled.ungraded});
        let mut connection = executor.trainer.pool.acquire().await?;
        claim::append_event(&mut connection, executor.claim.run, "warn", &message, &data).await?;
        if rolled.rollouts.is_empty() {
            return Err(Failed(format!("no rollout of a step has a grade: {first}")).into());
        }
        Ok(())
    }
}

/// Posts the rewards as feedback.
async fn post(executor: &Executor<'_>, rewards: Vec<(Uuid, f64)>) -> anyhow::Result<()> {
    let (trainer, run) = (executor.trainer, executor.claim.run);
    let source = format!("springtide/train/{run}");
    let tenant = tenant::owner(&trainer.pool, &trainer.policy).await?;
    let tenant = tenant.ok_or_else(|| Failed(format!("the policy {} belongs to no tenant", trainer.policy)))?;
    let sends: Vec<_> = rewards
        .into_iter()
        .map(|(generation, reward)| {
            let feedback = Feedback {
                id: Uuid::now_v7(),
                target: Target::Generation(generation),
                metric_name: METRIC.into(),
                value: Value::Float(reward),
                tags: BTreeMap::from([("run_id".into(), run.to_string())]),
            };
            let event = feedback.into_event(&tenant, &source, OffsetDateTime::now_utc());
            async move { trainer.producer.send_event(&event).await }.boxed()
        })
        .collect();
    futures::stream::iter(sends)
        .buffer_unordered(SENDS_MAX)
        .try_collect::<Vec<()>>()
        .await
        .context("post grades to the log")?;
    Ok(())
}
