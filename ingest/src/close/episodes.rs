//! Closes episodes: all turns of an episode in one transaction, however many they are.
//!
//! A transaction takes some due episodes, as many as have [`TURNS_MAX`] turns together, but at least
//! one. It reads the feedback about the episodes, which says when each is over, and then the
//! feedback about their turns, page by page. Of each page only one value per turn and metric stays
//! in memory.
//!
//! An episode with more turns closes without its horizon and without a reward. What comes later, or
//! is left because there are too many to read, closes as late, in as many transactions as it takes.

mod rows;

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::closer::{AllNeeded, Closed, Closer, OfEpisode, Place, store};
use super::judged::{Needs, UNSCORED, Without};
use crate::judge::Judges;
use crate::reward::episode::{self, Divided, LATE_TURN, Scoring, TOO_MANY_TURNS, TURNS_MAX, Turn};
use crate::reward::stored::Surfaces;
use crate::reward::{Outcome, Rule, Signal};
use crate::rows::feedback::{About, Needed};
use crate::rows::insert::TenantId;
use crate::rows::join::{self, signals};
use crate::rows::transaction;
use rows::Due;

/// Turns whose feedback one query reads.
const PAGE_TURNS: usize = 500;

/// What is to be done with it.
enum Fate {
    /// Something about it is being stored. The next round takes it.
    Contested,
    /// Its horizon ends later than expected, or it waits for a judge.
    Postponed(OffsetDateTime),
    Closed(Vec<Closed>),
}

impl Closer {
    /// Closes episodes that were over at `until` or before. `visible`: see [`join::visible`]. Returns
    /// whether there are more.
    pub(super) async fn close_episodes(
        &mut self,
        until: OffsetDateTime,
        visible: OffsetDateTime,
        needed: &AllNeeded,
    ) -> anyhow::Result<bool> {
        let known = until + self.grace;
        let mut transaction = transaction::begin(&self.pool).await.context("begin")?;
        let from = std::mem::replace(&mut self.places.1, Place::START);
        let due = rows::due(&mut transaction, (until, known), from).await;
        let (mut due, mut more) = due.context("find due episodes")?;
        let mut last = due.last().map(place);
        if due.is_empty() {
            return Ok(false);
        }
        let found = due.len();
        let ids: Vec<TenantId> = due.iter().map(|due| (due.tenant.clone(), due.id)).collect();
        let being_written = join::ids_being_written(&mut transaction, &ids).await;
        let being_written = being_written.context("look for feedback that is being stored")?;
        due.retain(|due| !being_written.contains(&(due.tenant.clone(), due.id)));
        let mut some_contested = due.len() < found;
        if rows::add_turns(&mut transaction, &mut due).await? {
            more = true;
            last = due.last().map(place);
        }
        // About turns that a sink may not have seen, so that it could not hold their episode.
        let unseen = |due: &Due| -> Vec<TenantId> {
            let turns = due.turns.iter().filter(|turn| turn.stored_at > visible);
            turns.map(|turn| (due.tenant.clone(), turn.id)).collect()
        };
        let asked: Vec<TenantId> = due.iter().flat_map(unseen).collect();
        let contested_turns = join::ids_being_written(&mut transaction, &asked).await;
        let contested_turns = contested_turns.context("look for feedback about turns that is being stored")?;
        some_contested |= !contested_turns.is_empty();
        due.retain(|due| !unseen(due).iter().any(|turn| contested_turns.contains(turn)));

        let mut round = Round {
            surfaces: &self.surfaces,
            judges: &self.judges,
            until,
            known,
            visible,
            waits: Vec::new(),
        };
        let (due, fates, all_read) = round.judge(&mut transaction, due, needed).await?;
        if !all_read {
            more = true;
            last = due.last().map(place);
        }
        let (mut closed, mut postponed, mut of_episodes) = (Vec::new(), Vec::new(), Vec::new());
        let mut outcomes: Vec<(String, Outcome)> = Vec::new();
        for (due, fate) in due.iter().zip(fates) {
            match fate {
                Fate::Contested => some_contested = true,
                Fate::Postponed(closes_at) => postponed.push((due, closes_at)),
                Fate::Closed(rows) => {
                    more |= due.has_unread();
                    of_episodes.push((due, rows.len()));
                    // Once for the episode, and for each turn that is no part of it.
                    let of_episode = rows.iter().find(|row| row.episode.is_some());
                    let others = rows.iter().filter(|row| row.episode.is_none());
                    let counted = of_episode.into_iter().chain(others);
                    outcomes.extend(counted.map(|row| (row.surface.clone(), row.outcome.clone())));
                    closed.extend(rows);
                }
            }
        }
        let waits = round.waits;
        rows::postpone(&mut transaction, &postponed).await.context("postpone")?;
        rows::take_closed(&mut transaction, &of_episodes)
            .await
            .context("update open episodes")?;
        store(&mut transaction, &closed).await.context("store trajectories")?;
        transaction.commit().await.context("commit")?;
        for signals in waits {
            signals.record_metrics();
        }
        for (surface, outcome) in &outcomes {
            self.record(surface, outcome);
        }
        warn_of_long(&due, &closed);
        if let Some((first, _)) = of_episodes.first().filter(|_| !outcomes.is_empty()) {
            self.report(first.closes_at);
        }
        // Without any progress, the next round begins after these.
        let is_stuck = of_episodes.is_empty() && postponed.is_empty();
        self.places.1 = Place::after(last, more, some_contested && is_stuck);
        Ok(more && (!of_episodes.is_empty() || is_stuck && some_contested))
    }
}

