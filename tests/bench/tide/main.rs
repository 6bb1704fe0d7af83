//! `make bench NAME=tide`: how much of what production leaves rollouts use, and what that costs production.
//! Replicas answer a replayed trace, alone and beside rollouts that always have work, in turns: as
//! many `springtide serve` processes, or with `--vllm` one in front of as many vLLM servers.
//!
//! The arrivals and lengths are those of Azure's conversation trace of 2023 (CC-BY 4.0; Patel et al.,
//! "Splitwise", ISCA 2024). Its hour has no night, so it is thinned: at time x of the run, 0 to 1, a
//! request is kept with probability low + (1 − low) · sin²(πx). Then time is compressed to the run's
//! length, and lengths are divided.

mod load;
mod trace;

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use bench::process::Process;
use bench::versions::Versions;
use bench::vllm::Vllm;
use bench::world::{Fleet, World, publish};
use clap::Parser;
use load::Outcome;
use serde::Serialize;
use sqlx::Row;
use trace::Arrival;

/// Replicas report at least so often.
const REPORTED_AFTER: Duration = Duration::from_secs(12);
const READY_TRIES: usize = 240;

#[derive(Debug, Clone, Parser, Serialize)]
struct Args {
    #[arg(long)]
    springtide: PathBuf,
    /// A Hugging Face folder.
    #[arg(long, default_value = "demo/models/base")]
    model: PathBuf,
    /// vLLM's command, in an environment with our weight-transfer backend. Without it our own engine answers.
    #[arg(long)]
    vllm: Option<PathBuf>,
    /// Starts one vLLM server.
    #[arg(long, default_value = "tools/vllm-server.sh")]
    vllm_script: PathBuf,
    #[arg(long, default_value_t = 2)]
    replicas: usize,
    /// CSV of Azure's trace: TIMESTAMP, ContextTokens, GeneratedTokens.
    #[arg(long)]
    trace: PathBuf,
    /// Each runs production alone and beside rollouts, in an order that alternates.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// Length of one run.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Requests of production in one run, before the night takes some.
    #[arg(long, default_value_t = 600)]
    requests: usize,
    /// What is left of production at night.
    #[arg(long, default_value_t = 0.1)]
    low: f64,
    /// The trace's lengths are divided by this.
    #[arg(long, default_value_t = 8)]
    shorter: usize,
    /// Longest prompt and longest answer of production.
    #[arg(long, default_value_t = 128)]
    tokens_max: usize,
    /// Sequences that a replica samples together.
    #[arg(long, default_value_t = 8)]
    slots: usize,
    /// Of them, never lent.
    #[arg(long, default_value_t = 0)]
    floor: usize,
    #[arg(long, default_value_t = 96)]
    rollout_tokens: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value = "target/bench/tide.json")]
    json: PathBuf,
}

#[derive(Debug, Serialize)]
struct Report {
    settings: Args,
    /// One of each kind per pair, in their order.
    alone: Vec<Run>,
    beside: Vec<Run>,
    /// Slot-seconds of rollouts, of those that production alone left.
    idle_used: Vec<f64>,
    /// Milliseconds of production's p99 beside rollouts, less those of its pair alone.
    first_token_p99_added_ms: Vec<f64>,
    whole_p99_added_ms: Vec<f64>,
    decode_step_ms_alone: f64,
    /// Longest time until slots were free for production or a lower limit, in milliseconds.
    taking_back_ms_max: f64,
    rollouts_lost: usize,
    tokens_read_again: i64,
    tokens_thrown_away: i64,
}

#[derive(Debug, Serialize)]
struct Run {
    production: load::Felt,
    rollouts: load::Rollouts,
    used: Used,
}

/// What the replicas say that they did.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Used {
    production_slot_seconds: f64,
    rollout_slot_seconds: f64,
    rollout_tokens: i64,
    read_again: i64,
    thrown_away: i64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(measure(args))?;
    if let Some(folder) = report.settings.json.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&report.settings.json, serde_json::to_string_pretty(&report)?)?;
    print(&report);
    Ok(())
}

