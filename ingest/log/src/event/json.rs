//! Reads events from JSON.
//!
//! An event has exactly one body and a feedback event exactly one target. A derived flattened enum
//! would take the first of several and ignore the rest, and would buffer every member. So JSON is
//! read into structs with one optional field per choice.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Body, EpisodeEnd, Event, Feedback, Generation, LOGIT_BIASES_MAX, Retraction, Target};
// utoipa treats any type named `Value` as arbitrary JSON.
use super::Value as FeedbackValue;

/// The only body that is present.
pub fn one_body(
    generation: Option<Generation>,
    feedback: Option<Feedback>,
    retraction: Option<Retraction>,
    episode_end: Option<EpisodeEnd>,
) -> Result<Body, &'static str> {
    match (generation, feedback, retraction, episode_end) {
        (Some(generation), None, None, None) => Ok(Body::Generation(generation)),
        (None, Some(feedback), None, None) => Ok(Body::Feedback(feedback)),
        (None, None, Some(retraction), None) => Ok(Body::Retraction(retraction)),
        (None, None, None, Some(end)) => Ok(Body::EpisodeEnd(end)),
        _ => Err("exactly one of generation, feedback, retraction and episode_end is needed"),
    }
}

/// The only target that is present.
pub fn one_target(generation_id: Option<Uuid>, episode_id: Option<Uuid>) -> Result<Target, &'static str> {
    match (generation_id, episode_id) {
        (Some(id), None) => Ok(Target::Generation(id)),
        (None, Some(id)) => Ok(Target::Episode(id)),
        _ => Err("exactly one of generation_id and episode_id is needed"),
    }
}

/// An [`Event`] in JSON.
#[derive(serde::Deserialize)]
pub(super) struct EventFields {
    tenant: String,
    source: String,
    id: String,
    #[serde(with = "time::serde::rfc3339")]
    time: OffsetDateTime,
    #[serde(default)]
    teacher: Option<Uuid>,
    generation: Option<Generation>,
    feedback: Option<Feedback>,
    retraction: Option<Retraction>,
    episode_end: Option<EpisodeEnd>,
}

impl TryFrom<EventFields> for Event {
    type Error = &'static str;

    fn try_from(event: EventFields) -> Result<Self, Self::Error> {
        Ok(Self {
            tenant: event.tenant,
            source: event.source,
            id: event.id,
            time: event.time,
            teacher: event.teacher,
            body: one_body(event.generation, event.feedback, event.retraction, event.episode_end)?,
        })
    }
}

/// A signal about a generation or an episode: exactly one of the two.
#[derive(serde::Deserialize, ToSchema)]
#[schema(as = Feedback)]
pub struct FeedbackFields {
    /// UUIDv7.
    feedback_id: Uuid,
    generation_id: Option<Uuid>,
    episode_id: Option<Uuid>,
    metric_name: String,
    value: FeedbackValue,
    #[serde(default)]
    tags: BTreeMap<String, String>,
}

impl TryFrom<FeedbackFields> for Feedback {
    type Error = &'static str;

    fn try_from(feedback: FeedbackFields) -> Result<Self, Self::Error> {
        Ok(Self {
            id: feedback.feedback_id,
            target: one_target(feedback.generation_id, feedback.episode_id)?,
            metric_name: feedback.metric_name,
            value: feedback.value,
            tags: feedback.tags,
        })
    }
}

