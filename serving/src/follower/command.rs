//! Runs the command that has an engine take a version.

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

/// Variables of these prefixes are configuration, with API keys and the names of their files among them.
const CONFIGURATION: [&str; 2] = ["SPRINGTIDE__", "SPRINGTIDE_FILE__"];

/// A command line for `/bin/sh`. It succeeds if it exits with 0 in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    pub line: String,
    pub timeout: Duration,
}

impl Command {
    /// Runs it once, with further environment variables. If it takes too long, or if the future is
    /// dropped, it is killed with all processes that it started in its group.
    pub async fn run(&self, variables: &[(&str, OsString)]) -> anyhow::Result<()> {
        let mut command = tokio::process::Command::new("/bin/sh");
        command.arg("-c").arg(&self.line).stdin(Stdio::null()).process_group(0);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if CONFIGURATION.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let mut child = command
            .spawn()
            .inspect_err(|_| failed("start"))
            .context("start the command")?;
        let mut group = Group(child.id());
        let status = match tokio::time::timeout(self.timeout, child.wait()).await {
            Ok(status) => status.context("wait for the command")?,
            Err(_) => {
                failed("timeout");
                bail!(
                    "the command took longer than {} s and was killed; raise follow.command_seconds_max, or see why",
                    self.timeout.as_secs_f64()
                );
            }
        };
        // what it has started may go on
        group.0 = None;
        if !status.success() {
            failed("exit");
            bail!("the command ended with {status}");
        }
        Ok(())
    }
}

fn failed(why: &'static str) {
    metrics::counter!("springtide_follow_command_failures_total", "why" => why).increment(1);
}

/// Kills a process group when dropped.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        let Some(leader) = self.0.and_then(|id| i32::try_from(id).ok()) else {
            return;
        };
        let _ = killpg(Pid::from_raw(leader), Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &str, timeout: Duration) -> Command {
        Command {
            line: line.into(),
            timeout,
        }
    }

    #[tokio::test]
    async fn it_gets_its_variables_and_its_exit_code_counts() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let variables = [
            ("SPRINGTIDE_VERSION", "17".into()),
            ("OUT", out.clone().into_os_string()),
        ];
        let minute = Duration::from_secs(60);
        let wrote = command(r#"echo "$SPRINGTIDE_VERSION" > "$OUT""#, minute);
        wrote.run(&variables).await.unwrap();
        assert_eq!(std::fs::read_to_string(out).unwrap(), "17\n");
        let error = command("exit 3", minute).run(&[]).await.unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
    }

    #[tokio::test]
    async fn a_command_that_takes_too_long_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("pid");
        let variables = [("OUT", out.clone().into_os_string())];
        // the child is the shell's, not ours
        let slow = command(r#"sleep 600 & echo $! > "$OUT"; wait"#, Duration::from_millis(500));
        let error = slow.run(&variables).await.unwrap_err().to_string();
        assert!(error.contains("longer than 0.5 s"), "{error}");
        let child: i32 = std::fs::read_to_string(out).unwrap().trim().parse().unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        // gone, or a zombie that nobody has collected
        while !(state().is_empty() || state().contains(") Z")) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