async fn measure(args: Args) -> anyhow::Result<Report> {
    ensure!(
        args.pairs > 0 && args.seconds > 0 && args.replicas > 0,
        "--pairs, --seconds and --replicas must be above 0"
    );
    let arrivals = trace::read(&args).context("read the trace")?;
    println!("{} requests of production in {} s", arrivals.len(), args.seconds);
    let world = World::start(&args.springtide, args.slots).await?;
    let versions = Versions::new(&args.model, args.seed)?;
    publish(&world.publisher()?, &versions, 1, None).await?;
    let (processes, urls) = start(&world, &args).await?;
    ready(&urls).await?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for pair in 0..args.pairs {
        for first in [true, false] {
            let with_rollouts = first == (pair % 2 == 1);
            let run = one(&world, &args, &urls, &arrivals, versions.vocab(), with_rollouts).await?;
            println!("{}", line(pair, with_rollouts, &run));
            if with_rollouts { &mut beside } else { &mut alone }.push(run);
        }
    }
    let taking_back = sqlx::query("select coalesce(max(taking_back_ms_max), 0) from tide_minute");
    let taking_back_ms_max = taking_back.fetch_one(&world.room.pool).await?.get(0);
    let step = sqlx::query(
        "select sum((alone ->> 'token_ms')::float8) / nullif(sum((alone ->> 'tokens')::float8), 0) from tide_minute",
    );
    let decode_step: Option<f64> = step.fetch_one(&world.room.pool).await?.get(0);
    for mut process in processes {
        process.kill()?;
    }
    world.stop().await?;
    let all = (args.slots * args.replicas) as f64 * args.seconds as f64;
    let pairs = || alone.iter().zip(&beside);
    let sum = |of: fn(&Used) -> i64| beside.iter().map(|run| of(&run.used)).sum();
    Ok(Report {
        idle_used: pairs()
            .map(|(alone, beside)| beside.used.rollout_slot_seconds / (all - alone.used.production_slot_seconds))
            .collect(),
        first_token_p99_added_ms: pairs()
            .map(|(alone, beside)| beside.production.first_token_ms.p99 - alone.production.first_token_ms.p99)
            .collect(),
        whole_p99_added_ms: pairs()
            .map(|(alone, beside)| beside.production.whole_ms.p99 - alone.production.whole_ms.p99)
            .collect(),
        decode_step_ms_alone: decode_step.unwrap_or(0.0),
        taking_back_ms_max,
        rollouts_lost: beside.iter().map(|run| run.rollouts.lost).sum(),
        tokens_read_again: sum(|used| used.read_again),
        tokens_thrown_away: sum(|used| used.thrown_away),
        settings: args,
        alone,
        beside,
    })
}

/// The replicas, and where they are asked: all of them in turns, or what stands in front of them.
async fn start(world: &World, args: &Args) -> anyhow::Result<(Vec<Process>, Vec<String>)> {
    // a run is shorter than the five minutes of a forecast, and knows no other day
    let settings = [
        (
            "SPRINGTIDE__SERVE__SLOTS_RESERVED_FOR_PRODUCTION",
            args.floor.to_string(),
        ),
        ("SPRINGTIDE__SERVE__CHOICES_MAX", "1".to_owned()),
        ("SPRINGTIDE__SERVE__TIDE__FORECAST_WEIGHT", "0.0".to_owned()),
        ("SPRINGTIDE__SERVE__TIDE__RELEASE_SLOTS_PER_S", "4.0".to_owned()),
        ("SPRINGTIDE__SERVE__TIDE__COOL_DOWN_MS", "1000".to_owned()),
    ];
    let vllm = args
        .vllm
        .as_ref()
        .map(|program| Vllm::new(&args.vllm_script, program, &args.model))
        .transpose()?;
    let (mut processes, mut addresses) = (Vec::new(), Vec::new());
    for number in 0..args.replicas {
        let [port] = edge::bind::free_ports()?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        processes.push(match &vllm {
            None => world.replica(number, address, &settings).await?,
            Some(vllm) => {
                let log = world.log(&format!("vllm-{number}"));
                let slots = args.slots.to_string();
                vllm.start(port, &["--max-num-seqs", &slots], &log).await?.0
            }
        });
        addresses.push(address);
    }
    if vllm.is_some() {
        processes.push(world.gateway(Fleet::Engines(&addresses), &settings).await?);
        addresses = vec![world.address];
    }
    let urls = addresses.iter().map(|address| format!("http://{address}")).collect();
    Ok((processes, urls))
}

