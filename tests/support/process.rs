//! Starts processes of the real binary, and inspects and signals processes.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use super::eventually;

const START_MAX: Duration = Duration::from_secs(300);

/// Wraps `command`: runs `program` with `args`, followed by the command line of `command`.
pub fn before(program: &str, args: &[&str], command: &std::process::Command) -> Command {
    let mut wrapped = Command::new(program);
    wrapped.args(args).arg(command.get_program()).args(command.get_args());
    wrapped.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    wrapped
}

/// Starts a role and waits until it is healthy at `address`. Its output goes to `log`.
pub async fn start(command: Command, address: SocketAddr, log: &Path) -> Child {
    start_until(command, address, log, |status| status == 200).await
}

/// The same, for a role that answers before it is healthy.
pub async fn start_unready(command: Command, address: SocketAddr, log: &Path) -> Child {
    start_until(command, address, log, |status| status == 200 || status == 503).await
}

async fn start_until(mut command: Command, address: SocketAddr, log: &Path, is_up: impl Fn(u16) -> bool) -> Child {
    let file = std::fs::File::options().create(true).append(true).open(log).unwrap();
    command
        .stdout(Stdio::null())
        .stderr(Stdio::from(file))
        .kill_on_drop(true);
    let mut process = command.spawn().unwrap();
    eventually("the process answers", START_MAX, async || {
        let ended = process.try_wait().unwrap();
        let output = || std::fs::read_to_string(log).unwrap();
        assert!(ended.is_none(), "it ended: {ended:?}\n{}", output());
        let health = reqwest::get(format!("http://{address}/health")).await;
        health.is_ok_and(|answer| is_up(answer.status().as_u16())).then_some(())
    })
    .await;
    process
}

/// Children of `parent`, at any depth, whose command line contains `word`.
pub fn descendants(parent: u32, word: &str) -> Vec<Pid> {
    let mut parents = std::collections::HashMap::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        if let Some(parent) = field(&status, "PPid:") {
            parents.insert(pid, parent);
        }
    }
    let below = |pid: u32| {
        let mut above = parents.get(&pid).copied();
        while let Some(pid) = above {
            if pid == u64::from(parent) {
                return true;
            }
            above = u32::try_from(pid).ok().and_then(|pid| parents.get(&pid).copied());
        }
        false
    };
    let found = parents.keys().copied().filter(|pid| below(*pid)).filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(word)
    });
    found.map(|pid| Pid::from_raw(i32::try_from(pid).unwrap())).collect()
}

pub fn signal(pids: &[Pid], signal: Signal) {
    for pid in pids {
        kill(*pid, signal).unwrap();
    }
}

/// Largest resident set since the start or since [`forget_peak`], KiB.
pub fn rss_peak_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    field(&status, "VmHWM:").unwrap()
}

pub fn rss_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    field(&status, "VmRSS:").unwrap()
}

pub fn forget_peak(pid: u32) {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
