//! `make bench NAME=engines`: changes the version of running vLLM servers again and again, under load,
//! with the pool and the updater of `springtide serve`. Then our exact model scores every token that
//! was sampled, with the weights of the version that its request was routed to; and the last version
//! is compared with a server that was started with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bench::quantiles::Quantiles;
use bench::versions::Versions;
use clap::Parser;
use model::exact::ExactModel;
use model::sampling::{self, Params, PreviousTokens};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use serving::engine::caller::Caller;
use serving::engine::{Config, Engine, LoadedVersion, SampleEvent, SampleRequest, Token, TrafficClass, events_max};
use serving::remote::{Options, Pool, Server, Updater};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Not 1, so that log-probabilities before the temperature would be noticed.
const TEMPERATURE: f32 = 0.8;
const PROMPT_TOKENS: usize = 32;
/// Prompts that the last version and a fresh server answer, greedily.
const COMPARED_PROMPTS: usize = 20;

#[derive(Debug, Clone, Parser, Serialize)]
struct Args {
    /// A Hugging Face folder: the first version. Later ones are made from it.
    #[arg(long)]
    model: PathBuf,
    /// Writes the last version to this folder, and does nothing else.
    #[arg(long)]
    write_last: Option<PathBuf>,
    /// A running vLLM server; may be repeated.
    #[arg(long)]
    url: Vec<String>,
    /// A server that was started with the last version.
    #[arg(long)]
    fresh: Option<String>,
    #[arg(long, default_value_t = 100)]
    updates: i64,
    /// Requests at a time.
    #[arg(long, default_value_t = 8)]
    streams: usize,
    #[arg(long, default_value_t = 48)]
    max_tokens: usize,
    /// Between two updates.
    #[arg(long, default_value_t = 1000)]
    pause_ms: u64,
    /// Largest difference from the exact log-probability of a token, in nats.
    #[arg(long, default_value_t = 1e-3)]
    error_max: f32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value = "target/bench/engines.json")]
    json: PathBuf,
}

/// An answered request.
struct Answer {
    serial: i64,
    prompt: Arc<[u32]>,
    tokens: Vec<Token>,
    first_token: Duration,
    /// The longest wait between two tokens.
    gap: Duration,
}

#[derive(Debug, Serialize)]
struct Result {
    settings: Args,
    /// The process that sampled the tokens.
    sampled_by: &'static str,
    seconds: f64,
    updates: i64,
    updates_failed: usize,
    requests: usize,
    requests_failed: Vec<String>,
    versions_served: usize,
    tokens: usize,
    /// Tokens whose log-probability is not that of the version that the request was routed to.
    tokens_wrong: usize,
    largest_difference: f32,
    change_ms: Quantiles,
    first_token_ms: Quantiles,
    /// The longest gap of each answer.
    gap_ms: Quantiles,
    against_fresh: Option<Comparison>,
}

/// The updated server beside one that was started with the same version.
#[derive(Debug, Serialize)]
struct Comparison {
    tokens: usize,
    other_tokens: usize,
    largest_difference: f32,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let versions = Versions::new(&args.model, args.seed)?;
    if let Some(folder) = &args.write_last {
        return Ok(versions.checkpoint(args.updates + 1)?.write_dir(folder)?);
    }
    ensure!(!args.url.is_empty(), "give --url http://HOST:PORT");
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(measure(args, versions))?;
    let json = serde_json::to_string_pretty(&result)?;
    println!("{json}");
    if let Some(folder) = result.settings.json.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&result.settings.json, json)?;
    Ok(())
}

