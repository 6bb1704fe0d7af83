//! Runs a program in a sandbox of its own, which bubblewrap (`bwrap`, 0.8 or newer) makes and which ends
//! with the program.
//!
//! The program has namespaces of its own for users, mounts, processes, network, IPC, host name and control
//! groups. It sees /usr and the libraries, read only; a minimal /dev; and /tmp, in memory, with its files in
//! `/tmp/work`. It has no network, /proc, home, capabilities, or descriptors and variables of this process,
//! and the system calls that `filter.rs` lists. What the limits mean is in [`crate::Limits`].
//!
//! It works as root, which then runs bwrap as the user `nobody`, and as any user who may make user
//! namespaces.

mod arguments;
mod filter;
mod spawn;
mod usage;

use crate::{Command, Ended, Limit, Output};
use spawn::{Process, Spawner};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::process::ChildStdin;
use tokio::sync::Semaphore;

/// The user `nobody`, as whom root runs bwrap: the kernel does not limit how many processes root has.
const NOBODY: u32 = 65534;
/// How long the output may take to end after the sandbox has.
const DRAIN: Duration = Duration::from_secs(2);
/// Of bwrap's reports: two small JSON objects.
const STATUS_BYTES: u64 = 4096;

/// Why a program could not be run. What the program does itself is in [`Output`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the command cannot run in a sandbox: {0}")]
    Command(String),
    #[error("a sandbox needs bubblewrap, and no `bwrap` is in PATH: install the package `bubblewrap` (0.8 or newer)")]
    Missing,
    #[error(
        "bubblewrap could not make a sandbox: {0}. It needs version 0.8 or newer and user namespaces. Linux may forbid \
        these: see `sysctl user.max_user_namespaces`, `kernel.unprivileged_userns_clone` (Debian), \
        `kernel.apparmor_restrict_unprivileged_userns` (Ubuntu), or the seccomp profile of the container"
    )]
    Refused(String),
    #[error("{what}")]
    Start {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
}

/// Runs programs, each in a sandbox of its own, a bounded number at a time.
#[derive(Debug)]
pub struct Sandbox {
    bwrap: PathBuf,
    filter: Vec<u8>,
    spawner: Spawner,
    running: Semaphore,
}

impl Sandbox {
    /// At most `at_a_time` programs run at a time; others wait for their turn, and their wall clock with them.
    pub fn new(at_a_time: usize) -> Result<Sandbox, Error> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let bwrap = std::env::split_paths(&path)
            .map(|folder| folder.join("bwrap"))
            .find(|program| program.is_file());
        let spawner = Spawner::start().map_err(|source| Error::Start {
            what: "start the thread that starts sandboxes",
            source,
        })?;
        Ok(Sandbox {
            bwrap: bwrap.ok_or(Error::Missing)?,
            filter: filter::compiled()?,
            spawner,
            running: Semaphore::new(at_a_time.clamp(1, Semaphore::MAX_PERMITS)),
        })
    }

    /// Runs the program to its end. Takes the limit of the wall clock and a few seconds at most. Then all
    /// its processes are killed, also those in the background, and also if this future is dropped. On a
    /// busy machine the kernel may need a moment to end them.
    pub async fn run(&self, command: &Command) -> Result<Output, Error> {
        let _turn = self.running.acquire().await; // it is never closed
        let started = Instant::now();
        let mut process = self.start(command).await?;
        let limits = &command.limits;
        let mut stdout = Kept::new(limits.output_bytes);
        let mut stderr = Kept::new(limits.output_bytes);
        let ended = Box::pin(watch(&mut process, command, &mut stdout, &mut stderr)).await;
        process.end(DRAIN).await;
        let report = |source| Error::Start {
            what: "wait for bubblewrap",
            source,
        };
        let ended = match ended.map_err(report)? {
            Stop::Limit(limit) => Ended::Exceeded(limit),
            Stop::Exit(status_of_bwrap) => match exit_code(process.status()).await {
                // For the signal n bwrap says 128 + n, as a program itself may.
                Some(code) => Ended::Exited(code),
                None => return Err(Error::Refused(refusal(&stderr.bytes, status_of_bwrap))),
            },
        };
        Ok(Output {
            ended,
            stdout: stdout.bytes,
            stderr: stderr.bytes,
            wall: started.elapsed(),
        })
    }

    /// The process of bwrap.
    async fn start(&self, command: &Command) -> Result<Process, Error> {
        let start = |source| Error::Start {
            what: "start bubblewrap",
            source,
        };
        let (status, report): (OwnedFd, OwnedFd) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|errno| start(errno.into()))?;
        let status = pipe::Receiver::from_owned_fd(status).map_err(start)?;
        let arguments = arguments::arguments(command, &self.filter, report)?;
        let mut bwrap = tokio::process::Command::new(&self.bwrap);
        bwrap.args(arguments.words).current_dir("/").env_clear();
        bwrap
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", arguments::FOLDER)
            .env("LANG", "C.UTF-8");
        bwrap
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if nix::unistd::geteuid().is_root() {
            bwrap.uid(NOBODY).gid(NOBODY);
        }
        spawn::inherit_only(&mut bwrap, arguments.descriptors);
        self.spawner.spawn(bwrap, arguments.child, status).await.map_err(start)
    }
}

