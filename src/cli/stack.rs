//! `springtide stack`: Postgres and Kafka without the roles.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};

use anyhow::{Context, bail};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::App;
use super::output::Output;
use crate::stack::ephemeral::Ephemeral;
use crate::stack::{exec, fetch};
use crate::up;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Download what is missing.
    Fetch(Output),
    /// Run Postgres and Kafka as `springtide up` does, without the roles, until Ctrl-C.
    Start,
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
