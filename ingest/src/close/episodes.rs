//! Closes episodes: all turns of an episode in one transaction, however many they are.
//!
//! A transaction takes some due episodes, as many as have [`TURNS_MAX`] turns together, but at least
//! one. It reads the feedback about the episodes, which says when each is over, and then the
//! feedback about their turns, page by page. Of each page only one value per turn and metric stays
//! in memory.

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::closer::{AllNeeded, Closed, Closer, OfEpisode, store};
use crate::reward::episode::{self, Divided, LATE_TURN, Scoring, TOO_MANY_TURNS, TURNS_MAX, Turn};
use crate::reward::stored::Surfaces;
use crate::reward::{Closing, Outcome, Rule, Signal, starts_at};
use crate::rows::feedback::{About, Needed};
use crate::rows::join::{self, signals};
use crate::rows::transaction;

/// Episodes of one transaction.
const EPISODES_MAX: i64 = 100;
/// Turns whose feedback one query reads.
const PAGE_TURNS: usize = 500;

/// An episode that is due, with all of its open turns.
struct Due {
    tenant: String,
    id: Uuid,
    /// When to look at it.
    closes_at: OffsetDateTime,
    ended_at: Option<OffsetDateTime>,
    /// It has trajectories from an earlier closure.
    has_closed: bool,
    turns: Vec<Turn>,
}

/// What is to be done with it.
enum Fate {
    /// Something about it is being stored. The next round takes it.
    Contested,
    /// Its horizon ends later than expected.
    Postponed(OffsetDateTime),
    Closed(Vec<Closed>),
    /// It has more than [`TURNS_MAX`] turns.
    TooMany {
        definition: i32,
    },
}

impl Closer {
    /// Closes episodes that were over at `known`, less the grace, or before. Returns whether there
    /// are more.
    pub(super) async fn close_episodes(&mut self, known: OffsetDateTime, needed: &AllNeeded) -> anyhow::Result<bool> {
        let until = known - self.grace;
        let mut transaction = transaction::begin(&self.pool).await.context("begin")?;
        let mut due = due(&mut transaction, until).await.context("find due episodes")?;
        if due.is_empty() {
            return Ok(false);
        }
        let visible = self
            .visible
            .until(&mut transaction, known)
            .await
            .context("read snapshot")?;
        let mut more = due.len() as i64 == EPISODES_MAX;
        let ids: Vec<Uuid> = due.iter().map(|due| due.id).collect();
        let being_written = join::ids_being_written(&mut transaction, &ids).await;
        let being_written = being_written.context("look for feedback that is being stored")?;
        due.retain(|due| !being_written.contains(&due.id));
        more |= add_turns(&mut transaction, &mut due).await?;
        // About turns that a sink may not have seen, so that it could not hold their episode.
        let unseen = due
            .iter()
            .flat_map(|due| &due.turns)
            .filter(|turn| turn.stored_at > visible);
        let unseen: Vec<Uuid> = unseen.map(|turn| turn.id).collect();
        let contested_turns = join::ids_being_written(&mut transaction, &unseen).await;
        let contested_turns = contested_turns.context("look for feedback about turns that is being stored")?;
        due.retain(|due| !due.turns.iter().any(|turn| contested_turns.contains(&turn.id)));

        let mut round = Round {
            surfaces: &self.surfaces,
            until,
            visible,
            waits: Vec::new(),
        };
        let (due, fates, all_read) = round.judge(&mut transaction, due, needed).await?;
        more |= !all_read;
        let (mut closed, mut postponed, mut gone, mut too_many) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut outcomes: Vec<(String, Outcome)> = Vec::new();
        for (due, fate) in due.iter().zip(fates) {
            match fate {
                Fate::Contested => continue,
                Fate::Postponed(closes_at) => {
                    postponed.push((due, closes_at));
                    continue;
                }
                Fate::TooMany { definition } => {
                    outcomes.extend(due.turns.first().map(|turn| {
                        let code = TOO_MANY_TURNS;
                        (turn.surface.clone(), Outcome::Censored { code })
                    }));
                    too_many.push((due, definition));
                }
                Fate::Closed(rows) => {
                    // Once for the episode, and for each turn that is no part of it.
                    let of_episode = rows.iter().find(|row| row.episode.is_some());
                    let others = rows.iter().filter(|row| row.episode.is_none());
                    let counted = of_episode.into_iter().chain(others);
                    outcomes.extend(counted.map(|row| (row.surface.clone(), row.outcome.clone())));
                    closed.extend(rows);
                }
            }
            gone.push(due);
        }
        store(&mut transaction, &closed).await.context("store trajectories")?;
        for (due, definition) in too_many {
            close_too_many(&mut transaction, due, definition)
                .await
                .context("close a long episode")?;
        }
        update(&mut transaction, &gone, &postponed)
            .await
            .context("update open episodes")?;
        let waits = round.waits;
        transaction.commit().await.context("commit")?;
        for signals in waits {
            signals.record_metrics();
        }
        for (surface, outcome) in &outcomes {
            self.record(surface, outcome);
        }
        if let Some(first) = gone.first().filter(|_| !outcomes.is_empty()) {
            self.report(first.closes_at);
        }
        Ok(more && !gone.is_empty())
    }
}

