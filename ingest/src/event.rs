//! The canonical events: plain Rust types that every wire form (Protobuf, JSON) converts into, and the rules that all of
//! them keep. What is written to a table has passed [`Event::check`].
//!
//! JSON speaks the names of the Protobuf schema: ids as UUID strings, digests as hexadecimal, times as RFC 3339.

mod check;
mod one;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

pub use check::{
    Invalid, LOGIT_BIASES_MAX, LOGPROBS_TOLERANCE, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, PROMPT_TOKENS_MAX,
    SAMPLED_TOKENS_MAX, TAGS_MAX, TEXT_BYTES_MAX,
};
pub(crate) use one::{ONE_BODY, body};
pub use wire::Undecodable;

/// One thing that happened. `(tenant, source, id)` identifies it, as in CloudEvents.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    pub tenant: String,
    /// Who produced it, a URI reference: `springtide/serve/replica-1`.
    pub source: String,
    /// Unique within tenant and source.
    pub id: String,
    /// When it happened, to the microsecond. Of a generation: when its last token was sampled.
    #[serde(with = "time::serde::rfc3339")]
    pub time: OffsetDateTime,
    #[serde(flatten)]
    pub body: Body,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(
    clippy::large_enum_variant,
    reason = "events are few at a time and mostly generations"
)]
pub enum Body {
    Generation(Generation),
    Feedback(Feedback),
    Retraction(Retraction),
    EpisodeEnd(EpisodeEnd),
}

/// Why a generation was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// A user waits for it.
    Production,
    /// Produced for training.
    Rollout,
    /// Produced for a measurement, never trained on.
    Evaluation,
}

impl Purpose {
    /// As in the column `generation.purpose`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Production => "production",
            Self::Rollout => "rollout",
            Self::Evaluation => "evaluation",
        }
    }
}

/// Why sampling ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// The caller went away.
    Abort,
}

impl FinishReason {
    /// As in the column `generation.finish_reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// Consecutive sampled tokens that one version sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionSpan {
    /// Serial.
    pub version: i64,
    /// BLAKE3 root digest of that version.
    #[serde(with = "hex")]
    pub root: [u8; 32],
    /// How many tokens, at least 1.
    pub tokens: u32,
}

/// The leading prompt tokens shared with the parent generation, not repeated in `prompt_ids`: the first of the parent's own
/// prompt and sampled tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    /// Tokens, at least 1.
    pub length: u32,
    /// BLAKE3 of the shared token ids as u32 little-endian.
    #[serde(with = "hex")]
    pub hash: [u8; 32],
}

/// Bytes kept in the object store because they are too large for a record: [`crate::payload`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PayloadRef {
    /// BLAKE3.
    #[serde(with = "hex")]
    pub digest: [u8; 32],
    /// At least 1.
    pub size_bytes: u64,
    /// How to read them: [`crate::payload::TOKEN_IDS`], [`crate::payload::EXPERTS`]; others are kept and not read.
    pub media_type: String,
}

impl PayloadRef {
    /// What the log says of `bytes`.
    pub fn of(bytes: &[u8], media_type: impl Into<String>) -> Self {
        Self {
            digest: *blake3::hash(bytes).as_bytes(),
            size_bytes: bytes.len() as u64,
            media_type: media_type.into(),
        }
    }
}

/// One sampled completion (one choice).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// UUIDv7; its time is the moment of the first sampled token.
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
    /// In token order; together they cover `token_ids` exactly.
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
    /// Opaque to Springtide; never a name or an address.
    pub user_key: String,
    /// Alias that answered.
    pub arm: String,
    /// With which this user was put in that arm, (0, 1].
    pub arm_probability: f32,
    #[serde(default)]
    pub prompt_prefix: Option<Prefix>,
    /// After the shared prefix and the payload.
    pub prompt_ids: Vec<u32>,
    /// Sampled, the stop token included.
    pub token_ids: Vec<u32>,
    /// Nats, one per sampled token, under the distribution actually sampled from.
    pub logprobs: Vec<f32>,
    /// One per sampled token; absent: every sampled token is trained on.
    #[serde(default)]
    pub train_mask: Option<Vec<bool>>,
    /// Token ids by reference, between the shared prefix and `prompt_ids`.
    #[serde(default)]
    pub payload: Option<PayloadRef>,
    /// Expert ids per token and layer, of a mixture of experts.
    #[serde(default)]
    pub experts: Option<PayloadRef>,
    pub temperature: f32,
    pub top_p: f32,
    #[serde(default)]
    pub seed: Option<u64>,
    pub finish_reason: FinishReason,
    /// The policy chose to show nothing.
    #[serde(default)]
    pub declined: bool,
    /// Absent: the surface did not say.
    #[serde(default)]
    pub shown: Option<bool>,
    /// False: logged, never trained on.
    #[serde(default = "yes")]
    pub consent: bool,
    /// The policy was not allowed to decline: `logprobs` are of the distribution without the decline token.
    #[serde(default)]
    pub decline_suppressed: bool,
    /// The probability with which a coin suppressed declining, (0, 1); absent: it was not tossed.
    #[serde(default)]
    pub exploration_share: Option<f32>,
    /// What else shaped the distribution sampled from; absent: nothing.
    #[serde(default)]
    pub sampling: Option<Sampling>,
}

