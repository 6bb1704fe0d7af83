//! Runs that come again: when one with `schedule.repeats` has succeeded or failed, the next is queued for
//! its time, with the same configuration and tasks. Canceling the queued one ends the series.

use super::Schedule;
use crate::api::audited;
use crate::api::create::line_of;
use crate::claim;
use serde_json::json;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

/// Queues what is to come next. Returns how many runs.
pub async fn queue_next(pool: &PgPool, policy: &str) -> anyhow::Result<usize> {
    let ended = sqlx::query!(
        r#"
        select id, kind, config, base_version, steps_total from run r
        where policy = $1 and status in ('succeeded', 'failed') and config #>> '{schedule,repeats}' is not null
          and not exists (select from run n where n.recurs_from = r.id)
        order by id
        "#,
        policy
    )
    .fetch_all(pool)
    .await?;
    let mut queued = 0;
    for run in ended {
        let mut config = run.config;
        let schedule = Schedule::take_from(&mut config).unwrap_or_default();
        let next = schedule
            .repeats
            .as_ref()
            .and_then(|repeats| repeats.next_after(OffsetDateTime::now_utc()));
        let Some(starts_at) = next else { continue };
        let schedule = Schedule {
            starts_at: Some(starts_at),
            ..schedule
        };
        schedule.put_into(&mut config)?;
        let id = Uuid::now_v7();
        let mut transaction = edge::database::begin(pool).await?;
        let inserted = sqlx::query!(
            r#"
            insert into run (id, kind, policy, line, status, config, base_version, steps_total, recurs_from)
            values ($1, $2, $3, $4, 'queued', $5, $6, $7, $8)
            on conflict on constraint run_recurs_once do nothing
            "#,
            id,
            run.kind,
            policy,
            line_of(id),
            config,
            run.base_version,
            run.steps_total,
            run.id
        )
        .execute(&mut *transaction)
        .await?;
        if inserted.rows_affected() == 0 {
            continue;
        }
        // runs over datasets have none
        sqlx::query!(
            "insert into task (run_id, id, prompt, answer) select $1, id, prompt, answer from task where run_id = $2",
            id,
            run.id
        )
        .execute(&mut *transaction)
        .await?;
        let message = format!("comes again: the run before is {}; it starts at {starts_at}", run.id);
        let data = json!({"recurs_from": run.id});
        claim::append_event(&mut transaction, id, "info", &message, &data).await?;
        let about = format!("{}, again after run {}", run.kind, run.id);
        audited::append_by_trainer(&mut transaction, id, "run.create", &about).await?;
        transaction.commit().await?;
        queued += 1;
    }
    Ok(queued)
}
