//! Protobuf to canonical and back. Unknown fields are ignored; what the schema reserves and this version does not use is
//! refused with a reason instead of being lost.

use prost::Message;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Body, EpisodeEnd, Event, Feedback, FinishReason, Generation, Invalid, PayloadRef, Prefix, Purpose, Retraction,
    Sampling, Target, Value, VersionSpan,
};
use crate::proto;

/// Why bytes are not an event.
#[derive(Debug, thiserror::Error)]
pub enum Undecodable {
    #[error("not a Protobuf event")]
    Protobuf(#[from] prost::DecodeError),
    #[error("not a JSON event")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

impl Event {
    /// Protobuf bytes, the same for the same event.
    pub fn encode(&self) -> Vec<u8> {
        proto::Event::from(self).encode_to_vec()
    }

    /// [`Event::encode`] and [`Event::digest`] at the price of one: fields stand in the order of their numbers, the body last.
    pub(crate) fn encode_with_digest(&self) -> (Vec<u8>, [u8; 32]) {
        let mut event = proto::Event::from(self);
        let bytes = event.encode_to_vec();
        event.body = None;
        let digest = blake3::hash(&bytes[event.encoded_len()..]);
        (bytes, *digest.as_bytes())
    }

    /// Reads and checks Protobuf bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Undecodable> {
        let event = Self::try_from(proto::Event::decode(bytes)?)?;
        event.check()?;
        Ok(event)
    }

    /// Reads and checks JSON bytes.
    pub fn decode_json(bytes: &[u8]) -> Result<Self, Undecodable> {
        let mut event: Self = serde_json::from_slice(bytes)?;
        event.time = super::to_microseconds(event.time);
        event.check()?;
        Ok(event)
    }
}

pub(super) fn body_digest(body: &Body) -> [u8; 32] {
    let event = proto::Event {
        body: Some(body.into()),
        ..Default::default()
    };
    *blake3::hash(&event.encode_to_vec()).as_bytes()
}

impl From<&Event> for proto::Event {
    fn from(event: &Event) -> Self {
        Self {
            tenant: event.tenant.clone(),
            source: event.source.clone(),
            id: event.id.clone(),
            // Checked events lie between 2020 and 2200; anything else saturates and is refused by the reader.
            time_unix_us: i64::try_from(event.time.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX),
            body: Some((&event.body).into()),
        }
    }
}

impl From<&Body> for proto::event::Body {
    fn from(body: &Body) -> Self {
        match body {
            Body::Generation(generation) => Self::Generation(generation.into()),
            Body::Feedback(feedback) => Self::Feedback(feedback.into()),
            Body::Retraction(retraction) => Self::Retraction(proto::Retraction {
                feedback_id: id_bytes(retraction.feedback_id),
                reason: retraction.reason.clone(),
                retraction_id: id_bytes(retraction.id),
            }),
            Body::EpisodeEnd(end) => Self::EpisodeEnd(proto::EpisodeEnd {
                episode_id: id_bytes(end.episode_id),
            }),
        }
    }
}

impl From<&Generation> for proto::Generation {
    fn from(generation: &Generation) -> Self {
        let purpose = match generation.purpose {
            Purpose::Production => proto::Purpose::Production,
            Purpose::Rollout => proto::Purpose::Rollout,
            Purpose::Evaluation => proto::Purpose::Evaluation,
        };
        let finish_reason = match generation.finish_reason {
            FinishReason::Stop => proto::FinishReason::Stop,
            FinishReason::Length => proto::FinishReason::Length,
            FinishReason::Abort => proto::FinishReason::Abort,
        };
        Self {
            generation_id: id_bytes(generation.id),
            episode_id: id_bytes(generation.episode_id),
            segment: generation.segment,
            turn: generation.turn,
            parent_generation_id: optional_id_bytes(generation.parent_id),
            policy: generation.policy.clone(),
            line: generation.line.clone(),
            versions: generation.versions.iter().map(Into::into).collect(),
            replica: generation.replica.clone(),
            purpose: purpose.into(),
            run_id: optional_id_bytes(generation.run_id),
            task_id: generation.task_id.clone().unwrap_or_default(),
            group_id: generation.group_id.clone().unwrap_or_default(),
            surface: generation.surface.clone(),
            user_key: generation.user_key.clone(),
            arm: generation.arm.clone(),
            arm_probability: generation.arm_probability,
            prompt_prefix_length: generation.prompt_prefix.map_or(0, |prefix| prefix.length),
            prompt_prefix_hash: generation
                .prompt_prefix
                .map_or_else(Vec::new, |prefix| prefix.hash.to_vec()),
            prompt_ids: generation.prompt_ids.clone(),
            token_ids: generation.token_ids.clone(),
            logprobs: generation.logprobs.clone(),
            train_mask: generation.train_mask.clone().unwrap_or_default(),
            payload: generation.payload.as_ref().map(Into::into),
            experts: generation.experts.as_ref().map(Into::into),
            temperature: generation.temperature,
            top_p: generation.top_p,
            seed: generation.seed,
            finish_reason: finish_reason.into(),
            declined: generation.declined,
            shown: generation.shown,
            consent: (!generation.consent).then_some(false),
            decline_suppressed: generation.decline_suppressed,
            exploration_share: generation.exploration_share,
            sampling: generation.sampling.as_ref().map(Into::into),
        }
    }
}

impl From<&Sampling> for proto::Sampling {
    fn from(sampling: &Sampling) -> Self {
        Self {
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: (sampling.repetition_penalty != 1.0).then_some(sampling.repetition_penalty),
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias.clone(),
            kept: sampling.kept.clone().unwrap_or_default(),
        }
    }
}

impl From<&VersionSpan> for proto::VersionSpan {
    fn from(span: &VersionSpan) -> Self {
        Self {
            version: span.version,
            root: span.root.to_vec(),
            tokens: span.tokens,
        }
    }
}

impl From<&PayloadRef> for proto::PayloadRef {
    fn from(payload: &PayloadRef) -> Self {
        Self {
            digest: payload.digest.to_vec(),
            size_bytes: payload.size_bytes,
            media_type: payload.media_type.clone(),
        }
    }
}

impl From<&Feedback> for proto::Feedback {
    fn from(feedback: &Feedback) -> Self {
        use proto::feedback::Value as Wire;
        let (generation_id, episode_id) = match feedback.target {
            Target::Generation(id) => (id_bytes(id), Vec::new()),
            Target::Episode(id) => (Vec::new(), id_bytes(id)),
        };
        Self {
            feedback_id: id_bytes(feedback.id),
            generation_id,
            episode_id,
            metric_name: feedback.metric_name.clone(),
            tags: feedback.tags.clone(),
            value: Some(match &feedback.value {
                Value::Bool(value) => Wire::BoolValue(*value),
                Value::Float(value) => Wire::FloatValue(*value),
                Value::Text(value) => Wire::TextValue(value.clone()),
            }),
        }
    }
}

impl TryFrom<proto::Event> for Event {
    type Error = Invalid;

