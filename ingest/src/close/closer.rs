//! The closer turns every generation whose horizon has passed into a trajectory, rewarded or censored.
//!
//! Event time decides, up to the time for which the tables hold all events. If the sink lags or stops,
//! nothing closes, so a lag never turns an accept into a censored sample.
//!
//! `open_generation.closes_at` says when to look at a generation. The rule that scores it says until when
//! signals count. If that is later, because the surface was changed, the generation is postponed.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::unscored::Unscored;
use crate::reward::stored::Surfaces;
use crate::reward::{Closing, Outcome, score, starts_at};
use crate::rows::join::{self, signals};
use crate::rows::offset::{self, EventLog};
use crate::rows::transaction;

const INTERVAL: Duration = Duration::from_millis(50);
const ERROR_PAUSE: Duration = Duration::from_secs(2);
/// Generations closed in one transaction.
const BATCH_MAX: i64 = 500;

pub(crate) struct Closer {
    pub pool: PgPool,
    pub log: EventLog,
    pub surfaces: Arc<Surfaces>,
    /// How long after a horizon feedback may still reach the log.
    pub grace: time::Duration,
    pub unscored: Unscored,
    pub shutdown: CancellationToken,
}

impl Closer {
    /// Runs until the shutdown. Several closers may run at once, because each skips rows that another has locked.
    pub(crate) async fn run(mut self) {
        while !self.shutdown.is_cancelled() {
            let pause = match self.round().await {
                Ok(closed) if closed == BATCH_MAX => continue,
                Ok(_) => INTERVAL,
                Err(error) => {
                    tracing::warn!(error = %format!("{error:#}"), "cannot close generations, will retry");
                    ERROR_PAUSE
                }
            };
            self.shutdown.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }

    async fn round(&mut self) -> anyhow::Result<i64> {
        let known = offset::caught_up_to(&self.pool, &self.log).await;
        match known.context("read progress")? {
            Some(known) => self.close(known - self.grace).await,
            None => Ok(0),
        }
    }

    /// Closes up to [`BATCH_MAX`] generations whose horizon ended at `until` or before. Returns how many were due.
    async fn close(&mut self, until: OffsetDateTime) -> anyhow::Result<i64> {
        let mut transaction = transaction::begin(&self.pool).await.context("begin")?;
        let mut due = sqlx::query_file!("src/close/due.sql", until, BATCH_MAX)
            .fetch_all(&mut *transaction)
            .await
            .context("find due generations")?;
        if due.is_empty() {
            return Ok(0);
        }
        // Generations whose feedback is being stored are for the next round.
        let ids: Vec<Uuid> = due.iter().flat_map(|row| [row.generation_id, row.episode_id]).collect();
        let being_written = join::ids_being_written(&mut transaction, &ids).await;
        let being_written = being_written.context("look for feedback that is being stored")?;
        due.retain(|row| !being_written.contains(&row.generation_id) && !being_written.contains(&row.episode_id));
        if due.is_empty() {
            return Ok(0);
        }
        let ids: Vec<Uuid> = due.iter().map(|row| row.generation_id).collect();
        let signals = signals::read(&mut transaction, &ids).await?;
        due.retain(|row| !signals.contested.contains(&row.generation_id));
        if due.is_empty() {
            return Ok(0);
        }
        let mut closed = Closed::default();
        let mut outcomes = Vec::new();
        let mut postponed = Postponed::default();
        for row in &due {
            let (version, rule) = self.surfaces.get(&row.surface).unzip();
            let closing = Closing {
                purpose: super::purpose(&row.purpose)?,
                declined: row.declined,
                consent: row.consent,
                shown: row.shown,
                tokens: super::tokens(&row.version_spans),
                finish_reason: row.finish_reason.clone(),
                starts_at: match row.finished_at {
                    Some(finished_at) => starts_at(row.sampled_at, finished_at),
                    // Rows of older versions only have the end of the horizon.
                    None => row.closes_at - rule.map_or(time::Duration::ZERO, |rule| rule.definition.horizon()),
                },
                ended_at: row.ended_at,
            };
            let about = signals
                .by_generation
                .get(&row.generation_id)
                .map_or(&[][..], Vec::as_slice);
            let closes_at = closing.closes_at(rule, about);
            if closes_at > until {
                postponed.push(row.generation_id, closes_at);
                continue;
            }
            let outcome = score(rule, &closing, about);
            closed.push(
                row.generation_id,
                &row.surface,
                version.unwrap_or(0),
                closes_at,
                &outcome,
            );
            outcomes.push((row.surface.as_str(), outcome));
        }
        postponed.store(&mut transaction).await.context("postpone")?;
        closed.insert(&mut transaction).await.context("store trajectories")?;
        sqlx::query!("delete from open_generation where generation_id = any($1)", &closed.ids)
            .execute(&mut *transaction)
            .await
            .context("close")?;
        transaction.commit().await.context("commit")?;
        closed.record_metrics();
        signals.record_metrics();
        outcomes
            .iter()
            .for_each(|(surface, outcome)| self.unscored.record(surface, outcome));
        self.unscored.report();
        let late = (OffsetDateTime::now_utc() - due[0].closes_at).as_seconds_f64();
        metrics::histogram!("springtide_ingest_close_delay_seconds").record(late.max(0.0));
        Ok(i64::try_from(due.len()).unwrap_or(BATCH_MAX))
    }
}

/// Generations that close later than expected, because their surface now has a longer horizon.
#[derive(Default)]
struct Postponed {
    ids: Vec<Uuid>,
    closes_at: Vec<OffsetDateTime>,
}

impl Postponed {
    fn push(&mut self, id: Uuid, closes_at: OffsetDateTime) {
        self.ids.push(id);
        self.closes_at.push(closes_at);
    }

