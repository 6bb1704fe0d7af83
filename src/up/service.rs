//! One supervised process: started, watched, and restarted with back-off when it dies, until it is
//! stopped. One that ends in the same way again and again is given up.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
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
/// A service is given up after this many ends in a row for the same reason.
const EQUAL_ENDS_MAX: u32 = 3;
/// Not these: a full disk ends them until there is room.
const ALWAYS_RESTARTED: [&str; 2] = ["postgres", "kafka"];
/// Ends before a run of this length do not count.
const FORGIVEN_AFTER: Duration = Duration::from_secs(1800);
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// A log file larger than this becomes `<name>.log.old`, bytes.
const LOG_BYTES_MAX: u64 = 64 << 20;
/// How often the size of a log file is looked at.
const LOG_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The kernel's count of processes that it has killed to free memory.
const VMSTAT: &str = "/proc/vmstat";
const OUT_OF_MEMORY: &str = "killed by the kernel: the machine or its cgroup is out of memory";
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

/// Whether the service has ever been ready.
#[derive(Debug, Clone)]
pub enum State {
    Starting,
    WasReady,
    /// It is not started again. It says why.
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
        let mut ends = Ends::default();
        loop {
            let started = Instant::now();
            let kills = memory_kills();
            let (why, is_fault) = match self.run_once().await {
                Ok(Ended::Stopped) => return,
                Ok(Ended::Unexpectedly(status)) => match memory_kills() > kills {
                    true if status.signal() == Some(Signal::SIGKILL as i32) => (OUT_OF_MEMORY.to_owned(), true),
                    _ => (status.to_string(), is_fault(status)),
                },
                Err(error) => (format!("{error:#}"), true),
            };
            tries = if started.elapsed() >= SETTLED_AFTER {
                1
            } else {
                tries + 1
            };
            let ever_ready = matches!(*self.set_state.borrow(), State::WasReady);
            let last_line = tail(&self.log, 1);
            if started.elapsed() >= FORGIVEN_AFTER {
                ends = Ends::default();
            }
            // memory runs out wherever it happens to be
            let reason = if why == OUT_OF_MEMORY { "" } else { &last_line };
            let counts = is_fault && !ALWAYS_RESTARTED.contains(&name);
            let equal = if counts { ends.add(&why, reason) } else { 0 };
            if equal >= EQUAL_ENDS_MAX || !ever_ready && tries >= FIRST_TRIES_MAX {
                let times = if equal >= EQUAL_ENDS_MAX {
                    "each time for the same reason"
                } else {
                    "and was never ready"
                };
                let why = format!(
                    "it ended {} times, {times} ({why}), and is not started again; the end of {}:\n{}\nMend that, \
                     then stop `springtide up` and start it again: nothing that was acknowledged is lost",
                    equal.max(tries),
                    self.log.display(),
                    tail(&self.log, TAIL_LINES)
                );
                if ever_ready {
                    console::say(&format!("{name} is given up: {why}"));
                }
                self.set_state.send_replace(State::GivenUp(why));
                return;
            }
            let delay = backoff(tries);
            console::say(&format!(
                "{name} ended ({why}); restart in {:.1} s; the end of {}: {last_line}",
                delay.as_secs_f64(),
                self.log.display()
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
            status = child.wait() => Ended::Unexpectedly(status?),
            never = self.report_ready(started) => match never {},
            never = self.rotate_log() => match never {},
            () = self.stop.cancelled() => {
                child.stop(service.stop).await?;
                Ended::Stopped
            }
        };
        self.lock.forget(service.name);
        Ok(ended)
    }

    /// Keeps the log file small while the process writes to it.
    async fn rotate_log(&self) -> Infallible {
        loop {
            tokio::time::sleep(LOG_CHECK_INTERVAL).await;
            if let Err(error) = rotate(&self.log) {
                console::say(&format!("{} was not rotated: {error:#}", self.log.display()));
            }
        }
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
    Unexpectedly(ExitStatus),
}

/// Ends in a row for the same reason.
#[derive(Debug, Default)]
struct Ends {
    reason: (String, String),
    count: u32,
}

impl Ends {
    /// Returns how many ends in a row had this reason. The last line of the log belongs to it, without
    /// its numbers: times, process ids.
    fn add(&mut self, why: &str, last_line: &str) -> u32 {
        let words = last_line.split(|c: char| c.is_ascii_digit()).collect();
        let reason = (why.to_owned(), words);
        self.count = if self.reason == reason { self.count + 1 } else { 1 };
        self.reason = reason;
        self.count
    }
}

/// Whether a process ended by itself. A person who stops or kills it is no fault of its own.
fn is_fault(status: ExitStatus) -> bool {
    let crashes = [
        Signal::SIGABRT,
        Signal::SIGBUS,
        Signal::SIGFPE,
        Signal::SIGILL,
        Signal::SIGSEGV,
    ];
    match status.signal() {
        Some(signal) => crashes.iter().any(|&crash| crash as i32 == signal),
        None => !status.success(),
    }
}

/// How many processes the kernel has killed to free memory, as far as it says.
fn memory_kills() -> u64 {
    let counters = fs::read_to_string(VMSTAT).unwrap_or_default();
    let count = counters.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Delay before try number `tries` + 1.
fn backoff(tries: u32) -> Duration {
    let doubled = 2_u32.saturating_pow(tries.saturating_sub(1));
    BACKOFF_MIN.saturating_mul(doubled).min(BACKOFF_MAX)
}

/// Opens for appending.
fn open_log(path: &Path) -> anyhow::Result<File> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    rotate(path)?;
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}

/// Copies a file that has grown too large and empties it: its writer has it open. What it writes in
/// between is lost, at most a few lines.
fn rotate(path: &Path) -> anyhow::Result<()> {
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        fs::copy(path, path.with_extension("log.old")).context("copy the old log file")?;
        let file = File::options().write(true).open(path).context("open the log file")?;
        file.set_len(0).context("empty the log file")?;
    }
    Ok(())
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
    use std::io::Write;

    #[test]
    fn restart_delays_double_up_to_a_limit() {
        let delays = [1, 2, 3, 4].map(|tries| backoff(tries).as_millis());
        assert_eq!(delays, [500, 1000, 2000, 4000]);
        assert_eq!(backoff(50), BACKOFF_MAX);
    }

    #[test]
    fn a_log_file_that_is_too_large_is_emptied_while_its_writer_goes_on() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("log/role.log");
        let mut writer = open_log(&path).unwrap();
        writer.set_len(LOG_BYTES_MAX + 1).unwrap();
        rotate(&path).unwrap();
        writeln!(writer, "next").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "next\n");
        assert!(temp.path().join("log/role.log.old").exists());
        writer.set_len(LOG_BYTES_MAX + 1).unwrap();
        assert_eq!(open_log(&path).unwrap().metadata().unwrap().len(), 0);
    }

    #[test]
    fn ends_are_equal_if_their_log_says_the_same_at_another_time() {
        let mut ends = Ends::default();
        let status = "exit status: 1";
        assert_eq!(ends.add(status, "2026-01-01T00:00:01Z ERROR no memory"), 1);
        assert_eq!(ends.add(status, "2026-01-01T00:00:09Z ERROR no memory"), 2);
        assert_eq!(ends.add(status, "2026-01-01T00:00:10Z ERROR no database"), 1);
        assert_eq!(ends.add(status, "2026-01-01T00:00:12Z ERROR no memory"), 1);
        assert_eq!(ends.add("signal: 11", "2026-01-01T00:00:13Z ERROR no memory"), 1);
    }

    #[test]
    fn only_what_a_process_does_by_itself_is_its_fault() {
        let wait_status = ExitStatus::from_raw;
        assert!(is_fault(wait_status(1 << 8)) && is_fault(wait_status(Signal::SIGSEGV as i32)));
        for by_others in [0, Signal::SIGKILL as i32, Signal::SIGTERM as i32] {
            assert!(!is_fault(wait_status(by_others)), "{by_others}");
        }
    }

    /// Supervises a shell that runs this line, until it is given up.
    async fn given_up(line: &'static str, is_ready: bool) -> String {
        let temp = tempfile::tempdir().unwrap();
        let service = Service {
            name: "test",
            stop: Signal::SIGTERM,
            probe: Rc::new(move || Box::pin(async move { is_ready })),
            command: Box::new(move || {
                let mut command = Command::new("sh");
                command.args(["-c", line]);
                Ok(command)
            }),
        };
        let lock = StateLock::take(temp.path()).unwrap();
        let local = tokio::task::LocalSet::new();
        let given_up = async {
            let mut running = service.start(lock, temp.path());
            let state = running.state.wait_for(|state| matches!(state, State::GivenUp(_))).await;
            let State::GivenUp(why) = state.unwrap().clone() else {
                unreachable!("it waited for that");
            };
            running.stop().await;
            why
        };
        local.run_until(given_up).await
    }

    #[tokio::test]
    async fn a_process_that_ends_three_times_for_the_same_reason_is_given_up_even_if_it_was_ready() {
        let why = given_up("sleep 0.3; echo no memory >&2; exit 3", true).await;
        assert!(
            why.contains("3 times, each time for the same reason (exit status: 3)"),
            "{why}"
        );
        assert!(why.contains("no memory") && why.contains("start it again"), "{why}");
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