/// What shaped the distribution sampled from beside temperature and `top_p`: vLLM's parameters, in the order that
/// `policy::sampling` gives. Fields that are absent change nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// So many most probable tokens could be drawn; 0: all.
    pub top_k: u32,
    /// Only tokens of at least this share of the most probable one's probability, [0, 1].
    pub min_p: f32,
    /// Above 0; 1: none.
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Added to the logits of these ids.
    #[serde(deserialize_with = "by_id")]
    pub logit_bias: BTreeMap<u32, f32>,
    /// How many ids could be drawn, one per sampled token; absent: whoever needs the set computes it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<Vec<u32>>,
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
        }
    }
}

/// Ids are text as keys of JSON, and stay text where serde has buffered them.
fn by_id<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<u32, f32>, D::Error> {
    struct ById;
    impl<'de> serde::de::Visitor<'de> for ById {
        type Value = BTreeMap<u32, f32>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object from token ids to numbers")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            use serde::de::Error;
            let mut biases = BTreeMap::new();
            while let Some((id, bias)) = map.next_entry::<String, f32>()? {
                let Ok(number) = id.parse() else {
                    return Err(A::Error::custom(format!("logit_bias: {id:?} is not a token id")));
                };
                if biases.insert(number, bias).is_some() {
                    return Err(A::Error::custom(format!("logit_bias: {number} is there twice")));
                }
                if biases.len() > LOGIT_BIASES_MAX {
                    return Err(A::Error::custom(format!(
                        "logit_bias: more than {LOGIT_BIASES_MAX} tokens"
                    )));
                }
            }
            Ok(biases)
        }
    }
    deserializer.deserialize_map(ById)
}

fn yes() -> bool {
    true
}

impl Generation {
    /// The event of this generation, which happened now; the generation's id is the event's.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>) -> Event {
        Event {
            tenant: tenant.into(),
            source: source.into(),
            id: self.id.to_string(),
            time: now(),
            body: Body::Generation(self),
        }
    }
}

/// What a feedback says.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
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

/// What a feedback is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Target {
    #[serde(rename = "generation_id")]
    Generation(Uuid),
    #[serde(rename = "episode_id")]
    Episode(Uuid),
}

/// A signal about a generation or an episode.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// The event of this feedback, given at `time`; the feedback's id is the event's.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>, time: OffsetDateTime) -> Event {
        Event {
            tenant: tenant.into(),
            source: source.into(),
            id: self.id.to_string(),
            time: to_microseconds(time),
            body: Body::Feedback(self),
        }
    }
}

/// Takes a feedback back: it never counted, if its trajectory is still open at that time. May arrive before its feedback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retraction {
    /// UUIDv7.
    #[serde(rename = "retraction_id")]
    pub id: Uuid,
    pub feedback_id: Uuid,
    /// In words, for people; may be empty.
    #[serde(default)]
    pub reason: String,
}

impl Retraction {
    /// The event of this retraction, made at `time`; the retraction's id is the event's.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>, time: OffsetDateTime) -> Event {
        Event {
            tenant: tenant.into(),
            source: source.into(),
            id: self.id.to_string(),
            time: to_microseconds(time),
            body: Body::Retraction(self),
        }
    }
}

/// Nothing more will come for this episode. Where its surface says so, what is still open closes then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpisodeEnd {
    pub episode_id: Uuid,
}

impl EpisodeEnd {
    /// The event of this end, at `time`. An episode ends once, so its id is the event's: what a source says again, with whatever
    /// time, is the same event. Ends of several sources are several events, of which the earliest counts.
    pub fn into_event(self, tenant: impl Into<String>, source: impl Into<String>, time: OffsetDateTime) -> Event {
        Event {
            tenant: tenant.into(),
            source: source.into(),
            id: self.episode_id.to_string(),
            time: to_microseconds(time),
            body: Body::EpisodeEnd(self),
        }
    }
}

impl Event {
    /// BLAKE3 of the canonical body. The envelope's time is not part of it: a repeated request whose time was filled in on
    /// arrival is still the same event.
    pub fn digest(&self) -> [u8; 32] {
        wire::body_digest(&self.body)
    }

    /// The key of the event's record: what belongs to one episode stays in order. A feedback that names only its
    /// generation is keyed by that; a single completion's episode id is its generation id. A retraction may be anywhere.
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

    /// CloudEvents type: `springtide.generation.v1`, `springtide.feedback.v1`, `springtide.retraction.v1`,
    /// `springtide.episode_end.v1`.
    pub fn kind(&self) -> &'static str {
        match self.body {
            Body::Generation(_) => "springtide.generation.v1",
            Body::Feedback(_) => "springtide.feedback.v1",
            Body::Retraction(_) => "springtide.retraction.v1",
            Body::EpisodeEnd(_) => "springtide.episode_end.v1",
        }
    }
}

/// The time in a UUIDv7, to the millisecond; `None` for any other UUID.
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

/// Cut to the microsecond, which is what the wire and the database keep.
pub fn to_microseconds(time: OffsetDateTime) -> OffsetDateTime {
    let over = time.nanosecond() % 1_000;
    time - time::Duration::nanoseconds(i64::from(over))
}
