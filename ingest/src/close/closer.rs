//! The closer turns every generation whose horizon has passed into a trajectory, rewarded or
//! censored. Where an episode is the trajectory, its generations close together ([`super::episodes`]).
//!
//! Event time decides, up to the time for which the tables hold all events. If the sink lags or
//! stops, nothing closes, so a lag never turns an accept into a censored sample.
//!
//! `open_generation.closes_at` says when to look at a generation. The rule that scores it says
//! until when signals count. If that is later, because the surface was changed, the generation is
//! postponed. So is one that waits for the answer of a judge ([`super::judged`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use event_log::event::{Purpose, Target};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::judged::{Needs, UNSCORED, Without, judges_of};
use super::unscored::Unscored;
use crate::judge::Judges;
use crate::reward::episode::LATE_TURN;
use crate::reward::stored::Surfaces;
use crate::reward::{Closing, Outcome, Rule, kept_characters, score, starts_at};
use crate::rows::feedback::Needed;
use crate::rows::insert::TenantId;
use crate::rows::join::visible::Visible;
use crate::rows::join::{self, signals};
use crate::rows::offset::{self, EventLog};
use crate::rows::transaction;

const INTERVAL: Duration = Duration::from_millis(50);
const ERROR_PAUSE: Duration = Duration::from_secs(2);
/// Generations closed in one transaction.
const BATCH_MAX: usize = 500;

pub(crate) struct Closer {
    pub pool: PgPool,
    pub log: EventLog,
    pub surfaces: Arc<Surfaces>,
    pub judges: Judges,
    /// How long after a horizon feedback may still reach the log.
    pub grace: time::Duration,
    pub unscored: Unscored,
    pub visible: Visible,
    /// Where the search for due generations, and that for due episodes, goes on.
    pub places: (Place, Place),
    pub shutdown: CancellationToken,
}

/// A place in the order in which rows are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub closes_at: OffsetDateTime,
    pub id: Uuid,
}

impl Place {
    /// Before all rows.
    pub(crate) const START: Self = Self {
        closes_at: OffsetDateTime::UNIX_EPOCH,
        id: Uuid::nil(),
    };

    /// Where to go on after a page. Rows that others hold do not keep the closer from those behind
    /// them. `last`: the last row that it looked at.
    pub(super) fn after(last: Option<Self>, more: bool, some_contested: bool) -> Self {
        last.filter(|_| more && some_contested).unwrap_or(Self::START)
    }
}

/// What the rules read.
pub(super) struct AllNeeded {
    pub of_generations: Needed,
    pub of_episodes: Needed,
    pub of_turns: Needed,
}

impl AllNeeded {
    pub(super) fn by<'a>(rules: impl Iterator<Item = &'a Rule> + Clone) -> Self {
        Self {
            of_generations: Needed::by(rules.clone()),
            of_episodes: Needed::about_episodes(rules.clone()),
            of_turns: Needed::about_turns(rules),
        }
    }
}

