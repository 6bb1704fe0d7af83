//! Scores closed episodes again.
//!
//! With `as_seen`, an event counts if it was stored before the real closure. If the other definition
//! closes the episode later or earlier than the real one did, that moment moves by as much.

use anyhow::Context;
use sqlx::PgConnection;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::super::judged::{Needs, UNSCORED};
use super::{Closed, History, Reader, Request, Rescored, histories};
use crate::reward::episode::{self, Divided, LATE_TURN, OPEN_TURNS_MAX, Scoring, TOO_MANY_TURNS, TURNS_MAX, Turn};
use crate::reward::{Outcome, Signal};
use crate::rows::feedback::{self, About, RetractionRow};
use crate::rows::judgement::Arrived;

/// Episodes of one query.
const PAGE: i64 = 100;
/// Turns whose feedback one query reads.
const PAGE_TURNS: usize = 500;
/// How often the moment of the closure is estimated again.
const ESTIMATES_MAX: usize = 16;

/// A closed turn.
struct Stored {
    turn: Turn,
    closed: Closed,
    /// How many turns the episode had when it closed.
    of_turns: Option<i32>,
}

struct Episode {
    tenant: String,
    id: Uuid,
    /// Of its turns on the surface.
    first_id: Uuid,
    ended_at: Option<OffsetDateTime>,
    end_stored_at: Option<OffsetDateTime>,
    turns: Vec<Stored>,
}

impl Reader {
    pub(super) async fn next_episodes(&mut self) -> anyhow::Result<Vec<Rescored>> {
        let begin = edge::database::begin_with(&self.pool, "begin isolation level repeatable read, read only");
        let mut transaction = begin.await.context("begin")?;
        let mut rescored = Vec::new();
        // A page of episodes may have no line, if they are all on other surfaces by now.
        while rescored.is_empty() {
            let episodes = self.episodes(&mut transaction).await?;
            let Some(last) = episodes.last().map(|episode| episode.first_id) else {
                break;
            };
            for episode in episodes {
                rescored.extend(self.rescore(&mut transaction, episode).await?);
            }
            self.after = last;
        }
        transaction.rollback().await.context("end reading")?;
        Ok(rescored)
    }

    async fn episodes(&self, connection: &mut PgConnection) -> anyhow::Result<Vec<Episode>> {
        let surface = &self.request.rule.definition.name;
        let rows = sqlx::query_file!(
            "src/close/rescore/episodes.sql",
            surface,
            self.after,
            self.until,
            self.request.tenant,
            PAGE
        );
        let rows = rows.fetch_all(&mut *connection).await.context("read episodes")?;
        let mut episodes: Vec<Episode> = rows
            .into_iter()
            .map(|row| Episode {
                tenant: row.tenant_id,
                id: row.episode_id,
                first_id: row.first_id,
                ended_at: row.ended_at,
                end_stored_at: row.end_stored_at,
                turns: Vec::new(),
            })
            .collect();
        let tenants: Vec<String> = episodes.iter().map(|episode| episode.tenant.clone()).collect();
        let ids: Vec<Uuid> = episodes.iter().map(|episode| episode.id).collect();
        let rows_max = OPEN_TURNS_MAX as i64 + 1;
        let rows = sqlx::query_file!("src/close/rescore/turns.sql", &tenants, &ids, rows_max, surface)
            .fetch_all(connection)
            .await
            .context("read turns")?;
        let is_full = rows.len() as i64 == rows_max;
        let mut last = 0;
        for row in rows {
            last = usize::try_from(row.nth - 1).unwrap_or(0);
            let Some(episode) = episodes.get_mut(last) else {
                continue;
            };
            let closed = Closed {
                definition: row.reward_definition,
                reward: row.reward,
                censor_code: row.censor_code,
                signal: row.signal,
                feedback_at: row.feedback_at,
                closes_at: row.closes_at,
                closed_at: row.closed_at,
                episode_id: row.of_episode,
                turn_reward: row.turn_reward,
            };
            let of_turns = row.episode_turns;
            episode.turns.push(Stored {
                turn: super::super::turn!(row),
                closed,
                of_turns,
            });
        }
        // The last one may be incomplete. If it is the only one, it is scored without the turns that
        // came too late.
        if is_full {
            episodes.truncate(last.max(1));
        }
        for episode in episodes
            .iter_mut()
            .filter(|episode| episode.turns.len() > OPEN_TURNS_MAX)
        {
            if episode.turns.iter().any(|stored| stored.of_turns.is_some()) {
                episode.turns.retain(|stored| stored.of_turns.is_some());
            }
        }
        Ok(episodes)
    }

