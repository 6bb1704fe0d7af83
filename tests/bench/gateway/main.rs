//! `make bench NAME=gateway`: what the gateway adds to an engine's answers. The same requests go to the
//! engine directly and through `springtide serve`, in turns: at few streams to a real vLLM server,
//! at many to one that plays recorded tokens at a set pace.

mod load;
mod playback;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{bail, ensure};
use bench::process::Process;
use bench::quantiles::Quantiles;
use bench::versions::Versions;
use bench::vllm::Vllm;
use bench::world::{Fleet, World, publish};
use clap::Parser;
use load::{Answer, Outcome, Way};
use playback::Playback;
use serde::Serialize;

/// Different answers that are played in turns.
const RECORDINGS: usize = 32;
/// For the gateway to give the engine its version.
const READY_TRIES: usize = 240;

#[derive(Debug, Clone, Parser, Serialize)]
struct Args {
    #[arg(long)]
    springtide: PathBuf,
    /// vLLM's command, in an environment with our weight-transfer backend.
    #[arg(long)]
    vllm: PathBuf,
    /// Starts one vLLM server.
    #[arg(long, default_value = "tools/vllm-server.sh")]
    vllm_script: PathBuf,
    /// A Hugging Face folder.
    #[arg(long)]
    model: PathBuf,
    /// Requests at a time, to vLLM.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 32])]
    streams: Vec<usize>,
    /// Requests at a time, to the recorded tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [50, 200])]
    recorded_streams: Vec<usize>,
    /// Between two recorded tokens of a stream.
    #[arg(long, default_value_t = 50)]
    pace_ms: u64,
    /// Each measures both ways, in an order that alternates.
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Of one way in one round, at least; a stream sends at least two.
    #[arg(long, default_value_t = 64)]
    requests: usize,
    #[arg(long, default_value_t = 128)]
    prompt_tokens: usize,
    #[arg(long, default_value_t = 48)]
    max_tokens: usize,
    /// Ids that end an answer. They are never sampled, so that all answers have equally many tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 2, 3])]
    stop_ids: Vec<u32>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value = "target/bench/gateway.json")]
    json: PathBuf,
}

#[derive(Debug, Serialize)]
struct Report {
    settings: Args,
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    /// What the tokens come from.
    engine: &'static str,
    streams: usize,
    direct: Measured,
    gateway: Measured,
    /// The gateway's quantiles less those of the engine alone.
    added_first_token_ms: Added,
    added_per_token_ms: Added,
    added_whole_ms: Added,
    /// Of the gateway's process; without Postgres and the broker.
    gateway_cpu_seconds_per_1000_tokens: f64,
}

#[derive(Debug, Serialize)]
struct Measured {
    requests: usize,
    failures: Vec<String>,
    tokens_per_s: f64,
    first_token_ms: Quantiles,
    per_token_ms: Quantiles,
    whole_ms: Quantiles,
}

#[derive(Debug, Serialize)]
struct Added {
    p50: f64,
    p99: f64,
}

impl Added {
    fn of(direct: &Quantiles, gateway: &Quantiles) -> Self {
        Added {
            p50: gateway.p50 - direct.p50,
            p99: gateway.p99 - direct.p99,
        }
    }
}

impl Measured {
    fn of(outcome: Outcome) -> anyhow::Result<Self> {
        let Outcome {
            answers,
            failures,
            seconds,
        } = outcome;
        let tokens: usize = answers.iter().map(|answer| answer.tokens).sum();
        let quantiles = |of: fn(&Answer) -> Duration| Quantiles::of(answers.iter().map(of));
        Ok(Measured {
            requests: answers.len() + failures.len(),
            failures,
            tokens_per_s: tokens as f64 / seconds,
            first_token_ms: quantiles(|answer| answer.first_token)?,
            per_token_ms: quantiles(|answer| answer.per_token)?,
            whole_ms: quantiles(|answer| answer.whole)?,
        })
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(run(args))?;
    if let Some(folder) = report.settings.json.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&report.settings.json, serde_json::to_vec_pretty(&report)?)?;
    println!("\n{}", report.settings.json.display());
    let failures = report.points.iter().flat_map(|point| [&point.direct, &point.gateway]);
    let failures: usize = failures.map(|measured| measured.failures.len()).sum();
    ensure!(failures == 0, "{failures} requests failed; see the file");
    Ok(())
}

