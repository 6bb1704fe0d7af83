//! `springtide`: production feedback becomes new weights. This file is the table of contents; each line below leads to the
//! module that does the work.

#[cfg(feature = "torch")]
mod corpus;
#[cfg(feature = "torch")]
mod demo;

mod client;
mod config;
mod console;
mod control;
mod dlq_cli;
mod key_cli;
mod moment;
mod policy_cli;
mod release_cli;
mod reward_cli;
mod roles;
mod run_cli;
mod stack;
mod telemetry;
#[cfg(feature = "torch")]
mod train;
mod up;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
#[cfg(feature = "torch")]
use anyhow::bail;
use clap::{Parser, Subcommand};
use config::{Config, LogFormat};
use nix::sys::signal::Signal;
use roles::{Base, database};
use telemetry::Telemetry;
use tokio::runtime::Runtime;
#[cfg(feature = "torch")]
use tokio::signal::unix::{SignalKind, signal};

/// Which crates the build has fetched.
#[cfg(feature = "torch")]
pub const CARGO_LOCK: &str = include_str!("../Cargo.lock");

/// What blocking work may still take once a role is done, before its process ends.
const LAST_WORK: Duration = Duration::from_secs(2);

#[derive(Parser)]
#[command(version, about = "Production feedback becomes new weights.")]
struct Cli {
    /// Configuration file; springtide.toml here if there is one.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How log lines look, over telemetry.format.
    #[arg(long, global = true, value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// End when this process, the one that started this, ends.
    #[arg(long, hide = true, value_name = "PID")]
    die_with: Option<i32>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run Postgres, Kafka and all roles, until Ctrl-C.
    Up(up::Args),
    /// Role: answer requests, follow new versions.
    #[cfg(feature = "torch")]
    Serve,
    /// Role: take events in, close horizons. Or collect them for an ingest elsewhere: `--spool DIR --upstream URL`.
    Ingest(roles::ingest::Args),
    /// Role: pass versions on in a cluster or region: each object crosses the long way once.
    Relay(roles::relay::Args),
    /// Role: one front for runs, versions, releases and the fleet.
    Control,
    /// Role: execute training runs. Or train a model here and now: `springtide train sft`.
    #[cfg(feature = "torch")]
    Train(train::Args),
    /// The code that the demo's model learns from.
    #[cfg(feature = "torch")]
    #[command(subcommand)]
    Corpus(CorpusCommand),
    /// Replay developers at work against a running stack.
    #[cfg(feature = "torch")]
    Demo(demo::Command),
    /// Which version serves whom, and how to change that.
    #[command(subcommand)]
    Release(release_cli::Command),
    /// Training runs.
    #[command(subcommand)]
    Run(run_cli::Command),
    /// Versions: look, check, keep, publish, pull.
    #[command(subcommand)]
    Policy(policy_cli::Command),
    /// Dead letters: what could not be stored, why, and how to put it back.
    #[command(subcommand)]
    Dlq(dlq_cli::Command),
    /// Rewards: how surfaces score, and what another definition makes of what was said.
    #[command(subcommand)]
    Reward(reward_cli::Command),
    /// API keys.
    #[command(subcommand)]
    Key(key_cli::Command),
    /// The configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Postgres and Kafka alone.
    #[command(subcommand)]
    Stack(stack::cli::Command),
    /// Bring the database's schema up to date.
    Migrate,
}

#[cfg(feature = "torch")]
#[derive(Subcommand)]
enum CorpusCommand {
    /// Make a tokenizer and training windows from the crates that this project's build has fetched.
    Build(corpus::BuildArgs),
    /// Measure how often a model writes what a developer really typed.
    Evaluate(corpus::EvaluateArgs),
}

