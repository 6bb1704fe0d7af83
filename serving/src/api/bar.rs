//! The bar of an arm: its users are shown a text only if the text's probability is at least
//! `probability_min` of the arm. Of a less probable one they are told that the policy declined.
//! Pure.
//!
//! The probability of a text is that of all its sampled tokens, with the stop token, as they are
//! logged. It is known at the end alone, so a stream waits for it.

use super::outcome::SampledToken;
use super::request::GenerationRequest;
use crate::routing::Route;
use event_log::event::{Purpose, SHADOW};

/// The lowest probability that a choice is shown at. `None`: it is shown whatever its probability,
/// because
/// - its arm has no bar,
/// - it is not for a user, nor repeats what is (`shadow`), or
/// - it cannot decline: its version has no decline token, its tokens are constrained, or it explores
///   (`explores`).
pub fn of(request: &GenerationRequest, route: &Route, explores: bool) -> Option<f64> {
    let for_users = request.purpose == Purpose::Production || route.arm == SHADOW;
    let can_decline = route.version.decline_id.is_some() && request.constraint.is_none() && !explores;
    route
        .probability_min
        .filter(|min| *min > 0.0 && for_users && can_decline)
}

/// Whether a text of these tokens is at least so probable.
pub fn is_reached(min: f64, tokens: &[SampledToken]) -> bool {
    let log_prob: f64 = tokens.iter().map(|token| f64::from(token.logprob)).sum();
    log_prob.exp() >= min
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::body::ChatRequest;
    use crate::options::Options;
    use crate::routing::tests::version;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn request(fields: &Value) -> GenerationRequest {
        let mut body = json!({"model": "demo", "messages": []});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let chat: ChatRequest = serde_json::from_value(body).unwrap();
        GenerationRequest::chat(chat, &Options::default(), "default").unwrap()
    }

    fn route(probability_min: Option<f64>) -> Route {
        Route {
            version: version(7),
            arm: "champion".into(),
            probability: 1.0,
            explore: 0.0,
            temperature_max: None,
            probability_min,
        }
    }

    #[test]
    fn the_bar_is_for_users_requests_that_can_decline() {
        let bar = |fields: Value| of(&request(&fields), &route(Some(0.25)), false);
        assert_eq!(bar(json!({})), Some(0.25));
        assert_eq!(bar(json!({"temperature": 0})), Some(0.25), "greedy");
        assert_eq!(bar(json!({"metadata": {"consent": false}})), Some(0.25), "a user, too");
        let tool = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
        assert_eq!(
            bar(json!({"tools": [tool]})),
            Some(0.25),
            "it may call a tool, or decline"
        );
        assert_eq!(bar(json!({"response_format": {"type": "json_object"}})), None);
        for purpose in ["rollout", "evaluation"] {
            let metadata = json!({"purpose": purpose, "run_id": uuid::Uuid::nil()});
            assert_eq!(bar(json!({"metadata": metadata})), None, "{purpose}");
        }
    }

    #[test]
    fn there_is_none_without_a_decline_token_nor_for_a_choice_that_must_not_decline() {
        let plain = request(&json!({}));
        assert_eq!(of(&plain, &route(None), false), None);
        assert_eq!(of(&plain, &route(Some(0.0)), false), None);
        assert_eq!(of(&plain, &route(Some(0.25)), true), None, "it explores");
        let mut silent = route(Some(0.25));
        Arc::get_mut(&mut silent.version).unwrap().decline_id = None;
        assert_eq!(of(&plain, &silent, false), None);
    }

    #[test]
    fn an_unseen_answer_has_the_bar_of_the_users_that_it_stands_for() {
        let unseen = Route {
            arm: SHADOW.into(),
            ..route(Some(0.25))
        };
        let evaluation = request(&json!({"metadata": {"purpose": "evaluation"}}));
        assert_eq!(of(&evaluation, &unseen, false), Some(0.25));
    }

    #[test]
    fn the_probability_of_a_text_is_the_product_of_its_tokens() {
        let token = |logprob: f32| SampledToken {
            id: 1,
            logprob,
            ..SampledToken::default()
        };
        let tokens = [token(-0.5), token(-1.5)];
        let probability = (-2.0f64).exp();
        assert!(is_reached(probability, &tokens), "at the bar");
        assert!(is_reached(probability - 1e-9, &tokens));
        assert!(!is_reached(probability + 1e-9, &tokens));
        assert!(!is_reached(0.2, &tokens), "each token alone reaches it");
        let long = vec![token(-10.0); 1000];
        assert!(!is_reached(1e-300, &long));
        assert!(is_reached(0.999, &[token(0.0)]));
    }
}
