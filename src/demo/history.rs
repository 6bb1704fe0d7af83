//! Read-only queries about the course of a run: the arms' traffic over time, each step, each swap. For the report's charts;
//! [`super::records`] asks for the totals. Each query is in the `.sql` file of its name.

use std::collections::BTreeMap;

use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;

use super::records::Scope;

/// What the tables say of one arm in one stretch of the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Traffic {
    pub generations: i64,
    /// With a trajectory: the horizon has passed.
    pub closed: i64,
    /// Closed without a score.
    pub censored: i64,
    /// Dropped because a newer version was the head when training could have had them.
    pub stale: i64,
    /// Sampled tokens per suggestion that was shown, the one that ends it included.
    pub tokens_mean: Option<f64>,
}

/// By stretch, then by arm. `began`: the first pause; `seconds`: length of a stretch, of which there are `count`.
pub async fn traffic(
    pool: &PgPool,
    scope: &Scope,
    began: OffsetDateTime,
    seconds: f64,
    count: u32,
) -> sqlx::Result<Vec<BTreeMap<String, Traffic>>> {
    let last = f64::from(count.saturating_sub(1));
    let query = sqlx::query_file!("src/demo/traffic.sql", scope.policy, scope.since, began, seconds, last);
    let mut stretches = vec![BTreeMap::new(); count as usize];
    for row in query.fetch_all(pool).await? {
        let traffic = Traffic {
            generations: row.generations,
            closed: row.closed,
            censored: row.censored,
            stale: row.stale,
            tokens_mean: row.tokens_mean,
        };
        if let Some(arms) = stretches.get_mut(row.stretch as usize) {
            arms.insert(row.arm, traffic);
        }
    }
    Ok(stretches)
}

/// One step of the realtime run. Entropy and KL in nats a token.
#[derive(Debug, Clone, Serialize)]
pub struct StepTaken {
    pub step: i64,
    pub version: i64,
    /// When it was committed, since the first pause.
    pub at_seconds: f64,
    pub entropy: Option<f64>,
    pub kl: Option<f64>,
    /// Published values that changed, of all.
    pub density: Option<f64>,
    /// Bytes of the delta, of the bytes of the version that it made.
    pub delta_ratio: Option<f64>,
}

pub async fn steps(pool: &PgPool, scope: &Scope, began: OffsetDateTime) -> sqlx::Result<Vec<StepTaken>> {
    sqlx::query_file_as!(StepTaken, "src/demo/steps.sql", scope.policy, scope.since, began)
        .fetch_all(pool)
        .await
}

/// One version becoming resident on one replica.
#[derive(Debug, Clone, Serialize)]
pub struct Swap {
    pub version: i64,
    /// Since the first pause.
    pub at_seconds: f64,
    pub pause_ms: f64,
}

pub async fn swaps(pool: &PgPool, scope: &Scope, began: OffsetDateTime) -> sqlx::Result<Vec<Swap>> {
    sqlx::query_file_as!(Swap, "src/demo/swaps.sql", scope.policy, scope.since, began)
        .fetch_all(pool)
        .await
}

/// What the run had to warn of.
#[derive(Debug, Clone, Serialize)]
pub struct Alarm {
    /// Since the first pause.
    pub at_seconds: f64,
    pub message: String,
}

impl Alarm {
    pub fn told(&self) -> String {
        let seconds = self.at_seconds.max(0.0) as u64;
        format!("alarm after {:02}:{:02}: {}", seconds / 60, seconds % 60, self.message)
    }
}

pub async fn alarms(pool: &PgPool, scope: &Scope, began: OffsetDateTime) -> sqlx::Result<Vec<Alarm>> {
    sqlx::query_file_as!(Alarm, "src/demo/alarms.sql", scope.policy, scope.since, began)
        .fetch_all(pool)
        .await
}
