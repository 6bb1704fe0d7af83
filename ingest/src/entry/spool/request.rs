//! The request that forwards an event: a CloudEvent in structured mode with the same source, id,
//! time and body, so the upstream computes the same digest. The tenant comes from the API key.

use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

use event_log::event::{Body, Event, Invalid};

pub(crate) const PATH: &str = "/v1/events";
pub(crate) const MEDIA_TYPE: &str = "application/cloudevents+json";

/// One `POST`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    pub body: Value,
    /// The event's id, which the answer must contain.
    pub id: String,
}

impl Request {
    /// Fails if no request can carry the event. Such an event must not be acknowledged.
    pub(crate) fn of(event: &Event) -> Result<Self, Invalid> {
        // `Value` widens 32-bit floats to 64 bits exactly, so reading them back is exact too.
        let data = match &event.body {
            Body::Generation(generation) => serde_json::to_value(generation),
            Body::Feedback(feedback) => serde_json::to_value(feedback),
            Body::Retraction(retraction) => serde_json::to_value(retraction),
            Body::EpisodeEnd(end) => serde_json::to_value(end),
        };
        let data = data.map_err(|_| Invalid::new("data", "cannot be written as JSON"))?;
        let time = event.time.format(&Rfc3339);
        let time = time.map_err(|_| Invalid::new("time", "cannot be written"))?;
        Ok(Self {
            body: json!({
                "specversion": "1.0", "type": event.kind(), "source": event.source, "id": event.id, "time": time, "data": data,
            }),
            id: event.id.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use event_log::event::{
        self, EpisodeEnd, Feedback, FinishReason, Generation, Purpose, Retraction, Target, VersionSpan,
    };
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

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
            experts: None,
            temperature: 0.7,
            top_p: 1.0,
            seed: Some(u64::MAX),
            finish_reason: FinishReason::Stop,
            declined: false,
            shown: None,
            consent: true,
            decline_suppressed: false,
            exploration_share: None,
            sampling: None,
            untrainable: None,
            engine: None,
            proof: None,
        }
    }

    /// Reads the request like the upstream.
    fn read(request: &Request) -> Event {
        let body = &request.body;
        let text = |name: &str| body[name].as_str().unwrap().to_owned();
        let data = body["data"].clone();
        Event {
            tenant: "default".to_owned(),
            source: text("source"),
            id: text("id"),
            time: time::OffsetDateTime::parse(&text("time"), &Rfc3339).unwrap(),
            teacher: None,
            body: match body["type"].as_str().unwrap() {
                "springtide.generation.v1" => Body::Generation(serde_json::from_value(data).unwrap()),
                "springtide.feedback.v1" => Body::Feedback(serde_json::from_value(data).unwrap()),
                "springtide.retraction.v1" => Body::Retraction(serde_json::from_value(data).unwrap()),
                "springtide.episode_end.v1" => Body::EpisodeEnd(serde_json::from_value(data).unwrap()),
                other => panic!("{other}"),
            },
        }
    }

    #[test]
    fn every_kind_of_event_arrives_unchanged() {
        let feedback = Feedback {
            id: Uuid::now_v7(),
            target: Target::Episode(Uuid::now_v7()),
            metric_name: "rating".to_owned(),
            value: event::Value::Float(4.5),
            tags: [("app".to_owned(), "vim".to_owned())].into(),
        };
        let retraction = Retraction {
            id: Uuid::now_v7(),
            feedback_id: feedback.id,
            reason: "pressed by mistake".to_owned(),
        };
        let end = EpisodeEnd {
            episode_id: Uuid::now_v7(),
        };
        let mut renamed = feedback.clone().into_event("default", "app", event::now());
        renamed.id = "another id".to_owned();
        for event in [
            feedback.into_event("default", "app", event::now()),
            retraction.into_event("default", "app", event::now()),
            end.into_event("default", "app", event::now()),
            renamed,
        ] {
            let request = Request::of(&event).unwrap();
            assert_eq!(request.id, event.id);
            assert_eq!(read(&request), event);
        }
    }

    proptest! {
        #[test]
        fn a_generation_arrives_bit_by_bit(logprobs in proptest::collection::vec(-100.0_f32..=0.0, 1..50)) {
            let event = generation(logprobs).into_event("default", "app");
            let request = Request::of(&event).unwrap();
            let text = serde_json::to_string(&request.body).unwrap();
            let sent = Request { body: serde_json::from_str(&text).unwrap(), ..request };
            let again = read(&sent);
            prop_assert_eq!(again.digest(), event.digest());
            prop_assert_eq!(again, event);
        }
    }
}
