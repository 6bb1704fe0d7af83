//! One execution of an offline run, the same for all kinds: it is claimed, its configuration is read, a
//! person's requests and runs of higher priority stop it, and it ends.
//!
//! Whatever works on a run returns [`Stop`] as its error when the execution must end. Nothing but
//! [`execute`] decides what becomes of the run then.

use super::{COMPUTING, Failed, IDLE, evaluate, export, may_work, preference, supervised};
use crate::executor::{Executor, StepOutcome, Trains};
use crate::grpo;
use crate::learn::learner::thread::Handle;
use crate::trainer::{Trainer, pause};
use anyhow::Context;
use runs::api::create::line_of;
use runs::api::preference::{Dpo, Kto};
use runs::claim::{self, Claim};
use runs::dataset::{self, Dataset, Member, Reference};
use runs::door::TrainedBy;
use runs::publish;
use runs::run::{Kind, Status};
use runs::schedule::Schedule;
use runs::uses::Purpose;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// A run while it is executed.
pub(crate) struct Execution<'a> {
    pub trainer: &'a Trainer,
    /// `None`: its kind trains nothing.
    learner: Option<&'a Handle>,
    pub claim: Claim,
    kind: Kind,
    config: Value,
    pub schedule: Schedule,
    pub base_version: Option<i64>,
    pub shutdown: &'a CancellationToken,
}

/// Why an execution ends although the run has neither succeeded nor failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    /// The next process executes the run again.
    #[error("the process stops")]
    Shutdown,
    #[error("{}", claim::CANCELLED)]
    Cancelled,
    #[error("{}", claim::PAUSED)]
    Paused,
    /// The run goes back into the queue.
    #[error("{0}")]
    GivesWay(String),
    /// Something wrong with a step has paused the run already.
    #[error("the run is paused")]
    Ended,
}

/// Executes a run until it has ended or must stop.
pub(super) async fn execute(
    trainer: &Trainer,
    learner: Option<&Handle>,
    id: Uuid,
    kind: Kind,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let Some(claim) = Claim::take(&trainer.pool, id).await? else {
        return Ok(());
    };
    let mut row = sqlx::query!("select config, base_version from run where id = $1", id)
        .fetch_one(&trainer.pool)
        .await?;
    let run = Execution {
        schedule: Schedule::take_from(&mut row.config).map_err(|error| unreadable(&error))?,
        trainer,
        learner,
        claim,
        kind,
        config: row.config,
        base_version: row.base_version,
        shutdown,
    };
    let Err(error) = run.work().await else { return Ok(()) };
    match error.downcast_ref() {
        None => return Err(error),
        Some(Stop::Shutdown | Stop::Ended) => {}
        Some(Stop::Cancelled) => claim.end(&trainer.pool, Status::Cancelled, claim::CANCELLED).await?,
        Some(Stop::Paused) => claim.end(&trainer.pool, Status::Paused, claim::PAUSED).await?,
        Some(Stop::GivesWay(reason)) => claim.give_way(&trainer.pool, reason).await?,
    }
    Ok(())
}

fn unreadable(error: &serde_json::Error) -> Failed {
    Failed(format!("the run's configuration cannot be read: {error}"))
}

impl<'a> Execution<'a> {
    async fn work(&self) -> anyhow::Result<()> {
        self.check().await?;
        match self.kind {
            Kind::Realtime => Ok(()), // it is in no queue
            Kind::Grpo => Box::pin(grpo::train(self)).await,
            Kind::Sft => Box::pin(supervised::train(self)).await,
            Kind::Dpo => Box::pin(preference::train::<Dpo>(self)).await,
            Kind::Kto => Box::pin(preference::train::<Kto>(self)).await,
            Kind::Evaluate => Box::pin(evaluate::measure(self)).await,
            Kind::Export => Box::pin(export::write(self)).await,
        }
    }

    /// What the run was asked for.
    pub fn config<C: DeserializeOwned>(&self) -> Result<C, Failed> {
        C::deserialize(&self.config).map_err(|error| unreadable(&error))
    }

