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
                Err("lora: a trainer outside publishes all weights, so leave it out, or train with springtide".into())
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
    /// Trained ones.
    pub tokens: usize,
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
    /// Generations that were not trained on, with a code for each.
    pub dropped: BTreeMap<Uuid, String>,
    pub metrics: BTreeMap<String, f64>,
    /// For the next lease of the run: what the trainer needs to go on, such as where its optimizer's
    /// state lies.
    pub state: Value,
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
        sqlx::query!(
            r#"
            insert into cohort_part (cohort_id, part, generations, trajectories, tokens, payload)
            select $1, count(*)::integer, $2, $3, $4, $5 from cohort_part where cohort_id = $1
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
        Ok(())
    }

    /// No more joins: it waits for its trainer now.
    pub async fn fill(&mut self, pool: &PgPool, claim: &Claim, ready: Ready) -> Result<(), claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        sqlx::query!(
            "update cohort set state = 'full', ready = $2, filled_at = now() where id = $1 and state = 'filling'",
            self.id,
            Json(&ready) as _
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        self.state = State::Full;
        self.ready = Some(ready);
        Ok(())
    }

    /// What its trainer has committed, if it has.
    pub async fn submitted(&self, pool: &PgPool) -> Result<Option<Submitted>, sqlx::Error> {
        let row = sqlx::query!(
            r#"select submission as "submission!: Json<Submission>", fence, holder as "holder!",
                      filled_at as "filled_at!", leased_at as "leased_at!", submitted_at as "submitted_at!"
               from cohort where id = $1 and state = 'submitted'"#,
            self.id
        )
        .fetch_optional(pool)
        .await?;
        Ok(row.map(|row| Submitted {
            submission: row.submission.0,
            fence: row.fence,
            holder: row.holder,
            times: Times {
                filled_at: row.filled_at,
                leased_at: row.leased_at,
                submitted_at: row.submitted_at,
            },
        }))
    }

    /// The weights cannot be published, with the reason for the trainer. The lease goes on.
    pub async fn refuse(&self, pool: &PgPool, claim: &Claim, reason: &str) -> Result<(), claim::Error> {
        let mut transaction = claim.begin(pool).await?;
        sqlx::query!(
            "update cohort set state = 'full', refusal = $2, submission = null where id = $1 and state = 'submitted'",
            self.id,
            reason
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
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

/// Ends the lease of a run's cohort: its trainer is known to be dead.
pub async fn end_lease(pool: &PgPool, run: Uuid) -> sqlx::Result<()> {
    sqlx::query!(
        "update cohort set expires_at = now(), client_token = null where run_id = $1 and state in ('filling', 'full')",
        run
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// In the transaction of a step: its cohort, if it had one outside, is committed.
pub(crate) async fn commit(connection: &mut PgConnection, run: Uuid, step: i64) -> sqlx::Result<()> {
    sqlx::query!(
        "update cohort set state = 'committed' where run_id = $1 and step = $2 and state = 'submitted'",
        run,
        step
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes the files of cohorts of a run that are no longer open: samples, and uploaded weights.
pub async fn sweep(pool: &PgPool, store: &Store, payloads: &Payloads, run: Uuid) -> anyhow::Result<()> {
    let exports = payloads.exports();
    let parts = sqlx::query!(
        r#"select p.cohort_id, p.part, p.payload as "payload: Json<PayloadRef>"
           from cohort_part p join cohort c on c.id = p.cohort_id
           where c.run_id = $1 and c.state in ('committed', 'dropped')"#,
        run
    )
    .fetch_all(pool)
    .await?;
    let mut cohorts: Vec<Uuid> = parts.iter().map(|part| part.cohort_id).collect();
    cohorts.dedup();
    for part in parts {
        exports.remove(&samples::owner(part.cohort_id), &part.payload).await?;
        sqlx::query!(
            "delete from cohort_part where cohort_id = $1 and part = $2",
            part.cohort_id,
            part.part
        )
        .execute(pool)
        .await?;
    }
    for cohort in cohorts {
        for key in store.list_private(&weights::folder(cohort)).await?.keys() {
            store.delete_private(key).await?;
        }
    }
    Ok(())
}