async fn measure(args: Args, versions: Versions) -> anyhow::Result<Result> {
    let options = Options {
        vllm: args.url.iter().map(|url| server(url)).collect(),
        probe_error_max: args.error_max,
        ..Options::default()
    };
    let config = Config {
        queue_choices_max: 1024,
        queue_wait_max: Duration::from_secs(120),
        prompt_tokens_per_pass_max: 0,
        slots_reserved_for_production: 0,
        parked_max: Duration::from_secs(600),
    };
    let pool = Pool::new(&options, args.streams.max(16), config)?;
    let stop = CancellationToken::new();
    let watch = tokio::spawn(pool.clone().watch(stop.clone()));
    let mut updater = Updater::new(pool.clone(), options)?;
    let context = updater.context().await?;
    let checkpoint = Arc::new(versions.checkpoint(1)?);
    let first = versions.loaded(1, &checkpoint, context)?;
    // engines are seen within seconds
    for attempt in 0.. {
        match updater.place(&first, &checkpoint, &BTreeSet::new()).await {
            Ok(_) => break,
            Err(error) if attempt == 20 => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }

    let routed = Arc::new(RwLock::new(first));
    let stopping = Arc::new(AtomicBool::new(false));
    let (answers, mut answered) = mpsc::unbounded_channel();
    for stream in 0..args.streams {
        let load = Load {
            pool: pool.clone(),
            routed: routed.clone(),
            stopping: stopping.clone(),
            max_tokens: args.max_tokens,
            random: StdRng::seed_from_u64(args.seed * 1000 + stream as u64),
        };
        tokio::spawn(load.run(answers.clone()));
    }
    drop(answers);
    let collect = tokio::spawn(async move {
        let mut all = Vec::new();
        while let Some(answer) = answered.recv().await {
            all.push(answer);
        }
        all
    });

    let started = Instant::now();
    let mut changes = Vec::new();
    let mut updates_failed = 0;
    for serial in 2..=args.updates + 1 {
        tokio::time::sleep(Duration::from_millis(args.pause_ms)).await;
        let checkpoint = Arc::new(versions.checkpoint(serial)?);
        let version = versions.loaded(serial, &checkpoint, context)?;
        let begun = Instant::now();
        match updater.place(&version, &checkpoint, &BTreeSet::new()).await {
            Ok(_) => {
                changes.push(begun.elapsed());
                *routed.write().unwrap_or_else(std::sync::PoisonError::into_inner) = version;
            }
            Err(error) => {
                updates_failed += 1;
                eprintln!("update to {serial}: {error:#}");
            }
        }
        // the other engines follow
        while let Some((engine, serial)) = updater.next_change(&[(serial, 1.0)]) {
            let version = routed.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
            ensure!(version.serial == serial, "another version is wanted than the newest");
            updater.change(engine, &version, &checkpoint).await?;
        }
    }
    tokio::time::sleep(Duration::from_millis(args.pause_ms)).await;
    stopping.store(true, Ordering::Relaxed);
    let seconds = started.elapsed().as_secs_f64();
    let all = collect.await?;
    let last = routed.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    stop.cancel();
    watch.await?;

    let (answers, failed): (Vec<_>, Vec<_>) = all.into_iter().partition(std::result::Result::is_ok);
    let answers: Vec<Answer> = answers.into_iter().filter_map(std::result::Result::ok).collect();
    let requests_failed: Vec<String> = failed.into_iter().filter_map(std::result::Result::err).collect();
    let (tokens, tokens_wrong, largest_difference) = score(&versions, &answers, args.error_max)?;
    let against_fresh = match &args.fresh {
        Some(fresh) => Some(compare(&args.url[0], fresh, &last).await?),
        None => None,
    };
    let served: BTreeSet<i64> = answers.iter().map(|answer| answer.serial).collect();
    Ok(Result {
        sampled_by: "vLLM",
        seconds,
        updates: args.updates,
        updates_failed,
        requests: answers.len() + requests_failed.len(),
        requests_failed,
        versions_served: served.len(),
        tokens,
        tokens_wrong,
        largest_difference,
        change_ms: Quantiles::of(changes.into_iter())?,
        first_token_ms: Quantiles::of(answers.iter().map(|answer| answer.first_token))?,
        gap_ms: Quantiles::of(answers.iter().map(|answer| answer.gap))?,
        against_fresh,
        settings: args,
    })
}

fn server(url: &str) -> Server {
    Server {
        url: url.to_owned(),
        ..Server::default()
    }
}

/// One stream of requests.
struct Load {
    pool: Pool,
    routed: Arc<RwLock<Arc<LoadedVersion>>>,
    stopping: Arc<AtomicBool>,
    max_tokens: usize,
    random: StdRng,
}

impl Load {
    async fn run(mut self, answers: mpsc::UnboundedSender<std::result::Result<Answer, String>>) {
        while !self.stopping.load(Ordering::Relaxed) {
            let started = Instant::now();
            let version = self.route().await;
            let vocab = version.vocab;
            let prompt: Arc<[u32]> = (0..PROMPT_TOKENS).map(|_| self.random.random_range(3..vocab)).collect();
            let params = Params {
                temperature: TEMPERATURE,
                ..Params::default()
            };
            let answer = ask(&self.pool, version, prompt, params, self.max_tokens, started).await;
            if answers.send(answer).is_err() {
                return;
            }
        }
    }

    /// As `serving::api` does.
    async fn route(&self) -> Arc<LoadedVersion> {
        loop {
            let version = self
                .routed
                .read()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .clone();
            let Some(changed) = self.pool.unavailable(&version) else {
                return version;
            };
            drop(version);
            changed.await;
        }
    }
}

async fn ask(
    engine: &Pool,
    version: Arc<LoadedVersion>,
    prompt: Arc<[u32]>,
    params: Params,
    max_tokens: usize,
    started: Instant,
) -> std::result::Result<Answer, String> {
    let (events, mut receiver) = mpsc::channel(events_max(max_tokens));
    let serial = version.serial;
    let request = SampleRequest {
        version,
        prompt: prompt.clone(),
        max_tokens,
        params,
        seed: 0,
        suppressed: None,
        constraint: None,
        ends: Default::default(),
        score_prompt: None,
        top_logprobs: 0,
        caller: Caller::new("bench", None),
        class: TrafficClass::Production,
        priority: 0,
        session: None,
        events,
        submitted: started,
    };
    engine.submit(vec![request]).map_err(|error| error.to_string())?;
    let mut answer = Answer {
        serial,
        prompt,
        tokens: Vec::new(),
        first_token: Duration::ZERO,
        gap: Duration::ZERO,
    };
    let mut before = started;
    while let Some(event) = receiver.recv().await {
        match event {
            SampleEvent::Token(token) => {
                let wait = std::mem::replace(&mut before, Instant::now()).elapsed();
                match answer.tokens.is_empty() {
                    true => answer.first_token = wait,
                    false => answer.gap = answer.gap.max(wait),
                }
                answer.tokens.push(token);
            }
            SampleEvent::Started(_) => {}
            SampleEvent::Finished(_) => return Ok(answer),
            other => return Err(format!("version {serial}: {other:?}")),
        }
    }
    Err(format!("version {serial}: the answer has no end"))
}

/// Tokens, those that the version did not sample, and the largest difference of log-probabilities.
fn score(versions: &Versions, answers: &[Answer], error_max: f32) -> anyhow::Result<(usize, usize, f32)> {
    let mut by_version: BTreeMap<i64, Vec<&Answer>> = BTreeMap::new();
    for answer in answers {
        by_version.entry(answer.serial).or_default().push(answer);
    }
    let params = Params {
        temperature: TEMPERATURE,
        ..Params::default()
    };
    let (mut tokens, mut wrong, mut largest) = (0, 0, 0.0_f32);
    for (serial, answers) in by_version {
        let model = ExactModel::from_checkpoint(&versions.checkpoint(serial)?)?;
        for answer in answers {
            let sampled = answer.tokens.iter().map(|token| token.id);
            let ids: Vec<u32> = answer.prompt.iter().copied().chain(sampled).collect();
            let rows: Vec<usize> = (answer.prompt.len() - 1..ids.len() - 1).collect();
            let pass = model.score(&[&ids], &rows, None).context("score an answer")?;
            for (logits, token) in pass.logits.rows().zip(&answer.tokens) {
                let exact = sampling::log_prob_of(logits, &params, &PreviousTokens::default(), token.id);
                let difference = (exact - token.logprob).abs();
                largest = largest.max(difference);
                wrong += usize::from(difference.is_nan() || difference > error_max);
                tokens += 1;
            }
        }
    }
    Ok((tokens, wrong, largest))
}

/// Greedy answers of both servers, one request at a time.
async fn compare(updated: &str, fresh: &str, version: &LoadedVersion) -> anyhow::Result<Comparison> {
    let mut random = StdRng::seed_from_u64(7);
    let mut comparison = Comparison {
        tokens: 0,
        other_tokens: 0,
        largest_difference: 0.0,
    };
    let client = reqwest::Client::new();
    for _ in 0..COMPARED_PROMPTS {
        let prompt: Vec<u32> = (0..PROMPT_TOKENS)
            .map(|_| random.random_range(3..version.vocab))
            .collect();
        let one = greedy(&client, updated, &prompt).await?;
        let other = greedy(&client, fresh, &prompt).await?;
        comparison.tokens += one.len().max(other.len());
        comparison.other_tokens += one.len().abs_diff(other.len());
        for (one, other) in one.iter().zip(&other) {
            comparison.other_tokens += usize::from(one.0 != other.0);
            let difference = (one.1 - other.1).abs();
            anyhow::ensure!(
                difference.is_finite(),
                "a log-probability of {updated} or {fresh} is not finite"
            );
            comparison.largest_difference = comparison.largest_difference.max(difference);
        }
    }
    Ok(comparison)
}

async fn greedy(client: &reqwest::Client, url: &str, prompt: &[u32]) -> anyhow::Result<Vec<(u64, f32)>> {
    let body = serde_json::json!({
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 32, "temperature": 0, "logprobs": 0, "ignore_eos": true, "detokenize": false},
    });
    let response = client
        .post(format!("{url}/inference/v1/generate"))
        .json(&body)
        .send()
        .await?;
    let answer: serde_json::Value = response.error_for_status()?.json().await?;
    let content = answer["choices"][0]["logprobs"]["content"].as_array();
    let content = content.with_context(|| format!("{url} gave no log-probabilities"))?;
    let token = |token: &serde_json::Value| Some((token["token_id"].as_u64()?, token["logprob"].as_f64()? as f32));
    content
        .iter()
        .map(|one| token(one).context("a token without id"))
        .collect()
}
