//! The sink's side: locks that keep the closer away from a generation until the sink commits.

use std::collections::HashSet;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::announce_writes;
use crate::event::{Feedback, Retraction, Target};
use crate::reward::stored::Surfaces;
use crate::rows::insert::Row;

/// Holds the generations that this feedback is about, as far as the closer may close them before
/// the commit: those that are due at `caught_up_to`, and those that may become due at any time.
///
/// Returns generations that are open until this transaction ends, so that feedback about them cannot
/// be late.
pub(crate) async fn hold_targets(
    connection: &mut PgConnection,
    rows: &[Row<'_, Feedback>],
    caught_up_to: Option<OffsetDateTime>,
    surfaces: &Surfaces,
) -> sqlx::Result<HashSet<Uuid>> {
    let (mut generations, mut episodes) = (Vec::new(), Vec::new());
    for row in rows {
        match row.body.target {
            Target::Generation(id) => generations.push(id),
            Target::Episode(id) => episodes.push(id),
        }
    }
    let until = caught_up_to.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let early = surfaces
        .definitions()
        .filter(|surface| surface.close_on_feedback || surface.close_on_episode_end);
    let early: Vec<String> = early.map(|surface| surface.name.clone()).collect();
    let mut held = hold_generations(&mut *connection, &generations, until, &early).await?;
    generations.retain(|id| !held.contains(id));
    // They are closed, or another transaction is storing them and they could open and close before
    // this commit.
    let not_open = [&*generations, &*episodes].concat();
    if !not_open.is_empty() {
        announce_writes(&mut *connection, &not_open).await?;
        // Those that have become visible since.
        held.extend(hold_generations(&mut *connection, &generations, until, &early).await?);
    }
    if !episodes.is_empty() {
        sqlx::query!(
            "select from open_generation where generation_id in \
                 (select id from generation where episode_id = any($1)) \
               and (closes_at <= $2 or surface = any($3)) \
             order by generation_id for share",
            &episodes,
            until,
            &early
        )
        .execute(connection)
        .await?;
    }
    Ok(held)
}

/// Locks those that are due at `until` or on a surface that may close early. Returns all that stay
/// open until the transaction ends.
async fn hold_generations(
    connection: &mut PgConnection,
    ids: &[Uuid],
    until: OffsetDateTime,
    early: &[String],
) -> sqlx::Result<HashSet<Uuid>> {
    if ids.is_empty() {
        return Ok(HashSet::new());
    }
    let open = sqlx::query!(
        "select generation_id, closes_at <= $2 or surface = any($3) as \"closable!\" from open_generation \
         where generation_id = any($1)",
        ids,
        until,
        early
    )
    .fetch_all(&mut *connection)
    .await?;
    let (closable, others): (Vec<_>, Vec<_>) = open.into_iter().partition(|row| row.closable);
    let mut held: HashSet<Uuid> = others.into_iter().map(|row| row.generation_id).collect();
    if !closable.is_empty() {
        let closable: Vec<Uuid> = closable.into_iter().map(|row| row.generation_id).collect();
        // Omits those that the closer has closed since.
        let locked = sqlx::query_scalar!(
            "select generation_id from open_generation where generation_id = any($1) order by generation_id for share",
            &closable
        )
        .fetch_all(connection)
        .await?;
        held.extend(locked);
    }
    Ok(held)
}

/// Holds the open generations that the retracted feedback is about. The feedback may not be stored
/// yet.
pub(crate) async fn hold_retracted(connection: &mut PgConnection, rows: &[Row<'_, Retraction>]) -> sqlx::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let feedback: Vec<Uuid> = rows.iter().map(|row| row.body.feedback_id).collect();
    announce_writes(&mut *connection, &feedback).await?;
    sqlx::query_file!("src/rows/join/hold_retracted.sql", &feedback)
        .execute(connection)
        .await?;
    Ok(())
}
