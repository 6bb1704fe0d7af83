//! Collects the report from what the demo saw and from the tables.

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{Latency, Parameters, RunReport, Staleness, SwapPause, TimelineEntry};
use crate::{
    POLL_EVERY,
    progress::Progress,
    queries::{self, Scope},
    stats::{self, FOLLOWING, LEARNING, Measure, Outcome},
};

const QUERY_ATTEMPTS: u32 = 10;
/// Periods of the timeline, and pauses in each on average if there are more than the least.
const PERIODS_MIN: u32 = 4;
const PERIODS_MAX: u32 = 20;
const PERIOD_PAUSES: u32 = 150;

/// The report of a run that began at `began` and took `seconds`.
pub async fn collect(
    pool: &PgPool,
    scope: &Scope,
    progress: Progress<Outcome>,
    parameters: Parameters,
    (began, seconds): (OffsetDateTime, f64),
    settled: bool,
) -> anyhow::Result<RunReport> {
    let Progress {
        outcomes,
        counts,
        interrupted,
    } = progress;
    let tau = parameters.tau;
    let ids = outcomes.iter().map(|outcome| outcome.generation_id).collect::<Vec<_>>();
    let versions_served = stats::versions_served(&outcomes);
    let versions = versions_served.iter().map(|served| served.version).collect::<Vec<_>>();
    let committed = patiently(|| queries::content_hashes(pool, &scope.policy, &versions)).await?;
    let totals = patiently(|| queries::loop_totals(pool, scope)).await?;
    let length = Duration::from_secs_f64(60.0 * parameters.minutes);
    let replayed_length = length.min(Duration::from_secs_f64(seconds));
    let timeline = timeline(pool, scope, began, &outcomes, replayed_length, tau).await?;
    let latencies = outcomes.iter().map(|outcome| 1e3 * outcome.latency.as_secs_f64());
    let latencies = latencies.collect::<Vec<_>>();
    Ok(RunReport {
        started_at: scope.since.format(&Rfc3339).context("format the start of the run")?,
        seconds,
        interrupted,
        arms: stats::arms(&outcomes, tau),
        difference: stats::difference(&outcomes, LEARNING, Measure::Reward, tau),
        difference_accepts_per_100: stats::difference(&outcomes, LEARNING, Measure::Accepts, tau),
        following_difference: stats::difference(&outcomes, FOLLOWING, Measure::Reward, tau),
        following_difference_accepts_per_100: stats::difference(&outcomes, FOLLOWING, Measure::Accepts, tau),
        thirds: stats::periods(&outcomes, length, 3, tau),
        content_hashes_agree: versions_served
            .iter()
            .all(|served| committed.get(&served.version) == Some(&served.root)),
        versions_served,
        feedback_to_serving_seconds: patiently(|| queries::feedback_to_serving(pool, scope)).await?,
        feedback_to_serving_phases: patiently(|| queries::feedback_to_serving_phases(pool, scope)).await?,
        swap_pause_ms: SwapPause {
            p50: totals.swap_pause_ms_p50,
            max: totals.swap_pause_ms_max,
            n: totals.swaps,
        },
        delta_ratio: totals.delta_ratio,
        steps: totals.steps,
        parity_log_prob_difference_max: totals.parity_max,
        ledger: patiently(|| queries::ledger(pool, scope, &ids)).await?,
        settled,
        completion_latency_ms: Latency {
            p50: stats::quantile(latencies.clone(), 0.5),
            p95: stats::quantile(latencies, 0.95),
        },
        parameters,
        counts,
        references: None,
        streams: None,
        staleness: Staleness::of(LEARNING, &timeline),
        timeline,
        steps_taken: patiently(|| queries::steps(pool, scope, began)).await?,
        alarms: patiently(|| queries::alarms(pool, scope, began)).await?,
    })
}

async fn timeline(
    pool: &PgPool,
    scope: &Scope,
    began: OffsetDateTime,
    outcomes: &[Outcome],
    length: Duration,
    tau: f64,
) -> anyhow::Result<Vec<TimelineEntry>> {
    let enough = u32::try_from(outcomes.len()).unwrap_or(u32::MAX) / PERIOD_PAUSES;
    let count = enough.clamp(PERIODS_MIN, PERIODS_MAX);
    let width = length.as_secs_f64() / f64::from(count);
    let traffic = patiently(|| queries::traffic(pool, scope, began, width, count)).await?;
    let periods = stats::periods(outcomes, length, count, tau).into_iter().zip(traffic);
    Ok(periods
        .map(|(period, traffic)| TimelineEntry { period, traffic })
        .collect())
}

/// Retries while the database is unavailable: a restart of it must not cost the run its report.
pub async fn patiently<T, F: Future<Output = sqlx::Result<T>>>(query: impl Fn() -> F) -> anyhow::Result<T> {
    for _ in 1..QUERY_ATTEMPTS {
        match query().await {
            Ok(value) => return Ok(value),
            Err(error) => tracing::warn!(%error, "the tables cannot be read now"),
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    query().await.context("read the report's figures from the tables")
}
