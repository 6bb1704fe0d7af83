//! A request, understood: every field checked, every default filled in, before anything is routed or queued. Each error
//! says what to do. Pure.

use super::chat::ChatRequest;
use super::wire::CompletionRequest;
use crate::engine::templates::Unrendered;
use crate::engine::{Class, Version};
use crate::options::ServeOptions;
use edge::Problem;
use ingest::event::{LOGIT_BIASES_MAX, NAME_BYTES_MAX, PROMPT_TOKENS_MAX, Purpose, SAMPLED_TOKENS_MAX};
use policy::chat::Conversation;
use policy::sampling::Params;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

/// OpenAI's limits.
const TEMPERATURE_MAX: f64 = 2.0;
const STOPS_MAX: usize = 4;
const PENALTY_MAX: f64 = 2.0;
const LOGIT_BIAS_MAX: f64 = 100.0;
/// Beyond these it is a mistake.
const REPETITION_PENALTY_MIN: f64 = 0.01;
const REPETITION_PENALTY_MAX: f64 = 10.0;
const LOGPROBS_MAX: i64 = 5;
/// Longest stop string, in bytes.
const STOP_BYTES_MAX: usize = 256;
/// What `metadata` may say.
const METADATA: &[&str] = &["purpose", "run_id", "task_id", "group_id", "consent"];

/// A checked request.
#[derive(Debug, Clone)]
pub struct Ask {
    pub model: String,
    pub prompt: Prompt,
    /// None: the server's default, or what still fits.
    pub max_tokens: Option<usize>,
    pub params: Params,
    pub n: usize,
    pub stops: Vec<String>,
    /// Below 2^63, as it is stored as a signed integer.
    pub seed: Option<u64>,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: Option<usize>,
    pub user_key: String,
    /// None: each choice is an episode of its own.
    pub episode_id: Option<Uuid>,
    pub return_token_ids: bool,
    pub priority: i32,
    pub surface: String,
    pub purpose: Purpose,
    pub run_id: Option<Uuid>,
    pub task_id: Option<String>,
    pub group_id: Option<String>,
    pub consent: bool,
}

#[derive(Debug, Clone)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    /// Rendered by the template of the version that answers.
    Chat(Box<Conversation>),
}

impl Ask {
    /// Checks `request`. `tenant` keeps equal session ids of two tenants apart.
    pub fn new(mut request: CompletionRequest, options: &ServeOptions, tenant: &str) -> Result<Self, Problem> {
        if let Some(k) = request.logprobs.filter(|k| !(0..=LOGPROBS_MAX).contains(k)) {
            return Err(bad(format!("logprobs is {k}; give 0 to {LOGPROBS_MAX}")));
        }
        let prompt = prompt(request.prompt.take())?;
        Self::with_prompt(prompt, request, options, tenant)
    }

    /// The same for a conversation.
    pub fn chat(request: ChatRequest, options: &ServeOptions, tenant: &str) -> Result<Self, Problem> {
        let (request, conversation) = request.split()?;
        Self::with_prompt(Prompt::Chat(Box::new(conversation)), request, options, tenant)
    }

    fn with_prompt(
        prompt: Prompt,
        request: CompletionRequest,
        options: &ServeOptions,
        tenant: &str,
    ) -> Result<Self, Problem> {
        refuse_what_is_not_offered(&request)?;
        let params = params(&request)?;
        let metadata = request.metadata.unwrap_or_default();
        let (purpose, run_id, consent) = read_metadata(&metadata)?;
        let named = |key: &str| -> Result<Option<String>, Problem> {
            text_of(&metadata, key)?
                .map(|value| name(&format!("metadata.{key}"), value))
                .transpose()
        };
        let (task_id, group_id) = (named("task_id")?, named("group_id")?);
        let session = request.session_id.map(|id| name("session_id", id)).transpose()?;
        let user = request.user.map(|key| name("user", key)).transpose()?;
        let surface = match request.surface {
            Some(surface) => name("surface", surface)?,
            None if purpose == Purpose::Rollout => "rollout".into(),
            None => "completion".into(),
        };
        Ok(Ask {
            model: request.model,
            prompt,
            max_tokens: match request.max_tokens {
                None => None,
                Some(n) if n >= 1 => Some(usize::try_from(n).unwrap_or(usize::MAX)),
                Some(n) => return Err(bad(format!("max_tokens is {n}; give at least 1"))),
            },
            params,
            n: match request.n.unwrap_or(1) {
                n if n >= 1 && n <= options.choices_max as i64 => n as usize,
                n => return Err(bad(format!("n is {n}; give 1 to {}", options.choices_max))),
            },
            stops: stops(request.stop)?,
            seed: match request.seed {
                None => None,
                Some(seed) => Some(
                    u64::try_from(seed).map_err(|_| bad(format!("seed is {seed}; give 0 or a positive integer")))?,
                ),
            },
            stream: request.stream.unwrap_or(false),
            include_usage: request.stream_options.unwrap_or_default().include_usage,
            logprobs: request.logprobs.map(|k| k as usize),
            episode_id: session.as_deref().map(|id| episode(tenant, id)),
            // without a name the arm is drawn anew: nobody can be recognised
            user_key: user
                .or(session)
                .unwrap_or_else(|| format!("anonymous-{}", Uuid::now_v7())),
            return_token_ids: request.return_token_ids.unwrap_or(false),
            priority: i32::try_from(request.priority.unwrap_or(0))
                .map_err(|_| bad("priority does not fit in 32 bits; lower goes first, 0 is usual"))?,
            surface,
            purpose,
            run_id,
            task_id,
            group_id,
            consent,
        })
    }

