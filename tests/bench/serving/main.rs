//! `make bench NAME=serving`: measures servers with OpenAI's completions API at several numbers of
//! streams. A stream sends one request after the other, each with other random token ids as its
//! prompt, and reads the answer as server-sent events.

mod kernel;
mod words;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bench::events;
use clap::Parser;
use hdrhistogram::Histogram;
use kernel::Kernel;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use words::Words;

#[derive(Debug, Clone, Parser, Serialize)]
struct Args {
    /// A server and its base URL, as in `ours=http://127.0.0.1:8000`; may be repeated.
    #[arg(long, value_parser = server)]
    server: Vec<Server>,
    /// A server of `transformers serve`, which takes text alone: it gets words of one token each, as many
    /// as the other prompts have ids.
    #[arg(long, value_parser = server, requires = "tokenizer")]
    text_server: Vec<Server>,
    /// A Hugging Face folder with the tokenizer of text servers.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// Also measure our kernels alone, on this Hugging Face folder.
    #[arg(long)]
    kernel: Option<PathBuf>,
    /// Threads of the kernels alone.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// The model to ask for.
    #[arg(long)]
    model: String,
    /// An API key for all servers.
    #[arg(long, env = "SPRINGTIDE_API_KEY", hide_env_values = true)]
    #[serde(skip)]
    api_key: Option<String>,
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    streams: Vec<usize>,
    /// Requests of one point, at least; a stream sends at least two.
    #[arg(long, default_value_t = 64)]
    requests: usize,
    #[arg(long, default_value_t = 128)]
    prompt_tokens: usize,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 48)]
    max_tokens: usize,
    /// Ids that end an answer. They are never sampled, so that all answers have equally many tokens.
    #[arg(long, value_delimiter = ',')]
    stop_ids: Vec<u32>,
    /// Prompts have ids from 3 to below this.
    #[arg(long)]
    vocab: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value = "target/bench/serving.json")]
    json: PathBuf,
}

#[derive(Debug, Clone, Serialize)]
struct Server {
    name: String,
    url: String,
}

impl Args {
    fn requests_per_stream(&self, streams: usize) -> usize {
        self.requests.div_ceil(streams).max(2)
    }

    /// Every request of a point has a prompt of its own; all servers get the same ones.
    fn prompt(&self, streams: usize, index: usize, turn: usize) -> Vec<u32> {
        let number = (streams * 100_000 + index * 1_000 + turn) as u64;
        let mut random = StdRng::seed_from_u64(self.seed ^ number);
        let ids = 0..self.prompt_tokens;
        ids.map(|_| random.random_range(3..self.vocab)).collect()
    }

    /// The same number of tokens as text.
    fn text(&self, words: &Words, ids: &[u32]) -> String {
        ids.iter().map(|&id| words.word(id)).collect()
    }
}

fn server(argument: &str) -> anyhow::Result<Server> {
    let (name, url) = argument.split_once('=').context("give NAME=URL")?;
    Ok(Server {
        name: name.to_owned(),
        url: url.trim_end_matches('/').to_owned(),
    })
}

/// How a server takes prompts.
#[derive(Debug, Clone, Copy)]
enum Prompts<'a> {
    Ids,
    Text(&'a Words),
}

/// One number of streams at one server.
#[derive(Debug, Serialize)]
struct Point {
    server: String,
    streams: usize,
    requests: usize,
    failed: usize,
    first_failure: Option<String>,
    /// Sampled tokens of all streams per second.
    tokens_per_s: f64,
    /// From the request to the first token, milliseconds.
    first_token_p50_ms: f64,
    first_token_p99_ms: f64,
    /// From the first token to the last, divided by the tokens between; milliseconds.
    per_token_p50_ms: f64,
    per_token_p99_ms: f64,
}

