//! The client with what `tests/engines/contract.py` recorded from a real server.

use crate::engine::SampleEvent;
use crate::remote::InFlight;
use crate::remote::client::Client;
use crate::remote::protocol::Weights;
use crate::remote::recorded::{self, Exchange, request};
use crate::remote::sequence::{self, End};
use serde_json::json;
use std::time::Duration;

const RECORDED: &str = include_str!("../../../../tests/engines/vllm-0.32.0.json");
/// Its content hash.
const DEMO_BASE: &str = "ff1ed64868a21fcf60fdcaece55dc27426b83b925ea43c4ca94b0f0608361730";

/// A server that answers with the recorded exchanges, in their order per request.
async fn play_back(names: &[&str]) -> Client {
    recorded::vllm(recorded::read(RECORDED, names)).await
}

#[tokio::test]
async fn the_state_of_a_server_is_read() {
    let server = play_back(&["weights", "context"]).await;
    assert!(!server.weights_name().await.unwrap().unwrap().is_empty());
    assert_eq!(server.context().await.unwrap(), Some(256));
}

fn weights<'a>(url: &'a str, from: Option<&'a str>, to: &'a str) -> Weights<'a> {
    Weights {
        url,
        from,
        to,
        name: "springtide-7-bb",
        limit: Duration::from_secs(60),
    }
}

#[tokio::test]
async fn new_weights_are_given_between_pause_and_resume() {
    let server = play_back(&["pause", "start", "all", "finish", "resume", "new weights"]).await;
    let all = weights("http://127.0.0.1/all", None, DEMO_BASE);
    server.update(all, InFlight::Drain).await.unwrap();
    assert_eq!(server.weights_name().await.unwrap().as_deref(), Some("springtide-7-bb"));
}

#[tokio::test]
async fn a_patch_of_other_weights_is_refused_with_the_servers_reason_and_the_server_goes_on() {
    let server = play_back(&["pause", "start", "patch from another version", "resume", "weights"]).await;
    let patch = weights("http://127.0.0.1/patch", Some("aa"), "bb");
    let refused = server.update(patch, InFlight::Drain).await;
    let refused = format!("{:#}", refused.unwrap_err());
    assert!(refused.contains("load all first"), "{refused}");
}

#[tokio::test]
async fn the_tokens_of_a_sequence_come_with_their_log_probabilities() {
    let server = play_back(&["generate"]).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
    assert!(matches!(end, End::Done), "{end:?}");
    for _ in 0..3 {
        let SampleEvent::Token(token) = events.recv().await.unwrap() else {
            panic!("a token was expected");
        };
        assert!(token.logprob <= 0.0 && token.candidates.is_none());
        assert_eq!(token.top.len(), 2);
        assert!(token.top[0].1 >= token.top[1].1);
    }
    let last = events.recv().await.unwrap();
    assert!(matches!(last, SampleEvent::Finished(_)), "{last:?}");
}

#[tokio::test]
async fn tokens_of_other_weights_are_no_answer() {
    let server = play_back(&["generate"]).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-8-cc", request, false, None, None).await;
    let End::Failed(error) = end else {
        panic!("{end:?}");
    };
    assert!(error.to_string().contains("springtide-7-bb"), "{error}");
    let mut last = None;
    while let Ok(event) = events.try_recv() {
        last = Some(event);
    }
    assert!(matches!(last, Some(SampleEvent::Failed(_))), "{last:?}");
}

#[tokio::test]
async fn a_request_that_no_engine_would_answer_fails_with_the_reason() {
    let server = play_back(&["unknown token"]).await;
    let (request, mut events) = request(1_000_000);
    let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
    assert!(matches!(end, End::Done), "{end:?}");
    let Some(SampleEvent::Refused(error)) = events.recv().await else {
        panic!("a refusal was expected");
    };
    assert!(!error.is_empty());
}

#[tokio::test]
async fn an_engine_that_fails_before_the_first_token_gives_the_request_back() {
    let server = play_back(&[]).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
    assert!(matches!(end, End::Retry(..)), "{end:?}");
    assert!(events.try_recv().is_err());
}

