//! The endpoint of a judge, in this process: it stands for a service that is not ours. Each test says
//! what it answers to each text.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A request that it got.
#[derive(Debug, Clone)]
pub struct Question {
    pub text: String,
    pub authorization: Option<String>,
    pub body: Value,
    pub at: Instant,
}

/// What it does.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A completion with this content.
    Says(String),
    /// This body, whatever it means.
    Body(Value),
    /// A status, with Retry-After.
    Status(u16, Option<u32>),
    /// Nothing, until this is cancelled; then the next one.
    After(CancellationToken, Box<Reply>),
}

impl Reply {
    pub fn answer(answer: impl Into<Value>) -> Self {
        Self::Says(json!({"answer": answer.into()}).to_string())
    }
}

/// A completion as vLLM and SGLang send it.
pub fn completion(content: &str, finish_reason: &str) -> Value {
    json!({
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_795_000_000,
        "model": "small",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": content, "refusal": null, "tool_calls": []},
            "logprobs": null,
            "finish_reason": finish_reason,
        }],
        "usage": {"prompt_tokens": 150, "completion_tokens": 6, "total_tokens": 156},
    })
}

type Answers = dyn Fn(&str, usize) -> Reply + Send + Sync;

/// It stops when dropped.
pub struct Endpoint {
    pub address: SocketAddr,
    questions: Arc<Mutex<Vec<Question>>>,
    _stop: DropGuard,
}

impl Endpoint {
    /// `answers` gets the text, and how often it was asked about before.
    pub async fn start(answers: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let questions: Arc<Mutex<Vec<Question>>> = Arc::default();
        let answers: Arc<Answers> = Arc::new(answers);
        let asked = questions.clone();
        let reply = move |headers: HeaderMap, body: Bytes| {
            let reply = take(&asked, &*answers, &headers, &body);
            async move { respond(reply).await }
        };
        let router = Router::new().route("/v1/chat/completions", post(reply));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            let serving = axum::serve(listener, router);
            stopped.run_until_cancelled(serving.into_future()).await;
        });
        Self {
            address,
            questions,
            _stop: stop.drop_guard(),
        }
    }

    pub fn questions(&self) -> Vec<Question> {
        self.questions.lock().unwrap().clone()
    }

    /// How often it was asked about this text.
    pub fn times(&self, text: &str) -> usize {
        self.questions().iter().filter(|question| question.text == text).count()
    }
}

fn take(asked: &Mutex<Vec<Question>>, answers: &Answers, headers: &HeaderMap, body: &[u8]) -> Reply {
    let body: Value = serde_json::from_slice(body).unwrap();
    let message: Value = serde_json::from_str(body["messages"][1]["content"].as_str().unwrap()).unwrap();
    let text = message["message"].as_str().unwrap().to_owned();
    let authorization = headers
        .get("authorization")
        .map(|value| value.to_str().unwrap().to_owned());
    let mut asked = asked.lock().unwrap();
    let before = asked.iter().filter(|question| question.text == text).count();
    let reply = answers(&text, before);
    asked.push(Question {
        text,
        authorization,
        body,
        at: Instant::now(),
    });
    reply
}

async fn respond(mut reply: Reply) -> Response {
    while let Reply::After(until, next) = reply {
        until.cancelled().await;
        reply = *next;
    }
    match reply {
        Reply::Says(content) => axum::Json(completion(&content, "stop")).into_response(),
        Reply::Body(body) => axum::Json(body).into_response(),
        Reply::Status(status, retry_after) => {
            let status = StatusCode::from_u16(status).unwrap();
            let retry_after = retry_after.map(|seconds| ("retry-after", seconds.to_string()));
            (
                status,
                axum::response::AppendHeaders(retry_after),
                "the text may be quoted here",
            )
                .into_response()
        }
        Reply::After(..) => unreachable!("it was waited for"),
    }
}