    fn try_from(event: proto::Event) -> Result<Self, Invalid> {
        use proto::event::Body as Wire;
        let body = match event.body {
            Some(Wire::Generation(generation)) => Body::Generation(generation.try_into()?),
            Some(Wire::Feedback(feedback)) => Body::Feedback(feedback.try_into()?),
            Some(Wire::Retraction(retraction)) => Body::Retraction(Retraction {
                id: id("retraction_id", &retraction.retraction_id)?,
                feedback_id: id("feedback_id", &retraction.feedback_id)?,
                reason: retraction.reason,
            }),
            Some(Wire::EpisodeEnd(end)) => Body::EpisodeEnd(EpisodeEnd {
                episode_id: id("episode_id", &end.episode_id)?,
            }),
            None => return Err(Invalid::new("body", "is missing or of an unknown kind")),
        };
        let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(event.time_unix_us) * 1_000);
        Ok(Self {
            tenant: event.tenant,
            source: event.source,
            id: event.id,
            time: time.map_err(|_| Invalid::new("time_unix_us", "is out of range"))?,
            body,
        })
    }
}

impl TryFrom<proto::Generation> for Generation {
    type Error = Invalid;

    fn try_from(generation: proto::Generation) -> Result<Self, Invalid> {
        let purpose = match generation.purpose() {
            proto::Purpose::Production => Purpose::Production,
            proto::Purpose::Rollout => Purpose::Rollout,
            proto::Purpose::Evaluation => Purpose::Evaluation,
            proto::Purpose::Unspecified => {
                return Err(Invalid::new("purpose", "is missing or unknown"));
            }
        };
        let finish_reason = match generation.finish_reason() {
            proto::FinishReason::Stop => FinishReason::Stop,
            proto::FinishReason::Length => FinishReason::Length,
            proto::FinishReason::Abort => FinishReason::Abort,
            proto::FinishReason::Unspecified => {
                return Err(Invalid::new("finish_reason", "is missing or unknown"));
            }
        };
        let prompt_prefix = match (
            generation.prompt_prefix_length,
            generation.prompt_prefix_hash.as_slice(),
        ) {
            (0, []) => None,
            (length, hash) => Some(Prefix {
                length,
                hash: digest("prompt_prefix_hash", hash)?,
            }),
        };
        Ok(Self {
            id: id("generation_id", &generation.generation_id)?,
            episode_id: id("episode_id", &generation.episode_id)?,
            segment: generation.segment,
            turn: generation.turn,
            parent_id: optional_id("parent_generation_id", &generation.parent_generation_id)?,
            policy: generation.policy,
            line: generation.line,
            versions: generation
                .versions
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            replica: generation.replica,
            purpose,
            run_id: optional_id("run_id", &generation.run_id)?,
            task_id: Some(generation.task_id).filter(|id| !id.is_empty()),
            group_id: Some(generation.group_id).filter(|id| !id.is_empty()),
            surface: generation.surface,
            user_key: generation.user_key,
            arm: generation.arm,
            arm_probability: generation.arm_probability,
            prompt_prefix,
            prompt_ids: generation.prompt_ids,
            token_ids: generation.token_ids,
            logprobs: generation.logprobs,
            train_mask: Some(generation.train_mask).filter(|mask| !mask.is_empty()),
            payload: reference("payload.digest", generation.payload)?,
            experts: reference("experts.digest", generation.experts)?,
            temperature: generation.temperature,
            top_p: generation.top_p,
            seed: generation.seed,
            finish_reason,
            declined: generation.declined,
            shown: generation.shown,
            consent: generation.consent.unwrap_or(true),
            decline_suppressed: generation.decline_suppressed,
            exploration_share: generation.exploration_share,
            sampling: generation.sampling.map(Into::into),
        })
    }
}