    /// Whether users go before this.
    pub fn class(&self) -> Class {
        match self.purpose {
            Purpose::Production => Class::Production,
            Purpose::Rollout | Purpose::Evaluation => Class::Background,
        }
    }

    /// The prompt's ids for the version that answers.
    pub fn prompt_ids(&self, version: &Version) -> Result<Arc<[u32]>, Problem> {
        let ids = match (&self.prompt, &version.tokenizer) {
            (Prompt::Ids(ids), _) => ids.clone(),
            (Prompt::Text(text), Some(tokenizer)) => tokenizer.encode_prompt(text).map_err(Problem::internal)?,
            (Prompt::Chat(conversation), Some(tokenizer)) => {
                let text = version.templates.render(conversation).map_err(unrendered)?;
                tokenizer.encode(&text).map_err(Problem::internal)?
            }
            (Prompt::Text(_) | Prompt::Chat(_), None) => {
                return Err(bad(format!(
                    "version {} came without a tokenizer; send the prompt as token ids",
                    version.serial
                )));
            }
        };
        if ids.is_empty() {
            return Err(bad("the prompt has no tokens; send at least one"));
        }
        if let Some(id) = ids.iter().find(|id| **id >= version.vocab) {
            return Err(bad(format!(
                "token id {id} is outside the vocabulary of {} tokens",
                version.vocab
            )));
        }
        Ok(ids.into())
    }

    /// Whether the answer is a message.
    pub fn is_chat(&self) -> bool {
        matches!(self.prompt, Prompt::Chat(_))
    }

    /// How many tokens may be sampled after a prompt of `prompt` tokens. `default`: of a completion that does not say; a
    /// conversation may fill the context.
    pub fn room(&self, prompt: usize, version: &Version, default: usize) -> Result<usize, Problem> {
        let context = version.context.min(PROMPT_TOKENS_MAX);
        let free = context.saturating_sub(prompt).min(SAMPLED_TOKENS_MAX);
        let default = if self.is_chat() { free } else { default };
        let wanted = self.max_tokens.unwrap_or_else(|| default.min(free.max(1)));
        if wanted > free {
            return Err(Problem::new(
                axum::http::StatusCode::BAD_REQUEST,
                "context-too-long",
                "The prompt and its completion do not fit the context",
            )
            .detail(format!(
                "the prompt has {prompt} tokens and max_tokens is {wanted}, together more than the context of {context}; \
                 shorten the prompt or ask for at most {free} tokens"
            ))
            .with("context_tokens", context)
            .with("prompt_tokens", prompt));
        }
        Ok(wanted)
    }
}

/// A conversation that the template cannot write is the caller's to change; a template that nobody can render is not.
fn unrendered(error: Unrendered) -> Problem {
    match error {
        Unrendered::Broken(_) => Problem::internal(error),
        Unrendered::Chat(_) => bad(error),
    }
}

fn bad(detail: impl std::fmt::Display) -> Problem {
    Problem::bad_request(detail)
}

/// Refuses what would change the answer and is not implemented.
fn refuse_what_is_not_offered(request: &CompletionRequest) -> Result<(), Problem> {
    let n = request.n.unwrap_or(1);
    let refused = [
        ("best_of", request.best_of.is_some_and(|best| best != n)),
        ("echo", request.echo == Some(true)),
        ("suffix", request.suffix.is_some()),
    ];
    match refused.iter().find(|(_, refused)| *refused) {
        Some((field, _)) => Err(bad(format!("{field} is not offered; leave it out"))),
        None => Ok(()),
    }
}

/// How tokens are drawn, within OpenAI's and vLLM's limits.
fn params(request: &CompletionRequest) -> Result<Params, Problem> {
    let penalty = |field: &str, value: Option<f64>| within(field, value.unwrap_or(0.0), -PENALTY_MAX, PENALTY_MAX);
    Ok(Params {
        temperature: within("temperature", request.temperature.unwrap_or(1.0), 0.0, TEMPERATURE_MAX)?,
        top_p: match within("top_p", request.top_p.unwrap_or(1.0), 0.0, 1.0)? {
            top_p if top_p > 0.0 => top_p,
            _ => return Err(bad("top_p is 0; give more than 0, or temperature 0 for greedy")),
        },
        top_k: match request.top_k.unwrap_or(0) {
            -1 => 0,
            k => u32::try_from(k).map_err(|_| bad(format!("top_k is {k}; give 1 or more, or 0 or -1 for all")))?,
        },
        min_p: within("min_p", request.min_p.unwrap_or(0.0), 0.0, 1.0)?,
        repetition_penalty: within(
            "repetition_penalty",
            request.repetition_penalty.unwrap_or(1.0),
            REPETITION_PENALTY_MIN,
            REPETITION_PENALTY_MAX,
        )?,
        presence_penalty: penalty("presence_penalty", request.presence_penalty)?,
        frequency_penalty: penalty("frequency_penalty", request.frequency_penalty)?,
        logit_bias: logit_bias(request.logit_bias.as_ref())?,
    })
}