/// A server without `--enable-scale-out`, with the names of its weights after the answer.
async fn without_scale_out(exchange: &str, weights_after: &str) -> Client {
    let generate = recorded::read(RECORDED, &["generate"]).remove(0);
    let disabled = json!({"error": {"message": "Scale-out endpoints are disabled.", "code": 403}});
    let mut exchanges = vec![generate.answered(403, &disabled)];
    exchanges.extend(recorded::read(RECORDED, &[exchange]));
    exchanges.push(Exchange::get("/weight_info", &json!({"weight_version": weights_after})));
    recorded::vllm(exchanges).await
}

#[tokio::test]
async fn without_the_route_for_token_ids_completions_are_used_and_the_weights_are_asked_for_after_them() {
    let server = without_scale_out("complete", "springtide-7-bb").await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
    assert!(matches!(end, End::Done), "{end:?}");
    let mut tokens = 0;
    let last = loop {
        match events.try_recv().unwrap() {
            SampleEvent::Token(token) => {
                assert!(token.logprob <= 0.0 && token.top.len() == 2, "{token:?}");
                assert!(token.top[0].1 >= token.top[1].1);
                tokens += 1;
            }
            last => break last,
        }
    };
    assert!(matches!(last, SampleEvent::Finished(_)), "{last:?}");
    assert_eq!(tokens, 3);
}

#[tokio::test]
async fn completions_are_used_only_if_the_route_for_token_ids_was_absent_at_the_probe() {
    let absent = || {
        let generate = recorded::read(RECORDED, &["generate"]).remove(0);
        generate.answered(404, &json!({"detail": "Not Found"}))
    };
    let generate = recorded::read(RECORDED, &["generate"]).remove(0);
    let ask = async |server: &Client| {
        let (request, _events) = request(8);
        sequence::run(server, "springtide-7-bb", request, false, None, None).await
    };
    // a server that had it is probed again when it loses it
    let server = recorded::vllm(vec![generate.clone(), absent(), generate.clone()]).await;
    assert!(matches!(ask(&server).await, End::Done));
    let End::Retry(_, error) = ask(&server).await else {
        panic!("no failure of the engine");
    };
    assert!(error.to_string().contains("/inference/v1/generate"), "{error}");
    assert!(matches!(ask(&server).await, End::Done));
    // one that gets it is used through it after its next probe
    let mut exchanges = vec![absent()];
    exchanges.extend(recorded::read(RECORDED, &["complete"]));
    exchanges.push(Exchange::get(
        "/weight_info",
        &json!({"weight_version": "springtide-7-bb"}),
    ));
    exchanges.push(generate);
    let server = recorded::vllm(exchanges).await;
    assert!(matches!(ask(&server).await, End::Done));
    server.forget_routes();
    assert!(matches!(ask(&server).await, End::Done));
}

#[tokio::test]
async fn answers_cross_versions_only_on_servers_that_say_which_weights_sampled() {
    let generate = recorded::read(RECORDED, &["generate"]).remove(0);
    let absent = generate.answered(404, &json!({"detail": "Not Found"}));
    let server = recorded::vllm_with(vec![absent], InFlight::Cross).await;
    let (request, _events) = request(8);
    let End::Retry(_, error) = sequence::run(&server, "springtide-7-bb", request, false, None, None).await else {
        panic!("no failure of the engine");
    };
    assert!(error.to_string().contains("--enable-scale-out"), "{error}");
}

#[tokio::test]
async fn a_completion_does_not_count_if_the_weights_are_others_after_it() {
    let server = without_scale_out("complete", "springtide-8-cc").await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
    assert!(matches!(end, End::Failed(_)), "{end:?}");
    let mut last = None;
    while let Ok(event) = events.try_recv() {
        last = Some(event);
    }
    assert!(matches!(last, Some(SampleEvent::Failed(_))), "{last:?}");
}

#[tokio::test]
async fn a_completion_that_no_engine_would_give_fails_with_the_reason() {
    let server = recorded::vllm(recorded::read(RECORDED, &["complete an unknown token"])).await;
    let (request, mut events) = request(1_000_000);
    let end = sequence::run(&server, "springtide-7-bb", request, false, None, None).await;
    assert!(matches!(end, End::Done), "{end:?}");
    let Some(SampleEvent::Refused(error)) = events.recv().await else {
        panic!("a refusal was expected");
    };
    assert!(error.contains("out of vocabulary"), "{error}");
}