impl From<proto::Sampling> for Sampling {
    fn from(sampling: proto::Sampling) -> Self {
        Self {
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias,
            kept: Some(sampling.kept).filter(|kept| !kept.is_empty()),
        }
    }
}

impl TryFrom<proto::VersionSpan> for VersionSpan {
    type Error = Invalid;

    fn try_from(span: proto::VersionSpan) -> Result<Self, Invalid> {
        Ok(Self {
            version: span.version,
            root: digest("versions.root", &span.root)?,
            tokens: span.tokens,
        })
    }
}

fn reference(field: &'static str, payload: Option<proto::PayloadRef>) -> Result<Option<PayloadRef>, Invalid> {
    let read = |payload: proto::PayloadRef| {
        Ok(PayloadRef {
            digest: digest(field, &payload.digest)?,
            size_bytes: payload.size_bytes,
            media_type: payload.media_type,
        })
    };
    payload.map(read).transpose()
}

impl TryFrom<proto::Feedback> for Feedback {
    type Error = Invalid;

    fn try_from(feedback: proto::Feedback) -> Result<Self, Invalid> {
        use proto::feedback::Value as Wire;
        let generation = optional_id("generation_id", &feedback.generation_id)?;
        let episode = optional_id("episode_id", &feedback.episode_id)?;
        let target = match (generation, episode) {
            (Some(id), None) => Target::Generation(id),
            (None, Some(id)) => Target::Episode(id),
            _ => {
                let rule = "exactly one of generation_id and episode_id is needed";
                return Err(Invalid::new("generation_id", rule));
            }
        };
        let value = match feedback.value {
            Some(Wire::BoolValue(value)) => Value::Bool(value),
            Some(Wire::FloatValue(value)) => Value::Float(value),
            Some(Wire::TextValue(value)) => Value::Text(value),
            None => return Err(Invalid::new("value", "is missing")),
        };
        Ok(Self {
            id: id("feedback_id", &feedback.feedback_id)?,
            target,
            metric_name: feedback.metric_name,
            value,
            tags: feedback.tags,
        })
    }
}

fn id(field: &'static str, bytes: &[u8]) -> Result<Uuid, Invalid> {
    Uuid::from_slice(bytes).map_err(|_| Invalid::new(field, format!("has {} bytes, not 16", bytes.len())))
}

fn optional_id(field: &'static str, bytes: &[u8]) -> Result<Option<Uuid>, Invalid> {
    if bytes.is_empty() {
        return Ok(None);
    }
    id(field, bytes).map(Some)
}

fn digest(field: &'static str, bytes: &[u8]) -> Result<[u8; 32], Invalid> {
    bytes
        .try_into()
        .map_err(|_| Invalid::new(field, format!("has {} bytes, not 32", bytes.len())))
}

fn id_bytes(id: Uuid) -> Vec<u8> {
    id.as_bytes().to_vec()
}

fn optional_id_bytes(id: Option<Uuid>) -> Vec<u8> {
    id.map_or_else(Vec::new, id_bytes)
}
