//! The places in JSON where exactly one of several members stands. What is derived for a flattened enum takes the first that it
//! meets and passes over the others: half of what was said would be lost, or joined to the wrong thing.

use serde::de::{Deserialize, Deserializer, Error};
use uuid::Uuid;

use super::{Body, EpisodeEnd, Feedback, Generation, Retraction, Target};

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Bodies {
            generation: Option<Generation>,
            feedback: Option<Feedback>,
            retraction: Option<Retraction>,
            episode_end: Option<EpisodeEnd>,
        }
        let bodies = Bodies::deserialize(deserializer)?;
        match (
            bodies.generation,
            bodies.feedback,
            bodies.retraction,
            bodies.episode_end,
        ) {
            (Some(generation), None, None, None) => Ok(Self::Generation(generation)),
            (None, Some(feedback), None, None) => Ok(Self::Feedback(feedback)),
            (None, None, Some(retraction), None) => Ok(Self::Retraction(retraction)),
            (None, None, None, Some(end)) => Ok(Self::EpisodeEnd(end)),
            _ => Err(D::Error::custom(
                "exactly one of generation, feedback, retraction and episode_end is needed",
            )),
        }
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Targets {
            generation_id: Option<Uuid>,
            episode_id: Option<Uuid>,
        }
        let targets = Targets::deserialize(deserializer)?;
        match (targets.generation_id, targets.episode_id) {
            (Some(id), None) => Ok(Self::Generation(id)),
            (None, Some(id)) => Ok(Self::Episode(id)),
            _ => Err(D::Error::custom(
                "exactly one of generation_id and episode_id is needed",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::Event;

    const ID: &str = "019aa5e6-2f40-7abc-8def-0123456789ab";

    fn read(change: impl FnOnce(&mut Value)) -> Result<Event, String> {
        let feedback = json!({"feedback_id": ID, "generation_id": ID, "metric_name": "accept", "value": true});
        let mut event =
            json!({"tenant": "t", "source": "app", "id": "1", "time": "2026-01-01T00:00:00Z", "feedback": feedback});
        change(&mut event);
        Event::decode_json(event.to_string().as_bytes()).map_err(|error| format!("{:#}", anyhow::Error::new(error)))
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
