//! Converts events to Protobuf and back.
//!
//! [`message!`] names each field of a message once. [`Field`] maps the type of a field in Rust to
//! its type in Protobuf. Unknown Protobuf fields are ignored. Unknown enum values are refused.

use std::collections::BTreeMap;

use prost::Message;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Body, Constraint, EpisodeEnd, Event, Feedback, FinishReason, Generation, Invalid, PayloadRef, Prefix, Proof,
    Purpose, Retraction, Sampling, Target, Value, VersionSpan, one_target, proto,
};

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
    /// Protobuf bytes. Equal events have equal bytes.
    pub fn encode(&self) -> Vec<u8> {
        proto::Event::from(self).encode_to_vec()
    }

    /// [`Event::encode`] and [`Event::digest`] with a single encoding.
    pub fn encode_with_digest(&self) -> (Vec<u8>, [u8; 32]) {
        let mut event = proto::Event::from(self);
        let bytes = event.encode_to_vec();
        // Fields are encoded in the order of their numbers, and the body's is the highest.
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

/// [`body_digest`] of the generation without its proof.
pub(super) fn unsigned_digest(generation: &Generation) -> [u8; 32] {
    let mut body = generation.write();
    body.proof = None;
    let event = proto::Event {
        body: Some(proto::event::Body::Generation(body)),
        ..Default::default()
    };
    *blake3::hash(&event.encode_to_vec()).as_bytes()
}

pub(super) fn body_digest(body: &Body) -> [u8; 32] {
    let event = proto::Event {
        body: Some(body.into()),
        ..Default::default()
    };
    *blake3::hash(&event.encode_to_vec()).as_bytes()
}

/// A type as a field of a Protobuf message.
pub(super) trait Field: Sized {
    type Wire;

    fn write(&self) -> Self::Wire;

    /// `name` is the field's, for the error.
    fn read(wire: Self::Wire, name: &'static str) -> Result<Self, Invalid>;
}

/// Types that are the same in Protobuf.
macro_rules! same {
    ($($type:ty),+) => {$(
        impl Field for $type {
            type Wire = Self;

            fn write(&self) -> Self {
                Clone::clone(self)
            }

            fn read(wire: Self, _: &'static str) -> Result<Self, Invalid> {
                Ok(wire)
            }
        }
    )+};
}
same!(bool, f32, i64, u32, u64, String, Vec<f32>, Vec<u32>, BTreeMap<u32, f32>);
same!(Option<bool>, Option<f32>, Option<u64>);

/// Optional values that are absent in Protobuf if they are empty.
macro_rules! absent_if_empty {
    ($($type:ty),+) => {$(
        impl Field for Option<$type> {
            type Wire = $type;

            fn write(&self) -> $type {
                self.clone().unwrap_or_default()
            }

            fn read(wire: $type, _: &'static str) -> Result<Self, Invalid> {
                Ok(Some(wire).filter(|wire| !wire.is_empty()))
            }
        }
    )+};
}
absent_if_empty!(String, Vec<bool>, Vec<u32>);

impl Field for Uuid {
    type Wire = Vec<u8>;

    fn write(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }

    fn read(wire: Vec<u8>, name: &'static str) -> Result<Self, Invalid> {
        Self::from_slice(&wire).map_err(|_| Invalid::new(name, format!("has {} bytes, not 16", wire.len())))
    }
}

impl Field for Option<Uuid> {
    type Wire = Vec<u8>;

    fn write(&self) -> Vec<u8> {
        self.as_ref().map_or_else(Vec::new, Field::write)
    }

    fn read(wire: Vec<u8>, name: &'static str) -> Result<Self, Invalid> {
        (!wire.is_empty()).then(|| Field::read(wire, name)).transpose()
    }
}

/// A hash (32 bytes) or a signature (64).
impl<const BYTES: usize> Field for [u8; BYTES] {
    type Wire = Vec<u8>;

    fn write(&self) -> Vec<u8> {
        self.to_vec()
    }

    fn read(wire: Vec<u8>, name: &'static str) -> Result<Self, Invalid> {
        let refuse = |wire: Vec<u8>| Invalid::new(name, format!("has {} bytes, not {BYTES}", wire.len()));
        wire.try_into().map_err(refuse)
    }
}

impl Field for Option<Prefix> {
    type Wire = (u32, Vec<u8>);

    fn write(&self) -> Self::Wire {
        self.map_or_else(Default::default, |prefix| (prefix.length, prefix.hash.write()))
    }

    fn read((length, hash): Self::Wire, name: &'static str) -> Result<Self, Invalid> {
        if length == 0 && hash.is_empty() {
            return Ok(None);
        }
        let hash = Field::read(hash, name)?;
        Ok(Some(Prefix { length, hash }))
    }
}

macro_rules! choice {
    ($type:ident { $($variant:ident),+ }) => {
        impl Field for $type {
            type Wire = i32;

            fn write(&self) -> i32 {
                match self {
                    $(Self::$variant => proto::$type::$variant.into(),)+
                }
            }

            fn read(wire: i32, name: &'static str) -> Result<Self, Invalid> {
                match proto::$type::try_from(wire) {
                    $(Ok(proto::$type::$variant) => Ok(Self::$variant),)+
                    _ => Err(Invalid::new(name, "is missing or unknown")),
                }
            }
        }
    };
}
choice!(Purpose {
    Production,
    Rollout,
    Evaluation
});
choice!(FinishReason { Stop, Length, Abort });

/// A field of a message within a message.
fn nested<T: Field>(wire: T::Wire, name: &'static str) -> Result<T, Invalid> {
    T::read(wire, name).map_err(|error| Invalid::new(name, format!("{} {}", error.field, error.rule)))
}

/// Implements [`Field`] for a message. Lists the fields whose name is the same in Protobuf. Then
/// `as`: fields with another name there. `default`: a field that is omitted there if it has this
/// value. `pair`: a field that is two fields there.
macro_rules! message {
    (
        $type:ident { $($field:ident),* }
        $(, $renamed:ident as $name:ident)*
        $(; default $defaulted:ident = $default:literal)?
        $(; pair $pair:ident = ($first:ident, $second:ident))?
    ) => {
        impl Field for $type {
            type Wire = proto::$type;

            fn write(&self) -> proto::$type {
                $(let ($first, $second) = self.$pair.write();)?
                proto::$type {
                    $($field: self.$field.write(),)*
                    $($name: self.$renamed.write(),)*
                    $($defaulted: (self.$defaulted != $default).then_some(self.$defaulted),)?
                    $($first, $second,)?
                }
            }

            fn read(wire: proto::$type, _: &'static str) -> Result<Self, Invalid> {
                Ok(Self {
                    $($field: Field::read(wire.$field, stringify!($field))?,)*
                    $($renamed: Field::read(wire.$name, stringify!($name))?,)*
                    $($defaulted: wire.$defaulted.unwrap_or($default),)?
                    $($pair: Field::read((wire.$first, wire.$second), stringify!($second))?,)?
                })
            }
        }

        impl Field for Option<$type> {
            type Wire = Option<proto::$type>;

            fn write(&self) -> Self::Wire {
                self.as_ref().map(Field::write)
            }

            fn read(wire: Self::Wire, name: &'static str) -> Result<Self, Invalid> {
                wire.map(|wire| nested(wire, name)).transpose()
            }
        }

        impl Field for Vec<$type> {
            type Wire = Vec<proto::$type>;

            fn write(&self) -> Self::Wire {
                self.iter().map(Field::write).collect()
            }

            fn read(wire: Self::Wire, name: &'static str) -> Result<Self, Invalid> {
                wire.into_iter().map(|wire| nested(wire, name)).collect()
            }
        }
    };
}
message!(VersionSpan { version, root, tokens });
message!(PayloadRef {
    digest,
    size_bytes,
    media_type
});
message!(Proof { sampler, signature });
message!(Constraint { format, schema });
message!(
    Sampling { top_k, min_p, presence_penalty, frequency_penalty, logit_bias, kept, constraint };
    default repetition_penalty = 1.0
);
message!(
    Generation {
        episode_id, segment, turn, policy, line, versions, replica, purpose, run_id, task_id, group_id, surface,
        user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, train_mask, payload, experts, temperature,
        top_p, seed, finish_reason, declined, shown, decline_suppressed, exploration_share, sampling,
        untrainable, engine, proof
    },
    id as generation_id,
    parent_id as parent_generation_id;
    default consent = true;
    pair prompt_prefix = (prompt_prefix_length, prompt_prefix_hash)
);
message!(Retraction { feedback_id, reason }, id as retraction_id);
message!(EpisodeEnd { episode_id });

impl Field for Feedback {
    type Wire = proto::Feedback;

    fn write(&self) -> proto::Feedback {
        use proto::feedback::Value as Wire;
        let (generation_id, episode_id) = match self.target {
            Target::Generation(id) => (Some(id), None),
            Target::Episode(id) => (None, Some(id)),
        };
        proto::Feedback {
            feedback_id: self.id.write(),
            generation_id: generation_id.write(),
            episode_id: episode_id.write(),
            metric_name: self.metric_name.clone(),
            tags: self.tags.clone(),
            value: Some(match &self.value {
                Value::Bool(value) => Wire::BoolValue(*value),
                Value::Float(value) => Wire::FloatValue(*value),
                Value::Text(value) => Wire::TextValue(value.clone()),
            }),
        }
    }

    fn read(feedback: proto::Feedback, _: &'static str) -> Result<Self, Invalid> {
        use proto::feedback::Value as Wire;
        let generation: Option<Uuid> = Field::read(feedback.generation_id, "generation_id")?;
        let episode: Option<Uuid> = Field::read(feedback.episode_id, "episode_id")?;
        let target = one_target(generation, episode).map_err(|rule| Invalid::new("generation_id", rule))?;
        let value = match feedback.value {
            Some(Wire::BoolValue(value)) => Value::Bool(value),
            Some(Wire::FloatValue(value)) => Value::Float(value),
            Some(Wire::TextValue(value)) => Value::Text(value),
            None => return Err(Invalid::new("value", "is missing")),
        };
        Ok(Self {
            id: Field::read(feedback.feedback_id, "feedback_id")?,
            target,
            metric_name: feedback.metric_name,
            value,
            tags: feedback.tags,
        })
    }
}

impl From<&Event> for proto::Event {
    fn from(event: &Event) -> Self {
        Self {
            tenant: event.tenant.clone(),
            source: event.source.clone(),
            id: event.id.clone(),
            // Checked events are from 2020 to 2199. Others saturate, and the reader refuses them.
            time_unix_us: i64::try_from(event.time.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX),
            teacher: event.teacher.write(),
            body: Some((&event.body).into()),
        }
    }
}

impl From<&Body> for proto::event::Body {
    fn from(body: &Body) -> Self {
        match body {
            Body::Generation(generation) => Self::Generation(generation.write()),
            Body::Feedback(feedback) => Self::Feedback(feedback.write()),
            Body::Retraction(retraction) => Self::Retraction(retraction.write()),
            Body::EpisodeEnd(end) => Self::EpisodeEnd(end.write()),
        }
    }
}

impl TryFrom<proto::Event> for Event {
    type Error = Invalid;

    fn try_from(event: proto::Event) -> Result<Self, Invalid> {
        use proto::event::Body as Wire;
        let body = match event.body {
            Some(Wire::Generation(wire)) => Body::Generation(Field::read(wire, "generation")?),
            Some(Wire::Feedback(wire)) => Body::Feedback(Field::read(wire, "feedback")?),
            Some(Wire::Retraction(wire)) => Body::Retraction(Field::read(wire, "retraction")?),
            Some(Wire::EpisodeEnd(wire)) => Body::EpisodeEnd(Field::read(wire, "episode_end")?),
            None => return Err(Invalid::new("body", "is missing or of an unknown kind")),
        };
        let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(event.time_unix_us) * 1_000);
        Ok(Self {
            tenant: event.tenant,
            source: event.source,
            id: event.id,
            time: time.map_err(|_| Invalid::new("time_unix_us", "is out of range"))?,
            teacher: Field::read(event.teacher, "teacher")?,
            body,
        })
    }
}
