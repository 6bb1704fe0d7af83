//! The one thread that appends: it takes what waits, writes it in one go, flushes once, and only then tells all who wait.
//! What fails is cut off again and refused; a file whose flush failed is never trusted with another one.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::queue::Queue;
use super::segment::{HEADER_BYTES, Header, RECORD_HEADER_BYTES};
use super::{Error, Options};
use crate::event;

/// Bytes that one flush covers, about.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Where segments are made; a disk that can be made to fail in tests.
pub(super) trait Storage: Send {
    /// A new segment with its header, on the disk.
    fn create(&mut self, number: u64) -> io::Result<(Header, Box<dyn Tail>)>;
}

/// The end of a segment.
pub(super) trait Tail: Send {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Returns when everything that was appended survives a loss of power.
    fn sync(&mut self) -> io::Result<()>;
    /// Makes the segment `length` bytes long.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

pub(super) enum Command {
    Append(Append),
    /// Appends nothing more to this segment, so that it can go once it is forwarded.
    Seal(u64),
}

pub(super) struct Append {
    pub payload: Vec<u8>,
    pub done: oneshot::Sender<Result<(), Error>>,
}

pub(super) struct Writer {
    pub storage: Box<dyn Storage>,
    pub queue: Arc<Queue>,
    pub options: Options,
    pub next_number: u64,
    pub active: Option<Active>,
}

pub(super) struct Active {
    header: Header,
    length: u64,
    tail: Box<dyn Tail>,
}

impl Writer {
    /// Until nobody can ask any more.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let wait = Duration::from_millis(self.options.commit_wait_ms);
        while let Ok(first) = commands.recv() {
            let deadline = Instant::now() + wait;
            let mut batch = Vec::new();
            let mut bytes = 0;
            let mut next = Some(first);
            while let Some(command) = next.take() {
                match command {
                    Command::Append(append) => {
                        bytes += append.payload.len() + RECORD_HEADER_BYTES;
                        batch.push(append);
                    }
                    Command::Seal(number) => {
                        self.seal(number);
                        if batch.is_empty() {
                            break;
                        }
                    }
                }
                if bytes >= BATCH_BYTES_MAX {
                    break;
                }
                let left = deadline.saturating_duration_since(Instant::now());
                next = commands.recv_timeout(left).ok();
            }
            if !batch.is_empty() {
                self.commit(batch);
            }
        }
    }

    /// A sealed segment ends behind what was committed, never in the middle of a batch.
    fn seal(&mut self, number: u64) {
        if self
            .active
            .as_ref()
            .is_some_and(|active| active.header.number == number)
        {
            self.active = None;
            self.queue.seal(number);
        }
    }

    fn commit(&mut self, batch: Vec<Append>) {
        let started = Instant::now();
        let mut room = self.options.bytes_max.saturating_sub(self.queue.used());
        let mut taken = Vec::new();
        for append in batch {
            let size = (append.payload.len() + RECORD_HEADER_BYTES + HEADER_BYTES) as u64;
            if size <= room {
                room -= size;
                taken.push(append);
            } else {
                answer(append, Err(Error::Full));
            }
        }
        if taken.is_empty() {
            return;
        }
        let result = self.write(&taken);
        metrics::histogram!("springtide_spool_commit_seconds").record(started.elapsed().as_secs_f64());
        if let Err(error) = &result {
            // One line for a whole batch; requests may be many.
            tracing::error!(%error, events = taken.len(), "nothing was spooled, the events were refused");
        }
        let full =
            |error: &io::Error| matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        for append in taken {
            let outcome = match &result {
                Ok(()) => Ok(()),
                Err(error) if full(error) => Err(Error::DiskFull),
                Err(_) => Err(Error::Disk),
            };
            answer(append, outcome);
        }
    }

    /// All of it on the disk, or none of it.
    fn write(&mut self, batch: &[Append]) -> io::Result<()> {
        if let Some(full) = self
            .active
            .take_if(|active| active.length >= self.options.segment_bytes_max)
        {
            self.queue.seal(full.header.number);
        }
        let mut active = match self.active.take() {
            Some(active) => active,
            None => self.create()?,
        };
        let spooled_at_us = i64::try_from(event::now().unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX);
        let mut bytes = Vec::new();
        for append in batch {
            let offset = active.length + bytes.len() as u64;
            active.header.append(&mut bytes, offset, spooled_at_us, &append.payload);
        }
        if let Err(error) = active.tail.append(&bytes).and_then(|()| active.tail.sync()) {
            // After a failed flush nobody knows what the disk has: what was acknowledged stays, the file is left.
            if let Err(error) = active.tail.cut(active.length) {
                tracing::error!(%error, segment = active.header.number, "the refused events cannot be cut off");
            }
            self.queue.seal(active.header.number);
            return Err(error);
        }
        active.length += bytes.len() as u64;
        self.queue
            .publish(active.header.number, active.length, bytes.len() as u64, spooled_at_us);
        self.active = Some(active);
        Ok(())
    }

    fn create(&mut self) -> io::Result<Active> {
        let number = self.next_number;
        // Also after a failure: what is left of it must not be in the way.
        self.next_number += 1;
        let (header, tail) = self.storage.create(number)?;
        let length = HEADER_BYTES as u64;
        self.queue.begin(number, length);
        Ok(Active { header, length, tail })
    }
}

fn answer(append: Append, outcome: Result<(), Error>) {
    let label = match &outcome {
        Ok(()) => "spooled",
        Err(Error::Full | Error::DiskFull) => "full",
        Err(_) => "failed",
    };
    metrics::counter!("springtide_spool_events_total", "outcome" => label).increment(1);
    // Whoever asked may have gone away; the event is forwarded all the same.
    let _ = append.done.send(outcome);
}
