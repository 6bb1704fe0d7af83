//! What came of one choice: its tokens and how it ended. Plain data, for the log and for the
//! answer.

use crate::engine::TokensOfVersion;
use event_log::event::{Constraint, FinishReason};
use serde::Serialize;
use std::sync::Arc;
use uuid::Uuid;

/// A sampled token, for the log and for the caller.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SampledToken {
    pub id: u32,
    pub logprob: f32,
    /// How many ids could have been sampled; `None`: the engine does not say.
    pub candidates: Option<u32>,
    /// Empty unless log-probabilities were requested.
    pub text: TokenText,
    pub top: Vec<(TokenText, f32)>,
    /// Of `top`.
    pub top_ids: Vec<u32>,
    /// Characters of the completion before it.
    pub offset: usize,
}

/// A token's own text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenText {
    /// `token_id:<id>` if it has none. A part of a character is U+FFFD.
    pub text: String,
    /// Those of the tokens of an answer are its text. `None`: it has no text.
    pub bytes: Option<Vec<u8>>,
}

/// What an answer says of its prompt, if the caller asks for that.
#[derive(Debug, Clone, Default)]
pub struct EchoedPrompt {
    pub text: String,
    /// All of them. The first one's log-probability is 0 and means nothing.
    pub tokens: Vec<SampledToken>,
}

/// A choice that ended.
#[derive(Debug, Clone)]
pub struct FinishedChoice {
    /// Of its generation.
    pub id: Uuid,
    pub prompt_ids: Arc<[u32]>,
    pub prompt: EchoedPrompt,
    pub tokens: Vec<SampledToken>,
    pub text: String,
    pub reason: FinishReason,
    /// Which versions sampled the tokens. `None`: all are the routed version's.
    pub versions: Option<Vec<TokensOfVersion>>,
    /// `None`: our own.
    pub engine: Option<Arc<str>>,
    /// What constrained it, if the trainer can compute the same masks from that.
    pub constraint: Option<Constraint>,
    /// It is below the bar of its arm, so it is answered as a decline. Its tokens have none.
    pub held_back: bool,
    pub outcome: ChoiceOutcome,
}

impl FinishedChoice {
    /// A client that reads only the text must show nothing if the policy declined.
    pub fn shown_text(&self) -> &str {
        if self.outcome.declined { "" } else { &self.text }
    }

    /// Mean log-probability of its tokens, which `best_of` compares.
    pub fn mean_logprob(&self) -> f32 {
        let sum: f32 = self.tokens.iter().map(|token| token.logprob).sum();
        sum / self.tokens.len().max(1) as f32
    }

    /// Those that the caller may see: the tokens of a text that is held back would tell it.
    pub fn shown_tokens(&self) -> &[SampledToken] {
        if self.held_back { &[] } else { &self.tokens }
    }
}

/// Springtide's fields of a finished choice.
#[derive(Debug, Clone, Serialize)]
pub struct ChoiceOutcome {
    /// The stop string, or the id of the stop token; null when the length ended it.
    pub stop_reason: Option<StopReason>,
    /// What feedback refers to. `None`: the answer is not in the log and never will be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation_id: Option<Uuid>,
    pub version: i64,
    /// Content hash.
    pub root: String,
    pub arm: String,
    /// There is nothing to show: the policy declined, or its text is below the bar of the arm.
    pub declined: bool,
    /// Proves to ingest that feedback comes from who was answered. `None` if `generation_id` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feedback_token: Option<String>,
    /// False: the log did not acknowledge the answer. It takes feedback if it has a `generation_id`: then
    /// it may be in the log, where missing feedback would count as a user's silence. Absent: it is in the
    /// log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub captured: Option<bool>,
    /// The code of why the answer is never trained on, if its engine or its request says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untrainable: Option<&'static str>,
}

impl ChoiceOutcome {
    /// The answer is not in the log, so nothing can refer to it.
    pub fn set_uncaptured(&mut self) {
        self.generation_id = None;
        self.feedback_token = None;
        self.captured = Some(false);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}
