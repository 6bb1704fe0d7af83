//! Arms that bound the temperature: what the engine is asked for, what is logged and what is
//! answered. The engine says a script: our own engine and those elsewhere get the same request.

use super::elsewhere::{saying, settle, tokens};
use super::*;
use crate::engine::{Finish, SampleEvent};

impl Server {
    /// All users are in the arm `champion`, which has this bound. Version 1 answers a share
    /// `shadow` of their requests, too.
    fn bound_champion(&self, max: f64, shadow: f64) {
        let loaded = self.api.routes.served().into_iter();
        let versions = loaded.map(|(version, _)| (version.serial, version)).collect();
        let mut bounded = assignment(6, &[("champion", 7), ("canary", 1)], &[("champion", 1.0)]);
        bounded.arms[0].temperature_max = Some(max);
        bounded.shadow = shadow;
        self.api.routes.apply(bounded, versions);
    }
}

fn two_tokens() -> Vec<SampleEvent> {
    let mut events = tokens([1, 2]);
    events.push(SampleEvent::Finished(Finish::Length));
    events
}

#[tokio::test]
async fn the_engine_samples_at_the_bound_of_the_arm_and_that_is_logged() {
    let evaluation = json!({"purpose": "evaluation"});
    for (max, model, asked, metadata, expected) in [
        (0.3, "demo", 1.0, json!({}), 0.3),
        (0.3, "demo@champion", 1.0, json!({}), 0.3),
        (0.3, "demo", 0.25, json!({}), 0.25),
        (0.0, "demo", 1.0, json!({}), 0.0),
        (0.3, "demo@7", 1.0, json!({}), 1.0),
        (0.3, "demo", 1.0, evaluation, 1.0),
    ] {
        let (server, requests) = saying(two_tokens(), Options::default(), None).await;
        server.bound_champion(max, 0.0);
        let body = json!({"model": model, "prompt": "a", "max_tokens": 2, "temperature": asked, "n": 2,
                          "metadata": metadata});
        let (status, answer) = server.complete(body.clone()).await;
        assert_eq!(status, 200, "{answer}");
        let sampled: Vec<f32> = requests
            .lock()
            .unwrap()
            .iter()
            .map(|request| request.params.temperature)
            .collect();
        let logged: Vec<f32> = server.log.generations().iter().map(|one| one.temperature).collect();
        assert_eq!((sampled, logged), (vec![expected; 2], vec![expected; 2]), "{body}");
    }
}

#[tokio::test]
async fn an_unseen_answer_has_the_temperature_of_the_answer_that_it_repeats() {
    let (server, requests) = saying(two_tokens(), Options::default(), None).await;
    server.bound_champion(0.3, 1.0);
    server
        .complete(json!({"model": "demo", "prompt": "a", "max_tokens": 2}))
        .await;
    settle(&server).await;
    let sampled: Vec<(i64, f32)> = requests
        .lock()
        .unwrap()
        .iter()
        .map(|request| (request.version.serial, request.params.temperature))
        .collect();
    assert_eq!(sampled, [(7, 0.3), (1, 0.3)]);
    let logged = server.log.generations();
    assert_eq!(logged.len(), 2);
    assert!(logged.iter().any(|one| one.arm == "shadow"));
    assert!(logged.iter().all(|one| one.temperature == 0.3), "{logged:?}");
}

#[tokio::test]
async fn a_response_says_the_temperature_that_it_was_sampled_at() {
    let server = server().await;
    server.bound_champion(0.25, 0.0);
    for (model, expected) in [("demo", 0.25), ("demo@7", 1.0)] {
        let body = json!({"model": model, "input": "k", "max_output_tokens": 3});
        let answer = text(server.post_to("/v1/responses", body).await).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["temperature"].as_f64(), Some(expected), "{answer}");
        assert_eq!(answer["usage"]["output_tokens"], 3, "{answer}");
    }
    let logged: Vec<f32> = server.log.generations().iter().map(|one| one.temperature).collect();
    assert_eq!(logged, [0.25, 1.0]);
}
