//! `springtide stack`: Postgres and Kafka without the roles.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};

use anyhow::{Context, bail};
use control::times::{self, rfc3339};
use serde_json::json;
use time::OffsetDateTime;
use tokio::signal::unix::{SignalKind, signal};

use super::App;
use super::output::Output;
use crate::stack::ephemeral::Ephemeral;
use crate::stack::{backup, exec, fetch};
use crate::up;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Download what is missing.
    Fetch(Output),
    /// Run Postgres and Kafka as `springtide up` does, without the roles, until Ctrl-C.
    Start,
    /// Back up the running stack into a folder: Postgres, policy store, payloads and keys. Later runs add what is new.
    Backup {
        folder: PathBuf,
        #[command(flatten)]
        output: Output,
    },
    /// Restore a backup into `state_dir`, which must have no database.
    ///
    /// Example: springtide stack restore /backup/monday --to 2026-11-30T11:58:00Z
    Restore {
        folder: PathBuf,
        /// The moment to restore, or its age, such as 30m [default: the newest].
        #[arg(long, value_name = "TIME", value_parser = times::since)]
        to: Option<OffsetDateTime>,
        #[command(flatten)]
        output: Output,
    },
    /// Run both on free ports with temporary data: for one command, or until standard input closes.
    ///
    /// The command finds SPRINGTIDE_TEST_POSTGRES, SPRINGTIDE_TEST_KAFKA and
    /// SPRINGTIDE_TEST_KAFKA_FILE (librdkafka settings, with the password) in its environment.
    /// Without a command, one line of JSON with the same is printed when both answer.
    ///
    /// Example: springtide stack test-env -- cargo test
    TestEnv {
        /// Folder of the downloads; overrides stack.cache.
        #[arg(long)]
        cache: Option<PathBuf>,
        /// Let Postgres write through to the disk, as it does outside of tests.
        #[arg(long)]
        durable: bool,
        /// Command to run.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Become a program that dies with its parent.
    #[command(hide = true)]
    Exec(exec::Args),
}

impl Command {
    pub async fn run(self, app: &App) -> anyhow::Result<ExitCode> {
        let config = &app.config;
        match self {
            Self::Fetch(output) => {
                let fetch::Parts { postgres, kafka, java } = fetch::fetch(&config.stack.cache)?;
                let document = json!({"postgres": postgres, "kafka": kafka, "java": java});
                let (postgres, kafka, java) = (postgres.display(), kafka.display(), java.display());
                output.print(&document, || {
                    format!("Postgres  {postgres}\nKafka     {kafka}\nJava      {java}")
                })?;
                Ok(ExitCode::SUCCESS)
            }
            Self::Start => up::run_servers(config).await,
            Self::Backup { folder, output } => {
                let installation = fetch::fetch(&config.stack.cache)?.postgres;
                for url in backup::elsewhere(config) {
                    eprintln!("{url} is not part of the backup: keep its versions, or copy it with its own tools");
                }
                let backup = backup::back_up(config, &folder, &installation).await?;
                output.print(&backup, || {
                    format!(
                        "moments  {} to {}\nevents   all that the log took before {}",
                        rfc3339(backup.from),
                        rfc3339(backup.until),
                        backup.events_until.map_or("none yet".to_owned(), rfc3339)
                    )
                })?;
                Ok(ExitCode::SUCCESS)
            }
            Self::Restore { folder, to, output } => {
                let _lock = up::lock(config).await?;
                let installation = fetch::fetch(&config.stack.cache)?.postgres;
                let restored = backup::restore(config, &folder, to, &installation).await?;
                output.print(&restored, || {
                    format!(
                        "restored  {}\nversions  up to {}\nevents    all that the log took before {}; ingest reads later \
                         ones from the log again.\n          If the log is gone: ingest.accept_other_log = true, for one \
                         start",
                        rfc3339(restored.to),
                        restored.newest_version.map_or("none".to_owned(), |serial| serial.to_string()),
                        restored.events_until.map_or("none yet".to_owned(), rfc3339)
                    )
                })?;
                Ok(ExitCode::SUCCESS)
            }
            Self::TestEnv {
                cache,
                durable,
                command,
            } => {
                let cache = cache.unwrap_or_else(|| config.stack.cache.clone());
                let stack = Ephemeral::start(&cache, durable).await?;
                let outcome = use_stack(&stack, &command).await;
                stack.stop().await?;
                outcome
            }
            Self::Exec(args) => match exec::run(&args)? {},
        }
    }
}

/// Runs the command, or waits until standard input closes or a signal comes.
async fn use_stack(stack: &Ephemeral, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let mut terminated = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let Some((program, args)) = command.split_first() else {
        println!("{}", serde_json::to_string(&stack.addresses)?);
        tokio::select! {
            () = input_closed() => {}
            _ = tokio::signal::ctrl_c() => {}
            _ = terminated.recv() => {}
        }
        return Ok(ExitCode::SUCCESS);
    };
    let mut child = tokio::process::Command::new(program)
        .args(args)
        .env("SPRINGTIDE_TEST_POSTGRES", &stack.addresses.postgres)
        .env("SPRINGTIDE_TEST_KAFKA", &stack.addresses.kafka)
        .env("SPRINGTIDE_TEST_KAFKA_FILE", &stack.addresses.kafka_file)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("run {}", program.display()))?;
    // Ctrl-C reaches the command too, because it is in our process group. We stop when it has
    // stopped.
    let status = tokio::select! {
        status = wait_through_interrupts(&mut child) => status?,
        _ = terminated.recv() => bail!("terminated"),
    };
    Ok(match status.code() {
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}

async fn wait_through_interrupts(child: &mut tokio::process::Child) -> anyhow::Result<ExitStatus> {
    loop {
        tokio::select! {
            status = child.wait() => return status.context("wait for the command"),
            _ = tokio::signal::ctrl_c() => {}
        }
    }
}

/// Waits for the end of standard input, on a thread that ends with the process.
async fn input_closed() {
    let (closed, wait) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 256];
        while matches!(std::io::stdin().read(&mut buffer), Ok(1..)) {}
        let _ = closed.send(());
    });
    let _ = wait.await;
}
