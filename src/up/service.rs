//! One supervised process: started, watched, and restarted with back-off when it dies, until it is
//! stopped.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::Signal;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::state_lock::StateLock;
use crate::console;
use crate::stack::child::Child;

const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// If a process ran at least this long, the back-off starts again from its minimum.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
/// A service that was never ready is given up after this many tries in a row that each ended within
/// [`SETTLED_AFTER`].
const FIRST_TRIES_MAX: u32 = 5;
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// A log file larger than this becomes `<name>.log.old` when its service starts, bytes.
const LOG_BYTES_MAX: u64 = 64 << 20;
const TAIL_LINES: usize = 12;
/// How much of the end of a log file is read to show its last lines, bytes.
const TAIL_BYTES: u64 = 64 << 10;

/// What to run, and how.
pub struct Service {
    pub name: &'static str,
    /// Makes the command for each start.
    pub command: Box<dyn Fn() -> anyhow::Result<Command>>,
    /// The signal that makes it shut down cleanly.
    pub stop: Signal,
    /// Returns whether it is ready.
    pub probe: Probe,
}

pub type Probe = Rc<dyn Fn() -> futures::future::LocalBoxFuture<'static, bool>>;

/// Whether the service has ever been ready. Does not change afterwards.
#[derive(Debug, Clone)]
pub enum State {
    Starting,
    WasReady,
    GivenUp(String),
}

/// A service under supervision.
pub struct Running {
    pub name: &'static str,
    pub log: PathBuf,
    pub state: watch::Receiver<State>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Service {
    /// Supervises it on this thread. Its output goes to `<log_dir>/<name>.log`.
    pub fn start(self, lock: StateLock, log_dir: &Path) -> Running {
        let (set_state, state) = watch::channel(State::Starting);
        let stop = CancellationToken::new();
        let log = log_dir.join(format!("{}.log", self.name));
        let name = self.name;
        let supervision = Supervision {
            service: self,
            lock,
            log: log.clone(),
            set_state,
            stop: stop.clone(),
        };
        Running {
            name,
            log,
            state,
            stop,
            task: tokio::task::spawn_local(supervision.run()),
        }
    }
}

impl Running {
    /// Stops the process and waits for its end.
    pub async fn stop(self) {
        self.stop.cancel();
        if self.task.await.is_err() {
            eprintln!("{}: the supervisor of this process panicked", self.name);
        }
    }
}

struct Supervision {
    service: Service,
    lock: StateLock,
    log: PathBuf,
    set_state: watch::Sender<State>,
    stop: CancellationToken,
}

impl Supervision {
    async fn run(self) {
        let name = self.service.name;
        let mut tries = 0;
        loop {
            let started = Instant::now();
            let why = match self.run_once().await {
                Ok(Ended::Stopped) => return,
                Ok(Ended::Unexpectedly(status)) => status,
                Err(error) => format!("{error:#}"),
            };
            tries = if started.elapsed() >= SETTLED_AFTER {
                1
            } else {
                tries + 1
            };
            let ever_ready = matches!(*self.set_state.borrow(), State::WasReady);
            if !ever_ready && tries >= FIRST_TRIES_MAX {
                let why = format!(
                    "{why}; the end of {}:\n{}",
                    self.log.display(),
                    tail(&self.log, TAIL_LINES)
                );
                self.set_state.send_replace(State::GivenUp(why));
                return;
            }
            let delay = backoff(tries);
            console::say(&format!(
                "{name} ended ({why}); restart in {:.1} s; the end of {}: {}",
                delay.as_secs_f64(),
                self.log.display(),
                tail(&self.log, 1)
            ));
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    async fn run_once(&self) -> anyhow::Result<Ended> {
        let service = &self.service;
        let output = open_log(&self.log)?;
        let mut command = (service.command)()?;
        command
            .stdout(output.try_clone().context("share log file")?)
            .stderr(output);
        let mut child = Child::spawn(command)?;
        if let Some(pid) = child.pid() {
            self.lock.remember(service.name, pid);
        }
        let started = Instant::now();
        let ended = tokio::select! {
            status = child.wait() => Ended::Unexpectedly(status?.to_string()),
            never = self.report_ready(started) => match never {},
            () = self.stop.cancelled() => {
                child.stop(service.stop).await?;
                Ended::Stopped
            }
        };
        self.lock.forget(service.name);
        Ok(ended)
    }

    /// Reports when the service is ready, the first time and after each restart.
    async fn report_ready(&self, started: Instant) -> Infallible {
        while !(self.service.probe)().await {
            tokio::time::sleep(PROBE_EVERY).await;
        }
        let again = matches!(self.set_state.send_replace(State::WasReady), State::WasReady);
        if again {
            let (name, seconds) = (self.service.name, started.elapsed().as_secs_f64());
            console::say(&format!("{name} is back, ready after {seconds:.1} s"));
        }
        std::future::pending().await
    }
}

enum Ended {
    /// On request.
    Stopped,
    /// With this exit status.
    Unexpectedly(String),
}

/// Delay before try number `tries` + 1.
fn backoff(tries: u32) -> Duration {
    let doubled = 2_u32.saturating_pow(tries.saturating_sub(1));
    BACKOFF_MIN.saturating_mul(doubled).min(BACKOFF_MAX)
}

/// Opens for appending. Renames a file that has grown too large first.
fn open_log(path: &Path) -> anyhow::Result<File> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        fs::rename(path, path.with_extension("log.old")).context("rename the old log file")?;
    }
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}

/// The last lines of a log file; empty if it cannot be read.
fn tail(path: &Path, lines_max: usize) -> String {
    let text = read_end(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(lines_max)..].join("\n")
}

/// The last [`TAIL_BYTES`] of a file, or all of it.
fn read_end(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut end = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut end)?;
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_delays_double_up_to_a_limit() {
        let delays = [1, 2, 3, 4].map(|tries| backoff(tries).as_millis());
        assert_eq!(delays, [500, 1000, 2000, 4000]);
        assert_eq!(backoff(50), BACKOFF_MAX);
    }

    #[test]
    fn a_log_file_that_is_too_large_is_renamed() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log/role.log");
        open_log(&path).unwrap().set_len(LOG_BYTES_MAX + 1).unwrap();
        assert_eq!(open_log(&path).unwrap().metadata().unwrap().len(), 0);
        assert!(temp.path().join("log/role.log.old").exists());
    }

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("role.log");
        let lines: Vec<_> = (0..100).map(|line| line.to_string()).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        assert!(tail(&path, TAIL_LINES).starts_with("88\n") && tail(&path, TAIL_LINES).ends_with("\n99"));
        assert_eq!(tail(&path, 1), "99");
        let long: Vec<_> = (0..100_000).map(|line| line.to_string()).collect();
        fs::write(&path, long.join("\n")).unwrap();
        assert_eq!(tail(&path, 2), "99998\n99999");
        assert_eq!(tail(&temp.path().join("none"), 1), "");
    }
}
