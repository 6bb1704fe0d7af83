//! The thread that appends events. It writes all waiting events at once, flushes once, and then
//! acknowledges them.
//!
//! If a write fails, its bytes are truncated and the events refused. A file whose flush failed is
//! not used again.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use event_log::event;
use tokio::sync::oneshot;

use super::folder::{Storage, Tail};
use super::queue::Queue;
use super::segment::{HEADER_BYTES, RECORD_HEADER_BYTES, SegmentHeader};
use super::{Error, Options};

/// Approximate limit of the bytes per flush.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;

pub(super) enum Command {
    Append(Append),
    /// Appends no more events to this segment, so that it can be removed once it is forwarded.
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
    header: SegmentHeader,
    length: u64,
    tail: Box<dyn Tail>,
}

impl Writer {
    /// Runs until all senders are dropped.
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

    /// A sealed segment ends with a committed batch.
    fn seal(&mut self, number: u64) {
        let sealed = self.active.take_if(|active| active.header.number == number);
        if sealed.is_some() {
            self.queue.seal(number);
        }
    }

    fn commit(&mut self, batch: Vec<Append>) {
        let started = Instant::now();
        let mut room = self.options.bytes_max.saturating_sub(self.queue.used());
        let mut fitting = Vec::new();
        for append in batch {
            let size = (append.payload.len() + RECORD_HEADER_BYTES + HEADER_BYTES) as u64;
            if size <= room {
                room -= size;
                fitting.push(append);
            } else {
                answer(append, Err(Error::Full));
            }
        }
        if fitting.is_empty() {
            return;
        }
        let result = self.write(&fitting);
        metrics::histogram!("springtide_spool_commit_seconds").record(started.elapsed().as_secs_f64());
        if let Err(error) = &result {
            tracing::error!(%error, events = fitting.len(), "cannot write to the spool, the events were refused");
        }
        let full =
            |error: &io::Error| matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        for append in fitting {
            let outcome = match &result {
                Ok(()) => Ok(()),
                Err(error) if full(error) => Err(Error::DiskFull),
                Err(_) => Err(Error::Disk),
            };
            answer(append, outcome);
        }
    }

    /// Writes and flushes all events or none.
    fn write(&mut self, batch: &[Append]) -> io::Result<()> {
        let segment_bytes_max = self.options.segment_bytes_max;
        if let Some(full) = self.active.take_if(|active| active.length >= segment_bytes_max) {
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
            active
                .header
                .append_record(&mut bytes, offset, spooled_at_us, &append.payload);
        }
        if let Err(error) = active.tail.append(&bytes).and_then(|()| active.tail.sync()) {
            // After a failed flush the contents on disk are unknown. Keeps the acknowledged bytes
            // and abandons the file.
            if let Err(error) = active.tail.truncate(active.length) {
                tracing::error!(%error, segment = active.header.number, "cannot truncate the refused events");
            }
            self.queue.seal(active.header.number);
            return Err(error);
        }
        let written = bytes.len() as u64;
        active.length += written;
        self.queue.append(active.header.number, written, spooled_at_us);
        self.active = Some(active);
        Ok(())
    }

    fn create(&mut self) -> io::Result<Active> {
        let number = self.next_number;
        // Also if creation fails, because its file may still exist.
        self.next_number += 1;
        let (header, tail) = self.storage.create(number)?;
        let length = HEADER_BYTES as u64;
        self.queue.add(number, length);
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
    // Fails if the request was canceled. The event is forwarded anyway.
    let _ = append.done.send(outcome);
}
