//! Read-only queries about a run, for the live view and the report. Each query is in the `.sql`
//! file of its name.

use std::collections::BTreeMap;

use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

/// The run that is asked about.
#[derive(Debug, Clone)]
pub struct Scope {
    pub policy: String,
    /// Only events from this moment on count.
    pub since: OffsetDateTime,
}

/// What the live view shows of the loop.
#[derive(Debug, Clone, Default)]
pub struct Live {
    pub state: LoopState,
    /// From feedback to serving, the median of the newest versions, seconds.
    pub feedback_to_serving: Option<f64>,
}

#[derive(Debug, Clone, Default)]
pub struct LoopState {
    /// Version that the learning alias serves.
    pub learner: Option<i64>,
    pub step: Option<i64>,
    /// Status of the realtime run, and its reason.
    pub status: Option<String>,
    pub reason: Option<String>,
    /// How far the tables are behind the log.
    pub lag_seconds: Option<f64>,
    /// Bytes of the last delta, as a fraction of its version's bytes.
    pub delta_ratio: Option<f64>,
    pub swap_pause_ms: Option<f64>,
}

impl LoopState {
    /// Why training does not run, e.g. `paused: the loss is not finite`.
    pub fn halted(&self) -> Option<String> {
        let status = self.status.as_ref().filter(|status| *status != "running")?;
        let reason = self.reason.as_ref().map(|reason| format!("{status}: {reason}"));
        Some(reason.unwrap_or_else(|| status.clone()))
    }
}

pub async fn live(pool: &PgPool, scope: &Scope) -> sqlx::Result<Live> {
    let state = sqlx::query_file_as!(LoopState, "src/queries/live.sql", scope.policy);
    let wait = sqlx::query_file_scalar!("src/queries/live_wait.sql", scope.policy, scope.since);
    Ok(Live {
        state: state.fetch_one(pool).await?,
        feedback_to_serving: wait.fetch_one(pool).await?,
    })
}

/// Generations whose disposition is not final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unsettled {
    pub open: i64,
    /// Of the learning arm.
    pub queued: i64,
}

pub async fn unsettled(pool: &PgPool, scope: &Scope) -> sqlx::Result<Unsettled> {
    let query = sqlx::query_file_as!(Unsettled, "src/queries/settled.sql", scope.policy, scope.since);
    query.fetch_one(pool).await
}

/// Every generation since the run began, by its disposition.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Ledger {
    #[serde(flatten)]
    pub counts: LedgerCounts,
    /// The dispositions add up to the generations, and none is missing.
    pub balanced: bool,
    /// Why generations were dropped or censored: `dropped: stale`, `censored: no_feedback`, …
    pub reasons: BTreeMap<String, i64>,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct LedgerCounts {
    pub generations: i64,
    pub open: i64,
    pub queued: i64,
    pub trained: i64,
    pub censored: i64,
    pub dropped: i64,
    pub held_out: i64,
    pub erased: i64,
    /// The server answered with these, but the tables do not have them.
    pub missing: i64,
    /// Trained by a step that started from another version than the one that sampled them.
    pub trained_stale: i64,
}

impl std::fmt::Display for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = &self.counts;
        write!(
            f,
            "ledger: {} generations = {} trained + {} held out + {} censored + {} dropped + {} queued + {} open + {} erased: {}",
            counts.generations,
            counts.trained,
            counts.held_out,
            counts.censored,
            counts.dropped,
            counts.queued,
            counts.open,
            counts.erased,
            if self.balanced { "balanced" } else { "NOT BALANCED" },
        )
    }
}

/// `answered`: generations that the demo got as answers.
pub async fn ledger(pool: &PgPool, scope: &Scope, answered: &[Uuid]) -> sqlx::Result<Ledger> {
    let query = sqlx::query_file_as!(
        LedgerCounts,
        "src/queries/ledger.sql",
        scope.policy,
        scope.since,
        answered
    );
    let counts = query.fetch_one(pool).await?;
    let query = sqlx::query_file!("src/queries/dropped.sql", scope.policy, scope.since);
    let reasons = query.fetch_all(pool).await?.into_iter();
    let sum = counts.open
        + counts.queued
        + counts.trained
        + counts.censored
        + counts.dropped
        + counts.held_out
        + counts.erased;
    Ok(Ledger {
        balanced: counts.generations == sum && counts.missing == 0,
        counts,
        reasons: reasons
            .map(|row| (format!("{}: {}", row.disposition, row.code), row.generations))
            .collect(),
    })
}

/// The run's episodes, as the tables have them.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Episodes {
    pub episodes: i64,
    pub turns: i64,
    /// Closed as one trajectory of all their turns.
    pub closed: i64,
    pub censored: i64,
    /// Of the learning arm.
    pub learner: i64,
    /// At least one turn was trained on.
    pub trained: i64,
    /// All turns were trained on.
    pub trained_whole: i64,
    /// Trained on in more than one step. Must be 0.
    pub divided: i64,
    pub turns_trained: i64,
    /// Turns that were dropped because their version was too old.
    pub turns_stale: i64,
}

pub async fn episodes(pool: &PgPool, scope: &Scope, surface: &str) -> sqlx::Result<Episodes> {
    let query = sqlx::query_file_as!(Episodes, "src/queries/sessions.sql", scope.policy, scope.since, surface);
    query.fetch_one(pool).await
}

