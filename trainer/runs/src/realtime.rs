//! The row of the realtime run: made and changed by the configuration, and paused while the alias that it
//! learns from does not follow its line.

use crate::api::audited;
use crate::claim::{self, Claim, append_event};
use crate::options::{REALTIME_LINE, Realtime};
use crate::run::Status;
use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

/// The realtime run.
pub(crate) struct Run {
    pub id: Uuid,
    pub base_version: Option<i64>,
}

/// `None`: it has not begun yet.
pub(crate) async fn find(pool: &PgPool, policy: &str, line: &str) -> sqlx::Result<Option<Run>> {
    sqlx::query_as!(
        Run,
        "select id, base_version from run where policy = $1 and line = $2 and kind = 'realtime'",
        policy,
        line
    )
    .fetch_optional(pool)
    .await
}

/// The run's id. Creates its row on first use, and stores the current configuration in it. Both are
/// in the audit.
pub async fn ensure(pool: &PgPool, policy: &str, options: &Realtime) -> anyhow::Result<Uuid> {
    let config = serde_json::to_value(options)?;
    let known = sqlx::query!(
        r#"
        select id, config = $3 as "same_config!", base_version is not null as "based!" from run
        where kind = 'realtime' and policy = $1 and line = $2
        "#,
        policy,
        REALTIME_LINE,
        config
    )
    .fetch_optional(pool)
    .await?;
    if let Some(run) = known.as_ref().filter(|run| run.same_config && run.based) {
        return Ok(run.id);
    }
    let mut transaction = edge::database::begin(pool).await?;
    let id = sqlx::query_scalar!(
        r#"
        insert into run (id, kind, policy, line, status, config, base_version)
        values ($1, 'realtime', $2, $3, 'queued', $4, (select head from line where policy = $2 and line = $3))
        on conflict (policy, line) where kind = 'realtime'
        do update set config = excluded.config, base_version = coalesce(run.base_version, excluded.base_version)
        returning id
        "#,
        Uuid::now_v7(),
        policy,
        REALTIME_LINE,
        config
    )
    .fetch_one(&mut *transaction)
    .await?;
    let action = match known {
        None => Some("run.create"),
        Some(run) if !run.same_config => Some("run.configure"),
        Some(_) => None,
    };
    if let Some(action) = action {
        let about = format!("line {REALTIME_LINE}, by the configuration");
        audited::append_by_trainer(&mut transaction, id, action, &about).await?;
    }
    transaction.commit().await?;
    Ok(id)
}

/// The run's status, and whether it is paused because of its alias: the newest event about its status says
/// so.
pub async fn status(pool: &PgPool, run: Uuid) -> sqlx::Result<(Status, bool)> {
    let row = sqlx::query!(
        r#"
        select status as "status: Status",
               coalesce((select data ? 'waits_for_alias' from run_event
                         where run_id = run.id and (data ? 'status' or data ? 'request')
                         order by id desc limit 1), false) as "waits_for_alias!"
        from run where id = $1
        "#,
        run
    )
    .fetch_one(pool)
    .await?;
    Ok((row.status, row.waits_for_alias))
}

/// Pauses the run until its alias follows the line. `reason`: where the alias is.
pub async fn wait_for_alias(pool: &PgPool, claim: &Claim, reason: &str) -> Result<(), claim::Error> {
    let mut transaction = edge::database::begin(pool).await?;
    let data = json!({"waits_for_alias": true});
    claim.release(&mut transaction, Status::Paused, reason, data).await?;
    transaction.commit().await?;
    Ok(())
}

/// Queues the run again: its alias follows the line. A person may have changed it meanwhile.
pub async fn go_on(pool: &PgPool, run: Uuid, alias: &str) -> sqlx::Result<()> {
    let mut transaction = edge::database::begin(pool).await?;
    let queued = sqlx::query!(
        "update run set status = 'queued', reason = null where id = $1 and status = 'paused'",
        run
    )
    .execute(&mut *transaction)
    .await?;
    if queued.rows_affected() == 1 {
        let message = format!("{alias} follows the line again: the run continues");
        let data = json!({"status": Status::Queued});
        append_event(&mut transaction, run, "info", &message, &data).await?;
    }
    transaction.commit().await
}
