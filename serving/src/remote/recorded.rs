//! Engines that play back exchanges, for tests of the clients. A request that was not recorded gets
//! 404, so a client cannot drift from the record.

use super::client::Client;
use super::http::Timeouts;
use super::openai::OpenAi;
use super::options::{InFlight, OpenAiServer, Server};
use super::sglang::Sglang;
use super::vllm::Vllm;
use crate::engine::caller::Caller;
use crate::engine::{SampleEvent, SampleRequest, TrafficClass, events_max};
use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use model::sampling::Params;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const TIMEOUTS: Timeouts = Timeouts {
    answer: Duration::from_secs(30),
    first_token: Duration::from_secs(30),
};

#[derive(Clone, Deserialize)]
pub struct Exchange {
    method: String,
    path: String,
    request: Option<Value>,
    status: u16,
    answer: String,
}

impl Exchange {
    /// The same request, answered otherwise.
    pub fn answered(self, status: u16, answer: &Value) -> Exchange {
        Exchange {
            status,
            answer: answer.to_string(),
            ..self
        }
    }

    /// The same answer to a request with another value at this JSON pointer.
    pub fn asked(mut self, pointer: &str, value: Value) -> Exchange {
        let field = self.request.as_mut().and_then(|request| request.pointer_mut(pointer));
        *field.unwrap() = value;
        self
    }

    pub fn get(path: &str, answer: &Value) -> Exchange {
        Exchange {
            method: "GET".into(),
            path: path.into(),
            request: None,
            status: 200,
            answer: answer.to_string(),
        }
    }

    pub fn post(path: &str, request: Value, status: u16, answer: String) -> Exchange {
        Exchange {
            method: "POST".into(),
            path: path.into(),
            request: Some(request),
            status,
            answer,
        }
    }
}

/// Server-sent events, and `[DONE]`.
pub fn events(events: &[Value]) -> String {
    let events = events.iter().map(|event| format!("data: {event}\n\n"));
    events.collect::<String>() + "data: [DONE]\n\n"
}

/// Exchanges of a recorded contract, by name.
pub fn read(recorded: &str, names: &[&str]) -> Vec<Exchange> {
    #[derive(Deserialize)]
    struct Recorded {
        exchanges: BTreeMap<String, Exchange>,
    }
    let recorded: Recorded = serde_json::from_str(recorded).unwrap();
    names.iter().map(|name| recorded.exchanges[*name].clone()).collect()
}

/// Answers with the exchanges, each once, in their order per request. Returns the address.
async fn play_back(exchanges: Vec<Exchange>) -> String {
    let left = Arc::new(Mutex::new(exchanges));
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
    url
}

async fn server(exchanges: Vec<Exchange>) -> Server {
    Server {
        url: play_back(exchanges).await,
        ..Server::default()
    }
}

pub async fn vllm(exchanges: Vec<Exchange>) -> Client {
    vllm_with(exchanges, InFlight::Drain).await
}

pub async fn vllm_with(exchanges: Vec<Exchange>, in_flight: InFlight) -> Client {
    Client::Vllm(Vllm::new(server(exchanges).await, TIMEOUTS, in_flight).unwrap())
}

pub async fn sglang(exchanges: Vec<Exchange>) -> Client {
    Client::Sglang(Sglang::new(server(exchanges).await, TIMEOUTS).unwrap())
}

pub async fn openai(exchanges: Vec<Exchange>, alias: Option<&str>) -> Client {
    let server = OpenAiServer {
        url: play_back(exchanges).await,
        model: Some("theirs".into()),
        alias: alias.map(str::to_owned),
        ..OpenAiServer::default()
    };
    Client::OpenAi(OpenAi::new(&server, TIMEOUTS).unwrap())
}

/// A request for three tokens after `[5, 6, 7, last_token]`, as the contracts have it.
pub fn request(last_token: u32) -> (SampleRequest, mpsc::Receiver<SampleEvent>) {
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
        constraint: None,
        ends: Default::default(),
        score_prompt: None,
        top_logprobs: 2,
        caller: Caller::new("default", None),
        class: TrafficClass::Production,
        priority: 0,
        session: None,
        events,
        submitted: Instant::now(),
    };
    (request, receiver)
}
