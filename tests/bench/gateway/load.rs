//! Streams of requests to the gateway, or to the engine as the gateway asks it.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use bench::events;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::Args;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The engine's own API.
    Direct,
    /// Through the gateway.
    Gateway,
}

/// One answer.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    pub first_token: Duration,
    /// From the first token to the last, divided by the tokens between.
    pub per_token: Duration,
    /// Until the end of the stream. The gateway ends it once the log has acknowledged the generation.
    pub whole: Duration,
    pub tokens: usize,
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub answers: Vec<Answer>,
    pub failures: Vec<String>,
    pub seconds: f64,
}

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
}

/// The prompt of one request. Both ways get the same ones.
fn prompt(args: &Args, vocab: u32, streams: usize, stream: usize, turn: usize) -> Vec<u32> {
    let number = (streams * 1_000_000 + stream * 1_000 + turn) as u64;
    let mut random = StdRng::seed_from_u64(args.seed ^ number);
    (0..args.prompt_tokens).map(|_| random.random_range(3..vocab)).collect()
}

/// Asks with as many streams at a time; each sends `turns` requests, one after the other.
pub async fn run(
    args: &Args,
    vocab: u32,
    way: Way,
    url: &str,
    streams: usize,
    turns: std::ops::Range<usize>,
) -> Outcome {
    let client = reqwest::Client::new();
    let began = Instant::now();
    let stream = |stream: usize| {
        let (client, turns) = (client.clone(), turns.clone());
        async move {
            let mut answers = Vec::new();
            for turn in turns {
                let prompt = prompt(args, vocab, streams, stream, turn);
                answers.push(ask(args, way, url, &client, prompt).await);
            }
            answers
        }
    };
    let answers: Vec<_> = futures::future::join_all((0..streams).map(stream)).await;
    let mut outcome = Outcome {
        seconds: began.elapsed().as_secs_f64(),
        ..Outcome::default()
    };
    for answer in answers.into_iter().flatten() {
        match answer {
            Ok(answer) => outcome.answers.push(answer),
            Err(error) => outcome.failures.push(format!("{error:#}")),
        }
    }
    outcome
}

async fn ask(args: &Args, way: Way, url: &str, client: &reqwest::Client, prompt: Vec<u32>) -> anyhow::Result<Answer> {
    let bias: Value = args.stop_ids.iter().map(|id| (id.to_string(), json!(-100))).collect();
    let (path, body) = match way {
        Way::Direct => (
            "/inference/v1/generate",
            json!({
                "token_ids": prompt,
                "sampling_params": {
                    "max_tokens": args.max_tokens, "temperature": 1.0, "logprobs": 0, "logit_bias": bias,
                    "ignore_eos": true, "detokenize": false,
                },
                "stream": true,
            }),
        ),
        Way::Gateway => (
            "/v1/completions",
            json!({
                "model": "demo@learner", "prompt": prompt, "max_tokens": args.max_tokens, "temperature": 1.0,
                "logit_bias": bias, "stream": true, "return_token_ids": true,
            }),
        ),
    };
    let began = Instant::now();
    let response = client.post(format!("{url}{path}")).json(&body).send().await?;
    let status = response.status();
    if !status.is_success() {
        bail!("{status}: {}", response.text().await?);
    }
    let (mut first, mut last, mut tokens) = (None, Duration::ZERO, 0);
    let done = events::read(response, |chunk: Chunk| {
        if let Some(error) = chunk.error {
            bail!("an error in the stream: {error}");
        }
        let ids = chunk.choices.iter().filter_map(|choice| choice.token_ids.as_ref());
        let new: usize = ids.map(Vec::len).sum();
        if new > 0 {
            last = began.elapsed();
            first.get_or_insert(last);
            tokens += new;
        }
        Ok(())
    });
    ensure!(done.await?, "the answer has no end");
    let whole = began.elapsed();
    let first_token = first.unwrap_or(whole);
    ensure!(tokens == args.max_tokens, "the answer has {tokens} tokens");
    Ok(Answer {
        first_token,
        per_token: last.saturating_sub(first_token) / u32::try_from(tokens.max(2) - 1)?,
        whole,
        tokens,
    })
}