impl Point {
    fn print(&self) {
        println!(
            "| {} | {} | {:.0} | {:.0}, {:.0} | {:.2}, {:.2} | {} of {} |",
            self.server,
            self.streams,
            self.tokens_per_s,
            self.first_token_p50_ms,
            self.first_token_p99_ms,
            self.per_token_p50_ms,
            self.per_token_p99_ms,
            self.failed,
            self.requests,
        );
    }
}

#[derive(Debug, Serialize)]
struct Report {
    args: Args,
    points: Vec<Point>,
}

/// One answer.
struct Answer {
    first_token: Duration,
    all: Duration,
    tokens: u64,
}

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Value>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!(args.vocab > 3, "--vocab is {}; give the model's size", args.vocab);
    let mut points = Vec::new();
    println!("| server | streams | tokens/s | first token p50, p99, ms | per token p50, p99, ms | failed |");
    println!("|---|---|---|---|---|---|");
    ensure!(
        !args.server.is_empty() || !args.text_server.is_empty(),
        "give --server NAME=URL"
    );
    let words = args.tokenizer.as_deref().map(Words::read).transpose()?;
    let text_servers = args.text_server.iter().zip(words.iter().cycle());
    let servers = args.server.iter().map(|server| (server, Prompts::Ids));
    let servers = servers.chain(text_servers.map(|(server, words)| (server, Prompts::Text(words))));
    for (server, prompts) in servers {
        // what a server does at its first request only is not measured
        let _ = request(&args, server, prompts, &client()?, args.prompt(0, 0, 0)).await;
        for &streams in &args.streams {
            let point = measure(&args, server, prompts, streams).await?;
            point.print();
            points.push(point);
        }
    }
    if let Some(folder) = &args.kernel {
        let kernel = Kernel::read(folder, args.threads)?;
        for &streams in &args.streams {
            let point = measure_kernel(&args, &kernel, streams)?;
            point.print();
            points.push(point);
        }
    }
    if let Some(folder) = args.json.parent() {
        fs::create_dir_all(folder)?;
    }
    let path = args.json.clone();
    fs::write(&path, serde_json::to_vec_pretty(&Report { args, points })?)?;
    println!("\n{}", path.display());
    Ok(())
}