    /// Loads the head of the run's line, which begins at its base version.
    pub async fn open(
        &self,
        trainer: &TrainedBy,
        lora: Option<&model::lora::Config>,
        seed: u64,
    ) -> anyhow::Result<Executor<'a>> {
        let learner = self.learner.context("this queue has no learner")?;
        let base = self.base_version;
        let base =
            base.ok_or_else(|| Failed("the run has no base version: create it again with `base_version`".into()))?;
        let trains = Trains::of(trainer, lora, seed);
        let (trainer, line) = (self.trainer, line_of(self.claim.run));
        publish::begin_line(&trainer.pool, &trainer.policy, &line, base).await?;
        let limits = trainer.options.offline.guards;
        let executor = Executor::open(trainer, learner, self.claim, &line, trains, limits).await?;
        Ok(executor.ok_or(Stop::Ended)?)
    }

    /// Waits for the trainer outside, if a full cohort waits for one.
    pub async fn outside_step(&self, executor: &mut Executor<'_>) -> anyhow::Result<StepOutcome> {
        loop {
            if let Some(outcome) = self.outside_look(executor).await? {
                return Ok(outcome);
            }
        }
    }

    /// Looks once, and sleeps if it has to look again. `Waiting`: no cohort waits.
    pub async fn outside_look(&self, executor: &mut Executor<'_>) -> anyhow::Result<Option<StepOutcome>> {
        if !executor.awaits_commit() {
            return Ok(Some(StepOutcome::Waiting));
        }
        self.check().await?;
        let outcome = executor.committed().await?;
        if let StepOutcome::Waiting = outcome {
            self.pause(Duration::from_millis(self.trainer.options.poll_ms)).await;
            return Ok(None);
        }
        Ok(Some(outcome))
    }

    /// Ends a run that has made its steps.
    pub async fn succeed(&self, executor: &Executor<'_>) -> anyhow::Result<()> {
        let done = format!("{} steps; head is version {}", executor.steps_done, executor.head);
        executor.release(Status::Succeeded, &done).await
    }

    /// Ends a run that has trained nothing; see [`Claim::succeed`].
    pub async fn finish(&self, purpose: Purpose, used: &[Uuid], result: &Value, reason: &str) -> anyhow::Result<()> {
        let (pool, policy) = (&self.trainer.pool, &self.trainer.policy);
        self.claim.succeed(pool, policy, purpose, used, result, reason).await
    }

    /// Returns a [`Stop`] if the execution must end: asked between two steps or pages.
    pub async fn check(&self) -> anyhow::Result<()> {
        self.check_requests().await?;
        if self.kind.trains_offline()
            && let Some(reason) = self.reason_to_wait().await?
        {
            return Err(Stop::GivesWay(reason).into());
        }
        Ok(())
    }

    pub async fn check_requests(&self) -> anyhow::Result<()> {
        if self.shutdown.is_cancelled() {
            return Err(Stop::Shutdown.into());
        }
        match self.claim.requested(&self.trainer.pool).await?.as_deref() {
            None => Ok(()),
            Some("cancel") => Err(Stop::Cancelled.into()),
            Some(_) => Err(Stop::Paused.into()),
        }
    }

    /// Resolves when the execution must end, with the reason. For what takes minutes, such as rollouts.
    pub async fn stopped(&self) -> anyhow::Error {
        loop {
            if let Err(error) = self.check().await {
                return error;
            }
            self.pause(IDLE).await;
        }
    }

    /// Sleeps, but not longer than the process.
    pub async fn pause(&self, span: Duration) {
        pause(self.shutdown, span).await;
    }

    /// Why a run that trains must give way, if it must: its window has closed, or a run of higher priority
    /// may work and no place is free for it.
    async fn reason_to_wait(&self) -> anyhow::Result<Option<String>> {
        let (trainer, schedule, run) = (self.trainer, &self.schedule, self.claim.run);
        if !schedule.is_open(OffsetDateTime::now_utc()) {
            let window = schedule.window.as_ref().map(ToString::to_string).unwrap_or_default();
            return Ok(Some(format!("waits for its window {window}")));
        }
        let mut waiting = may_work(trainer, COMPUTING).await?;
        waiting.retain(|other| other.status == Status::Queued && other.priority > schedule.priority);
        let (count, places) = (waiting.len(), trainer.options.offline.runs_max);
        let gives_way = trainer.working.gives_way(run, schedule.priority, count, places);
        let next = waiting.first().filter(|_| gives_way);
        Ok(next.map(|next| format!("waits for run {}, which has the priority {}", next.id, next.priority)))
    }

    /// The dataset that the run names, and its trajectories: those of `tenant` or of all that consent.
    pub async fn dataset(&self, reference: &Reference, tenant: Option<&str>) -> anyhow::Result<(Dataset, Vec<Member>)> {
        let policy = &self.trainer.policy;
        let mut connection = self.trainer.pool.acquire().await?;
        let found = dataset::store::find(&mut connection, policy, reference, None).await;
        let found = found.context("read the dataset")?;
        let dataset = found.ok_or_else(|| Failed(format!("policy `{policy}` has no dataset {reference}")))?;
        let members = dataset::available(&mut connection, &dataset, tenant).await?;
        Ok((dataset, members))
    }
}