async fn run(args: Args) -> anyhow::Result<Report> {
    let versions = Versions::new(&args.model, args.seed)?;
    let most = args
        .streams
        .iter()
        .chain(&args.recorded_streams)
        .copied()
        .max()
        .unwrap_or(1);
    let [port] = edge::bind::free_ports()?;
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let world = World::start(&args.springtide, most).await?;
    publish(&world.publisher()?, &versions, 1, None).await?;
    let vllm = Vllm::new(&args.vllm_script, &args.vllm, &args.model)?;
    let slots = args.streams.iter().copied().max().unwrap_or(1).max(16).to_string();
    let (mut engine, _) = vllm
        .start(port, &["--max-num-seqs", &slots], &world.log("vllm"))
        .await?;
    println!(
        "| engine | streams | tokens/s: direct, gateway | first token p50, p99, ms: direct | added | per token: direct | \
         added | whole: direct | added | CPU s of 1000 tokens |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut points = Vec::new();
    let mut gateway = world.gateway(Fleet::Engines(&[address]), &[]).await?;
    for &streams in &args.streams {
        let engine = format!("http://{address}");
        points.push(point(&args, versions.vocab(), "vLLM", streams, &engine, &world, &gateway).await?);
    }
    gateway.kill()?;
    let pace = Duration::from_millis(args.pace_ms);
    let playback = Playback::start(format!("http://{address}"), pace, RECORDINGS).await?;
    let mut gateway = world.gateway(Fleet::Engines(&[playback]), &[]).await?;
    let played = format!("http://{playback}");
    ready(&args, versions.vocab(), &format!("http://{}", world.address)).await?;
    // one after the other, so that each event has one token; after the gateway has named the weights
    load::run(&args, versions.vocab(), Way::Direct, &played, 1, 0..RECORDINGS).await;
    for &streams in &args.recorded_streams {
        points.push(point(&args, versions.vocab(), "recorded", streams, &played, &world, &gateway).await?);
    }
    gateway.kill()?;
    engine.kill()?;
    world.stop().await?;
    Ok(Report { settings: args, points })
}

async fn point(
    args: &Args,
    vocab: u32,
    name: &'static str,
    streams: usize,
    engine: &str,
    world: &World,
    process: &Process,
) -> anyhow::Result<Point> {
    let gateway = format!("http://{}", world.address);
    ready(args, vocab, &gateway).await?;
    let turns = args.requests.div_ceil(streams).max(2);
    let (mut direct, mut through, mut cpu_seconds) = (Outcome::default(), Outcome::default(), 0.0);
    // what is done at a first request is not measured
    let _ = load::run(args, vocab, Way::Gateway, &gateway, streams, 0..1).await;
    let _ = load::run(args, vocab, Way::Direct, engine, streams, 0..1).await;
    for round in 0..args.rounds {
        let mut ways = [Way::Direct, Way::Gateway];
        if round % 2 == 1 {
            ways.reverse();
        }
        let turns = 1 + round * turns..1 + (round + 1) * turns;
        for way in ways {
            let (url, outcome) = match way {
                Way::Direct => (engine, &mut direct),
                Way::Gateway => (gateway.as_str(), &mut through),
            };
            let before = process.cpu_seconds();
            let Outcome {
                answers,
                failures,
                seconds,
            } = load::run(args, vocab, way, url, streams, turns.clone()).await;
            if way == Way::Gateway {
                cpu_seconds += process.cpu_seconds() - before;
            }
            outcome.answers.extend(answers);
            outcome.failures.extend(failures);
            outcome.seconds += seconds;
        }
    }
    let tokens: usize = through.answers.iter().map(|answer| answer.tokens).sum();
    let (direct, gateway) = (Measured::of(direct)?, Measured::of(through)?);
    let point = Point {
        engine: name,
        streams,
        added_first_token_ms: Added::of(&direct.first_token_ms, &gateway.first_token_ms),
        added_per_token_ms: Added::of(&direct.per_token_ms, &gateway.per_token_ms),
        added_whole_ms: Added::of(&direct.whole_ms, &gateway.whole_ms),
        gateway_cpu_seconds_per_1000_tokens: 1000.0 * cpu_seconds / tokens.max(1) as f64,
        direct,
        gateway,
    };
    point.print();
    Ok(point)
}

/// Waits until the gateway answers.
async fn ready(args: &Args, vocab: u32, gateway: &str) -> anyhow::Result<()> {
    let mut failures = Vec::new();
    for _ in 0..READY_TRIES {
        let outcome = load::run(args, vocab, Way::Gateway, gateway, 1, 0..1).await;
        if !outcome.answers.is_empty() {
            return Ok(());
        }
        failures = outcome.failures;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    bail!("the gateway does not answer: {failures:?}")
}

impl Point {
    fn print(&self) {
        let Point { direct, gateway, .. } = self;
        println!(
            "| {} | {} | {:.0}, {:.0} | {:.1}, {:.1} | {:+.1}, {:+.1} | {:.2}, {:.2} | {:+.2}, {:+.2} | {:.0}, {:.0} | \
             {:+.1}, {:+.1} | {:.3} |",
            self.engine,
            self.streams,
            direct.tokens_per_s,
            gateway.tokens_per_s,
            direct.first_token_ms.p50,
            direct.first_token_ms.p99,
            self.added_first_token_ms.p50,
            self.added_first_token_ms.p99,
            direct.per_token_ms.p50,
            direct.per_token_ms.p99,
            self.added_per_token_ms.p50,
            self.added_per_token_ms.p99,
            direct.whole_ms.p50,
            direct.whole_ms.p99,
            self.added_whole_ms.p50,
            self.added_whole_ms.p99,
            self.gateway_cpu_seconds_per_1000_tokens,
        );
    }
}
