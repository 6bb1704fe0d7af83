//! Which trajectories a step trains on, and why the others are excluded. SQL; nothing is kept in
//! memory.
//!
//! ```text
//! set_aside.sql   gives what no cohort will take its reason: another arm, another version, unsigned
//! candidates.sql  the oldest queued trajectories of the head
//! faults.sql      which of them may not be trained on, and why
//! rows.sql        what was logged of the others; context.rs checks signature, prompt and sampling
//! ```
//! Every sample of every run has passed the last three, however old its trajectory is. `set_aside`
//! only keeps the queue short.
//!
//! Every decision is one row of `disposition` per generation, written once. Trajectories that are
//! not chosen yet have no row and stay queued. Nothing here computes an advantage or touches a
//! tensor.

pub mod caps;
mod context;
pub(crate) mod provenance;

use crate::learn::explore;
use crate::learn::sample::{Behavior, ModelLimits, Sample};
use crate::runs::claim::{self, Claim};
use ingest::event::Sampling;
use ingest::payload::Store as Payloads;
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use time::OffsetDateTime;
use uuid::Uuid;

use caps::{Caps, Contributor, Exhausted, Recent};
pub use context::Assembled;

/// Generations by the code of their disposition.
pub type Coded = BTreeMap<Cow<'static, str>, Vec<Uuid>>;

/// Rows decided by one statement.
const DECIDED_AT_ONCE_MAX: i64 = 5_000;
/// Candidates checked by one statement.
const CHECKED_AT_ONCE_MAX: i64 = 1_000;
/// Answers from which [`answer_times`] are computed: how recent, and how many of each surface.
const TIMED: Duration = Duration::from_secs(60 * 60);
const TIMED_ROWS_MAX: i64 = 1_000;
/// How long after a trajectory has closed its parent may still arrive.
const PARENT_LATE_SECONDS_MAX: f64 = 60.0;

/// What production trajectories must match to be trained on.
#[derive(Debug, Clone)]
pub struct Criteria<'a> {
    pub policy: &'a str,
    /// The learning arm.
    pub alias: &'a str,
    /// The line's head: only its samples are on-policy.
    pub head: i64,
    pub model_limits: &'a ModelLimits,
    /// How many trajectories may still join the cohort.
    pub room: i64,
    /// Generations that are in the cohort already.
    pub joined: &'a [Uuid],
    /// Who has reached a cap.
    pub exhausted: &'a Exhausted,
    /// How long the answers of each surface take.
    pub answer_times: &'a AnswerTimes,
}

/// How long nearly all answers of each surface take from the first token to the last.
#[derive(Debug, Clone, Default)]
pub struct AnswerTimes {
    surfaces: Vec<String>,
    seconds: Vec<f64>,
}

/// Reads how long recent answers took, at most `seconds_max` each.
pub async fn answer_times(
    pool: &PgPool,
    policy: &str,
    alias: &str,
    seconds_max: f64,
) -> Result<AnswerTimes, sqlx::Error> {
    let rows = sqlx::query_file!(
        "src/select/answer_time.sql",
        policy,
        alias,
        first_id_of_the_last(TIMED),
        TIMED_ROWS_MAX
    )
    .fetch_all(pool)
    .await?;
    let times = rows
        .into_iter()
        .map(|row| (row.surface, row.seconds.clamp(0.0, seconds_max)));
    let (surfaces, seconds) = times.unzip();
    Ok(AnswerTimes { surfaces, seconds })
}

/// The newest trajectories that a run trained on.
pub async fn trained(pool: &PgPool, run: Uuid, caps: Caps) -> Result<Recent, sqlx::Error> {
    let forgotten = OffsetDateTime::now_utc() - caps::MEMORY;
    let rows = sqlx::query_file!("src/select/trained.sql", run, i64::from(caps.window), forgotten)
        .fetch_all(pool)
        .await?;
    let newest_first = rows.into_iter().map(|row| {
        let contributor = Contributor {
            tenant: row.tenant_id,
            user: row.user_key,
            surface: row.surface,
            replica: row.replica,
        };
        (contributor, row.decided_at)
    });
    Ok(Recent::new(caps, newest_first))
}

