//! Closes what has waited long enough: every generation whose horizon has passed becomes a trajectory, rewarded or
//! censored. Event time decides, and only as far as the tables are known to hold everything: behind a lagging or stopped
//! sink nothing closes, so a lag never turns an accept into a censored sample.

mod signals;
mod unscored;

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::event::Purpose;
use crate::reward::stored::Surfaces;
use crate::reward::{Closing, Outcome, score};
use crate::{sink, transaction};
pub(crate) use unscored::Unscored;

const INTERVAL: Duration = Duration::from_millis(50);
const ERROR_PAUSE: Duration = Duration::from_secs(2);
/// Generations closed in one transaction.
const BATCH_MAX: i64 = 500;

pub(crate) struct Closer {
    pub pool: PgPool,
    pub cluster_id: String,
    /// The event topics.
    pub topics: Vec<String>,
    pub surfaces: std::sync::Arc<Surfaces>,
    /// How long after a horizon feedback may still be on its way to the log.
    pub grace: time::Duration,
    pub unscored: Unscored,
    pub shutdown: CancellationToken,
}

impl Closer {
    /// Closes until the stop. Several closers may run: each takes what no other holds.
    pub(crate) async fn run(mut self) {
        while !self.shutdown.is_cancelled() {
            let pause = match self.round().await {
                Ok(closed) if closed == BATCH_MAX => continue,
                Ok(_) => INTERVAL,
                Err(error) => {
                    tracing::warn!(error = %format!("{error:#}"), "nothing closed, will be tried again");
                    ERROR_PAUSE
                }
            };
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn round(&mut self) -> anyhow::Result<i64> {
        let known = sink::caught_up_to(&self.pool, &self.cluster_id, &self.topics).await;
        match known.context("read progress")? {
            Some(known) => self.close(known - self.grace).await,
            None => Ok(0),
        }
    }

    /// Closes up to [`BATCH_MAX`] generations whose horizon ended at `until` or before; returns how many.
    async fn close(&mut self, until: OffsetDateTime) -> anyhow::Result<i64> {
        let mut transaction = transaction::begin(&self.pool).await.context("begin")?;
        let mut due = sqlx::query_file!("src/closer/due.sql", until, BATCH_MAX)
            .fetch_all(&mut *transaction)
            .await
            .context("find what is due")?;
        if due.is_empty() {
            return Ok(0);
        }
        // Feedback about them that is being stored just now is seen in the next round.
        let ids: Vec<Uuid> = due.iter().flat_map(|row| [row.generation_id, row.episode_id]).collect();
        let expected = transaction::expected(&mut transaction, &ids).await;
        let expected = expected.context("look for feedback on its way")?;
        due.retain(|row| !expected.contains(&row.generation_id) && !expected.contains(&row.episode_id));
        if due.is_empty() {
            return Ok(0);
        }
        let ids: Vec<Uuid> = due.iter().map(|row| row.generation_id).collect();
        let joined = signals::read(&mut transaction, &ids).await?;
        due.retain(|row| !joined.unsettled.contains(&row.generation_id));
        if due.is_empty() {
            return Ok(0);
        }
        let ids: Vec<Uuid> = due.iter().map(|row| row.generation_id).collect();
        let mut closed = Closed::default();
        let mut outcomes = Vec::new();
        for row in &due {
            let closing = Closing {
                purpose: purpose(&row.purpose)?,
                declined: row.declined,
                consent: row.consent,
                shown: row.shown,
                tokens: tokens(&row.version_spans),
                finish_reason: row.finish_reason.clone(),
                closes_at: row.closes_at,
                ended_at: row.ended_at,
            };
            let (version, rule) = self.surfaces.get(&row.surface).unzip();
            let about = joined.signals.get(&row.generation_id).map_or(&[][..], Vec::as_slice);
            let outcome = score(rule, &closing, about);
            closed.push(row.generation_id, &row.surface, version.unwrap_or(0), &outcome);
            outcomes.push((row.surface.as_str(), outcome));
        }
        closed.insert(&mut transaction).await.context("store trajectories")?;
        sqlx::query!("delete from open_generation where generation_id = any($1)", &ids)
            .execute(&mut *transaction)
            .await
            .context("close")?;
        transaction.commit().await.context("commit")?;
        closed.count();
        joined.count();
        outcomes
            .iter()
            .for_each(|(surface, outcome)| self.unscored.note(surface, outcome));
        self.unscored.tell();
        let late = (OffsetDateTime::now_utc() - due[0].closes_at).as_seconds_f64();
        metrics::histogram!("springtide_ingest_close_delay_seconds").record(late.max(0.0));
        Ok(i64::try_from(due.len()).unwrap_or(BATCH_MAX))
    }
}

/// The sampled length: reading the tokens to count them would fetch each list from where long values are kept.
fn tokens(version_spans: &serde_json::Value) -> u32 {
    let spans = version_spans.as_array().into_iter().flatten();
    let tokens: u64 = spans.filter_map(|span| span.get(1)?.as_u64()).sum();
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

fn purpose(text: &str) -> anyhow::Result<Purpose> {
    [Purpose::Production, Purpose::Rollout, Purpose::Evaluation]
        .into_iter()
        .find(|purpose| purpose.as_str() == text)
        .with_context(|| format!("purpose {text:?} is not known to this program"))
}

/// Trajectories as columns.
#[derive(Default)]
struct Closed {
    ids: Vec<Uuid>,
    surfaces: Vec<String>,
    versions: Vec<i32>,
    rewards: Vec<Option<f64>>,
    codes: Vec<Option<String>>,
    signals: Vec<Option<String>>,
    feedback_at: Vec<Option<OffsetDateTime>>,
}

impl Closed {
    fn push(&mut self, id: Uuid, surface: &str, version: i32, outcome: &Outcome) {
        self.ids.push(id);
        self.surfaces.push(surface.to_owned());
        self.versions.push(version);
        let (reward, code, signal, feedback_at) = match outcome {
            Outcome::Rewarded {
                reward,
                signal,
                feedback_at,
            } => (Some(*reward), None, Some((*signal).to_owned()), *feedback_at),
            Outcome::Censored { code } => (None, Some((*code).to_owned()), None, None),
        };
        self.rewards.push(reward);
        self.codes.push(code);
        self.signals.push(signal);
        self.feedback_at.push(feedback_at);
    }

    async fn insert(&self, connection: &mut sqlx::PgConnection) -> sqlx::Result<()> {
        sqlx::query!(
            "insert into trajectory (generation_id, surface, reward_definition, reward, censor_code, signal, feedback_at) \
             select * from unnest($1::uuid[], $2::text[], $3::int[], $4::double precision[], $5::text[], $6::text[], \
                                  $7::timestamptz[])",
            &self.ids,
            &self.surfaces,
            &self.versions,
            &self.rewards as _,
            &self.codes as _,
            &self.signals as _,
            &self.feedback_at as _
        )
        .execute(connection)
        .await?;
        Ok(())
    }

    fn count(&self) {
        let signals = self.signals.iter().zip(&self.codes);
        for (signal, code) in signals {
            let outcome = signal.as_ref().or(code.as_ref()).cloned().unwrap_or_default();
            metrics::counter!("springtide_ingest_trajectories_total", "outcome" => outcome).increment(1);
        }
    }
}