async fn due(connection: &mut PgConnection, until: OffsetDateTime) -> sqlx::Result<Vec<Due>> {
    let rows = sqlx::query_file!("src/close/episodes/due.sql", until, EPISODES_MAX)
        .fetch_all(connection)
        .await?;
    let due = rows.into_iter().map(|row| Due {
        tenant: row.tenant_id,
        id: row.episode_id,
        closes_at: row.closes_at,
        ended_at: row.ended_at,
        has_closed: row.has_closed,
        turns: Vec::new(),
    });
    Ok(due.collect())
}

/// Reads the open turns of the first of these episodes, and drops the others. Returns whether it
/// dropped any.
async fn add_turns(connection: &mut PgConnection, due: &mut Vec<Due>) -> anyhow::Result<bool> {
    let tenants: Vec<String> = due.iter().map(|due| due.tenant.clone()).collect();
    let ids: Vec<Uuid> = due.iter().map(|due| due.id).collect();
    // One more than are scored, of each episode and in all.
    let rows_max = TURNS_MAX as i64 + 1;
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
        due.turns.push(Turn {
            id: row.id,
            surface: row.surface,
            policy: row.policy,
            run_id: row.run_id,
            segment: row.segment,
            number: row.turn,
            sampled_at: row.sampled_at,
            stored_at: row.stored_at,
            closing: Closing {
                purpose: super::purpose(&row.purpose)?,
                declined: row.declined,
                consent: row.consent,
                shown: row.shown,
                tokens: super::tokens(row.tokens),
                finish_reason: row.finish_reason,
                starts_at: starts_at(row.sampled_at, row.finished_at.unwrap_or(row.sampled_at)),
                ended_at: None,
            },
        });
    }
    // The last episode of a full page may be incomplete. If it is the only one, it is too long.
    let count = due.len();
    if is_full {
        due.truncate(last.max(1));
    }
    Ok(due.len() < count)
}

/// An episode whose rule is known, and the feedback about it.
struct Open<'a> {
    /// Its place among those that are due.
    nth: usize,
    definition: i32,
    rule: &'a Rule,
    ended_at: Option<OffsetDateTime>,
    divided: Divided,
    signals: Vec<Signal>,
}

struct Round<'a> {
    surfaces: &'a Surfaces,
    until: OffsetDateTime,
    /// See [`join::visible`].
    visible: OffsetDateTime,
    waits: Vec<signals::Signals>,
}

