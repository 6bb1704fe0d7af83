//! The fleet: what each replica last said of itself, and where the time of each swap went. It only writes down and shows;
//! nobody is routed or restarted from here.

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use edge::Problem;
use edge::auth::{Principal, Role};
use edge::json::Json;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

/// A replica that said nothing for this long is shown as silent.
const SILENT_SECONDS: i64 = 10;
/// Largest page of `GET /v1/swaps`.
const PAGE_MAX: i64 = 1000;

/// What a replica says of itself: `POST /v1/replicas/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub cluster: String,
    pub policy: String,
    /// Where it answers.
    pub address: String,
    /// The assignment it has applied; 0: none yet.
    pub epoch: i64,
    pub resident: Vec<ResidentReport>,
    pub ready: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResidentReport {
    pub version: i64,
    pub root: String,
    /// Aliases that name it; empty: its last requests are ending.
    pub aliases: Vec<String>,
}

/// One version that became resident: `POST /v1/swaps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swap {
    pub replica: String,
    pub policy: String,
    pub version: i64,
    pub epoch: i64,
    pub fetch_ms: f64,
    /// Decode the delta, digest the result.
    pub verify_ms: f64,
    /// Build the network beside the serving one.
    pub stage_ms: f64,
    /// The engine did nothing else for this long.
    pub pause_ms: f64,
    /// Since when users are routed to it; when this is heard, where a replica does not say.
    #[serde(with = "time::serde::rfc3339", default = "OffsetDateTime::now_utc")]
    pub at: OffsetDateTime,
}

/// The routes; the caller puts them behind `edge::auth`.
pub fn router(pool: PgPool) -> Router {
    Router::new()
        .route("/v1/replicas", get(replicas))
        .route("/v1/replicas/{id}", post(report))
        .route("/v1/swaps", get(swaps).post(swap))
        .with_state(pool)
}

async fn report(
    State(pool): State<PgPool>,
    principal: Principal,
    Path(id): Path<String>,
    Json(report): Json<Report>,
) -> Result<StatusCode, Problem> {
    principal.require(&[Role::Serving])?;
    let resident = serde_json::to_value(&report.resident).map_err(Problem::internal)?;
    sqlx::query!(
        "insert into replica (id, cluster, policy, address, epoch, resident, ready, reported_at)
         values ($1, $2, $3, $4, $5, $6, $7, now())
         on conflict (id) do update set cluster = excluded.cluster, policy = excluded.policy,
             address = excluded.address, epoch = excluded.epoch, resident = excluded.resident,
             ready = excluded.ready, reported_at = excluded.reported_at",
        id,
        report.cluster,
        report.policy,
        report.address,
        report.epoch,
        resident,
        report.ready
    )
    .execute(&pool)
    .await
    .map_err(unavailable)?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Serialize)]
struct Replicas {
    replicas: Vec<ReplicaView>,
}

#[derive(Debug, Serialize)]
struct ReplicaView {
    id: String,
    #[serde(flatten)]
    report: Report,
    #[serde(with = "time::serde::rfc3339")]
    reported_at: OffsetDateTime,
    /// Said nothing lately; what it said may no longer hold.
    silent: bool,
}

async fn replicas(State(pool): State<PgPool>, principal: Principal) -> Result<Json<Replicas>, Problem> {
    principal.require(&[Role::Serving, Role::Research, Role::Release])?;
    let rows = sqlx::query!(
        r#"select id, cluster, policy, address, epoch, resident, ready, reported_at,
                  reported_at < now() - make_interval(secs => $1) as "silent!"
           from replica order by id"#,
        SILENT_SECONDS as f64
    )
    .fetch_all(&pool)
    .await
    .map_err(unavailable)?;
    let replicas = rows
        .into_iter()
        .map(|row| {
            let resident = serde_json::from_value(row.resident).map_err(Problem::internal)?;
            Ok(ReplicaView {
                id: row.id,
                report: Report {
                    cluster: row.cluster,
                    policy: row.policy,
                    address: row.address,
                    epoch: row.epoch,
                    resident,
                    ready: row.ready,
                },
                reported_at: row.reported_at,
                silent: row.silent,
            })
        })
        .collect::<Result<_, Problem>>()?;
    Ok(Json(Replicas { replicas }))
}

async fn swap(State(pool): State<PgPool>, principal: Principal, Json(swap): Json<Swap>) -> Result<StatusCode, Problem> {
    principal.require(&[Role::Serving])?;
    sqlx::query!(
        "insert into swap (replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms, at)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        swap.replica,
        swap.policy,
        swap.version,
        swap.epoch,
        swap.fetch_ms,
        swap.verify_ms,
        swap.stage_ms,
        swap.pause_ms,
        swap.at
    )
    .execute(&pool)
    .await
    .map_err(unavailable)?;
    Ok(StatusCode::CREATED)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    replica: Option<String>,
    #[serde(default = "default_limit")]
    limit: i64,
}

fn default_limit() -> i64 {
    100
}

#[derive(Debug, Serialize)]
struct Swaps {
    swaps: Vec<SwapView>,
}

#[derive(Debug, Serialize)]
struct SwapView {
    id: Uuid,
    #[serde(flatten)]
    swap: Swap,
}

async fn swaps(
    State(pool): State<PgPool>,
    principal: Principal,
    Query(page): Query<Page>,
) -> Result<Json<Swaps>, Problem> {
    principal.require(&[Role::Serving, Role::Research, Role::Release])?;
    if !(1..=PAGE_MAX).contains(&page.limit) {
        return Err(Problem::bad_request(format!(
            "limit is {}; give 1 to {PAGE_MAX}",
            page.limit
        )));
    }
    let rows = sqlx::query!(
        "select id, replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms, at
         from swap where $1::text is null or replica = $1
         order by id desc limit $2",
        page.replica,
        page.limit
    )
    .fetch_all(&pool)
    .await
    .map_err(unavailable)?;
    let swaps = rows
        .into_iter()
        .map(|row| SwapView {
            id: row.id,
            swap: Swap {
                replica: row.replica,
                policy: row.policy,
                version: row.version,
                epoch: row.epoch,
                fetch_ms: row.fetch_ms,
                verify_ms: row.verify_ms,
                stage_ms: row.stage_ms,
                pause_ms: row.pause_ms,
                at: row.at,
            },
        })
        .collect();
    Ok(Json(Swaps { swaps }))
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unavailable(error: sqlx::Error) -> Problem {
    tracing::warn!(error = %error, "fleet API could not reach the database");
    Problem::unavailable("the database does not answer", 2)
}