/// From a developer's answer to the first token of a version that trained on it, seconds.
#[derive(Debug, Clone, Default, Serialize)]
pub struct FeedbackToServing {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
    /// Trained trajectories whose version has answered somebody. The quantiles are over these.
    #[serde(rename = "n")]
    pub served: i64,
    /// Trained trajectories whose version has not answered yet.
    pub not_served: i64,
}

pub async fn feedback_to_serving(pool: &PgPool, scope: &Scope) -> sqlx::Result<FeedbackToServing> {
    let query = sqlx::query_file_as!(
        FeedbackToServing,
        "src/queries/feedback_to_serving.sql",
        scope.policy,
        scope.since
    );
    query.fetch_one(pool).await
}

/// A part of the time from feedback to serving, seconds.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    pub name: String,
    pub p50: f64,
    pub p95: f64,
}

/// The parts of [`feedback_to_serving`], in order.
pub async fn feedback_to_serving_phases(pool: &PgPool, scope: &Scope) -> sqlx::Result<Vec<Phase>> {
    let query = sqlx::query_file_as!(
        Phase,
        "src/queries/feedback_to_serving_phases.sql",
        scope.policy,
        scope.since
    );
    query.fetch_all(pool).await
}

/// What the loop did during the run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LoopTotals {
    pub steps: i64,
    /// Largest |Δ log p| between a logged and a recomputed token over all steps of the run, nats.
    #[serde(rename = "parity_log_prob_difference_max")]
    pub parity_max: Option<f64>,
    /// Bytes of all deltas of the run, as a fraction of the bytes of their versions.
    pub delta_ratio: Option<f64>,
    pub swaps: i64,
    pub swap_pause_ms_p50: Option<f64>,
    pub swap_pause_ms_max: Option<f64>,
}

pub async fn loop_totals(pool: &PgPool, scope: &Scope) -> sqlx::Result<LoopTotals> {
    let query = sqlx::query_file_as!(LoopTotals, "src/queries/loop.sql", scope.policy, scope.since);
    query.fetch_one(pool).await
}

/// Content hashes that the trainer committed, in hexadecimal, by version.
pub async fn content_hashes(pool: &PgPool, policy: &str, versions: &[i64]) -> sqlx::Result<BTreeMap<i64, String>> {
    let query = sqlx::query_file!("src/queries/roots.sql", policy, versions);
    let rows = query.fetch_all(pool).await?.into_iter();
    let hex = |hash: &[u8]| hash.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(rows.map(|row| (row.serial, hex(&row.root))).collect())
}

/// What the tables contain of one arm in one period of the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Traffic {
    pub generations: i64,
    /// With a trajectory: the horizon has passed.
    pub closed: i64,
    /// Closed without a score.
    pub censored: i64,
    /// Dropped because too many steps had been made when they could be used.
    pub stale: i64,
    /// Sampled tokens per shown suggestion, the one that ends it included.
    pub tokens_mean: Option<f64>,
}

/// By period, then by arm. `began` is the first pause; `count` periods of `seconds` each.
pub async fn traffic(
    pool: &PgPool,
    scope: &Scope,
    began: OffsetDateTime,
    seconds: f64,
    count: u32,
) -> sqlx::Result<Vec<BTreeMap<String, Traffic>>> {
    let last = f64::from(count.saturating_sub(1));
    let query = sqlx::query_file!(
        "src/queries/traffic.sql",
        scope.policy,
        scope.since,
        began,
        seconds,
        last
    );
    let mut periods = vec![BTreeMap::new(); count as usize];
    for row in query.fetch_all(pool).await? {
        let traffic = Traffic {
            generations: row.generations,
            closed: row.closed,
            censored: row.censored,
            stale: row.stale,
            tokens_mean: row.tokens_mean,
        };
        if let Some(arms) = periods.get_mut(row.period as usize) {
            arms.insert(row.arm, traffic);
        }
    }
    Ok(periods)
}

/// One step of the realtime run. Entropy and KL are in nats a token.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    pub step: i64,
    pub version: i64,
    /// When it was committed, since the first pause.
    pub at_seconds: f64,
    /// That it trained on.
    pub trajectories: Option<i64>,
    pub entropy: Option<f64>,
    pub kl: Option<f64>,
    /// Fraction of the published values that changed.
    pub density: Option<f64>,
    /// Bytes of the delta, as a fraction of the version's bytes.
    pub delta_ratio: Option<f64>,
}

pub async fn steps(pool: &PgPool, scope: &Scope, began: OffsetDateTime) -> sqlx::Result<Vec<Step>> {
    let query = sqlx::query_file_as!(Step, "src/queries/steps.sql", scope.policy, scope.since, began);
    query.fetch_all(pool).await
}

/// A warning of the realtime run.
#[derive(Debug, Clone, Serialize)]
pub struct Alarm {
    /// Since the first pause.
    pub at_seconds: f64,
    pub message: String,
}

impl std::fmt::Display for Alarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.at_seconds.max(0.0) as u64;
        write!(
            f,
            "alarm after {:02}:{:02}: {}",
            seconds / 60,
            seconds % 60,
            self.message
        )
    }
}

pub async fn alarms(pool: &PgPool, scope: &Scope, began: OffsetDateTime) -> sqlx::Result<Vec<Alarm>> {
    let query = sqlx::query_file_as!(Alarm, "src/queries/alarms.sql", scope.policy, scope.since, began);
    query.fetch_all(pool).await
}
