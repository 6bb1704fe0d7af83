//! Plays back what `tests/engines/contract.py` recorded from a real server. A request that was not
//! recorded gets 404, so the client cannot drift from the record.

use super::*;
use crate::engine::caller::Caller;
use crate::engine::{SampleEvent, TrafficClass, events_max};
use crate::remote::sequence::{self, End};
use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::response::IntoResponse;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::mpsc;

const RECORDED: &str = include_str!("../../../../tests/engines/vllm-0.32.0.json");

#[derive(Clone, Deserialize)]
struct Exchange {
    method: String,
    path: String,
    request: Option<Value>,
    status: u16,
    answer: String,
}

/// Answers with the recorded exchanges, in their order per request.
async fn play_back(names: &[&str]) -> Vllm {
    #[derive(Deserialize)]
    struct Recorded {
        exchanges: BTreeMap<String, Exchange>,
    }
    let recorded: Recorded = serde_json::from_str(RECORDED).unwrap();
    let left: Vec<Exchange> = names.iter().map(|name| recorded.exchanges[*name].clone()).collect();
    let left = Arc::new(Mutex::new(left));
    let answer = move |request: Request| {
        let left = left.clone();
        async move {
            let (parts, body) = request.into_parts();
            let bytes: Bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let body: Option<Value> = (!bytes.is_empty()).then(|| serde_json::from_slice(&bytes).unwrap());
            let mut left = left.lock().unwrap();
            let same = |exchange: &Exchange| {
                (exchange.method.as_str(), exchange.path.as_str()) == (parts.method.as_str(), &parts.uri.to_string())
                    && exchange.request == body
            };
            match left.iter().position(same) {
                Some(index) => {
                    let exchange = left.remove(index);
                    (StatusCode::from_u16(exchange.status).unwrap(), exchange.answer).into_response()
                }
                None => {
                    let unknown = format!("not recorded: {} {} {body:?}", parts.method, parts.uri);
                    (StatusCode::NOT_FOUND, unknown).into_response()
                }
            }
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    let server = Server {
        url,
        ..Server::default()
    };
    Vllm::new(server, Duration::from_secs(30)).unwrap()
}

fn request(last_token: u32) -> (SampleRequest, mpsc::Receiver<SampleEvent>) {
    let max_tokens = 3;
    let (events, receiver) = mpsc::channel(events_max(max_tokens));
    let mut version = Arc::into_inner(crate::routing::tests::version(7)).unwrap();
    version.stop_ids = vec![1];
    version.vocab = 2048;
    let request = SampleRequest {
        version: Arc::new(version),
        prompt: Arc::new([5, 6, 7, last_token]),
        max_tokens,
        params: Params {
            temperature: 0.75,
            top_k: 5,
            ..Params::default()
        },
        seed: 3,
        suppressed: Some(9),
        top_logprobs: 2,
        caller: Caller::new("default", None),
        class: TrafficClass::Production,
        priority: 0,
        events,
        submitted: Instant::now(),
    };
    (request, receiver)
}

#[tokio::test]
async fn the_state_of_a_server_is_read() {
    let server = play_back(&["weights", "context"]).await;
    assert!(!server.weights().await.unwrap().is_empty());
    assert_eq!(server.context().await.unwrap(), 256);
}

#[tokio::test]
async fn new_weights_are_given_between_pause_and_resume() {
    let folder = Path::new("/dev/shm/springtide/contract.folder");
    let server = play_back(&["pause", "start", "folder", "finish", "resume", "new weights"]).await;
    let updated = server
        .update(Weights::Folder(folder), "", "bb", "springtide-7-bb")
        .await;
    updated.unwrap();
    assert_eq!(server.weights().await.unwrap(), "springtide-7-bb");
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