/// The result of one poll.
#[derive(Debug, Default)]
pub struct Selection {
    /// Samples that join the cohort now, oldest first.
    pub ready: Vec<Sample>,
    /// Trajectories that this poll excluded: code → count.
    pub set_aside: BTreeMap<String, u64>,
}

/// Excludes trajectories that will never be trained on, and selects those that join the cohort
/// next, in one fenced snapshot. `since`: how far back to look for trajectories to exclude; `None`:
/// at everything.
pub async fn next(
    pool: &PgPool,
    payloads: &Payloads,
    claim: &Claim,
    criteria: &Criteria<'_>,
    since: Option<Duration>,
) -> Result<Selection, claim::Error> {
    let mut transaction = pool.begin_with("begin isolation level repeatable read").await?;
    claim.lock(&mut transaction).await?;
    let mut selection = Selection::default();
    let oldest = since.map_or(Uuid::nil(), first_id_of_the_last);
    loop {
        let decided = sqlx::query_file!(
            "src/select/set_aside.sql",
            criteria.policy,
            criteria.alias,
            criteria.head,
            claim.run,
            oldest,
            DECIDED_AT_ONCE_MAX
        )
        .fetch_all(&mut *transaction)
        .await?;
        let full = decided.len() as i64 == DECIDED_AT_ONCE_MAX;
        for row in decided {
            *selection.set_aside.entry(row.code).or_default() += 1;
        }
        if !full {
            break;
        }
    }
    // rows that wait for a parent take no place in the cohort: ask for more rows behind them
    let mut passed_over = criteria.joined.to_vec();
    let mut room = usize::try_from(criteria.room).unwrap_or(0);
    while room > 0 {
        let candidates = sqlx::query_file_scalar!(
            "src/select/candidates.sql",
            criteria.policy,
            criteria.alias,
            criteria.head,
            CHECKED_AT_ONCE_MAX,
            &passed_over,
            &criteria.answer_times.surfaces,
            &criteria.answer_times.seconds
        )
        .fetch_all(&mut *transaction)
        .await?;
        let full = candidates.len() as i64 == CHECKED_AT_ONCE_MAX;
        let checks = Checks {
            head: criteria.head,
            model_limits: criteria.model_limits,
            exhausted: criteria.exhausted,
        };
        let (mut sound, faults) = checks.split(&mut transaction, candidates).await?;
        selection.refuse(&mut transaction, claim.run, &faults).await?;
        while room > 0 && !sound.is_empty() {
            let ids: Vec<Uuid> = sound.drain(..room.min(sound.len())).collect();
            let assembled = read(&mut transaction, payloads, &ids, criteria.model_limits).await?;
            passed_over.extend(ids);
            selection.refuse(&mut transaction, claim.run, &assembled.broken).await?;
            room -= assembled.samples.len();
            selection.ready.extend(assembled.samples);
        }
        if !full {
            break;
        }
    }
    transaction.commit().await?;
    selection.ready.sort_by_key(|sample| sample.generation);
    Ok(selection)
}

/// Drops trajectories of tenants that do not consent to the policy. The trainer's database user does
/// not see them, so a function does it. `since`: how far back to look; `None`: at everything. Returns
/// how many.
pub async fn drop_without_consent(
    pool: &PgPool,
    policy: &str,
    claim: &Claim,
    since: Option<Duration>,
) -> Result<u64, claim::Error> {
    let mut transaction = pool.begin().await?;
    claim.lock(&mut transaction).await?;
    let mut dropped = 0;
    loop {
        let count = sqlx::query_scalar!(
            r#"select drop_without_consent($1, $2, $3, $4) as "count!""#,
            policy,
            claim.run,
            since.map_or(Uuid::nil(), first_id_of_the_last),
            DECIDED_AT_ONCE_MAX as i32
        )
        .fetch_one(&mut *transaction)
        .await?;
        dropped += count.unsigned_abs();
        if count < DECIDED_AT_ONCE_MAX {
            break;
        }
    }
    transaction.commit().await?;
    Ok(dropped)
}

