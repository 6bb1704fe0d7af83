//! The JSON shapes of the completions API: OpenAI's names, vLLM's extensions, and Springtide's own fields beside them.

use super::chat;
use super::choice::{FinishedChoice, SampledToken};
use super::request::GenerationRequest;
use edge::Problem;
use ingest::event::FinishReason;
use model::sampling::Params;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use uuid::Uuid;

/// The body of `POST /v1/completions`.
#[derive(Debug, Clone, Deserialize)]
pub struct CompletionRequest {
    pub prompt: Value,
    /// How many of the most probable tokens to list with each sampled one.
    pub logprobs: Option<i64>,

    // OpenAI fields, accepted only with values that change nothing
    pub best_of: Option<i64>,
    pub echo: Option<bool>,
    pub suffix: Option<String>,

    #[serde(flatten)]
    pub params: Params,
    #[serde(flatten)]
    pub common: CommonFields,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The fields that both endpoints have, besides the sampling parameters.
#[derive(Debug, Clone, Deserialize)]
pub struct CommonFields {
    pub model: String,
    pub max_tokens: Option<i64>,
    pub n: Option<i64>,
    pub stop: Option<Value>,
    pub seed: Option<i64>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// The caller's opaque key of its user; decides the arm.
    pub user: Option<String>,
    pub return_token_ids: Option<bool>,
    /// Lower goes first.
    pub priority: Option<i64>,
    pub session_id: Option<String>,
    pub surface: Option<String>,
    pub metadata: Option<Map<String, Value>>,
}

/// Fields that no other part of a request knows. They are refused: silently ignoring a sampling parameter would make
/// the logged log-probabilities wrong.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub struct UnknownFields(Map<String, Value>);

impl UnknownFields {
    pub fn refuse(&self) -> Result<(), Problem> {
        match self.0.keys().next() {
            Some(field) => Err(Problem::bad_request(format!("unknown field `{field}`; leave it out"))),
            None => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    #[serde(default)]
    pub include_usage: bool,
}

/// A completion, or one chunk of a streamed one.
#[derive(Debug, Serialize)]
pub struct Completion {
    pub id: String,
    pub object: &'static str,
    /// Unix seconds.
    pub created: i64,
    pub model: String,
    pub choices: Vec<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

#[derive(Debug, Serialize)]
pub struct Choice {
    pub index: usize,
    #[serde(flatten)]
    pub content: ChoiceContent,
    /// `stop` or `length`; null in every chunk but a choice's last.
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Only once the generation is in the log.
    #[serde(flatten)]
    pub outcome: Option<ChoiceOutcome>,
}

/// A choice's text, in the shape of the endpoint.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum ChoiceContent {
    Text {
        text: String,
        logprobs: Option<Logprobs>,
    },
    Message {
        message: chat::Message,
        logprobs: Option<chat::Logprobs>,
    },
    Delta {
        delta: chat::Message,
        logprobs: Option<chat::Logprobs>,
    },
}

/// Which part of a choice's content is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Whole,
    FirstChunk,
    LaterChunk,
}

impl ChoiceContent {
    fn new(request: &GenerationRequest, part: Part, text: String, tokens: &[SampledToken]) -> Self {
        let wanted = request.logprobs.is_some();
        if !request.is_chat() {
            let logprobs = wanted.then(|| Logprobs::of(tokens));
            return ChoiceContent::Text { text, logprobs };
        }
        let logprobs = wanted.then(|| chat::Logprobs::of(tokens));
        match part {
            Part::Whole => ChoiceContent::Message {
                message: chat::Message::new(text, true),
                logprobs,
            },
            Part::FirstChunk | Part::LaterChunk => ChoiceContent::Delta {
                delta: chat::Message::new(text, part == Part::FirstChunk),
                logprobs,
            },
        }
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
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Token(u32),
    Text(String),
}

/// OpenAI's legacy shape. `token_logprobs` are of the distribution sampled from, `top_logprobs` at temperature 1.
#[derive(Debug, Default, Serialize)]
pub struct Logprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<f32>,
    pub top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Characters of the completion before each token.
    pub text_offset: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}

impl Logprobs {
    fn of(tokens: &[SampledToken]) -> Self {
        let mut logprobs = Logprobs::default();
        for token in tokens {
            logprobs.tokens.push(token.text.clone());
            logprobs.token_logprobs.push(token.logprob);
            logprobs.top_logprobs.push(token.top.iter().cloned().collect());
            logprobs.text_offset.push(token.offset);
        }
        logprobs
    }
}

impl Choice {
    /// Tokens of a choice that continues.
    pub fn chunk(request: &GenerationRequest, index: usize, part: Part, text: String, tokens: &[SampledToken]) -> Self {
        Choice {
            index,
            content: ChoiceContent::new(request, part, text, tokens),
            finish_reason: None,
            token_ids: request
                .return_token_ids
                .then(|| tokens.iter().map(|token| token.id).collect()),
            prompt_token_ids: None,
            outcome: None,
        }
    }

    /// A choice that is in the log. `text` and `tokens` are those to send with it: all of them, or the last ones.
    pub fn finished(
        request: &GenerationRequest,
        index: usize,
        part: Part,
        finished: &FinishedChoice,
        text: String,
        tokens: &[SampledToken],
    ) -> Self {
        Choice {
            finish_reason: Some(match finished.reason {
                FinishReason::Length => "length",
                FinishReason::Stop | FinishReason::Abort => "stop",
            }),
            prompt_token_ids: request.return_token_ids.then(|| finished.prompt_ids.to_vec()),
            outcome: Some(finished.outcome.clone()),
            ..Choice::chunk(request, index, part, text, tokens)
        }
    }
}
