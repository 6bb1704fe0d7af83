//! The right to execute a run: a fencing number that rises with every executor.
//!
//! Every transaction that changes a run's results begins with [`Claim::lock`]. It locks the run's
//! row and refuses an executor that has been replaced, so a process that was thought dead can do no
//! harm. The lease ([`lease`]) keeps two processes from working at the same time.

use crate::publish::refuse_withdrawn;
use crate::run::Status;
use crate::uses;
use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use uuid::Uuid;

/// `run.reason` of a run that a person has paused.
pub const PAUSED: &str = "paused by request";
/// `run.reason` of a run that a person has canceled.
pub const CANCELLED: &str = "cancelled by request";

/// Another executor has claimed the run, or a person has ended it. Stop without writing anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("run {run}: this executor (fence {fence}) has been replaced, or the run has ended")]
pub struct Fenced {
    pub run: Uuid,
    pub fence: i64,
}

/// Why a fenced transaction could not begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the claim is lost")]
    Fenced(#[from] Fenced),
    #[error("read the run from the database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("the cohort was dropped while it was filling: a user of it was erased, or the run has ended")]
    CohortDropped,
}

/// One executor's right to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub run: Uuid,
    pub fence: i64,
}

impl Claim {
    /// Claims a run that is queued, or that an executor left running: raises its fence and sets it
    /// to running. `None`: it is paused, has ended, or does not exist.
    pub async fn take(pool: &PgPool, run: Uuid) -> Result<Option<Claim>, sqlx::Error> {
        let fence = sqlx::query_scalar!(
            r#"
            update run
            set fence = fence + 1, status = 'running', reason = null, started_at = coalesce(started_at, now())
            where id = $1 and status in ('validating_files', 'queued', 'running', 'pausing')
            returning fence
            "#,
            run
        )
        .fetch_optional(pool)
        .await?;
        Ok(fence.map(|fence| Claim { run, fence }))
    }

    /// Locks the run's row for the rest of the transaction. An error if a newer claim exists or the
    /// run has ended.
    pub async fn lock(&self, connection: &mut PgConnection) -> Result<(), Error> {
        let held = sqlx::query_scalar!(
            r#"
            select id from run
            where id = $1 and fence = $2 and status in ('running', 'pausing')
            for no key update
            "#,
            self.run,
            self.fence
        )
        .fetch_optional(connection)
        .await?;
        held.map(drop).ok_or_else(|| self.fenced())
    }