    async fn rescore(&self, connection: &mut PgConnection, episode: Episode) -> anyhow::Result<Vec<Rescored>> {
        let request = &self.request;
        let of_turns = episode.turns.iter().filter_map(|stored| stored.of_turns).max();
        let closed_together = episode.turns.iter().filter(|stored| stored.of_turns.is_some()).count();
        let is_cut = of_turns.is_some_and(|of_turns| i64::from(of_turns) > closed_together as i64);
        if is_cut {
            let id = episode.id;
            return Ok(lines(request, episode, |turn| New {
                episode_id: Some(id),
                closes_at: turn.closing.starts_at,
                outcome: None,
                turn_reward: None,
                is_cut,
            }));
        }
        let about = About {
            tenant: episode.tenant.clone(),
            id: episode.id,
            surface: request.rule.definition.name.clone(),
            stored_at: OffsetDateTime::UNIX_EPOCH,
        };
        let page = feedback::about_episodes(&mut *connection, &[about], &self.needed).await;
        let (mut read, _) = histories(&mut *connection, page.context("read feedback about an episode")?).await?;
        let about_episode = read.remove(&episode.id).unwrap_or_default();
        let seen = Seen::of(request, &episode, &about_episode);
        let Some(divided) = seen.divided else {
            return Ok(lines(request, episode, New::late));
        };
        let mut turn_rewards = vec![None; divided.turns.len()];
        let outcome = match episode::barred(&divided.turns) {
            _ if divided.turns.len() > TURNS_MAX => Some(Outcome::Censored { code: TOO_MANY_TURNS }),
            _ if divided.over_at > request.known => None,
            Some(code) => Some(Outcome::Censored { code }),
            None if self.lacks_answers(connection, &episode, &divided, &seen.cutoff).await? => {
                Some(Outcome::Censored { code: UNSCORED })
            }
            None => {
                let signals = about_episode.into_iter();
                let signals = signals
                    .filter(|history| seen.cutoff.has(history))
                    .map(|history| seen.cutoff.signal(history));
                let mut scoring = Scoring::new(&request.rule, &divided, seen.ended_at, signals.collect());
                if request.rule.reads_turns() {
                    self.score_turns(connection, &episode.tenant, &divided, &seen.cutoff, &mut scoring)
                        .await?;
                }
                let (outcome, rewards) = scoring.finish();
                turn_rewards = rewards;
                Some(outcome)
            }
        };
        let id = episode.id;
        Ok(lines(request, episode, |turn| {
            let Some(nth) = divided.turns.iter().position(|other| other.id == turn.id) else {
                return New::late(turn);
            };
            New {
                episode_id: Some(id),
                closes_at: divided.closes_at,
                outcome: outcome.clone(),
                turn_reward: turn_rewards.get(nth).copied().flatten(),
                is_cut: false,
            }
        }))
    }

    /// Whether an answer of a judge is missing that it needs.
    async fn lacks_answers(
        &self,
        connection: &mut PgConnection,
        episode: &Episode,
        divided: &Divided,
        cutoff: &Cutoff,
    ) -> anyhow::Result<bool> {
        let request = &self.request;
        let mut needs = Needs::default();
        let arrived = cutoff.until.map(|until| Arrived {
            until,
            closed_at: cutoff.closed_at,
        });
        let owner = (episode.id, episode.tenant.as_str());
        needs.add_episode(owner, divided, arrived, &request.judges, &request.rule);
        let missing = needs.missing(connection).await;
        Ok(!missing.context("look for answers of judges")?.is_empty())
    }

    async fn score_turns(
        &self,
        connection: &mut PgConnection,
        tenant: &str,
        divided: &Divided,
        cutoff: &Cutoff,
        scoring: &mut Scoring<'_>,
    ) -> anyhow::Result<()> {
        let mut left = 0;
        while left < divided.turns.len() {
            let turns = divided.turns[left..].iter().take(PAGE_TURNS);
            let surface = &self.request.rule.definition.name;
            let fits = self.needed_of_turns.page(turns.clone().map(|_| surface.as_str()));
            let about: Vec<About> = turns
                .take(fits)
                .map(|turn| About {
                    tenant: tenant.to_owned(),
                    id: turn.id,
                    surface: surface.clone(),
                    stored_at: turn.stored_at,
                })
                .collect();
            let page = feedback::about_turns(&mut *connection, &about, &self.needed_of_turns).await;
            let (mut read, count) = histories(&mut *connection, page.context("read feedback about turns")?).await?;
            let count = count.clamp(1, about.len());
            for (nth, about) in about[..count].iter().enumerate() {
                let signals = read.remove(&about.id).unwrap_or_default().into_iter();
                let signals = signals
                    .filter(|history| cutoff.has(history))
                    .map(|history| cutoff.signal(history));
                scoring.turn(left + nth, signals.collect());
            }
            left += count;
        }
        Ok(())
    }
}

