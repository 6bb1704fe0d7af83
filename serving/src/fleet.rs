//! The fleet: the latest report of each replica, and how long each part of a swap took. This API
//! stores and shows them; it neither routes requests nor restarts replicas. The replica's side is in
//! `reporter`.
//!
//! It is the fleet of one policy: reports of replicas of other policies are refused, and not shown.
//!
//! A replica belongs to the key that reports for it first, and to those that replace this key by
//! rotation, until all of them are revoked or expired. A key that was made for the replica
//! (`api_key.replica`) takes it over. Admins may report for every replica.

mod reporter;

pub use reporter::Reporter;

use axum::extract::State;
use axum::http::StatusCode;
use edge::Problem;
use edge::auth::{Principal, Scope};
use edge::database::{page_limit, unavailable};
use edge::json::Json;
use edge::path::Path;
use edge::query::Query;
use edge::routes::{Routes, get, post};
use serde::{Deserialize, Serialize};
use sqlx::{PgExecutor, PgPool};
use std::sync::Arc;
use time::OffsetDateTime;
use uuid::Uuid;

/// Largest page of `GET /v1/swaps`.
const PAGE_MAX: i64 = 1000;

/// A replica's report: `POST /v1/replicas/{id}`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub cluster: String,
    pub policy: String,
    /// Base address of its completions API.
    pub address: String,
    /// Epoch of the assignment in force; 0 if it has none yet.
    pub epoch: i64,
    pub resident: Vec<ReportedVersion>,
    pub ready: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportedVersion {
    pub version: i64,
    /// Content hash.
    pub root: String,
    /// Aliases that name it. If empty, only requests that began on it still use it.
    pub aliases: Vec<String>,
}

/// One version that a replica loaded: `POST /v1/swaps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swap {
    /// Set by the database; ignored in requests.
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    pub id: Option<Uuid>,
    pub replica: String,
    pub policy: String,
    pub version: i64,
    pub epoch: i64,
    /// Downloading.
    pub fetch_ms: f64,
    /// Decoding the delta and hashing the result.
    pub verify_ms: f64,
    /// Building the model beside the serving one.
    pub stage_ms: f64,
    /// How long the engine paused.
    pub pause_ms: f64,
    /// When users were first routed to it. Default: when the request arrives.
    #[serde(with = "time::serde::rfc3339", default = "OffsetDateTime::now_utc")]
    pub at: OffsetDateTime,
}

/// What the handlers share.
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    pub pool: PgPool,
    pub policy: Arc<str>,
}

pub fn routes(pool: PgPool, policy: &str) -> Routes {
    Routes::new()
        .route(Scope::Read, "/v1/replicas", "List replicas", get(list_replicas))
        .route(
            Scope::Replica,
            "/v1/replicas/{id}",
            "Report as a replica",
            post(post_report),
        )
        .route(Scope::Read, "/v1/swaps", "List swaps", get(list_swaps))
        .route(Scope::Replica, "/v1/swaps", "Report a swap", post(post_swap))
        .with_state(Fleet::new(pool, policy))
}

pub(crate) fn not_owned(id: &str) -> Problem {
    Problem::forbidden(format!(
        "another key reports for the replica {id}: set serve.replica to a name of its own, or make a key for it with \
         `springtide key create --scope replica --replica {id}`"
    ))
}

/// What `replica.owner` holds. Admins own nothing.
pub(crate) fn owner(principal: &Principal) -> Option<Uuid> {
    let key = principal.key.filter(|_| !is_admin(principal));
    key.map(|key| key.lineage)
}

pub(crate) fn is_admin(principal: &Principal) -> bool {
    principal.scopes.allow(Scope::Admin)
}

/// From whoever reported for it before.
fn may_take_over(principal: &Principal) -> bool {
    is_admin(principal) || principal.replica.is_some()
}

impl Fleet {
    pub fn new(pool: PgPool, policy: &str) -> Self {
        let policy = policy.into();
        Fleet { pool, policy }
    }

    /// Fails if a report is about another policy.
    pub fn check_policy(&self, reported: &str) -> Result<(), Problem> {
        match reported == &*self.policy {
            true => Ok(()),
            false => Err(Problem::bad_request(format!(
                "the report is about the policy {reported}, but this control role looks after {}: set the replica's \
                 policy.name or client.control",
                self.policy
            ))),
        }
    }
}

/// Fails if the key is for another replica.
pub(crate) fn check_replica(principal: &Principal, id: &str) -> Result<(), Problem> {
    match &principal.replica {
        Some(only) if only != id => Err(Problem::forbidden(format!(
            "the key may report for the replica {only} only, not for {id}"
        ))),
        _ => Ok(()),
    }
}

