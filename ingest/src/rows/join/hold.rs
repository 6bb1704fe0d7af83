//! The sink's side: locks that keep the closer away from a generation or an episode until the sink
//! commits.
//!
//! [`announce`] comes first, then [`hold_episodes`], then [`hold_targets`] and [`hold_retracted`].
//! What was not visible to the first may be visible to the others.

use std::collections::{BTreeSet, HashSet};

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::announce_writes;
use crate::event::{EpisodeEnd, Feedback, Generation, Retraction, Target};
use crate::reward::stored::Surfaces;
use crate::rows::insert::Row;

/// What the events of a batch are about.
pub(crate) struct Targets {
    /// Of feedback.
    generations: Vec<Uuid>,
    /// Of feedback.
    episodes: Vec<Uuid>,
    /// Feedback that is retracted.
    retracted: Vec<Uuid>,
    /// Episodes that change: by a turn that joins, or by their end.
    changed: Vec<Uuid>,
    /// What is due may be closed now.
    due_until: OffsetDateTime,
    /// Surfaces whose trajectories may close at any time.
    early: Vec<String>,
}

impl Targets {
    /// `joining`: see [`insert::open_generations`].
    pub(crate) fn of(
        generations: &[Row<'_, Generation>],
        joining: &HashSet<Uuid>,
        feedback: &[Row<'_, Feedback>],
        retractions: &[Row<'_, Retraction>],
        ends: &[Row<'_, EpisodeEnd>],
        caught_up_to: Option<OffsetDateTime>,
        surfaces: &Surfaces,
    ) -> Self {
        let about = |row: &Row<'_, Feedback>| match row.body.target {
            Target::Generation(id) => (Some(id), None),
            Target::Episode(id) => (None, Some(id)),
        };
        let turns = generations.iter().filter(|row| joining.contains(&row.body.id));
        let ended = ends.iter().map(|row| row.body.episode_id);
        let changed: BTreeSet<Uuid> = turns.map(|row| row.body.episode_id).chain(ended).collect();
        let early = surfaces
            .definitions()
            .filter(|surface| surface.close_on_feedback || surface.close_on_episode_end);
        Self {
            generations: feedback.iter().filter_map(|row| about(row).0).collect(),
            episodes: feedback.iter().filter_map(|row| about(row).1).collect(),
            retracted: retractions.iter().map(|row| row.body.feedback_id).collect(),
            changed: changed.into_iter().collect(),
            due_until: caught_up_to.unwrap_or(OffsetDateTime::UNIX_EPOCH),
            early: early.map(|surface| surface.name.clone()).collect(),
        }
    }
}

/// Announces the generations without a visible open row, the episodes, and the retracted feedback with
/// its episodes. Returns the episodes of the open turns among the generations.
///
/// Generations without a visible open row are closed, or another transaction is storing them and they
/// could open and close before this commit.
pub(crate) async fn announce(connection: &mut PgConnection, targets: &Targets) -> sqlx::Result<BTreeSet<Uuid>> {
    let mut ids = [&*targets.episodes, &*targets.retracted].concat();
    let mut episodes = BTreeSet::new();
    if !targets.retracted.is_empty() {
        let of_retracted = sqlx::query_scalar!(
            "select distinct episode_id as \"id!\" from feedback where id = any($1) and episode_id is not null",
            &targets.retracted
        );
        ids.extend(of_retracted.fetch_all(&mut *connection).await?);
    }
    if !targets.generations.is_empty() {
        let open = sqlx::query!(
            "select generation_id, episode_id from open_generation where generation_id = any($1)",
            &targets.generations
        );
        let open = open.fetch_all(&mut *connection).await?;
        episodes.extend(open.iter().filter_map(|row| row.episode_id));
        let open: HashSet<Uuid> = open.into_iter().map(|row| row.generation_id).collect();
        ids.extend(targets.generations.iter().filter(|id| !open.contains(id)));
    }
    if !ids.is_empty() {
        announce_writes(connection, &ids).await?;
    }
    Ok(episodes)
}

/// Locks the episodes to which this batch adds turns or an end, and those that it has feedback or
/// retractions about, as far as the closer may close them before the commit. `of_turns`: those of the
/// turns that feedback is about.
pub(crate) async fn hold_episodes(
    connection: &mut PgConnection,
    targets: &Targets,
    of_turns: BTreeSet<Uuid>,
) -> sqlx::Result<()> {
    let about: Vec<Uuid> = of_turns.into_iter().chain(targets.episodes.iter().copied()).collect();
    if about.is_empty() && targets.changed.is_empty() && targets.retracted.is_empty() {
        return Ok(());
    }
    sqlx::query_file!(
        "src/rows/join/hold_episodes.sql",
        &targets.changed,
        &about,
        &targets.retracted,
        targets.due_until,
        &targets.early
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Holds the generations that feedback is about, as far as the closer may close them before the
/// commit: those that are due, and those that may become due at any time. Feedback about an episode
/// needs no more than its announcement.
///
/// Returns generations that are open until this transaction ends, so that feedback about them cannot
/// be late. An open turn stays open: its episode is locked, or cannot close yet, or the turn has become
/// visible since it was announced.
pub(crate) async fn hold_targets(connection: &mut PgConnection, targets: &Targets) -> sqlx::Result<HashSet<Uuid>> {
    if targets.generations.is_empty() {
        return Ok(HashSet::new());
    }
    let open = sqlx::query!(
        "select generation_id, episode_id is null and (closes_at <= $2 or surface = any($3)) as \"closable!\" \
         from open_generation where generation_id = any($1)",
        &targets.generations,
        targets.due_until,
        &targets.early
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

/// Holds the open generations that the retracted feedback is about.
pub(crate) async fn hold_retracted(connection: &mut PgConnection, targets: &Targets) -> sqlx::Result<()> {
    if targets.retracted.is_empty() {
        return Ok(());
    }
    sqlx::query_file!("src/rows/join/hold_retracted.sql", &targets.retracted)
        .execute(connection)
        .await?;
    Ok(())
}
