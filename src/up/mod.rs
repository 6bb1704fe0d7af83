//! `springtide up`: the whole of Springtide on one machine. Starts Postgres and Kafka (unless external ones are configured),
//! brings schema, topics and keys up to date, then runs every role as a process of this same binary, restarts what dies
//! and stops all of it in order. Knows nothing of what the roles do: it looks at exit codes and `/health` only.
//!
//! Everything here runs on the main thread: the kernel kills a child when the *thread* that started it ends
//! (see [`crate::stack::exec`]), and the main thread ends last.

mod child;
mod hold;
mod lent;
mod parts;
mod prepare;
mod service;

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::LocalSet;

use crate::config::Config;
use hold::Hold;
use lent::Lent;
use service::{Running, Service, State};

/// How often a part that is not ready yet is mentioned again.
const STILL_WAITING_EVERY: Duration = Duration::from_secs(15);

/// Run Postgres, Kafka and all roles, until Ctrl-C.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run the demo when all roles are ready, and go on serving when it is over.
    #[arg(long)]
    demo: bool,
    /// With --demo: stop when it is over, with its exit code.
    #[arg(long, requires = "demo")]
    once: bool,
    /// Start from this Hugging Face folder instead of `policy.base`, as a policy of its own that is named after the folder.
    #[arg(long, value_name = "DIR")]
    policy: Option<PathBuf>,
    /// Handed to `springtide demo`.
    #[arg(last = true, requires = "demo")]
    demo_args: Vec<OsString>,
}

/// All of it. `file` is the configuration file that the roles are to read as well.
pub async fn run(args: Args, config: &Config, file: Option<PathBuf>) -> anyhow::Result<ExitCode> {
    ensure!(
        cfg!(feature = "torch"),
        "this program was built without libtorch, so it cannot serve or train: run `springtide ingest` or `control`"
    );
    if let Some(dir) = &args.policy {
        match as_policy(dir, &args, file.as_deref())? {}
    }
    let supervisor = Supervisor::new(config, file)?;
    let whole = async {
        supervisor.servers().await?;
        supervisor.roles().await?;
        supervisor.announce();
        if args.demo {
            let status = supervisor.demo(&args.demo_args).await?;
            if args.once {
                return Ok(status);
            }
            eprintln!("the demo is over; Springtide goes on serving. Ctrl-C stops it.");
            eprintln!("  report       {}/report", config.control_url());
        }
        std::future::pending().await
    };
    LocalSet::new().run_until(supervisor.until_stopped(whole)).await
}

/// Becomes the same command with the policy in its environment, where every role and the demo read it too.
fn as_policy(dir: &Path, args: &Args, file: Option<&Path>) -> anyhow::Result<Infallible> {
    let dir = dir
        .canonicalize()
        .with_context(|| format!("--policy {}: find the folder", dir.display()))?;
    ensure!(
        dir.join("config.json").is_file(),
        "--policy {}: there is no config.json in it; give a Hugging Face folder",
        dir.display()
    );
    let name = dir.file_name().unwrap_or_default();
    let mut again = Command::new(std::env::current_exe().context("find this program")?);
    again.arg("up");
    again.args(
        file.into_iter()
            .flat_map(|file| [OsStr::new("--config"), file.as_os_str()]),
    );
    again.args(args.demo.then_some("--demo"));
    again.args(args.once.then_some("--once"));
    if !args.demo_args.is_empty() {
        again.arg("--").args(&args.demo_args);
    }
    again
        .env("SPRINGTIDE__POLICY__BASE", &dir)
        .env("SPRINGTIDE__POLICY__NAME", name);
    Err(again.exec()).context("start again with the policy")
}

/// Postgres and Kafka alone, under the same supervision.
pub async fn run_stack_only(config: &Config) -> anyhow::Result<ExitCode> {
    let supervisor = Supervisor::new(config, None)?;
    let whole = async {
        supervisor.servers().await?;
        eprintln!("Postgres: {}", parts::shown_postgres(config));
        eprintln!("Kafka:    {}", config.kafka_client().brokers);
        std::future::pending().await
    };
    LocalSet::new().run_until(supervisor.until_stopped(whole)).await
}

