//! What the HTTP APIs over the database share.

use crate::Problem;

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
