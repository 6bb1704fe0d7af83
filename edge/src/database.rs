//! How transactions begin, and what the HTTP APIs over the database share.

use crate::Problem;
use sqlx::{PgPool, Postgres, Transaction};
use std::panic::resume_unwind;

/// Begins a transaction. The caller may be dropped at any time: a client that hangs up, a timeout.
///
/// `PgPool::begin` of sqlx 0.9.0 must not be dropped while the server answers. The connection would go
/// back to the pool inside a transaction that nobody ends. What others then write on it is never
/// committed, and its locks are kept (github.com/transact-rs/sqlx/issues/4393; mended after 0.9.0).
pub async fn begin(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    begin_with(pool, "begin").await
}

/// Begins a transaction with this statement.
pub async fn begin_with(pool: &PgPool, statement: &'static str) -> sqlx::Result<Transaction<'static, Postgres>> {
    let pool = pool.clone();
    #[expect(
        clippy::disallowed_methods,
        reason = "a task of its own is not dropped with the caller"
    )]
    let begun = tokio::spawn(async move { pool.begin_with(statement).await });
    begun.await.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(_) => Err(sqlx::Error::WorkerCrashed), // the runtime ends
    })
}

/// The number of rows to return.
pub fn page_limit(requested: Option<i64>, default: i64, max: i64) -> Result<i64, Problem> {
    match requested.unwrap_or(default) {
        limit if (1..=max).contains(&limit) => Ok(limit),
        limit => Err(Problem::bad_request(format!("limit is {limit}; give 1 to {max}"))),
    }
}

pub fn unavailable(error: sqlx::Error) -> Problem {
    Problem::of_database(error, |error| {
        tracing::warn!(%error, "the API could not reach the database");
        Problem::unavailable("the database does not answer", 2)
    })
}