/// Why the wait for a program ended.
enum Stop {
    Exit(ExitStatus),
    Limit(Limit),
}

async fn watch(
    process: &mut Process,
    command: &Command,
    stdout: &mut Kept,
    stderr: &mut Kept,
) -> std::io::Result<Stop> {
    let limits = &command.limits;
    let child = process.child();
    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let folders = arguments::folders(limits);
    let pid = child.id();
    let usage = async {
        match pid {
            Some(pid) => usage::exceeded(pid, limits, &folders).await,
            None => std::future::pending().await,
        }
    };
    let end = async {
        let mut reading = std::pin::pin!(async { tokio::try_join!(stdout.read(output), stderr.read(errors)) });
        let mut status = None;
        let read = tokio::select! {
            read = &mut reading => read,
            ended = child.wait() => {
                status = Some(ended?);
                tokio::time::timeout(DRAIN, reading).await.unwrap_or(Ok(((), ())))
            }
        };
        match (read, status) {
            (Err(limit), _) => Ok(Stop::Limit(limit)),
            (Ok(_), Some(status)) => Ok(Stop::Exit(status)),
            (Ok(_), None) => child.wait().await.map(Stop::Exit), // it had closed its output
        }
    };
    tokio::select! {
        stop = end => stop,
        limit = usage => Ok(Stop::Limit(limit)),
        () = tokio::time::sleep(limits.wall) => Ok(Stop::Limit(Limit::Wall)),
        never = feed(input, &command.stdin) => match never {},
    }
}

/// Writes the standard input and closes it, then waits for ever. A program need not read it.
async fn feed(input: Option<ChildStdin>, bytes: &[u8]) -> std::convert::Infallible {
    if let Some(mut input) = input {
        let _ = input.write_all(bytes).await;
    }
    std::future::pending().await
}

/// Output of the program, up to a limit.
struct Kept {
    bytes: Vec<u8>,
    limit: u64,
}

impl Kept {
    fn new(limit: u64) -> Kept {
        Kept { bytes: vec![], limit }
    }

    /// Reads to the end, or until there is more than the limit allows.
    async fn read(&mut self, from: Option<impl AsyncRead + Unpin>) -> Result<(), Limit> {
        let Some(from) = from else { return Ok(()) };
        // An error of a pipe ends the output, as its end does.
        let _ = from
            .take(self.limit.saturating_add(1))
            .read_to_end(&mut self.bytes)
            .await;
        if self.bytes.len() as u64 > self.limit {
            self.bytes.truncate(usize::try_from(self.limit).unwrap_or(usize::MAX));
            return Err(Limit::Output);
        }
        Ok(())
    }
}

/// What bwrap says that the program ended with; none where it ran no program.
async fn exit_code(status: &mut pipe::Receiver) -> Option<i32> {
    #[derive(serde::Deserialize)]
    struct Report {
        #[serde(rename = "exit-code")]
        exit_code: Option<i32>,
    }
    let mut text = vec![];
    let read = async { status.take(STATUS_BYTES).read_to_end(&mut text).await };
    tokio::time::timeout(DRAIN, read).await.ok()?.ok()?;
    let reports = serde_json::Deserializer::from_slice(&text).into_iter::<Report>();
    reports.flatten().find_map(|report| report.exit_code)
}

/// The last line that bwrap wrote. No program has run, so nothing else is there.
fn refusal(stderr: &[u8], status: ExitStatus) -> String {
    let text = String::from_utf8_lossy(stderr);
    match text.lines().last() {
        Some(line) => line.trim_start_matches("bwrap: ").to_owned(),
        None => format!("it ended with {status}"),
    }
}