impl<'de> Deserialize<'de> for FeedbackValue {
    /// A derived untagged enum would buffer the value, and format every text as the error of not
    /// being a boolean.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl Visitor<'_> for AnyValue {
    type Value = FeedbackValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a boolean, a number or a text")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<FeedbackValue, E> {
        Ok(FeedbackValue::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<FeedbackValue, E> {
        Ok(FeedbackValue::Float(value as f64))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<FeedbackValue, E> {
        Ok(FeedbackValue::Float(value as f64))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<FeedbackValue, E> {
        Ok(FeedbackValue::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<FeedbackValue, E> {
        Ok(FeedbackValue::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<FeedbackValue, E> {
        Ok(FeedbackValue::Text(value))
    }
}

/// Reads numbers as doubles and rounds them: a third faster than reading them as `f32`. The result
/// is the same for every number that was an `f32` when it was written.
pub(super) fn logprobs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
    let logprobs = Vec::<f64>::deserialize(deserializer)?;
    Ok(logprobs.into_iter().map(|logprob| logprob as f32).collect())
}

/// Stops at the limit, because a map takes many times the memory of its text.
pub(super) fn by_token_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<u32, f32>, D::Error> {
    deserializer.deserialize_map(ByTokenId)
}

struct ByTokenId;

impl<'de> Visitor<'de> for ByTokenId {
    type Value = BTreeMap<u32, f32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from token ids to numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut biases = BTreeMap::new();
        // JSON keys are strings. Serde does not convert them to numbers in buffered objects.
        while let Some((text, bias)) = map.next_entry::<String, f32>()? {
            let Ok(id) = text.parse() else {
                return Err(A::Error::custom(format!("logit_bias: {text:?} is not a token id")));
            };
            if biases.insert(id, bias).is_some() {
                return Err(A::Error::custom(format!("logit_bias: {id} appears twice")));
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Body, Event, Value as FeedbackValue};

    const ID: &str = "019aa5e6-2f40-7abc-8def-0123456789ab";

    fn read(change: impl FnOnce(&mut Value)) -> Result<Event, String> {
        let feedback = json!({"feedback_id": ID, "generation_id": ID, "metric_name": "accept", "value": true});
        let mut event =
            json!({"tenant": "t", "source": "app", "id": "1", "time": "2026-01-01T00:00:00Z", "feedback": feedback});
        change(&mut event);
        Event::decode_json(event.to_string().as_bytes()).map_err(|error| format!("{:#}", anyhow::Error::new(error)))
    }

    #[test]
    fn a_value_is_a_boolean_a_number_or_a_text() {
        let value = |value: Value| read(|event| event["feedback"]["value"] = value);
        let value_of = |event: Event| match event.body {
            Body::Feedback(feedback) => feedback.value,
            other => panic!("{other:?}"),
        };
        assert_eq!(value_of(value(json!(true)).unwrap()), FeedbackValue::Bool(true));
        assert_eq!(value_of(value(json!(-3)).unwrap()), FeedbackValue::Float(-3.0));
        assert_eq!(value_of(value(json!(0.5)).unwrap()), FeedbackValue::Float(0.5));
        assert_eq!(
            value_of(value(json!("ä\n")).unwrap()),
            FeedbackValue::Text("ä\n".to_owned())
        );
        for other in [json!(null), json!([true]), json!({"value": true})] {
            let refused = value(other).unwrap_err();
            assert!(refused.contains("a boolean, a number or a text"), "{refused}");
        }
    }

    fn read_logprobs(text: &str) -> Result<Vec<f32>, serde_json::Error> {
        super::logprobs(&mut serde_json::Deserializer::from_str(text))
    }

    #[test]
    fn logprobs_are_refused_if_they_are_not_numbers_and_infinite_if_they_are_too_large() {
        for text in ["[null]", "[\"1\"]", "[true]", "{}", "1", "[-1e400]"] {
            assert!(read_logprobs(text).is_err(), "{text}");
        }
        assert_eq!(read_logprobs("[-1, 0, -2.5e-1]").unwrap(), [-1.0, 0.0, -0.25]);
        assert!(read_logprobs("[-3.5e38]").unwrap()[0].is_infinite());
    }

    proptest::proptest! {
        #[test]
        fn every_logprob_is_read_as_it_was_written(bits: Vec<u32>) {
            let written = bits.into_iter().map(f32::from_bits).filter(|logprob| logprob.is_finite());
            let written: Vec<f32> = written.collect();
            let read = read_logprobs(&serde_json::to_string(&written).unwrap()).unwrap();
            let bits = |list: &[f32]| list.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
            proptest::prop_assert_eq!(bits(&read), bits(&written));
        }
    }

    #[test]
    fn an_event_with_two_bodies_and_feedback_with_two_targets_are_refused() {
        read(|_| {}).unwrap();
        read(|event| event["feedback"]["episode_id"] = Value::Null).unwrap();
        let two = read(|event| event["episode_end"] = json!({"episode_id": ID})).unwrap_err();
        assert!(two.contains("exactly one of generation, feedback"), "{two}");
        let both = read(|event| event["feedback"]["episode_id"] = json!(ID)).unwrap_err();
        assert!(both.contains("exactly one of generation_id"), "{both}");
    }
}
