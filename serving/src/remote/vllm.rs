//! A vLLM server: sampling through `/inference/v1/generate` (`--enable-scale-out`) or, without it,
//! through `/v1/completions`; new weights through the routes of `VLLM_SERVER_DEV_MODE=1` and our
//! weight-transfer backend (`python/springtide/vllm.py`).
//!
//! It must run with `--logprobs-mode processed_logprobs`: the log-probabilities that we log are
//! those of the distribution that was sampled from.

use super::completions;
use super::http::{Error, Http, Timeouts};
use super::options::{InFlight, Server};
use super::protocol::{Ending, Failure, Piece, Read, Stream, VersionOfTokens, Weights};
use super::protocol::{cache_salt, parse, token};
use super::routed;
use super::update::weights_name;
use crate::engine::{SampleRequest, Token};
use anyhow::{Context, anyhow, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use text::constraint::lenient;

const GENERATE: &str = "/inference/v1/generate";

#[derive(Debug)]
pub struct Vllm {
    pub(super) http: Http,
    in_flight: InFlight,
    /// Held while its weights are talked about: an update has several commands, and only one may be open.
    commands: tokio::sync::Mutex<()>,
    /// Where it samples. `None`: not known before the probe's first request.
    route: Mutex<Option<&'static str>>,
}

/// The body that asks `/inference/v1/generate` for one sequence. `model`: the adapter that samples.
fn body(request: &SampleRequest, model: Option<&str>, seeds: bool) -> Value {
    let mut sampling = completions::sampling(request, seeds);
    sampling["detokenize"] = false.into();
    if let Some(constraint) = &request.constraint {
        sampling["structured_outputs"] = json!({"json": lenient(&constraint.schema)});
    }
    let mut body = json!({
        "token_ids": &*request.prompt,
        "sampling_params": sampling,
        "stream": true,
        "cache_salt": cache_salt(request),
    });
    if let Some(model) = model {
        body["model"] = model.into();
    }
    body
}

impl Vllm {
    pub fn new(server: Server, timeouts: Timeouts, in_flight: InFlight) -> anyhow::Result<Self> {
        Ok(Vllm {
            http: Http::new(server, timeouts)?,
            in_flight,
            commands: tokio::sync::Mutex::default(),
            route: Mutex::new(None),
        })
    }

    /// [`Client::load_adapter`](super::client::Client::load_adapter).
    pub async fn load_adapter(&self, name: &str, folder: &Path) -> anyhow::Result<()> {
        // an earlier process may have loaded it
        let _ = self.unload_adapter(name).await;
        let adapter = json!({"lora_name": name, "lora_path": folder});
        self.http.command("/v1/load_lora_adapter", Some(adapter)).await
    }

    pub async fn unload_adapter(&self, name: &str) -> anyhow::Result<()> {
        let adapter = json!({"lora_name": name});
        self.http.command("/v1/unload_lora_adapter", Some(adapter)).await
    }

    /// The name of the weights that it holds. Fails if it does not answer.
    pub async fn weights_name(&self) -> anyhow::Result<String> {
        #[derive(Deserialize)]
        struct Info {
            weight_version: String,
        }
        let info: Info = self.http.get_control("/weight_info").await?;
        Ok(info.weight_version)
    }

    /// Sequences that it samples together. Only servers in development mode say so.
    pub async fn slots(&self) -> anyhow::Result<Option<usize>> {
        let info: Value = self.http.get_control("/server_info?config_format=json").await?;
        let slots = &info["vllm_config"]["scheduler_config"]["max_num_seqs"];
        Ok(slots.as_u64().and_then(|slots| usize::try_from(slots).ok()))
    }

    /// [`Client::update`](super::client::Client::update).
    pub async fn update(&self, weights: Weights<'_>, in_flight: InFlight) -> anyhow::Result<()> {
        let _open = self.commands.lock().await;
        let Weights { url, to, .. } = weights;
        let info = match weights.from {
            Some(from) => json!({"patch": url, "from": from, "to": to}),
            None => json!({"all": url, "to": to}),
        };
        // the cache is of the old weights; for what goes on it is computed again
        let pause = match in_flight {
            InFlight::Drain => "/pause?mode=abort&clear_cache=true",
            InFlight::Cross => "/pause?mode=keep&clear_cache=true",
        };
        self.http.command(pause, None).await?;
        let updated = async {
            self.begin().await?;
            let info = json!({"update_info": info});
            self.http
                .command_within(weights.limit, "/update_weights", Some(info))
                .await?;
            let named = json!({"weight_version": weights.name});
            self.http.command("/finish_weight_update", Some(named)).await
        };
        let updated = updated.await;
        if updated.is_err() {
            // vLLM has ended the update itself, but of several workers only in the one that failed
            let _ = self.http.command("/finish_weight_update", None).await;
        }
        let resumed = self.http.command("/resume", None).await;
        updated.and(resumed)
    }

    /// Tells the workers something that needs no pause.
    pub async fn beside(&self, info: Value) -> anyhow::Result<bool> {
        let _open = self.commands.lock().await;
        self.begin().await?;
        let info = json!({"update_info": info});
        let told = self.http.command("/update_weights", Some(info)).await;
        let finished = self.http.command("/finish_weight_update", None).await;
        told.and(finished).map(|()| true)
    }

    async fn begin(&self) -> anyhow::Result<()> {
        match self.http.command("/start_weight_update", None).await {
            Ok(()) => Ok(()),
            // an update that was broken off is still open
            Err(_) => {
                let _ = self.http.command("/finish_weight_update", None).await;
                self.http.command("/start_weight_update", None).await
            }
        }
    }

    /// [`Client::forget_routes`](super::client::Client::forget_routes).
    pub fn forget_routes(&self) {
        self.set_route(None);
    }

    fn set_route(&self, route: Option<&'static str>) {
        *self.route.lock().unwrap_or_else(PoisonError::into_inner) = route;
    }

    /// [`Client::generate`](super::client::Client::generate).
    pub async fn generate(&self, request: &SampleRequest, weights: &str, seeds: bool) -> Result<Stream, Error> {
        let model = self.http.takes_adapters().then(|| weights_name(&request.version));
        let model = model.as_deref();
        let known = *self.route.lock().unwrap_or_else(PoisonError::into_inner);
        if known != Some(completions::PATH) {
            match self.http.sample(GENERATE, &body(request, model, seeds), weights).await {
                Ok(events) => {
                    self.set_route(Some(GENERATE));
                    return Ok(Stream::new(events, Reader));
                }
                // started without --enable-scale-out, if it never had the route since its last probe
                Err(Error::Absent(_)) if known.is_none() => {
                    if self.in_flight == InFlight::Cross {
                        return Err(Error::Engine(anyhow!(
                            "{} has no {GENERATE}, so it does not say which weights sampled which tokens: start it with \
                             --enable-scale-out, or set serve.remote.in_flight to \"drain\"",
                            self.http.url()
                        )));
                    }
                    let engine = self.http.url();
                    tracing::info!(engine, "no {GENERATE}; sampling through {}", completions::PATH);
                    self.set_route(Some(completions::PATH));
                }
                Err(error) => return Err(error),
            }
        }
        let body = completions::body(request, model, seeds);
        let events = self.http.sample(completions::PATH, &body, weights).await?;
        Ok(Stream::new(events, completions::Reader))
    }
}

/// Reads the events of `/inference/v1/generate`.
struct Reader;

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<String>,
    /// Per token, the ids that the filters kept.
    sampling_mask: Option<Vec<Vec<u32>>>,
    /// With the last event, if the server returns them.
    routed_experts: Option<String>,
    weight_versions: Option<Vec<VersionOfTokens>>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Option<Vec<TokenLogprob>>,
}

