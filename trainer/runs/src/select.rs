//! Which trajectories a step trains on, and why the others are excluded. SQL; nothing is kept in
//! memory.
//!
//! ```text
//! set_aside.sql   gives what no cohort will take its reason: another arm, another version, unsigned
//! candidates.sql  the oldest queued trajectories of the head
//! turns.sql       the other turns of those that are episodes
//! faults.sql      which of all these generations may not be trained on, and why
//! rows.sql        what was logged of the others; context.rs checks signature, prompt and sampling
//! ```
//! Every sample of every run has passed `faults.sql` and `context.rs`, however old its trajectory is.
//! `set_aside` only keeps the queue short. `queue.rs` calls all of them for the realtime run.
//!
//! Every decision is one row of `disposition` per generation, written once. Trajectories that are
//! not chosen yet have no row and stay queued. Nothing here computes an advantage or touches a
//! tensor.

pub mod caps;
mod context;
pub mod provenance;
mod queue;
pub mod rollouts;
mod row;

use crate::advantage::Credit;
use crate::claim::{self, Claim};
use crate::sample::{ModelLimits, Routed};
use event_log::payload::Store as Payloads;
use sqlx::{PgConnection, PgPool};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use time::OffsetDateTime;
use uuid::Uuid;

use caps::{Caps, Contributor, Exhausted, Member, Recent};
pub use context::Assembled;
pub use queue::{Selection, TOO_LARGE, next};

/// Generations by the code of their disposition.
pub type Coded = BTreeMap<Cow<'static, str>, Vec<Uuid>>;

/// Rows decided by one statement.
const DECIDED_AT_ONCE_MAX: i64 = 5_000;
/// Answers from which [`answer_times`] are computed: how recent, and how many of each surface.
const TIMED: Duration = Duration::from_secs(60 * 60);
const TIMED_ROWS_MAX: i64 = 1_000;

