//! What JSON reads without buffering. What is derived for a flattened or an untagged enum keeps every member in memory first, tries
//! one variant after the other, and of several takes the first and passes over the others: half of what was said would be
//! lost, or joined to the wrong thing. Here exactly one of several members stands.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Body, EpisodeEnd, Event, Feedback, Generation, Retraction, Target, Value};

/// The rule of [`body`].
pub(crate) const ONE_BODY: &str = "exactly one of generation, feedback, retraction and episode_end is needed";

/// The one body of an event; `None`: there are several, or none.
pub(crate) fn body(
    generation: Option<Generation>,
    feedback: Option<Feedback>,
    retraction: Option<Retraction>,
    episode_end: Option<EpisodeEnd>,
) -> Option<Body> {
    match (generation, feedback, retraction, episode_end) {
        (Some(generation), None, None, None) => Some(Body::Generation(generation)),
        (None, Some(feedback), None, None) => Some(Body::Feedback(feedback)),
        (None, None, Some(retraction), None) => Some(Body::Retraction(retraction)),
        (None, None, None, Some(end)) => Some(Body::EpisodeEnd(end)),
        _ => None,
    }
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Members {
            tenant: String,
            source: String,
            id: String,
            #[serde(with = "time::serde::rfc3339")]
            time: OffsetDateTime,
            generation: Option<Generation>,
            feedback: Option<Feedback>,
            retraction: Option<Retraction>,
            episode_end: Option<EpisodeEnd>,
        }
        let event = Members::deserialize(deserializer)?;
        let body = body(event.generation, event.feedback, event.retraction, event.episode_end);
        Ok(Self {
            tenant: event.tenant,
            source: event.source,
            id: event.id,
            time: event.time,
            body: body.ok_or_else(|| D::Error::custom(ONE_BODY))?,
        })
    }
}

impl<'de> Deserialize<'de> for Feedback {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Members {
            feedback_id: Uuid,
            generation_id: Option<Uuid>,
            episode_id: Option<Uuid>,
            metric_name: String,
            value: Value,
            #[serde(default)]
            tags: BTreeMap<String, String>,
        }
        let feedback = Members::deserialize(deserializer)?;
        let target = match (feedback.generation_id, feedback.episode_id) {
            (Some(id), None) => Target::Generation(id),
            (None, Some(id)) => Target::Episode(id),
            _ => {
                return Err(D::Error::custom(
                    "exactly one of generation_id and episode_id is needed",
                ));
            }
        };
        Ok(Self {
            id: feedback.feedback_id,
            target,
            metric_name: feedback.metric_name,
            value: feedback.value,
            tags: feedback.tags,
        })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl Visitor<'_> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a boolean, a number or a text")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Float(value as f64))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Float(value as f64))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Body, Event, Value as Said};

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
        let said = |event: Event| match event.body {
            Body::Feedback(feedback) => feedback.value,
            other => panic!("{other:?}"),
        };
        assert_eq!(said(value(json!(true)).unwrap()), Said::Bool(true));
        assert_eq!(said(value(json!(-3)).unwrap()), Said::Float(-3.0));
        assert_eq!(said(value(json!(0.5)).unwrap()), Said::Float(0.5));
        assert_eq!(said(value(json!("ä\n")).unwrap()), Said::Text("ä\n".to_owned()));
        for other in [json!(null), json!([true]), json!({"value": true})] {
            let refused = value(other).unwrap_err();
            assert!(refused.contains("a boolean, a number or a text"), "{refused}");
        }
    }

    #[test]
    fn an_event_of_two_bodies_and_a_feedback_about_two_things_are_none() {
        read(|_| {}).unwrap();
        read(|event| event["feedback"]["episode_id"] = Value::Null).unwrap();
        let two = read(|event| event["episode_end"] = json!({"episode_id": ID})).unwrap_err();
        assert!(two.contains("exactly one of generation, feedback"), "{two}");
        let both = read(|event| event["feedback"]["episode_id"] = json!(ID)).unwrap_err();
        assert!(both.contains("exactly one of generation_id"), "{both}");
    }
}
