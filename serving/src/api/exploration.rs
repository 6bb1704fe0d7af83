//! Minimum exploration. A policy that may decline can end up declining almost everything, and text
//! that is not shown gets no feedback. So in a small share of an arm's requests, declining is
//! forbidden.
//!
//! This module decides in which ones. The engine masks the token, and the trainer corrects for it.
//! Pure.

use super::request::GenerationRequest;
use crate::routing::Route;
use model::sampling::{self, Params};

/// Whether one choice must not decline, and how likely that was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Exploration {
    /// Probability that declining is suppressed, (0, 1).
    pub share: f32,
    /// The decline token, if this choice must not sample it.
    pub suppressed: Option<u32>,
}

/// Decides for one choice, by its seed alone, which is the server's. `params`: what it is sampled
/// with. `None`: the choice cannot explore, because
/// - its arm does not explore,
/// - its version has no decline token,
/// - it is not for a user, or is never trained on, or
/// - its sampling parameters change the model's own distribution, for which the correction does not
///   hold.
pub fn explore(request: &GenerationRequest, params: &Params, route: &Route, seed: u64) -> Option<Exploration> {
    let decline = route.version.decline_id?;
    // exactly the number that is logged
    let share = route.explore as f32;
    if share <= 0.0 || !request.is_trainable(params) || !params.is_plain() {
        return None;
    }
    Some(Exploration {
        share,
        suppressed: sampling::explores(seed, f64::from(share)).then_some(decline),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::routing::tests::version;
    use serde_json::{Value, json};

    fn request(fields: &Value) -> GenerationRequest {
        let mut body = json!({"model": "demo", "prompt": [1]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let body = serde_json::from_value(body).unwrap();
        GenerationRequest::completion(body, &Options::default(), "default").unwrap()
    }

    fn route(explore: f64) -> Route {
        Route {
            version: version(7), // declines with 48
            arm: "champion".into(),
            probability: 0.6,
            explore,
            temperature_max: None,
            probability_min: None,
        }
    }

    fn explore(request: &GenerationRequest, route: &Route, seed: u64) -> Option<Exploration> {
        super::explore(request, &request.params_on(route), route, seed)
    }

    #[test]
    fn the_seed_decides_and_both_outcomes_carry_the_share() {
        let request = request(&json!({}));
        let explorations: Vec<Exploration> = (0..2_000)
            .filter_map(|seed| explore(&request, &route(0.5), seed))
            .collect();
        assert_eq!(explorations.len(), 2_000);
        assert!(explorations.iter().all(|exploration| exploration.share == 0.5));
        let suppressed = explorations.iter().filter(|one| one.suppressed == Some(48)).count();
        assert!((888..1112).contains(&suppressed), "{suppressed}");
        let free = explorations.iter().filter(|one| one.suppressed.is_none()).count();
        assert_eq!(suppressed + free, 2_000);
        assert_eq!(explore(&request, &route(0.5), 11), explore(&request, &route(0.5), 11));
    }

    #[test]
    fn only_production_requests_with_plain_sampling_in_an_exploring_arm_explore() {
        let explored = |fields: &Value, route: &Route| explore(&request(fields), route, 3).is_some();
        assert!(explored(&json!({}), &route(0.02)));
        assert!(!explored(&json!({}), &route(0.0)));
        assert!(!explored(&json!({"temperature": 0}), &route(0.02)));
        assert!(!explored(&json!({"top_p": 0.9}), &route(0.02)));
        assert!(!explored(&json!({"top_k": 40}), &route(0.02)));
        assert!(!explored(&json!({"metadata": {"purpose": "evaluation"}}), &route(0.02)));
        assert!(!explored(&json!({"metadata": {"consent": false}}), &route(0.02)));
        let mut silent = route(0.02);
        if let Some(version) = std::sync::Arc::get_mut(&mut silent.version) {
            version.decline_id = None;
        }
        assert!(!explored(&json!({}), &silent));
    }

    #[test]
    fn the_temperature_that_is_sampled_at_decides_whether_a_choice_can_explore() {
        let explored = |temperature: f64, max| {
            let bounded = Route {
                temperature_max: Some(max),
                ..route(0.02)
            };
            explore(&request(&json!({"temperature": temperature})), &bounded, 3).is_some()
        };
        assert!(explored(1.0, 0.7));
        assert!(!explored(1.0, 0.3), "too cold to be trained on");
        assert!(!explored(1.0, 0.0), "greedy");
        assert!(explored(2.0, 1.0), "it would have been too hot");
        assert!(!explored(2.0, 2.0));
    }
}
