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

    // OpenAI fields, accepted only with values that change nothing
    pub best_of: Option<i64>,
    pub echo: Option<bool>,
    pub suffix: Option<String>,

    #[serde(flatten, deserialize_with = "with_field_names")]
    pub params: Params,
    #[serde(flatten, deserialize_with = "with_field_names")]
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

/// Fields that no other part of a request knows. They are refused: silently ignoring a sampling
/// parameter would make the logged log-probabilities wrong.
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

/// Reads a flattened struct. serde buffers its fields, and then its errors do not name the field.
fn with_field_names<'de, D: Deserializer<'de>, T: Deserialize<'de>>(json: D) -> Result<T, D::Error> {
    serde_path_to_error::deserialize(json).map_err(D::Error::custom)
}
