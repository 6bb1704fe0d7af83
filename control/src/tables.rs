//! Tables are read in one snapshot, in bounded time, and only as far as the viewer may.

use edge::Problem;
use sqlx::{PgPool, Postgres, Transaction};

/// For one statement, in milliseconds. A held snapshot keeps retention from dropping weeks.
const STATEMENT_MS_MAX: &str = "5000";
/// The same, for one about all generations.
pub const LONG_STATEMENT_MS_MAX: &str = "20000";

/// A transaction that reads.
pub type Reader = Transaction<'static, Postgres>;

/// One snapshot of all tables, whose statements end in time. Row-level security shows it the rows of
/// `tenant`, or all.
pub async fn reader(pool: &PgPool, tenant: Option<&str>) -> Result<Reader, Problem> {
    reader_within(pool, tenant, STATEMENT_MS_MAX).await
}

/// The same, with another time for each statement.
pub async fn reader_within(pool: &PgPool, tenant: Option<&str>, statement_ms_max: &str) -> Result<Reader, Problem> {
    let begin = "begin isolation level repeatable read read only";
    let mut reader = edge::database::begin_with(pool, begin).await.map_err(unavailable)?;
    sqlx::query!(
        "select set_config('springtide.tenant', coalesce($1, ''), true) as tenant,
                    set_config('springtide.all_tenants', case when $1 is null then 'on' else 'off' end, true) as all_tenants,
                    set_config('statement_timeout', $2, true) as statement_timeout",
        tenant,
        statement_ms_max
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
