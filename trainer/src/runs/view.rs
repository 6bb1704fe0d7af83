//! Reading runs: one, many, their events, their checkpoints.

use super::{Shared, database};
use axum::extract::{Path, Query, State};
use edge::auth::Principal;
use edge::json::Json;
use edge::problem::Problem;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

const PAGE_DEFAULT: i64 = 20;
const PAGE_MAX: i64 = 200;

/// A run as clients see it.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    pub id: Uuid,
    pub object: &'static str,
    pub kind: String,
    pub policy: String,
    pub line: String,
    pub status: String,
    /// Why it is paused, failed or cancelled.
    pub reason: Option<String>,
    /// What is wrong while it runs: the alarm that has begun and not ended.
    pub alarm: Option<String>,
    pub config: serde_json::Value,
    pub base_version: Option<i64>,
    /// Head of its line; absent until it has one.
    pub head: Option<i64>,
    pub steps_done: i64,
    /// Absent: until cancelled.
    pub steps_total: Option<i64>,
    /// What a person asked for and the executor has not done yet.
    pub requested: Option<String>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub finished_at: Option<OffsetDateTime>,
}

/// A page of things, newest first unless said.
#[derive(Debug, Clone, Serialize)]
pub struct List<T> {
    pub object: &'static str,
    pub data: Vec<T>,
    pub has_more: bool,
}

impl<T> List<T> {
    /// Of up to `limit + 1` rows, the page and whether there is more.
    pub(crate) fn page(mut data: Vec<T>, limit: i64) -> Self {
        let has_more = data.len() as i64 > limit;
        data.truncate(usize::try_from(limit).unwrap_or(0));
        List {
            object: "list",
            data,
            has_more,
        }
    }
}

/// Which page.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    limit: Option<i64>,
    /// The last id of the page before.
    after: Option<Uuid>,
    status: Option<String>,
    kind: Option<String>,
}

pub(crate) fn limit(asked: Option<i64>) -> Result<i64, Problem> {
    match asked.unwrap_or(PAGE_DEFAULT) {
        limit @ 1..=PAGE_MAX => Ok(limit),
        other => Err(Problem::bad_request(format!(
            "limit is {other}; 1 to {PAGE_MAX} are served"
        ))),
    }
}

/// One run of the policy, or a 404.
pub(super) async fn get(pool: &PgPool, policy: &str, id: Uuid) -> Result<Run, Problem> {
    let row = sqlx::query_as!(
        Row,
        r#"
        select r.id, r.kind, r.policy, r.line, r.status, r.reason, r.config, r.base_version, l.head as "head?",
               r.steps_done, r.steps_total, r.requested, r.created_at, r.started_at, r.finished_at,
               (select case e.data ->> 'state' when 'began' then e.message end
                from run_event e
                where e.run_id = r.id and e.data ? 'alarm'
                order by e.id desc
                limit 1) as alarm
        from run r
        left join line l on l.policy = r.policy and l.line = r.line
        where r.policy = $1 and r.id = $2
        "#,
        policy,
        id
    )
    .fetch_optional(pool)
    .await
    .map_err(database)?;
    row.map(Run::from)
        .ok_or_else(|| Problem::not_found(format!("policy `{policy}` has no run {id}")))
}

pub(super) async fn one(
    State(shared): State<Shared>,
    _: Principal,
    Path(id): Path<Uuid>,
) -> Result<Json<Run>, Problem> {
    Ok(Json(get(&shared.pool, &shared.policy, id).await?))
}

pub(super) async fn list(
    State(shared): State<Shared>,
    _: Principal,
    Query(page): Query<Page>,
) -> Result<Json<List<Run>>, Problem> {
    let limit = limit(page.limit)?;
    let rows = sqlx::query_as!(
        Row,
        r#"
        select r.id, r.kind, r.policy, r.line, r.status, r.reason, r.config, r.base_version, l.head as "head?",
               r.steps_done, r.steps_total, r.requested, r.created_at, r.started_at, r.finished_at,
               (select case e.data ->> 'state' when 'began' then e.message end
                from run_event e
                where e.run_id = r.id and e.data ? 'alarm'
                order by e.id desc
                limit 1) as alarm
        from run r
        left join line l on l.policy = r.policy and l.line = r.line
        where r.policy = $1
          and ($2::uuid is null or r.id < $2)
          and ($3::text is null or r.status = $3)
          and ($4::text is null or r.kind = $4)
        order by r.id desc
        limit $5
        "#,
        &*shared.policy,
        page.after,
        page.status,
        page.kind,
        limit + 1
    )
    .fetch_all(&shared.pool)
    .await
    .map_err(database)?;
    Ok(Json(List::page(rows.into_iter().map(Run::from).collect(), limit)))
}

