//! The command line. One file or folder per command; each is a clap type with `run(self, &App)`.

pub(crate) mod audit;
mod canary;
mod config;
mod control;
mod control_client;
mod dataset;
mod demo;
mod dlq;
mod erase;
mod follow;
mod health;
mod help;
mod ingest;
mod key;
mod migrate;
pub(crate) mod output;
mod policy;
mod relay;
mod release;
mod reward;
mod run;
mod sampler;
pub(crate) mod secrets;
mod serve;
mod stack;
mod tenant;
mod tide;
pub mod train;
mod up;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use futures::future::BoxFuture;
use nix::sys::signal::Signal;
use tokio::runtime::{Builder, Runtime};

use crate::config::{Config, LogFormat, Part};
use crate::{private, stack as parts, telemetry};

/// How long blocking work may take after a role has ended, before the process exits.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Production feedback becomes new weights.
#[derive(clap::Parser)]
#[command(version = help::VERSION, help_template = help::template(), after_help = help::EXAMPLES)]
pub struct Cli {
    /// Configuration file [default: springtide.toml in the current folder, if it exists].
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Format of log lines; overrides telemetry.format.
    #[arg(long, global = true, value_name = "FORMAT")]
    log: Option<LogFormat>,
    /// End when this process, which must be the parent, ends.
    #[arg(long, hide = true, value_name = "PID")]
    die_with: Option<i32>,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Run Postgres, Kafka and all roles on this machine until Ctrl-C.
    ///
    /// Example: springtide --config demo/completion.toml up --demo --once -- --minutes 5
    Up(up::Args),
    /// Role: answer completion requests and follow new versions.
    Serve(serve::Args),
    /// Role: store events and close trajectories.
    ///
    /// With --spool it collects events and forwards them to a remote ingest role.
    ///
    /// Example: springtide ingest --spool /var/spool/springtide --upstream https://ingest.example
    Ingest(ingest::Args),
    /// Role: cache versions for a cluster or region.
    ///
    /// Each object crosses the link to the policy store once.
    ///
    /// Example: springtide relay --upstream s3://bucket/prefix
    Relay(relay::Args),
    /// Role: keep an engine that is not ours on the version of an alias.
    ///
    /// Example: springtide follow --engine vllm --engine-url unix:/run/vllm.sock
    Follow(follow::Args),
    /// Role: virtual machines in which rollouts run programs, forked from one snapshot.
    ///
    /// Example: make world-image && springtide world
    World(world::Args),
    /// Role: one API for runs, versions, releases and the fleet.
    Control(control::Args),
    /// Role: execute training runs. `train sft` trains a model here, without the stack.
    Train(train::Args),
    /// Build and check the training text of the demo's model.
    Corpus(demo::Corpus),
    /// Replay simulated developers against a running stack and report what was learned.
    Demo(demo::Args),
    /// Try settings of the trainer on simulated developers, without the stack.
    ///
    /// Example: springtide rehearse --development --seed 101
    Rehearse(demo::Rehearse),
    /// Show which version serves whom, and change it.
    #[command(subcommand)]
    Release(release::Command),
    /// Try a version on some of champion's users first, and see what the evidence says.
    #[command(subcommand)]
    Canary(canary::Command),
    /// Show how much of the fleet rollouts use, and what that costs production.
    Tide(tide::Args),
    /// Schedule and watch training runs.
    #[command(subcommand)]
    Run(run::Command),
    /// Make named datasets of closed trajectories, and export them.
    #[command(subcommand)]
    Dataset(dataset::Command),
    /// Inspect, check, keep, publish and pull versions.
    #[command(subcommand)]
    Policy(policy::Command),
    /// Inspect and replay the dead-letter queue: records that could not be stored.
    #[command(subcommand)]
    Dlq(dlq::Command),
    /// Show reward definitions, and score stored trajectories by another one.
    #[command(subcommand)]
    Reward(reward::Command),
    /// Make, list, rotate and revoke API keys.
    #[command(subcommand)]
    Key(key::Command),
    /// Show who changed what, and check that nobody changed the record of it.
    #[command(subcommand)]
    Audit(audit::Command),
    /// Register and revoke samplers: the processes whose generations may be trained on.
    #[command(subcommand)]
    Sampler(sampler::Command),
    /// Say whose a policy is, and which tenants let it train on their data.
    #[command(subcommand)]
    Tenant(tenant::Command),
    /// Erase what one user left: prompts, answers, texts. Writes a signed receipt.
    ///
    /// Example: springtide erase --user u-42 --reason "request 1207" --receipt erasure-1207.json
    Erase(erase::Args),
    /// Check and print the configuration.
    #[command(subcommand)]
    Config(config::Command),
    /// Run Postgres and Kafka without the roles.
    #[command(subcommand)]
    Stack(stack::Command),
    /// Make the keys that the roles of a deployment hold, in a folder for each role.
    ///
    /// It needs neither network nor database. `springtide migrate --secrets DIR` registers them.
    ///
    /// Example: springtide secrets ./secrets --replicas serve-0,serve-1
    Secrets(secrets::Args),
    /// Ask a role on this machine whether it is ready. Fails if not.
    ///
    /// Example: springtide health serve
    Health(health::Args),
    /// Bring the database schema up to date.
    ///
    /// `springtide up` does this by itself. With an external Postgres, run it after an upgrade and
    /// before the roles start.
    Migrate(migrate::Args),
}