struct Supervisor<'a> {
    config: &'a Config,
    file: Option<PathBuf>,
    hold: Hold,
    /// In the order in which they were started.
    running: std::cell::RefCell<Vec<Running>>,
}

impl<'a> Supervisor<'a> {
    fn new(config: &'a Config, file: Option<PathBuf>) -> anyhow::Result<Self> {
        Ok(Self {
            config,
            file,
            hold: Hold::take(&config.state_dir)?,
            running: std::cell::RefCell::default(),
        })
    }

    /// Runs `whole` until it ends or a signal comes, then stops everything in reverse order.
    async fn until_stopped(&self, whole: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
        let mut signals = Signals::listen()?;
        let outcome = tokio::select! {
            outcome = whole => outcome,
            name = signals.next() => {
                eprintln!("{name}: stopping");
                Ok(ExitCode::SUCCESS)
            }
        };
        tokio::select! {
            () = self.stop() => {}
            name = signals.next() => eprintln!("{name} again: leaving at once"), // children die with us
        }
        outcome
    }

    /// Private Postgres and Kafka where none are configured, then schema, topics and keys.
    async fn servers(&self) -> anyhow::Result<()> {
        self.hold.clear_leftovers().await?;
        parts::check_ports(self.config)?;
        let services = parts::servers(self.config).await?;
        self.bring_up(services).await?;
        prepare::all(self.config).await
    }

    async fn roles(&self) -> anyhow::Result<()> {
        self.bring_up(parts::roles(self.config, self.file.as_deref())?).await
    }

    /// Starts all of `services` at once and returns when each has been ready once.
    async fn bring_up(&self, services: Vec<Service>) -> anyhow::Result<()> {
        let mut starting = Vec::new();
        for service in services {
            let running = service.start(self.hold.clone(), &self.config.log_dir());
            starting.push((running.name, running.log.clone(), running.state.clone()));
            self.running.borrow_mut().push(running);
        }
        let started = Instant::now();
        let mut mention = tokio::time::interval(STILL_WAITING_EVERY);
        mention.tick().await; // the first comes at once
        for (name, log, mut state) in starting {
            loop {
                let now = state.borrow_and_update().clone();
                match now {
                    State::Ready => {
                        eprintln!("{name:<8} ready after {:.1} s", started.elapsed().as_secs_f64());
                        break;
                    }
                    State::GivenUp(why) => bail!("{name} does not start: {why}"),
                    State::Starting => {}
                }
                tokio::select! {
                    changed = state.changed() => changed.context("watch a part")?,
                    _ = mention.tick() => eprintln!("waiting for {name}; it logs to {}", log.display()),
                }
            }
        }
        Ok(())
    }

    fn announce(&self) {
        let config = self.config;
        eprintln!();
        eprintln!("Springtide is up.");
        eprintln!("  completions  {}/v1/completions", config.serve_url());
        eprintln!("  feedback     {}/v1/feedback", config.ingest_url());
        eprintln!(
            "  control      {}/v1/releases, /v1/runs, /v1/ledger",
            config.control_url()
        );
        eprintln!("  database     {}", parts::shown_postgres(config));
        eprintln!("  logs         {}", config.log_dir().display());
        eprintln!("Ctrl-C stops it.");
        eprintln!();
    }

    /// Runs the demo with this terminal as its own. A broken demo is no reason to stop serving.
    async fn demo(&self, args: &[OsString]) -> anyhow::Result<ExitCode> {
        let mut command = child::own_here(self.file.as_deref(), "demo")?;
        command.args(args);
        let lent = Lent::new();
        let mut demo = child::Child::spawn_here(command).context("start the demo")?;
        let status = demo.wait().await?;
        lent.back(status);
        if status.success() {
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("the demo failed: {status}");
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(ExitCode::from(code.unwrap_or(1)))
    }

    /// Each part gets its time to end before the next is asked: what others lean on goes last.
    async fn stop(&self) {
        let mut running = std::mem::take(&mut *self.running.borrow_mut());
        while let Some(part) = running.pop() {
            part.stop().await;
        }
        self.hold.forget_all();
    }
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).context("listen for SIGINT")?,
            terminate: signal(SignalKind::terminate()).context("listen for SIGTERM")?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