fn logit_bias(biases: Option<&Map<String, Value>>) -> Result<BTreeMap<u32, f32>, Problem> {
    let biases: Vec<_> = biases.into_iter().flatten().collect();
    if biases.len() > LOGIT_BIASES_MAX {
        return Err(bad(format!(
            "logit_bias names {} tokens; at most {LOGIT_BIASES_MAX}",
            biases.len()
        )));
    }
    let pairs = biases.into_iter().map(|(id, bias)| {
        let (Ok(id), Some(bias)) = (id.parse(), bias.as_f64()) else {
            return Err(bad("logit_bias must be an object from token ids to numbers"));
        };
        Ok((id, within("logit_bias", bias, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)?))
    });
    pairs.collect()
}

fn prompt(value: Value) -> Result<Prompt, Problem> {
    let shape = "prompt must be one string or one list of token ids; send one request per prompt";
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => {
            if ids.len() > PROMPT_TOKENS_MAX {
                return Err(bad(format!(
                    "the prompt has {} token ids; at most {PROMPT_TOKENS_MAX}",
                    ids.len()
                )));
            }
            let ids = ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
            ids.collect::<Option<Vec<u32>>>()
                .map(Prompt::Ids)
                .ok_or_else(|| bad(shape))
        }
        _ => Err(bad(shape)),
    }
}

fn stops(value: Option<Value>) -> Result<Vec<String>, Problem> {
    let shape = || {
        bad(format!(
            "stop must be a string or a list of at most {STOPS_MAX} strings"
        ))
    };
    let stops = match value {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .into_iter()
            .map(|stop| match stop {
                Value::String(stop) => Ok(stop),
                _ => Err(shape()),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(shape()),
    };
    if stops.len() > STOPS_MAX {
        return Err(shape());
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX) {
        Some(stop) => Err(bad(format!(
            "a stop string has {} bytes; give 1 to {STOP_BYTES_MAX}",
            stop.len()
        ))),
        None => Ok(stops),
    }
}

fn within(field: &str, value: f64, min: f64, max: f64) -> Result<f32, Problem> {
    if (min..=max).contains(&value) {
        Ok(value as f32)
    } else {
        Err(bad(format!("{field} is {value}; give {min} to {max}")))
    }
}

/// A name that goes into the log.
fn name(field: &str, value: String) -> Result<String, Problem> {
    if value.is_empty() || value.len() > NAME_BYTES_MAX || value.contains('\0') {
        return Err(bad(format!(
            "{field} has {} bytes; give 1 to {NAME_BYTES_MAX}, none of them NUL",
            value.len()
        )));
    }
    Ok(value)
}

fn read_metadata(metadata: &Map<String, Value>) -> Result<(Purpose, Option<Uuid>, bool), Problem> {
    if let Some(key) = metadata.keys().find(|key| !METADATA.contains(&key.as_str())) {
        return Err(bad(format!(
            "metadata.{key} is not known; known are {}",
            METADATA.join(", ")
        )));
    }
    let purpose = match text_of(metadata, "purpose")?.as_deref() {
        None | Some("production") => Purpose::Production,
        Some("rollout") => Purpose::Rollout,
        Some("evaluation") => Purpose::Evaluation,
        Some(other) => {
            return Err(bad(format!(
                "metadata.purpose is {other:?}; give production, rollout or evaluation"
            )));
        }
    };
    let run_id = text_of(metadata, "run_id")?
        .map(|id| Uuid::parse_str(&id).map_err(|_| bad(format!("metadata.run_id is {id:?}; give the run's UUID"))))
        .transpose()?;
    if purpose == Purpose::Rollout && run_id.is_none() {
        return Err(bad("a rollout belongs to a run; give metadata.run_id"));
    }
    let consent = match metadata.get("consent") {
        None | Some(Value::Null) => true,
        Some(Value::Bool(consent)) => *consent,
        Some(Value::String(consent)) if consent == "true" || consent == "false" => consent == "true",
        Some(_) => return Err(bad("metadata.consent must be true or false")),
    };
    Ok((purpose, run_id, consent))
}

fn text_of(metadata: &Map<String, Value>, key: &str) -> Result<Option<String>, Problem> {
    match metadata.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(bad(format!("metadata.{key} must be a string"))),
    }
}

/// The episode of a session: the id itself where it is a UUID, else one made from it, the same every time.
fn episode(tenant: &str, session_id: &str) -> Uuid {
    if let Ok(id) = Uuid::parse_str(session_id) {
        return id;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"springtide session 1\0");
    hasher.update(tenant.as_bytes());
    hasher.update(b"\0");
    hasher.update(session_id.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests;
