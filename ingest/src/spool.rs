//! The collector's spool: events on a local disk until the upstream ingest has acknowledged them. For regions that are too
//! far from the log to wait for it.
//!
//! ```text
//!  request ─► Spool::append ─► writer: append, one flush for all who wait ─► acknowledged: on this disk, not in the log
//!                                  │ segments
//!                                  ▼
//!                              forwarder ─► POST to the upstream, with back-off, in order within an episode
//!                                  │ taken: the segment goes once all of it is
//!                                  └ refused for good: refused.jsonl
//! ```
//!
//! Deliberately not a log crate: those that there are end at the first damaged record, and what comes behind one was
//! acknowledged too.

mod folder;
mod forward;
#[cfg(any(test, feature = "fuzz"))]
#[expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a broken property ends the run, as in a test"
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

use crate::event::Event;
use folder::Folder;
pub(crate) use forward::Forwarder;
pub use options::Options;
pub(crate) use options::check_upstream;
use queue::Queue;
pub(crate) use request::Request;
use writer::{Append, Command, Storage, Writer};

/// Why an event was not spooled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the event is too large for the spool")]
    TooLarge,
    #[error("too many events wait for the spool's disk")]
    Busy,
    #[error("the spool is full until the upstream takes events again")]
    Full,
    #[error("the spool's disk is full")]
    DiskFull,
    #[error("the spool's disk does not take events")]
    Disk,
}

impl Error {
    /// When the same event may be worth another try.
    pub fn retry_after_seconds(self) -> u32 {
        match self {
            Self::TooLarge | Self::Busy => 1,
            Self::Full | Self::DiskFull | Self::Disk => 10,
        }
    }
}

/// Appends to the spool. Cheap to clone; the writer ends when the last clone is gone.
#[derive(Clone)]
pub(crate) struct Spool {
    queue: Arc<Queue>,
    commands: SyncSender<Command>,
    bytes_max: u64,
}

/// An open spool: who appends, who forwards, and the thread between them, to be joined at the end.
pub(crate) struct Opened {
    pub spool: Spool,
    pub forwarder: Forwarder,
    pub writer: std::thread::JoinHandle<()>,
}

/// Takes the folder and what is in it. Blocks.
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
    let (commands, asked) = mpsc::sync_channel(options.waiting_max);
    let writer = Writer {
        storage,
        queue: queue.clone(),
        options: options.clone(),
        next_number: contents.next_number,
        active: None,
    };
    let writer = std::thread::Builder::new()
        .name("spool-writer".to_owned())
        .spawn(move || writer.run(&asked))
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
    /// Resolves when the event survives the end of this process, in whatever way. Not before, and never without.
    pub(crate) async fn append(&self, event: &Event) -> Result<(), Error> {
        let payload = event.encode();
        if payload.len() > segment::PAYLOAD_BYTES_MAX {
            return Err(Error::TooLarge);
        }
        if self.queue.used() >= self.bytes_max {
            metrics::counter!("springtide_spool_events_total", "outcome" => "full").increment(1);
            return Err(Error::Full);
        }
        let (done, outcome) = oneshot::channel();
        match self.commands.try_send(Command::Append(Append { payload, done })) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(Error::Busy),
            Err(TrySendError::Disconnected(_)) => return Err(Error::Disk),
        }
        // The writer is gone only after a panic; then nobody knows.
        outcome.await.unwrap_or(Err(Error::Disk))
    }
}
