//! A vLLM server: sampling through `/inference/v1/generate` (`--enable-scale-out`), new weights
//! through the routes of `VLLM_SERVER_DEV_MODE=1` and our weight-transfer backend
//! (`python/springtide_vllm`).
//!
//! It must run with `--logprobs-mode processed_logprobs`: the log-probabilities that we log are
//! those of the distribution that was sampled from.

use super::options::Server;
use crate::engine::SampleRequest;
use anyhow::{Context, ensure};
use bytes::BytesMut;
use model::sampling::Params;
use reqwest::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A busy engine may answer late.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(15);
/// Of one server-sent event: far above what a token needs.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// vLLM's smallest logit bias. It makes a token e^-100 times as likely.
const BIAS_MIN: f32 = -100.0;

#[derive(Debug, Clone)]
pub struct Vllm {
    server: Server,
    client: reqwest::Client,
    timeout: Duration,
}

/// New weights for an engine.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// A file of [`artifact::patch`].
    Patch(&'a Path),
    /// A Hugging Face folder.
    Folder(&'a Path),
}

/// Why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another engine may answer it.
    #[error("{0:#}")]
    Engine(anyhow::Error),
    /// No engine would.
    #[error("the engine refuses the request: {0}")]
    Refused(String),
}

/// One event of a stream: tokens, and at the end why there are no more.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Piece {
    #[serde(deserialize_with = "null_is_empty")]
    pub token_ids: Vec<u32>,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<String>,
    /// Per token, the ids that the filters kept.
    pub sampling_mask: Option<Vec<Vec<u32>>>,
    /// In the last piece: which weights sampled which tokens.
    pub weight_versions: Option<Vec<VersionOfTokens>>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Logprobs {
    pub content: Option<Vec<TokenLogprob>>,
}

#[derive(Debug, PartialEq, Deserialize)]
pub struct TokenLogprob {
    pub token_id: u32,
    pub logprob: f32,
    /// The sampled token first, then the most probable ones.
    #[serde(default)]
    pub top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, PartialEq, Deserialize)]
pub struct TopLogprob {
    pub token_id: u32,
    pub logprob: f32,
}

/// Output tokens `start` to `end` (exclusive).
#[derive(Debug, PartialEq, Deserialize)]
pub struct VersionOfTokens {
    pub version: String,
    pub start: u64,
    pub end: u64,
}

#[derive(Debug, Serialize)]
struct SamplingParams {
    max_tokens: usize,
    temperature: f32,
    top_p: f32,
    top_k: i64,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: BTreeMap<u32, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    logprobs: usize,
    stop_token_ids: Vec<u32>,
    /// Our stop ids are complete; vLLM's own would come on top of them.
    ignore_eos: bool,
    detokenize: bool,
}

/// The body that asks for one sequence.
pub fn body(request: &SampleRequest, send_seeds: bool) -> Value {
    // without `..`: a new parameter must reach the engine, or it samples from another distribution
    let Params {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        mut logit_bias,
    } = request.params.clone();
    if let Some(suppressed) = request.suppressed {
        logit_bias.insert(suppressed, BIAS_MIN);
    }
    let sampling_params = SamplingParams {
        max_tokens: request.max_tokens,
        temperature,
        top_p,
        top_k: if top_k == 0 { -1 } else { top_k.into() },
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed: send_seeds.then_some(request.seed),
        logprobs: request.top_logprobs,
        stop_token_ids: request.version.stop_ids.clone(),
        ignore_eos: true,
        detokenize: false,
    };
    json!({
        "token_ids": &*request.prompt,
        "sampling_params": sampling_params,
        "stream": true,
        // one tenant cannot learn from response times what another one's prompts were
        "cache_salt": format!("tenant-{}", request.caller.tenant()),
    })
}

impl Vllm {
    pub fn new(server: Server, timeout: Duration) -> anyhow::Result<Self> {
        let client = edge::tls::client()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(timeout)
            .build()
            .context("make an HTTP client")?;
        Ok(Vllm {
            server,
            client,
            timeout,
        })
    }

    pub fn url(&self) -> &str {
        &self.server.url
    }

    /// The name of the weights that it holds. Fails if it does not answer.
    pub async fn weights(&self) -> anyhow::Result<String> {
        #[derive(Deserialize)]
        struct Info {
            weight_version: String,
        }
        let url = format!("{}/weight_info", self.server.control_url());
        let request = self.client.get(&url).timeout(HEALTH_TIMEOUT);
        let response = self.checked(request).await?;
        let info: Info = response.json().await.with_context(|| format!("read {url}"))?;
        Ok(info.weight_version)
    }

