//! Runs all of Springtide on one machine. Starts Postgres and Kafka (unless external ones are
//! configured), creates or updates schema, topics and keys, then runs every role as a child process
//! of this binary. Restarts processes that end, and stops all of them in reverse order. Of the roles
//! it sees only exit codes and `/health`.
//!
//! Everything here runs on the main thread: the kernel signals a child when the *thread* that started
//! it ends (see [`crate::stack::exec`]), and the main thread ends last.

mod lent;
mod memory;
mod prepare;
mod service;
mod services;
mod state_lock;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use artifact::need::Limit;
use futures::future::select_all;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::LocalSet;

use crate::config::Config;
use crate::private;
use crate::stack::child::Child;
use crate::stack::exec;
use lent::TerminalGuard;
use service::{Running, Service, State};
use state_lock::StateLock;

/// Time between two messages about a service that is not ready.
const WAITING_MESSAGE_INTERVAL: Duration = Duration::from_secs(15);

/// The demo, run when all roles are ready.
pub struct Demo<'a> {
    /// Arguments for `springtide demo`.
    pub args: &'a [OsString],
    /// Stop after the demo, with its exit code.
    pub once: bool,
}

/// Runs everything until a signal comes. `config_file` is read by the roles as well.
pub async fn run(config: &Config, config_file: Option<PathBuf>, demo: Option<Demo<'_>>) -> anyhow::Result<ExitCode> {
    memory::ask(config, &Limit::of_this_process())?;
    let supervisor = Supervisor::new(config, config_file)?;
    let work = async {
        supervisor.start_servers().await?;
        supervisor.start_roles().await?;
        supervisor.print_addresses();
        if let Some(demo) = demo {
            let status = supervisor.demo(demo.args).await?;
            if demo.once {
                return Ok(status);
            }
            eprintln!("the demo is over; Springtide keeps serving. Ctrl-C stops it.");
            eprintln!("  report       {}/report", config.control_url());
        }
        std::future::pending().await
    };
    LocalSet::new().run_until(supervisor.until_stopped(work)).await
}

/// Runs Postgres and Kafka alone.
pub async fn run_servers(config: &Config) -> anyhow::Result<ExitCode> {
    let supervisor = Supervisor::new(config, None)?;
    let work = async {
        supervisor.start_servers().await?;
        eprintln!("Postgres: {}", services::shown_postgres(config));
        eprintln!("Kafka:    {}", services::shown_kafka(config));
        std::future::pending().await
    };
    LocalSet::new().run_until(supervisor.until_stopped(work)).await
}

/// Keeps supervisors away from the state folder, and ends what a killed one has left.
pub async fn lock(config: &Config) -> anyhow::Result<impl Sized> {
    private::state_folder(config)?;
    let lock = StateLock::take(&config.state_dir)?;
    lock.clear_leftovers().await?;
    Ok(lock)
}

struct Supervisor<'a> {
    config: &'a Config,
    config_file: Option<PathBuf>,
    lock: StateLock,
    /// In the order of their starts.
    running: std::cell::RefCell<Vec<Running>>,
}

impl<'a> Supervisor<'a> {
    fn new(config: &'a Config, config_file: Option<PathBuf>) -> anyhow::Result<Self> {
        private::state_folder(config)?;
        Ok(Self {
            config,
            config_file,
            lock: StateLock::take(&config.state_dir)?,
            running: std::cell::RefCell::default(),
        })
    }

    /// Runs `work` until it ends or a signal comes, then stops everything in reverse order.
    async fn until_stopped(&self, work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
        let mut signals = Signals::listen()?;
        let outcome = tokio::select! {
            outcome = work => outcome,
            name = signals.next() => {
                eprintln!("{name}: stopping");
                Ok(ExitCode::SUCCESS)
            }
        };
        tokio::select! {
            () = self.stop() => {}
            name = signals.next() => eprintln!("{name} again: exiting at once"), // the kernel ends the children
        }
        outcome
    }

    /// Starts Postgres and Kafka unless external ones are configured, then creates or updates schema,
    /// topics and keys.
    async fn start_servers(&self) -> anyhow::Result<()> {
        self.lock.clear_leftovers().await?;
        services::check_ports(self.config)?;
        let services = services::servers(self.config).await?;
        self.bring_up(services).await?;
        Box::pin(prepare::prepare(self.config)).await
    }

    async fn start_roles(&self) -> anyhow::Result<()> {
        self.bring_up(services::engines(self.config)?).await?;
        self.bring_up(services::roles(self.config, self.config_file.as_deref())?)
            .await
    }

    /// Starts all of `services` at once and returns when each has been ready once.
    async fn bring_up(&self, services: Vec<Service>) -> anyhow::Result<()> {
        let mut starting = BTreeMap::new();
        for service in services {
            let running = service.start(self.lock.clone(), &self.config.log_dir());
            starting.insert(running.name, running.log.clone());
            self.running.borrow_mut().push(running);
        }
        let started = Instant::now();
        let mut message_timer = tokio::time::interval(WAITING_MESSAGE_INTERVAL);
        message_timer.tick().await; // the first tick comes at once
        // one that was ready and is given up may be what the others wait for
        let mut all = self.states();
        loop {
            for (name, state) in &mut all {
                match &*state.borrow_and_update() {
                    State::GivenUp(why) => bail!("{name} does not start: {why}"),
                    State::WasReady if starting.remove(name).is_some() => {
                        eprintln!("{name:<8} ready after {:.1} s", started.elapsed().as_secs_f64());
                    }
                    State::Starting | State::WasReady => {}
                }
            }
            if starting.is_empty() {
                return Ok(());
            }
            tokio::select! {
                (changed, _, _) = select_all(all.iter_mut().map(|(_, state)| Box::pin(state.changed()))) => {
                    changed.context("watch a service")?;
                }
                _ = message_timer.tick() => {
                    for (name, log) in &starting {
                        eprintln!("waiting for {name}; it logs to {}", log.display());
                    }
                }
            }
        }
    }

    fn states(&self) -> Vec<(&'static str, watch::Receiver<State>)> {
        let running = self.running.borrow();
        running.iter().map(|one| (one.name, one.state.clone())).collect()
    }

    fn print_addresses(&self) {
        let config = self.config;
        eprintln!("\nSpringtide is up.");
        eprintln!("  completions  {}/v1/completions", config.serve_url());
        eprintln!("  feedback     {}/v1/feedback", config.ingest_url());
        eprintln!(
            "  control      {}/v1/releases, /v1/runs, /v1/ledger",
            config.control_url()
        );
        eprintln!("  database     {}", services::shown_postgres(config));
        eprintln!("  Kafka        {}", services::shown_kafka(config));
        eprintln!("  logs         {}", config.log_dir().display());
        eprintln!("Ctrl-C stops it.\n");
    }

    /// Runs the demo on this terminal. If it fails, the roles keep serving.
    async fn demo(&self, args: &[OsString]) -> anyhow::Result<ExitCode> {
        let mut command = exec::own_subcommand(self.config_file.as_deref(), "demo")?;
        command.args(args);
        let terminal = TerminalGuard::hand_over();
        let mut demo = Child::spawn_with_stdin(command).context("start the demo")?;
        let status = demo.wait().await?;
        terminal.restore(status);
        if status.success() {
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("the demo failed: {status}");
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(ExitCode::from(code.unwrap_or(1)))
    }

    /// Waits for each service to end before it stops the next, so that dependencies stop last.
    async fn stop(&self) {
        let mut running = std::mem::take(&mut *self.running.borrow_mut());
        while let Some(service) = running.pop() {
            service.stop().await;
        }
        self.lock.forget_all();
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
