//! Dead letters, for administrators: where each one is, when and why it was put aside, and its
//! event's name. Never what it holds.

use std::collections::BTreeMap;

use edge::Problem;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::page::sections::trajectories::filled;

/// The query of `GET /v1/dead-letters`. An empty field is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Asked {
    /// Why they were put aside, such as `invalid`.
    #[serde(deserialize_with = "filled")]
    pub cause: Option<String>,
    /// Where they came from: a topic's full name, or `generation` or `feedback`.
    #[serde(deserialize_with = "filled")]
    pub topic: Option<String>,
    /// A time (RFC 3339) or an age, such as `2h`.
    #[serde(deserialize_with = "filled")]
    pub since: Option<String>,
    /// Only those that were not put back yet.
    pub open: bool,
    /// Largest number of records. Default: 50.
    #[serde(deserialize_with = "filled")]
    pub limit: Option<usize>,
}

/// The number of records of one cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    pub all: u64,
    /// Those that were not put back yet.
    pub open: u64,
}

/// A part of the queue.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Listed {
    /// The newest ones that match, newest first. Each as `springtide dlq list --json` prints it.
    pub records: Vec<Value>,
    /// How many match.
    pub matching: usize,
    /// Of all that were read, by cause.
    pub causes: BTreeMap<String, Count>,
    /// Whether the queue has older records, which were not read.
    pub truncated: bool,
}

/// Reads the queue.
pub trait DeadLetters: Send + Sync {
    /// # Errors
    /// 400 for a filter that cannot be read, and 503 if the log does not answer in time.
    fn list<'a>(&'a self, asked: &'a Asked) -> BoxFuture<'a, Result<Listed, Problem>>;
}

/// There are none.
#[cfg(test)]
pub(crate) struct NoDeadLetters;

#[cfg(test)]
impl DeadLetters for NoDeadLetters {
    fn list<'a>(&'a self, _: &'a Asked) -> BoxFuture<'a, Result<Listed, Problem>> {
        Box::pin(async { Ok(Listed::default()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(query: &str) -> Result<Asked, String> {
        let uri: axum::http::Uri = format!("/v1/dead-letters?{query}").parse().unwrap();
        let read = axum::extract::Query::<Asked>::try_from_uri(&uri);
        read.map(|query| query.0).map_err(|rejection| rejection.body_text())
    }

    #[test]
    fn empty_fields_filter_nothing_and_unknown_ones_are_refused() {
        assert_eq!(asked("cause=&topic=&since=&limit=").unwrap(), Asked::default());
        assert_eq!(asked("").unwrap(), Asked::default());
        let some = asked("cause=invalid&open=true&since=2h&limit=7").unwrap();
        let expected = Asked {
            cause: Some("invalid".to_owned()),
            since: Some("2h".to_owned()),
            open: true,
            limit: Some(7),
            ..Asked::default()
        };
        assert_eq!(some, expected);
        for wrong in ["open=perhaps", "limit=-1", "reason=invalid"] {
            assert!(asked(wrong).is_err(), "{wrong}");
        }
    }
}
