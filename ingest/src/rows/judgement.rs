//! The table `judgement`: the queue of the judges, the record of their answers, and the cache.
//!
//! ```text
//!  queued ── taken ── answered ── sent          next_at null
//!    ▲         │          └── sent again after a crash: the same event
//!    └─ failed ┘── given up (error)             next_at null
//! ```
//!
//! A process takes a judgement for a short time and renews that while it works. So what a killed
//! process had taken is soon taken by another.

use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::feedback::SIGNALS_MAX;
use super::insert::Row;
use super::transaction;
use crate::event::{Feedback, Target, Value};
use crate::judge::{Judge, Judges, Verdict};

/// What identifies a judgement of one judge.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub tenant: String,
    pub feedback_id: Uuid,
}

/// Queues the texts among this feedback, which has just been stored.
pub(super) async fn queue(
    connection: &mut PgConnection,
    feedback: &[Row<'_, Feedback>],
    judges: &Judges,
) -> sqlx::Result<()> {
    let (mut tenants, mut ids, mut names, mut digests) = (vec![], vec![], vec![], vec![]);
    for row in feedback {
        let Value::Text(text) = &row.body.value else { continue };
        for judge in judges.iter().filter(|judge| judge.of() == row.body.metric_name) {
            if judge.reads_texts_of(&row.event.tenant) {
                tenants.push(row.event.tenant.clone());
                ids.push(row.body.id);
                names.push(judge.name().to_owned());
                digests.push(blake3::hash(text.as_bytes()).as_bytes().to_vec());
            }
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "insert into judgement (tenant_id, feedback_id, judge, text_digest) \
         select * from unnest($1::text[], $2::uuid[], $3::text[], $4::bytea[]) on conflict do nothing",
        &tenants,
        &ids,
        &names,
        &digests
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// A judgement that this process works on.
#[derive(Debug)]
pub(crate) struct Taken {
    pub key: Key,
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
    /// Nothing that it is about is stored yet.
    Early,
    /// The same text was answered before.
    Cached(Verdict),
    Open {
        text: String,
    },
}

/// A stored answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub id: Uuid,
    pub version: Vec<u8>,
    pub value: Value,
}

/// Takes up to `count_max` judgements that are due, for `lease`.
pub(crate) async fn take(pool: &PgPool, judge: &Judge, count_max: usize, lease: Duration) -> sqlx::Result<Vec<Taken>> {
    let mut transaction = transaction::begin(pool).await?;
    // So that two processes do not take two judgements of the same text.
    sqlx::query!(
        "select from pg_advisory_xact_lock(hashtextextended('springtide/judge/' || $1, 0))",
        judge.name()
    )
    .execute(&mut *transaction)
    .await?;
    let rows = sqlx::query_file!(
        "src/rows/judgement/take.sql",
        judge.name(),
        i64::try_from(count_max).unwrap_or(i64::MAX),
        lease.as_secs_f64(),
        &judge.version()[..]
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
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
            attempts: row.attempts,
            target,
            given_at: row.given_at,
            state,
        });
    }
    Ok(taken)
}

fn value(bool: Option<bool>, float: Option<f64>) -> Option<Value> {
    bool.map(Value::Bool).or(float.map(Value::Float))
}

/// Keeps judgements taken for another `lease`.
pub(crate) async fn renew(pool: &PgPool, judge: &Judge, keys: &[Key], lease: Duration) -> sqlx::Result<()> {
    leave(pool, judge, keys, lease, true).await
}

/// Gives judgements back. They are due again after `pause`.
pub(crate) async fn release(pool: &PgPool, judge: &Judge, keys: &[Key], pause: Duration) -> sqlx::Result<()> {
    leave(pool, judge, keys, pause, false).await
}

/// Gives a judgement back whose text is about nothing that is stored yet. The longer it has waited, the
/// later it is due again.
pub(crate) async fn early(pool: &PgPool, judge: &Judge, key: &Key, pause_min: Duration) -> sqlx::Result<()> {
    sqlx::query!(
        "update judgement set taken_until = null, \
             next_at = now() + greatest(make_interval(secs => $4), (now() - created_at) / 4) \
         where feedback_id = $1 and tenant_id = $2 and judge = $3 and taken_until is not null",
        key.feedback_id,
        key.tenant,
        judge.name(),
        pause_min.as_secs_f64()
    )
    .execute(pool)
    .await?;
    Ok(())
}

async fn leave(pool: &PgPool, judge: &Judge, keys: &[Key], pause: Duration, is_taken: bool) -> sqlx::Result<()> {
    let (tenants, ids): (Vec<String>, Vec<Uuid>) = keys.iter().map(|key| (key.tenant.clone(), key.feedback_id)).unzip();
    sqlx::query!(
        "update judgement j set next_at = now() + make_interval(secs => $4), \
             taken_until = case when $5 then now() + make_interval(secs => $4) end \
         from unnest($1::text[], $2::uuid[]) as k (tenant_id, feedback_id) \
         where j.feedback_id = k.feedback_id and j.tenant_id = k.tenant_id and j.judge = $3 \
           and j.taken_until is not null",
        &tenants,
        &ids,
        judge.name(),
        pause.as_secs_f64(),
        is_taken
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// Stores an answer. `None` if another process has stored one.
pub(crate) async fn answer(pool: &PgPool, judge: &Judge, key: &Key, verdict: &Verdict) -> sqlx::Result<Option<Answer>> {
    let id = judge.answer_id(&key.tenant, key.feedback_id);
    let (bool, float) = verdict.columns();
    let stored = sqlx::query!(
        "update judgement set version = $4, value_bool = $5, value_float = $6, votes = $7, answer_id = $8, \
             answered_at = now(), reason = null \
         where feedback_id = $1 and tenant_id = $2 and judge = $3 and answered_at is null and error is null",
        key.feedback_id,
        key.tenant,
        judge.name(),
        &judge.version()[..],
        bool,
        float,
        &verdict.votes,
        id
    )
    .execute(pool)
    .await?;
    Ok((stored.rows_affected() > 0).then(|| Answer {
        id,
        version: judge.version().to_vec(),
        value: verdict.value.clone(),
    }))
}

/// The answer is in the log.
pub(crate) async fn sent(pool: &PgPool, judge: &Judge, key: &Key) -> sqlx::Result<()> {
    sqlx::query!(
        "update judgement set next_at = null, taken_until = null \
         where feedback_id = $1 and tenant_id = $2 and judge = $3 and answered_at is not null",
        key.feedback_id,
        key.tenant,
        judge.name()
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// Counts a failed attempt. The next one is due after `pause`; without one, the text is given up.
pub(crate) async fn failed(
    pool: &PgPool,
    judge: &Judge,
    key: &Key,
    code: &str,
    reason: &str,
    pause: Option<Duration>,
) -> sqlx::Result<()> {
    sqlx::query!(
        "update judgement set attempts = attempts + 1, taken_until = null, reason = $5, \
             next_at = now() + make_interval(secs => $6), error = case when $6::float8 is null then $4 end \
         where feedback_id = $1 and tenant_id = $2 and judge = $3 and answered_at is null and error is null",
        key.feedback_id,
        key.tenant,
        judge.name(),
        code,
        reason,
        pause.map(|pause| pause.as_secs_f64())
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// How many texts are due and not being asked about, up to `count_max`.
pub(crate) async fn queued(pool: &PgPool, judge: &Judge, count_max: i64) -> sqlx::Result<i64> {
    sqlx::query_scalar!(
        "select count(*) as \"count!\" from (select from judgement where judge = $1 and next_at <= now() limit $2) q",
        judge.name(),
        count_max
    )
    .fetch_one(pool)
    .await
}

/// Whose answers a trajectory needs, about what, and of texts given until when.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub tenant: String,
    pub target: Target,
    pub judge: String,
    /// The metric of the texts.
    pub of: String,
    pub until: OffsetDateTime,
}

/// Answers that are not there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Missing {
    /// Some may still come.
    pub is_open: bool,
    /// Some will not come.
    pub has_failed: bool,
}

impl Missing {
    pub(crate) fn any(self) -> bool {
        self.is_open || self.has_failed
    }
}

/// What is missing of each. `as_seen`: what arrived after a closure does not count.
pub(crate) async fn missing(
    connection: &mut PgConnection,
    asked: &[Asked],
    as_seen: bool,
) -> sqlx::Result<Vec<Missing>> {
    let mut missing = vec![Missing::default(); asked.len()];
    if asked.is_empty() {
        return Ok(missing);
    }
    macro_rules! column {
        ($row:ident => $value:expr) => {
            &asked.iter().map(|$row| $value).collect::<Vec<_>>()
        };
    }
    let rows = sqlx::query_file!(
        "src/rows/judgement/missing.sql",
        column!(row => row.tenant.clone()),
        column!(row => match row.target { Target::Generation(id) | Target::Episode(id) => id }),
        column!(row => matches!(row.target, Target::Episode(_))),
        column!(row => row.judge.clone()),
        column!(row => row.of.clone()),
        column!(row => row.until),
        SIGNALS_MAX,
        as_seen
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        if let Some(missing) = usize::try_from(row.nth - 1).ok().and_then(|nth| missing.get_mut(nth)) {
            missing.is_open = row.is_open;
            missing.has_failed = row.has_failed;
        }
    }
    Ok(missing)
}
