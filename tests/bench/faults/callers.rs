//! Callers of the gateway: each streams one completion after the other, and tries again when one
//! fails. They note what they were told.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use bench::events;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use uuid::Uuid;

pub const TEMPERATURE: f32 = 0.8;
/// Between a failed request and the next one.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(50);

/// One request, as its caller saw it.
#[derive(Debug)]
pub struct Attempt {
    /// Of the kind of fault that was going on when it began.
    pub phase: usize,
    /// No other request has this one.
    pub user: String,
    pub prompt: Vec<i32>,
    /// That were received, and their log-probabilities.
    pub tokens: Vec<i32>,
    pub logprobs: Vec<f32>,
    /// The newest numbers of versions while it ran.
    pub newest: RangeInclusive<i64>,
    pub end: End,
    pub first_token: Option<Duration>,
}

#[derive(Debug)]
pub enum End {
    /// The last chunk came, which promises that the generation is in the log.
    Whole { generation: Uuid, version: i64 },
    /// It broke after the first token.
    Cut,
    /// It failed before the first token.
    Failed(String),
}

#[derive(Debug)]
pub struct Callers {
    url: String,
    model: String,
    vocab: i32,
    prompt_tokens: usize,
    max_tokens: usize,
    phase: AtomicUsize,
    stop: AtomicBool,
    /// Streams that have a token and no end.
    open: AtomicUsize,
    whole: AtomicUsize,
    /// The number of the version that is published last.
    newest: AtomicI64,
}

impl Callers {
    pub fn new(url: String, model: String, vocab: i32, prompt_tokens: usize, max_tokens: usize) -> Arc<Self> {
        Arc::new(Callers {
            url,
            model,
            vocab,
            prompt_tokens,
            max_tokens,
            phase: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            whole: AtomicUsize::new(0),
            newest: AtomicI64::new(1),
        })
    }

    pub fn enter(&self, phase: usize) {
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// From now on the version of this number may answer.
    pub fn publish(&self, number: i64) {
        self.newest.store(number, Ordering::SeqCst);
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Number of whole answers so far.
    pub fn whole(&self) -> usize {
        self.whole.load(Ordering::Relaxed)
    }

    /// One stream of requests, until [`Callers::stop`].
    pub async fn run(self: Arc<Self>, stream: usize, seed: u64, attempts: mpsc::UnboundedSender<Attempt>) {
        let mut random = StdRng::seed_from_u64(seed);
        let client = reqwest::Client::new();
        let mut number = 0;
        while !self.stop.load(Ordering::Relaxed) {
            number += 1;
            let attempt = self
                .ask(&client, format!("stream-{stream}-{number}"), &mut random)
                .await;
            let failed = matches!(attempt.end, End::Failed(_));
            if attempts.send(attempt).is_err() {
                return;
            }
            if failed {
                tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
            }
        }
    }

    async fn ask(&self, client: &reqwest::Client, user: String, random: &mut StdRng) -> Attempt {
        let prompt: Vec<i32> = (0..self.prompt_tokens)
            .map(|_| random.random_range(3..self.vocab))
            .collect();
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": TEMPERATURE,
            "logprobs": 0, "stream": true, "return_token_ids": true, "user": user,
        });
        let (began, newest) = (Instant::now(), self.newest.load(Ordering::SeqCst));
        let (mut tokens, mut logprobs, mut first_token, mut last) = (Vec::new(), Vec::new(), None, None);
        let answered = async {
            let response = client
                .post(format!("{}/v1/completions", self.url))
                .json(&body)
                .send()
                .await?;
            let status = response.status();
            if !status.is_success() {
                bail!("{status}");
            }
            let done = events::read(response, |chunk: Value| {
                if let Some(error) = chunk.get("error") {
                    bail!("an error in the stream: {}", error["type"]);
                }
                let choice = &chunk["choices"][0];
                let ids = choice["token_ids"].as_array().into_iter().flatten();
                tokens.extend(ids.filter_map(|id| i32::try_from(id.as_i64()?).ok()));
                let values = choice["logprobs"]["token_logprobs"].as_array().into_iter().flatten();
                logprobs.extend(values.map(|value| value.as_f64().map_or(f32::NAN, |logprob| logprob as f32)));
                if !tokens.is_empty() && first_token.is_none() {
                    first_token = Some(began.elapsed());
                    self.open.fetch_add(1, Ordering::Relaxed);
                }
                if !choice["generation_id"].is_null() {
                    last = Some(choice.clone());
                }
                Ok(())
            });
            match done.await? {
                true => Ok(()),
                false => bail!("the stream has no end"),
            }
        };
        let result: anyhow::Result<()> = answered.await;
        if first_token.is_some() {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        let last = last.and_then(|choice| {
            let generation = choice["generation_id"].as_str()?.parse().ok()?;
            Some((generation, choice["version"].as_i64()?))
        });
        let end = match (result, last, first_token) {
            // with the last chunk it is promised, also if the connection breaks right after it
            (_, Some((generation, version)), _) => {
                self.whole.fetch_add(1, Ordering::Relaxed);
                End::Whole { generation, version }
            }
            (_, None, Some(_)) => End::Cut,
            (Err(error), None, None) => End::Failed(kind(&error)),
            (Ok(()), None, None) => End::Failed("an answer without tokens".into()),
        };
        Attempt {
            phase: self.phase.load(Ordering::Relaxed),
            user,
            prompt,
            tokens,
            logprobs,
            newest: newest..=self.newest.load(Ordering::SeqCst),
            end,
            first_token,
        }
    }
}

/// A short name, so that failures can be counted.
fn kind(error: &anyhow::Error) -> String {
    match error.downcast_ref::<reqwest::Error>() {
        Some(error) if error.is_connect() => "connection refused".into(),
        Some(error) if error.is_timeout() => "timeout".into(),
        Some(_) => "connection broke".into(),
        None => error.to_string(),
    }
}
