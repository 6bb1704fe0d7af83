//! Takes all figures of a run together, from what the demo saw and from the tables.

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    POLL_EVERY, history,
    records::{self, Scope},
    replay::Replayed,
    report::{Latency, Parameters, Report, Staleness, Stretch, SwapPause, Third},
    tally::{self, Measure, Outcome},
};

const QUERY_ATTEMPTS: u32 = 10;
/// Stretches of the run that the report's charts have, and pauses that each has on average if there are more than the least.
const STRETCHES_MIN: u32 = 4;
const STRETCHES_MAX: u32 = 20;
const STRETCH_PAUSES: u32 = 150;
/// Groups of versions that the report has at most, and answering developers that each has at least.
const VERSION_GROUPS_MAX: usize = 12;
const VERSION_GROUP_MIN: usize = 50;

/// The report of a run that began at `began` and took `seconds`.
pub async fn report(
    pool: &PgPool,
    scope: &Scope,
    replayed: Replayed,
    parameters: Parameters,
    (began, seconds): (OffsetDateTime, f64),
    settled: bool,
) -> anyhow::Result<Report> {
    let Replayed {
        outcomes,
        counts,
        interrupted,
    } = replayed;
    let tau = parameters.tau;
    let ids = outcomes.iter().map(|outcome| outcome.generation_id).collect::<Vec<_>>();
    let scored = outcomes
        .iter()
        .map(|o| (o.generation_id, o.arm.clone(), o.recorded_reward(tau)))
        .collect::<Vec<_>>();
    let versions_served = tally::versions_served(&outcomes);
    let serials = versions_served.iter().map(|served| served.version).collect::<Vec<_>>();
    let roots = patiently(|| records::roots(pool, &scope.policy, &serials)).await?;
    let the_loop = patiently(|| records::the_loop(pool, scope)).await?;
    let length = Duration::from_secs_f64(60.0 * parameters.minutes);
    let timeline = timeline(
        pool,
        scope,
        began,
        &outcomes,
        length.min(Duration::from_secs_f64(seconds)),
        tau,
    )
    .await?;
    let answering = outcomes
        .iter()
        .filter(|o| o.answers && o.arm == tally::LEARNING)
        .count();
    let group = answering.div_ceil(VERSION_GROUPS_MAX).max(VERSION_GROUP_MIN);
    let by_version = tally::by_version(&outcomes, tally::LEARNING, group, tau);
    let latencies = outcomes
        .iter()
        .map(|outcome| 1e3 * outcome.latency.as_secs_f64())
        .collect::<Vec<_>>();
    Ok(Report {
        started_at: scope.since.format(&Rfc3339).context("format the start of the run")?,
        seconds,
        interrupted,
        arms: tally::arms(outcomes.iter(), tau),
        difference: tally::difference(&outcomes, Measure::Reward, tau),
        difference_accepts_per_100: tally::difference(&outcomes, Measure::Accepts, tau),
        thirds: tally::thirds(outcomes, length)
            .iter()
            .map(|third| Third {
                arms: tally::arms(third.iter(), tau),
                difference: tally::difference(third, Measure::Reward, tau),
            })
            .collect(),
        roots_agree: versions_served
            .iter()
            .all(|served| roots.get(&served.version) == Some(&served.root)),
        versions_served,
        feedback_to_serving_seconds: patiently(|| records::feedback_to_serving(pool, scope)).await?,
        feedback_to_serving_phases: patiently(|| records::feedback_to_serving_phases(pool, scope)).await?,
        swap_pause_ms: SwapPause {
            p50: the_loop.swap_pause_ms_p50,
            max: the_loop.swap_pause_ms_max,
            n: the_loop.swaps,
        },
        delta_ratio: the_loop.delta_ratio,
        steps: the_loop.steps,
        parity_log_prob_difference_max: the_loop.parity_max,
        ledger: patiently(|| records::ledger(pool, scope, &ids)).await?,
        settled,
        trajectories: patiently(|| records::trajectories(pool, &scored)).await?,
        completion_latency_ms: Latency {
            p50: tally::quantile(latencies.clone(), 0.5),
            p95: tally::quantile(latencies, 0.95),
        },
        parameters,
        counts,
        headroom: None,
        staleness: Staleness::of(tally::LEARNING, &timeline),
        timeline,
        by_version,
        steps_taken: patiently(|| history::steps(pool, scope, began)).await?,
        swaps: patiently(|| history::swaps(pool, scope, began)).await?,
        alarms: patiently(|| history::alarms(pool, scope, began)).await?,
    })
}

/// The run in stretches: the demo's own figures of each, beside those of the tables.
async fn timeline(
    pool: &PgPool,
    scope: &Scope,
    began: OffsetDateTime,
    outcomes: &[Outcome],
    length: Duration,
    tau: f64,
) -> anyhow::Result<Vec<Stretch>> {
    let enough = u32::try_from(outcomes.len()).unwrap_or(u32::MAX) / STRETCH_PAUSES;
    let count = enough.clamp(STRETCHES_MIN, STRETCHES_MAX);
    let width = length.as_secs_f64() / f64::from(count);
    let traffic = patiently(|| history::traffic(pool, scope, began, width, count)).await?;
    let stretches = tally::timeline(outcomes, length, count, tau).into_iter().zip(traffic);
    Ok(stretches
        .map(|(stretch, traffic)| Stretch {
            from_seconds: stretch.from.as_secs_f64(),
            until_seconds: stretch.until.as_secs_f64(),
            arms: stretch.arms,
            difference: stretch.difference,
            traffic,
        })
        .collect())
}

/// Asks again while the database is away: a run must not lose its report to a restart of it.
async fn patiently<T, F: Future<Output = sqlx::Result<T>>>(query: impl Fn() -> F) -> anyhow::Result<T> {
    for _ in 1..QUERY_ATTEMPTS {
        match query().await {
            Ok(value) => return Ok(value),
            Err(error) => tracing::warn!(%error, "the tables cannot be read just now"),
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    query().await.context("take the report's figures from the tables")
}