/// What production trajectories must match to be trained on.
#[derive(Debug, Clone)]
pub struct Criteria<'a> {
    pub policy: &'a str,
    /// The arms that are learned from.
    pub arms: &'a [String],
    pub answers: Answers,
    /// The versions that turns of episodes may come from, from [`versions`]. The first is the line's
    /// head: only what it samples is on-policy.
    pub versions: &'a [i64],
    /// What each turn of an episode is credited with.
    pub credit: Credit,
    pub discount: f64,
    /// Largest number of tokens of all turns of an episode, each with its context.
    pub trajectory_tokens_max: u64,
    pub model_limits: &'a ModelLimits,
    /// How many trajectories may still join the cohort.
    pub room: usize,
    /// The last generation of each trajectory that is in the cohort already.
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
    arms: &[String],
    seconds_max: f64,
) -> Result<AnswerTimes, sqlx::Error> {
    let rows = sqlx::query_file!(
        "src/select/answer_time.sql",
        policy,
        arms,
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

/// The head and the versions that it was trained from, up to `staleness_max` steps back, the head
/// first. Versions that a rollback left behind are not among them.
pub async fn versions(pool: &PgPool, policy: &str, head: i64, staleness_max: u32) -> Result<Vec<i64>, sqlx::Error> {
    sqlx::query_file_scalar!("src/select/versions.sql", policy, head, staleness_max as i32)
        .fetch_all(pool)
        .await
}

/// The newest trajectories that a run trained on.
pub async fn trained(pool: &PgPool, run: Uuid, caps: Caps) -> Result<Recent, sqlx::Error> {
    let forgotten = OffsetDateTime::now_utc() - caps::MEMORY;
    let window = caps.window as usize;
    let mut newest_first = Vec::new();
    let (mut before, mut generations) = (i64::MAX, 0);
    // a page of episodes has fewer trajectories than generations
    while newest_first.len() < window && generations < caps.generations_max() {
        let rows = sqlx::query_file!("src/select/trained.sql", run, i64::from(caps.window), forgotten, before)
            .fetch_all(pool)
            .await?;
        let Some(last) = rows.last() else { break };
        before = last.step;
        for row in rows {
            let count = |value: i64| usize::try_from(value).unwrap_or(0);
            generations += count(row.generations);
            // a tenant that is not seen has withdrawn its consent, and weighs nothing any more
            let (Some(tenant), Some(user), Some(surface), Some(replica)) =
                (row.tenant_id, row.user_key, row.surface, row.replica)
            else {
                continue;
            };
            let member = Member {
                from: Contributor {
                    tenant,
                    user,
                    surface,
                    replica,
                },
                generations: count(row.generations),
                tokens: count(row.tokens),
            };
            newest_first.push((member, row.decided_at));
        }
    }
    Ok(Recent::new(caps, newest_first))
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
    let mut transaction = claim.begin(pool).await?;
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

/// Closed trajectories for a run over a dataset, whatever version sampled them and whatever became
/// of them. They pass the same checks as all samples, but for staleness and caps. Ids that are not
/// stored any more, or whose tenant has withdrawn its consent, are in neither list. Fails if the
/// store of payloads does not answer.
pub async fn closed(
    pool: &PgPool,
    payloads: &Payloads,
    ids: &[Uuid],
    limits: &ModelLimits,
    answers: Answers,
) -> Result<Assembled, crate::context::Error> {
    let mut connection = pool.acquire().await?;
    let mut assembled = check_and_read(&mut connection, payloads, ids.to_vec(), None, limits, answers).await?;
    match assembled.unavailable.take() {
        Some(error) => Err(error),
        None => Ok(assembled),
    }
}

async fn check_and_read(
    connection: &mut PgConnection,
    payloads: &Payloads,
    mut ids: Vec<Uuid>,
    versions: Option<&[i64]>,
    limits: &ModelLimits,
    answers: Answers,
) -> Result<Assembled, sqlx::Error> {
    let checks = Checks {
        versions,
        model_limits: limits,
        exhausted: &Exhausted::default(),
        credited: None,
        answers,
    };
    let faults = checks.faults(connection, &ids).await?;
    ids.retain(|id| !faults.contains_key(id));
    let stored = row::read(connection, &ids).await?;
    let mut assembled = stored.assemble(Some(payloads), limits).await?;
    for (id, code) in faults {
        assembled.broken.entry(code.into()).or_default().push(id);
    }
    Ok(assembled)
}

/// Which answers may be used, by how they came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answers {
    /// Sampled ones. A greedy answer has no gradient.
    Sampled,
    /// Greedy ones, too, but no decline with a reward: for a loss that takes a reward for a user's verdict.
    Judged,
    /// All: what is learned after their prompts is something else.
    Any,
}

impl Answers {
    /// As faults.sql knows it.
    fn name(self) -> &'static str {
        match self {
            Answers::Sampled => "sampled",
            Answers::Judged => "judged",
            Answers::Any => "any",
        }
    }
}

/// What faults.sql needs besides ids.
struct Checks<'a> {
    /// See [`Criteria::versions`]. `None`: generations of any version may be used.
    versions: Option<&'a [i64]>,
    model_limits: &'a ModelLimits,
    exhausted: &'a Exhausted,
    /// What turns are credited with, if their own rewards count.
    credited: Option<BTreeMap<Uuid, f64>>,
    answers: Answers,
}

impl Checks<'_> {
    /// The generations that may not be trained on as far as tables tell, with their codes.
    async fn faults(&self, connection: &mut PgConnection, ids: &[Uuid]) -> Result<BTreeMap<Uuid, String>, sqlx::Error> {
        if ids.is_empty() {
            return Ok(BTreeMap::new());
        }
        let credited = self.credited.iter().flatten();
        let (turns, credits): (Vec<Uuid>, Vec<f64>) = credited.map(|(id, value)| (*id, *value)).unzip();
        let found = sqlx::query_file!(
            "src/select/faults.sql",
            ids,
            self.versions,
            self.model_limits.context,
            i32::try_from(self.model_limits.vocabulary).unwrap_or(i32::MAX),
            self.model_limits.experts == Routed::Dense,
            &self.exhausted.user_tenants,
            &self.exhausted.users,
            &self.exhausted.tenants,
            &self.exhausted.surfaces,
            &self.exhausted.replicas,
            self.credited.is_some(),
            &turns,
            &credits,
            self.answers.name()
        )
        .fetch_all(connection)
        .await?;
        Ok(found.into_iter().map(|row| (row.id, row.code)).collect())
    }
}

/// Drops generations with a code, in the caller's fenced transaction. Existing dispositions stay. A
/// run over a dataset drops nothing: the realtime ledger decides. Returns how many.
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
        where exists (select from run where run.id = $3 and run.kind in ('realtime', 'grpo'))
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

/// Drops the queued rollouts of runs that have ended, and of runs that know nothing of them. Returns
/// how many.
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
