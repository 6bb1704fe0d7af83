//! The queue of offline runs, which execute one at a time, oldest first.
//!
//! ```text
//! grpo         (../grpo.rs) rollouts of a researcher's tasks
//! supervised   `sft`: cross-entropy on a dataset
//! evaluate     a version, measured on a dataset
//! export       a dataset as a file
//! ```
//! Exports compute nothing, so they have a queue of their own and do not wait for training.

mod evaluate;
mod export;
mod supervised;

use crate::dataset::{self, Dataset, Reference};
use crate::learn::learner::thread::Handle;
use crate::learn::sample::{ModelLimits, Sample};
use crate::publish::record;
use crate::runs::claim::{Claim, Fenced};
use crate::runs::grpo;
use crate::runs::trainer::{Trainer, pause};
use crate::{select, uses};
use anyhow::Context;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How often the queue is checked and ended runs are swept.
pub(crate) const IDLE: Duration = Duration::from_secs(1);
/// Errors of one run in a row before it fails.
const ERRORS_MAX: u32 = 5;
/// How often, and how long after each other, trajectories are asked for whose context cannot be read.
const READ_ATTEMPTS_MAX: u32 = 3;
const READ_EVERY: Duration = Duration::from_secs(1);

/// The run cannot be finished. People read the text as its reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Failed(pub String);

/// Kinds of runs that share a queue.
const COMPUTING: &[&str] = &["grpo", "sft", "evaluate"];
const EXPORTS: &[&str] = &["export"];

/// Executes queued runs until `shutdown`.
pub(crate) async fn run(trainer: &Trainer, shutdown: &CancellationToken) -> anyhow::Result<()> {
    if !trainer.options.offline.enabled {
        return Ok(());
    }
    let learner = Handle::spawn("learner-offline", trainer.options.threads)?;
    let computing = queue(trainer, shutdown, COMPUTING, Some(&learner));
    let exports = queue(trainer, shutdown, EXPORTS, None);
    tokio::join!(computing, exports);
    Ok(())
}

async fn queue(trainer: &Trainer, shutdown: &CancellationToken, kinds: &[&str], learner: Option<&Handle>) {
    let mut errors: BTreeMap<Uuid, u32> = BTreeMap::new();
    loop {
        if let Err(error) = poll(trainer, kinds, learner, shutdown, &mut errors).await {
            tracing::error!(error = format!("{error:#}"), ?kinds, "could not check the offline runs");
        }
        if !pause(shutdown, IDLE).await {
            return;
        }
    }
}

/// Sweeps, and executes the next run. `errors` counts errors in a row by run.
async fn poll(
    trainer: &Trainer,
    kinds: &[&str],
    learner: Option<&Handle>,
    shutdown: &CancellationToken,
    errors: &mut BTreeMap<Uuid, u32>,
) -> anyhow::Result<()> {
    if learner.is_some() {
        sweep(trainer).await?;
    }
    let Some((id, kind)) = next_run(trainer, kinds).await? else {
        return Ok(());
    };
    let done = match (kind.as_str(), learner) {
        ("grpo", Some(learner)) => Box::pin(grpo::execute(trainer, learner, id, shutdown)).await,
        ("sft", Some(learner)) => Box::pin(supervised::execute(trainer, learner, id, shutdown)).await,
        ("evaluate", _) => Box::pin(evaluate::execute(trainer, id, shutdown)).await,
        _ => Box::pin(export::execute(trainer, id, shutdown)).await,
    };
    let Err(error) = done else {
        errors.remove(&id);
        return Ok(());
    };
    if error.chain().any(|cause| cause.is::<Fenced>()) {
        tracing::info!(run = %id, "the run was ended or taken over during its execution");
        return Ok(());
    }
    let count = errors.entry(id).or_default();
    *count += 1;
    tracing::error!(run = %id, error = format!("{error:#}"), errors = *count, "an offline run had an error");
    if *count >= ERRORS_MAX || error.chain().any(|cause| cause.is::<Failed>()) {
        errors.remove(&id);
        fail(trainer, id, &format!("{error:#}")).await?;
    }
    Ok(())
}

/// Decides about rollouts of ended runs, and forgets what is past retention.
async fn sweep(trainer: &Trainer) -> anyhow::Result<()> {
    let swept = select::sweep_abandoned(&trainer.pool, &trainer.policy).await?;
    if swept > 0 {
        tracing::info!(swept, "dropped rollouts of ended runs");
    }
    select::sweep_expired(&trainer.pool).await?;
    uses::sweep_expired(&trainer.pool).await?;
    Ok(())
}

