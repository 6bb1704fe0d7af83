//! One running machine.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::net::UnixStream;
use tokio::runtime::Handle;

use super::Options;
use super::agent::Agent;
use super::launch::{self, AGENT_SOCKET, CONSOLE, CONTROL_SOCKET, LOG, Start};
use super::qmp::Control;
use crate::provider::{Error, World};
use crate::{Command, Output};

/// QEMU opens its sockets within milliseconds, unless the host is overloaded.
const SOCKET_TIME_MAX: Duration = Duration::from_secs(20);
const SOCKET_PAUSE: Duration = Duration::from_millis(2);
/// Longest path of a Unix socket on Linux, bytes.
const SOCKET_BYTES_MAX: usize = 107;
/// Of its log and its console, in an error.
const SAID_LINES: usize = 5;

/// A machine. It ends, and its folder with it, when it is dropped.
#[derive(Debug)]
pub struct Machine {
    /// None: it is ending.
    running: Option<Running>,
    pid: u32,
    folder: PathBuf,
    pub(super) control: Control,
    pub(super) agent: Agent,
    /// Set when the protocol with the agent may have broken: nothing that it says can be trusted to
    /// belong to the next question.
    lost: Option<String>,
}

/// A process and its folder on the host. Dropping it kills the process, waits for its end, which takes as
/// long as the kernel needs for its memory, and removes the folder.
#[derive(Debug)]
struct Running {
    process: Child,
    folder: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        if let Err(error) = self.process.wait() {
            tracing::warn!(%error, "a machine was not waited for");
        }
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            tracing::warn!(%error, folder = %self.folder.display(), "the folder of a machine was not removed");
        }
    }
}

impl Machine {
    /// Starts QEMU in the new folder `own`, and connects to it. `snapshot` has or gets its memory.
    pub(super) async fn start(options: &Options, own: PathBuf, snapshot: &Path, start: Start) -> Result<Self, Error> {
        let length = own.join(CONTROL_SOCKET).as_os_str().len();
        if length > SOCKET_BYTES_MAX {
            return Err(Error::Unusable(format!(
                "{} is too long a path for sockets: choose a folder with a shorter one",
                own.display()
            )));
        }
        std::fs::create_dir(&own).map_err(|error| Error::Unusable(format!("create {}: {error}", own.display())))?;
        let process = match launch::launch(options, &own, snapshot, start) {
            Ok(process) => process,
            Err(error) => {
                let _ = std::fs::remove_dir_all(&own);
                return Err(error);
            }
        };
        let mut running = Running { process, folder: own };
        // Before anything runs in it: what runs there could put something else in the sockets' place.
        let control = Control::open(connect(&mut running, CONTROL_SOCKET).await?).await?;
        let agent = Agent::new(connect(&mut running, AGENT_SOCKET).await?);
        Ok(Self {
            pid: running.process.id(),
            folder: running.folder.clone(),
            running: Some(running),
            control,
            agent,
            lost: None,
        })
    }

    /// The process of bubblewrap, whose child is QEMU.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its folder on the host.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// What QEMU and the machine's console said last.
    pub(super) fn said(&self) -> String {
        said(&self.folder)
    }

    async fn perform(&mut self, command: &Command) -> Result<Output, Error> {
        if let Some(reason) = &self.lost {
            return Err(Error::Lost(reason.clone()));
        }
        // Holds if this future is dropped half-way.
        self.lost = Some("a command was given up while it ran".to_owned());
        let result = self.agent.run(command).await;
        self.lost = match &result {
            Err(Error::Lost(reason)) => Some(reason.clone()),
            _ => None,
        };
        result
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let running = self.running.take();
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn_blocking(|| drop(running)));
        }
    }
}

#[async_trait]
impl World for Machine {
    async fn run(&mut self, command: &Command) -> Result<Output, Error> {
        self.perform(command).await
    }

    async fn destroy(mut self: Box<Self>) -> Result<(), Error> {
        let running = self.running.take();
        let ended = tokio::task::spawn_blocking(|| drop(running)).await;
        ended.map_err(|error| Error::Lost(format!("ending the machine failed: {error}")))
    }
}

/// Connects to a socket that QEMU is about to open.
async fn connect(running: &mut Running, name: &str) -> Result<UnixStream, Error> {
    let Running { process, folder } = running;
    let until = Instant::now() + SOCKET_TIME_MAX;
    loop {
        if let Ok(stream) = UnixStream::connect(folder.join(name)).await {
            return Ok(stream);
        }
        let ended = process.try_wait().ok().flatten();
        if let Some(status) = ended {
            return Err(Error::Unusable(format!(
                "the machine did not start ({status}): {}",
                said(folder)
            )));
        }
        if Instant::now() > until {
            return Err(Error::Unusable(format!(
                "QEMU did not open its socket within {} s: {}",
                SOCKET_TIME_MAX.as_secs(),
                said(folder)
            )));
        }
        tokio::time::sleep(SOCKET_PAUSE).await;
    }
}

fn said(folder: &Path) -> String {
    let last = |name: &str| {
        let text = std::fs::read(folder.join(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(SAID_LINES)..].join(" | ")
    };
    let (log, console) = (last(LOG), last(CONSOLE));
    match (log.as_str(), console.as_str()) {
        ("", "") => "it said nothing".to_owned(),
        ("", said) | (said, "") => said.to_owned(),
        (log, console) => format!("{log} | {console}"),
    }
}
