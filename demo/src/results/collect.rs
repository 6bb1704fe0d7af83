//! Collects the report from what the demo saw and from the tables.

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::OffsetDateTime;

use super::{Parameters, RunReport, Staleness, TimelineEntry};
use crate::{
    POLL_EVERY,
    queries::{self, Scope},
    stage::{Replayed, Stage},
    stats::{self, FOLLOWING, LEARNING, Measure, Outcome},
};

const QUERY_ATTEMPTS: u32 = 10;
/// Periods of the timeline, and pauses in each on average if there are more than the least.
const PERIODS_MIN: u32 = 4;
const PERIODS_MAX: u32 = 20;
const PERIOD_PAUSES: u32 = 150;

/// The report of a run.
pub async fn collect(
    stage: &Stage,
    replayed: Replayed<Outcome>,
    parameters: Parameters,
    settled: bool,
) -> anyhow::Result<RunReport> {
    let (pool, scope, tau, length) = (&stage.pool, &stage.scope, parameters.tau, stage.length());
    let outcomes = &replayed.progress.outcomes;
    let answered = outcomes.iter().map(|outcome| (outcome.generation_id, outcome.latency));
    let versions_served = stats::versions_served(outcomes);
    let versions = versions_served.iter().map(|served| served.version).collect::<Vec<_>>();
    let committed = patiently(|| queries::content_hashes(pool, &scope.policy, &versions)).await?;
    let replayed_length = length.min(Duration::from_secs_f64(replayed.seconds));
    let timeline = timeline(pool, scope, replayed.began, outcomes, replayed_length, tau).await?;
    let difference = |arm, measure| stats::difference(outcomes, arm, measure, tau);
    Ok(RunReport {
        arms: stats::arms(outcomes, tau),
        difference: difference(LEARNING, Measure::Reward),
        difference_accepts_per_100: difference(LEARNING, Measure::Accepts),
        following_difference: difference(FOLLOWING, Measure::Reward),
        following_difference_accepts_per_100: difference(FOLLOWING, Measure::Accepts),
        thirds: stats::periods(outcomes, length, 3, tau),
        content_hashes_agree: versions_served
            .iter()
            .all(|served| committed.get(&served.version) == Some(&served.root)),
        versions_served,
        feedback_to_serving_phases: patiently(|| queries::feedback_to_serving_phases(pool, scope)).await?,
        facts: stage.facts(&replayed, settled, answered).await?,
        parameters,
        references: None,
        staleness: Staleness::of(LEARNING, &timeline),
        timeline,
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
