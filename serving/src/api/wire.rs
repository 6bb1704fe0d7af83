//! The shapes that cross the wire: OpenAI's names, vLLM's extensions, and Springtide's own beside them.

use super::ask::Ask;
use super::chat;
use super::choice::{Finished, TokenOut};
use crate::routing::Routing;
use ingest::event::FinishReason;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use uuid::Uuid;

/// The body of `POST /v1/completions`. A field that is not here is refused: a sampling parameter that is silently ignored
/// would make the logged log-probabilities a lie.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionRequest {
    pub model: String,
    pub prompt: Value,
    pub max_tokens: Option<i64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    /// 0 or −1: all.
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    /// Token id → what is added to its logit.
    pub logit_bias: Option<Map<String, Value>>,
    pub n: Option<i64>,
    pub stop: Option<Value>,
    pub seed: Option<i64>,
    #[serde(default)]
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// How many of the most probable tokens to list with each sampled one.
    pub logprobs: Option<i64>,
    /// The caller's opaque key of its user; decides the arm.
    pub user: Option<String>,
    pub return_token_ids: Option<bool>,
    /// Lower goes first.
    pub priority: Option<i64>,
    pub session_id: Option<String>,
    pub surface: Option<String>,
    pub metadata: Option<Map<String, Value>>,

    // of OpenAI's, accepted only where they change nothing
    pub best_of: Option<i64>,
    pub echo: Option<bool>,
    pub suffix: Option<String>,
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
    pub said: Said,
    /// `stop` or `length`; null in every chunk but a choice's last.
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// The rest only once the generation is in the log.
    #[serde(flatten)]
    pub outcome: Option<Outcome>,
}

/// What a choice says, as the endpoint that was asked shapes it.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Said {
    Text {
        text: String,
        logprobs: Option<Logprobs>,
    },
    Message {
        message: chat::Message,
        logprobs: Option<chat::Logprobs>,
    },
    Delta {
        delta: chat::Delta,
        logprobs: Option<chat::Logprobs>,
    },
}

/// Which part of a choice is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Whole,
    First,
    Further,
}

impl Said {
    fn new(ask: &Ask, part: Part, text: String, tokens: &[TokenOut]) -> Self {
        let wanted = ask.logprobs.is_some();
        if !ask.is_chat() {
            let logprobs = wanted.then(|| Logprobs::of(tokens));
            return Said::Text { text, logprobs };
        }
        let logprobs = wanted.then(|| chat::Logprobs::of(tokens));
        match part {
            Part::Whole => Said::Message {
                message: chat::Message::new(text),
                logprobs,
            },
            Part::First | Part::Further => Said::Delta {
                delta: chat::Delta::new(text, part == Part::First),
                logprobs,
            },
        }
    }
}

/// What Springtide says of a finished choice.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// The stop string, or the id of the stop token; null when the length ended it.
    pub stop_reason: Option<StopReason>,
    /// What feedback refers to.
    pub generation_id: Uuid,
    pub version: i64,
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
    pub fn of(tokens: &[TokenOut]) -> Self {
        let mut shape = Logprobs::default();
        for token in tokens {
            shape.tokens.push(token.text.clone());
            shape.token_logprobs.push(token.logprob);
            shape.top_logprobs.push(token.top.iter().cloned().collect());
            shape.text_offset.push(token.offset);
        }
        shape
    }
}

impl Choice {
    /// Tokens of a choice that goes on.
    pub fn piece(ask: &Ask, index: usize, part: Part, text: String, tokens: &[TokenOut]) -> Self {
        Choice {
            index,
            said: Said::new(ask, part, text, tokens),
            finish_reason: None,
            token_ids: ask
                .return_token_ids
                .then(|| tokens.iter().map(|token| token.id).collect()),
            prompt_token_ids: None,
            outcome: None,
        }
    }

    /// A choice that is in the log. `text` and `tokens` are what is to be sent with it: all of them, or the last ones.
    pub fn finished(
        ask: &Ask,
        index: usize,
        part: Part,
        finished: &Finished,
        text: String,
        tokens: &[TokenOut],
    ) -> Self {
        Choice {
            finish_reason: Some(match finished.reason {
                FinishReason::Length => "length",
                FinishReason::Stop | FinishReason::Abort => "stop",
            }),
            prompt_token_ids: ask.return_token_ids.then(|| finished.prompt_ids.to_vec()),
            outcome: Some(Outcome {
                stop_reason: finished.stop_reason.clone(),
                generation_id: finished.generation_id,
                version: finished.version,
                root: finished.root.to_string(),
                arm: finished.arm.clone(),
                declined: finished.declined,
            }),
            ..Choice::piece(ask, index, part, text, tokens)
        }
    }
}

#[derive(Debug, Serialize)]
pub struct Models {
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Debug, Serialize)]
struct Model {
    id: String,
    object: &'static str,
    created: i64,
    owned_by: &'static str,
    /// None: the experiment decides per user.
    version: Option<i64>,
    root: Option<String>,
    max_model_len: Option<usize>,
}

/// The policy itself, then each resident version by its aliases and its serial.
pub fn models(policy: &str, routing: &Routing) -> Models {
    let model = |id: String, version: Option<&crate::engine::Version>| Model {
        id,
        object: "model",
        created: 0,
        owned_by: "springtide",
        version: version.map(|v| v.serial),
        root: version.map(|v| v.root.to_string()),
        max_model_len: version.map(|v| v.context),
    };
    let residents = routing.residents();
    let mut data = Vec::new();
    if !residents.is_empty() {
        data.push(model(policy.into(), None));
    }
    for resident in &residents {
        let names = resident
            .aliases
            .iter()
            .cloned()
            .chain([resident.version.serial.to_string()]);
        data.extend(names.map(|name| model(format!("{policy}@{name}"), Some(&resident.version))));
    }
    Models { object: "list", data }
}

#[derive(Debug, Serialize)]
pub struct Health {
    status: &'static str,
    replica: String,
    epoch: i64,
    versions: Vec<i64>,
}

pub fn health(replica: &str, routing: &Routing) -> Health {
    Health {
        status: "ready",
        replica: replica.into(),
        epoch: routing.epoch(),
        versions: routing
            .residents()
            .iter()
            .map(|resident| resident.version.serial)
            .collect(),
    }
}