impl<'a> Round<'a> {
    /// What is to be done with each of the first of these episodes, and whether these are all.
    async fn judge(
        &mut self,
        connection: &mut PgConnection,
        mut due: Vec<Due>,
        needed: &AllNeeded,
    ) -> anyhow::Result<(Vec<Due>, Vec<Fate>, bool)> {
        let mut fates: Vec<Option<Fate>> = due.iter().map(|due| self.without_feedback(due)).collect();
        let (about, nths): (Vec<About>, Vec<usize>) = due
            .iter()
            .enumerate()
            .filter(|(nth, _)| fates[*nth].is_none())
            .filter_map(|(nth, due)| Some((about_episode(due)?, nth)))
            .unzip();
        let mut all_read = true;
        if !about.is_empty() {
            let page = needed
                .of_episodes
                .page(about.iter().map(|about| about.surface.as_str()));
            let about = &about[..page.min(about.len())];
            let read = signals::read_about_episodes(&mut *connection, about, &needed.of_episodes, self.visible).await?;
            if let Some(unread) = nths.get(read.generations) {
                due.truncate(*unread);
                fates.truncate(*unread);
                all_read = false;
            }
            let mut open = Vec::new();
            for nth in nths.into_iter().take(read.generations) {
                let about = read.by_generation.get(&due[nth].id).cloned().unwrap_or_default();
                if read.contested.contains(&due[nth].id) {
                    fates[nth] = Some(Fate::Contested);
                } else if let Some(episode) = self.open(nth, &mut due[nth], about) {
                    match episode.divided.over_at > self.until {
                        true => fates[nth] = Some(Fate::Postponed(episode.divided.over_at)),
                        false => open.push(episode),
                    }
                }
            }
            self.waits.push(read);
            for (nth, fate) in self.score(connection, &due, open, &needed.of_turns).await? {
                fates[nth] = Some(fate);
            }
        }
        let fates = fates.into_iter().map(|fate| fate.unwrap_or(Fate::Contested));
        Ok((due, fates.collect(), all_read))
    }

    /// The fate of an episode that no feedback can change.
    fn without_feedback(&self, due: &Due) -> Option<Fate> {
        let Some(first) = episode::first(&due.turns) else {
            return Some(Fate::Closed(Vec::new()));
        };
        let (definition, rule) = self.surfaces.get(&first.surface).unzip();
        let all = |code| {
            let rows = due.turns.iter().map(|turn| self.alone(turn, code));
            Some(Fate::Closed(rows.collect()))
        };
        match rule {
            _ if due.turns.len() > TURNS_MAX => Some(Fate::TooMany {
                definition: definition.unwrap_or(0),
            }),
            _ if due.has_closed => all(LATE_TURN),
            None => all("unknown_surface"),
            Some(rule) if !rule.is_of_episodes() => all("redefined"),
            Some(_) => None,
        }
    }

    /// A turn that is a trajectory of its own.
    fn alone(&self, turn: &Turn, code: &'static str) -> Closed {
        let definition = self.surfaces.get(&turn.surface).map_or(0, |(version, _)| version);
        Closed {
            generation_id: turn.id,
            surface: turn.surface.clone(),
            definition,
            closes_at: turn.closing.starts_at,
            outcome: Outcome::Censored { code },
            episode: None,
        }
    }

