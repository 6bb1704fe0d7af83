//! The canonical events and the rules that every event must satisfy.
//!
//! All wire forms (Protobuf, JSON) convert into these plain Rust types. Every row in the tables has
//! passed [`Event::check`]. JSON uses the field names of the Protobuf schema: ids are UUID strings,
//! digests are hexadecimal, times are RFC 3339.

mod check;
mod json;
mod proof;
pub mod proto;
mod protobuf;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

pub use check::{
    CONSTRAINT_BYTES_MAX, Invalid, LOGIT_BIASES_MAX, LOGPROBS_TOLERANCE, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX,
    PROMPT_TOKENS_MAX, SAMPLED_TOKENS_MAX, TAGS_MAX, TEXT_BYTES_MAX, TURNS_MAX,
};
pub use json::{FeedbackFields, one_body, one_target};
pub use proof::{Proof, signed_bytes};
pub use protobuf::Undecodable;

/// A request without a user gets a user key of its own that begins with this. The trainer's caps take
/// all of them for one user.
pub const ANONYMOUS_USER_PREFIX: &str = "anonymous-";
/// The arm of unseen answers of a canary. No alias has this name.
pub const SHADOW: &str = "shadow";

/// One event. `(tenant, source, id)` and the kind of its body identify it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "json::EventFields")]
pub struct Event {
    pub tenant: String,
    /// The producer, a URI reference: `springtide/serve/replica-1`.
    pub source: String,
    /// Unique within tenant and source among the events of its kind.
    pub id: String,
    /// When it happened, to the microsecond. For a generation: when its last token was sampled.
    #[serde(with = "time::serde::rfc3339")]
    pub time: OffsetDateTime,
    /// The key that sent it, if that has the scope `teach`, as the event API found; nil where no key is needed. Other
    /// writers of the log say it themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<Uuid>,
    #[serde(flatten)]
    pub body: Body,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(
    clippy::large_enum_variant,
    reason = "few events are in memory at once, and most are generations"
)]
pub enum Body {
    Generation(Generation),
    Feedback(Feedback),
    Retraction(Retraction),
    EpisodeEnd(EpisodeEnd),
}

impl Body {
    /// The kind of the event, which is part of its identity: an episode of one completion has that
    /// completion's id, and so has the event that ends it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Generation(_) => "generation",
            Self::Feedback(_) => "feedback",
            Self::Retraction(_) => "retraction",
            Self::EpisodeEnd(_) => "episode_end",
        }
    }
}

/// Why a generation was requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// For a waiting user.
    Production,
    /// For training.
    Rollout,
    /// For a measurement. Never trained on.
    Evaluation,
}

impl Purpose {
    /// The value in the column `generation.purpose`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Production => "production",
            Self::Rollout => "rollout",
            Self::Evaluation => "evaluation",
        }
    }
}

/// Why sampling ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The caller disconnected.
    Abort,
}

impl FinishReason {
    /// The value in the column `generation.finish_reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// Consecutive sampled tokens that came from one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VersionSpan {
    /// The version's serial number.
    pub version: i64,
    /// The version's content hash (BLAKE3), 64 hexadecimal digits.
    #[serde(with = "hex")]
    #[schema(value_type = String)]
    pub root: [u8; 32],
    /// Number of tokens, at least 1.
    pub tokens: u32,
}

/// The leading prompt tokens that a generation shares with its parent.
///
/// They are the first of the parent's own prompt and sampled tokens. `prompt_ids` does not repeat
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Prefix {
    /// Tokens, at least 1.
    pub length: u32,
    /// BLAKE3 of the shared token ids as u32 little-endian, 64 hexadecimal digits.
    #[serde(with = "hex")]
    #[schema(value_type = String)]
    pub hash: [u8; 32],
}

/// Media type of a payload of token ids, u32 little-endian.
pub const TOKEN_IDS: &str = "application/vnd.springtide.token-ids";
/// Media type of a payload of expert ids.
pub const EXPERTS: &str = "application/vnd.springtide.experts";

/// Bytes in the object store, because they are too large for a record: `PUT /v1/payloads/{digest}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PayloadRef {
    /// BLAKE3, 64 hexadecimal digits.
    #[serde(with = "hex")]
    #[schema(value_type = String)]
    pub digest: [u8; 32],
    /// At least 1.
    pub size_bytes: u64,
    /// The format. Payloads of unknown types are stored but never read.
    pub media_type: String,
}

impl PayloadRef {
    /// The reference to `bytes`.
    pub fn of(bytes: &[u8], media_type: impl Into<String>) -> Self {
        Self {
            digest: *blake3::hash(bytes).as_bytes(),
            size_bytes: bytes.len() as u64,
            media_type: media_type.into(),
        }
    }
}

