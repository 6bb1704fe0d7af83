//! The changes that a trainer outside asks for, and what it sees of a cohort.

use super::{State, Submission};
use artifact::digest::Digest;
use event_log::event::PayloadRef;
use serde::Serialize;
use serde_json::Value;
use sqlx::PgPool;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

/// A cohort, as trainers see it.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "object", rename = "cohort")]
pub struct Cohort {
    pub id: Uuid,
    pub run_id: Uuid,
    pub line: String,
    /// The step that is to be made of it.
    pub step: i64,
    pub state: State,
    /// For every call about this lease.
    pub fence: i64,
    /// The version that the step begins from, and its content hash.
    pub parent: i64,
    pub parent_root: String,
    pub trajectories: i64,
    /// Sampled ones.
    pub tokens: i64,
    /// How many files of samples there are so far.
    pub parts: i32,
    pub lease_seconds: Option<i32>,
    #[serde(with = "time::serde::rfc3339::option")]
    pub expires_at: Option<OffsetDateTime>,
    /// What the trainer that committed the parent said with it. Null: another run or release made the parent.
    pub trainer_state: Option<Value>,
    /// Why the last commit was refused, or the cohort dropped.
    pub refusal: Option<String>,
    /// What was committed, and its content hash.
    pub version: Option<i64>,
    pub root: Option<String>,
}

/// How a cohort is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    pub run: Uuid,
    /// Label of the caller's key.
    pub holder: &'a str,
    pub client_token: &'a str,
    /// The token of an earlier attempt of the same job, whose lease ends now.
    pub replaces: Option<&'a str>,
    pub seconds: i32,
    /// Also one that is still filling.
    pub open: bool,
}

/// Leases the run's cohort, unless somebody else holds it. `None`: there is none now.
pub(crate) async fn take(pool: &PgPool, wanted: Wanted<'_>) -> sqlx::Result<Option<Uuid>> {
    sqlx::query_scalar!(
        r#"
        update cohort c
        set fence = case when own then c.fence else c.fence + 1 end,
            leased_at = case when own then c.leased_at else now() end,
            holder = $2, client_token = $3, lease_seconds = $4, expires_at = now() + make_interval(secs => $4::integer)
        from (select id, coalesce(client_token = $3 and expires_at > now(), false) as own, state,
                     expires_at is null or expires_at <= now() or coalesce(client_token = $6, false) as free
              from cohort where run_id = $1 and state in ('filling', 'full', 'submitted') for update) as found
        where c.id = found.id and (found.own or found.free)
          and (found.own or found.state = 'full' or found.state = 'filling' and $5)
        returning c.id
        "#,
        wanted.run,
        wanted.holder,
        wanted.client_token,
        wanted.seconds,
        wanted.open,
        wanted.replaces
    )
    .fetch_optional(pool)
    .await
}

/// Starts the time of a lease anew. False: its fence is another one, or it has ended.
pub(crate) async fn renew(pool: &PgPool, id: Uuid, fence: i64) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        r#"update cohort set expires_at = now() + make_interval(secs => lease_seconds)
           where id = $1 and fence = $2 and fence > 0 and state in ('filling', 'full', 'submitted')"#,
        id,
        fence
    )
    .execute(pool)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Gives a lease up: the next one may begin at once.
pub(crate) async fn give_up(pool: &PgPool, id: Uuid, fence: i64, reason: &str) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        r#"update cohort set expires_at = now(), client_token = null, fence = fence + 1, refusal = $3
           where id = $1 and fence = $2 and state in ('filling', 'full')"#,
        id,
        fence,
        reason
    )
    .execute(pool)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Hands in what a trainer has made. A lease that has expired may do so until another one begins.
pub(crate) async fn submit(pool: &PgPool, id: Uuid, fence: i64, submission: &Submission) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        r#"update cohort set state = 'submitted', submission = $3, submitted_at = now(), refusal = null
           where id = $1 and fence = $2 and fence > 0 and state = 'full'"#,
        id,
        fence,
        Json(submission) as _
    )
    .execute(pool)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The cohort, if its run is one of the policy, and the token of what was committed.
pub(crate) async fn find(pool: &PgPool, policy: &str, id: Uuid) -> sqlx::Result<Option<(Cohort, Option<String>)>> {
    let row = sqlx::query!(
        r#"
        select c.id, c.run_id, r.line, c.step, c.state as "state: State", c.fence, c.parent, p.root as parent_root,
               coalesce((select sum(trajectories) from cohort_part where cohort_id = c.id), 0) as "trajectories!",
               coalesce((select sum(tokens) from cohort_part where cohort_id = c.id), 0)::bigint as "tokens!",
               (select count(*) from cohort_part where cohort_id = c.id)::integer as "parts!",
               c.lease_seconds, c.expires_at, c.refusal, c.submission ->> 'client_token' as committed_token,
               (select before.submission -> 'state' from cohort before
                join step made on made.run_id = before.run_id and made.step = before.step
                where before.run_id = c.run_id and before.state = 'committed' and made.version = c.parent) as trainer_state,
               s.version as "version?", v.root as "root?"
        from cohort c
        join run r on r.id = c.run_id
        join version p on p.policy = r.policy and p.serial = c.parent
        left join step s on s.run_id = c.run_id and s.step = c.step and c.state = 'committed'
        left join version v on v.policy = r.policy and v.serial = s.version
        where c.id = $1 and r.policy = $2
        "#,
        id,
        policy
    )
    .fetch_optional(pool)
    .await?;
    let hex = |root: Vec<u8>| Digest::from_slice(&root).map(|root| root.to_string());
    Ok(row.map(|row| {
        let cohort = Cohort {
            id: row.id,
            run_id: row.run_id,
            line: row.line,
            step: row.step,
            state: row.state,
            fence: row.fence,
            parent: row.parent,
            parent_root: hex(row.parent_root).unwrap_or_default(),
            trajectories: row.trajectories,
            tokens: row.tokens,
            parts: row.parts,
            lease_seconds: row.lease_seconds,
            expires_at: row.expires_at,
            trainer_state: row.trainer_state,
            refusal: row.refusal,
            version: row.version,
            root: row.root.and_then(hex),
        };
        (cohort, row.committed_token)
    }))
}

/// A file of samples.
pub(crate) async fn part(pool: &PgPool, id: Uuid, part: i32) -> sqlx::Result<Option<PayloadRef>> {
    let payload = sqlx::query_scalar!(
        r#"select payload as "payload: Json<PayloadRef>" from cohort_part where cohort_id = $1 and part = $2"#,
        id,
        part
    )
    .fetch_optional(pool)
    .await?;
    Ok(payload.map(|payload| payload.0))
}
