//! The queue of offline runs: those that may work now, by priority, then the oldest first. As many
//! execute side by side as `runs_max` says, each with a learner of its own.
//!
//! ```text
//! grpo         (../grpo.rs) rollouts of a researcher's tasks
//! supervised   `sft`: cross-entropy on a dataset, or on what its users wrote instead (demonstrations.rs)
//! preference   `dpo`, `kto`: trajectories of a dataset, compared by their rewards (pairs.rs)
//! evaluate     a version, measured on a dataset
//! export       a dataset as a file
//! ```
//! What trains on a dataset begins in training.rs and goes through it in the order of order.rs.
//! Exports compute nothing, so they have a queue of their own and do not wait for training. What has
//! expired is swept beside both.
//!
//! While the store of payloads does not answer, runs wait ([`StoreWait`]): nothing is left out because
//! of an outage.

mod demonstrations;
mod evaluate;
mod export;
mod order;
mod pairs;
mod preference;
mod recurrence;
mod supervised;
mod training;

use crate::grpo;
use crate::learn::learner::thread::Handle;
use crate::trainer::{Trainer, pause};
use crate::working::Begun;
use anyhow::Context;
use event_log::payload;
use futures::future;
use runs::api::preference::{Dpo, Kto};
use runs::claim::{self, Claim, Fenced};
use runs::dataset::{self, Dataset, Member, Reference, rows};
use runs::publish::refuse_withdrawn;
use runs::sample::{ModelLimits, Sample};
use runs::schedule::Schedule;
use runs::select::{self, Answers};
use runs::{judge, uses};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::time::Duration;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How often the queue is checked and ended runs are swept.
pub(crate) const IDLE: Duration = Duration::from_secs(1);
/// Errors of one run in a row before it fails.
const ERRORS_MAX: u32 = 5;
/// How often, and how long after each other, trajectories are asked for whose context cannot be read.
const READ_ATTEMPTS_MAX: u32 = 3;
const READ_EVERY: Duration = Duration::from_secs(1);
/// How long a run waits for a store that does not answer before it asks again.
const STORE_ASKED_MIN: Duration = Duration::from_millis(250);
const STORE_ASKED_MAX: Duration = Duration::from_secs(5);
/// Tokens that are read together, with their contexts, unless one generation has more.
const PAGE_TOKENS_MAX: u64 = 1 << 20;
/// Generations that are read together.
const PAGE_GENERATIONS_MAX: usize = 64;
/// Generations whose sizes are read together.
const SIZED_AT_ONCE: usize = 4096;

/// The run cannot be finished. People read the text as its reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Failed(pub String);

/// Kinds of runs that share a queue.
const COMPUTING: &[&str] = &["grpo", "sft", "dpo", "kto", "evaluate"];
const EXPORTS: &[&str] = &["export"];

