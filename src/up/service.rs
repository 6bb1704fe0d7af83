//! One supervised part: started, watched, started again with back-off when it dies, until it is told to stop.

use std::convert::Infallible;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::Signal;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::child::Child;
use super::hold::Hold;
use crate::console;

const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// A part that lived this long starts again without delay-on-delay.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
/// A part that was never ready is given up after this many tries.
const FIRST_TRIES_MAX: u32 = 5;
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// A log file that is larger when its part starts becomes `<name>.log.old`, bytes.
const LOG_BYTES_MAX: u64 = 64 << 20;
const TAIL_LINES: usize = 12;

/// What a part is and how it is run.
pub struct Service {
    pub name: &'static str,
    /// The command of a fresh start.
    pub command: Box<dyn Fn() -> anyhow::Result<Command>>,
    /// Asks it to end in order.
    pub stop: Signal,
    /// Whether it answers.
    pub probe: Probe,
}

/// How to find out whether a part answers.
pub type Probe = Rc<dyn Fn() -> futures::future::LocalBoxFuture<'static, bool>>;

/// Where a part stands until it has been ready for the first time.
#[derive(Debug, Clone)]
pub enum State {
    Starting,
    Ready,
    GivenUp(String),
}

/// A part under supervision.
pub struct Running {
    pub name: &'static str,
    pub log: PathBuf,
    pub state: watch::Receiver<State>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Service {
    /// Starts supervising on this thread; its output goes to `<log_dir>/<name>.log`.
    pub fn start(self, hold: Hold, log_dir: &Path) -> Running {
        let (tell, state) = watch::channel(State::Starting);
        let stop = CancellationToken::new();
        let log = log_dir.join(format!("{}.log", self.name));
        let name = self.name;
        let supervision = Supervision {
            service: self,
            hold,
            log: log.clone(),
            tell,
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
    /// Returns when the process has ended.
    pub async fn stop(self) {
        self.stop.cancel();
        if self.task.await.is_err() {
            eprintln!("{}: its supervision panicked", self.name);
        }
    }
}

struct Supervision {
    service: Service,
    hold: Hold,
    log: PathBuf,
    tell: watch::Sender<State>,
    stop: CancellationToken,
}

impl Supervision {
    async fn run(self) {
        let name = self.service.name;
        let mut tries = 0;
        loop {
            let started = Instant::now();
            let ended = self.one_life().await;
            let why = match ended {
                Ok(Ended::Stopped) => return,
                Ok(Ended::Itself(how)) => how,
                Err(error) => format!("{error:#}"),
            };
            tries = if started.elapsed() >= SETTLED_AFTER {
                1
            } else {
                tries + 1
            };
            let ever_ready = matches!(*self.tell.borrow(), State::Ready);
            if !ever_ready && tries >= FIRST_TRIES_MAX {
                let why = format!(
                    "{why}; the end of {}:\n{}",
                    self.log.display(),
                    tail(&self.log, TAIL_LINES)
                );
                self.tell.send_replace(State::GivenUp(why));
                return;
            }
            let delay = backoff(tries);
            console::say(&format!(
                "{name} ended ({why}); again in {:.1} s; the end of {}: {}",
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

    async fn one_life(&self) -> anyhow::Result<Ended> {
        let service = &self.service;
        let output = open_log(&self.log)?;
        let mut command = (service.command)()?;
        command
            .stdout(output.try_clone().context("share log file")?)
            .stderr(output);
        let mut child = Child::spawn(command)?;
        if let Some(pid) = child.pid() {
            self.hold.remember(service.name, pid);
        }
        let born = Instant::now();
        let ended = tokio::select! {
            status = child.wait() => Ended::Itself(status?.to_string()),
            never = self.watch_readiness(born) => match never {},
            () = self.stop.cancelled() => {
                child.stop(service.stop).await?;
                Ended::Stopped
            }
        };
        self.hold.forget(service.name);
        Ok(ended)
    }

    /// Tells of the first readiness of all, and of each return after a death.
    async fn watch_readiness(&self, born: Instant) -> Infallible {
        while !(self.service.probe)().await {
            tokio::time::sleep(PROBE_EVERY).await;
        }
        let again = matches!(self.tell.send_replace(State::Ready), State::Ready);
        if again {
            let (name, seconds) = (self.service.name, born.elapsed().as_secs_f64());
            console::say(&format!("{name} is back, ready after {seconds:.1} s"));
        }
        std::future::pending().await
    }
}

enum Ended {
    /// As it was asked to.
    Stopped,
    /// Of itself, or killed: how.
    Itself(String),
}

/// Delay before try number `tries` + 1.
fn backoff(tries: u32) -> Duration {
    let doubled = 2_u32.saturating_pow(tries.saturating_sub(1));
    BACKOFF_MIN.saturating_mul(doubled).min(BACKOFF_MAX)
}

/// Opens for appending; a file grown too large is put aside first.
fn open_log(path: &Path) -> anyhow::Result<File> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        fs::rename(path, path.with_extension("log.old")).context("put the old log file aside")?;
    }
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}

fn tail(path: &Path, lines_max: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(lines_max)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_limit() {
        let delays = [1, 2, 3, 4].map(|tries| backoff(tries).as_millis());
        assert_eq!(delays, [500, 1000, 2000, 4000]);
        assert_eq!(backoff(50), BACKOFF_MAX);
    }

    #[test]
    fn a_log_file_grown_too_large_is_put_aside() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log/role.log");
        open_log(&path).unwrap().set_len(LOG_BYTES_MAX + 1).unwrap();
        assert_eq!(open_log(&path).unwrap().metadata().unwrap().len(), 0);
        assert!(temp.path().join("log/role.log.old").exists());
    }

    #[test]
    fn the_end_of_a_log_is_its_last_lines() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("role.log");
        let lines: Vec<_> = (0..100).map(|line| line.to_string()).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        assert!(tail(&path, TAIL_LINES).starts_with("88\n") && tail(&path, TAIL_LINES).ends_with("\n99"));
        assert_eq!(tail(&path, 1), "99");
        assert_eq!(tail(&temp.path().join("none"), 1), "");
    }
}