/// One sampled completion (one choice).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Generation {
    /// UUIDv7. Its time is the moment of the first sampled token.
    #[serde(rename = "generation_id")]
    pub id: Uuid,
    /// A single completion is an episode of its own.
    pub episode_id: Uuid,
    #[serde(default)]
    pub segment: u32,
    #[serde(default)]
    pub turn: u32,
    #[serde(default, rename = "parent_generation_id")]
    pub parent_id: Option<Uuid>,
    pub policy: String,
    pub line: String,
    /// In token order. Together they cover `token_ids` exactly.
    pub versions: Vec<VersionSpan>,
    pub replica: String,
    pub purpose: Purpose,
    #[serde(default)]
    pub run_id: Option<Uuid>,
    #[serde(default)]
    pub task_id: Option<String>,
    #[serde(default)]
    pub group_id: Option<String>,
    pub surface: String,
    /// Opaque to Springtide. Never a name or an address.
    pub user_key: String,
    /// The alias that answered.
    pub arm: String,
    /// The probability with which the user was assigned to the arm, (0, 1].
    pub arm_probability: f32,
    #[serde(default)]
    pub prompt_prefix: Option<Prefix>,
    /// The prompt after the shared prefix and the payload.
    pub prompt_ids: Vec<u32>,
    /// The sampled tokens, including the stop token. Empty only if the engine failed before the first
    /// one: `finish_reason` is `abort` then, `untrainable` says why, and the one span has no tokens.
    pub token_ids: Vec<u32>,
    /// One per sampled token, in nats, under the distribution that was actually sampled from.
    #[serde(deserialize_with = "json::logprobs")]
    pub logprobs: Vec<f32>,
    /// One per sampled token. Absent: train on every sampled token.
    #[serde(default)]
    pub train_mask: Option<Vec<bool>>,
    /// Token ids by reference, between the shared prefix and `prompt_ids`. Upload them first.
    #[serde(default)]
    pub payload: Option<PayloadRef>,
    /// Mixture of experts: expert ids per token and layer. Upload them first.
    #[serde(default)]
    pub experts: Option<PayloadRef>,
    pub temperature: f32,
    pub top_p: f32,
    #[serde(default)]
    pub seed: Option<u64>,
    pub finish_reason: FinishReason,
    /// The policy chose to show nothing, or its text was held back because it was too improbable.
    #[serde(default)]
    pub declined: bool,
    /// Absent: unknown.
    #[serde(default)]
    pub shown: Option<bool>,
    /// False: logged but never trained on. Default: true.
    #[serde(default = "yes")]
    pub consent: bool,
    /// The policy was not allowed to decline. `logprobs` then exclude the decline token.
    #[serde(default)]
    pub decline_suppressed: bool,
    /// The probability of suppressing a decline, (0, 1). Absent: exploration was off.
    #[serde(default)]
    pub exploration_share: Option<f32>,
    /// Further sampling parameters. Absent: none applied.
    #[serde(default)]
    pub sampling: Option<Sampling>,
    /// Why its sampler says that it must never be trained on: a code such as `no_token_ids`, of lower-case
    /// letters, digits and underscores. Absent: it may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrainable: Option<String>,
    /// The engine that computed it, such as `vllm`. Its log-probabilities may differ from the trainer's
    /// by rounding. Absent: Springtide's own, which has exactly those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Who sampled it. Absent: unproven, stored but never trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<Proof>,
}

/// Sampling parameters besides temperature and `top_p`.
///
/// They are vLLM's, applied in the order that `model::sampling` documents. Defaults have no effect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Sampling {
    /// Only this many of the most probable tokens; 0: all.
    pub top_k: u32,
    /// Only tokens with at least this fraction of the highest probability, [0, 1].
    pub min_p: f32,
    /// Above 0; 1: none.
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Added to the logits of these token ids.
    #[serde(deserialize_with = "json::by_token_id")]
    #[schema(value_type = BTreeMap<String, f32>)]
    pub logit_bias: BTreeMap<u32, f32>,
    /// How many tokens could be drawn, one per sampled token. Absent: readers recompute the set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<Vec<u32>>,
    /// A grammar that excluded tokens. Absent: none did, or it was not logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constraint: Option<Constraint>,
}

/// A grammar that excluded tokens, so that readers can compute again which ones.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SamplingConstraint)]
pub struct Constraint {
    /// The rules by which tokens follow from the schema, such as `json_schema/1 llguidance/1.9.1`.
    pub format: String,
    /// The text of a JSON schema, at most 64 KiB, with its keys in the request's order.
    pub schema: String,
}

/// Without the schema, which is a customer's text.
impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let schema_bytes = self.schema.len();
        f.debug_struct("Constraint")
            .field("format", &self.format)
            .field("schema_bytes", &schema_bytes)
            .finish()
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            kept: None,
            constraint: None,
        }
    }
}

fn yes() -> bool {
    true
}

