//! Versions and lines. Read-only. Who is served by a version is in another API.

use super::{List, Shared, database, limit};
use axum::extract::State;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

/// A version as clients see it.
#[derive(Debug, Clone, Serialize)]
pub struct Version {
    pub serial: i64,
    /// Hex.
    pub root: String,
    pub parent: Option<i64>,
    pub line: String,
    pub branch: i32,
    pub run_id: Option<Uuid>,
    pub step: Option<i64>,
    pub manifest_key: String,
    pub delta_bytes: Option<i64>,
    pub image_bytes: i64,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// Which versions to list.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    pub line: Option<String>,
    pub limit: Option<i64>,
    /// The last serial of the previous page.
    pub after: Option<i64>,
}

pub(super) async fn list(
    State(shared): State<Shared>,
    Query(page): Query<Page>,
) -> Result<Json<List<Version>>, Problem> {
    let limit = limit(page.limit)?;
    let rows = newest(&shared.pool, &shared.policy, page, limit + 1)
        .await
        .map_err(database)?;
    Ok(Json(List::page(rows, limit)))
}

/// The newest versions.
pub async fn newest(executor: impl PgExecutor<'_>, policy: &str, page: Page, limit: i64) -> sqlx::Result<Vec<Version>> {
    sqlx::query_as!(
        Version,
        r#"
        select serial, encode(root, 'hex') as "root!", parent, line, branch, run_id, step, manifest_key, delta_bytes,
               image_bytes, created_at
        from version
        where policy = $1 and ($2::text is null or line = $2) and ($3::bigint is null or serial < $3)
        order by serial desc
        limit $4
        "#,
        policy,
        page.line,
        page.after,
        limit
    )
    .fetch_all(executor)
    .await
}

pub(super) async fn one(State(shared): State<Shared>, Path(serial): Path<i64>) -> Result<Json<Version>, Problem> {
    let row = read(&shared.pool, &shared.policy, serial).await.map_err(database)?;
    row.map(Json)
        .ok_or_else(|| Problem::not_found(format!("policy `{}` has no version {serial}", shared.policy)))
}

/// One version.
pub async fn read(executor: impl PgExecutor<'_>, policy: &str, serial: i64) -> sqlx::Result<Option<Version>> {
    sqlx::query_as!(
        Version,
        r#"
        select serial, encode(root, 'hex') as "root!", parent, line, branch, run_id, step, manifest_key, delta_bytes,
               image_bytes, created_at
        from version
        where policy = $1 and serial = $2
        "#,
        policy,
        serial
    )
    .fetch_optional(executor)
    .await
}

/// A line and its head.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    line: String,
    head: i64,
    /// Hex.
    root: String,
    branch: i32,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

pub(super) async fn lines(State(shared): State<Shared>) -> Result<Json<List<Line>>, Problem> {
    let data = sqlx::query_as!(
        Line,
        r#"
        select l.line, l.head, encode(v.root, 'hex') as "root!", l.branch, l.updated_at
        from line l
        join version v on v.policy = l.policy and v.serial = l.head
        where l.policy = $1
        order by l.updated_at desc
        "#,
        &*shared.policy
    )
    .fetch_all(&shared.pool)
    .await
    .map_err(database)?;
    Ok(Json(List { data, has_more: false }))
}