impl Selection {
    /// Drops generations and counts them by code.
    async fn refuse(
        &mut self,
        connection: &mut PgConnection,
        run: Uuid,
        ids_by_code: &Coded,
    ) -> Result<(), sqlx::Error> {
        for (code, ids) in ids_by_code {
            let count = drop_generations(connection, run, ids, code).await?;
            *self.set_aside.entry(code.to_string()).or_default() += count;
        }
        Ok(())
    }
}

/// What faults.sql needs besides ids.
struct Checks<'a> {
    head: i64,
    model_limits: &'a ModelLimits,
    exhausted: &'a Exhausted,
}

impl Checks<'_> {
    /// Those that may be trained on as far as tables tell, in their order, and the others by code.
    async fn split(
        &self,
        connection: &mut PgConnection,
        mut ids: Vec<Uuid>,
    ) -> Result<(Vec<Uuid>, Coded), sqlx::Error> {
        let mut faults = Coded::new();
        if ids.is_empty() {
            return Ok((ids, faults));
        }
        let found = sqlx::query_file!(
            "src/select/faults.sql",
            &ids,
            self.head,
            self.model_limits.context,
            i32::try_from(self.model_limits.vocabulary).unwrap_or(i32::MAX),
            self.model_limits.experts.is_none(),
            &self.exhausted.user_tenants,
            &self.exhausted.users,
            &self.exhausted.tenants,
            &self.exhausted.surfaces,
            &self.exhausted.replicas
        )
        .fetch_all(connection)
        .await?;
        let faulty: BTreeSet<Uuid> = found.iter().map(|row| row.id).collect();
        ids.retain(|id| !faulty.contains(id));
        for row in found {
            faults.entry(row.code.into()).or_default().push(row.id);
        }
        Ok((ids, faults))
    }
}

/// Reads trajectories that have passed [`Checks`].
async fn read(
    connection: &mut PgConnection,
    payloads: &Payloads,
    ids: &[Uuid],
    limits: &ModelLimits,
) -> Result<Assembled, sqlx::Error> {
    let rows = sqlx::query_file_as!(Row, "src/select/rows.sql", ids, PARENT_LATE_SECONDS_MAX)
        .fetch_all(&mut *connection)
        .await?;
    context::assemble(connection, payloads, rows, limits).await
}

/// The graded rollouts among `ids` that are trajectories by now, and those that can never be read,
/// by code.
pub async fn rollouts(
    pool: &PgPool,
    payloads: &Payloads,
    run: Uuid,
    head: i64,
    ids: &[Uuid],
    limits: &ModelLimits,
) -> Result<Assembled, sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let arrived = sqlx::query_scalar!(
        "select g.id from generation g join trajectory t on t.generation_id = g.id
         where g.run_id = $1 and g.id = any($2) and t.reward is not null
           and not exists (select from disposition d where d.generation_id = g.id)
         order by g.id",
        run,
        ids
    )
    .fetch_all(&mut *connection)
    .await?;
    let checks = Checks {
        head,
        model_limits: limits,
        exhausted: &Exhausted::default(),
    };
    let (sound, faults) = checks.split(&mut connection, arrived).await?;
    let mut assembled = read(&mut connection, payloads, &sound, limits).await?;
    for (code, ids) in faults {
        assembled.broken.entry(code).or_default().extend(ids);
    }
    Ok(assembled)
}