/// A command that needs libtorch.
pub enum Learning {
    Train(train::Args),
    Rehearse(::demo::rehearsal::Args),
}

/// Executes it.
pub type Learn = fn(Learning, &App) -> BoxFuture<'_, anyhow::Result<()>>;

async fn execute(learn: Option<Learn>, command: Learning, app: &App) -> anyhow::Result<()> {
    learn.context("this program has no libtorch")?(command, app).await
}

/// What every command gets.
pub struct App {
    pub config: Config,
    /// The file given with `--config`, for child processes.
    pub config_file: Option<PathBuf>,
    /// Serves `/metrics`; empty unless this process is a role.
    pub metrics: Router,
}

/// How a command's process behaves.
enum Process {
    /// Runs until it is stopped; logs, metrics and traces carry this name.
    Role(&'static str),
    /// Starts children. They die with the thread that started them, so everything stays on the main
    /// thread.
    Supervisor,
    /// Ends by itself; logs warnings only.
    Tool,
}

impl Cli {
    pub fn run(self, learn: Option<Learn>) -> anyhow::Result<ExitCode> {
        if learn.is_none() && matches!(self.command, Command::Train(_) | Command::Rehearse(_)) {
            match train::become_program()? {}
        }
        if let Some(parent) = self.die_with {
            parts::exec::die_with(parent, Signal::SIGTERM)?;
        }
        // Before the configuration is read: this runs in other folders, and is about to become
        // another user.
        if let Command::Stack(stack::Command::Exec(args)) = &self.command {
            match parts::exec::run(args)? {}
        }
        if self.command.keeps_state() {
            private::set_umask();
        }
        let mut config = Config::load(self.config.as_deref(), self.command.callers())?;
        if let Some(format) = self.log {
            config.telemetry.format = format;
        }
        edge::tls::trust(&config.tls.client()).context("set up tls.ca and tls.client_cert")?;
        let mut app = App {
            config,
            config_file: self.config,
            metrics: Router::new(),
        };
        let command = self.command;
        match command.process() {
            Process::Role(name) => {
                // Set up before the runtime and dropped after it: the trace exporter blocks.
                let telemetry = telemetry::init(name, &app.config.telemetry)?;
                private::close_state(&app.config)?;
                app.metrics = telemetry.router();
                let runtime = Runtime::new().context("start threads")?;
                let outcome = runtime.block_on(Box::pin(command.run(&app, learn)));
                runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
                match &outcome {
                    Ok(_) => tracing::info!("stopped"),
                    Err(error) => tracing::error!(error = format!("{error:#}"), "the role failed"),
                }
                Ok(outcome.unwrap_or(ExitCode::FAILURE))
            }
            Process::Supervisor => {
                telemetry::init_warnings()?;
                let runtime = Builder::new_current_thread().enable_all().build();
                runtime
                    .context("start runtime")?
                    .block_on(Box::pin(command.run(&app, learn)))
            }
            Process::Tool => {
                telemetry::init_warnings()?;
                let runtime = Runtime::new().context("start threads")?;
                let outcome = runtime.block_on(Box::pin(command.run(&app, learn)));
                runtime.shutdown_background();
                outcome
            }
        }
    }
}

impl Command {
    /// The roles of this process that call others, or for `config` all. The configuration must hold their API keys.
    fn callers(&self) -> &'static [Part] {
        match self {
            Self::Up(_) | Self::Config(_) => &[Part::Serve, Part::Train],
            Self::Serve(_) => &[Part::Serve],
            Self::Train(train::Args { command: None }) => &[Part::Train],
            _ => &[],
        }
    }

