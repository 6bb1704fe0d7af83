//! Requests whose base URL carries a lease ([`event_log::lease`]). They become turns of its rollout.

use super::request::{GenerationRequest, name, usual_priority};
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use edge::Problem;
use event_log::event::Purpose;
use event_log::lease::Lease;

/// Priorities of runs are −100 to 100.
const RUN_PRIORITY_MAX: i32 = 100;

/// The lease in the path. `None`: the path has none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Leased(Option<Lease>);

impl<S: Send + Sync> FromRequestParts<S> for Leased {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let parameters = RawPathParams::from_request_parts(parts, state).await;
        let parameters = parameters.map_err(|rejection| Problem::bad_request(rejection.body_text()))?;
        match parameters.iter().find(|(name, _)| *name == "lease") {
            None => Ok(Self(None)),
            Some((_, text)) => match Lease::read(text) {
                Ok(lease) => Ok(Self(Some(lease))),
                Err(error) => Err(Problem::bad_request(error.to_string())),
            },
        }
    }
}

impl Leased {
    /// Makes the request a turn of the rollout: of its episode, for its run, on its line, at its
    /// temperature, behind production.
    pub fn label(&self, request: &mut GenerationRequest) -> Result<(), Problem> {
        let Some(lease) = &self.0 else { return Ok(()) };
        if request.n != 1 {
            return Err(Problem::bad_request(format!(
                "n is {}: a turn of a rollout has one answer; leave n out, and lease another rollout",
                request.n
            )));
        }
        request.params.temperature = lease.temperature;
        request.params.check().map_err(Problem::bad_request)?;
        // with a seed of the client's, the rollouts of a group would be equal
        request.seed = None;
        request.user_key = lease.run_id.to_string();
        request.episode_id = Some(lease.id);
        let run_priority = lease.run_priority.clamp(-RUN_PRIORITY_MAX, RUN_PRIORITY_MAX);
        request.priority = usual_priority(Purpose::Rollout) - run_priority;
        request.surface = Lease::SURFACE.to_owned();
        request.purpose = Purpose::Rollout;
        request.run_id = Some(lease.run_id);
        request.task_id = Some(name("the lease's task", lease.task_id.clone())?);
        request.group_id = Some(name("the lease's group", lease.group_id.clone())?);
        request.model = lease.model.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use serde_json::{Value, json};
    use uuid::Uuid;

    fn lease() -> Lease {
        Lease {
            id: Uuid::from_u128(1),
            run_id: Uuid::from_u128(2),
            task_id: "t".into(),
            group_id: "g".into(),
            model: "demo@run-2".into(),
            temperature: 0.7,
            run_priority: 0,
        }
    }

    fn request(body: Value) -> GenerationRequest {
        let body = serde_json::from_value(body).unwrap();
        GenerationRequest::completion(body, &Options::default(), "default").unwrap()
    }

    #[test]
    fn whatever_an_agent_asks_for_becomes_a_turn_of_its_rollout() {
        let mut request = request(json!({
            "model": "gpt-4o", "prompt": "1 + 1 =", "temperature": 0, "seed": 7, "user": "me", "session_id": "s",
            "surface": "chat", "max_tokens": 9, "priority": 1,
        }));
        Leased(Some(lease())).label(&mut request).unwrap();
        assert_eq!(request.model, "demo@run-2");
        assert_eq!(
            (request.params.temperature, request.seed, request.priority),
            (0.7, None, usual_priority(Purpose::Rollout))
        );
        assert_eq!(
            (request.purpose, request.surface.as_str()),
            (Purpose::Rollout, "environment")
        );
        assert_eq!(
            (request.episode_id, request.run_id),
            (Some(Uuid::from_u128(1)), Some(Uuid::from_u128(2)))
        );
        assert_eq!(
            (request.task_id.as_deref(), request.group_id.as_deref()),
            (Some("t"), Some("g"))
        );
        assert_eq!(request.max_tokens, Some(9), "the agent's");
    }

    #[test]
    fn rollouts_of_a_run_with_a_higher_priority_go_first() {
        let priority = |run_priority| {
            let mut request = request(json!({"model": "m", "prompt": "a"}));
            let lease = Lease {
                run_priority,
                ..lease()
            };
            Leased(Some(lease)).label(&mut request).unwrap();
            request.priority
        };
        assert!(priority(7) < priority(0) && priority(0) < priority(-7));
        assert_eq!(priority(i32::MAX), priority(100), "whoever made the lease");
    }

    #[test]
    fn a_turn_has_one_answer() {
        let mut request = request(json!({"model": "m", "prompt": "a", "n": 2}));
        let problem = Leased(Some(lease())).label(&mut request).unwrap_err();
        assert!(problem.detail.unwrap().starts_with("n is 2"));
    }

    #[test]
    fn without_a_lease_nothing_changes() {
        let mut request = request(json!({"model": "m", "prompt": "a", "seed": 7}));
        Leased::default().label(&mut request).unwrap();
        assert_eq!(
            (request.model.as_str(), request.seed, request.purpose),
            ("m", Some(7), Purpose::Production)
        );
    }
}
