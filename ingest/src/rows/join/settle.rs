//! Handles consequences that need two events, such as an early close or a late retraction.
//!
//! Two concurrent transactions may each store one of the events and not see the other. So the sink
//! checks twice: inside the transaction and after its commit. The transaction that commits last
//! sees both events. Nothing closes between the two checks, because a partition is marked as caught
//! up only after the second one.
//!
//! If the process dies between the checks, the generation closes at its horizon instead. The reward
//! is the same, because the closer computes by itself until when signals count.

use std::collections::BTreeSet;

use event_log::event::{EpisodeEnd, Feedback, Generation, Target};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::reward::episode::EARLY_CLOSE_SLACK;
use crate::reward::stored::Surfaces;
use crate::reward::{Definition, Unit};
use crate::rows::feedback::SIGNALS_MAX;
use crate::rows::insert::{Row, TenantId};

/// The events of a batch that can have such consequences.
#[derive(Debug, Default)]
pub(crate) struct Touched {
    /// May close because feedback was given.
    by_feedback: Early,
    /// May close because an episode ended.
    by_end: Early,
    /// Where the episode is the trajectory: may close for either reason.
    episodes: BTreeSet<TenantId>,
    /// Feedback that is late.
    pub late: Vec<Uuid>,
    /// By their own ids.
    pub retractions: Vec<Uuid>,
}

/// Generations that are trajectories, by their own ids and by their episodes.
#[derive(Debug, Default)]
struct Early {
    generations: Vec<Uuid>,
    episodes: BTreeSet<TenantId>,
}

impl Early {
    fn is_empty(&self) -> bool {
        self.generations.is_empty() && self.episodes.is_empty()
    }

    /// Tenants and ids.
    fn episodes(&self) -> (Vec<String>, Vec<Uuid>) {
        self.episodes.iter().cloned().unzip()
    }
}

