//! An event as a request to the upstream, such that the upstream makes the same event of it: the same source, id, time and
//! body, and so the same digest. The tenant is that of the API key it is sent with.

use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

use crate::event::{Body, Event, Feedback, Generation, Invalid, Target};

/// One `POST`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    pub path: &'static str,
    pub body: Value,
    /// Field of the answer that names the event, and what it must say.
    pub answer: (&'static str, String),
}

impl Request {
    /// An error is an event that no request makes: it must not be acknowledged.
    pub(crate) fn of(event: &Event) -> Result<Self, Invalid> {
        let (path, mut body, answer) = match &event.body {
            Body::Feedback(feedback) => ("/v1/feedback", of_feedback(feedback)?, ("feedback_id", feedback.id)),
            Body::Generation(generation) => (
                "/v1/generations",
                of_generation(generation)?,
                ("generation_id", generation.id),
            ),
        };
        let id = answer.1.to_string();
        if event.id != id {
            return Err(Invalid::new(
                "id",
                "is not that of the generation or feedback; a collector needs them equal",
            ));
        }
        let time = event.time.format(&Rfc3339);
        body["time"] = time.map_err(|_| Invalid::new("time", "cannot be written"))?.into();
        body["source"] = event.source.as_str().into();
        Ok(Self {
            path,
            body,
            answer: (answer.0, id),
        })
    }
}

fn of_feedback(feedback: &Feedback) -> Result<Value, Invalid> {
    let mut body = json!({
        "id": feedback.id,
        "metric_name": feedback.metric_name,
        "tags": feedback.tags,
    });
    body["value"] = serde_json::to_value(&feedback.value).map_err(|_| Invalid::new("value", "cannot be written"))?;
    let (field, id) = match feedback.target {
        Target::Generation(id) => ("generation_id", id),
        Target::Episode(id) => ("episode_id", id),
    };
    body[field] = id.to_string().into();
    Ok(body)
}

/// Through a `Value`, which writes a 32-bit float as the 64-bit one that equals it: rounding it back is exact.
fn of_generation(generation: &Generation) -> Result<Value, Invalid> {
    serde_json::to_value(generation).map_err(|_| Invalid::new("generation", "cannot be written"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::event::{self, FinishReason, Purpose, VersionSpan};

    fn generation(logprobs: Vec<f32>) -> Generation {
        let id = Uuid::now_v7();
        let tokens = u32::try_from(logprobs.len()).unwrap();
        Generation {
            id,
            episode_id: id,
            segment: 0,
            turn: 0,
            parent_id: None,
            policy: "demo".to_owned(),
            line: "realtime".to_owned(),
            versions: vec![VersionSpan {
                version: 3,
                root: [3; 32],
                tokens,
            }],
            replica: "replica-1".to_owned(),
            purpose: Purpose::Production,
            run_id: None,
            task_id: None,
            group_id: None,
            surface: "completion".to_owned(),
            user_key: "user-1".to_owned(),
            arm: "champion".to_owned(),
            arm_probability: 0.6,
            prompt_prefix: None,
            prompt_ids: vec![1],
            token_ids: vec![2; logprobs.len()],
            logprobs,
            train_mask: None,
            payload: None,
            temperature: 0.7,
            top_p: 1.0,
            seed: Some(u64::MAX),
            finish_reason: FinishReason::Stop,
            declined: false,
            shown: None,
            consent: true,
            decline_suppressed: false,
            exploration_share: None,
        }
    }

    #[test]
    fn a_feedback_is_asked_for_as_it_was_given() {
        let feedback = Feedback {
            id: Uuid::now_v7(),
            target: Target::Episode(Uuid::now_v7()),
            metric_name: "rating".to_owned(),
            value: event::Value::Float(4.5),
            tags: [("app".to_owned(), "vim".to_owned())].into(),
        };
        let event = feedback.clone().into_event("default", "app", event::now());
        let request = Request::of(&event).unwrap();
        assert_eq!(request.path, "/v1/feedback");
        let time = event.time.format(&Rfc3339).unwrap();
        let Target::Episode(episode) = feedback.target else {
            panic!("an episode");
        };
        let expected = json!({
            "id": feedback.id, "episode_id": episode, "metric_name": "rating", "value": 4.5, "tags": {"app": "vim"},
            "time": time, "source": "app",
        });
        assert_eq!(request.body, expected);
    }

    #[test]
    fn an_event_that_no_request_makes_is_refused() {
        let mut event = generation(vec![-1.0]).into_event("default", "app");
        event.id = "another".to_owned();
        assert_eq!(Request::of(&event).unwrap_err().field, "id");
    }

    proptest! {
        #[test]
        fn a_generation_arrives_to_the_last_bit(logprobs in proptest::collection::vec(-100.0_f32..=0.0, 1..50)) {
            let event = generation(logprobs).into_event("default", "app");
            let request = Request::of(&event).unwrap();
            let text = serde_json::to_vec(&request.body).unwrap();
            let read: Generation = serde_json::from_slice(&text).unwrap();
            let mut again = read.into_event("default", request.body["source"].as_str().unwrap());
            again.time = event.time;
            prop_assert_eq!(again.digest(), event.digest());
            prop_assert_eq!(again, event);
        }
    }
}
