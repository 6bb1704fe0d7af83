//! A fake ingest role with configurable answers.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// How the upstream answers a request.
#[derive(Debug, Clone, Copy)]
pub enum Reply {
    Accept,
    Status(u16),
    /// What a proxy in front of the upstream may answer.
    Proxy(u16, ProxyBody),
    RetryLater(u16),
    /// Accepts the event, but the answer comes after the timeout.
    AcceptLate,
    /// A 200 without the event's id, as another server may answer.
    OtherServer,
}

/// The body of a proxy's answer.
#[derive(Debug, Clone, Copy)]
pub enum ProxyBody {
    Page,
    /// JSON of the proxy's own.
    Json,
    /// A problem document of another server.
    Problem,
    /// Springtide's document without its media type.
    Untyped,
}

#[derive(Clone, Default)]
pub struct Upstream {
    replies: Arc<Mutex<Vec<Reply>>>,
    /// Ids by episode, in the order of their first arrival.
    pub accepted: Arc<Mutex<HashMap<String, Vec<String>>>>,
    pub keys: Arc<Mutex<BTreeSet<String>>>,
    /// A proxy refuses requests with this text.
    pub never: Arc<Mutex<Option<&'static str>>>,
    tries: Arc<AtomicUsize>,
}

impl Upstream {
    pub async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    }

    /// The answers to the next requests, in order. Later requests are accepted.
    pub fn answer_with(&self, replies: &[Reply]) {
        let mut next = replies.to_vec();
        next.reverse();
        *self.replies.lock().unwrap() = next;
    }

    /// Requests so far.
    pub fn tries(&self) -> usize {
        self.tries.load(Ordering::Relaxed)
    }

    pub fn ids(&self) -> BTreeSet<String> {
        self.accepted.lock().unwrap().values().flatten().cloned().collect()
    }
}

async fn answer(State(upstream): State<Upstream>, uri: Uri, headers: HeaderMap, body: String) -> Response {
    assert_eq!(uri.path(), "/v1/events");
    assert_eq!(headers["content-type"], "application/cloudevents+json");
    if let Some(key) = headers.get("authorization") {
        upstream.keys.lock().unwrap().insert(key.to_str().unwrap().to_owned());
    }
    upstream.tries.fetch_add(1, Ordering::Relaxed);
    let never = *upstream.never.lock().unwrap();
    if never.is_some_and(|text| body.contains(text)) {
        return problem_response(413, "text/html", &json!("<h1>Request Entity Too Large</h1>"));
    }
    let body: Value = serde_json::from_str(&body).unwrap();
    let reply = upstream.replies.lock().unwrap().pop().unwrap_or(Reply::Accept);
    let accept = || {
        let mut accepted = upstream.accepted.lock().unwrap();
        let episode = accepted
            .entry(body["data"]["episode_id"].as_str().unwrap().to_owned())
            .or_default();
        let id = body["id"].as_str().unwrap().to_owned();
        if !episode.contains(&id) {
            episode.push(id);
        }
    };
    match reply {
        Reply::Accept => {
            accept();
            axum::Json(json!({"source": body["source"], "id": body["id"]})).into_response()
        }
        Reply::AcceptLate => {
            accept();
            tokio::time::sleep(Duration::from_secs(2)).await;
            StatusCode::OK.into_response()
        }
        Reply::OtherServer => "welcome".into_response(),
        Reply::Status(status) => {
            let problem = json!({"type": "/problems/conflict", "status": status, "detail": "another body before"});
            problem_response(status, PROBLEM, &problem)
        }
        Reply::Proxy(status, body) => match body {
            ProxyBody::Page => problem_response(status, "text/html", &json!("<h1>Bad Request</h1>")),
            ProxyBody::Json => problem_response(
                status,
                "application/json",
                &json!({"error": "too big", "status": status}),
            ),
            ProxyBody::Problem => problem_response(status, PROBLEM, &json!({"type": "about:blank", "status": status})),
            ProxyBody::Untyped => {
                let problem = json!({"type": "/problems/conflict", "status": status});
                problem_response(status, "text/plain", &problem)
            }
        },
        Reply::RetryLater(status) => (StatusCode::from_u16(status).unwrap(), [("retry-after", "1")]).into_response(),
    }
}

const PROBLEM: &str = "application/problem+json";

fn problem_response(status: u16, content_type: &'static str, body: &Value) -> Response {
    let headers = [("content-type", content_type)];
    (StatusCode::from_u16(status).unwrap(), headers, body.to_string()).into_response()
}
