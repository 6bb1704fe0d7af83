//! `make chaos NAME=engines`: kills the gateway, a vLLM server and what updates it (the gateway, or
//! `springtide follow`), under streaming load, while versions change. Then it compares what callers
//! were told with the log. Our exact model scores every logged token, and what broken answers showed.
//!
//! | module | |
//! |---|---|
//! | `tap` | sees what passes to an engine |
//! | `callers` | the load |
//! | `faults` | the kills |
//! | `audit` | callers, log and exact model |

mod audit;
mod callers;
mod faults;
mod tap;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use audit::{Logged, Scored};
use bench::quantiles::Quantiles;
use bench::versions::Versions;
use bench::vllm::Vllm;
use bench::world::{POLICY, World, publish};
use callers::{Attempt, Callers, End};
use clap::Parser;
use faults::{Fault, Faults, Publishing};
use serde::Serialize;
use tap::{Place, Step};
use tokio::sync::{broadcast, mpsc};
use uuid::Uuid;

/// For ingest to store what was logged.
const STORED_MAX: Duration = Duration::from_secs(120);
/// As `tools/vllm-server.sh` has it.
const ENGINE_SLOTS: usize = 16;

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
    /// A Hugging Face folder: the first version. Later ones are made from it.
    #[arg(long)]
    model: PathBuf,
    /// Of each kind of fault.
    #[arg(long, default_value_t = 50)]
    kills: usize,
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Fault::Gateway, Fault::Updater, Fault::Engine, Fault::Follower])]
    faults: Vec<Fault>,
    /// vLLM servers: 3 GB of memory each. One is killed while the others serve.
    #[arg(long, default_value_t = 2)]
    engines: usize,
    /// Requests at a time.
    #[arg(long, default_value_t = 8)]
    streams: usize,
    #[arg(long, default_value_t = 32)]
    prompt_tokens: usize,
    #[arg(long, default_value_t = 48)]
    max_tokens: usize,
    /// Between two versions.
    #[arg(long, default_value_t = 4000)]
    version_every_ms: u64,
    /// Largest difference from the exact log-probability of a token, in nats.
    #[arg(long, default_value_t = 1e-3)]
    error_max: f32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, default_value = "target/bench/chaos-engines.json")]
    json: PathBuf,
}

#[derive(Debug, Serialize)]
struct Report {
    settings: Args,
    /// The process that sampled the tokens.
    sampled_by: &'static str,
    seconds: f64,
    versions_published: usize,
    publications_failed: Vec<String>,
    phases: Vec<Phase>,
    /// Starts of vLLM servers, the first ones included.
    engine_start_ms: Quantiles,
    /// What passed to all engines.
    at_engines: BTreeMap<Step, u64>,
    /// Requests that reached an engine after a change or a restart and before a probe.
    unproven_requests: u64,
    logged: Logged,
    scored: Scored,
    /// What callers saw of answers that broke.
    cut_scored: Scored,
}

/// One kind of fault.
#[derive(Debug, Default, Serialize)]
struct Phase {
    fault: String,
    kills: usize,
    /// Kills by the last command of the change that was going on.
    killed_after: BTreeMap<String, usize>,
    /// Answers that had begun and not ended at the moments of the kills, all together.
    open_streams: usize,
    requests: usize,
    whole: usize,
    /// Broke after the first token.
    cut: usize,
    /// Failed before the first token; the callers tried again.
    failed: BTreeMap<String, usize>,
    /// From a kill until the next answer ended.
    next_answer_ms: Option<Quantiles>,
    first_token_ms: Option<Quantiles>,
    /// The gateway's own counters, where it was not killed itself.
    gateway: BTreeMap<String, f64>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!(
        args.engines >= 2,
        "--engines is {}; one must serve while another is killed",
        args.engines
    );
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(run(args))?;
    let json = serde_json::to_string_pretty(&report)?;
    if let Some(folder) = report.settings.json.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&report.settings.json, json)?;
    report.print();
    report.check()
}

