//! Scores closed trajectories again with another reward definition, for offline use. Writes
//! nothing.
//!
//! All signals within the horizon of that definition count by event time, however late they
//! arrived, as if the log were read again from its start. With `as_seen`, only signals count that
//! the tables would have had in time ([`arrival`]). Where the definition's trajectory is an episode,
//! the same holds for turns ([`episodes`]).

mod arrival;
mod episodes;

use std::collections::BTreeMap;

use anyhow::Context;
use event_log::event::{Purpose, Target};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::judged::{Needs, UNSCORED, judges_of};
use crate::judge::Judges;
use crate::reward::{Closing, Outcome, Rule, Signal, score, starts_at};
use crate::rows::feedback::{self, FeedbackRow, Needed, Page, RetractionRow};
use crate::rows::judgement::Arrived;

/// Trajectories of one query.
const PAGE: i64 = 500;

/// Which trajectories to score, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its definition also selects the surface.
    pub rule: Rule,
    /// Without their answers, trajectories that need them have no score.
    pub judges: Judges,
    /// Only generations, or episodes whose first turn was, sampled at this time or later.
    pub since: Option<OffsetDateTime>,
    /// Only those sampled before.
    pub until: Option<OffsetDateTime>,
    /// Absent: all tenants.
    pub tenant: Option<String>,
    /// Ignore signals that would not have arrived in time.
    pub as_seen: bool,
    /// The tables hold all events up to this time. Horizons that end later are not over.
    pub known: OffsetDateTime,
}

/// A generation with the stored score of its trajectory and the new one.
#[derive(Debug, Clone)]
pub struct Rescored {
    pub generation_id: Uuid,
    /// By the new definition, the trajectory is this episode.
    pub episode_id: Option<Uuid>,
    /// An earlier turn of the episode has been returned, with the same score.
    pub repeats: bool,
    /// By the new definition, the turn's own reward.
    pub turn_reward: Option<f64>,
    pub tenant: String,
    pub sampled_at: OffsetDateTime,
    /// Event time after which no signal counts by the new definition.
    pub closes_at: OffsetDateTime,
    /// Absent: the new horizon is not over yet, or the episode is not whole.
    pub outcome: Option<Outcome>,
    /// Turns of its episode have expired, so it cannot be scored.
    pub is_cut: bool,
    pub closed: Closed,
}

/// The trajectory as it was closed, which the trainer used.
#[derive(Debug, Clone)]
pub struct Closed {
    /// Version of the definition that scored it; 0: none.
    pub definition: i32,
    pub reward: Option<f64>,
    pub censor_code: Option<String>,
    pub signal: Option<String>,
    pub feedback_at: Option<OffsetDateTime>,
    /// Event time after which nothing counted.
    pub closes_at: Option<OffsetDateTime>,
    pub closed_at: OffsetDateTime,
    /// The trajectory was this episode.
    pub episode_id: Option<Uuid>,
    pub turn_reward: Option<f64>,
}

/// Reads trajectories in the order of their generations' times.
pub struct Reader {
    pool: PgPool,
    request: Request,
    needed: Needed,
    /// About turns of episodes.
    needed_of_turns: Needed,
    after: Uuid,
    until: Uuid,
}

impl Reader {
    pub async fn new(pool: PgPool, request: Request) -> anyhow::Result<Self> {
        let bounds = sqlx::query!(
            "select first_generation_id($1) as after, first_generation_id($2) as until",
            request.since,
            request.until
        );
        let bounds = bounds.fetch_one(&pool).await.context("find the first generation")?;
        Ok(Self {
            pool,
            after: bounds.after.filter(|_| request.since.is_some()).unwrap_or_default(),
            until: bounds
                .until
                .filter(|_| request.until.is_some())
                .unwrap_or_else(Uuid::max),
            needed: match request.rule.is_of_episodes() {
                true => Needed::about_episodes([&request.rule]),
                false => Needed::by([&request.rule]),
            },
            needed_of_turns: Needed::about_turns([&request.rule]),
            request,
        })
    }

    /// The next page; empty at the end.
    pub async fn next(&mut self) -> anyhow::Result<Vec<Rescored>> {
        match self.request.rule.is_of_episodes() {
            true => self.next_episodes().await,
            false => self.next_generations().await,
        }
    }