#[derive(Clone, Copy, Subcommand)]
enum ConfigCommand {
    /// Refuse contradictions, saying what to do about them.
    Check,
    /// Print what is in force, without secrets.
    Show,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    run(cli).unwrap_or_else(|error| {
        eprintln!("springtide: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    if let Some(parent) = cli.die_with {
        stack::exec::die_with(parent, Signal::SIGTERM)?;
    }
    // Before everything else, for it must work wherever it is started: another user, another folder.
    if let Command::Stack(stack::cli::Command::Exec(args)) = &cli.command {
        match stack::exec::run(args)? {}
    }
    let load = match &cli.command {
        Command::Key(_) | Command::Migrate => Config::load_to_make_keys,
        // A collector calls none of the roles that need keys, and asks for a key of its own.
        Command::Ingest(args) if args.spool.is_some() => Config::load_to_make_keys,
        Command::Relay(_) => Config::load_to_make_keys,
        _ => Config::load,
    };
    let mut config = load(cli.config.as_deref())?;
    if let Some(format) = cli.log {
        config.telemetry.format = format;
    }
    dispatch(cli.command, cli.config, &config)
}

fn dispatch(command: Command, file: Option<PathBuf>, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up(args) => on_main_thread(up::run(args, config, file)),
        Command::Stack(command) => on_main_thread(stack::cli::run(command, config)),
        #[cfg(feature = "torch")]
        Command::Serve => role("serve", config, roles::serve::run),
        Command::Ingest(args) => match args.spool {
            None => role("ingest", config, roles::ingest::run),
            Some(folder) => process("collector", config, async |telemetry| {
                roles::ingest::collect(config, telemetry, &folder, args.upstream.as_deref()).await
            }),
        },
        Command::Relay(args) => process("relay", config, async |telemetry| {
            roles::relay::run(config, telemetry, &args).await
        }),
        Command::Control => role("control", config, roles::control::run),
        #[cfg(feature = "torch")]
        Command::Train(args) => match args.command {
            None => role("train", config, roles::train::run),
            Some(command) => train::run(&command),
        },
        #[cfg(feature = "torch")]
        Command::Corpus(CorpusCommand::Build(args)) => corpus::build(&args).map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "torch")]
        Command::Corpus(CorpusCommand::Evaluate(args)) => corpus::evaluate(&args).map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "torch")]
        Command::Demo(demo::Command { apart: Some(apart), .. }) => apart.run().map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "torch")]
        Command::Demo(demo::Command { replay, .. }) => command_line(unless_terminated(async {
            let pool = database::connect(config).await?;
            demo::run(replay, endpoints(config)?, pool).await
        })),
        Command::Release(command) => command_line(release_cli::run(command, config)),
        Command::Run(command) => command_line(run_cli::run(command, config)),
        Command::Policy(command) => command_exit(policy_cli::run(command, config)),
        Command::Dlq(command) => command_line(dlq_cli::run(command, config)),
        Command::Reward(command) => command_line(reward_cli::run(command, config)),
        Command::Key(command) => command_line(key_cli::run(command, config)),
        Command::Config(ConfigCommand::Check) => {
            println!("the configuration is in order");
            Ok(ExitCode::SUCCESS)
        }
        Command::Config(ConfigCommand::Show) => {
            print!("{}", toml::to_string(config).context("print the configuration")?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Migrate => command_line(async { database::migrate(&database::connect(config).await?).await }),
    }
}

/// A role: its work on all threads, until it is told to stop.
fn role<F>(name: &'static str, config: &Config, work: impl FnOnce(Base) -> F) -> anyhow::Result<ExitCode>
where
    F: Future<Output = anyhow::Result<()>>,
{
    process(name, config, async |telemetry| {
        Box::pin(work(Base::new(config, telemetry).await?)).await
    })
}

/// What tells about itself as roles do, with or without what they start from.
fn process(
    name: &'static str,
    config: &Config,
    work: impl AsyncFnOnce(&Telemetry) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    // Set up before the runtime and dropped after it: the trace exporter blocks.
    let telemetry = telemetry::init(name, &config.telemetry)?;
    let runtime = Runtime::new().context("start threads")?;
    let outcome = runtime.block_on(Box::pin(work(&telemetry)));
    runtime.shutdown_timeout(LAST_WORK);
    if let Err(error) = outcome {
        tracing::error!(error = format!("{error:#}"), "the role ended");
        return Ok(ExitCode::FAILURE);
    }
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// A command that a person waits for.
fn command_line(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    command_exit(async { work.await.map(|()| ExitCode::SUCCESS) })
}

/// A command whose answer is also in how it ends.
fn command_exit(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    telemetry::init_warnings()?;
    let runtime = Runtime::new().context("start threads")?;
    let outcome = runtime.block_on(Box::pin(work));
    runtime.shutdown_background();
    outcome
}

/// Drops the work on SIGTERM, so that a terminal which it has taken is given back.
#[cfg(feature = "torch")]
async fn unless_terminated(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = terminate.recv() => bail!("SIGTERM: ended before it was over"),
    }
}

/// Work that starts processes: all of it on this thread, because they end with the thread that started them.
fn on_main_thread(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    telemetry::init_warnings()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start runtime")?;
    runtime.block_on(Box::pin(work))
}

#[cfg(feature = "torch")]
fn endpoints(config: &Config) -> anyhow::Result<demo::Endpoints> {
    let surface = config
        .ingest
        .surface
        .iter()
        .find(|surface| surface.name == demo::SURFACE);
    let surface = surface.with_context(|| {
        format!(
            "the demo replays the surface {0:?}: add [[ingest.surface]] name = {0:?}",
            demo::SURFACE
        )
    })?;
    Ok(demo::Endpoints {
        serve: config.serve_url(),
        ingest: config.ingest_url(),
        control: config.control_url(),
        api_key: config.client.api_key.clone(),
        policy: config.policy.name.clone(),
        base: config.policy.base.clone(),
        store: config.store_url(),
        keys: config.keys_dir(),
        surface: surface.clone(),
        state_dir: config.state_dir.clone(),
    })
}
