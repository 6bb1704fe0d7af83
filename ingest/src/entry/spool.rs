//! The collector's spool: keeps events on a local disk until the upstream ingest has acknowledged
//! them. For regions that are too far from the log to wait for it.
//!
//! ```text
//!  request ─► Spool::append ─► writer: appends, flushes once per batch
//!                                │   └► acknowledged: on this disk, not in the log
//!                                │ segments
//!                                ▼
//!                              forwarder: POST to the upstream, with back-off,
//!                                │        in order within an episode
//!                                ├ accepted: a segment is removed when all its events are
//!                                ├ permanently refused: refused.jsonl
//!                                └ not taken for a reason of its own: set aside, tried again
//! ```
//!
//! No log crate that we found reads on after a damaged record. The spool must, because the records
//! behind it were acknowledged too.

mod folder;
mod forward;
#[cfg(any(test, feature = "fuzz"))]
#[expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a violated property must end the run, as in a test"
)]
pub(crate) mod fuzz;
mod options;
mod queue;
mod refused;
mod request;
mod segment;
#[cfg(test)]
mod tests;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError};

use anyhow::Context;
use tokio::sync::oneshot;

use event_log::event::Event;
use folder::{Folder, Storage};
pub(crate) use forward::Forwarder;
pub use options::Options;
pub(crate) use options::check_upstream;
use queue::Queue;
pub(crate) use request::Request;
use writer::{Append, Command, Writer};

/// Why an event was not spooled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the event is too large for the spool")]
    TooLarge,
    #[error("too many events are waiting for the spool's disk")]
    Busy,
    #[error("the spool is full until the upstream accepts events again")]
    Full,
    #[error("the spool's disk is full")]
    DiskFull,
    #[error("the spool's disk failed")]
    Disk,
}

impl Error {
    /// When to send the event again.
    pub fn retry_after_seconds(self) -> u32 {
        match self {
            Self::TooLarge | Self::Busy => 1,
            Self::Full | Self::DiskFull | Self::Disk => 10,
        }
    }
}

/// Appends to the spool. Cheap to clone. The writer ends with the last clone and the forwarder.
#[derive(Clone)]
pub(crate) struct Spool {
    queue: Arc<Queue>,
    commands: SyncSender<Command>,
    bytes_max: u64,
}

/// An open spool. Join the writer's thread at the end.
pub(crate) struct Opened {
    pub spool: Spool,
    pub forwarder: Forwarder,
    pub writer: std::thread::JoinHandle<()>,
}

/// Locks the folder and recovers its contents. Blocks.
pub(crate) fn open(path: &Path, upstream: &str, options: &Options) -> anyhow::Result<Opened> {
    let folder = Arc::new(Folder::open(path)?);
    let storage = Box::new(folder.clone());
    open_on(storage, folder, upstream, options)
}

fn open_on(
    storage: Box<dyn Storage>,
    folder: Arc<Folder>,
    upstream: &str,
    options: &Options,
) -> anyhow::Result<Opened> {
    let contents = folder.recover()?;
    let queue = Arc::new(Queue::new(&contents));
    tracing::info!(
        segments = contents.segments.len(),
        bytes = contents.used,
        "spool opened"
    );
    let (commands, queued) = mpsc::sync_channel(options.waiting_max);
    let writer = Writer {
        storage,
        queue: queue.clone(),
        options: options.clone(),
        next_number: contents.next_number,
        active: None,
    };
    let writer = std::thread::Builder::new()
        .name("spool-writer".to_owned())
        .spawn(move || writer.run(&queued))
        .context("start the spool's writer")?;
    let forwarder = Forwarder::new(folder, queue.clone(), commands.clone(), upstream, options)?;
    let spool = Spool {
        queue,
        commands,
        bytes_max: options.bytes_max,
    };
    Ok(Opened {
        spool,
        forwarder,
        writer,
    })
}

impl Spool {
    /// Returns `Ok` once the event is flushed to disk, so that it survives a crash.
    pub(crate) async fn append(&self, event: &Event) -> Result<(), Error> {
        let payload = event.encode();
        if payload.len() > segment::RECORD_PAYLOAD_BYTES_MAX {
            return Err(Error::TooLarge);
        }
        if self.queue.used() >= self.bytes_max {
            metrics::counter!("springtide_spool_events_total", "outcome" => "full").increment(1);
            return Err(Error::Full);
        }
        let (done, outcome) = oneshot::channel();
        let sent = self.commands.try_send(Command::Append(Append { payload, done }));
        sent.map_err(|error| match error {
            TrySendError::Full(_) => Error::Busy,
            TrySendError::Disconnected(_) => Error::Disk,
        })?;
        // The writer ends early only after a panic. Then the outcome is unknown.
        outcome.await.unwrap_or(Err(Error::Disk))
    }
}