    /// Begins a transaction with [`lock`](Self::lock).
    pub async fn begin(&self, pool: &PgPool) -> Result<Transaction<'static, Postgres>, Error> {
        let mut transaction = edge::database::begin(pool).await?;
        self.lock(&mut transaction).await?;
        Ok(transaction)
    }

    /// A person's pending request: `pause` or `cancel`.
    pub async fn requested(&self, pool: &PgPool) -> Result<Option<String>, Error> {
        let row = sqlx::query!(
            "select requested from run where id = $1 and fence = $2 and status in ('running', 'pausing')",
            self.run,
            self.fence
        )
        .fetch_optional(pool)
        .await?;
        row.map(|row| row.requested).ok_or_else(|| self.fenced())
    }

    fn fenced(&self) -> Error {
        let Claim { run, fence } = *self;
        Fenced { run, fence }.into()
    }

    /// Ends this execution: sets the run to `status` with a reason, and appends an event. Runs in the
    /// caller's transaction, together with the cause. `data`: an object, for the event.
    pub async fn release(
        &self,
        connection: &mut PgConnection,
        status: Status,
        reason: &str,
        mut data: Value,
    ) -> Result<(), Error> {
        self.lock(connection).await?;
        sqlx::query!(
            r#"
            update run
            set status = $2, reason = $3, requested = null,
                finished_at = case when $2 = 'paused' then null else now() end
            where id = $1
            "#,
            self.run,
            status as Status,
            reason
        )
        .execute(&mut *connection)
        .await?;
        let level = if status == Status::Failed { "error" } else { "info" };
        data["status"] = json!(status);
        append_event(connection, self.run, level, &format!("{status}: {reason}"), &data).await?;
        Ok(())
    }

    /// Ends this execution in a transaction of its own.
    pub async fn end(&self, pool: &PgPool, status: Status, reason: &str) -> Result<(), Error> {
        tracing::info!(run = %self.run, %status, reason, "ended the execution of the run");
        let mut transaction = edge::database::begin(pool).await?;
        self.release(&mut transaction, status, reason, json!({})).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Ends a run that trains nothing, in one transaction: a use of each generation, its result, and its
    /// success. Refused if a tenant has withdrawn its consent meanwhile, or a generation has expired; the
    /// run then begins anew.
    pub async fn succeed(
        &self,
        pool: &PgPool,
        policy: &str,
        purpose: uses::Purpose,
        used: &[Uuid],
        result: &Value,
        reason: &str,
    ) -> anyhow::Result<()> {
        let mut transaction = self.begin(pool).await?;
        uses::insert(&mut transaction, self.run, uses::ONLY_STEP, purpose, used).await?;
        refuse_withdrawn(&mut transaction, policy, used).await?;
        sqlx::query!(
            "update run set result = $2, steps_done = 1 where id = $1",
            self.run,
            result
        )
        .execute(&mut *transaction)
        .await?;
        let release = self.release(&mut transaction, Status::Succeeded, reason, json!({}));
        release.await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Appends an event of the run, for people to read.
    pub async fn append_event(&self, pool: &PgPool, level: &str, message: &str) -> Result<(), sqlx::Error> {
        let mut connection = pool.acquire().await?;
        append_event(&mut connection, self.run, level, message, &json!({})).await
    }

    /// Puts the run back into the queue, with the reason. A person's request that has come meanwhile is
    /// obeyed instead.
    pub async fn give_way(&self, pool: &PgPool, reason: &str) -> Result<(), Error> {
        let mut transaction = self.begin(pool).await?;
        let now = sqlx::query!(
            r#"
            update run
            set status = case requested when 'cancel' then 'cancelled' when 'pause' then 'paused' else 'queued' end,
                reason = case requested
                    when 'cancel' then 'cancelled by request' when 'pause' then 'paused by request' else $2 end,
                finished_at = case requested when 'cancel' then now() end,
                requested = null
            where id = $1
            returning status, reason as "reason!"
            "#,
            self.run,
            reason
        )
        .fetch_one(&mut *transaction)
        .await?;
        let message = format!("{}: {}", now.status, now.reason);
        let data = json!({"status": now.status});
        append_event(&mut transaction, self.run, "info", &message, &data).await?;
        transaction.commit().await?;
        Ok(())
    }
}

/// Appends an event of a run, for people to read. `level` is `info`, `warn` or `error`.
pub async fn append_event(
    connection: &mut PgConnection,
    run: Uuid,
    level: &str,
    message: &str,
    data: &Value,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "insert into run_event (run_id, level, message, data) values ($1, $2, $3, $4)",
        run,
        level,
        message,
        data
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The lease of the one process that executes a policy's runs: an advisory lock on a connection of
/// its own, released when the process ends. Keep the returned connection while working. `None`:
/// another process has the lease.
pub async fn lease(pool: &PgPool, policy: &str) -> Result<Option<PgConnection>, sqlx::Error> {
    // back in the pool, the connection would keep the lock, also if this future is dropped
    let mut connection = pool.acquire().await?.detach();
    let name = format!("springtide/trainer/{policy}");
    let held = sqlx::query_scalar!(
        "select pg_try_advisory_lock(hashtextextended($1, 0)) as \"held!\"",
        name
    )
    .fetch_one(&mut connection)
    .await?;
    Ok(held.then_some(connection))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_claim_is_found_among_the_causes_of_an_error() {
        let fenced = Fenced {
            run: Uuid::nil(),
            fence: 1,
        };
        for error in [
            anyhow::Error::from(Error::from(fenced)),
            crate::publish::Error::from(Error::from(fenced)).into(),
        ] {
            assert!(error.chain().any(|cause| cause.is::<Fenced>()), "{error:?}");
        }
    }
}
