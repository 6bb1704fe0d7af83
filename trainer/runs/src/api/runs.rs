//! Reading runs: one, many, their events, their steps.

use super::{List, Shared, database, limit};
use axum::extract::State;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use serde::{Deserialize, Serialize};
use sqlx::{PgExecutor, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

/// A run as clients see it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "object", rename = "run")]
pub struct Run {
    pub id: Uuid,
    pub kind: String,
    pub policy: String,
    pub line: String,
    pub status: String,
    /// Why it is paused, failed or cancelled.
    pub reason: Option<String>,
    /// The alarms that have begun and not ended.
    pub alarm: Option<String>,
    pub config: serde_json::Value,
    pub base_version: Option<i64>,
    /// Head of its line; absent until the line exists.
    pub head: Option<i64>,
    pub steps_done: i64,
    /// Absent: runs until it is canceled.
    pub steps_total: Option<i64>,
    /// A person's pending request to the executor.
    pub requested: Option<String>,
    /// The run of which it is the next occurrence.
    pub recurs_from: Option<Uuid>,
    /// What an evaluation measured, or an export wrote (without where the file lies); absent until
    /// the run has succeeded.
    pub result: Option<serde_json::Value>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub finished_at: Option<OffsetDateTime>,
}

/// Who waited for whom in the newest steps of a run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Idle {
    steps: i64,
    /// From each commit to the next one.
    seconds: f64,
    /// The trainer had nothing to compute: no trajectory had come, or nobody had leased the full cohort.
    trainer_seconds: f64,
    /// The cohort was full and the version not published. Rollouts of a run with `staleness_max` 0 wait so long.
    rollouts_seconds: f64,
}

/// A run, and what only one of them is asked for.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Shown {
    #[serde(flatten)]
    run: Run,
    idle: Idle,
}

/// Which runs to list.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    /// This one alone.
    #[serde(skip)]
    id: Option<Uuid>,
    limit: Option<i64>,
    /// The last id of the previous page.
    after: Option<Uuid>,
    status: Option<String>,
    kind: Option<String>,
}

/// One run of the policy, or a 404.
pub async fn get(pool: &PgPool, policy: &str, id: Uuid) -> Result<Run, Problem> {
    let page = Page {
        id: Some(id),
        ..Page::default()
    };
    let row = newest(pool, policy, page, 1).await.map_err(database)?.pop();
    row.ok_or_else(|| Problem::not_found(format!("policy `{policy}` has no run {id}")))
}

pub(super) async fn one(State(shared): State<Shared>, Path(id): Path<Uuid>) -> Result<Json<Shown>, Problem> {
    let run = get(&shared.pool, &shared.policy, id).await?;
    let idle = sqlx::query_as!(
        Idle,
        r#"
        with newest as (
            select step, committed_at, metrics -> 'timings' as timings,
                   lag(committed_at, 1, case step when 1 then $2::timestamptz end) over (order by step) as before
            from (select * from step where run_id = $1 order by step desc limit 100) s
        )
        select count(*) as "steps!", coalesce(sum(extract(epoch from committed_at - before)), 0)::float8 as "seconds!",
               coalesce(sum(number_of(timings, 'wait')), 0) + coalesce(sum(number_of(timings, 'idle')), 0) as "trainer_seconds!",
               coalesce(sum(number_of(timings, 'compute_tail') + number_of(timings, 'guard')), 0) as "rollouts_seconds!"
        from newest
        "#,
        id,
        run.started_at
    )
    .fetch_one(&shared.pool)
    .await
    .map_err(database)?;
    Ok(Json(Shown { run, idle }))
}

pub(super) async fn list(State(shared): State<Shared>, Query(page): Query<Page>) -> Result<Json<List<Run>>, Problem> {
    let limit = limit(page.limit)?;
    let rows = newest(&shared.pool, &shared.policy, page, limit + 1)
        .await
        .map_err(database)?;
    Ok(Json(List::page(rows, limit)))
}

/// The newest runs of the policy.
pub async fn newest(executor: impl PgExecutor<'_>, policy: &str, page: Page, limit: i64) -> sqlx::Result<Vec<Run>> {
    sqlx::query_as!(
        Run,
        r#"
        select r.id, r.kind, r.policy, r.line, r.status, r.reason, r.config, r.base_version, l.head as "head?",
               r.steps_done, r.steps_total, r.requested, r.recurs_from, r.result - 'parts' as result,
               r.created_at, r.started_at, r.finished_at,
               (select string_agg(e.message, '; ')
                from (select distinct on (data ->> 'alarm') message, data ->> 'state' as state
                      from run_event
                      where run_id = r.id and data ? 'alarm'
                      order by data ->> 'alarm', id desc) e
                where e.state = 'began') as alarm
        from run r
        left join line l on l.policy = r.policy and l.line = r.line
        where r.policy = $1
          and ($2::uuid is null or r.id < $2)
          and ($3::text is null or r.status = $3)
          and ($4::text is null or r.kind = $4)
          and ($6::uuid is null or r.id = $6)
        order by r.id desc
        limit $5
        "#,
        policy,
        page.after,
        page.status,
        page.kind,
        limit,
        page.id
    )
    .fetch_all(executor)
    .await
}

/// An event of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub id: Uuid,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    pub level: String,
    pub message: String,
    pub data: serde_json::Value,
}

pub(super) async fn events(
    State(shared): State<Shared>,
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

/// A step of a run, and its version.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CommittedStep {
    pub step: i64,
    pub version: i64,
    pub root: String,
    pub metrics: serde_json::Value,
    #[serde(with = "time::serde::rfc3339")]
    pub committed_at: OffsetDateTime,
}

/// Which page of steps.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StepPage {
    limit: Option<i64>,
    /// The last step of the previous page.
    after: Option<i64>,
}

pub(super) async fn checkpoints(
    State(shared): State<Shared>,
    Path(id): Path<Uuid>,
    Query(page): Query<StepPage>,
) -> Result<Json<List<CommittedStep>>, Problem> {
    get(&shared.pool, &shared.policy, id).await?;
    let limit = limit(page.limit)?;
    let rows = sqlx::query_as!(
        CommittedStep,
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