impl Generation {
    /// An event that happened now. Its id is the generation's id.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>) -> Event {
        Event::new(tenant, source, self.id, now(), Body::Generation(self))
    }
}

/// The value of a feedback event: a boolean, a number, or a text of at most 64 KiB.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = FeedbackValue)]
pub enum Value {
    Bool(bool),
    Float(f64),
    Text(String),
}

impl Value {
    /// For error messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Bool(_) => "boolean",
            Self::Float(_) => "float",
            Self::Text(_) => "text",
        }
    }
}

/// What a feedback event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Target {
    #[serde(rename = "generation_id")]
    Generation(Uuid),
    #[serde(rename = "episode_id")]
    Episode(Uuid),
}

/// A signal about a generation or an episode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "FeedbackFields")]
pub struct Feedback {
    /// UUIDv7.
    #[serde(rename = "feedback_id")]
    pub id: Uuid,
    #[serde(flatten)]
    pub target: Target,
    pub metric_name: String,
    pub value: Value,
    pub tags: BTreeMap<String, String>,
}

impl Feedback {
    /// An event at `time`. Its id is the feedback's id.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>, time: OffsetDateTime) -> Event {
        Event::new(tenant, source, self.id, time, Body::Feedback(self))
    }
}

/// Withdraws a feedback event as if it had never been given.
///
/// Has no effect if the trajectory has closed before it. It may arrive before its feedback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Retraction {
    /// UUIDv7.
    #[serde(rename = "retraction_id")]
    pub id: Uuid,
    pub feedback_id: Uuid,
    /// For people; may be empty.
    #[serde(default)]
    pub reason: String,
}

impl Retraction {
    /// An event at `time`. Its id is the retraction's id.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>, time: OffsetDateTime) -> Event {
        Event::new(tenant, source, self.id, time, Body::Retraction(self))
    }
}

/// The episode is over. Closes it, or its open generations, if their surface has
/// `close_on_episode_end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EpisodeEnd {
    pub episode_id: Uuid,
}

impl EpisodeEnd {
    /// An event at `time`. Its id is the episode's id, because an episode ends once per source.
    ///
    /// A repetition by the same source, at any time, is the same event. If several sources report
    /// an end, the earliest time counts.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>, time: OffsetDateTime) -> Event {
        Event::new(tenant, source, self.episode_id, time, Body::EpisodeEnd(self))
    }
}

impl Event {
    fn new(tenant: impl Into<String>, source: impl Into<String>, id: Uuid, time: OffsetDateTime, body: Body) -> Self {
        Self {
            tenant: tenant.into(),
            source: source.into(),
            id: id.to_string(),
            time: to_microseconds(time),
            teacher: None,
            body,
        }
    }

    /// BLAKE3 of the canonical body.
    ///
    /// Excludes the time: a repeated request whose time is filled in on arrival is the same event.
    pub fn digest(&self) -> [u8; 32] {
        protobuf::body_digest(&self.body)
    }

    /// The key of the event's record, which keeps the events of an episode in order.
    ///
    /// Feedback that names only a generation uses that id. A single completion's episode id equals
    /// its generation id. A retraction uses its feedback's id, so it may be in any partition.
    pub fn key(&self) -> [u8; 16] {
        let id = match &self.body {
            Body::Generation(generation) => generation.episode_id,
            Body::Feedback(feedback) => match feedback.target {
                Target::Generation(id) | Target::Episode(id) => id,
            },
            Body::Retraction(retraction) => retraction.feedback_id,
            Body::EpisodeEnd(end) => end.episode_id,
        };
        *id.as_bytes()
    }

    /// The CloudEvents type.
    pub fn kind(&self) -> &'static str {
        match self.body {
            Body::Generation(_) => "springtide.generation.v1",
            Body::Feedback(_) => "springtide.feedback.v1",
            Body::Retraction(_) => "springtide.retraction.v1",
            Body::EpisodeEnd(_) => "springtide.episode_end.v1",
        }
    }
}

/// The time in a UUIDv7, to the millisecond. `None` for any other UUID.
pub fn time_of(id: Uuid) -> Option<OffsetDateTime> {
    if id.get_version_num() != 7 {
        return None;
    }
    let (seconds, nanoseconds) = id.get_timestamp()?.to_unix();
    let nanoseconds = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds / 1_000_000 * 1_000_000);
    OffsetDateTime::from_unix_timestamp_nanos(nanoseconds).ok()
}

/// The current time, to the microsecond.
pub fn now() -> OffsetDateTime {
    to_microseconds(OffsetDateTime::now_utc())
}

/// Truncates to the microsecond, the resolution of the wire and of the database.
pub fn to_microseconds(time: OffsetDateTime) -> OffsetDateTime {
    let over = time.nanosecond() % 1_000;
    time - time::Duration::nanoseconds(i64::from(over))
}
