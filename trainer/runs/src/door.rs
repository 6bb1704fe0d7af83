//! The door: a cohort that a trainer outside leases, trains on anywhere, and commits once.
//!
//! ```text
//! train     fills a cohort with what passed all checks; its samples become files (`samples`)
//! outside   leases it, downloads the samples, uploads the new weights, commits
//! train     verifies the weights (`weights`) and commits the step, as one of its own
//! ```
//! A lease has a fence, which rises with each lease of the cohort. Calls with a lower one are refused, so
//! a worker that lives on after its job has died can do no harm. A lease that is given up or expires
//! leaves the cohort as it is, for the next lease. Nothing is decided about its generations before the
//! commit, so a cohort that is dropped gives all of them back to the queue.

pub mod lease;
pub mod samples;
pub mod weights;

use crate::advantage::Baselines;
use crate::claim::{self, Claim};
use crate::publish::run_state::Lease;
use artifact::reference::Reference;
use event_log::event::PayloadRef;
use event_log::payload::Store as Payloads;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool};
use std::collections::BTreeMap;
use std::fmt;
use store::Store;
use time::OffsetDateTime;
use uuid::Uuid;

/// Who computes the steps of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedBy {
    /// The process `train`.
    #[default]
    Springtide,
    /// Whoever leases its cohorts: `POST /v1/runs/{id}/cohorts`.
    External,
    /// The same, started by `train`: the name of a `[[trainer.launcher]]`.
    Launcher(String),
}

impl TrainedBy {
    pub fn is_springtide(&self) -> bool {
        *self == Self::Springtide
    }

