//! What changes what is known already: feedback taken back, episodes that end. Both may come before what they are about.

use std::collections::HashMap;

use sqlx::PgConnection;
use uuid::Uuid;

use super::rows::Row;
use crate::event::{EpisodeEnd, Event, Retraction};
use crate::transaction;

/// Stores retractions; returns the ids that were free, each with whether it came after its trajectory had closed.
pub(super) async fn insert_retractions(
    connection: &mut PgConnection,
    rows: &[Row<'_, Retraction>],
) -> sqlx::Result<HashMap<Uuid, bool>> {
    if rows.is_empty() {
        return Ok(HashMap::new());
    }
    let feedback: Vec<Uuid> = rows.iter().map(|row| row.body.feedback_id).collect();
    // Its feedback may be stored, and what that is about closed, beside this transaction.
    transaction::expect(&mut *connection, &feedback).await?;
    sqlx::query_file!("src/sink/hold_retracted.sql", &feedback)
        .execute(&mut *connection)
        .await?;
    let stored = sqlx::query_file!(
        "src/sink/insert_retractions.sql",
        &rows.iter().map(|row| row.body.id).collect::<Vec<_>>(),
        &rows.iter().map(|row| row.event.tenant.clone()).collect::<Vec<_>>(),
        &feedback,
        &rows.iter().map(|row| row.body.reason.clone()).collect::<Vec<_>>(),
        &rows.iter().map(|row| row.event.time).collect::<Vec<_>>(),
    )
    .fetch_all(connection)
    .await?;
    Ok(stored.into_iter().map(|row| (row.id, row.late)).collect())
}

/// Stores the ends of episodes; of several for one episode the earliest counts.
pub(super) async fn insert_episode_ends(
    connection: &mut PgConnection,
    ends: &[(&Event, &EpisodeEnd)],
) -> sqlx::Result<()> {
    if ends.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into episode_end (tenant_id, episode_id, ended_at) \
         select tenant_id, episode_id, min(ended_at) \
         from unnest($1::text[], $2::uuid[], $3::timestamptz[]) as e (tenant_id, episode_id, ended_at) \
         group by tenant_id, episode_id order by tenant_id, episode_id \
         on conflict (tenant_id, episode_id) do update set ended_at = least(episode_end.ended_at, excluded.ended_at)",
        &ends.iter().map(|(event, _)| event.tenant.clone()).collect::<Vec<_>>(),
        &ends.iter().map(|(_, end)| end.episode_id).collect::<Vec<_>>(),
        &ends.iter().map(|(event, _)| event.time).collect::<Vec<_>>(),
    )
    .execute(connection)
    .await?;
    Ok(())
}
