//! An SGLang server: sampling through `/generate` with token ids; new weights through
//! `/update_weights_from_disk`, between `/pause_generation` and `/continue_generation`. The loader of
//! `python/` takes the URL of a follower there. Tried with SGLang 0.5.23 on a CPU, without
//! its kernels.
//!
//! Its log-probabilities are of the distribution at the temperature, before filters. So requests with
//! filters also ask for the log-probability in the support that was sampled from.

use super::http::{Error, Http, Timeouts};
use super::options::{InFlight, Server};
use super::protocol::{self, Ending, Failure, Piece, Read, Stream, VersionOfTokens, Weights};
use super::protocol::{cache_salt, parse, token};
use crate::engine::SampleRequest;
use anyhow::anyhow;
use serde::Deserialize;
use serde_json::{Value, json};

/// Of the loader in `python/`.
const LOAD_FORMAT: &str = "springtide";
const NO_MASKS: &str = "the engine gives no log-probabilities among the tokens that filters keep: ask without top_p, \
                        top_k and min_p";

#[derive(Debug)]
pub struct Sglang {
    pub(super) http: Http,
}

/// The body that asks for one sequence.
fn body(request: &SampleRequest, seeds: bool) -> Value {
    let mut params = protocol::sampling(request);
    params["max_new_tokens"] = request.max_tokens.into();
    // true would also ignore our stop ids
    params["ignore_eos"] = request.stop_ids().is_empty().into();
    if request.ends.min_tokens > 0 {
        params["min_new_tokens"] = request.ends.min_tokens.into();
    }
    if seeds {
        params["sampling_seed"] = request.seed.into();
    }
    if let Some(constraint) = &request.constraint {
        // SGLang reads the schema from a text
        params["json_schema"] = constraint.schema.to_string().into();
    }
    let mut body = json!({
        "input_ids": &*request.prompt,
        "sampling_params": params,
        "stream": true,
        "return_logprob": true,
        "top_logprobs_num": request.top_logprobs,
        "cache_salt": cache_salt(request),
    });
    if request.params.truncates() {
        body["return_sampling_mask"] = true.into();
    }
    body
}

impl Sglang {
    pub fn new(server: Server, timeouts: Timeouts) -> anyhow::Result<Self> {
        Ok(Sglang {
            http: Http::new(server, timeouts)?,
        })
    }

    /// The name of the weights that it holds. Fails if it does not answer.
    pub async fn weights_name(&self) -> anyhow::Result<String> {
        #[derive(Deserialize)]
        struct Info {
            weight_version: String,
        }
        let info: Info = self.http.get("/model_info").await?;
        Ok(info.weight_version)
    }

    /// Sequences that it samples together, of all its data-parallel ranks.
    pub async fn slots(&self) -> anyhow::Result<Option<usize>> {
        let info: Value = self.http.get("/server_info").await?;
        let ranks = info["internal_states"].as_array().into_iter().flatten();
        let slots = ranks.map(|rank| rank["effective_max_running_requests_per_dp"].as_u64());
        Ok(slots.sum::<Option<u64>>().and_then(|slots| usize::try_from(slots).ok()))
    }

    /// [`Client::update`](super::client::Client::update). The workers are told at the URL which versions they get.
    pub async fn update(&self, weights: Weights<'_>, in_flight: InFlight) -> anyhow::Result<()> {
        let mode = match in_flight {
            InFlight::Drain => "abort",
            // back to the queue: what goes on is read again with the new weights
            InFlight::Cross => "retract",
        };
        self.http
            .command("/pause_generation", Some(json!({"mode": mode})))
            .await?;
        let update = json!({
            "model_path": weights.url, "load_format": LOAD_FORMAT, "weight_version": weights.name,
            "flush_cache": true,
        });
        let updated = self
            .http
            .command_within(weights.limit, "/update_weights_from_disk", Some(update))
            .await;
        let resumed = self.http.command("/continue_generation", Some(json!({}))).await;
        updated.and(resumed)
    }

