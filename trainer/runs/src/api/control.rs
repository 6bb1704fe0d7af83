//! Pause, resume, cancel. A run without an executor changes at once. Otherwise the request is
//! stored, and the executor obeys it between two steps.

use super::runs::{self, Run};
use super::{Shared, audited, database};
use crate::claim;
use axum::extract::State;
use edge::auth::Principal;
use edge::json::Json;
use edge::path::Path;
use edge::problem::Problem;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

pub(super) async fn cancel(
    State(shared): State<Shared>,
    principal: Principal,
    Path(id): Path<Uuid>,
) -> Result<Json<Run>, Problem> {
    cancel_as(&shared, &principal, id).await
}

/// Cancels a run, or asks its executor to; for callers in this process.
///
/// # Errors
/// What `POST /v1/runs/{id}/cancel` would answer, such as 409 if the run has ended.
pub async fn cancel_run(pool: &PgPool, policy: &str, id: Uuid, principal: &Principal) -> Result<(), Problem> {
    let shared = Shared::in_process(pool, policy);
    cancel_as(&shared, principal, id).await.map(drop)
}

async fn cancel_as(shared: &Shared, principal: &Principal, id: Uuid) -> Result<Json<Run>, Problem> {
    let run = runs::get(&shared.pool, &shared.policy, id).await?;
    if run.kind == "realtime" {
        return Err(Problem::conflict("the realtime run cannot be canceled; pause it"));
    }
    let mut transaction = edge::database::begin(&shared.pool).await.map_err(database)?;
    let changed = sqlx::query_scalar!(
        r#"
        update run
        set requested = case when status in ('running', 'pausing') then 'cancel' end,
            finished_at = case when status in ('running', 'pausing') then null else now() end,
            reason = case when status in ('running', 'pausing') then reason else 'cancelled by request' end,
            status = case when status in ('running', 'pausing') then status else 'cancelled' end
        where id = $1 and status in ('validating_files', 'queued', 'running', 'pausing', 'paused')
        returning id
        "#,
        id
    )
    .fetch_optional(&mut *transaction)
    .await
    .map_err(database)?;
    answer(shared, transaction, principal, run, changed, "cancel").await
}

pub(super) async fn pause(
    State(shared): State<Shared>,
    principal: Principal,
    Path(id): Path<Uuid>,
) -> Result<Json<Run>, Problem> {
    let run = runs::get(&shared.pool, &shared.policy, id).await?;
    let mut transaction = edge::database::begin(&shared.pool).await.map_err(database)?;
    let changed = sqlx::query_scalar!(
        r#"
        update run
        set requested = case status when 'running' then 'pause' end,
            reason = 'paused by request',
            status = case status when 'running' then 'pausing' else 'paused' end
        where id = $1 and status in ('validating_files', 'queued', 'running')
        returning id
        "#,
        id
    )
    .fetch_optional(&mut *transaction)
    .await
    .map_err(database)?;
    answer(&shared, transaction, &principal, run, changed, "pause").await
}

pub(super) async fn resume(
    State(shared): State<Shared>,
    principal: Principal,
    Path(id): Path<Uuid>,
) -> Result<Json<Run>, Problem> {
    let run = runs::get(&shared.pool, &shared.policy, id).await?;
    let mut transaction = edge::database::begin(&shared.pool).await.map_err(database)?;
    let changed = sqlx::query_scalar!(
        r#"
        update run
        set requested = null, reason = null,
            status = case status when 'pausing' then 'running' else 'queued' end
        where id = $1 and status in ('pausing', 'paused') and requested is distinct from 'cancel'
        returning id
        "#,
        id
    )
    .fetch_optional(&mut *transaction)
    .await
    .map_err(database)?;
    answer(&shared, transaction, &principal, run, changed, "resume").await
}

/// Appends an event with the person's name and a row to the audit, commits, and returns the run. A
/// conflict with its status if nothing changed.
async fn answer(
    shared: &Shared,
    mut transaction: Transaction<'_, Postgres>,
    principal: &Principal,
    before: Run,
    changed: Option<Uuid>,
    request: &str,
) -> Result<Json<Run>, Problem> {
    let Some(id) = changed else {
        return Err(Problem::conflict(format!(
            "run {} is {}: the request to {request} it is refused",
            before.id, before.status
        )));
    };
    let message = format!("{request} requested by {}", principal.label);
    let data = serde_json::json!({"request": request});
    claim::append_event(&mut transaction, id, "info", &message, &data)
        .await
        .map_err(database)?;
    let (action, about) = (format!("run.{request}"), format!("it was {}", before.status));
    audited::append(&mut transaction, principal.actor(), id, &action, &about)
        .await
        .map_err(database)?;
    transaction.commit().await.map_err(database)?;
    Ok(Json(runs::get(&shared.pool, &shared.policy, id).await?))
}
