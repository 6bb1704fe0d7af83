//! Processes that a benchmark starts, kills and measures.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// A process with its children, in a process group of its own. Killed when dropped.
pub struct Process {
    child: Child,
    group: Pid,
    log: PathBuf,
}

impl Process {
    /// Its output is appended to `log`.
    pub fn start(mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let file = File::options().create(true).append(true).open(log);
        let file = file.with_context(|| format!("open {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()
            .with_context(|| format!("run {}", command.get_program().display()))?;
        Ok(Process {
            group: Pid::from_raw(i32::try_from(child.id())?),
            child,
            log: log.to_owned(),
        })
    }

    /// Waits until `url` answers 200. Returns how long that took.
    pub async fn answers(&mut self, url: &str, limit: Duration) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let client = reqwest::Client::builder().timeout(Duration::from_secs(5)).build()?;
        while !client.get(url).send().await.is_ok_and(|answer| answer.status() == 200) {
            let ended = self.child.try_wait()?;
            if ended.is_some() || started.elapsed() > limit {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(20).collect();
                let tail: Vec<&str> = tail.into_iter().rev().collect();
                bail!(
                    "{url} does not answer ({ended:?}); {} ends with:\n{}",
                    self.log.display(),
                    tail.join("\n")
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(started.elapsed())
    }

    /// `kill -9` of the group. Also removes the shared memory that its processes had mapped: nobody
    /// else does after such a death.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let shared = self.shared_memory();
        killpg(self.group, Signal::SIGKILL).context("kill")?;
        self.child.wait()?;
        for file in shared {
            let _ = fs::remove_file(file);
        }
        Ok(())
    }

    /// Files in /dev/shm that a process of the group has mapped.
    fn shared_memory(&self) -> BTreeSet<PathBuf> {
        let maps = self.members().into_iter().map(|pid| format!("/proc/{pid}/maps"));
        let maps = maps.filter_map(|path| fs::read_to_string(path).ok());
        let mut files = BTreeSet::new();
        for maps in maps {
            let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
            files.extend(paths.filter(|path| path.starts_with("/dev/shm/")).map(PathBuf::from));
        }
        files
    }

    /// User and system time of all processes of the group that still run, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        // CPU times in /proc are in units of 1/100 s.
        const TICKS_PER_SECOND: f64 = 100.0;
        let ticks = |pid: u32| -> Option<f64> {
            let stat = stat(pid)?;
            Some(stat.get(11)?.parse::<f64>().ok()? + stat.get(12)?.parse::<f64>().ok()?)
        };
        self.members().into_iter().filter_map(ticks).sum::<f64>() / TICKS_PER_SECOND
    }

    fn members(&self) -> Vec<u32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
        let group = self.group.to_string();
        pids.filter(|&pid| stat(pid).is_some_and(|stat| stat.get(2) == Some(&group)))
            .collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.kill();
        }
    }
}

/// The fields of /proc/PID/stat after the name: state, parent, group, …
fn stat(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    Some(fields.split_whitespace().map(str::to_owned).collect())
}
