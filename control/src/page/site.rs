//! What the handlers share: the tables, read in bounded time and only as far as the viewer may.

use std::sync::Arc;

use edge::Problem;
use edge::auth::Auth;
use sqlx::{PgPool, Postgres, Transaction};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::page::dead_letters::DeadLetters;
use crate::page::live::Live;
use crate::page::texts::Texts;

/// For one statement, in milliseconds.
const STATEMENT_MS_MAX: &str = "5000";
/// Sections that read many rows at a time, over all viewers.
const HEAVY_MAX: usize = 2;

/// The pages of one policy. Cheap to clone.
#[derive(Clone)]
pub struct Site(Arc<Inner>);

struct Inner {
    pool: PgPool,
    policy: String,
    auth: Auth,
    heavy: Semaphore,
    live: Live,
    texts: Arc<dyn Texts>,
    dead_letters: Arc<dyn DeadLetters>,
}

/// A transaction that reads.
pub type Reader = Transaction<'static, Postgres>;

impl Site {
    /// `auth`: what `/login` checks keys with. `shutdown` ends the live streams.
    pub fn new(
        pool: PgPool,
        policy: &str,
        auth: Auth,
        texts: Arc<dyn Texts>,
        dead_letters: Arc<dyn DeadLetters>,
        shutdown: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            pool,
            policy: policy.to_owned(),
            auth,
            heavy: Semaphore::new(HEAVY_MAX),
            live: Live::new(shutdown),
            texts,
            dead_letters,
        }))
    }

    pub fn pool(&self) -> &PgPool {
        &self.0.pool
    }

    pub fn policy(&self) -> &str {
        &self.0.policy
    }

    pub fn auth(&self) -> &Auth {
        &self.0.auth
    }

    pub fn texts(&self) -> &dyn Texts {
        &*self.0.texts
    }

    pub fn dead_letters(&self) -> &dyn DeadLetters {
        &*self.0.dead_letters
    }

    pub fn live(&self) -> &Live {
        &self.0.live
    }

    /// See [`reader`].
    pub async fn read(&self, tenant: Option<&str>) -> Result<Reader, Problem> {
        reader(&self.0.pool, tenant).await
    }

    /// Waits until few others read many rows, then does so.
    pub async fn read_many<T>(&self, reads: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        let _turn = self.0.heavy.acquire().await.map_err(Problem::internal)?;
        reads.await
    }
}

/// One snapshot of all tables, whose statements end in time. Row-level security shows it the rows of
/// `tenant`, or all.
pub async fn reader(pool: &PgPool, tenant: Option<&str>) -> Result<Reader, Problem> {
    let begin = "begin isolation level repeatable read read only";
    let mut reader = pool.begin_with(begin).await.map_err(unavailable)?;
    sqlx::query!(
        "select set_config('springtide.tenant', coalesce($1, ''), true) as tenant,
                    set_config('springtide.all_tenants', case when $1 is null then 'on' else 'off' end, true) as all_tenants,
                    set_config('statement_timeout', $2, true) as statement_timeout",
        tenant,
        STATEMENT_MS_MAX
    )
    .fetch_one(&mut *reader)
    .await
    .map_err(unavailable)?;
    Ok(reader)
}

/// What the caller is told if the database does not answer, or not in time.
pub fn unavailable(error: sqlx::Error) -> Problem {
    let code = error.as_database_error().and_then(|error| error.code());
    if code.as_deref() == Some("57014") {
        return Problem::unavailable(
            "the database needs too long for this: ask for less, or for a shorter time",
            30,
        );
    }
    Problem::of_database(error, |error| {
        tracing::warn!(%error, "a request to the database failed");
        Problem::unavailable("the database does not answer", 2)
    })
}
