//! The right to execute a run: a fencing number that rises with every executor.
//!
//! Every transaction that changes a run's results begins with [`Claim::lock`]. It locks the run's
//! row and refuses an executor that has been replaced, so a process that was thought dead can do no
//! harm. The lease ([`lease`]) keeps two processes from working at the same time.

use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

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

    /// Ends this execution: sets the run to `paused`, `succeeded`, `failed` or `cancelled` with a
    /// reason, and appends an event. Runs in the caller's transaction, together with the cause.
    pub async fn release(
        &self,
        connection: &mut PgConnection,
        status: &str,
        reason: Option<&str>,
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
            status,
            reason
        )
        .execute(&mut *connection)
        .await?;
        let level = if status == "failed" { "error" } else { "info" };
        let message = match reason {
            Some(reason) => format!("{status}: {reason}"),
            None => status.to_string(),
        };
        append_event(connection, self.run, level, &message, &json!({})).await?;
        Ok(())
    }

    /// Puts the run back into the queue, with the reason. A person's request that has come meanwhile is
    /// obeyed instead.
    pub async fn give_way(&self, pool: &PgPool, reason: &str) -> Result<(), Error> {
        let mut transaction = edge::database::begin(pool).await?;
        self.lock(&mut transaction).await?;
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
        append_event(&mut transaction, self.run, "info", &message, &json!({})).await?;
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

/// Whether the alarm of this name has begun and not ended, by the run's events.
pub async fn alarm_is_on(pool: &PgPool, run: Uuid, alarm: &str) -> Result<bool, sqlx::Error> {
    let state = sqlx::query_scalar!(
        r#"
        select data ->> 'state' as "state!" from run_event
        where run_id = $1 and data ->> 'alarm' = $2
        order by id desc
        limit 1
        "#,
        run,
        alarm
    )
    .fetch_optional(pool)
    .await?;
    Ok(state.as_deref() == Some("began"))
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
