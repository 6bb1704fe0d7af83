//! A deadline that a caller gives. Whatever is not answered by then is cut off: its engine stops, what
//! was sampled is logged as aborted, and the caller gets 504.

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use edge::Problem;
use std::time::{Duration, Instant};

/// Milliseconds from the request's arrival.
pub const HEADER: &str = "springtide-deadline-ms";
const MILLISECONDS_MAX: u64 = 24 * 3600 * 1000;

/// When a request must be answered. `None`: whenever it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl<S: Sync> FromRequestParts<S> for Deadline {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let Some(value) = parts.headers.get(HEADER) else {
            return Ok(Deadline(None));
        };
        let milliseconds = value.to_str().ok().and_then(|text| text.parse().ok());
        match milliseconds {
            Some(milliseconds @ 1..=MILLISECONDS_MAX) => {
                Ok(Deadline(Some(Instant::now() + Duration::from_millis(milliseconds))))
            }
            _ => Err(Problem::bad_request(format!(
                "the header {HEADER} must be a number of milliseconds from 1 to {MILLISECONDS_MAX}"
            ))),
        }
    }
}

impl Deadline {
    pub fn after(wait: Duration) -> Self {
        Deadline(Some(Instant::now() + wait))
    }

    /// Resolves when it has passed.
    pub async fn passed(self) {
        match self.0 {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }
}

/// 504: the deadline has passed.
pub fn exceeded() -> Problem {
    metrics::counter!("springtide_choices_deadline_total").increment(1);
    Problem::new(
        StatusCode::GATEWAY_TIMEOUT,
        "deadline-exceeded",
        "The deadline has passed",
    )
    .detail(format!(
        "the request was not answered within the milliseconds of its header {HEADER}; give more, or ask for fewer tokens"
    ))
}
