//! The client with what `tests/engines/contract.py` recorded from a real server.

use crate::engine::SampleEvent;
use crate::remote::client::{Client, Weights};
use crate::remote::recorded::{self, Exchange, events, request};
use crate::remote::sequence::{self, End};
use serde_json::json;
use std::path::Path;

const RECORDED: &str = include_str!("../../../../tests/engines/vllm-0.32.0.json");
/// Its content hash.
const DEMO_BASE: &str = "2a23c48fb6484018355c3f7b7ffd335fba043f8d5fc3b38dab4e987bb645d21a";

/// A server that answers with the recorded exchanges, in their order per request.
async fn play_back(names: &[&str]) -> Client {
    recorded::vllm(recorded::read(RECORDED, names)).await
}

#[tokio::test]
async fn the_state_of_a_server_is_read() {
    let server = play_back(&["weights", "context"]).await;
    assert!(!server.weights().await.unwrap().unwrap().is_empty());
    assert_eq!(server.context().await.unwrap(), Some(256));
}

#[tokio::test]
async fn new_weights_are_given_between_pause_and_resume() {
    let folder = Path::new("/dev/shm/springtide/contract.folder");
    let server = play_back(&["pause", "start", "folder", "finish", "resume", "new weights"]).await;
    let updated = server
        .update(Weights::Folder(folder), "", DEMO_BASE, "springtide-7-bb")
        .await;
    updated.unwrap();
    assert_eq!(server.weights().await.unwrap().as_deref(), Some("springtide-7-bb"));
}

#[tokio::test]
async fn a_patch_of_other_weights_is_refused_with_the_servers_reason_and_the_server_goes_on() {
    let patch = Path::new("/dev/shm/springtide/contract.safetensors");
    let server = play_back(&["pause", "start", "patch from another version", "resume", "weights"]).await;
    let refused = server
        .update(Weights::Patch(patch), "aa", "bb", "springtide-7-bb")
        .await;
    let refused = format!("{:#}", refused.unwrap_err());
    assert!(refused.contains("load a folder first"), "{refused}");
}

#[tokio::test]
async fn the_tokens_of_a_sequence_come_with_their_log_probabilities() {
    let server = play_back(&["generate"]).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false).await;
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
    let end = sequence::run(&server, "springtide-8-cc", request, false).await;
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
    let end = sequence::run(&server, "springtide-7-bb", request, false).await;
    assert!(matches!(end, End::Done), "{end:?}");
    let Some(SampleEvent::Failed(error)) = events.recv().await else {
        panic!("a failure was expected");
    };
    assert!(error.contains("refuses"), "{error}");
}

#[tokio::test]
async fn an_engine_that_fails_before_the_first_token_gives_the_request_back() {
    let server = play_back(&[]).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false).await;
    assert!(matches!(end, End::Retry(..)), "{end:?}");
    assert!(events.try_recv().is_err());
}

/// What a server without `--enable-scale-out` answers. The shapes are those of vLLM 0.32.0's
/// `entrypoints/openai/completion/protocol.py`.
fn completion(weights_after: &str) -> Vec<Exchange> {
    let body = json!({
        "prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0.75, "top_p": 1.0, "top_k": 5, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {"9": -100.0},
        "stop_token_ids": [1], "ignore_eos": true, "stream": true, "logprobs": 2, "return_token_ids": true,
        "return_tokens_as_token_ids": true, "cache_salt": "tenant-default",
    });
    let event = |ids: &[u32], finish: Option<&str>| {
        let names: Vec<String> = ids.iter().map(|id| format!("token_id:{id}")).collect();
        let top = |id: &u32| json!({format!("token_id:{id}"): -1.5, "token_id:3": -0.25});
        json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [{
            "index": 0, "text": "", "finish_reason": finish, "stop_reason": null, "token_ids": ids,
            "logprobs": {"text_offset": vec![0; ids.len()], "token_logprobs": vec![-1.5; ids.len()], "tokens": names,
                         "top_logprobs": ids.iter().map(top).collect::<Vec<_>>()},
        }]})
    };
    let answer = events(&[event(&[7], None), event(&[9, 4], Some("length"))]);
    let answer = answer.replace("token_id:9", "token_id:8").replace("[9,4]", "[8,4]");
    vec![
        Exchange::post("/v1/completions", body, 200, answer),
        Exchange::get("/weight_info", &json!({"weight_version": weights_after})),
    ]
}

#[tokio::test]
async fn without_the_route_for_token_ids_completions_are_used_and_the_weights_are_asked_for_after_them() {
    let server = recorded::vllm(completion("springtide-7-bb")).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false).await;
    assert!(matches!(end, End::Done), "{end:?}");
    let mut ids = Vec::new();
    while let Ok(SampleEvent::Token(token)) = events.try_recv() {
        assert_eq!((token.logprob, token.top[0]), (-1.5, (3, -0.25)));
        ids.push(token.id);
    }
    assert_eq!(ids, [7, 8, 4]);
}

#[tokio::test]
async fn a_completion_does_not_count_if_the_weights_are_others_after_it() {
    let server = recorded::vllm(completion("springtide-8-cc")).await;
    let (request, mut events) = request(8);
    let end = sequence::run(&server, "springtide-7-bb", request, false).await;
    assert!(matches!(end, End::Failed(_)), "{end:?}");
    let mut last = None;
    while let Ok(event) = events.try_recv() {
        last = Some(event);
    }
    assert!(matches!(last, Some(SampleEvent::Failed(_))), "{last:?}");
}