/// What happened to a run, in words.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Event {
    id: Uuid,
    #[serde(with = "time::serde::rfc3339")]
    at: OffsetDateTime,
    level: String,
    message: String,
    data: serde_json::Value,
}

pub(super) async fn events(
    State(shared): State<Shared>,
    _: Principal,
    Path(id): Path<Uuid>,
    Query(page): Query<Page>,
) -> Result<Json<List<Event>>, Problem> {
    get(&shared.pool, &shared.policy, id).await?;
    let limit = limit(page.limit)?;
    let rows = sqlx::query_as!(
        Event,
        r#"
        select id, at, level, message, data from run_event
        where run_id = $1 and ($2::uuid is null or id < $2)
        order by id desc
        limit $3
        "#,
        id,
        page.after,
        limit + 1
    )
    .fetch_all(&shared.pool)
    .await
    .map_err(database)?;
    Ok(Json(List::page(rows, limit)))
}

/// A step of a run, and the version it made.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Checkpoint {
    step: i64,
    version: i64,
    root: String,
    metrics: serde_json::Value,
    #[serde(with = "time::serde::rfc3339")]
    committed_at: OffsetDateTime,
}

/// Which page of checkpoints.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepPage {
    limit: Option<i64>,
    /// The last step of the page before.
    after: Option<i64>,
}

pub(super) async fn checkpoints(
    State(shared): State<Shared>,
    _: Principal,
    Path(id): Path<Uuid>,
    Query(page): Query<StepPage>,
) -> Result<Json<List<Checkpoint>>, Problem> {
    get(&shared.pool, &shared.policy, id).await?;
    let limit = limit(page.limit)?;
    let rows = sqlx::query_as!(
        Checkpoint,
        r#"
        select s.step, s.version, encode(v.root, 'hex') as "root!", s.metrics, s.committed_at
        from step s
        join run r on r.id = s.run_id
        join version v on v.policy = r.policy and v.serial = s.version
        where s.run_id = $1 and ($2::bigint is null or s.step < $2)
        order by s.step desc
        limit $3
        "#,
        id,
        page.after,
        limit + 1
    )
    .fetch_all(&shared.pool)
    .await
    .map_err(database)?;
    Ok(Json(List::page(rows, limit)))
}

struct Row {
    id: Uuid,
    kind: String,
    policy: String,
    line: String,
    status: String,
    reason: Option<String>,
    config: serde_json::Value,
    base_version: Option<i64>,
    head: Option<i64>,
    steps_done: i64,
    steps_total: Option<i64>,
    requested: Option<String>,
    created_at: OffsetDateTime,
    started_at: Option<OffsetDateTime>,
    finished_at: Option<OffsetDateTime>,
    alarm: Option<String>,
}

impl From<Row> for Run {
    fn from(row: Row) -> Self {
        Run {
            id: row.id,
            object: "run",
            kind: row.kind,
            policy: row.policy,
            line: row.line,
            status: row.status,
            reason: row.reason,
            alarm: row.alarm,
            config: row.config,
            base_version: row.base_version,
            head: row.head,
            steps_done: row.steps_done,
            steps_total: row.steps_total,
            requested: row.requested,
            created_at: row.created_at,
            started_at: row.started_at,
            finished_at: row.finished_at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_knows_whether_there_is_more() {
        let page = List::page(vec![1, 2, 3], 2);
        assert_eq!((page.data, page.has_more), (vec![1, 2], true));
        assert!(!List::page(vec![1, 2], 2).has_more);
    }

    #[test]
    fn limits_outside_the_served_range_are_refused() {
        assert_eq!(limit(None).unwrap(), PAGE_DEFAULT);
        assert!(limit(Some(0)).is_err() && limit(Some(PAGE_MAX + 1)).is_err());
    }
}