    /// Longest prompt and completion together, in tokens.
    pub async fn context(&self) -> anyhow::Result<usize> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            max_model_len: usize,
        }
        let url = format!("{}/v1/models", self.server.url);
        let response = self.checked(self.client.get(&url).timeout(self.timeout)).await?;
        let models: Models = response.json().await.with_context(|| format!("read {url}"))?;
        let model = models.data.first().with_context(|| format!("{url} lists no model"))?;
        Ok(model.max_model_len)
    }

    /// Replaces its weights and names them. Cuts off requests that still run and clears its caches. An
    /// error leaves it paused or with unknown weights: it must not get traffic before the next success.
    pub async fn update(&self, weights: Weights<'_>, from: &str, to: &str, name: &str) -> anyhow::Result<()> {
        let info = match weights {
            Weights::Patch(path) => json!({"patch": path, "from": from, "to": to}),
            Weights::Folder(path) => json!({"folder": path, "to": to}),
        };
        self.command("/pause?mode=abort&clear_cache=true", None).await?;
        // an update that was broken off is still open
        let started = match self.command("/start_weight_update", None).await {
            Ok(()) => Ok(()),
            Err(_) => {
                let _ = self.command("/finish_weight_update", None).await;
                self.command("/start_weight_update", None).await
            }
        };
        started?;
        let updated = self
            .command("/update_weights", Some(json!({"update_info": info})))
            .await;
        if updated.is_err() {
            // vLLM has ended the update itself
            let _ = self.command("/resume", None).await;
        }
        updated?;
        self.command("/finish_weight_update", Some(json!({"weight_version": name})))
            .await?;
        self.command("/resume", None).await
    }

    async fn command(&self, path: &str, body: Option<Value>) -> anyhow::Result<()> {
        let url = format!("{}{path}", self.server.control_url());
        let mut request = self.client.post(url).timeout(self.timeout);
        if let Some(body) = body {
            request = request.json(&body);
        }
        self.checked(request).await.map(drop)
    }

    async fn checked(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Response> {
        let response = self.send(request).await?;
        let (url, status) = (response.url().clone(), response.status());
        ensure!(
            status.is_success(),
            "{url} answered {status}: {}",
            explanation(response).await
        );
        Ok(response)
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Response> {
        let request = match &self.server.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        request.send().await.with_context(|| format!("ask {}", self.url()))
    }

    /// Starts to sample. Dropping the stream aborts the request in the engine.
    pub async fn generate(&self, body: &Value) -> Result<Stream, Error> {
        let url = format!("{}/inference/v1/generate", self.server.url);
        let response = self
            .send(self.client.post(url).json(body))
            .await
            .map_err(Error::Engine)?;
        match response.status() {
            status if status.is_success() => Ok(Stream {
                response,
                buffer: BytesMut::new(),
            }),
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => {
                Err(Error::Refused(explanation(response).await))
            }
            status => Err(Error::Engine(anyhow::anyhow!(
                "{} answered {status}: {}",
                self.url(),
                explanation(response).await
            ))),
        }
    }
}

/// What a response says, in at most 300 characters.
async fn explanation(response: Response) -> String {
    let text = response.text().await.unwrap_or_default();
    text.chars().take(300).collect()
}

/// Server-sent events of one sequence.
#[derive(Debug)]
pub struct Stream {
    response: Response,
    buffer: BytesMut,
}

impl Stream {
    /// `None`: the engine has said that it is done.
    pub async fn next(&mut self) -> Result<Option<Piece>, Error> {
        loop {
            while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                match parse(&line)? {
                    Line::Piece(piece) => return Ok(Some(piece)),
                    Line::Done => return Ok(None),
                    Line::Nothing => {}
                }
            }
            self.read().await.map_err(Error::Engine)?;
        }
    }

    async fn read(&mut self) -> anyhow::Result<()> {
        ensure!(
            self.buffer.len() <= EVENT_BYTES_MAX,
            "an event has more than {EVENT_BYTES_MAX} bytes"
        );
        let chunk = self.response.chunk().await.context("read the stream")?;
        let chunk = chunk.context("the engine ended its answer too early")?;
        self.buffer.extend_from_slice(&chunk);
        Ok(())
    }
}

#[derive(Debug, PartialEq)]
enum Line {
    Piece(Piece),
    Done,
    Nothing,
}

fn parse(line: &[u8]) -> Result<Line, Error> {
    #[derive(Deserialize)]
    struct Event {
        #[serde(default)]
        choices: Vec<Piece>,
        error: Option<Failure>,
    }
    #[derive(Deserialize)]
    struct Failure {
        message: String,
        /// An HTTP status.
        code: Option<u16>,
    }
    let Some(data) = line.strip_prefix(b"data:") else {
        return Ok(Line::Nothing);
    };
    let data = data.trim_ascii();
    if data == b"[DONE]" {
        return Ok(Line::Done);
    }
    let event: Event = serde_json::from_slice(data)
        .context("read an event of the engine")
        .map_err(Error::Engine)?;
    if let Some(Failure { message, code }) = event.error {
        return Err(match code {
            Some(400..=499) => Error::Refused(message),
            _ => Error::Engine(anyhow::anyhow!("the engine failed: {message}")),
        });
    }
    Ok(event.choices.into_iter().next().map_or(Line::Nothing, Line::Piece))
}

fn null_is_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests;
