//! `make bench NAME=mismatch`: what a policy learns when an engine with other arithmetic samples for it,
//! with and without corrections.
//!
//! Each run starts from the same base. In every step the engine gets the newest version and answers
//! the demo's users at as many pauses as a cohort has; their verdicts are the rewards, and the
//! learner of `springtide train` makes the next version from the ids and log-probabilities that the
//! engine gave. There is no log and no database in between, so no answer is stale. At the end our own
//! engine answers held-out users with the last version, the same pauses with the same seeds in every
//! run.

mod engines;
mod results;
mod train;
mod users;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::quant::Spec;
use clap::Parser;
use engines::{Exact, Remote, Sampler};
use results::{Results, Run};
use runs::settings::Correction;
use serde::Serialize;
use train::Training;
use users::Users;

/// Parameters of a measurement. Their defaults were written down before the first reported run.
#[derive(Debug, Clone, Parser, Serialize)]
pub struct Args {
    /// A Hugging Face folder: the base.
    #[arg(long)]
    model: PathBuf,
    /// A running vLLM server and what it computes in, as `NAME=URL`; may be repeated.
    #[arg(long)]
    vllm: Vec<String>,
    /// A quantized copy and the running vLLM server that serves it, as `SPEC=URL`, or `SPEC=ours` for our engine; may be
    /// repeated.
    #[arg(long)]
    quantized: Vec<String>,
    /// Runs of each kind, with seeds 1, 2, …
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    #[arg(long, default_value_t = 24)]
    steps: u32,
    /// Pauses of one step.
    #[arg(long, default_value_t = 32)]
    cohort: usize,
    /// Characters of a prompt.
    #[arg(long, default_value_t = 200)]
    context_chars: usize,
    #[arg(long, default_value_t = 3e-4)]
    learning_rate: f64,
    /// Pauses of held-out users at the end of each run.
    #[arg(long, default_value_t = 1024)]
    held_out: usize,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    #[arg(long, default_value = "target/bench/mismatch.json")]
    json: PathBuf,
}

/// What is compared on an engine.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    label: &'static str,
    correction: Correction,
    /// Whether samples are left out.
    quarantines: bool,
    /// Whether the trainer computes with the values of the copy that is served.
    rounds: bool,
}

impl Kind {
    const fn new(label: &'static str, correction: Correction, quarantines: bool, rounds: bool) -> Self {
        Kind {
            label,
            correction,
            quarantines,
            rounds,
        }
    }
}

const NONE: Kind = Kind::new("none", Correction::None, false, false);
const TIS: Kind = Kind::new("tis 2", Correction::Tis { cap: 2.0 }, false, false);
const KINDS: [Kind; 3] = [
    NONE,
    TIS,
    Kind::new("tis 2, as shipped", Correction::Tis { cap: 2.0 }, true, false),
];
/// Of a fleet that serves a quantized copy: the trainer computes with the version's own weights, without and with a
/// correction, or with the copy's values.
const QUANTIZED: [Kind; 3] = [NONE, TIS, Kind::new("the copy's values", Correction::None, false, true)];
/// How many of them an engine gets whose log-probabilities differ by so many nats in the median.
fn kinds(difference_p50: f64) -> usize {
    match difference_p50 {
        ..1e-4 => 1,
        ..1e-2 => 2,
        _ => KINDS.len(),
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!(
        !args.vllm.is_empty() || !args.quantized.is_empty(),
        "give --vllm NAME=http://HOST:PORT or --quantized SPEC=http://HOST:PORT"
    );
    let runtime = tokio::runtime::Runtime::new()?;
    let results = runtime.block_on(measure(args))?;
    println!("{}", results.table());
    let json = serde_json::to_string_pretty(&results)?;
    if let Some(folder) = results.settings.json.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&results.settings.json, json)?;
    Ok(())
}

async fn measure(args: Args) -> anyhow::Result<Results> {
    let base = Arc::new(Checkpoint::read_dir(&args.model).with_context(|| format!("read {}", args.model.display()))?);
    let users = Users::new(&base, args.context_chars)?;
    let exact = Exact::start(args.threads)?;
    let training = Training {
        args: &args,
        users: &users,
        base: &base,
        exact: &exact,
    };
    let mut results = Results {
        base: training.held_out(&base, None, 0).await?,
        settings: args.clone(),
        runs: Vec::new(),
    };
    // versions never share a serial, so an engine cannot mistake one for another
    let mut serial = 1;
    for seed in 1..=args.seeds {
        let ours = Sampler::Exact(&exact, None);
        results.add(training.run(&ours, "ours", NONE, seed, &mut serial).await?);
    }
    for fleet in &args.quantized {
        let (spec, url) = fleet.split_once('=').context("--quantized is SPEC=URL")?;
        let spec: Spec = spec.parse()?;
        let remote = match url {
            "ours" => None,
            url => Some(Remote::connect(url, Some(spec)).await?),
        };
        let sampler = match &remote {
            None => Sampler::Exact(&exact, Some(spec)),
            Some(remote) => Sampler::Remote(remote, Some(spec)),
        };
        let name = sampler.engine().unwrap_or_default();
        for kind in QUANTIZED {
            for seed in 1..=args.seeds {
                results.add(training.run(&sampler, &name, kind, seed, &mut serial).await?);
            }
        }
        if let Some(remote) = remote {
            remote.stop().await;
        }
    }
    for server in &args.vllm {
        let (name, url) = server.split_once('=').context("--vllm is NAME=URL")?;
        let remote = Remote::connect(url, None).await?;
        let mut difference_p50 = 0.0;
        for (at, kind) in KINDS.into_iter().enumerate() {
            if at > 0 && at >= kinds(difference_p50) {
                break;
            }
            for seed in 1..=args.seeds {
                let vllm = Sampler::Remote(&remote, None);
                let run: Run = training.run(&vllm, name, kind, seed, &mut serial).await?;
                difference_p50 = run.difference_p50;
                results.add(run);
            }
        }
        remote.stop().await;
    }
    Ok(results)
}
