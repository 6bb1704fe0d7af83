//! `GET /v1/tide` and `GET /v1/ledger/cost`.

use crate::fleet::Fleet;
use axum::extract::State;
use edge::Problem;
use edge::database::unavailable;
use edge::json::Json;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use time::{Date, OffsetDateTime};
use uuid::Uuid;

const HOURS_DEFAULT: i32 = 24;
const HOURS_MAX: i32 = 24 * 366;
const DAYS_DEFAULT: i32 = 7;
const DAYS_MAX: i32 = 366;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TideQuery {
    hours: Option<i32>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Tide {
    /// The hours that the sums are over.
    pub hours: i32,
    pub engines: Vec<EngineView>,
    pub clusters: Vec<ClusterView>,
}

/// One engine of a replica.
#[derive(Debug, Serialize, Deserialize)]
pub struct EngineView {
    pub replica: String,
    /// `None`: the replica has not reported to the fleet.
    pub cluster: Option<String>,
    pub engine: i16,
    pub slots: i32,
    /// The last decision, and what decided. A limit of null: no limit.
    pub slot_limit: Option<i32>,
    pub whole: bool,
    pub why: Option<String>,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    /// Of the last minute: the slots that production was expected to need at most, and what it needed.
    pub expected: Option<f64>,
    pub needed: i32,
    /// Mean distance of the two over the hours, in slots.
    pub forecast_error: Option<f64>,
    pub production_slot_seconds: f64,
    pub idle_slot_seconds: f64,
    pub lendable_slot_seconds: f64,
    pub harvested_slot_seconds: f64,
    pub taken_back: i64,
    pub taking_back_ms_max: f64,
    /// Means of what users felt without rollouts in the same passes, and beside some, in milliseconds.
    pub first_token_ms_alone: Option<f64>,
    pub first_token_ms_beside: Option<f64>,
    pub token_ms_alone: Option<f64>,
    pub token_ms_beside: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ClusterView {
    pub cluster: Option<String>,
    pub idle_slot_seconds: f64,
    pub harvested_slot_seconds: f64,
}

pub(super) async fn tide(State(fleet): State<Fleet>, Query(query): Query<TideQuery>) -> Result<Json<Tide>, Problem> {
    let hours = within("hours", query.hours, HOURS_DEFAULT, HOURS_MAX)?;
    let engines = sqlx::query_file_as!(EngineView, "src/tide/http/engines.sql", &*fleet.policy, hours)
        .fetch_all(&fleet.pool)
        .await
        .map_err(unavailable)?;
    let clusters = clusters(&engines);
    Ok(Json(Tide {
        hours,
        engines,
        clusters,
    }))
}

fn clusters(engines: &[EngineView]) -> Vec<ClusterView> {
    let mut clusters: Vec<ClusterView> = Vec::new();
    for engine in engines {
        let (idle, harvested) = (engine.idle_slot_seconds, engine.harvested_slot_seconds);
        match clusters.iter_mut().find(|one| one.cluster == engine.cluster) {
            Some(one) => {
                one.idle_slot_seconds += idle;
                one.harvested_slot_seconds += harvested;
            }
            None => clusters.push(ClusterView {
                cluster: engine.cluster.clone(),
                idle_slot_seconds: idle,
                harvested_slot_seconds: harvested,
            }),
        }
    }
    clusters
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostQuery {
    days: Option<i32>,
    run: Option<Uuid>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Costs {
    /// By day, newest first, then by work and run.
    pub costs: Vec<Cost>,
}

/// What one kind of work used on one day (UTC), over all engines of the policy.
#[derive(Debug, Serialize, Deserialize)]
pub struct Cost {
    #[serde(with = "crate::tide::day")]
    pub day: Date,
    /// `production`, `rollout` or `evaluation`.
    pub work: String,
    pub run: Option<Uuid>,
    /// Tokens that were sampled and kept, and tokens of prompts.
    pub sampled: i64,
    pub read: i64,
    /// Waste: tokens that were read again after a slot was taken back, and sampled for nothing.
    pub read_again: i64,
    pub thrown_away: i64,
    pub slot_seconds: f64,
    pub engine_seconds: f64,
}

pub(super) async fn cost(State(fleet): State<Fleet>, Query(query): Query<CostQuery>) -> Result<Json<Costs>, Problem> {
    let days = within("days", query.days, DAYS_DEFAULT, DAYS_MAX)?;
    let costs = sqlx::query_as!(
        Cost,
        r#"select day, work, run_id as run, sum(sampled)::bigint as "sampled!", sum(read)::bigint as "read!",
                  sum(read_again)::bigint as "read_again!", sum(thrown_away)::bigint as "thrown_away!",
                  sum(slot_seconds) as "slot_seconds!", sum(engine_seconds) as "engine_seconds!"
           from engine_use
           where policy = $1 and day > (now() at time zone 'utc')::date - $2::int and ($3::uuid is null or run_id = $3)
           group by day, work, run_id order by day desc, work, run_id"#,
        &*fleet.policy,
        days,
        query.run
    )
    .fetch_all(&fleet.pool)
    .await
    .map_err(unavailable)?;
    Ok(Json(Costs { costs }))
}

fn within(field: &str, given: Option<i32>, default: i32, max: i32) -> Result<i32, Problem> {
    match given.unwrap_or(default) {
        value if (1..=max).contains(&value) => Ok(value),
        value => Err(Problem::bad_request(format!("{field} is {value}; give 1 to {max}"))),
    }
}
