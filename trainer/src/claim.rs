//! The right to execute a run: a fence that rises with every executor.
//!
//! Every transaction that changes what a run has done begins with [`Claim::hold`], which locks the run's row and refuses
//! an executor that has been replaced. A process that was thought dead can therefore wake up and do no harm. What the
//! fence does not do is keep two executors from working at once; that is the lease's part ([`lease`]).

use serde_json::Value;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

/// Another executor has taken the run, or a person has ended it: stop, and touch nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("run {run}: this executor (fence {fence}) has been replaced, or the run has ended")]
pub struct Fenced {
    pub run: Uuid,
    pub fence: i64,
}

/// Why a fenced transaction did not begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Fenced(#[from] Fenced),
    #[error("ask the database about the run: {0}")]
    Database(#[from] sqlx::Error),
}

/// One executor's right to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub run: Uuid,
    pub fence: i64,
}

impl Claim {
    /// Takes a run that is queued, or that an executor left running: raises its fence and sets it running.
    /// `None`: it is paused, has ended, or does not exist.
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

    /// Locks the run's row for the rest of the transaction; an error if this claim is no longer the newest.
    pub async fn hold(&self, connection: &mut PgConnection) -> Result<(), Error> {
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
        match held {
            Some(_) => Ok(()),
            None => Err(Fenced {
                run: self.run,
                fence: self.fence,
            }
            .into()),
        }
    }

    /// What a person has asked of the run and nobody has done yet: `pause` or `cancel`.
    pub async fn requested(&self, pool: &PgPool) -> Result<Option<String>, Error> {
        let row = sqlx::query!(
            "select requested from run where id = $1 and fence = $2 and status in ('running', 'pausing')",
            self.run,
            self.fence
        )
        .fetch_optional(pool)
        .await?;
        match row {
            Some(row) => Ok(row.requested),
            None => Err(Fenced {
                run: self.run,
                fence: self.fence,
            }
            .into()),
        }
    }

    /// Ends this execution: the run becomes `paused`, `succeeded`, `failed` or `cancelled` with its reason, and an event
    /// says so. In the caller's transaction, so that what led to it is decided together with it.
    pub async fn release(
        &self,
        connection: &mut PgConnection,
        status: &str,
        reason: Option<&str>,
    ) -> Result<(), Error> {
        self.hold(connection).await?;
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
        event(
            connection,
            self.run,
            level,
            &message,
            &Value::Object(Default::default()),
        )
        .await?;
        Ok(())
    }
}

/// Appends to what people read about a run. `level` is `info`, `warn` or `error`.
pub async fn event(
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

/// The lease of the one process that executes a policy's runs: an advisory lock on a connection of its own, gone with
/// the process. Hold the returned connection for as long as work is done; `None`: another process has the lease.
pub async fn lease(
    pool: &PgPool,
    policy: &str,
) -> Result<Option<sqlx::pool::PoolConnection<sqlx::Postgres>>, sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let name = format!("springtide/trainer/{policy}");
    let held = sqlx::query_scalar!(
        "select pg_try_advisory_lock(hashtextextended($1, 0)) as \"held!\"",
        name
    )
    .fetch_one(&mut *connection)
    .await?;
    if !held {
        return Ok(None);
    }
    // back in the pool it would keep the lock
    connection.close_on_drop();
    Ok(Some(connection))
}
