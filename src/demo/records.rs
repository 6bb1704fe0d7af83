//! Read-only queries about a run: what the tables say of it, for the live view and the report. Writes nothing; each query
//! is in the `.sql` file of its name, with its reasons.

use std::collections::BTreeMap;

use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

/// Which run is asked about.
#[derive(Debug, Clone)]
pub struct Scope {
    pub policy: String,
    /// Only what happened from then on.
    pub since: OffsetDateTime,
}

/// Where the loop stands now.
#[derive(Debug, Clone, Default)]
pub struct Live {
    /// Version that the learning alias serves.
    pub champion: Option<i64>,
    pub step: Option<i64>,
    /// Of the realtime run, when it does not run.
    pub halted: Option<String>,
    /// How far the tables are behind the log.
    pub lag_seconds: Option<f64>,
    /// Bytes of the last delta, of all bytes of its version.
    pub delta_ratio: Option<f64>,
    pub swap_pause_ms: Option<f64>,
    /// From an answer to serving, the median of the newest versions, seconds.
    pub feedback_to_serving: Option<f64>,
    pub ledger: Ledger,
}

/// Everything but the ledger, which takes longer to count.
pub async fn live(pool: &PgPool, scope: &Scope) -> sqlx::Result<Live> {
    let row = sqlx::query_file!("src/demo/live.sql", scope.policy)
        .fetch_one(pool)
        .await?;
    let wait = sqlx::query_file_scalar!("src/demo/live_wait.sql", scope.policy, scope.since);
    let halted = row.status.filter(|status| status != "running");
    Ok(Live {
        champion: row.champion,
        step: row.step,
        halted: halted.map(|status| {
            row.reason
                .map_or(status.clone(), |reason| format!("{status}: {reason}"))
        }),
        lag_seconds: row.lag_seconds,
        delta_ratio: row.delta_ratio,
        swap_pause_ms: row.swap_pause_ms,
        feedback_to_serving: wait.fetch_one(pool).await?,
        ledger: Ledger::default(),
    })
}

/// What has not come to its end yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsettled {
    pub open: i64,
    /// Of the learning arm.
    pub queued: i64,
}

pub async fn unsettled(pool: &PgPool, scope: &Scope) -> sqlx::Result<Unsettled> {
    let row = sqlx::query_file!("src/demo/settled.sql", scope.policy, scope.since)
        .fetch_one(pool)
        .await?;
    Ok(Unsettled {
        open: row.open,
        queued: row.queued,
    })
}

/// Every generation since the run began, by its disposition.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Ledger {
    pub generations: i64,
    pub open: i64,
    pub queued: i64,
    pub trained: i64,
    pub censored: i64,
    pub dropped: i64,
    pub held_out: i64,
    pub erased: i64,
    /// Answered to the demo, yet not in the tables.
    pub missing: i64,
    /// Trained by a step that did not start from the version that sampled it.
    pub trained_stale: i64,
    /// The dispositions add up to the generations, and none is missing.
    pub balanced: bool,
    /// Why generations were dropped or censored: `dropped: stale`, `censored: no_feedback`, …
    pub reasons: BTreeMap<String, i64>,
}

pub async fn ledger(pool: &PgPool, scope: &Scope, answered: &[Uuid]) -> sqlx::Result<Ledger> {
    let query = sqlx::query_file!("src/demo/ledger.sql", scope.policy, scope.since, answered);
    let row = query.fetch_one(pool).await?;
    let reasons = sqlx::query_file!("src/demo/dropped.sql", scope.policy, scope.since)
        .fetch_all(pool)
        .await?;
    let ends = [
        row.open,
        row.queued,
        row.trained,
        row.censored,
        row.dropped,
        row.held_out,
        row.erased,
    ];
    Ok(Ledger {
        generations: row.generations,
        open: row.open,
        queued: row.queued,
        trained: row.trained,
        censored: row.censored,
        dropped: row.dropped,
        held_out: row.held_out,
        erased: row.erased,
        missing: row.missing,
        trained_stale: row.trained_stale,
        balanced: row.generations == ends.iter().sum::<i64>() && row.missing == 0,
        reasons: reasons
            .into_iter()
            .map(|r| (format!("{}: {}", r.disposition, r.code), r.generations))
            .collect(),
    })
}