async fn ready(urls: &[String]) -> anyhow::Result<()> {
    for url in urls {
        let mut tries = 0;
        while !reqwest::get(format!("{url}/health"))
            .await
            .is_ok_and(|answer| answer.status() == 200)
        {
            tries += 1;
            ensure!(tries < READY_TRIES, "no version serves at {url}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
    Ok(())
}

/// One run, and what the replicas report of it.
async fn one(
    world: &World,
    args: &Args,
    urls: &[String],
    arrivals: &[Arrival],
    vocab: u32,
    with_rollouts: bool,
) -> anyhow::Result<Run> {
    tokio::time::sleep(REPORTED_AFTER).await;
    let before = used(world).await?;
    let Outcome { production, rollouts } = load::run(args, urls, arrivals, vocab, with_rollouts).await?;
    tokio::time::sleep(REPORTED_AFTER).await;
    let after = used(world).await?;
    Ok(Run {
        production,
        rollouts,
        used: Used {
            production_slot_seconds: after.production_slot_seconds - before.production_slot_seconds,
            rollout_slot_seconds: after.rollout_slot_seconds - before.rollout_slot_seconds,
            rollout_tokens: after.rollout_tokens - before.rollout_tokens,
            read_again: after.read_again - before.read_again,
            thrown_away: after.thrown_away - before.thrown_away,
        },
    })
}

async fn used(world: &World) -> anyhow::Result<Used> {
    let row = sqlx::query(
        "select coalesce(sum(slot_seconds) filter (where work = 'production'), 0),
                coalesce(sum(slot_seconds) filter (where work = 'rollout'), 0),
                coalesce(sum(sampled) filter (where work = 'rollout'), 0)::bigint,
                coalesce(sum(read_again), 0)::bigint, coalesce(sum(thrown_away), 0)::bigint from engine_use",
    );
    let row = row.fetch_one(&world.room.pool).await?;
    Ok(Used {
        production_slot_seconds: row.get(0),
        rollout_slot_seconds: row.get(1),
        rollout_tokens: row.get(2),
        read_again: row.get(3),
        thrown_away: row.get(4),
    })
}

fn line(pair: usize, with_rollouts: bool, run: &Run) -> String {
    format!(
        "pair {pair} {}: {} answers, first token p50 {:.1} p99 {:.1} ms, whole p50 {:.0} p99 {:.0} ms; {} rollouts, \
         {:.0} of their slot-seconds beside {:.0} of production",
        if with_rollouts { "beside rollouts" } else { "alone" },
        run.production.answers,
        run.production.first_token_ms.p50,
        run.production.first_token_ms.p99,
        run.production.whole_ms.p50,
        run.production.whole_ms.p99,
        run.rollouts.finished,
        run.used.rollout_slot_seconds,
        run.used.production_slot_seconds,
    )
}

fn print(report: &Report) {
    let median = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let range = |values: &[f64], scale: f64| {
        let (low, high) = values
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(*value), high.max(*value))
            });
        format!(
            "{:.1} ({:.1} to {:.1})",
            median(values) * scale,
            low * scale,
            high * scale
        )
    };
    let p99 = |of: fn(&Run) -> f64| median(&report.alone.iter().map(of).collect::<Vec<_>>());
    let allowed = |alone: f64| report.decode_step_ms_alone.max(alone * 0.05);
    let first = p99(|run| run.production.first_token_ms.p99);
    let whole = p99(|run| run.production.whole_ms.p99);
    println!("\n| median of the pairs (lowest to highest) | measured | target |\n|---|---|---|");
    println!(
        "| idle slot-seconds used, % | {} | ≥ 90 |",
        range(&report.idle_used, 100.0)
    );
    println!(
        "| p99 to the first token, added, ms (alone {first:.1}) | {} | ≤ {:.1} |",
        range(&report.first_token_p99_added_ms, 1.0),
        allowed(first)
    );
    println!(
        "| p99 of the whole answer, added, ms (alone {whole:.1}) | {} | ≤ {:.1} |",
        range(&report.whole_p99_added_ms, 1.0),
        allowed(whole)
    );
    println!(
        "| longest time to slots back, ms | {:.1} | |",
        report.taking_back_ms_max
    );
    println!("| rollouts lost | {} | 0 |", report.rollouts_lost);
    println!(
        "| tokens read again, thrown away | {}, {} | |",
        report.tokens_read_again, report.tokens_thrown_away
    );
}