    /// Whether the process keeps files that no other user may read. What tools write is for their
    /// caller, whose umask holds; so it does for the command that `stack test-env` runs.
    fn keeps_state(&self) -> bool {
        match self {
            Self::Stack(command) => matches!(command, stack::Command::Start),
            command => !matches!(command.process(), Process::Tool),
        }
    }

    fn process(&self) -> Process {
        match self {
            Self::Serve(_) => Process::Role("serve"),
            Self::Ingest(args) if args.spool.is_some() => Process::Role("collector"),
            Self::Ingest(_) => Process::Role("ingest"),
            Self::Relay(_) => Process::Role("relay"),
            Self::Follow(_) => Process::Role("follow"),
            Self::World(_) => Process::Role("world"),
            Self::Control(_) => Process::Role("control"),
            Self::Train(train::Args { command: None }) => Process::Role("train"),
            Self::Up(_) | Self::Stack(_) => Process::Supervisor,
            _ => Process::Tool,
        }
    }

    async fn run(self, app: &App, learn: Option<Learn>) -> anyhow::Result<ExitCode> {
        match self {
            // These end with the exit code of a process that they started.
            Self::Up(args) => return args.run(app).await,
            Self::Stack(command) => return command.run(app).await,
            Self::Serve(args) => args.run(app).await?,
            Self::Ingest(args) => args.run(app).await?,
            Self::Relay(args) => args.run(app).await?,
            Self::Follow(args) => args.run(app).await?,
            Self::World(args) => args.run(app).await?,
            Self::Control(args) => args.run(app).await?,
            Self::Train(args) => execute(learn, Learning::Train(args), app).await?,
            Self::Rehearse(args) => execute(learn, Learning::Rehearse(args.rehearsal), app).await?,
            Self::Corpus(args) => args.run(app).await?,
            Self::Demo(args) => args.run(app).await?,
            Self::Release(command) => command.run(app).await?,
            Self::Canary(command) => command.run(app).await?,
            Self::Tide(args) => args.run(app).await?,
            Self::Run(command) => command.run(app).await?,
            Self::Dataset(command) => command.run(app).await?,
            Self::Policy(command) => command.run(app).await?,
            Self::Dlq(command) => command.run(app).await?,
            Self::Reward(command) => command.run(app).await?,
            Self::Key(command) => command.run(app).await?,
            Self::Audit(command) => command.run(app).await?,
            Self::Sampler(command) => command.run(app).await?,
            Self::Tenant(command) => command.run(app).await?,
            Self::Config(command) => command.run(app)?,
            Self::Secrets(args) => args.run()?,
            Self::Erase(args) => args.run(app).await?,
            Self::Health(args) => args.run(app).await?,
            Self::Migrate(args) => args.run(app).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
