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
//! All of them are executed by execution.rs. Runs that train on a dataset make their steps in training.rs,
//! in the order of order.rs. Exports compute nothing, so they have a queue of their own and do not wait
//! for training. What has expired is swept beside both.
//!
//! While the store of payloads does not answer, runs wait ([`pages::StoreWait`]): nothing is left out
//! because of an outage.

mod demonstrations;
mod evaluate;
mod execution;
mod export;
mod order;
mod pages;
mod pairs;
mod preference;
mod supervised;
mod training;

use crate::grpo;
use crate::learn::learner::thread::Handle;
use crate::trainer::{Trainer, pause};
use crate::working::Begun;
use futures::future;
use runs::claim::{Claim, Fenced};
use runs::door;
use runs::run::{Kind, Status};
use runs::schedule::{self, Schedule};
use runs::{judge, select, uses};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(crate) use execution::{Execution, Stop};

/// How often the queue is checked and ended runs are swept.
pub(crate) const IDLE: Duration = Duration::from_secs(1);
/// Errors of one run in a row before it fails.
const ERRORS_MAX: u32 = 5;
/// How often full cohorts are compared with consents and retention.
const WITHDRAWN_EVERY: Duration = Duration::from_secs(60);

/// The run cannot be finished. People read the text as its reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Failed(pub String);

/// Kinds of runs that share a queue.
const COMPUTING: &[Kind] = &[Kind::Grpo, Kind::Sft, Kind::Dpo, Kind::Kto, Kind::Evaluate];
const EXPORTS: &[Kind] = &[Kind::Export];

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
    let mut looked: Option<Instant> = None;
    loop {
        if looked.is_none_or(|at| at.elapsed() >= WITHDRAWN_EVERY) {
            looked = Some(Instant::now());
            if let Err(error) = door::drop_withdrawn(&trainer.pool, &trainer.policy).await {
                tracing::error!(%error, "could not look for cohorts whose consent was withdrawn");
            }
        }
        if let Err(error) = sweep(trainer).await {
            tracing::error!(error = format!("{error:#}"), "could not sweep; trying again");
        }
        if !pause(shutdown, IDLE).await {
            return;
        }
    }
}

async fn queue(trainer: &Trainer, shutdown: &CancellationToken, kinds: &[Kind], learner: Option<&Handle>) {
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
    kinds: &[Kind],
    learner: Option<&Handle>,
    shutdown: &CancellationToken,
    errors: &mut BTreeMap<Uuid, u32>,
) -> anyhow::Result<()> {
    let Some((_begun, id, kind)) = begin_next(trainer, kinds).await? else {
        return Ok(());
    };
    let done = execution::execute(trainer, learner, id, kind, shutdown).await;
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
        if let Some(claim) = Claim::take(&trainer.pool, id).await? {
            claim.end(&trainer.pool, Status::Failed, &format!("{error:#}")).await?;
        }
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
    let queued = schedule::queue_next(&trainer.pool, &trainer.policy).await?;
    if queued > 0 {
        tracing::info!(queued, "queued runs that come again");
    }
    select::sweep_expired(&trainer.pool).await?;
    uses::sweep_expired(&trainer.pool).await?;
    judge::sweep_expired(&trainer.pool).await?;
    export::sweep(trainer).await?;
    door::sweep(
        &trainer.pool,
        &trainer.publisher.store,
        &trainer.payloads,
        &trainer.policy,
    )
    .await?;
    grpo::draws::settle_waiting(trainer).await
}

/// Begins a run that an executor left running, else the first queued one that may work now.
async fn begin_next<'a>(trainer: &'a Trainer, kinds: &[Kind]) -> anyhow::Result<Option<(Begun<'a>, Uuid, Kind)>> {
    let runs = may_work(trainer, kinds).await?.into_iter();
    let working = match kinds == EXPORTS {
        true => &trainer.exporting,
        false => &trainer.working,
    };
    let gives_way = |run: &MayWork| run.kind.trains_offline().then_some(run.priority);
    Ok(working.begin(runs.map(|run| (run.id, gives_way(&run), run.kind)).collect()))
}

/// A run that is to be executed now.
struct MayWork {
    id: Uuid,
    kind: Kind,
    status: Status,
    priority: i32,
}

/// Runs that an executor left running, then the queued ones that may work now: by priority, then the oldest.
async fn may_work(trainer: &Trainer, kinds: &[Kind]) -> anyhow::Result<Vec<MayWork>> {
    let kinds: Vec<String> = kinds.iter().map(ToString::to_string).collect();
    let rows = sqlx::query!(
        r#"
        select id, kind as "kind: Kind", status as "status: Status", config from run
        where policy = $1 and kind = any ($2) and status in ('queued', 'running', 'pausing')
        order by status = 'queued', coalesce((config #>> '{schedule,priority}')::integer, 0) desc, created_at, id
        "#,
        trainer.policy,
        &kinds
    )
    .fetch_all(&trainer.pool)
    .await?;
    let now = OffsetDateTime::now_utc();
    let runs = rows.into_iter().filter_map(|mut row| {
        // what cannot be read is reported by its execution
        let schedule = Schedule::take_from(&mut row.config).unwrap_or_default();
        let may_work = row.status != Status::Queued || schedule.is_open(now);
        may_work.then_some(MayWork {
            id: row.id,
            kind: row.kind,
            status: row.status,
            priority: schedule.priority,
        })
    });
    Ok(runs.collect())
}
