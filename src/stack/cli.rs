//! `springtide stack …`: the stack without the roles.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use tokio::signal::unix::{SignalKind, signal};

use super::ephemeral::Ephemeral;
use super::{exec, fetch};
use crate::config::Config;

/// Postgres and Kafka alone.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Download what is missing, and stop.
    Fetch,
    /// Run Postgres and Kafka, as `springtide up` would, without the roles, until Ctrl-C.
    Start,
    /// Run both on free ports with temporary data: for one command, or until standard input closes.
    ///
    /// The command finds SPRINGTIDE_TEST_POSTGRES and SPRINGTIDE_TEST_KAFKA in its environment. Without a command,
    /// one line of JSON with both addresses is printed when they answer.
    TestEnv {
        /// Folder of the downloads, where it is not the configuration's.
        #[arg(long)]
        cache: Option<PathBuf>,
        /// Postgres writes through to the disk, as it does outside of tests.
        #[arg(long)]
        durable: bool,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Become a program that dies with its parent.
    #[command(hide = true)]
    Exec(exec::Args),
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Fetch => {
            let parts = fetch::all(&config.stack.cache)?;
            println!("Postgres  {}", parts.postgres.display());
            println!("Kafka     {}", parts.kafka.display());
            println!("Java      {}", parts.java.display());
            Ok(ExitCode::SUCCESS)
        }
        Command::Start => crate::up::run_stack_only(config).await,
        Command::TestEnv {
            cache,
            durable,
            command,
        } => {
            let cache = cache.unwrap_or_else(|| config.stack.cache.clone());
            let stack = Ephemeral::start(&cache, durable).await?;
            let outcome = occasion(&stack, command).await;
            stack.stop().await?;
            outcome
        }
        Command::Exec(args) => match exec::run(&args)? {},
    }
}

async fn occasion(stack: &Ephemeral, command: Vec<OsString>) -> anyhow::Result<ExitCode> {
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
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("run {}", program.display()))?;
    // Ctrl-C reaches the command too: it is in our process group. We stop when it has.
    let status = tokio::select! {
        status = wait_through_interrupts(&mut child) => status?,
        _ = terminated.recv() => bail!("terminated"),
    };
    Ok(match status.code() {
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}

async fn wait_through_interrupts(child: &mut tokio::process::Child) -> anyhow::Result<std::process::ExitStatus> {
    loop {
        tokio::select! {
            status = child.wait() => return status.context("wait for the command"),
            _ = tokio::signal::ctrl_c() => {}
        }
    }
}

/// Resolves at the end of standard input, on a thread of its own that the end of the process ends.
async fn input_closed() {
    let (closed, wait) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 256];
        while matches!(std::io::stdin().read(&mut buffer), Ok(1..)) {}
        let _ = closed.send(());
    });
    let _ = wait.await;
}