impl Touched {
    pub(crate) fn of(
        generations: &[Row<'_, Generation>],
        feedback: &[Row<'_, Feedback>],
        ends: &[Row<'_, EpisodeEnd>],
        surfaces: &Surfaces,
    ) -> Self {
        let mut touched = Self::default();
        for row in generations {
            let Some((_, rule)) = surfaces.get(&row.body.surface) else {
                continue;
            };
            if rule.is_of_episodes() {
                if closes_early(&rule.definition) {
                    touched.episodes.insert(row.in_tenant(row.body.episode_id));
                }
                continue;
            }
            if rule.definition.close_on_feedback {
                touched.by_feedback.generations.push(row.body.id);
            }
            if rule.definition.close_on_episode_end {
                touched.by_end.generations.push(row.body.id);
            }
        }
        let alone = || surfaces.definitions().filter(|surface| !is_of_episodes(surface));
        let decides = |row: &Row<'_, Feedback>, surface: &Definition| {
            surface.close_on_feedback && surface.metric == row.body.metric_name
        };
        for row in feedback {
            let of_generations = alone().any(|surface| decides(row, surface));
            match row.body.target {
                Target::Generation(id) if of_generations => touched.by_feedback.generations.push(id),
                Target::Generation(_) => {}
                Target::Episode(id) => {
                    if of_generations {
                        touched.by_feedback.episodes.insert(row.in_tenant(id));
                    }
                    if surfaces.definitions().any(|surface| decides(row, surface)) {
                        touched.episodes.insert(row.in_tenant(id));
                    }
                }
            }
        }
        if alone().any(|surface| surface.close_on_episode_end) {
            touched.by_end.episodes = ends.iter().map(|row| row.in_tenant(row.body.episode_id)).collect();
        }
        if surfaces.definitions().any(|surface| surface.close_on_episode_end) {
            let ended = ends.iter().map(|row| row.in_tenant(row.body.episode_id));
            touched.episodes.extend(ended);
        }
        if !surfaces
            .definitions()
            .any(|surface| is_of_episodes(surface) && closes_early(surface))
        {
            touched.episodes.clear();
        }
        touched
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_feedback.is_empty()
            && self.by_end.is_empty()
            && self.episodes.is_empty()
            && self.late.is_empty()
            && self.retractions.is_empty()
    }
}

fn is_of_episodes(surface: &Definition) -> bool {
    surface.trajectory == Unit::Episode
}

fn closes_early(surface: &Definition) -> bool {
    surface.close_on_feedback || surface.close_on_episode_end
}

/// What to do about episodes that another transaction has locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// Leave them to the check after the commit: a transaction that holds episodes waits for no other.
    Skip,
    Wait,
}

/// Applies the consequences that are visible now. Idempotent.
pub(crate) async fn settle(
    connection: &mut PgConnection,
    touched: &Touched,
    surfaces: &Surfaces,
    others: Others,
) -> sqlx::Result<()> {
    if !touched.late.is_empty() || !touched.retractions.is_empty() {
        sqlx::query_file!(
            "src/rows/join/late_retractions.sql",
            &touched.late,
            &touched.retractions
        )
        .execute(&mut *connection)
        .await?;
    }
    let alone = || surfaces.definitions().filter(|surface| !is_of_episodes(surface));
    if !touched.by_end.is_empty() {
        let closing = alone().filter(|surface| surface.close_on_episode_end);
        let names: Vec<String> = closing.map(|surface| surface.name.clone()).collect();
        let (tenants, episodes) = touched.by_end.episodes();
        sqlx::query_file!(
            "src/rows/join/close_ended.sql",
            &touched.by_end.generations,
            &tenants,
            &episodes,
            &names
        )
        .execute(&mut *connection)
        .await?;
    }
    if !touched.by_feedback.is_empty() {
        let early = || alone().filter(|surface| surface.close_on_feedback);
        let names: Vec<String> = early().map(|surface| surface.name.clone()).collect();
        let metrics: Vec<String> = early().map(|surface| surface.metric.clone()).collect();
        let (tenants, episodes) = touched.by_feedback.episodes();
        sqlx::query_file!(
            "src/rows/join/close_early.sql",
            &touched.by_feedback.generations,
            &tenants,
            &episodes,
            &names,
            &metrics,
            SIGNALS_MAX
        )
        .execute(&mut *connection)
        .await?;
    }
    let mut episodes = touched.episodes.clone();
    if others == Others::Skip {
        episodes = lock_free(connection, episodes).await?;
    }
    settle_episodes(connection, &episodes, surfaces).await
}

/// Locks those of these open episodes that no other transaction has locked.
async fn lock_free(connection: &mut PgConnection, episodes: BTreeSet<TenantId>) -> sqlx::Result<BTreeSet<TenantId>> {
    if episodes.is_empty() {
        return Ok(episodes);
    }
    let (tenants, ids): (Vec<String>, Vec<Uuid>) = episodes.into_iter().unzip();
    let locked = sqlx::query!(
        "select o.tenant_id, o.episode_id from unnest($1::text[], $2::uuid[]) as touched (tenant_id, episode_id) \
         join open_episode o on o.episode_id = touched.episode_id and o.tenant_id = touched.tenant_id \
         for no key update of o skip locked",
        &tenants,
        &ids
    )
    .fetch_all(connection)
    .await?;
    Ok(locked.into_iter().map(|row| (row.tenant_id, row.episode_id)).collect())
}

/// The same for episodes that are trajectories.
async fn settle_episodes(
    connection: &mut PgConnection,
    episodes: &BTreeSet<TenantId>,
    surfaces: &Surfaces,
) -> sqlx::Result<()> {
    if episodes.is_empty() {
        return Ok(());
    }
    let (tenants, ids): (Vec<String>, Vec<Uuid>) = episodes.iter().cloned().unzip();
    let closing = || surfaces.definitions().filter(|surface| is_of_episodes(surface));
    let ending = closing().filter(|surface| surface.close_on_episode_end);
    let ending: Vec<String> = ending.map(|surface| surface.name.clone()).collect();
    let decided = || closing().filter(|surface| surface.close_on_feedback);
    let names: Vec<String> = decided().map(|surface| surface.name.clone()).collect();
    let metrics: Vec<String> = decided().map(|surface| surface.metric.clone()).collect();
    sqlx::query_file!(
        "src/rows/join/close_episodes.sql",
        &tenants,
        &ids,
        &ending,
        &names,
        &metrics,
        EARLY_CLOSE_SLACK.as_seconds_f64(),
        SIGNALS_MAX
    )
    .execute(connection)
    .await?;
    Ok(())
}
