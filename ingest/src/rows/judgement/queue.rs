//! The queue of one judge, for one process.

use std::sync::Arc;
use std::time::Duration;

use event_log::event::TURNS_MAX;
use event_log::event::{Target, Value};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::judge::{Judge, Verdict};
use crate::rows::transaction;

/// What identifies a judgement of one judge.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub tenant: String,
    pub feedback_id: Uuid,
}

/// A judgement that this process works on.
#[derive(Debug)]
pub(crate) struct Taken {
    pub key: Key,
    /// Of the text.
    pub digest: Vec<u8>,
    /// That failed before.
    pub attempts: i32,
    /// What the text is about.
    pub target: Target,
    pub given_at: OffsetDateTime,
    pub state: State,
}

#[derive(Debug)]
pub(crate) enum State {
    /// Answered, and perhaps sent.
    Answered(Answer),
    /// The text has been retracted.
    Retracted,
    /// A generation that it is about is without consent.
    NoConsent,
    /// The judge does not read texts of this tenant, or no longer.
    OtherTenant,
    /// Nothing that it is about is stored yet.
    Early,
    /// The same text was answered before.
    Cached(Verdict),
    Open {
        text: String,
    },
}

/// A stored answer.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub id: Uuid,
    pub version: Vec<u8>,
    pub value: Value,
}

pub(crate) struct Queue {
    pool: PgPool,
    judge: Arc<Judge>,
    /// Marks what this process has taken. It cannot give back what another one took over.
    process: Uuid,
}

impl Queue {
    pub(crate) fn new(pool: PgPool, judge: Arc<Judge>) -> Self {
        Self {
            pool,
            judge,
            process: Uuid::now_v7(),
        }
    }

    /// Takes up to `count_max` judgements that are due, for `lease`.
    pub(crate) async fn take(&self, count_max: usize, lease: Duration) -> sqlx::Result<Vec<Taken>> {
        let mut transaction = transaction::begin(&self.pool).await?;
        // So that two processes do not take two judgements of the same text.
        sqlx::query!(
            "select from pg_advisory_xact_lock(hashtextextended('springtide/judge/' || $1, 0))",
            self.judge.name()
        )
        .execute(&mut *transaction)
        .await?;
        let rows = sqlx::query_file!(
            "src/rows/judgement/take.sql",
            self.judge.name(),
            i64::try_from(count_max).unwrap_or(i64::MAX),
            lease.as_secs_f64(),
            self.process
        )
        .fetch_all(&mut *transaction)
        .await?;
        transaction.commit().await?;
        self.read(rows.into_iter().map(|row| (row.tenant_id, row.feedback_id)).unzip())
            .await
    }

    /// Takes up to `count_max` due judgements of the same text, which has just been answered.
    pub(crate) async fn copies(
        &self,
        tenant: &str,
        digest: &[u8],
        count_max: i64,
        lease: Duration,
    ) -> sqlx::Result<Vec<Taken>> {
        let mut transaction = transaction::begin(&self.pool).await?;
        let rows = sqlx::query_file!(
            "src/rows/judgement/copies.sql",
            self.judge.name(),
            tenant,
            digest,
            count_max,
            lease.as_secs_f64(),
            self.process
        )
        .fetch_all(&mut *transaction)
        .await?;
        transaction.commit().await?;
        self.read(rows.into_iter().map(|row| (row.tenant_id, row.feedback_id)).unzip())
            .await
    }