/// What the trajectory table says of one arm's pauses, beside the demo's own count.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Recorded {
    pub rewarded: i64,
    pub reward_mean: Option<f64>,
    pub not_closed: i64,
    pub differ: i64,
    pub censored_though_answered: i64,
    pub rewarded_though_silent: i64,
}

/// One pause as the demo scored it: generation, arm, reward (None: nobody answered).
pub type Scored = (Uuid, String, Option<f64>);

pub async fn trajectories(pool: &PgPool, scored: &[Scored]) -> sqlx::Result<BTreeMap<String, Recorded>> {
    let ids = scored.iter().map(|(id, _, _)| *id).collect::<Vec<_>>();
    let arms = scored.iter().map(|(_, arm, _)| arm.clone()).collect::<Vec<_>>();
    let rewards = scored.iter().map(|(_, _, reward)| *reward).collect::<Vec<_>>();
    let query = sqlx::query_file!("src/demo/trajectories.sql", &ids, &arms, &rewards as &[Option<f64>]);
    let rows = query.fetch_all(pool).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let recorded = Recorded {
                rewarded: row.rewarded,
                reward_mean: row.reward_mean,
                not_closed: row.not_closed,
                differ: row.differ,
                censored_though_answered: row.censored_though_answered,
                rewarded_though_silent: row.rewarded_though_silent,
            };
            (row.arm, recorded)
        })
        .collect())
}

/// From an answer to a token by the version that trained on it, seconds.
#[derive(Debug, Clone, Default, Serialize)]
pub struct FeedbackToServing {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
    /// Trained trajectories whose version has answered somebody: what the quantiles are over.
    pub n: i64,
    /// Trained trajectories whose version answered nobody.
    pub not_served: i64,
}

pub async fn feedback_to_serving(pool: &PgPool, scope: &Scope) -> sqlx::Result<FeedbackToServing> {
    let query = sqlx::query_file!("src/demo/feedback_to_serving.sql", scope.policy, scope.since);
    let row = query.fetch_one(pool).await?;
    Ok(FeedbackToServing {
        p50: row.p50,
        p95: row.p95,
        n: row.served,
        not_served: row.not_served,
    })
}

/// A part of the way from an answer to serving, seconds.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    pub name: String,
    pub p50: f64,
    pub p95: f64,
}

/// The parts of [`feedback_to_serving`], in the order in which they follow one another.
pub async fn feedback_to_serving_phases(pool: &PgPool, scope: &Scope) -> sqlx::Result<Vec<Phase>> {
    sqlx::query_file_as!(
        Phase,
        "src/demo/feedback_to_serving_phases.sql",
        scope.policy,
        scope.since
    )
    .fetch_all(pool)
    .await
}

/// What the loop did during the run.
#[derive(Debug, Clone, Default)]
pub struct Loop {
    pub steps: i64,
    /// Largest |Δ log p| between logged and recomputed, nats.
    pub parity_max: Option<f64>,
    pub delta_ratio: Option<f64>,
    pub swaps: i64,
    pub swap_pause_ms_p50: Option<f64>,
    pub swap_pause_ms_max: Option<f64>,
}

pub async fn the_loop(pool: &PgPool, scope: &Scope) -> sqlx::Result<Loop> {
    let row = sqlx::query_file!("src/demo/loop.sql", scope.policy, scope.since)
        .fetch_one(pool)
        .await?;
    Ok(Loop {
        steps: row.steps,
        parity_max: row.parity_max,
        delta_ratio: row.delta_ratio,
        swaps: row.swaps,
        swap_pause_ms_p50: row.swap_pause_ms_p50,
        swap_pause_ms_max: row.swap_pause_ms_max,
    })
}

/// Root digests as committed, in hexadecimal, by serial.
pub async fn roots(pool: &PgPool, policy: &str, serials: &[i64]) -> sqlx::Result<BTreeMap<i64, String>> {
    let rows = sqlx::query_file!("src/demo/roots.sql", policy, serials)
        .fetch_all(pool)
        .await?;
    let hex = |root: &[u8]| root.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(rows.into_iter().map(|row| (row.serial, hex(&row.root))).collect())
}
