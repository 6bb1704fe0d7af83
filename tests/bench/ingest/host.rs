//! The ingest role as a process, and the CPU and memory usage of a run's processes.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bench::stack::{Room, Stack};
use serde::Serialize;
use tokio::process::{Child, Command};

/// A horizon that ends during the run, so that as many generations close as come in.
const SURFACE: &str = r#"[{ name = "completion", metric = "accept", metric_type = "boolean", trajectory = "generation",
    horizon_seconds = 3.0, accept = 0.75, reject = -0.25, decline = 0.0 }]"#;
const START_LIMIT: Duration = Duration::from_secs(90);

/// `springtide ingest` as a process.
pub struct Ingest {
    process: Child,
    pub url: String,
}

impl Ingest {
    pub async fn start(springtide: &Path, room: &Room, folder: &Path, partitions: i32) -> anyhow::Result<Self> {
        let [port] = edge::bind::free_ports()?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let log = fs::File::create(folder.join("ingest.log"))?;
        let process = Command::new(springtide)
            .arg("ingest")
            .current_dir(folder)
            .env("SPRINGTIDE__LISTEN__INGEST", address.to_string())
            .envs(room.environment())
            .env("SPRINGTIDE__POSTGRES__URLS__INGEST", room.url_of("ingest")?)
            .env("SPRINGTIDE__INGEST__PARTITIONS", partitions.to_string())
            .env("SPRINGTIDE__INGEST__SURFACE", SURFACE)
            .stdin(Stdio::null())
            .stderr(log.try_clone()?)
            .stdout(log)
            .kill_on_drop(true)
            .spawn()
            .context("run the ingest role")?;
        let url = format!("http://{address}");
        let started = Instant::now();
        while !reqwest::get(format!("{url}/health"))
            .await
            .is_ok_and(|answer| answer.status() == 200)
        {
            if started.elapsed() > START_LIMIT {
                bail!(
                    "ingest does not answer:\n{}",
                    fs::read_to_string(folder.join("ingest.log"))?
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(Self { process, url })
    }

    pub async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self.process.id().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.context("the ingest role ended by itself")?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGTERM)?;
        let status = self.process.wait().await?;
        ensure!(status.success(), "the ingest role ended with {status}");
        Ok(())
    }
}

/// The resources of one part of the run.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Usage {
    /// Mean over the run, in cores.
    pub cores: f64,
    /// Proportional resident memory (PSS) at the end, MiB.
    pub memory_mib: f64,
}

/// CPU seconds by part: `ingest`, `postgres`, `kafka`, and `load`, which is this process.
pub struct Meter {
    stack: u32,
    ingest: Option<u32>,
    started: Instant,
    before: BTreeMap<&'static str, f64>,
}

impl Meter {
    pub fn start(stack: &Stack, ingest: Option<&Ingest>) -> anyhow::Result<Self> {
        let mut meter = Self {
            stack: stack.pid().context("the stack ended")?,
            ingest: ingest.and_then(|ingest| ingest.process.id()),
            started: Instant::now(),
            before: BTreeMap::new(),
        };
        meter.before = meter.seconds()?;
        Ok(meter)
    }

    pub fn stop(self) -> anyhow::Result<BTreeMap<&'static str, Usage>> {
        let elapsed = self.started.elapsed().as_secs_f64();
        let memory = self.memory()?;
        let after = self.seconds()?;
        let usage = after.into_iter().map(|(part, seconds)| {
            let usage = Usage {
                cores: (seconds - self.before.get(part).copied().unwrap_or(0.0)) / elapsed,
                memory_mib: memory.get(part).copied().unwrap_or(0.0),
            };
            (part, usage)
        });
        Ok(usage.collect())
    }

    fn seconds(&self) -> anyhow::Result<BTreeMap<&'static str, f64>> {
        let mut seconds = BTreeMap::new();
        for process in processes()? {
            if let Some(part) = self.part(&process) {
                *seconds.entry(part).or_default() += process.seconds;
            }
        }
        Ok(seconds)
    }

    fn memory(&self) -> anyhow::Result<BTreeMap<&'static str, f64>> {
        let mut memory = BTreeMap::new();
        for process in processes()? {
            if let Some(part) = self.part(&process) {
                *memory.entry(part).or_default() += proportional_mib(process.pid);
            }
        }
        Ok(memory)
    }

    fn part(&self, process: &Process) -> Option<&'static str> {
        if process.pid == std::process::id() {
            Some("load")
        } else if Some(process.pid) == self.ingest {
            Some("ingest")
        } else if process.ancestors.contains(&self.stack) {
            Some(if process.name == "postgres" {
                "postgres"
            } else {
                "kafka"
            })
        } else {
            None
        }
    }
}

struct Process {
    pid: u32,
    name: String,
    ancestors: Vec<u32>,
    seconds: f64,
}

/// Skips processes that end during the listing.
fn processes() -> anyhow::Result<Vec<Process>> {
    // CPU times in /proc are in units of 1/100 s.
    const TICKS_PER_SECOND: f64 = 100.0;
    let mut parents = BTreeMap::new();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("read /proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(PathBuf::from(format!("/proc/{pid}/stat"))) else {
            continue;
        };
        let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else {
            continue;
        };
        let fields: Vec<&str> = stat[close + 1..].split_whitespace().collect();
        let number = |index: usize| {
            fields
                .get(index)
                .and_then(|field| field.parse::<f64>().ok())
                .unwrap_or(0.0)
        };
        parents.insert(pid, number(1) as u32);
        // Includes ended children, because a Postgres backend ends with its connection.
        let ticks = number(11) + number(12) + number(13) + number(14);
        found.push((pid, stat[open + 1..close].to_owned(), ticks / TICKS_PER_SECOND));
    }
    let ancestors = |pid: u32| {
        std::iter::successors(Some(pid), |pid| parents.get(pid).copied().filter(|parent| *parent > 0)).skip(1)
    };
    let processes = found.into_iter().map(|(pid, name, seconds)| Process {
        ancestors: ancestors(pid).collect(),
        pid,
        name,
        seconds,
    });
    Ok(processes.collect())
}

fn proportional_mib(pid: u32) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find(|line| line.starts_with("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}