/// The oldest run that an executor left running, else the oldest queued run.
async fn next_run(trainer: &Trainer, kinds: &[&str]) -> Result<Option<(Uuid, String)>, sqlx::Error> {
    let kinds: Vec<String> = kinds.iter().map(|&kind| kind.to_owned()).collect();
    let row = sqlx::query!(
        r#"
        select id, kind from run
        where policy = $1 and kind = any ($2) and status in ('queued', 'running', 'pausing')
        order by status = 'queued', created_at, id
        limit 1
        "#,
        trainer.policy,
        &kinds
    )
    .fetch_optional(&trainer.pool)
    .await?;
    Ok(row.map(|row| (row.id, row.kind)))
}

async fn fail(trainer: &Trainer, run: Uuid, reason: &str) -> anyhow::Result<()> {
    if let Some(claim) = Claim::take(&trainer.pool, run).await? {
        release(&trainer.pool, &claim, "failed", reason).await?;
    }
    Ok(())
}

/// Ends an execution that has no executor: see [`Claim::release`].
async fn release(pool: &PgPool, claim: &Claim, status: &str, reason: &str) -> anyhow::Result<()> {
    let mut transaction = pool.begin().await?;
    claim.release(&mut transaction, status, Some(reason)).await?;
    transaction.commit().await?;
    Ok(())
}

/// Obeys a person's request to pause or cancel a run without an executor. True: the execution has
/// ended, or the process is to stop.
async fn is_stopped(pool: &PgPool, claim: &Claim, shutdown: &CancellationToken) -> anyhow::Result<bool> {
    if shutdown.is_cancelled() {
        return Ok(true);
    }
    match claim.requested(pool).await?.as_deref() {
        None => Ok(false),
        Some("cancel") => release(pool, claim, "cancelled", "cancelled by request")
            .await
            .map(|()| true),
        Some(_) => release(pool, claim, "paused", "paused by request").await.map(|()| true),
    }
}

/// The row of a run: its configuration and its version.
async fn configuration<C: serde::de::DeserializeOwned>(pool: &PgPool, run: Uuid) -> anyhow::Result<(C, Option<i64>)> {
    let row = sqlx::query!("select config, base_version from run where id = $1", run)
        .fetch_one(pool)
        .await?;
    let config = serde_json::from_value(row.config)
        .map_err(|error| Failed(format!("the run's configuration cannot be read: {error}")))?;
    Ok((config, row.base_version))
}

/// The dataset that a run names.
async fn dataset_of(trainer: &Trainer, reference: &Reference) -> anyhow::Result<Dataset> {
    let mut connection = trainer.pool.acquire().await?;
    let found = dataset::store::find(&mut connection, &trainer.policy, reference, None).await;
    let found = found.context("read the dataset")?;
    Ok(found.ok_or_else(|| Failed(format!("policy `{}` has no dataset {reference}", trainer.policy)))?)
}

/// Samples of a dataset's generations.
#[derive(Debug, Default)]
struct Read {
    samples: Vec<Sample>,
    /// Trajectories that may not be used, by code.
    refused: BTreeMap<String, usize>,
    /// Trajectories that are gone meanwhile, or whose context cannot be read now.
    missing: usize,
}

async fn read_samples(
    trainer: &Trainer,
    ids: &[Uuid],
    limits: &ModelLimits,
    shutdown: &CancellationToken,
) -> anyhow::Result<Read> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let select::Assembled { samples, broken } =
            select::closed(&trainer.pool, &trainer.payloads, ids, limits).await?;
        let refused: usize = broken.values().map(Vec::len).sum();
        let missing = ids.len().saturating_sub(samples.len() + refused);
        if missing == 0 || attempt == READ_ATTEMPTS_MAX || !pause(shutdown, READ_EVERY).await {
            let refused = broken.into_iter().map(|(code, ids)| (code.into_owned(), ids.len()));
            return Ok(Read {
                samples,
                refused: refused.collect(),
                missing,
            });
        }
    }
}

/// Ends a run that trains nothing, in one transaction: a use of each generation, its result, and its
/// success. Refused if a tenant has withdrawn its consent meanwhile, or a generation has expired; the
/// run then begins anew.
async fn succeed(
    trainer: &Trainer,
    claim: &Claim,
    purpose: uses::Purpose,
    used: &[Uuid],
    result: &serde_json::Value,
    reason: &str,
) -> anyhow::Result<()> {
    let mut transaction = trainer.pool.begin().await?;
    claim.lock(&mut transaction).await?;
    uses::insert(&mut transaction, claim.run, uses::ONLY_STEP, purpose, used).await?;
    record::refuse_withdrawn(&mut transaction, &trainer.policy, used).await?;
    sqlx::query!(
        "update run set result = $2, steps_done = 1 where id = $1",
        claim.run,
        result
    )
    .execute(&mut *transaction)
    .await?;
    claim.release(&mut transaction, "succeeded", Some(reason)).await?;
    transaction.commit().await?;
    Ok(())
}