/// Which events count.
struct Cutoff {
    /// Those that had arrived by then. Absent: all.
    until: Option<OffsetDateTime>,
    /// When the episode was closed. What is marked late arrived afterwards.
    closed_at: OffsetDateTime,
}

impl Cutoff {
    fn arrived(&self, stored_at: OffsetDateTime, late: bool) -> bool {
        // A late event arrived after the closure, even if its transaction began before.
        let after_closure = self.closed_at + Duration::microseconds(1);
        let at = if late { stored_at.max(after_closure) } else { stored_at };
        self.until.is_none_or(|until| at <= until)
    }

    fn has(&self, history: &History) -> bool {
        self.arrived(history.feedback.stored_at, history.feedback.late)
    }

    fn signal(&self, history: History) -> Signal {
        history.signal(|retraction: &RetractionRow| self.arrived(retraction.stored_at, retraction.late))
    }
}

/// What the tables would have had when the episode closed.
struct Seen {
    cutoff: Cutoff,
    ended_at: Option<OffsetDateTime>,
    /// Absent: no turn had arrived.
    divided: Option<Divided>,
}

impl Seen {
    fn of(request: &Request, episode: &Episode, about_episode: &[History]) -> Self {
        // The closure of the episode, or of the last of its generations.
        let closures = episode.turns.iter().map(|stored| &stored.closed);
        let real = closures.max_by_key(|closed| (closed.episode_id.is_some(), closed.closed_at));
        let closed_at = real.map_or(OffsetDateTime::UNIX_EPOCH, |closed| closed.closed_at);
        let closes_at = real.and_then(|closed| closed.closes_at).unwrap_or(closed_at);
        let at = |until: Option<OffsetDateTime>| {
            let cutoff = Cutoff { until, closed_at };
            let turns = episode.turns.iter().filter(|stored| {
                let late = stored.closed.censor_code.as_deref() == Some(LATE_TURN);
                cutoff.arrived(stored.turn.stored_at, late)
            });
            let turns: Vec<Turn> = turns.map(|stored| stored.turn.clone()).collect();
            let ended_at = episode.ended_at.filter(|_| {
                let stored_at = episode.end_stored_at;
                stored_at.is_none_or(|at| cutoff.arrived(at, false))
            });
            let signals = about_episode.iter().filter(|history| cutoff.has(history));
            let signals: Vec<Signal> = signals.map(|history| cutoff.signal(history.clone())).collect();
            let divided = (!turns.is_empty()).then(|| episode::divide(turns, ended_at, &request.rule, &signals));
            Self {
                cutoff,
                ended_at,
                divided,
            }
        };
        if !request.as_seen {
            return at(None);
        }
        let mut until = closed_at;
        let mut seen = at(Some(until));
        for _ in 0..ESTIMATES_MAX {
            let Some(divided) = &seen.divided else { break };
            let moved = closed_at + (divided.closes_at - closes_at);
            if moved == until {
                break;
            }
            until = moved;
            seen = at(Some(until));
        }
        seen
    }
}

/// What the other definition makes of a turn.
struct New {
    episode_id: Option<Uuid>,
    closes_at: OffsetDateTime,
    outcome: Option<Outcome>,
    turn_reward: Option<f64>,
    is_cut: bool,
}

impl New {
    fn late(turn: &Turn) -> Self {
        Self {
            episode_id: None,
            closes_at: turn.closing.starts_at,
            outcome: Some(Outcome::Censored { code: LATE_TURN }),
            turn_reward: None,
            is_cut: false,
        }
    }
}

/// The lines of the turns on the surface, in the order of the session.
fn lines(request: &Request, episode: Episode, new: impl Fn(&Turn) -> New) -> Vec<Rescored> {
    let mut turns = episode.turns;
    turns.retain(|stored| stored.turn.surface == request.rule.definition.name);
    turns.sort_by_key(|Stored { turn, .. }| (turn.segment, turn.number, turn.id));
    let mut has_line = false;
    let mut lines = Vec::with_capacity(turns.len());
    for stored in turns {
        let new = new(&stored.turn);
        let repeats = new.episode_id.is_some() && has_line;
        has_line |= new.episode_id.is_some();
        lines.push(Rescored {
            generation_id: stored.turn.id,
            episode_id: new.episode_id,
            repeats,
            turn_reward: new.turn_reward,
            tenant: episode.tenant.clone(),
            sampled_at: stored.turn.sampled_at,
            closes_at: new.closes_at,
            outcome: new.outcome,
            is_cut: new.is_cut,
            closed: stored.closed,
        });
    }
    lines
}
