//! One child process: how it is tied to this one, watched and ended. Deliberately knows no back-off and no readiness.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::Context;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::stack::exec;

/// A role drains its requests for 20 s at most; Kafka and Postgres need a few seconds.
const STOP_SECONDS_MAX: u64 = 30;

/// A running child. Dropped without [`Child::stop`], it is killed.
pub struct Child(tokio::process::Child);

/// A subcommand of this binary as a process that ends when this one does, out of the terminal's reach.
pub fn own(config: Option<&Path>, subcommand: &str) -> anyhow::Result<Command> {
    let mut command = own_here(config, subcommand)?;
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Ok(command)
}

/// The same in the terminal's foreground, where its keys and signals go.
pub fn own_here(config: Option<&Path>, subcommand: &str) -> anyhow::Result<Command> {
    let mut command = exec::own_binary()?;
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    command.arg("--die-with").arg(std::process::id().to_string());
    command.arg(subcommand);
    Ok(command)
}

impl Child {
    pub fn spawn(mut command: Command) -> anyhow::Result<Self> {
        command.stdin(std::process::Stdio::null());
        Self::spawn_here(command)
    }

    /// With the input of this process.
    pub fn spawn_here(command: Command) -> anyhow::Result<Self> {
        let mut command = tokio::process::Command::from(command);
        command.kill_on_drop(true);
        Ok(Self(command.spawn().context("start process")?))
    }

    /// `None` once it was waited for.
    pub fn pid(&self) -> Option<Pid> {
        let pid = self.0.id()?;
        i32::try_from(pid).ok().map(Pid::from_raw)
    }

    pub async fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        self.0.wait().await.context("wait for process")
    }

    /// Asks with `signal`, and kills what has not ended after 30 s. Returns how it ended.
    pub async fn stop(&mut self, signal: Signal) -> anyhow::Result<ExitStatus> {
        if let Some(pid) = self.pid() {
            match kill(pid, signal) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(errno).context("signal process"),
            }
        }
        let limit = Duration::from_secs(STOP_SECONDS_MAX);
        if let Ok(status) = tokio::time::timeout(limit, self.0.wait()).await {
            return status.context("wait for process");
        }
        self.0.start_kill().context("kill process")?;
        self.wait().await
    }
}
