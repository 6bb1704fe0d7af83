//! Grades of rollouts, sent to the log as feedback events of the policy's tenant, to which the
//! rollouts belong as well.

use super::Failed;
use super::rollout::{Rolled, Rollout};
use crate::api::Config;
use crate::runs::grader::{Grader, Sample};
use crate::runs::trainer::Trainer;
use anyhow::Context;
use edge::tenant;
use futures::{FutureExt, StreamExt, TryStreamExt};
use ingest::event::{Feedback, Target, Value};
use std::collections::BTreeMap;
use time::OffsetDateTime;
use uuid::Uuid;

/// The metric that is the reward of the surface `rollout`.
const METRIC: &str = "reward";
/// Events in flight to the log.
const SENDS_MAX: usize = 64;

/// Grades every rollout, and removes those that have no grade. Resolves when the log has acknowledged
/// all grades.
pub(super) async fn grade_and_post(
    trainer: &Trainer,
    run: Uuid,
    config: &Config,
    rolled: &mut Rolled,
) -> anyhow::Result<()> {
    let source = format!("springtide/train/{run}");
    let tenant = tenant::owner(&trainer.pool, &trainer.policy).await?;
    let tenant = tenant.ok_or_else(|| Failed(format!("the policy {} belongs to no tenant", trainer.policy)))?;
    let grader = config.grader.clone();
    let ungraded = std::mem::take(&mut rolled.rollouts);
    // comparing long texts takes time
    let graded = tokio::task::spawn_blocking(move || {
        let grade_of = |rollout: Rollout| (grade(&grader, &rollout), rollout);
        ungraded.into_iter().map(grade_of).collect::<Vec<_>>()
    });
    let mut grades = Vec::new();
    for (grade, rollout) in graded.await.context("the grading thread")? {
        match grade {
            Ok(reward) => {
                grades.push((rollout.generation, reward));
                rolled.rollouts.push(rollout);
            }
            Err(error) => {
                rolled.failed += 1;
                rolled.first_error.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
    let sends: Vec<_> = grades
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

fn grade(grader: &Grader, rollout: &Rollout) -> anyhow::Result<f64> {
    let task = &rollout.task;
    let sample = Sample {
        id: &task.id,
        prompt: &task.prompt,
        answer: &task.answer,
        text: &rollout.text,
    };
    let reward = grader.grade(&sample);
    reward.with_context(|| format!("the grade of a rollout of task {}", task.id))
}