    /// Refuses settings of a run's adapter that cannot work.
    pub fn check_lora(&self, lora: Option<&model::lora::Config>) -> Result<(), String> {
        match (self, lora) {
            (_, None) => Ok(()),
            (Self::Springtide, Some(lora)) => lora.check().map_err(|why| format!("lora: {why}")),
            (Self::External | Self::Launcher(_), Some(_)) => {
                Err("lora: a trainer outside commits an adapter or all weights as it likes, so leave it out".into())
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum State {
    Filling,
    Full,
    Submitted,
    Committed,
    Dropped,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What a step needs of its cohort, besides the weights.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Ready {
    /// After the step.
    pub baselines: Baselines,
    pub random: u64,
    pub notes: Value,
    pub reward_mean: f64,
    pub reward_std: f64,
    pub trajectories: usize,
    pub sequences: usize,
    /// Trained ones, and those of them that a version before the parent sampled.
    pub tokens: usize,
    #[serde(default)]
    pub stale_tokens: usize,
    /// Seconds from the version before to the first trajectory, and from then until it was full.
    pub wait: f64,
    pub collect: f64,
}

/// What a trainer has committed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Submission {
    pub client_token: String,
    /// The uploaded files, and their sizes in bytes.
    pub files: BTreeMap<String, u64>,
    /// PEFT's `adapter_config.json`, if the files have the factors of an adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Value>,
    /// Generations that were not trained on, with a code for each.
    pub dropped: BTreeMap<Uuid, String>,
    /// Instead of files: nothing of the cohort is trained on, with this code.
    pub dropped_all: Option<String>,
    pub metrics: BTreeMap<String, f64>,
    /// For the next lease of the run: what the trainer needs to go on, such as where its optimizer's
    /// state lies.
    pub state: Value,
    /// Of the new version; see `artifact::reference`.
    #[serde(default)]
    pub reference: Option<Reference>,
}

/// A cohort as `train` works on it.
#[derive(Debug, Clone)]
pub struct Cohort {
    pub id: Uuid,
    pub step: i64,
    pub state: State,
    /// Of a full one.
    pub ready: Option<Ready>,
}

/// When what happened to a full cohort.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    pub filled_at: OffsetDateTime,
    pub leased_at: OffsetDateTime,
    pub submitted_at: OffsetDateTime,
}

/// Submitted, and waiting to be verified.
#[derive(Debug, Clone)]
pub struct Submitted {
    pub submission: Submission,
    pub fence: i64,
    pub holder: String,
    pub times: Times,
}

/// How far a full cohort is.
#[derive(Debug, Clone)]
pub enum Progress {
    Waiting,
    Submitted(Box<Submitted>),
    /// It was dropped.
    Gone,
}

impl Cohort {
    /// The open cohort for this step, full ones of an execution before this one included. Others of the
    /// run are dropped, also one that was filling: what it had is chosen again.
    pub async fn open(pool: &PgPool, claim: &Claim, step: i64, parent: i64) -> Result<Cohort, claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        sqlx::query!(
            r#"
            update cohort set state = 'dropped'
            where run_id = $1 and state in ('filling', 'full', 'submitted')
              and (state = 'filling' or step <> $2 or parent <> $3)
            "#,
            claim.run,
            step,
            parent
        )
        .execute(&mut *transaction)
        .await?;
        sqlx::query!(
            "insert into cohort (run_id, step, parent) values ($1, $2, $3) on conflict do nothing",
            claim.run,
            step,
            parent
        )
        .execute(&mut *transaction)
        .await?;
        let row = sqlx::query!(
            r#"select id, state as "state: State", ready as "ready: Json<Ready>" from cohort
               where run_id = $1 and state in ('filling', 'full', 'submitted')"#,
            claim.run
        )
        .fetch_one(&mut *transaction)
        .await?;
        transaction.commit().await?;
        let ready = row.ready.map(|ready| ready.0);
        Ok(Cohort {
            id: row.id,
            step,
            state: row.state,
            ready,
        })
    }

    /// Notes a file of samples.
    pub async fn add(&self, pool: &PgPool, claim: &Claim, part: &samples::Part) -> Result<(), claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        let added = sqlx::query!(
            r#"
            insert into cohort_part (cohort_id, part, generations, trajectories, tokens, payload)
            select c.id, (select count(*)::integer from cohort_part p where p.cohort_id = c.id), $2, $3, $4, $5
            from cohort c where c.id = $1 and c.state = 'filling'
            "#,
            self.id,
            &part.generations,
            part.trajectories,
            part.tokens,
            Json(&part.payload) as _
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        match added.rows_affected() {
            0 => Err(claim::Error::CohortDropped),
            _ => Ok(()),
        }
    }

    /// No more joins: it waits for its trainer now.
    pub async fn fill(&mut self, pool: &PgPool, claim: &Claim, ready: Ready) -> Result<(), claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        let filled = sqlx::query!(
            "update cohort set state = 'full', ready = $2, filled_at = now() where id = $1 and state = 'filling'",
            self.id,
            Json(&ready) as _
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        if filled.rows_affected() == 0 {
            return Err(claim::Error::CohortDropped);
        }
        self.state = State::Full;
        self.ready = Some(ready);
        Ok(())
    }

    /// What its trainer has committed, if it has.
    pub async fn submitted(&self, pool: &PgPool) -> Result<Progress, sqlx::Error> {
        let row = sqlx::query!(
            r#"select state as "state: State", submission as "submission: Json<Submission>", fence,
                      coalesce(holder, '') as "holder!", filled_at, leased_at, submitted_at
               from cohort where id = $1"#,
            self.id
        )
        .fetch_one(pool)
        .await?;
        let times = row.filled_at.zip(row.leased_at).zip(row.submitted_at);
        Ok(match (row.state, row.submission, times) {
            (State::Submitted, Some(submission), Some(((filled_at, leased_at), submitted_at))) => {
                Progress::Submitted(Box::new(Submitted {
                    submission: submission.0,
                    fence: row.fence,
                    holder: row.holder,
                    times: Times {
                        filled_at,
                        leased_at,
                        submitted_at,
                    },
                }))
            }
            (State::Dropped | State::Committed, ..) => Progress::Gone,
            _ => Progress::Waiting,
        })
    }

    /// The weights cannot be published, with the reason for the trainer. The lease goes on, unless that has happened
    /// to this cohort `refusals_max` times: then it is dropped. Returns whether it is.
    pub async fn refuse(
        &self,
        pool: &PgPool,
        claim: &Claim,
        reason: &str,
        refusals_max: i32,
    ) -> Result<bool, claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        let refusals = sqlx::query_scalar!(
            r#"update cohort set state = case when refusals + 1 < $3 then 'full' else 'dropped' end,
                                 refusal = $2, submission = null, refusals = refusals + 1
               where id = $1 and state = 'submitted' returning refusals"#,
            self.id,
            reason,
            refusals_max
        )
        .fetch_optional(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(refusals.is_some_and(|refusals| refusals >= refusals_max))
    }

    /// Drops it: its generations are in the queue as before.
    pub async fn give_back(&self, pool: &PgPool, claim: &Claim, reason: &str) -> Result<(), claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        sqlx::query!(
            "update cohort set state = 'dropped', refusal = $2 where id = $1 and state <> 'committed'",
            self.id,
            reason
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// All generations, part by part.
    pub async fn generations(&self, pool: &PgPool) -> Result<Vec<Uuid>, sqlx::Error> {
        let parts = sqlx::query_scalar!(
            "select generations from cohort_part where cohort_id = $1 order by part",
            self.id
        )
        .fetch_all(pool)
        .await?;
        Ok(parts.into_iter().flatten().collect())
    }
}

/// Ends the lease of a run's cohort: its trainer is known to be dead. What may live on of it is refused.
pub async fn end_lease(pool: &PgPool, claim: &Claim) -> Result<(), claim::Error> {
    let mut transaction = claim.begin(pool).await?;
    sqlx::query!(
        r#"update cohort set expires_at = now(), client_token = null, fence = fence + 1
           where run_id = $1 and state in ('filling', 'full') and client_token is not null"#,
        claim.run
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(())
}

/// In the transaction of a step: the cohort that it was made of is committed. False: the lease is not the one
/// that submitted it, or the cohort was dropped.
pub(crate) async fn commit(connection: &mut PgConnection, lease: Lease) -> sqlx::Result<bool> {
    let done = sqlx::query!(
        "update cohort set state = 'committed' where id = $1 and fence = $2 and state = 'submitted'",
        lease.cohort,
        lease.fence
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Drops the open cohorts of a run that `train` computes itself now.
pub async fn close(pool: &PgPool, claim: &Claim) -> Result<(), claim::Error> {
    let mut transaction = claim.begin(pool).await?;
    sqlx::query!(
        r#"update cohort set state = 'dropped', refusal = 'the process `train` computes the steps now'
           where run_id = $1 and state in ('filling', 'full', 'submitted')"#,
        claim.run
    )
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(())
}

/// Drops full cohorts of which a generation has expired, or its tenant has withdrawn the consent.
pub async fn drop_withdrawn(pool: &PgPool, policy: &str) -> sqlx::Result<()> {
    sqlx::query!(
        r#"
        update cohort c set state = 'dropped', refusal = 'a tenant has withdrawn its consent, a user was erased, or a generation has expired'
        from run r
        where r.id = c.run_id and r.policy = $1 and c.state = 'full'
          and exists (select from cohort_part p cross join unnest(p.generations) as member (id)
                      where p.cohort_id = c.id
                        and not exists (select from generation g
                                        where g.id = member.id and g.untrainable is distinct from 'erased'
                                          and g.tenant_id = any ((select consenting_tenants($1))::text[])))
        "#,
        policy
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// Deletes the files of cohorts that are no longer open: samples, and uploaded weights.
pub async fn sweep(pool: &PgPool, store: &Store, payloads: &Payloads, policy: &str) -> anyhow::Result<()> {
    let exports = payloads.exports();
    let closed = sqlx::query_scalar!(
        r#"select c.id from cohort c join run r on r.id = c.run_id
           where not c.swept and c.state in ('committed', 'dropped') and r.policy = $1"#,
        policy
    )
    .fetch_all(pool)
    .await?;
    for cohort in closed {
        let parts = sqlx::query_scalar!(
            r#"select payload as "payload: Json<PayloadRef>" from cohort_part where cohort_id = $1"#,
            cohort
        )
        .fetch_all(pool)
        .await?;
        for part in parts {
            exports.remove(&samples::owner(cohort), &part).await?;
        }
        for key in store.list_private(&weights::folder(cohort)).await?.keys() {
            store.delete_private(key).await?;
        }
        let mut transaction = edge::database::begin(pool).await?;
        sqlx::query!("delete from cohort_part where cohort_id = $1", cohort)
            .execute(&mut *transaction)
            .await?;
        sqlx::query!("update cohort set swept = true where id = $1", cohort)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
    }
    Ok(())
}