    /// Takes the turns out of `due` and divides them.
    fn open(&self, nth: usize, due: &mut Due, signals: Vec<Signal>) -> Option<Open<'a>> {
        let surface = &episode::first(&due.turns)?.surface;
        let (definition, rule) = self.surfaces.get(surface)?;
        let turns = std::mem::take(&mut due.turns);
        Some(Open {
            nth,
            definition,
            rule,
            ended_at: due.ended_at,
            divided: episode::divide(turns, due.ended_at, rule, &signals),
            signals,
        })
    }

    /// Scores episodes that are over, each given with its place among `due`.
    async fn score(
        &mut self,
        connection: &mut PgConnection,
        due: &[Due],
        open: Vec<Open<'a>>,
        needed: &Needed,
    ) -> anyhow::Result<Vec<(usize, Fate)>> {
        let mut contested = vec![false; open.len()];
        let mut scorings: Vec<Option<Scoring<'_>>> = open
            .iter()
            .map(|open| {
                let is_barred = episode::barred(&open.divided.turns).is_some();
                (!is_barred).then(|| Scoring::new(open.rule, &open.divided, open.ended_at, open.signals.clone()))
            })
            .collect();
        let mut left: Vec<(usize, usize, About)> = Vec::new();
        for (place, open) in open.iter().enumerate() {
            if scorings[place].is_none() || !open.rule.reads_turns() {
                continue;
            }
            let turns = open.divided.turns.iter().enumerate();
            left.extend(turns.map(|(turn, generation)| (place, turn, about_turn(&due[open.nth], generation))));
        }
        let mut left = left.as_slice();
        while !left.is_empty() {
            let fits = needed.page(left.iter().take(PAGE_TURNS).map(|(.., about)| about.surface.as_str()));
            let about: Vec<About> = left[..fits.min(left.len())]
                .iter()
                .map(|(.., about)| about.clone())
                .collect();
            let mut read = signals::read_about_turns(&mut *connection, &about, needed, self.visible).await?;
            let (page, rest) = left.split_at(read.generations.clamp(1, left.len()));
            for (place, turn, about) in page {
                contested[*place] |= read.contested.contains(&about.id);
                let signals = read.by_generation.remove(&about.id).unwrap_or_default();
                if let Some(scoring) = &mut scorings[*place] {
                    scoring.turn(*turn, signals);
                }
            }
            self.waits.push(read);
            left = rest;
        }
        let fates = open
            .iter()
            .zip(scorings)
            .zip(contested)
            .map(|((open, scoring), contested)| {
                let fate = match contested {
                    true => Fate::Contested,
                    false => Fate::Closed(self.rows(due[open.nth].id, open, scoring)),
                };
                (open.nth, fate)
            });
        Ok(fates.collect())
    }

    fn rows(&self, id: Uuid, open: &Open<'_>, scoring: Option<Scoring<'_>>) -> Vec<Closed> {
        let divided = &open.divided;
        let (outcome, turn_rewards) = match (episode::barred(&divided.turns), scoring) {
            (None, Some(scoring)) => scoring.finish(),
            (code, _) => {
                let code = code.unwrap_or("no_feedback");
                (Outcome::Censored { code }, Vec::new())
            }
        };
        let turns = i32::try_from(divided.turns.len()).unwrap_or(i32::MAX);
        let of_episode = divided.turns.iter().enumerate().map(|(nth, turn)| Closed {
            generation_id: turn.id,
            surface: turn.surface.clone(),
            // Of turns on several surfaces, each names its own.
            definition: self
                .surfaces
                .get(&turn.surface)
                .map_or(open.definition, |(version, _)| version),
            closes_at: divided.closes_at,
            outcome: outcome.clone(),
            episode: Some(OfEpisode {
                id,
                turns,
                turn_reward: turn_rewards.get(nth).copied().flatten(),
            }),
        });
        let late = divided.late.iter().map(|turn| self.alone(turn, LATE_TURN));
        of_episode.chain(late).collect()
    }
}

fn about_episode(due: &Due) -> Option<About> {
    let first = episode::first(&due.turns)?;
    Some(About {
        tenant: due.tenant.clone(),
        id: due.id,
        surface: first.surface.clone(),
        stored_at: first.stored_at,
    })
}

fn about_turn(due: &Due, turn: &Turn) -> About {
    About {
        tenant: due.tenant.clone(),
        id: turn.id,
        surface: turn.surface.clone(),
        stored_at: turn.stored_at,
    }
}

/// Closes all open turns of an episode without reading them.
async fn close_too_many(connection: &mut PgConnection, due: &Due, definition: i32) -> sqlx::Result<()> {
    sqlx::query_file!(
        "src/close/episodes/close_too_many.sql",
        due.tenant,
        due.id,
        definition,
        TOO_MANY_TURNS
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Removes episodes that have closed, and postpones others.
async fn update(
    connection: &mut PgConnection,
    gone: &[&Due],
    postponed: &[(&Due, OffsetDateTime)],
) -> sqlx::Result<()> {
    let keys =
        |due: &[&Due]| -> (Vec<String>, Vec<Uuid>) { due.iter().map(|due| (due.tenant.clone(), due.id)).unzip() };
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
    if !postponed.is_empty() {
        let (due, closes_at): (Vec<&Due>, Vec<OffsetDateTime>) = postponed.iter().copied().unzip();
        let (tenants, ids) = keys(&due);
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
    }
    Ok(())
}
