//! One trajectory as one line of JSON.

use ingest::rescore::{Closed, Rescored};
use ingest::reward::Outcome;
use serde::Serialize;
use time::OffsetDateTime;
use uuid::Uuid;

#[derive(Debug, Serialize)]
pub struct Line<'a> {
    generation_id: Uuid,
    tenant: &'a str,
    #[serde(with = "time::serde::rfc3339")]
    sampled_at: OffsetDateTime,
    /// What is said later does not count.
    #[serde(with = "time::serde::rfc3339")]
    closes_at: OffsetDateTime,
    #[serde(flatten)]
    score: Score<'a>,
    /// As it was closed, and as the trainer saw it.
    closed: Before<'a>,
}

/// A reward, or the code that says why there is none.
#[derive(Debug, PartialEq, Serialize)]
struct Score<'a> {
    reward: Option<f64>,
    censor_code: Option<&'a str>,
    signal: Option<&'a str>,
    #[serde(with = "time::serde::rfc3339::option")]
    feedback_at: Option<OffsetDateTime>,
}

#[derive(Debug, Serialize)]
struct Before<'a> {
    /// Version of the definition; 0: there was none.
    definition: i32,
    #[serde(flatten)]
    score: Score<'a>,
    #[serde(with = "time::serde::rfc3339::option")]
    closes_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339")]
    closed_at: OffsetDateTime,
}

impl<'a> Line<'a> {
    pub fn new(rescored: &'a Rescored, outcome: &'a Outcome) -> Self {
        let closed = &rescored.closed;
        Self {
            generation_id: rescored.generation_id,
            tenant: &rescored.tenant,
            sampled_at: rescored.sampled_at,
            closes_at: rescored.closes_at,
            score: Score::from(outcome),
            closed: Before {
                definition: closed.definition,
                score: Score::from(closed),
                closes_at: closed.closes_at,
                closed_at: closed.closed_at,
            },
        }
    }
}

/// Whether it is worth something else, or has another reason why it is worth nothing.
pub fn changed(rescored: &Rescored, outcome: &Outcome) -> bool {
    let (now, then) = (Score::from(outcome), Score::from(&rescored.closed));
    (now.reward, now.censor_code) != (then.reward, then.censor_code)
}

impl<'a> From<&'a Outcome> for Score<'a> {
    fn from(outcome: &'a Outcome) -> Self {
        match outcome {
            Outcome::Rewarded {
                reward,
                signal,
                feedback_at,
            } => Self {
                reward: Some(*reward),
                censor_code: None,
                signal: Some(signal),
                feedback_at: *feedback_at,
            },
            Outcome::Censored { code } => Self {
                reward: None,
                censor_code: Some(code),
                signal: None,
                feedback_at: None,
            },
        }
    }
}

impl<'a> From<&'a Closed> for Score<'a> {
    fn from(closed: &'a Closed) -> Self {
        Self {
            reward: closed.reward,
            censor_code: closed.censor_code.as_deref(),
            signal: closed.signal.as_deref(),
            feedback_at: closed.feedback_at,
        }
    }
}
