//! HTTP to one engine: commands, and answers as server-sent events.

use super::options::Server;
use anyhow::{Context, ensure};
use bytes::{Bytes, BytesMut};
use reqwest::{RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;
use tokio::time::Instant;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A busy engine may answer late.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(15);
/// Of one server-sent event: far above what a token needs.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// The name of the weights that must answer a request. A follower in front of an engine
/// (`springtide follow`) answers 409 if the engine holds others. Engines whose weights are ours to
/// change do not get it.
pub const EXPECT_WEIGHTS: &str = "springtide-expect-weights";

/// Why a request was not answered. What an error displays may be logged: it has no text of a request
/// or of an answer, and no token ids. Engines quote both.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine failed. It gets no traffic before its next probe, and another one may answer.
    #[error("{0:#}")]
    Engine(anyhow::Error),
    /// No token in time. A long prompt on a busy engine takes long, so this alone says nothing of the engine.
    #[error("the engine sampled no token in time (serve.remote.first_token_ms)")]
    Late,
    /// Only this answer failed, as a request can cause it. The engine goes on.
    #[error("{0}")]
    Answer(&'static str),
    /// The engine does not take the request. The reason is the caller's, and never logged.
    #[error("the engine refuses the request")]
    Refused(String),
    /// It has not begun: the engine has got other weights since it was probed.
    #[error("the engine holds other weights than were probed")]
    OtherWeights,
    /// The engine takes no more requests now.
    #[error("the engine has too many requests")]
    Busy,
    /// The engine has no such route, or it is switched off.
    #[error("the engine has no route {0}")]
    Absent(&'static str),
}

impl Error {
    /// Of an answer that ended with this status of HTTP, in the engine's words.
    pub fn of_status(status: u16, explanation: String) -> Error {
        match status {
            429 => Error::Busy,
            400..=499 => Error::Refused(explanation),
            status => Error::Engine(anyhow::anyhow!("the engine ended its answer with status {status}")),
        }
    }
}

/// How long an engine may take.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// For the answer to a command, and from one token to the next.
    pub answer: Duration,
    pub first_token: Duration,
}

#[derive(Debug, Clone)]
pub struct Http {
    server: Server,
    /// What paths are appended to.
    base: String,
    control_base: String,
    client: reqwest::Client,
    timeouts: Timeouts,
}

impl Http {
    pub fn new(server: Server, timeouts: Timeouts) -> anyhow::Result<Self> {
        let mut client = edge::tls::client().connect_timeout(CONNECT_TIMEOUT);
        let (mut base, mut control_base) = (server.url.clone(), server.control_url().to_owned());
        if let Some(path) = server.socket() {
            client = client.unix_socket(path);
            (base, control_base) = ("http://localhost".into(), "http://localhost".into());
        }
        let client = client.build().context("make an HTTP client")?;
        Ok(Http {
            server,
            base,
            control_base,
            client,
            timeouts,
        })
    }

    pub fn url(&self) -> &str {
        &self.server.url
    }

    /// Whether its weights are ours to change.
    pub fn is_controlled(&self) -> bool {
        self.server.gives_weights()
    }

    /// Whether it takes adapters.
    pub fn takes_adapters(&self) -> bool {
        self.server.adapters
    }

    /// Reads a document of the sampling address.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.read(format!("{}{path}", self.base)).await
    }

    /// Reads a document of the address for control.
    pub async fn get_control<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.read(format!("{}{path}", self.control_base)).await
    }

    /// Longest prompt and completion together, in tokens.
    pub async fn context(&self) -> anyhow::Result<usize> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            /// An adapter says none.
            max_model_len: Option<usize>,
        }
        let models: Models = self.get("/v1/models").await?;
        let context = models.data.iter().find_map(|model| model.max_model_len);
        context.with_context(|| format!("{}/v1/models lists no model with its max_model_len", self.url()))
    }

    async fn read<T: DeserializeOwned>(&self, url: String) -> anyhow::Result<T> {
        let response = self.send(self.client.get(&url).timeout(HEALTH_TIMEOUT)).await?;
        let status = response.status();
        ensure!(status.is_success(), "{url} answered {status}");
        response.json().await.with_context(|| format!("read {url}"))
    }

    /// Sends a command to the address for control. Fails unless the engine reports success, with its
    /// reason: no command has a text of a caller, which it could quote.
    pub async fn command(&self, path: &str, body: Option<Value>) -> anyhow::Result<()> {
        self.command_within(self.timeouts.answer, path, body).await
    }

    /// The same with another limit.
    pub async fn command_within(&self, limit: Duration, path: &str, body: Option<Value>) -> anyhow::Result<()> {
        let url = format!("{}{path}", self.control_base);
        let mut request = self.client.post(url).timeout(limit);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = self.send(request).await?;
        let (url, status) = (response.url().clone(), response.status());
        ensure!(
            status.is_success(),
            "{url} answered {status}: {}",
            explanation(response).await
        );
        Ok(())
    }

    /// Starts to sample. Dropping the events aborts the request in the engine. `weights`: the name of
    /// those that must answer; empty: any may.
    pub async fn sample(&self, path: &'static str, body: &Value, weights: &str) -> Result<Events, Error> {
        let mut request = self.client.post(format!("{}{path}", self.base)).json(body);
        let expects = !weights.is_empty() && !self.server.control;
        if expects {
            request = request.header(EXPECT_WEIGHTS, weights);
        }
        let first = Instant::now() + self.timeouts.first_token;
        let response = tokio::time::timeout_at(first, self.send(request)).await;
        let response = response.map_err(|_| Error::Late)?.map_err(Error::Engine)?;
        match response.status() {
            status if status.is_success() => Ok(Events {
                response,
                buffer: BytesMut::new(),
                first: Some(first),
                timeout: self.timeouts.answer,
            }),
            StatusCode::CONFLICT if expects => Err(Error::OtherWeights),
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY | StatusCode::PAYLOAD_TOO_LARGE => {
                Err(Error::Refused(explanation(response).await))
            }
            StatusCode::TOO_MANY_REQUESTS => Err(Error::Busy),
            StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => Err(Error::Absent(path)),
            status => Err(Error::Engine(anyhow::anyhow!(
                "{} answered {path} with {status}",
                self.url()
            ))),
        }
    }

    async fn send(&self, request: RequestBuilder) -> anyhow::Result<Response> {
        let request = match &self.server.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        request.send().await.with_context(|| format!("ask {}", self.url()))
    }
}