async fn post_report(
    State(fleet): State<Fleet>,
    principal: Principal,
    Path(id): Path<String>,
    Json(report): Json<Report>,
) -> Result<StatusCode, Problem> {
    check_replica(&principal, &id)?;
    fleet.check_policy(&report.policy)?;
    let resident = serde_json::to_value(&report.resident).map_err(Problem::internal)?;
    let stored = sqlx::query!(
        "insert into replica (id, cluster, policy, address, epoch, resident, ready, reported_at, owner)
         values ($1, $2, $3, $4, $5, $6, $7, now(), $8)
         on conflict (id) do update set cluster = excluded.cluster, policy = excluded.policy,
             address = excluded.address, epoch = excluded.epoch, resident = excluded.resident,
             ready = excluded.ready, reported_at = excluded.reported_at,
             owner = coalesce(excluded.owner, replica.owner)
         -- nobody takes the name of another tenant's replica
         where (replica.policy = excluded.policy
                or (select p.tenant_id from policy p where p.name = replica.policy)
                   is not distinct from (select p.tenant_id from policy p where p.name = excluded.policy))
           and ($9 or replica.owner is null or replica.owner = excluded.owner
                -- a holder of the provider's tokens has no row, and is in force
                or exists (select from api_key k where coalesce(k.lineage, k.id) = replica.owner)
                   and not exists (select from api_key k
                                   where coalesce(k.lineage, k.id) = replica.owner and k.revoked_at is null
                                     and (k.expires_at is null or k.expires_at > now())))",
        id,
        report.cluster,
        report.policy,
        report.address,
        report.epoch,
        resident,
        report.ready,
        owner(&principal),
        may_take_over(&principal)
    )
    .execute(&fleet.pool)
    .await
    .map_err(unavailable)?;
    if stored.rows_affected() == 0 {
        return Err(not_owned(&id));
    }
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Replicas {
    pub replicas: Vec<Replica>,
}

/// What a replica last said of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Replica {
    pub id: String,
    pub cluster: String,
    pub policy: String,
    pub address: String,
    pub epoch: i64,
    /// As [`ReportedVersion`] says.
    pub resident: serde_json::Value,
    pub ready: bool,
    #[serde(with = "time::serde::rfc3339")]
    pub reported_at: OffsetDateTime,
    /// Whether the last report is so old that the other fields may be out of date.
    pub silent: bool,
}

async fn list_replicas(State(fleet): State<Fleet>) -> Result<Json<Replicas>, Problem> {
    let replicas = replicas(&fleet.pool, &fleet.policy).await.map_err(unavailable)?;
    Ok(Json(Replicas { replicas }))
}

/// The replicas of a policy.
pub async fn replicas(executor: impl PgExecutor<'_>, policy: &str) -> sqlx::Result<Vec<Replica>> {
    sqlx::query_as!(
        Replica,
        r#"select id, cluster, policy, address, epoch, resident, ready, reported_at,
                  reported_at < now() - make_interval(secs => $1) as "silent!"
           from replica where policy = $2 order by id"#,
        edge::REPLICA_SILENT_SECONDS,
        policy
    )
    .fetch_all(executor)
    .await
}

async fn post_swap(
    State(fleet): State<Fleet>,
    principal: Principal,
    Json(swap): Json<Swap>,
) -> Result<StatusCode, Problem> {
    check_replica(&principal, &swap.replica)?;
    fleet.check_policy(&swap.policy)?;
    let stored = sqlx::query!(
        "insert into swap (replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms, at)
         select $1, $2, $3, $4, $5, $6, $7, $8, $9
         where $11 or exists (select from replica r where r.id = $1 and r.owner = $10)",
        swap.replica,
        swap.policy,
        swap.version,
        swap.epoch,
        swap.fetch_ms,
        swap.verify_ms,
        swap.stage_ms,
        swap.pause_ms,
        swap.at,
        owner(&principal),
        is_admin(&principal)
    )
    .execute(&fleet.pool)
    .await
    .map_err(unavailable)?;
    if stored.rows_affected() == 0 {
        return Err(not_owned(&swap.replica));
    }
    Ok(StatusCode::CREATED)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SwapQuery {
    replica: Option<String>,
    limit: Option<i64>,
}

#[derive(Debug, Serialize)]
struct Swaps {
    swaps: Vec<Swap>,
}

async fn list_swaps(State(fleet): State<Fleet>, Query(query): Query<SwapQuery>) -> Result<Json<Swaps>, Problem> {
    let limit = page_limit(query.limit, 100, PAGE_MAX)?;
    let swaps = swaps(&fleet.pool, &fleet.policy, query.replica.as_deref(), limit).await;
    swaps.map(|swaps| Json(Swaps { swaps })).map_err(unavailable)
}

/// The newest swaps, of all replicas of the policy or of one.
pub async fn swaps(
    executor: impl PgExecutor<'_>,
    policy: &str,
    replica: Option<&str>,
    limit: i64,
) -> sqlx::Result<Vec<Swap>> {
    sqlx::query_as!(
        Swap,
        "select id, replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms, at
         from swap where ($1::text is null or replica = $1) and policy = $3
         order by id desc limit $2",
        replica,
        limit,
        policy
    )
    .fetch_all(executor)
    .await
}
