//! The JSON of the requests: OpenAI's names, vLLM's extensions, and Springtide's own fields beside
//! them.

mod chat;

pub use chat::ChatRequest;

use edge::Problem;
use model::sampling::Params;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// The body of `POST /v1/completions`.
#[derive(Debug, Clone, Deserialize)]
pub struct CompletionRequest {
    pub prompt: Value,
    /// How many of the most probable tokens to list with each sampled one.
    pub logprobs: Option<i64>,

    /// How many answers to sample; the `n` most probable ones are returned.
    pub best_of: Option<i64>,
    /// The prompt comes before the answer.
    pub echo: Option<bool>,
    /// Not offered.
    pub suffix: Option<String>,

    #[serde(flatten, deserialize_with = "with_field_names")]
    pub params: Params,
    #[serde(flatten, deserialize_with = "with_field_names")]
    pub common: CommonFields,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The fields that both endpoints have, besides the sampling parameters.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct CommonFields {
    pub model: String,
    pub max_tokens: Option<i64>,
    pub n: Option<i64>,
    pub stop: Option<Value>,
    /// vLLM's: sampling one of these ends the answer, too.
    pub stop_token_ids: Option<Vec<u32>>,
    /// vLLM's: the model's own stop tokens do not end the answer.
    pub ignore_eos: Option<bool>,
    /// vLLM's: nothing ends the answer before so many tokens.
    pub min_tokens: Option<usize>,
    pub seed: Option<i64>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// The caller's opaque key of its user; decides the arm.
    pub user: Option<String>,
    /// OpenAI's new name of `user`.
    pub safety_identifier: Option<String>,
    pub return_token_ids: Option<bool>,
    /// vLLM's: how many of the most probable tokens to list with each of the prompt.
    pub prompt_logprobs: Option<i64>,
    /// Lower goes first.
    pub priority: Option<i64>,
    pub session_id: Option<String>,
    pub surface: Option<String>,
    pub metadata: Option<Map<String, Value>>,
}

impl CommonFields {
    /// Only the model is given.
    pub fn of_model(model: String) -> Self {
        CommonFields {
            model,
            ..CommonFields::default()
        }
    }
}

/// Fields that no other part of a request knows. They are refused unless they change nothing:
/// silently ignoring a sampling parameter would make the logged log-probabilities wrong.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(transparent)]
pub struct UnknownFields(Map<String, Value>);

impl UnknownFields {
    pub fn refuse(&self) -> Result<(), Problem> {
        match self.0.iter().find(|(field, value)| !changes_nothing(field, value)) {
            Some((field, _)) => {
                let problem = Problem::bad_request(format!("unknown field `{field}`; leave it out"));
                Err(problem.with("field", field.as_str()))
            }
            None => Ok(()),
        }
    }
}

/// Whether a field of OpenAI, Anthropic or vLLM that is not offered can be ignored: the answer would
/// be the same with it.
fn changes_nothing(field: &str, value: &Value) -> bool {
    if value.is_null() {
        return true;
    }
    match field {
        // where and for whom the server works, not what it samples
        "cache_control"
        | "client_metadata"
        // edits of earlier turns, which the caller makes itself where the server does not
        | "context_management"
        | "inference_geo"
        // of tools that the server runs, and it runs none
        | "max_tool_calls"
        | "parallel_tool_calls"
        | "prediction"
        | "prompt_cache_key"
        | "prompt_cache_retention"
        | "request_id"
        | "service_tier"
        | "store"
        // of streams that always have the usage
        | "stream_options" => true,
        "ignore_eos" | "include_stop_str_in_output" | "use_beam_search" => *value == Value::Bool(false),
        "length_penalty" => value.as_f64() == Some(1.0),
        "min_tokens" => value.as_i64() == Some(0),
        "modalities" => *value == serde_json::json!(["text"]),
        "stop_token_ids" => value.as_array().is_some_and(Vec::is_empty),
        _ => false,
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    #[serde(default)]
    pub include_usage: bool,
    /// Padding of OpenAI's chunks against eavesdroppers. Ours have none.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: bool,
    /// vLLM's: usage in every chunk. Ours is in the last one.
    #[serde(default, rename = "continuous_usage_stats")]
    _continuous_usage_stats: bool,
}

/// Reads a flattened struct. serde buffers its fields, and then its errors do not name the field.
pub fn with_field_names<'de, D: Deserializer<'de>, T: Deserialize<'de>>(json: D) -> Result<T, D::Error> {
    serde_path_to_error::deserialize(json).map_err(D::Error::custom)
}