async fn measure(args: &Args, server: &Server, prompts: Prompts<'_>, streams: usize) -> anyhow::Result<Point> {
    let each = args.requests_per_stream(streams);
    let client = client()?;
    let began = Instant::now();
    let stream = |index: usize| {
        let client = client.clone();
        async move {
            let mut answers = Vec::with_capacity(each);
            for turn in 0..each {
                answers.push(request(args, server, prompts, &client, args.prompt(streams, index, turn)).await);
            }
            answers
        }
    };
    let answers: Vec<_> = futures::future::join_all((0..streams).map(stream)).await;
    let seconds = began.elapsed().as_secs_f64();
    let mut first_tokens = Histogram::<u64>::new(3)?;
    let mut per_token = Histogram::<u64>::new(3)?;
    let (mut tokens, mut failed, mut first_failure) = (0, 0, None);
    for answer in answers.into_iter().flatten() {
        match answer {
            Ok(answer) => {
                tokens += answer.tokens;
                first_tokens.record(answer.first_token.as_micros() as u64)?;
                if answer.tokens > 1 {
                    let rest = answer.all.saturating_sub(answer.first_token);
                    per_token.record(rest.as_micros() as u64 / (answer.tokens - 1))?;
                }
            }
            Err(error) => {
                failed += 1;
                first_failure.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
    Ok(Point {
        server: server.name.clone(),
        streams,
        requests: streams * each,
        failed,
        first_failure,
        tokens_per_s: tokens as f64 / seconds,
        first_token_p50_ms: ms(&first_tokens, 0.5),
        first_token_p99_ms: ms(&first_tokens, 0.99),
        per_token_p50_ms: ms(&per_token, 0.5),
        per_token_p99_ms: ms(&per_token, 0.99),
    })
}

/// The kernels alone: as many sequences at a time as there are streams.
fn measure_kernel(args: &Args, kernel: &Kernel, streams: usize) -> anyhow::Result<Point> {
    let mut backend = kernel.stage(streams, args.prompt_tokens + args.max_tokens)?;
    let batches = args.requests_per_stream(streams);
    let (mut first_tokens, mut per_token) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    let mut seconds = 0.0;
    for turn in 0..batches {
        let prompts: Vec<Vec<u32>> = (0..streams).map(|index| args.prompt(streams, index, turn)).collect();
        let batch = kernel::run(&mut backend, &prompts, args.max_tokens)?;
        seconds += batch.all.as_secs_f64();
        let rest = batch.all.saturating_sub(batch.prompts).as_micros() as u64;
        first_tokens.record(batch.prompts.as_micros() as u64)?;
        per_token.record(rest / (args.max_tokens as u64 - 1).max(1))?;
    }
    let tokens = batches * streams * args.max_tokens;
    Ok(Point {
        server: "our kernels alone".into(),
        streams,
        requests: batches * streams,
        failed: 0,
        first_failure: None,
        tokens_per_s: tokens as f64 / seconds,
        first_token_p50_ms: ms(&first_tokens, 0.5),
        first_token_p99_ms: ms(&first_tokens, 0.99),
        per_token_p50_ms: ms(&per_token, 0.5),
        per_token_p99_ms: ms(&per_token, 0.99),
    })
}

/// Of a histogram of microseconds.
fn ms(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1e3
}

/// Each request has a connection of its own: llama.cpp's server closes them after an answer.
fn client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder().pool_max_idle_per_host(0).build()
}

/// Sends one prompt and reads its answer.
async fn request(
    args: &Args,
    server: &Server,
    prompts: Prompts<'_>,
    client: &reqwest::Client,
    prompt: Vec<u32>,
) -> anyhow::Result<Answer> {
    // llama.cpp and transformers sample from a part of the distribution unless told otherwise
    let mut body = json!({
        "model": args.model, "max_tokens": args.max_tokens, "temperature": 1.0, "top_p": 1.0, "stream": true,
    });
    match prompts {
        Prompts::Ids => {
            body["prompt"] = json!(prompt);
            body["top_k"] = json!(0);
            body["min_p"] = json!(0.0);
            body["stream_options"] = json!({"include_usage": true});
            if !args.stop_ids.is_empty() {
                body["logit_bias"] = args.stop_ids.iter().map(|id| (id.to_string(), json!(-100))).collect();
            }
        }
        Prompts::Text(words) => {
            body["prompt"] = json!(args.text(words, &prompt));
            let suppress = json!({
                "suppress_tokens": args.stop_ids, "do_sample": true, "max_new_tokens": args.max_tokens,
                "top_k": 0, "top_p": 1.0,
            });
            body["generation_config"] = json!(suppress.to_string());
        }
    }
    let mut sent = client.post(format!("{}/v1/completions", server.url)).json(&body);
    if let Some(key) = &args.api_key {
        sent = sent.bearer_auth(key);
    }
    let began = Instant::now();
    let response = sent.send().await?;
    let status = response.status();
    if !status.is_success() {
        bail!("{status}: {}", response.text().await?);
    }
    let (mut first_token, mut last_token) = (None, Duration::ZERO);
    let (mut chunks, mut usage) = (0, None);
    events::read(response, |chunk: Chunk| {
        if let Some(error) = chunk.error {
            bail!("an error in the stream: {error}");
        }
        if let Some(all) = chunk.usage {
            ensure!(
                all.prompt_tokens == prompt.len() as u64,
                "the server read {} prompt tokens instead of {}",
                all.prompt_tokens,
                prompt.len()
            );
            usage = Some(all.completion_tokens);
        }
        if !chunk.choices.is_empty() {
            chunks += 1;
            last_token = began.elapsed();
            first_token.get_or_insert(last_token);
        }
        Ok(())
    })
    .await?;
    Ok(Answer {
        first_token: first_token.context("the answer has no token")?,
        all: last_token,
        tokens: usage.unwrap_or(chunks),
    })
}
