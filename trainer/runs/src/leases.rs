//! The states of rollouts, in the table `rollout`: who has leased one, and how it ended. A harness
//! outside changes them through the API; the trainer's own harness does so directly.

use crate::grader::Grade;
use serde::Serialize;
use sqlx::PgPool;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

/// A rollout that somebody has leased.
#[derive(Debug, Clone, PartialEq)]
pub struct Taken {
    pub id: Uuid,
    pub group_id: Uuid,
    pub task_id: String,
    pub prompt: String,
    pub answer: String,
    pub expires_at: OffsetDateTime,
    /// Who knows it may renew the lease and end it.
    pub secret: String,
}

/// Where a rollout stands, as harnesses see it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "object", rename = "rollout")]
pub struct Rollout {
    pub id: Uuid,
    pub run_id: Uuid,
    pub state: String,
    pub code: Option<String>,
    pub reward: Option<f64>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub expires_at: Option<OffsetDateTime>,
}

/// Codes of rollouts without a reward.
pub const HARNESS_FAILED: &str = "harness_failed";

/// Leases the rollout of the oldest draw that is offered. `None`: none is.
pub async fn take(pool: &PgPool, run: Uuid, holder: &str, seconds: u32) -> Result<Option<Taken>, sqlx::Error> {
    sqlx::query_as!(
        Taken,
        r#"
        with taken as (
            update rollout
            set state = 'leased', holder = $2, leased_at = now(), expires_at = now() + make_interval(secs => $3),
                secret_digest = sha256(convert_to(secret.value, 'UTF8'))
            from (select gen_random_uuid()::text as value) as secret
            where id = (select r.id from rollout r
                        where r.run_id = $1 and r.state = 'offered'
                        order by r.draw, r.id
                        limit 1
                        for update skip locked)
            returning id, run_id, group_id, task_id, expires_at, secret.value as secret
        )
        select taken.id, taken.group_id, taken.task_id, task.prompt, task.answer, taken.expires_at as "expires_at!",
               taken.secret as "secret!"
        from taken
        join task on task.run_id = taken.run_id and task.id = taken.task_id
        "#,
        run,
        holder,
        f64::from(seconds)
    )
    .fetch_optional(pool)
    .await
}

/// The rollout, if its run is one of the policy.
pub(crate) async fn find(pool: &PgPool, policy: &str, id: Uuid) -> Result<Option<Rollout>, sqlx::Error> {
    sqlx::query_as!(
        Rollout,
        r#"
        select o.id, o.run_id, o.state, o.code, o.reward, o.expires_at
        from rollout o
        join run r on r.id = o.run_id
        where o.id = $1 and r.policy = $2
        "#,
        id,
        policy
    )
    .fetch_optional(pool)
    .await
}

/// Whether this is the secret of the lease. A rollout that nobody has leased has none.
pub(crate) async fn has_secret(pool: &PgPool, id: Uuid, secret: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"select secret_digest is null or secret_digest = sha256(convert_to($2, 'UTF8')) as "has!"
           from rollout where id = $1"#,
        id,
        secret
    )
    .fetch_one(pool)
    .await
}

/// Starts the time of a lease anew. `None`, as below: nobody holds it, or its run has ended.
pub(crate) async fn renew(pool: &PgPool, id: Uuid, seconds: u32) -> Result<Option<Rollout>, sqlx::Error> {
    sqlx::query_as!(
        Rollout,
        r#"
        update rollout o
        set expires_at = now() + make_interval(secs => $2)
        from run r
        where o.id = $1 and o.state = 'leased' and r.id = o.run_id and r.finished_at is null
        returning o.id, o.run_id, o.state, o.code, o.reward, o.expires_at
        "#,
        id,
        f64::from(seconds)
    )
    .fetch_optional(pool)
    .await
}

/// Ends a rollout with its reward.
pub async fn reward(pool: &PgPool, id: Uuid, grade: &Grade) -> Result<Option<Rollout>, sqlx::Error> {
    let parts = (!grade.parts.is_empty()).then_some(Json(&grade.parts));
    sqlx::query_as!(
        Rollout,
        r#"
        update rollout o
        set state = 'rewarded', reward = $2, reward_parts = $3, finished_at = now()
        from run r
        where o.id = $1 and o.state = 'leased' and r.id = o.run_id and r.finished_at is null
        returning o.id, o.run_id, o.state, o.code, o.reward, o.expires_at
        "#,
        id,
        grade.reward,
        parts as _
    )
    .fetch_optional(pool)
    .await
}

/// Ends a rollout without a reward. `reason`: for people.
pub async fn fail(pool: &PgPool, id: Uuid, code: &str, reason: &str) -> Result<Option<Rollout>, sqlx::Error> {
    sqlx::query_as!(
        Rollout,
        r#"
        update rollout o
        set state = 'failed', code = $2, reason = $3, finished_at = now()
        from run r
        where o.id = $1 and o.state = 'leased' and r.id = o.run_id and r.finished_at is null
        returning o.id, o.run_id, o.state, o.code, o.reward, o.expires_at
        "#,
        id,
        code,
        reason
    )
    .fetch_optional(pool)
    .await
}