    /// [`Client::generate`](super::client::Client::generate).
    pub async fn generate(&self, request: &SampleRequest, weights: &str, seeds: bool) -> Result<Stream, Error> {
        if request.ends.ignore_eos && !request.ends.stop_ids.is_empty() {
            let reason = "the engine of this model cannot ignore its own stop tokens and end at others: ask for \
                          ignore_eos or stop_token_ids";
            return Err(Error::Refused(reason.into()));
        }
        let events = self.http.sample("/generate", &body(request, seeds), weights).await?;
        let reader = Reader {
            filtered: request.params.truncates(),
            read: 0,
        };
        Ok(Stream::new(events, reader))
    }
}

/// Reads the events of `/generate`. Each has all tokens so far, or with
/// `--incremental-streaming-output` those since the event before.
struct Reader {
    /// The request has filters.
    filtered: bool,
    /// Tokens so far.
    read: usize,
}

#[derive(Deserialize)]
struct Event {
    meta_info: Option<Meta>,
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct Meta {
    #[serde(default)]
    output_token_logprobs: Vec<Logprob>,
    /// Of all events together.
    #[serde(default)]
    output_token_logprobs_length: usize,
    #[serde(default)]
    output_top_logprobs: Vec<Option<Vec<Logprob>>>,
    #[serde(default)]
    output_token_sampling_mask: Vec<Vec<u32>>,
    #[serde(default)]
    output_token_sampling_logprobs: Vec<f32>,
    finish_reason: Option<FinishReason>,
    weight_versions: Option<Vec<VersionOfTokens>>,
}

/// Log-probability, id, and a text that is null unless it was asked for.
type Logprob = (f32, u32, Value);

#[derive(Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    message: Option<String>,
    /// Of HTTP, if an error ended it.
    status_code: Option<u16>,
}

impl Read for Reader {
    fn read(&mut self, data: &[u8]) -> Result<Piece, Error> {
        let event: Event = parse(data)?;
        match (event.error, event.meta_info) {
            (Some(failure), _) => Err(failure.into()),
            (None, Some(meta)) => self.piece(meta),
            (None, None) => Ok(Piece::default()),
        }
    }
}

impl Reader {
    fn piece(&mut self, meta: Meta) -> Result<Piece, Error> {
        let ending = match meta.finish_reason {
            None => None,
            // such as a schema that it cannot follow
            Some(FinishReason {
                status_code: Some(status),
                message,
                ..
            }) => return Err(Error::of_status(status, message.unwrap_or_default())),
            Some(FinishReason { kind, .. }) => Some(Ending::named(&kind)?),
        };
        // an event may come before the log-probabilities of its tokens
        let total = meta.output_token_logprobs_length;
        let new = total.saturating_sub(self.read);
        let skipped = meta.output_token_logprobs.len().checked_sub(new).ok_or_else(|| {
            let (given, read) = (meta.output_token_logprobs.len(), self.read);
            let error = anyhow!("the engine gave {given} log-probabilities, but {total} after {read}");
            Error::Engine(error)
        })?;
        let top = meta.output_top_logprobs.get(skipped..).unwrap_or_default();
        let masks = meta.output_token_sampling_mask.get(skipped..).unwrap_or_default();
        let in_support = meta.output_token_sampling_logprobs.get(skipped..).unwrap_or_default();
        let logprobs = meta.output_token_logprobs[skipped..].iter().enumerate();
        let tokens = logprobs.map(|(index, &(logprob, id, _))| {
            let top = top.get(index).and_then(Option::as_ref);
            let top = top.into_iter().flatten().map(|&(logprob, id, _)| (id, logprob));
            let logprob = match self.filtered {
                false => logprob,
                true => *in_support.get(index).ok_or(Error::Answer(NO_MASKS))?,
            };
            Ok(token(id, logprob, masks.get(index).map(Vec::len), top.collect()))
        });
        let tokens = tokens.collect::<Result<_, Error>>()?;
        self.read += new;
        if ending.is_some() && meta.weight_versions.is_none() {
            let error = anyhow!("the engine does not say which weights sampled its tokens");
            return Err(Error::Engine(error));
        }
        Ok(Piece {
            tokens,
            ending,
            versions: meta.weight_versions.filter(|_| ending.is_some()),
        })
    }
}

#[cfg(test)]
mod tests;