impl Closer {
    /// Runs until the shutdown. Several closers may run at once, because each skips rows that
    /// another has locked.
    pub(crate) async fn run(mut self) {
        let needed = AllNeeded::by(self.surfaces.rules());
        while !self.shutdown.is_cancelled() {
            let started = Instant::now();
            let pause = match self.round(&needed).await {
                Ok(true) => continue,
                // Where a look takes long, because a long reader keeps dead rows before those that are
                // due, it takes at most half of the time.
                Ok(false) => INTERVAL.max(started.elapsed()),
                Err(error) => {
                    tracing::warn!(error = %format!("{error:#}"), "cannot close generations, will retry");
                    ERROR_PAUSE
                }
            };
            self.shutdown.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }

    async fn round(&mut self, needed: &AllNeeded) -> anyhow::Result<bool> {
        let caught_up = offset::caught_up(&self.pool, &self.log).await;
        let Some(caught_up) = caught_up.context("read progress")? else {
            return Ok(false);
        };
        let visible = self.visible.observe(caught_up);
        let until = caught_up.to - self.grace;
        let more = self.close(until, &needed.of_generations).await?;
        let more_episodes = self.close_episodes(until, visible, needed).await;
        let more_episodes = more_episodes.context("close episodes")?;
        Ok(more || more_episodes)
    }

    /// Closes generations whose horizon ended at `until` or before: up to [`BATCH_MAX`], as far as
    /// their feedback fits into memory. Returns whether there are more.
    async fn close(&mut self, until: OffsetDateTime, needed: &Needed) -> anyhow::Result<bool> {
        let mut transaction = transaction::begin(&self.pool).await.context("begin")?;
        let from = std::mem::replace(&mut self.places.0, Place::START);
        let due = sqlx::query_file!("src/close/due.sql", until, BATCH_MAX as i64, from.closes_at, from.id);
        let mut due = due.fetch_all(&mut *transaction).await.context("find due generations")?;
        let mut more = due.len() == BATCH_MAX;
        let mut last = due.last().map(|row| Place {
            closes_at: row.closes_at,
            id: row.generation_id,
        });
        let found = due.len();
        if due.is_empty() {
            return Ok(false);
        }
        // Generations whose feedback is being stored are for the next round.
        let of_tenant = |tenant: &str, id| (tenant.to_owned(), id);
        let ids: Vec<TenantId> = due
            .iter()
            .flat_map(|row| [row.generation_id, row.episode_id].map(|id| of_tenant(&row.tenant_id, id)))
            .collect();
        let being_written = join::ids_being_written(&mut transaction, &ids).await;
        let being_written = being_written.context("look for feedback that is being stored")?;
        due.retain(|row| {
            let about = [row.generation_id, row.episode_id].map(|id| of_tenant(&row.tenant_id, id));
            !about.iter().any(|id| being_written.contains(id))
        });
        if due.is_empty() {
            self.places.0 = Place::after(last, more, true);
            return Ok(more);
        }
        let some_announced = due.len() < found;
        let page = needed.page(due.iter().map(|row| row.surface.as_str()));
        let ids: Vec<Uuid> = due.iter().take(page).map(|row| row.generation_id).collect();
        let signals = signals::read(&mut transaction, &ids, needed).await?;
        if signals.generations < due.len() {
            more = true;
            due.truncate(signals.generations);
            last = due.last().map(|row| Place {
                closes_at: row.closes_at,
                id: row.generation_id,
            });
        }
        self.places.0 = Place::after(last, more, some_announced || !signals.contested.is_empty());
        due.retain(|row| !signals.contested.contains(&row.generation_id));
        if due.is_empty() {
            return Ok(more);
        }
        let mut closed = Vec::new();
        let mut postponed = Vec::new();
        let mut needs = Needs::default();
        for row in &due {
            let (version, rule) = self.surfaces.get(&row.surface).unzip();
            let closing = Closing {
                purpose: super::purpose(&row.purpose)?,
                declined: row.declined,
                consent: row.consent,
                shown: row.shown,
                tokens: super::tokens(row.tokens),
                finish_reason: row.finish_reason.clone(),
                starts_at: starts_at(row.sampled_at, row.finished_at.unwrap_or(row.sampled_at)),
                ended_at: row.ended_at,
            };
            if row.stray {
                closed.push(Closed {
                    generation_id: row.generation_id,
                    surface: row.surface.clone(),
                    definition: version.unwrap_or(0),
                    closes_at: closing.starts_at,
                    outcome: Outcome::Censored { code: LATE_TURN },
                    kept_characters: None,
                    episode: None,
                });
                continue;
            }
            let about = signals
                .by_generation
                .get(&row.generation_id)
                .map_or(&[][..], Vec::as_slice);
            let closes_at = closing.closes_at(rule, about);
            if closes_at > until {
                postponed.push((row.generation_id, closes_at));
                continue;
            }
            let is_scored = closing.consent && closing.purpose != Purpose::Evaluation;
            let judges = rule
                .filter(|_| is_scored)
                .map_or_else(Vec::new, |rule| judges_of(&self.judges, rule));
            for target in [Target::Generation(row.generation_id), Target::Episode(row.episode_id)] {
                needs.add(row.generation_id, &row.tenant_id, target, closes_at, None, &judges);
            }
            needs.wait(row.generation_id, closes_at.max(row.stored_at), &judges);
            closed.push(Closed {
                generation_id: row.generation_id,
                surface: row.surface.clone(),
                definition: version.unwrap_or(0),
                closes_at,
                outcome: score(rule, &closing, about),
                kept_characters: kept_characters(closes_at, about).filter(|_| !closing.declined),
                episode: None,
            });
        }
        let without = needs.without(&mut transaction, until).await;
        let without = without.context("look for answers of judges")?;
        closed.retain_mut(|closed| match without.get(&closed.generation_id) {
            None => true,
            Some(Without::Wait(at)) => {
                postponed.push((closed.generation_id, *at));
                false
            }
            Some(Without::Censor) => {
                closed.outcome = Outcome::Censored { code: UNSCORED };
                true
            }
        });
        postpone(&mut transaction, &postponed).await.context("postpone")?;
        store(&mut transaction, &closed).await.context("store trajectories")?;
        transaction.commit().await.context("commit")?;
        signals.record_metrics();
        for closed in &closed {
            self.record(&closed.surface, &closed.outcome);
        }
        if !closed.is_empty() {
            self.report(due[0].closes_at);
        }
        Ok(more)
    }

    /// Counts a trajectory.
    pub(super) fn record(&mut self, surface: &str, outcome: &Outcome) {
        let (Outcome::Rewarded { signal: label, .. } | Outcome::Censored { code: label }) = *outcome;
        metrics::counter!("springtide_ingest_trajectories_total", "outcome" => label).increment(1);
        self.unscored.record(surface, outcome);
    }

    /// Reports the alarm, and how late a round was for its first trajectory.
    pub(super) fn report(&mut self, closes_at: OffsetDateTime) {
        self.unscored.report();
        let late = (OffsetDateTime::now_utc() - closes_at).as_seconds_f64();
        metrics::histogram!("springtide_ingest_close_delay_seconds").record(late.max(0.0));
    }
}

/// A new row of `trajectory`.
pub(super) struct Closed {
    pub generation_id: Uuid,
    pub surface: String,
    /// Version of its reward definition; 0: none.
    pub definition: i32,
    pub closes_at: OffsetDateTime,
    pub outcome: Outcome,
    pub kept_characters: Option<i32>,
    /// The episode that is its trajectory.
    pub episode: Option<OfEpisode>,
}

/// A turn's part of its episode.
#[derive(Debug, Clone, Copy)]
pub(super) struct OfEpisode {
    pub id: Uuid,
    pub turns: i32,
    pub turn_reward: Option<f64>,
}

/// Postpones generations whose surface now has a longer horizon, or that wait for a judge.
async fn postpone(connection: &mut PgConnection, postponed: &[(Uuid, OffsetDateTime)]) -> sqlx::Result<()> {
    if postponed.is_empty() {
        return Ok(());
    }
    let (ids, closes_at): (Vec<Uuid>, Vec<OffsetDateTime>) = postponed.iter().copied().unzip();
    sqlx::query!(
        "update open_generation o set closes_at = p.closes_at \
         from unnest($1::uuid[], $2::timestamptz[]) as p (generation_id, closes_at) \
         where o.generation_id = p.generation_id",
        &ids,
        &closes_at
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Inserts trajectories and closes their generations.
pub(super) async fn store(connection: &mut PgConnection, closed: &[Closed]) -> sqlx::Result<()> {
    macro_rules! column {
        ($row:ident => $value:expr) => {
            &closed.iter().map(|$row| $value).collect::<Vec<_>>()
        };
    }
    let ids = column!(row => row.generation_id);
    let (mut rewards, mut codes, mut signals, mut feedback_at) = (vec![], vec![], vec![], vec![]);
    for row in closed {
        let (reward, code, signal, given_at) = match row.outcome {
            Outcome::Rewarded {
                reward,
                signal,
                feedback_at,
            } => (Some(reward), None, Some(signal.to_owned()), feedback_at),
            Outcome::Censored { code } => (None, Some(code.to_owned()), None, None),
        };
        rewards.push(reward);
        codes.push(code);
        signals.push(signal);
        feedback_at.push(given_at);
    }
    // Not `now()`: everything that the closure has used was stored before `closed_at`. Once, so that
    // the turns of an episode share it.
    sqlx::query!(
        "insert into trajectory \
             (generation_id, surface, reward_definition, closes_at, reward, censor_code, signal, feedback_at, episode_id, \
              episode_turns, turn_reward, kept_characters, closed_at) \
         select r.*, clock.now \
         from unnest($1::uuid[], $2::text[], $3::int[], $4::timestamptz[], $5::double precision[], $6::text[], $7::text[], \
                     $8::timestamptz[], $9::uuid[], $10::int[], $11::double precision[], $12::int[]) as r, \
              (select clock_timestamp() as now offset 0) as clock",
        ids,
        column!(row => row.surface.clone()),
        column!(row => row.definition),
        column!(row => row.closes_at),
        &rewards as _,
        &codes as _,
        &signals as _,
        &feedback_at as _,
        column!(row => row.episode.map(|episode| episode.id)) as _,
        column!(row => row.episode.map(|episode| episode.turns)) as _,
        column!(row => row.episode.and_then(|episode| episode.turn_reward)) as _,
        column!(row => row.kept_characters) as _
    )
    .execute(&mut *connection)
    .await?;
    sqlx::query!("delete from open_generation where generation_id = any($1)", ids)
        .execute(connection)
        .await?;
    Ok(())
}
