//! The states of rollouts, in the table `rollout`: who has leased one, how it ended, and what the run did
//! with it. A harness outside changes them through the API; the trainer's own harness does so directly.

use crate::claim::{self, Claim};
use crate::grader::Grade;
use serde::Serialize;
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool};
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

/// How often a rollout that was lost is offered again.
pub const ATTEMPTS_MAX: i32 = 3;
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

/// Offers a group of rollouts for each task of a draw. The caller's transaction is fenced.
pub async fn offer(
    connection: &mut PgConnection,
    run: Uuid,
    draw: i64,
    tasks: &[&str],
    group_size: u32,
) -> sqlx::Result<()> {
    let (mut ids, mut task_ids, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for task in tasks {
        let group = Uuid::now_v7();
        for _ in 0..group_size {
            ids.push(Uuid::now_v7());
            task_ids.push((*task).to_owned());
            groups.push(group);
        }
    }
    sqlx::query!(
        r#"
            insert into rollout (id, run_id, task_id, group_id, draw)
            select id, $1, task, group_id, $2 from unnest($3::uuid[], $4::text[], $5::uuid[]) as r (id, task, group_id)
            "#,
        run,
        draw,
        &ids,
        &task_ids,
        &groups
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Gives up leases that have expired, and offers what was lost again.
pub async fn expire(pool: &PgPool, claim: &Claim) -> Result<(), claim::Error> {
    let mut transaction = claim.begin(pool).await?;
    sqlx::query!(
        r#"
        update rollout set state = 'failed', code = 'lease_expired', finished_at = now()
        where run_id = $1 and state = 'leased' and expires_at < now()
        "#,
        claim.run
    )
    .execute(&mut *transaction)
    .await?;
    // a failed one is settled next, so it is replaced once
    let lost = sqlx::query!(
        r#"
        select id, task_id, group_id, draw, attempt, code = 'interrupted' as "interrupted!" from rollout
        where run_id = $1 and state = 'failed' and attempt < $2
        "#,
        claim.run,
        ATTEMPTS_MAX
    )
    .fetch_all(&mut *transaction)
    .await?;
    let replaced: Vec<Uuid> = lost.iter().map(|one| one.id).collect();
    for one in lost {
        sqlx::query!(
            "insert into rollout (id, run_id, task_id, group_id, draw, attempt) values ($1, $2, $3, $4, $5, $6)",
            Uuid::now_v7(),
            claim.run,
            one.task_id,
            one.group_id,
            one.draw,
            // nobody's fault
            one.attempt + i32::from(!one.interrupted)
        )
        .execute(&mut *transaction)
        .await?;
    }
    // a harness may fail another one meanwhile, which is settled after it is replaced
    sqlx::query!(
        "update rollout set attempt = $2 where run_id = $1 and id = any($3)",
        claim.run,
        ATTEMPTS_MAX,
        &replaced
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(())
}

/// Notes that the ends of rollouts are in the log.
pub async fn mark_settled(connection: &mut PgConnection, run: Uuid, ids: &[Uuid]) -> sqlx::Result<()> {
    sqlx::query!(
        r#"
        update rollout set state = 'settled', settled_at = now()
        where run_id = $1 and id = any($2) and state in ('rewarded', 'failed')
        "#,
        run,
        ids
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// No further step is made of the draw.
pub async fn spend(pool: &PgPool, claim: &Claim, draw: i64) -> Result<(), claim::Error> {
    let mut transaction = claim.begin(pool).await?;
    sqlx::query!(
        "update rollout set state = 'spent' where run_id = $1 and draw = $2 and state <> 'spent'",
        claim.run,
        draw
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(())
}

/// What an earlier execution was working on, as this holder, is offered again.
pub async fn give_up_interrupted(pool: &PgPool, claim: &Claim, holder: &str) -> Result<(), claim::Error> {
    let mut transaction = claim.begin(pool).await?;
    sqlx::query!(
        r#"
            update rollout set state = 'failed', code = 'interrupted', finished_at = now()
            where run_id = $1 and state = 'leased' and holder = $2
            "#,
        claim.run,
        holder
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(())
}

/// Notes that the trainer's own harness received an answer. One that was logged and not received is asked
/// for again.
pub async fn note_received(pool: &PgPool, id: Uuid, generation: Uuid) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "update rollout set answers = array_append(answers, $2) where id = $1 and state = 'leased'",
        id,
        generation
    )
    .execute(pool)
    .await?;
    Ok(())
}