/// Drops generations with a code, in the caller's fenced transaction. Existing dispositions stay.
/// Returns how many.
pub async fn drop_generations(
    connection: &mut PgConnection,
    run: Uuid,
    ids: &[Uuid],
    code: &str,
) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        r#"
        insert into disposition (generation_id, kind, code, run_id)
        select id, 'dropped', $2, $3 from unnest($1::uuid[]) as given (id)
        on conflict (generation_id) do nothing
        "#,
        ids,
        code,
        run
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected())
}

/// Drops the queued rollouts of runs that have ended. Returns how many.
pub async fn sweep_abandoned(pool: &PgPool, policy: &str) -> Result<u64, sqlx::Error> {
    let done = sqlx::query_file!("src/select/abandoned.sql", policy, DECIDED_AT_ONCE_MAX)
        .execute(pool)
        .await?;
    Ok(done.rows_affected())
}

/// Deletes dispositions of generations past retention; the ledger's totals include them. Returns
/// how many.
pub async fn sweep_expired(pool: &PgPool) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "delete from disposition where generation_id in (
             select generation_id from disposition
             where generation_id < (select until_id from generation_horizon)
             order by generation_id limit $1)",
        DECIDED_AT_ONCE_MAX
    )
    .execute(pool)
    .await?;
    Ok(done.rows_affected())
}

/// The smallest UUIDv7 of the last `span`.
pub(crate) fn first_id_of_the_last(span: Duration) -> Uuid {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let milliseconds = now.saturating_sub(span).as_millis() as u64;
    let mut bytes = [0u8; 16];
    bytes[..6].copy_from_slice(&milliseconds.to_be_bytes()[2..]);
    Uuid::from_bytes(bytes)
}

struct Row {
    id: Uuid,
    tenant_id: String,
    user_key: String,
    replica: String,
    surface: String,
    group_id: Option<String>,
    /// For a user.
    production: bool,
    version_oldest: i64,
    prompt_ids: Vec<i32>,
    token_ids: Vec<i32>,
    logprobs: Vec<f32>,
    train_mask: Option<Vec<bool>>,
    temperature: f32,
    top_p: f32,
    sampling: Option<Json<Sampling>>,
    declined: bool,
    decline_suppressed: bool,
    exploration_share: Option<f32>,
    reward: f64,
    /// The row has only the end of its prompt.
    in_parts: bool,
    /// The sampler's experts were logged.
    routed: bool,
    /// Closed so recently that its parents may still arrive.
    young: bool,
    /// With the next three: the proof of who sampled it.
    signature: Option<Vec<u8>>,
    unsigned_digest: Option<Vec<u8>>,
    finished_at: OffsetDateTime,
    public_key: Option<Vec<u8>>,
}

impl From<Row> for Sample {
    fn from(row: Row) -> Self {
        let ids = |v: Vec<i32>| v.into_iter().map(|id| id as u32).collect();
        let sampling = row.sampling.map(|Json(sampling)| sampling);
        Sample {
            generation: row.id,
            tenant: row.tenant_id,
            user: row.user_key,
            replica: row.replica,
            class: row.surface,
            // a user's request may name a group too
            group: row.group_id.filter(|_| !row.production),
            version: row.version_oldest,
            prompt: ids(row.prompt_ids),
            mask: row.train_mask.unwrap_or_else(|| vec![true; row.token_ids.len()]),
            tokens: ids(row.token_ids),
            logprobs: row.logprobs,
            temperature: row.temperature,
            experts: None,
            behavior: Behavior::from_logged(row.temperature, row.top_p, sampling).map(Arc::new),
            reward: row.reward,
            suppressed: row.decline_suppressed,
            weight: explore::weight(row.declined, row.exploration_share),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_the_last_minute_sort_after_its_first_id_and_older_ones_before() {
        let first = first_id_of_the_last(Duration::from_secs(60));
        assert!(Uuid::now_v7() > first);
        assert!(first_id_of_the_last(Duration::from_secs(61)) < first);
    }
}