fn place(due: &Due) -> Place {
    Place {
        closes_at: due.closes_at,
        id: due.id,
    }
}

fn warn_of_long(due: &[Due], closed: &[Closed]) {
    let is_long = |row: &&Closed| matches!(row.outcome, Outcome::Censored { code: TOO_MANY_TURNS });
    let long = closed.iter().filter(is_long).filter_map(|row| row.episode);
    let mut long: Vec<OfEpisode> = long.collect();
    long.dedup_by_key(|episode| episode.id);
    for episode in long {
        let tenant = due.iter().find(|due| due.id == episode.id);
        tracing::warn!(
            tenant = tenant.map(|due| due.tenant.as_str()),
            episode_id = %episode.id,
            turns = episode.turns,
            "an episode has too many turns and closes without a reward: does a client use one id for all of its sessions?"
        );
    }
}

/// An episode whose rule is known, and the feedback about it.
struct Open<'a> {
    /// Its place among those that are due.
    nth: usize,
    rule: &'a Rule,
    ended_at: Option<OffsetDateTime>,
    divided: Divided,
    /// When it may be closed, if not now.
    waits_until: Option<OffsetDateTime>,
    signals: Vec<Signal>,
}

struct Round<'a> {
    surfaces: &'a Surfaces,
    judges: &'a Judges,
    until: OffsetDateTime,
    /// Until when the log is in the tables.
    known: OffsetDateTime,
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
                    if episode.divided.turns.len() > TURNS_MAX {
                        fates[nth] = Some(Fate::Closed(self.rows(due[nth].id, &episode, Err(TOO_MANY_TURNS))));
                    } else if let Some(at) = episode.waits_until {
                        fates[nth] = Some(Fate::Postponed(at));
                    } else {
                        open.push(episode);
                    }
                }
            }
            self.waits.push(read);
            let mut needs = Needs::default();
            for open in open
                .iter()
                .filter(|open| episode::barred(&open.divided.turns).is_none())
            {
                let due = &due[open.nth];
                needs.add_episode((due.id, &due.tenant), &open.divided, None, self.judges, open.rule);
            }
            let without = needs.without(connection, self.until).await;
            let without = without.context("look for answers of judges")?;
            open.retain(|open| {
                let fate = match without.get(&due[open.nth].id) {
                    None => return true,
                    Some(Without::Wait(at)) => Fate::Postponed(*at),
                    Some(Without::Censor) => Fate::Closed(self.rows(due[open.nth].id, open, Err(UNSCORED))),
                };
                fates[open.nth] = Some(fate);
                false
            });
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
        let all = |code| {
            let rows = due.turns.iter().map(|turn| self.alone(turn, code));
            Some(Fate::Closed(rows.collect()))
        };
        match self.surfaces.get(&first.surface) {
            _ if due.has_closed => all(LATE_TURN),
            None => all("unknown_surface"),
            Some((_, rule)) if !rule.is_of_episodes() => all("redefined"),
            // Some of its turns are strays, or were not read.
            Some(_) if due.is_full || due.has_unread() => {
                let ends = due.turns.iter().map(|turn| turn.closing.starts_at);
                let closes_at = ends.max().unwrap_or(first.closing.starts_at);
                let outcome = Outcome::Censored { code: TOO_MANY_TURNS };
                let rows = self.together(due.id, &due.turns, closes_at, &outcome, &[]);
                Some(Fate::Closed(rows.collect()))
            }
            Some(_) => None,
        }
    }

    /// A turn that is a trajectory of its own.
    fn alone(&self, turn: &Turn, code: &'static str) -> Closed {
        Closed {
            generation_id: turn.id,
            surface: turn.surface.clone(),
            definition: self.definition(turn),
            closes_at: turn.closing.starts_at,
            outcome: Outcome::Censored { code },
            kept_characters: None,
            episode: None,
        }
    }

    /// The turns of an episode. Those without a reward of their own may be missing at the end of
    /// `turn_rewards`.
    fn together(
        &self,
        id: Uuid,
        turns: &[Turn],
        closes_at: OffsetDateTime,
        outcome: &Outcome,
        turn_rewards: &[Option<f64>],
    ) -> impl Iterator<Item = Closed> {
        let count = i32::try_from(turns.len()).unwrap_or(i32::MAX);
        turns.iter().enumerate().map(move |(nth, turn)| Closed {
            generation_id: turn.id,
            surface: turn.surface.clone(),
            definition: self.definition(turn),
            closes_at,
            outcome: outcome.clone(),
            kept_characters: None,
            episode: Some(OfEpisode {
                id,
                turns: count,
                turn_reward: turn_rewards.get(nth).copied().flatten(),
            }),
        })
    }

    /// Of turns on several surfaces, each names its own.
    fn definition(&self, turn: &Turn) -> i32 {
        self.surfaces.get(&turn.surface).map_or(0, |(version, _)| version)
    }

    /// Takes the turns out of `due` and divides them.
    fn open(&self, nth: usize, due: &mut Due, signals: Vec<Signal>) -> Option<Open<'a>> {
        let surface = &episode::first(&due.turns)?.surface;
        let (_, rule) = self.surfaces.get(surface)?;
        let turns = std::mem::take(&mut due.turns);
        let divided = episode::divide(turns, due.ended_at, rule, &signals);
        // nobody will add anything to a complete one
        let (over_at, known) = match due.is_complete {
            true => (divided.closes_at, self.known),
            false => (divided.over_at, self.until),
        };
        Some(Open {
            nth,
            rule,
            ended_at: due.ended_at,
            waits_until: Some(over_at).filter(|at| *at > known),
            divided,
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
        let mut scorings: Vec<Result<Scoring<'_>, &'static str>> = open
            .iter()
            .map(|open| match episode::barred(&open.divided.turns) {
                Some(code) => Err(code),
                None => {
                    let signals = open.signals.clone();
                    Ok(Scoring::new(open.rule, &open.divided, open.ended_at, signals))
                }
            })
            .collect();
        let mut left: Vec<(usize, usize, About)> = Vec::new();
        for (place, open) in open.iter().enumerate() {
            if scorings[place].is_err() || !open.rule.reads_turns() {
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
                if let Ok(scoring) = &mut scorings[*place] {
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

    /// `scoring`: or the code of an episode that is not scored.
    fn rows(&self, id: Uuid, open: &Open<'_>, scoring: Result<Scoring<'_>, &'static str>) -> Vec<Closed> {
        let divided = &open.divided;
        let (outcome, turn_rewards) = match scoring {
            Ok(scoring) => scoring.finish(),
            Err(code) => (Outcome::Censored { code }, Vec::new()),
        };
        let of_episode = self.together(id, &divided.turns, divided.closes_at, &outcome, &turn_rewards);
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
