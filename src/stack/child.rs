//! One child process: watched, and stopped in order.

use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::Context;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Roles drain requests for at most 20 s; Kafka and Postgres need a few seconds.
const STOP_SECONDS_MAX: u64 = 30;

/// A running child. It is killed when it is dropped without [`Child::stop`].
#[derive(Debug)]
pub struct Child(tokio::process::Child);

impl Child {
    pub fn spawn(mut command: Command) -> anyhow::Result<Self> {
        command.stdin(std::process::Stdio::null());
        Self::spawn_with_stdin(command)
    }

    /// Shares the standard input of this process.
    pub fn spawn_with_stdin(command: Command) -> anyhow::Result<Self> {
        let mut command = tokio::process::Command::from(command);
        command.kill_on_drop(true);
        Ok(Self(command.spawn().context("start process")?))
    }

    /// `None` after it has ended.
    pub fn pid(&self) -> Option<Pid> {
        let pid = self.0.id()?;
        i32::try_from(pid).ok().map(Pid::from_raw)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        self.0.try_wait().context("check a process")
    }

    pub async fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        self.0.wait().await.context("wait for process")
    }

    /// Sends `signal`, and kills the process if it has not ended after 30 s.
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
