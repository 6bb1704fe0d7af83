//! Closed trajectories scored again, for offline use: what another definition makes of what was said about them. Reads alone:
//! what was trained on stays what it was.
//!
//! Counts what was said within the horizon of that definition by its own time, however late it came, as when the log is read
//! again from its beginning. Or, *as seen*, only what the tables would have had by then ([`arrival`]).

mod arrival;

use std::collections::BTreeMap;

use anyhow::Context;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::facts::{self, Said, TakenBack};
use crate::reward::{Closing, Outcome, Rule, Signal, score, starts_at};

/// Trajectories read at once.
const PAGE: i64 = 500;

/// What is to be scored again, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its definition names the surface.
    pub rule: Rule,
    /// Sampled then or later.
    pub since: Option<OffsetDateTime>,
    /// Sampled before.
    pub until: Option<OffsetDateTime>,
    /// Absent: of all tenants.
    pub tenant: Option<String>,
    /// Leave out what would not have been there in time.
    pub as_seen: bool,
    /// Up to this moment the tables hold everything: a horizon that ends later is not over.
    pub known: OffsetDateTime,
}

/// One trajectory, as it was closed and as it is scored again.
#[derive(Debug, Clone)]
pub struct Rescored {
    pub generation_id: Uuid,
    pub tenant: String,
    pub sampled_at: OffsetDateTime,
    /// Event time after which nothing counts by the new definition.
    pub closes_at: OffsetDateTime,
    /// Absent: the new horizon is not over yet.
    pub outcome: Option<Outcome>,
    /// False: it is not stored from when on its horizon counts, and it was taken to be its first token.
    pub exact: bool,
    pub closed: Closed,
}

/// What the trainer saw.
#[derive(Debug, Clone)]
pub struct Closed {
    /// Version of the definition that scored it; 0: there was none.
    pub definition: i32,
    pub reward: Option<f64>,
    pub censor_code: Option<String>,
    pub signal: Option<String>,
    pub feedback_at: Option<OffsetDateTime>,
    /// Absent: closed by a program that did not note it.
    pub closes_at: Option<OffsetDateTime>,
    pub closed_at: OffsetDateTime,
}

/// Goes through trajectories by the time of their generations.
pub struct Reader {
    pool: PgPool,
    request: Request,
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
        let bounds = bounds.fetch_one(&pool).await.context("find where to begin")?;
        Ok(Self {
            pool,
            after: bounds.after.filter(|_| request.since.is_some()).unwrap_or_default(),
            until: bounds
                .until
                .filter(|_| request.until.is_some())
                .unwrap_or_else(Uuid::max),
            request,
        })
    }

    /// The next ones; none: that was all.
    pub async fn next(&mut self) -> anyhow::Result<Vec<Rescored>> {
        // What belongs together is read at one moment; each page has its own.
        let begin = self.pool.begin_with("begin isolation level repeatable read, read only");
        let mut transaction = begin.await.context("begin")?;
        let request = &self.request;
        let rows = sqlx::query_file!(
            "src/rescore/page.sql",
            request.rule.definition.name,
            self.after,
            self.until,
            request.tenant,
            PAGE
        )
        .fetch_all(&mut *transaction)
        .await
        .context("read trajectories")?;
        let ids: Vec<Uuid> = rows.iter().map(|row| row.generation_id).collect();
        let mut said = said(&mut transaction, &ids).await?;
        transaction.rollback().await.context("end reading")?;
        let mut rescored = Vec::with_capacity(rows.len());
        for row in rows {
            let closing = Closing {
                purpose: facts::purpose(&row.purpose)?,
                declined: row.declined,
                consent: row.consent,
                shown: row.shown,
                tokens: facts::tokens(&row.version_spans),
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
            };
            let about = said.remove(&row.generation_id).unwrap_or_default();
            let (closing, signals) = if request.as_seen {
                arrival::seen(&request.rule, closing, row.end_stored_at, about, &closed)
            } else {
                let all = about.into_iter().map(|about| about.signal(|_| true));
                (closing, all.collect())
            };
            let closes_at = closing.closes_at(Some(&request.rule), &signals);
            let over = closes_at <= request.known;
            rescored.push(Rescored {
                generation_id: row.generation_id,
                tenant: row.tenant_id,
                sampled_at: row.sampled_at,
                closes_at,
                outcome: over.then(|| score(Some(&request.rule), &closing, &signals)),
                exact: row.finished_at.is_some(),
                closed,
            });
        }
        if let Some(last) = ids.last() {
            self.after = *last;
        }
        Ok(rescored)
    }
}

/// One feedback about a trajectory, and everything that takes it back.
struct About {
    said: Said,
    taken_back: Vec<TakenBack>,
}

impl About {
    /// Taken back by those retractions that `counts`.
    fn signal(self, counts: impl Fn(&TakenBack) -> bool) -> Signal {
        let counting = self.taken_back.iter().filter(|taken_back| counts(taken_back));
        let retracted_at = counting.map(|taken_back| taken_back.given_at).min();
        self.said.into_signal(retracted_at)
    }
}

/// By generation.
async fn said(connection: &mut PgConnection, ids: &[Uuid]) -> anyhow::Result<BTreeMap<Uuid, Vec<About>>> {
    let said = facts::feedback(&mut *connection, ids).await.context("read feedback")?;
    let feedback: Vec<Uuid> = said.iter().map(|said| said.id).collect();
    let retractions = facts::retractions(connection, &feedback)
        .await
        .context("read retractions")?;
    let mut taken_back: BTreeMap<Uuid, Vec<TakenBack>> = BTreeMap::new();
    for retraction in retractions {
        taken_back.entry(retraction.feedback_id).or_default().push(retraction);
    }
    let mut by_generation: BTreeMap<Uuid, Vec<About>> = BTreeMap::new();
    for said in said {
        // Feedback about an episode is about each of its generations.
        let taken_back = taken_back.get(&said.id).cloned().unwrap_or_default();
        let about = by_generation.entry(said.generation_id).or_default();
        about.push(About { said, taken_back });
    }
    Ok(by_generation)
}
