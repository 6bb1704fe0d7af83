//! The sink's side: locks that keep the closer away from a generation or an episode until the sink
//! commits.
//!
//! [`announce`] comes first, then [`hold_episodes`], then [`hold_targets`] and [`hold_retracted`].
//! What was not visible to the first may be visible to the others.

use std::collections::{BTreeSet, HashMap, HashSet};

use event_log::event::{EpisodeEnd, Feedback, Generation, Retraction, Target};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::announce_writes;
use crate::reward::stored::Surfaces;
use crate::rows::insert::{Row, TenantId};

/// What the events of a batch are about.
pub(crate) struct Targets {
    /// Of feedback.
    generations: Vec<TenantId>,
    /// Of feedback.
    episodes: Vec<TenantId>,
    /// Feedback that is retracted.
    retracted: Vec<TenantId>,
    /// Episodes that change: by a turn that joins, or by their end.
    changed: BTreeSet<TenantId>,
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
        let (mut about_generations, mut about_episodes) = (Vec::new(), Vec::new());
        for row in feedback {
            match row.body.target {
                Target::Generation(id) => about_generations.push(row.in_tenant(id)),
                Target::Episode(id) => about_episodes.push(row.in_tenant(id)),
            }
        }
        let turns = generations.iter().filter(|row| joining.contains(&row.body.id));
        let turns = turns.map(|row| row.in_tenant(row.body.episode_id));
        let ended = ends.iter().map(|row| row.in_tenant(row.body.episode_id));
        let retracted = retractions.iter().map(|row| row.in_tenant(row.body.feedback_id));
        let early = surfaces
            .definitions()
            .filter(|surface| surface.close_on_feedback || surface.close_on_episode_end);
        Self {
            generations: about_generations,
            episodes: about_episodes,
            retracted: retracted.collect(),
            changed: turns.chain(ended).collect(),
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
pub(crate) async fn announce(connection: &mut PgConnection, targets: &Targets) -> sqlx::Result<BTreeSet<TenantId>> {
    let mut ids = [&*targets.episodes, &*targets.retracted].concat();
    let mut episodes = BTreeSet::new();
    if !targets.retracted.is_empty() {
        let (tenants, feedback) = columns(&targets.retracted);
        let of_retracted = sqlx::query!(
            "select distinct f.tenant_id, f.episode_id as \"episode_id!\" \
             from unnest($1::text[], $2::uuid[]) as retracted (tenant_id, id) \
             join feedback f on f.id = retracted.id and f.tenant_id = retracted.tenant_id \
             where f.episode_id is not null",
            &tenants,
            &feedback
        );
        let of_retracted = of_retracted.fetch_all(&mut *connection).await?.into_iter();
        ids.extend(of_retracted.map(|row| (row.tenant_id, row.episode_id)));
    }
    if !targets.generations.is_empty() {
        let (_, generations) = columns(&targets.generations);
        let open = sqlx::query!(
            "select generation_id, episode_id from open_generation where generation_id = any($1)",
            &generations
        );
        let open = open.fetch_all(&mut *connection).await?.into_iter();
        let open: HashMap<Uuid, Option<Uuid>> = open.map(|row| (row.generation_id, row.episode_id)).collect();
        for (tenant, id) in &targets.generations {
            match open.get(id) {
                Some(episode) => episodes.extend(episode.map(|episode| (tenant.clone(), episode))),
                None => ids.push((tenant.clone(), *id)),
            }
        }
    }
    if !ids.is_empty() {
        announce_writes(connection, &ids).await?;
    }
    Ok(episodes)
}

/// Tenants and ids, as two columns.
fn columns<'a>(ids: impl IntoIterator<Item = &'a TenantId>) -> (Vec<String>, Vec<Uuid>) {
    ids.into_iter().cloned().unzip()
}

/// Locks the episodes to which this batch adds turns or an end, and those that it has feedback or
/// retractions about, as far as the closer may close them before the commit. `of_turns`: those of the
/// turns that feedback is about.
pub(crate) async fn hold_episodes(
    connection: &mut PgConnection,
    targets: &Targets,
    of_turns: BTreeSet<TenantId>,
) -> sqlx::Result<()> {
    let about = columns(of_turns.iter().chain(&targets.episodes));
    if about.0.is_empty() && targets.changed.is_empty() && targets.retracted.is_empty() {
        return Ok(());
    }
    let (changed, retracted) = (columns(&targets.changed), columns(&targets.retracted));
    sqlx::query_file!(
        "src/rows/join/hold_episodes.sql",
        &changed.0,
        &changed.1,
        &about.0,
        &about.1,
        &retracted.0,
        &retracted.1,
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
        &columns(&targets.generations).1,
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
    let (tenants, ids) = columns(&targets.retracted);
    sqlx::query_file!("src/rows/join/hold_retracted.sql", &tenants, &ids)
        .execute(connection)
        .await?;
    Ok(())
}