    /// Outside of the transaction that takes them, which others wait for.
    async fn read(&self, (tenants, ids): (Vec<String>, Vec<Uuid>)) -> sqlx::Result<Vec<Taken>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut transaction = transaction::begin(&self.pool).await?;
        let rows = sqlx::query_file!(
            "src/rows/judgement/read.sql",
            &tenants,
            &ids,
            self.judge.name(),
            &self.judge.version()[..],
            TURNS_MAX as i64
        )
        .fetch_all(&mut *transaction)
        .await?;
        transaction.rollback().await?;
        let mut taken = Vec::with_capacity(rows.len());
        for row in rows {
            let target = match (row.generation_id, row.episode_id) {
                (Some(id), _) => Target::Generation(id),
                (None, Some(id)) => Target::Episode(id),
                (None, None) => continue,
            };
            let cached = value(row.cached_bool, row.cached_float).zip(row.cached_votes);
            let answer = row
                .answer_id
                .zip(row.version)
                .zip(value(row.value_bool, row.value_float));
            let state = match (answer, row.consent, cached) {
                (Some(((id, version), value)), ..) => State::Answered(Answer { id, version, value }),
                _ if row.is_retracted => State::Retracted,
                _ if !self.judge.reads_texts_of(&row.tenant_id) => State::OtherTenant,
                (None, Some(false), _) => State::NoConsent,
                (None, None, _) => State::Early,
                (None, Some(true), Some((value, votes))) => State::Cached(Verdict { value, votes }),
                (None, Some(true), None) => State::Open { text: row.text },
            };
            taken.push(Taken {
                key: Key {
                    tenant: row.tenant_id,
                    feedback_id: row.feedback_id,
                },
                digest: row.text_digest,
                attempts: row.attempts,
                target,
                given_at: row.given_at,
                state,
            });
        }
        Ok(taken)
    }

    /// Keeps judgements taken for another `lease`.
    pub(crate) async fn renew(&self, keys: &[Key], lease: Duration) -> sqlx::Result<()> {
        self.leave(keys, lease, true).await
    }

    /// Gives judgements back. They are due again after `pause`.
    pub(crate) async fn release(&self, keys: &[Key], pause: Duration) -> sqlx::Result<()> {
        self.leave(keys, pause, false).await
    }

    async fn leave(&self, keys: &[Key], pause: Duration, is_taken: bool) -> sqlx::Result<()> {
        let (tenants, ids): (Vec<String>, Vec<Uuid>) =
            keys.iter().map(|key| (key.tenant.clone(), key.feedback_id)).unzip();
        sqlx::query!(
            "update judgement j set next_at = now() + make_interval(secs => $4), \
                 taken_until = case when $5 then now() + make_interval(secs => $4) end \
             from unnest($1::text[], $2::uuid[]) as k (tenant_id, feedback_id) \
             where j.feedback_id = k.feedback_id and j.tenant_id = k.tenant_id and j.judge = $3 \
               and j.taken_until is not null and j.taken_by = $6",
            &tenants,
            &ids,
            self.judge.name(),
            pause.as_secs_f64(),
            is_taken,
            self.process
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives a judgement back whose text is about nothing that is stored yet. The longer it has
    /// waited, the later it is due again.
    pub(crate) async fn early(&self, key: &Key, pause_min: Duration) -> sqlx::Result<()> {
        sqlx::query!(
            "update judgement set taken_until = null, \
                 next_at = now() + greatest(make_interval(secs => $4), (now() - created_at) / 4) \
             where feedback_id = $1 and tenant_id = $2 and judge = $3 and taken_until is not null and taken_by = $5",
            key.feedback_id,
            key.tenant,
            self.judge.name(),
            pause_min.as_secs_f64(),
            self.process
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives a judgement back that the endpoint did not answer, for this reason. Like
    /// [`early`](Self::early), with the queued copies: the text itself may be why, so others come
    /// before it.
    pub(crate) async fn unanswered(
        &self,
        key: &Key,
        digest: &[u8],
        reason: &str,
        pause_min: Duration,
    ) -> sqlx::Result<()> {
        sqlx::query!(
            "update judgement set taken_until = null, reason = $5, \
                 next_at = now() + greatest(make_interval(secs => $6), (now() - created_at) / 4) \
             where judge = $1 and tenant_id = $2 and text_digest = $3 and next_at is not null and answer_id is null \
               and (taken_until is null or feedback_id = $4 and taken_by = $7)",
            self.judge.name(),
            key.tenant,
            digest,
            key.feedback_id,
            reason,
            pause_min.as_secs_f64(),
            self.process
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Stores an answer. `None` if another process has stored one.
    pub(crate) async fn answer(&self, key: &Key, verdict: &Verdict) -> sqlx::Result<Option<Answer>> {
        let id = self.judge.answer_id(&key.tenant, key.feedback_id);
        let (bool, float) = verdict.columns();
        let stored = sqlx::query!(
            "update judgement set version = $4, value_bool = $5, value_float = $6, votes = $7, answer_id = $8, \
                 answered_at = now(), reason = null \
             where feedback_id = $1 and tenant_id = $2 and judge = $3 and answered_at is null and error is null",
            key.feedback_id,
            key.tenant,
            self.judge.name(),
            &self.judge.version()[..],
            bool,
            float,
            &verdict.votes,
            id
        )
        .execute(&self.pool)
        .await?;
        Ok((stored.rows_affected() > 0).then(|| Answer {
            id,
            version: self.judge.version().to_vec(),
            value: verdict.value.clone(),
        }))
    }

    /// The answer is in the log.
    pub(crate) async fn sent(&self, key: &Key) -> sqlx::Result<()> {
        sqlx::query!(
            "update judgement set next_at = null, taken_until = null \
             where feedback_id = $1 and tenant_id = $2 and judge = $3 and answered_at is not null",
            key.feedback_id,
            key.tenant,
            self.judge.name()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Counts a failed attempt of a text and its queued copies. The next one is due after `pause`.
    /// Returns how many are given up instead.
    pub(crate) async fn failed(
        &self,
        key: &Key,
        digest: &[u8],
        code: &str,
        reason: &str,
        pause: Duration,
    ) -> sqlx::Result<i64> {
        let failed = sqlx::query_file!(
            "src/rows/judgement/failed.sql",
            self.judge.name(),
            key.tenant,
            digest,
            key.feedback_id,
            code,
            reason,
            self.judge.attempts_max(),
            pause.as_secs_f64(),
            self.process
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(failed.given_up)
    }

    /// Gives up one judgement, whatever becomes of its copies.
    pub(crate) async fn give_up(&self, key: &Key, code: &str, reason: &str) -> sqlx::Result<()> {
        sqlx::query!(
            "update judgement set taken_until = null, next_at = null, error = $4, reason = $5 \
             where feedback_id = $1 and tenant_id = $2 and judge = $3 and answered_at is null and error is null \
               and taken_by = $6",
            key.feedback_id,
            key.tenant,
            self.judge.name(),
            code,
            reason,
            self.process
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// How many texts are due and not being asked about, up to `count_max`.
    pub(crate) async fn queued(&self, count_max: i64) -> sqlx::Result<i64> {
        sqlx::query_scalar!(
            "select count(*) as \"count!\" from ( \
                 select from judgement where judge = $1 and next_at <= now() limit $2) q",
            self.judge.name(),
            count_max
        )
        .fetch_one(&self.pool)
        .await
    }
}

fn value(bool: Option<bool>, float: Option<f64>) -> Option<Value> {
    bool.map(Value::Bool).or(float.map(Value::Float))
}