    async fn store(&self, connection: &mut sqlx::PgConnection) -> sqlx::Result<()> {
        if self.ids.is_empty() {
            return Ok(());
        }
        sqlx::query!(
            "update open_generation o set closes_at = p.closes_at \
             from unnest($1::uuid[], $2::timestamptz[]) as p (generation_id, closes_at) \
             where o.generation_id = p.generation_id",
            &self.ids,
            &self.closes_at
        )
        .execute(connection)
        .await?;
        Ok(())
    }
}

/// The columns of new trajectories.
#[derive(Default)]
struct Closed {
    ids: Vec<Uuid>,
    surfaces: Vec<String>,
    versions: Vec<i32>,
    closes_at: Vec<OffsetDateTime>,
    rewards: Vec<Option<f64>>,
    codes: Vec<Option<String>>,
    signals: Vec<Option<String>>,
    feedback_at: Vec<Option<OffsetDateTime>>,
}

impl Closed {
    fn push(&mut self, id: Uuid, surface: &str, version: i32, closes_at: OffsetDateTime, outcome: &Outcome) {
        self.ids.push(id);
        self.surfaces.push(surface.to_owned());
        self.versions.push(version);
        self.closes_at.push(closes_at);
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
        // Not `now()`: everything that the closure has used was stored before `closed_at`.
        sqlx::query!(
            "insert into trajectory \
                 (generation_id, surface, reward_definition, closes_at, reward, censor_code, signal, feedback_at, closed_at) \
             select *, clock_timestamp() \
             from unnest($1::uuid[], $2::text[], $3::int[], $4::timestamptz[], $5::double precision[], $6::text[], $7::text[], \
                         $8::timestamptz[])",
            &self.ids,
            &self.surfaces,
            &self.versions,
            &self.closes_at,
            &self.rewards as _,
            &self.codes as _,
            &self.signals as _,
            &self.feedback_at as _
        )
        .execute(connection)
        .await?;
        Ok(())
    }

    fn record_metrics(&self) {
        let signals = self.signals.iter().zip(&self.codes);
        for (signal, code) in signals {
            let outcome = signal.as_ref().or(code.as_ref()).cloned().unwrap_or_default();
            metrics::counter!("springtide_ingest_trajectories_total", "outcome" => outcome).increment(1);
        }
    }
}