/// Executes queued runs until `shutdown`.
pub(crate) async fn run(trainer: &Trainer, shutdown: &CancellationToken) -> anyhow::Result<()> {
    if !trainer.options.offline.enabled {
        return Ok(());
    }
    let learners = (0..trainer.options.offline.runs_max)
        .map(|_| Handle::spawn("learner-offline", trainer.computing.clone()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let queues = learners
        .iter()
        .map(|learner| queue(trainer, shutdown, COMPUTING, Some(learner)));
    let exports = queue(trainer, shutdown, EXPORTS, None);
    tokio::join!(future::join_all(queues), exports, sweeps(trainer, shutdown));
    Ok(())
}

/// Forgets what has expired, also while runs execute.
async fn sweeps(trainer: &Trainer, shutdown: &CancellationToken) {
    loop {
        if let Err(error) = sweep(trainer).await {
            tracing::error!(error = format!("{error:#}"), "could not sweep; trying again");
        }
        if !pause(shutdown, IDLE).await {
            return;
        }
    }
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

/// Executes the next run. `errors` counts errors in a row by run.
async fn poll(
    trainer: &Trainer,
    kinds: &[&str],
    learner: Option<&Handle>,
    shutdown: &CancellationToken,
    errors: &mut BTreeMap<Uuid, u32>,
) -> anyhow::Result<()> {
    let Some((_begun, id, kind)) = begin_next(trainer, kinds).await? else {
        return Ok(());
    };
    let done = match (kind.as_str(), learner) {
        ("grpo", Some(learner)) => Box::pin(grpo::execute(trainer, learner, id, shutdown)).await,
        ("sft", Some(learner)) => Box::pin(supervised::execute(trainer, learner, id, shutdown)).await,
        ("dpo", Some(learner)) => Box::pin(preference::execute::<Dpo>(trainer, learner, id, shutdown)).await,
        ("kto", Some(learner)) => Box::pin(preference::execute::<Kto>(trainer, learner, id, shutdown)).await,
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

/// Decides about rollouts of ended runs, queues those that come again, forgets what is past retention, and
/// settles rollouts of runs that wait.
async fn sweep(trainer: &Trainer) -> anyhow::Result<()> {
    let swept = select::sweep_abandoned(&trainer.pool, &trainer.policy).await?;
    if swept > 0 {
        tracing::info!(swept, "dropped rollouts of ended runs");
    }
    let queued = recurrence::queue_next(trainer).await?;
    if queued > 0 {
        tracing::info!(queued, "queued runs that come again");
    }
    select::sweep_expired(&trainer.pool).await?;
    uses::sweep_expired(&trainer.pool).await?;
    judge::sweep_expired(&trainer.pool).await?;
    export::sweep(trainer).await?;
    grpo::draws::settle_waiting(trainer).await
}

/// Begins a run that an executor left running, else the first queued one that may work now: by
/// priority, then the oldest.
async fn begin_next<'a>(trainer: &'a Trainer, kinds: &[&str]) -> anyhow::Result<Option<(Begun<'a>, Uuid, String)>> {
    let kinds: Vec<String> = kinds.iter().map(|&kind| kind.to_owned()).collect();
    let rows = sqlx::query!(
        r#"
        select id, kind, status, config from run
        where policy = $1 and kind = any ($2) and status in ('queued', 'running', 'pausing')
        order by status = 'queued', coalesce((config #>> '{schedule,priority}')::integer, 0) desc, created_at, id
        "#,
        trainer.policy,
        &kinds
    )
    .fetch_all(&trainer.pool)
    .await?;
    let now = OffsetDateTime::now_utc();
    let mut runs = Vec::new();
    for mut row in rows {
        // what cannot be read is reported by its execution
        let schedule = Schedule::take_from(&mut row.config).unwrap_or_default();
        if row.status != "queued" || schedule.is_open(now) {
            // see `reason_to_wait`: only runs that train ask it
            let gives_way = matches!(row.kind.as_str(), "grpo" | "sft" | "dpo" | "kto");
            runs.push((row.id, gives_way.then_some(schedule.priority), row.kind));
        }
    }
    let working = match kinds == EXPORTS {
        true => &trainer.exporting,
        false => &trainer.working,
    };
    Ok(working.begin(runs))
}

/// Puts a run back into the queue whose turn it is not, before anything is loaded for it: the process
/// that executed it has ended, and its window has closed meanwhile.
pub(super) async fn waits(trainer: &Trainer, run: Uuid, schedule: &Schedule) -> anyhow::Result<bool> {
    let Some(reason) = reason_to_wait(trainer, run, schedule).await? else {
        return Ok(false);
    };
    if let Some(claim) = Claim::take(&trainer.pool, run).await? {
        claim.give_way(&trainer.pool, &reason).await?;
    }
    Ok(true)
}

/// Why a run that trains must give way, if it must: its window has closed, or a run of higher priority
/// may work and no place is free for it.
pub(super) async fn reason_to_wait(
    trainer: &Trainer,
    run: Uuid,
    schedule: &Schedule,
) -> anyhow::Result<Option<String>> {
    let now = OffsetDateTime::now_utc();
    if !schedule.is_open(now) {
        let window = schedule.window.as_ref().map(ToString::to_string).unwrap_or_default();
        return Ok(Some(format!("waits for its window {window}")));
    }
    let kinds: Vec<String> = COMPUTING.iter().map(|&kind| kind.to_owned()).collect();
    let others = sqlx::query!(
        r#"
        select id, config from run
        where policy = $1 and kind = any ($2) and status = 'queued' and id <> $3
          and coalesce((config #>> '{schedule,priority}')::integer, 0) > $4
        order by coalesce((config #>> '{schedule,priority}')::integer, 0) desc, created_at, id
        "#,
        trainer.policy,
        &kinds,
        run,
        schedule.priority
    )
    .fetch_all(&trainer.pool)
    .await?;
    let waiting: Vec<(Uuid, i32)> = others
        .into_iter()
        .filter_map(|mut other| {
            let schedule = Schedule::take_from(&mut other.config).unwrap_or_default();
            schedule.is_open(now).then_some((other.id, schedule.priority))
        })
        .collect();
    let (count, places) = (waiting.len(), trainer.options.offline.runs_max);
    let gives_way = trainer.working.gives_way(run, schedule.priority, count, places);
    let next = waiting.first().filter(|_| gives_way);
    Ok(next.map(|(id, priority)| format!("waits for run {id}, which has the priority {priority}")))
}

async fn fail(trainer: &Trainer, run: Uuid, reason: &str) -> anyhow::Result<()> {
    if let Some(claim) = Claim::take(&trainer.pool, run).await? {
        release(&trainer.pool, &claim, "failed", reason).await?;
    }
    Ok(())
}

/// Ends an execution that has no executor: see [`Claim::release`].
async fn release(pool: &PgPool, claim: &Claim, status: &str, reason: &str) -> anyhow::Result<()> {
    let mut transaction = edge::database::begin(pool).await?;
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

/// The row of a run, as it was asked for.
pub(super) struct Configuration<C> {
    pub config: C,
    pub schedule: Schedule,
    pub base_version: Option<i64>,
}

pub(super) async fn configuration<C: serde::de::DeserializeOwned>(
    pool: &PgPool,
    run: Uuid,
) -> anyhow::Result<Configuration<C>> {
    let mut row = sqlx::query!("select config, base_version from run where id = $1", run)
        .fetch_one(pool)
        .await?;
    let unreadable = |error| Failed(format!("the run's configuration cannot be read: {error}"));
    Ok(Configuration {
        schedule: Schedule::take_from(&mut row.config).map_err(unreadable)?,
        config: serde_json::from_value(row.config).map_err(unreadable)?,
        base_version: row.base_version,
    })
}

/// The dataset that a run names.
async fn dataset_of(trainer: &Trainer, reference: &Reference) -> anyhow::Result<Dataset> {
    let mut connection = trainer.pool.acquire().await?;
    let found = dataset::store::find(&mut connection, &trainer.policy, reference, None).await;
    let found = found.context("read the dataset")?;
    Ok(found.ok_or_else(|| Failed(format!("policy `{}` has no dataset {reference}", trainer.policy)))?)
}

/// Waits for the store of payloads, with one event when a run begins to wait and one when it goes on.
#[derive(Debug, Default)]
struct StoreWait {
    /// How long the run has waited last. Zero: it does not wait.
    waited: Duration,
}

impl StoreWait {
    /// Waits after an error of the store. False: a person has paused or cancelled the run meanwhile, or
    /// the process is to stop. Other errors are returned.
    async fn after(
        &mut self,
        error: anyhow::Error,
        trainer: &Trainer,
        claim: &Claim,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<bool> {
        if !is_unavailable(&error) {
            return Err(error);
        }
        if self.waited.is_zero() {
            let message = format!("waits until the store of payloads answers: {error:#}");
            tracing::warn!(run = %claim.run, "{message}");
            self.append_event(trainer, claim, "warn", &message).await?;
        }
        self.waited = (self.waited * 2).clamp(STORE_ASKED_MIN, STORE_ASKED_MAX);
        Ok(pause(shutdown, self.waited).await && !is_stopped(&trainer.pool, claim, shutdown).await?)
    }

    /// The store has answered.
    async fn answered(&mut self, trainer: &Trainer, claim: &Claim) -> anyhow::Result<()> {
        if self.waited.is_zero() {
            return Ok(());
        }
        self.waited = Duration::ZERO;
        self.append_event(trainer, claim, "info", "the store of payloads answers again")
            .await
    }

    async fn append_event(&self, trainer: &Trainer, claim: &Claim, level: &str, message: &str) -> anyhow::Result<()> {
        let mut connection = trainer.pool.acquire().await?;
        claim::append_event(&mut connection, claim.run, level, message, &serde_json::json!({})).await?;
        Ok(())
    }
}

fn is_unavailable(error: &anyhow::Error) -> bool {
    let unavailable = |error: &payload::Error| matches!(error, payload::Error::Unavailable { .. });
    error.chain().any(|cause| cause.downcast_ref().is_some_and(unavailable))
}

/// Cuts generations into pages that fit into memory. `tokens`: of each.
fn pages(ids: &[Uuid], tokens: &BTreeMap<Uuid, u64>) -> Vec<Vec<Uuid>> {
    let mut pages: Vec<Vec<Uuid>> = Vec::new();
    let mut sum = 0;
    for id in ids {
        let tokens = tokens.get(id).copied().unwrap_or(0);
        sum += tokens;
        match pages.last_mut() {
            Some(page) if sum <= PAGE_TOKENS_MAX && page.len() < PAGE_GENERATIONS_MAX => page.push(*id),
            _ => {
                sum = tokens;
                pages.push(vec![*id]);
            }
        }
    }
    pages
}

/// The generations of trajectories, in order, in slices whose sizes are read together.
fn generations_of(members: &[Member]) -> Vec<Vec<Uuid>> {
    let ids: Vec<Uuid> = members
        .iter()
        .flat_map(|member| member.generations.iter().copied())
        .collect();
    ids.chunks(SIZED_AT_ONCE).map(<[Uuid]>::to_vec).collect()
}

/// The pages of these generations.
async fn pages_of(trainer: &Trainer, ids: &[Uuid]) -> anyhow::Result<Vec<Vec<Uuid>>> {
    let mut connection = trainer.pool.acquire().await?;
    let tokens = rows::tokens(&mut connection, ids).await;
    Ok(pages(ids, &tokens.context("read the sizes of generations")?))
}

/// Samples of a dataset's generations.
#[derive(Debug, Default)]
struct Read {
    samples: Vec<Sample>,
    /// Generations that may not be used, by code.
    refused: BTreeMap<String, Vec<Uuid>>,
    /// How many are gone meanwhile, or have a parent that is not stored yet.
    missing: usize,
}

/// Reads a page. `None`: the run has been paused or cancelled, or the process is to stop.
async fn read_samples(
    trainer: &Trainer,
    claim: &Claim,
    ids: &[Uuid],
    limits: &ModelLimits,
    answers: Answers,
    shutdown: &CancellationToken,
) -> anyhow::Result<Option<Read>> {
    let mut store = StoreWait::default();
    let mut attempt = 0;
    loop {
        let read = select::closed(&trainer.pool, &trainer.payloads, ids, limits, answers).await;
        let select::Assembled {
            samples,
            broken,
            orphans,
            ..
        } = match read {
            Ok(assembled) => assembled,
            Err(error) => match store.after(error.into(), trainer, claim, shutdown).await? {
                true => continue,
                false => return Ok(None),
            },
        };
        store.answered(trainer, claim).await?;
        attempt += 1;
        let refused: usize = broken.values().map(Vec::len).sum();
        let missing = ids.len().saturating_sub(samples.len() + refused);
        // what is missing without being an orphan is gone for good
        if orphans == 0 || attempt == READ_ATTEMPTS_MAX || !pause(shutdown, READ_EVERY).await {
            let refused = broken.into_iter().map(|(code, ids)| (code.into_owned(), ids));
            return Ok(Some(Read {
                samples,
                refused: refused.collect(),
                missing,
            }));
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
    let mut transaction = edge::database::begin(&trainer.pool).await?;
    claim.lock(&mut transaction).await?;
    uses::insert(&mut transaction, claim.run, uses::ONLY_STEP, purpose, used).await?;
    refuse_withdrawn(&mut transaction, &trainer.policy, used).await?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_as_many_tokens_as_fit_and_at_least_one_generation() {
        let ids: Vec<Uuid> = (0..200).map(Uuid::from_u128).collect();
        let of = |tokens: &dyn Fn(usize) -> u64| {
            let tokens = ids.iter().enumerate().map(|(at, id)| (*id, tokens(at))).collect();
            let pages = pages(&ids, &tokens);
            assert_eq!(pages.concat(), ids);
            pages.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(of(&|_| 100), [64, 64, 64, 8], "short ones");
        assert_eq!(of(&|_| PAGE_TOKENS_MAX / 100), [64, 64, 64, 8]);
        assert_eq!(of(&|_| PAGE_TOKENS_MAX / 2), [2; 100]);
        let sizes = of(&|at| if at == 10 { 4 * PAGE_TOKENS_MAX } else { 1 });
        assert_eq!(sizes, [10, 1, 64, 64, 61], "a long one alone");
        assert!(pages(&[], &BTreeMap::new()).is_empty());
        assert_eq!(pages(&ids[..2], &BTreeMap::new()).len(), 1, "gone meanwhile");
    }
}