    async fn next_generations(&mut self) -> anyhow::Result<Vec<Rescored>> {
        // One snapshot per page, so that trajectories and their signals are consistent.
        let begin = edge::database::begin_with(&self.pool, "begin isolation level repeatable read, read only");
        let mut transaction = begin.await.context("begin")?;
        let request = &self.request;
        let mut rows = sqlx::query_file!(
            "src/close/rescore/page.sql",
            request.rule.definition.name,
            self.after,
            self.until,
            request.tenant,
            PAGE
        )
        .fetch_all(&mut *transaction)
        .await
        .context("read trajectories")?;
        let page = self
            .needed
            .page(std::iter::repeat_n(request.rule.definition.name.as_str(), rows.len()));
        let mut ids: Vec<Uuid> = rows.iter().take(page).map(|row| row.generation_id).collect();
        let feedback = feedback::feedback(&mut transaction, &ids, &self.needed).await;
        let feedback = feedback.context("read feedback")?;
        let (mut histories, generations) = histories(&mut transaction, feedback).await?;
        ids.truncate(generations);
        rows.truncate(generations);
        let judges = judges_of(&request.judges, &request.rule);
        let mut needs = Needs::default();
        let mut rescored = Vec::with_capacity(rows.len());
        for row in rows {
            let closing = Closing {
                purpose: super::purpose(&row.purpose)?,
                declined: row.declined,
                consent: row.consent,
                shown: row.shown,
                tokens: super::tokens(row.tokens),
                finish_reason: row.finish_reason,
                starts_at: starts_at(row.sampled_at, row.finished_at.unwrap_or(row.sampled_at)),
                ended_at: row.ended_at,
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
            let about = histories.remove(&row.generation_id).unwrap_or_default();
            let (closing, signals, arrived) = if request.as_seen {
                let (closing, signals, until) =
                    arrival::seen(&request.rule, closing, row.end_stored_at, about, &closed);
                let closed_at = closed.closed_at;
                (closing, signals, Some(Arrived { until, closed_at }))
            } else {
                let signals = about.into_iter().map(|history| history.signal(|_| true));
                (closing, signals.collect(), None)
            };
            let closes_at = closing.closes_at(Some(&request.rule), &signals);
            let over = closes_at <= request.known;
            if over && closing.consent && closing.purpose != Purpose::Evaluation {
                for target in [Target::Generation(row.generation_id), Target::Episode(row.in_episode)] {
                    needs.add(row.generation_id, &row.tenant_id, target, closes_at, arrived, &judges);
                }
            }
            rescored.push(Rescored {
                generation_id: row.generation_id,
                episode_id: None,
                repeats: false,
                turn_reward: None,
                is_cut: false,
                tenant: row.tenant_id,
                sampled_at: row.sampled_at,
                closes_at,
                outcome: over.then(|| score(Some(&request.rule), &closing, &signals)),
                closed,
            });
        }
        let missing = needs.missing(&mut transaction).await;
        let missing = missing.context("look for answers of judges")?;
        transaction.rollback().await.context("end reading")?;
        for rescored in &mut rescored {
            if missing.contains_key(&rescored.generation_id) {
                rescored.outcome = Some(Outcome::Censored { code: UNSCORED });
            }
        }
        if let Some(last) = ids.last() {
            self.after = *last;
        }
        Ok(rescored)
    }
}

/// A feedback event with all its retractions.
#[derive(Clone)]
struct History {
    feedback: FeedbackRow,
    retractions: Vec<RetractionRow>,
}

impl History {
    /// The signal with those retractions that `counts` accepts.
    fn signal(self, counts: impl Fn(&RetractionRow) -> bool) -> Signal {
        let counting = self.retractions.iter().filter(|retraction| counts(retraction));
        let retracted_at = counting.map(|retraction| retraction.given_at).min();
        self.feedback.into_signal(retracted_at)
    }
}

/// By generation or episode, and how many of them have been read, from the first.
async fn histories(connection: &mut PgConnection, page: Page) -> anyhow::Result<(BTreeMap<Uuid, Vec<History>>, usize)> {
    let rows = page.rows;
    let retractions = feedback::retractions(connection, &rows)
        .await
        .context("read retractions")?;
    let mut by_feedback: BTreeMap<(String, Uuid), Vec<RetractionRow>> = BTreeMap::new();
    for retraction in retractions {
        let feedback = (retraction.tenant.clone(), retraction.feedback_id);
        by_feedback.entry(feedback).or_default().push(retraction);
    }
    let mut by_generation: BTreeMap<Uuid, Vec<History>> = BTreeMap::new();
    for feedback in rows {
        // Feedback about an episode has a row for each of its generations.
        let retractions = by_feedback.get(&feedback.key()).cloned().unwrap_or_default();
        let histories = by_generation.entry(feedback.about).or_default();
        histories.push(History { feedback, retractions });
    }
    Ok((by_generation, page.generations))
}