async fn run(args: Args) -> anyhow::Result<Report> {
    let began = Instant::now();
    let versions = Arc::new(Versions::new(&args.model, args.seed)?);
    let (passed, _) = broadcast::channel(1024);
    let mut places = Vec::new();
    for engine in 0..args.engines {
        places.push(Place::new(engine, passed.clone()).await?);
    }
    let world = World::start(&args.springtide, ENGINE_SLOTS).await?;
    let publisher = world.publisher()?;
    let first = publish(&publisher, &versions, 1, None).await?;

    let vllm = Vllm::new(&args.vllm_script, &args.vllm, &args.model)?;
    let callers = Callers::new(
        format!("http://{}", world.address),
        format!("{POLICY}@learner"),
        i32::try_from(versions.vocab())?,
        args.prompt_tokens,
        args.max_tokens,
    );
    let mut faults = Faults::start(&world, places, vllm, callers.clone(), passed, args.seed).await?;
    let (sender, mut receiver) = mpsc::unbounded_channel();
    for stream in 0..args.streams {
        let seed = args.seed * 1000 + stream as u64;
        tokio::spawn(callers.clone().run(stream, seed, sender.clone()));
    }
    drop(sender);
    let collecting = tokio::spawn(async move {
        let mut attempts = Vec::new();
        while let Some(attempt) = receiver.recv().await {
            attempts.push(attempt);
        }
        attempts
    });
    faults.wait_for_answer().await?;
    let publishing = Publishing::start(
        publisher,
        versions.clone(),
        callers.clone(),
        first,
        args.version_every_ms,
    );

    let mut phases = Vec::new();
    for (index, &fault) in args.faults.iter().enumerate() {
        callers.enter(index);
        let outcome = faults.inject(fault, args.kills).await;
        if outcome.is_err() {
            world.keep_logs(&args.json.with_extension("logs"))?;
        }
        phases.push(outcome?);
        println!(
            "{fault:?}: {} kills after {:.0} s",
            args.kills,
            began.elapsed().as_secs_f64()
        );
    }
    let (numbers, publications_failed) = publishing.stop().await?;
    callers.stop();
    let attempts = collecting.await?;
    for attempt in &attempts {
        let phase = phases.get_mut(attempt.phase).context("a phase")?;
        count(phase, attempt);
    }
    for (index, phase) in phases.iter_mut().enumerate() {
        let of_phase = attempts.iter().filter(|attempt| attempt.phase == index);
        phase.first_token_ms = Some(Quantiles::of(of_phase.filter_map(|attempt| attempt.first_token))?);
    }

    let rows = stored_rows(&world, &attempts).await?;
    let logged = audit::compare(&attempts, &rows);
    let numbers_of = numbers.clone();
    let error_max = args.error_max;
    let scoring = tokio::task::spawn_blocking(move || {
        let scored = audit::score(&versions, &numbers_of, &rows, error_max)?;
        anyhow::Ok((scored, audit::score_cut(&versions, &attempts, error_max)?))
    });
    let (scored, cut_scored) = scoring.await??;
    world.keep_logs(&args.json.with_extension("logs"))?;
    let engines = faults.stop()?;
    world.stop().await?;
    Ok(Report {
        sampled_by: "vLLM",
        seconds: began.elapsed().as_secs_f64(),
        versions_published: numbers.len(),
        publications_failed,
        phases,
        engine_start_ms: Quantiles::of(engines.starts.into_iter())?,
        at_engines: engines.steps,
        unproven_requests: engines.unproven_requests,
        logged,
        scored,
        cut_scored,
        settings: args,
    })
}

fn count(phase: &mut Phase, attempt: &Attempt) {
    phase.requests += 1;
    match &attempt.end {
        End::Whole { .. } => phase.whole += 1,
        End::Cut => phase.cut += 1,
        End::Failed(kind) => *phase.failed.entry(kind.clone()).or_default() += 1,
    }
}

/// What ingest has stored, once it has all that was promised, or after [`STORED_MAX`].
async fn stored_rows(world: &World, attempts: &[Attempt]) -> anyhow::Result<Vec<audit::Row>> {
    let promised: Vec<Uuid> = attempts
        .iter()
        .filter_map(|attempt| match attempt.end {
            End::Whole { generation, .. } => Some(generation),
            End::Cut | End::Failed(_) => None,
        })
        .collect();
    let waiting = Instant::now();
    while audit::stored(&world.room.pool, &promised).await? < promised.len() && waiting.elapsed() < STORED_MAX {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    audit::rows(&world.room.pool).await
}

impl Report {
    fn print(&self) {
        println!(
            "\n| | {} |",
            self.phases
                .iter()
                .map(|phase| phase.fault.as_str())
                .collect::<Vec<_>>()
                .join(" | ")
        );
        println!("|---|{}", "---|".repeat(self.phases.len()));
        let line = |name: &str, value: &dyn Fn(&Phase) -> String| {
            let values: Vec<String> = self.phases.iter().map(value).collect();
            println!("| {name} | {} |", values.join(" | "));
        };
        line("kills", &|phase| phase.kills.to_string());
        line("answers that were going on at the kills", &|phase| {
            phase.open_streams.to_string()
        });
        line("requests", &|phase| phase.requests.to_string());
        line("answered whole", &|phase| phase.whole.to_string());
        line("cut after the first token", &|phase| phase.cut.to_string());
        line("failed before it, tried again", &|phase| {
            phase.failed.values().sum::<usize>().to_string()
        });
        line("from the kill to the next answer, ms: p50, max", &|phase| {
            phase
                .next_answer_ms
                .as_ref()
                .map_or(String::new(), |ms| format!("{:.0}, {:.0}", ms.p50, ms.max))
        });
        let Logged {
            generations,
            answered_missing,
            answered_different,
            twice,
            cut_absent,
            cut_aborted,
            cut_whole,
            ..
        } = &self.logged;
        println!(
            "\n{generations} generations in the log; answered and missing {answered_missing}, different \
             {answered_different}, twice {twice}; of the cut ones {cut_absent} absent, {cut_aborted} aborted, \
             {cut_whole} whole"
        );
        for (what, scored) in [("logged", &self.scored), ("seen of broken answers", &self.cut_scored)] {
            let Scored {
                versions,
                tokens,
                tokens_wrong,
                largest_difference,
            } = scored;
            println!(
                "{what}: {tokens} tokens of {versions} versions scored, {tokens_wrong} wrong, largest difference \
                 {largest_difference:.1e} nats"
            );
        }
        println!(
            "{} requests before a probe; {} versions published, {:.0} s\n{}",
            self.unproven_requests,
            self.versions_published,
            self.seconds,
            self.settings.json.display()
        );
    }

    /// Fails if something was lost, wrong or unproven.
    fn check(&self) -> anyhow::Result<()> {
        let Logged {
            answered_missing,
            answered_different,
            twice,
            cut_different,
            ..
        } = self.logged;
        ensure!(
            answered_missing + answered_different + twice + cut_different == 0,
            "callers and log disagree: {:?}",
            self.logged
        );
        ensure!(
            self.scored.tokens > 0 && self.scored.tokens_wrong + self.cut_scored.tokens_wrong == 0,
            "wrong tokens: {:?} in the log, {:?} in broken answers",
            self.scored,
            self.cut_scored
        );
        ensure!(
            self.unproven_requests == 0,
            "{} requests came before a probe",
            self.unproven_requests
        );
        Ok(())
    }
}