/// What a response says, in at most 300 characters.
async fn explanation(response: Response) -> String {
    let text = response.text().await.unwrap_or_default();
    text.chars().take(300).collect()
}

/// The data of server-sent events.
#[derive(Debug)]
pub struct Events {
    response: Response,
    buffer: BytesMut,
    /// By when the first one must be there. `None`: it is.
    first: Option<Instant>,
    /// For the others.
    timeout: Duration,
}

impl Events {
    /// `None`: the engine has said that it is done.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(end + 1).freeze();
                let Some(data) = line.strip_prefix(b"data:") else {
                    continue;
                };
                return match data.trim_ascii() {
                    b"[DONE]" => Ok(None),
                    data => Ok(Some(line.slice_ref(data))),
                };
            }
            if self.buffer.len() > EVENT_BYTES_MAX {
                return Err(Error::Answer("an event of the engine's answer is too large"));
            }
            let read = match self.first {
                Some(first) => tokio::time::timeout_at(first, self.read())
                    .await
                    .map_err(|_| Error::Late)?,
                None => {
                    let read = tokio::time::timeout(self.timeout, self.read()).await;
                    read.context("wait for the next token").and_then(|read| read)
                }
            };
            read.map_err(Error::Engine)?;
            self.first = None;
        }
    }

    async fn read(&mut self) -> anyhow::Result<()> {
        let chunk = self.response.chunk().await.context("read the stream")?;
        let chunk = chunk.context("the engine ended its answer too early")?;
        self.buffer.extend_from_slice(&chunk);
        Ok(())
    }
}
