//! What came of one choice: its tokens and how it ended. Plain data, for the log and for the
//! answer.

use ingest::event::FinishReason;
use serde::Serialize;
use std::sync::Arc;
use uuid::Uuid;

/// A sampled token, for the log and for the caller.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    pub id: u32,
    pub logprob: f32,
    /// How many ids could have been sampled; `None`: the engine does not say.
    pub candidates: Option<u32>,
    /// Its own text, or `token_id:<id>` if it has none. Empty unless log-probabilities were
    /// requested.
    pub text: String,
    pub top: Vec<(String, f32)>,
    /// Characters of the completion before it.
    pub offset: usize,
}

/// A choice that ended.
#[derive(Debug, Clone)]
pub struct FinishedChoice {
    pub prompt_ids: Arc<[u32]>,
    pub tokens: Vec<SampledToken>,
    pub text: String,
    pub reason: FinishReason,
    pub outcome: ChoiceOutcome,
}

impl FinishedChoice {
    /// A client that reads only the text must show nothing if the policy declined.
    pub fn shown_text(&self) -> &str {
        if self.outcome.declined { "" } else { &self.text }
    }
}

/// Springtide's fields of a finished choice.
#[derive(Debug, Clone, Serialize)]
pub struct ChoiceOutcome {
    /// The stop string, or the id of the stop token; null when the length ended it.
    pub stop_reason: Option<StopReason>,
    /// What feedback refers to.
    pub generation_id: Uuid,
    pub version: i64,
    /// Content hash.
    pub root: String,
    pub arm: String,
    /// The policy chose to show nothing.
    pub declined: bool,
    /// Proves to ingest that feedback comes from who was answered.
    pub feedback_token: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}
