//! The rows of open episodes.

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::close::closer::Place;
use crate::reward::episode::{JOIN_MAX, OPEN_TURNS_MAX, TURNS_MAX, Turn};

/// Episodes of one transaction.
pub(super) const EPISODES_MAX: i64 = 100;

/// An episode that is due, with its open turns.
pub(super) struct Due {
    pub tenant: String,
    pub id: Uuid,
    /// When to look at it.
    pub closes_at: OffsetDateTime,
    pub ended_at: Option<OffsetDateTime>,
    /// It has trajectories from an earlier closure.
    pub has_closed: bool,
    /// No more turns can come.
    pub is_complete: bool,
    /// It takes no more turns.
    pub is_full: bool,
    /// How many turns are open.
    pub open_turns: usize,
    /// Those that were read: all of them, or [`OPEN_TURNS_MAX`] and one.
    pub turns: Vec<Turn>,
}

impl Due {
    pub(super) fn has_unread(&self) -> bool {
        self.turns.len() > OPEN_TURNS_MAX
    }
}

/// Locks the first due episodes after a place, as many as have [`TURNS_MAX`] open turns together, but at least one.
/// Returns them without turns, and whether there are more.
pub(super) async fn due(
    connection: &mut PgConnection,
    (until, known): (OffsetDateTime, OffsetDateTime),
    from: Place,
) -> sqlx::Result<(Vec<Due>, bool)> {
    let due = sqlx::query_file!(
        "src/close/episodes/due.sql",
        until,
        EPISODES_MAX,
        from.closes_at,
        from.id,
        known
    );
    let rows = due.fetch_all(connection).await?;
    let count = rows.len();
    let mut open_turns = 0;
    let due = rows.into_iter().map(|row| Due {
        tenant: row.tenant_id,
        id: row.episode_id,
        closes_at: row.closes_at,
        ended_at: row.ended_at,
        has_closed: row.has_closed,
        is_complete: row.is_complete,
        is_full: row.is_full,
        open_turns: usize::try_from(row.turns).unwrap_or(0),
        turns: Vec::new(),
    });
    let fit = due.enumerate().take_while(|(nth, due)| {
        open_turns += due.open_turns;
        *nth == 0 || open_turns <= TURNS_MAX
    });
    let due: Vec<Due> = fit.map(|(_, due)| due).collect();
    let more = due.len() < count || count as i64 == EPISODES_MAX;
    Ok((due, more))
}

/// Reads the open turns of the first of these episodes, and drops the others. Returns whether it
/// dropped any.
pub(super) async fn add_turns(connection: &mut PgConnection, due: &mut Vec<Due>) -> anyhow::Result<bool> {
    let tenants: Vec<String> = due.iter().map(|due| due.tenant.clone()).collect();
    let ids: Vec<Uuid> = due.iter().map(|due| due.id).collect();
    let rows_max = OPEN_TURNS_MAX as i64 + 1;
    let rows = sqlx::query_file!("src/close/episodes/turns.sql", &tenants, &ids, rows_max)
        .fetch_all(connection)
        .await
        .context("read turns")?;
    let is_full = rows.len() as i64 == rows_max;
    let mut last = 0;
    for row in rows {
        let nth = usize::try_from(row.nth - 1).unwrap_or(0);
        let Some(due) = due.get_mut(nth) else { continue };
        last = nth;
        due.turns.push(super::super::turn!(row));
    }
    // The last episode of a full page may be incomplete. Alone it is not dropped: it is too long.
    let count = due.len();
    if is_full {
        due.truncate(last.max(1));
    }
    Ok(due.len() < count)
}

/// Updates the rows of episodes of which so many turns have closed. An episode that is full, or was
/// long, keeps its row for a while, so that its further turns are strays.
pub(super) async fn take_closed(connection: &mut PgConnection, closed: &[(&Due, usize)]) -> sqlx::Result<()> {
    let (mut kept, mut gone) = (Vec::new(), Vec::new());
    for (due, turns) in closed {
        let is_long = due.is_full || due.open_turns.max(*turns) > TURNS_MAX;
        match *turns > 0 && is_long {
            true => kept.push((*due, i32::try_from(*turns).unwrap_or(i32::MAX), due.has_unread())),
            false => gone.push(*due),
        }
    }
    if !gone.is_empty() {
        let (tenants, ids) = keys(gone);
        sqlx::query!(
            "delete from open_episode o using unnest($1::text[], $2::uuid[]) as gone (tenant_id, episode_id) \
             where o.episode_id = gone.episode_id and o.tenant_id = gone.tenant_id",
            &tenants,
            &ids
        )
        .execute(&mut *connection)
        .await?;
    }
    if !kept.is_empty() {
        let (tenants, ids) = keys(kept.iter().map(|(due, ..)| *due));
        sqlx::query!(
            "update open_episode o \
             set is_full = true, turns = greatest(o.turns - kept.closed, 0), \
                 closes_at = case when kept.has_unread then o.closes_at else now() + make_interval(secs => $5) end \
             from unnest($1::text[], $2::uuid[], $3::int[], $4::bool[]) as kept (tenant_id, episode_id, closed, has_unread) \
             where o.episode_id = kept.episode_id and o.tenant_id = kept.tenant_id",
            &tenants,
            &ids,
            &kept.iter().map(|(_, closed, _)| *closed).collect::<Vec<_>>(),
            &kept.iter().map(|(.., has_unread)| *has_unread).collect::<Vec<_>>(),
            JOIN_MAX.as_seconds_f64()
        )
        .execute(connection)
        .await?;
    }
    Ok(())
}

pub(super) async fn postpone(connection: &mut PgConnection, postponed: &[(&Due, OffsetDateTime)]) -> sqlx::Result<()> {
    if postponed.is_empty() {
        return Ok(());
    }
    let (due, closes_at): (Vec<&Due>, Vec<OffsetDateTime>) = postponed.iter().copied().unzip();
    let (tenants, ids) = keys(due);
    sqlx::query!(
        "update open_episode o set closes_at = p.closes_at \
         from unnest($1::text[], $2::uuid[], $3::timestamptz[]) as p (tenant_id, episode_id, closes_at) \
         where o.episode_id = p.episode_id and o.tenant_id = p.tenant_id",
        &tenants,
        &ids,
        &closes_at
    )
    .execute(connection)
    .await?;
    Ok(())
}

fn keys<'a>(due: impl IntoIterator<Item = &'a Due>) -> (Vec<String>, Vec<Uuid>) {
    due.into_iter().map(|due| (due.tenant.clone(), due.id)).unzip()
}