#[derive(Deserialize)]
struct TokenLogprob {
    token_id: u32,
    logprob: f32,
    /// The sampled token first, then the most probable ones, again with the sampled one.
    #[serde(default)]
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Deserialize)]
struct TopLogprob {
    token_id: u32,
    logprob: f32,
}

impl Read for Reader {
    fn read(&mut self, data: &[u8]) -> Result<Piece, Error> {
        let event: Event = parse(data)?;
        if let Some(failure) = event.error {
            return Err(failure.into());
        }
        match event.choices.into_iter().next() {
            Some(choice) => {
                let ending = choice.finish_reason.as_deref().map(Ending::named).transpose()?;
                piece(choice, ending).map_err(Error::Engine)
            }
            None => Ok(Piece::default()),
        }
    }
}

fn piece(choice: Choice, ending: Option<Ending>) -> anyhow::Result<Piece> {
    let versions = choice.weight_versions;
    ensure!(
        ending.is_none() || versions.as_ref().is_some_and(|spans| !spans.is_empty()),
        "the engine does not say which weights sampled its tokens"
    );
    let ids = choice.token_ids.unwrap_or_default();
    let logprobs = choice
        .logprobs
        .and_then(|logprobs| logprobs.content)
        .unwrap_or_default();
    ensure!(
        logprobs.len() == ids.len(),
        "the engine gave {} log-probabilities for {} tokens",
        logprobs.len(),
        ids.len()
    );
    let mut masks = choice.sampling_mask.unwrap_or_default().into_iter();
    let tokens = ids.into_iter().zip(logprobs).map(|(id, of)| {
        ensure!(
            of.token_id == id,
            "the engine gave the log-probability of another token"
        );
        let top = of.top_logprobs.iter().map(|one| (one.token_id, one.logprob));
        let candidates = masks.next().map(|mask| mask.len());
        Ok(token(id, of.logprob, candidates, top.collect()))
    });
    let mut tokens: Vec<Token> = tokens.collect::<anyhow::Result<_>>()?;
    if let (Some(experts), Some(last)) = (choice.routed_experts, tokens.last_mut()) {
        last.routing = routed::read(&experts).context("read the experts of an answer")?;
    }
    Ok(Piece {
        tokens,
        ending,
        versions,
    })
}

#[cfg(test)]
mod tests;
