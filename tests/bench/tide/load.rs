//! Production by the trace, and rollouts that always have work.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bench::events;
use bench::quantiles::Quantiles;
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use reqwest::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::Args;
use crate::trace::Arrival;

/// Rollouts that ask for a slot, of each slot.
const ROLLOUTS_PER_SLOT: usize = 2;
/// Ids that end an answer; never sampled, so that lengths are the trace's.
const STOP_IDS: [u32; 3] = [0, 2, 3];
const RETRY_AFTER: Duration = Duration::from_millis(100);

pub struct Outcome {
    pub production: Felt,
    pub rollouts: Rollouts,
}

/// What production felt.
#[derive(Debug, Serialize)]
pub struct Felt {
    pub answers: usize,
    pub failures: Vec<String>,
    pub first_token_ms: Quantiles,
    /// Until the end of the stream: the log has acknowledged the generation then.
    pub whole_ms: Quantiles,
}

#[derive(Debug, Default, Serialize)]
pub struct Rollouts {
    pub finished: usize,
    /// Asked for again, because the replica said so.
    pub retried: usize,
    /// Failed in another way, or answered with other than all tokens.
    pub lost: usize,
    /// Cut off at the end of the run.
    pub unfinished: usize,
}

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Value>,
    error: Option<Value>,
}

pub async fn run(
    args: &Args,
    urls: &[String],
    arrivals: &[Arrival],
    vocab: u32,
    with_rollouts: bool,
) -> anyhow::Result<Outcome> {
    let client = reqwest::Client::new();
    let began = Instant::now();
    let ask = |number: usize, arrival: Arrival| {
        let (client, url) = (client.clone(), &urls[number % urls.len()]);
        async move {
            tokio::time::sleep_until((began + arrival.at).into()).await;
            production(args, &client, url, vocab, number, arrival).await
        }
    };
    let production = join_all(
        arrivals
            .iter()
            .enumerate()
            .map(|(number, &arrival)| ask(number, arrival)),
    );
    let counts = Counts::default();
    let streams = match with_rollouts {
        true => args.slots * args.replicas * ROLLOUTS_PER_SLOT,
        false => 0,
    };
    let run = Uuid::now_v7();
    let rollouts = join_all((0..streams).map(|stream| {
        let (client, url, counts) = (client.clone(), &urls[stream % urls.len()], &counts);
        async move { rollouts(args, &client, url, vocab, run, stream, counts).await }
    }));
    let until = tokio::time::sleep(Duration::from_secs(args.seconds));
    // rollouts end with the run; the last answers of production may take longer
    let rollouts = async {
        tokio::select! {
            _ = rollouts => until_end(began, args).await,
            () = until => {}
        }
    };
    let (answers, ()) = tokio::join!(production, rollouts);
    let (mut first, mut whole, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for answer in answers {
        match answer {
            Ok((first_token, all)) => {
                first.push(first_token);
                whole.push(all);
            }
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    ensure!(!first.is_empty(), "no answer of production: {:?}", failures.first());
    Ok(Outcome {
        production: Felt {
            answers: first.len(),
            failures,
            first_token_ms: Quantiles::of(first.into_iter())?,
            whole_ms: Quantiles::of(whole.into_iter())?,
        },
        rollouts: Rollouts {
            finished: counts.finished.load(Ordering::Relaxed),
            retried: counts.retried.load(Ordering::Relaxed),
            lost: counts.lost.load(Ordering::Relaxed),
            unfinished: streams,
        },
    })
}

async fn until_end(began: Instant, args: &Args) {
    tokio::time::sleep_until((began + Duration::from_secs(args.seconds)).into()).await;
}

fn prompt(seed: u64, vocab: u32, tokens: usize) -> Vec<u32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..tokens).map(|_| random.random_range(4..vocab)).collect()
}

fn body(prompt: &[u32], max_tokens: usize) -> Value {
    let bias: Value = STOP_IDS.iter().map(|id| (id.to_string(), json!(-100))).collect();
    json!({"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "logit_bias": bias, "stream": true,
           "return_token_ids": true})
}

/// Time to the first token, and to the end.
async fn production(
    args: &Args,
    client: &reqwest::Client,
    url: &str,
    vocab: u32,
    number: usize,
    arrival: Arrival,
) -> anyhow::Result<(Duration, Duration)> {
    let prompt = prompt(args.seed ^ number as u64, vocab, arrival.prompt_tokens);
    let request = client
        .post(format!("{url}/v1/completions"))
        .json(&body(&prompt, arrival.max_tokens));
    let began = Instant::now();
    let response = request.send().await?;
    ensure!(response.status() == StatusCode::OK, "{}", response.text().await?);
    let mut first = None;
    events::read(response, |chunk: Chunk| {
        ensure!(chunk.error.is_none(), "{:?}", chunk.error);
        if !chunk.choices.is_empty() {
            first.get_or_insert_with(|| began.elapsed());
        }
        Ok(())
    })
    .await?;
    Ok((first.context("an answer without a token")?, began.elapsed()))
}

#[derive(Default)]
struct Counts {
    finished: AtomicUsize,
    retried: AtomicUsize,
    lost: AtomicUsize,
}

/// One rollout after the other.
async fn rollouts(
    args: &Args,
    client: &reqwest::Client,
    url: &str,
    vocab: u32,
    run: Uuid,
    stream: usize,
    counts: &Counts,
) {
    for turn in 0u64.. {
        let seed = args.seed ^ (stream as u64) << 32 ^ turn << 48;
        let mut body = body(&prompt(seed, vocab, 16), args.rollout_tokens);
        body["stream"] = json!(false);
        body["metadata"] = json!({"purpose": "rollout", "run_id": run, "task_id": "bench"});
        loop {
            match rollout(client, url, &body, args.rollout_tokens).await {
                Ok(true) => counts.finished.fetch_add(1, Ordering::Relaxed),
                Ok(false) => {
                    counts.retried.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(RETRY_AFTER).await;
                    continue;
                }
                Err(error) => {
                    eprintln!("a rollout was lost: {error:#}");
                    counts.lost.fetch_add(1, Ordering::Relaxed)
                }
            };
            break;
        }
    }
}

/// False: it has to be asked for again.
async fn rollout(client: &reqwest::Client, url: &str, body: &Value, tokens: usize) -> anyhow::Result<bool> {
    let response = client.post(format!("{url}/v1/completions")).json(body).send().await?;
    match response.status() {
        StatusCode::OK => {}
        StatusCode::TOO_MANY_REQUESTS => return Ok(false),
        status => bail!("{status}: {}", response.text().await?),
    }
    let answer: Value = response.json().await?;
    let got = answer["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
    ensure!(got == tokens, "{got} tokens instead of {tokens}");
    Ok(true)
}
