//! Forwards the spool to the upstream, oldest events first.
//!
//! A segment is removed once the upstream has accepted, or permanently refused, every event in it.
//! After a restart, events may be sent again, which is harmless because an identical event is a
//! no-op. Events of one episode keep their order; others are sent concurrently.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use futures::future::join_all;
use prost::Message;
use serde_json::Value;
use time::format_description::well_known::Rfc3339;
use tokio::sync::RwLock;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::Options;
use super::folder::Folder;
use super::queue::{Queue, Segment};
use super::refused::{self, Refused};
use super::request::Request;
use super::segment::{HEADER_BYTES, SegmentHeader};
use super::writer::Command;
use crate::event::{self, Event, Undecodable, proto};

mod post;

use post::{Outcome, Upstream};

const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// A forwarded segment that is idle for this long is sealed, so that it can be removed.
const SEAL_AFTER: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Sends the spooled events until shutdown.
pub(crate) struct Forwarder {
    folder: Arc<Folder>,
    queue: Arc<Queue>,
    commands: SyncSender<Command>,
    upstream: Upstream,
    requests_max: usize,
    backoff_max: Duration,
    /// Held for reading by each disk operation.
    disk: RwLock<()>,
}

/// How far a segment is forwarded.
struct Position {
    number: u64,
    offset: u64,
    /// `None` before the first read, and if the header is damaged.
    header: Option<SegmentHeader>,
}

impl Forwarder {
    pub(super) fn new(
        folder: Arc<Folder>,
        queue: Arc<Queue>,
        commands: SyncSender<Command>,
        upstream: &str,
        options: &Options,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            folder,
            queue,
            commands,
            upstream: Upstream::new(upstream, options)?,
            requests_max: options.requests_max,
            backoff_max: Duration::from_secs_f64(options.backoff_seconds_max),
            disk: RwLock::default(),
        })
    }

    /// Runs until `shutdown`, and until the disk operations under way have ended and are counted.
    /// Whatever else is interrupted is repeated after the next start.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let stopped = async {
            shutdown.cancelled().await;
            let _no_operation = self.disk.write().await;
        };
        tokio::select! {
            () = stopped => {}
            () = self.forward() => {}
            () = self.report() => {}
        }
    }

    async fn forward(&self) {
        let mut position = Position::start(0);
        loop {
            let Some((number, segment)) = self.queue.first() else {
                self.queue.changed().await;
                continue;
            };
            if position.number != number {
                position = Position::start(number);
            }
            if position.offset < segment.length {
                self.advance(&mut position, segment).await;
            } else if segment.sealed {
                self.remove(number).await;
            } else {
                self.queue.forwarded(number, position.offset);
                self.idle(&position).await;
            }
        }
    }

    /// Waits for more events. Seals the segment if none arrive.
    async fn idle(&self, position: &Position) {
        tokio::select! {
            () = self.queue.changed() => {}
            () = sleep(SEAL_AFTER), if position.offset > HEADER_BYTES as u64 => {
                // Fails only if the writer is busy, and then more events arrive.
                let _ = self.commands.try_send(Command::Seal(position.number));
            }
        }
    }

    /// Forwards the part of the segment behind `position`.
    async fn advance(&self, position: &mut Position, segment: Segment) {
        let (number, offset, end) = (position.number, position.offset, segment.length);
        let read = move |folder: &Folder| folder.read(number, offset, end);
        let bytes = self.on_disk("read a segment", read).await;
        let mut begin = 0;
        if offset == 0 {
            position.header = SegmentHeader::decode(&bytes, number);
            begin = if position.header.is_some() { HEADER_BYTES } else { 0 };
        }
        position.offset = end;
        let first = offset + begin as u64;
        let Some(header) = position.header else {
            self.keep_damaged(number, first, bytes).await;
            return;
        };
        let bytes = &bytes[begin..];
        let scan = header.scan(first, bytes);
        // All bytes were flushed before, so a torn end is damage too.
        for range in scan.damaged.into_iter().chain(scan.torn) {
            let at = first + range.start as u64;
            self.keep_damaged(number, at, bytes[range].to_vec()).await;
        }
        if let Some(record) = scan.records.first() {
            self.queue.set_oldest(record.spooled_at_us);
        }
        let payloads = scan.records.into_iter().map(|record| &bytes[record.payload]);
        self.deliver(payloads).await;
    }

    /// Sends the events in up to `requests_max` sequences. All events of an episode are in the same
    /// sequence.
    async fn deliver(&self, payloads: impl Iterator<Item = &[u8]>) {
        let mut sequences: Vec<Vec<&[u8]>> = vec![Vec::new(); self.requests_max];
        for payload in payloads {
            let key = decode(payload).map_or([0; 16], |event| event.key());
            // The last bits of a UUIDv7 are random.
            let index = u128::from_be_bytes(key) % self.requests_max as u128;
            if let Some(sequence) = sequences.get_mut(usize::try_from(index).unwrap_or_default()) {
                sequence.push(payload);
            }
        }
        let sends = sequences.into_iter().map(|sequence| async {
            for payload in sequence {
                self.send(payload).await;
            }
        });
        join_all(sends).await;
    }

    /// Returns once the upstream has accepted the event, or has refused it and the refusal is on
    /// disk.
    async fn send(&self, payload: &[u8]) {
        let readable = decode(payload).ok();
        let Some((request, event)) = readable.and_then(|event| Some((Request::of(&event).ok()?, event))) else {
            let raw = Value::String(hex::encode(payload));
            let problem = Value::String("this version of the collector cannot read the event".to_owned());
            return self.refuse(None, problem, raw).await;
        };
        let mut pause = BACKOFF_MIN;
        loop {
            match self.upstream.post(&request).await {
                Outcome::Accepted => {
                    metrics::counter!("springtide_spool_forwarded_total").increment(1);
                    return;
                }
                Outcome::Refused { status, problem } => {
                    let event = serde_json::to_value(&event).unwrap_or_else(|_| hex::encode(payload).into());
                    return self.refuse(Some(status), problem, event).await;
                }
                Outcome::Retry { after } => {
                    let retry_after = after.unwrap_or_default().min(10 * self.backoff_max);
                    sleep(jittered(pause).max(retry_after)).await;
                    pause = (2 * pause).min(self.backoff_max);
                }
            }
        }
    }

    async fn refuse(&self, status: Option<u16>, problem: Value, event: Value) {
        // The event and the problem's detail may hold user text, so they are only in the file.
        let problem_type = problem["type"].as_str().unwrap_or("none").to_owned();
        let refused = Refused {
            time: event::now().format(&Rfc3339).unwrap_or_default(),
            status,
            problem,
            event,
        };
        let keep = move |folder: &Folder| {
            let bytes = refused::append(&folder.refused(), &refused)?;
            folder.flush().map(|()| bytes)
        };
        let bytes = self.on_disk("keep a refused event", keep).await;
        self.queue.grow(bytes);
        let label = status.map_or("none".to_owned(), |status| status.to_string());
        metrics::counter!("springtide_spool_refused_total", "status" => label).increment(1);
        tracing::error!(
            status,
            problem = problem_type,
            file = %self.folder.refused().display(),
            "the upstream refused an event permanently"
        );
    }

    async fn keep_damaged(&self, number: u64, offset: u64, bytes: Vec<u8>) {
        let length = bytes.len() as u64;
        let keep = move |folder: &Folder| folder.keep_damaged(number, offset, &bytes);
        let Some(file) = self.on_disk("keep damaged bytes", keep).await else {
            return;
        };
        self.queue.grow(length);
        metrics::counter!("springtide_spool_damaged_total").increment(1);
        metrics::counter!("springtide_spool_damaged_bytes_total").increment(length);
        tracing::error!(
            segment = number,
            offset,
            bytes = length,
            file = %file.display(),
            "a part of the spool is damaged; acknowledged events may be lost"
        );
    }

    async fn remove(&self, number: u64) {
        let remove = move |folder: &Folder| match folder.remove(number) {
            // A previous try removed it and then failed to flush the folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => folder.flush(),
            other => other,
        };
        self.on_disk("remove a segment", remove).await;
        self.queue.remove(number);
    }

    /// Repeats `work` until it succeeds: a failing disk must not make an event skipped or lost.
    async fn on_disk<T, F>(&self, what: &'static str, work: F) -> T
    where
        T: Send + 'static,
        F: Fn(&Folder) -> io::Result<T> + Send + Sync + 'static,
    {
        let work = Arc::new(work);
        let mut pause = BACKOFF_MIN;
        loop {
            let (folder, work) = (self.folder.clone(), work.clone());
            let under_way = self.disk.read().await;
            let result = tokio::task::spawn_blocking(move || work(&folder)).await;
            drop(under_way);
            match result.map_err(io::Error::other).flatten() {
                Ok(value) => return value,
                Err(error) => tracing::error!(%error, what, "the spool's disk failed, trying again"),
            }
            sleep(pause).await;
            pause = (2 * pause).min(self.backoff_max);
        }
    }

    /// Updates the gauges.
    async fn report(&self) {
        let mut ticks = tokio::time::interval(REPORT_INTERVAL);
        loop {
            ticks.tick().await;
            let level = self.queue.level();
            let now_us = event::now().unix_timestamp_nanos() / 1_000;
            let age_us = level.oldest_us.map_or(0, |oldest| now_us - i128::from(oldest)).max(0);
            let segments = u32::try_from(level.segments).unwrap_or(u32::MAX);
            metrics::gauge!("springtide_spool_bytes").set(level.bytes as f64);
            metrics::gauge!("springtide_spool_segments").set(f64::from(segments));
            metrics::gauge!("springtide_spool_oldest_event_seconds").set(age_us as f64 / 1e6);
        }
    }
}

impl Position {
    fn start(number: u64) -> Self {
        Self {
            number,
            offset: 0,
            header: None,
        }
    }
}

/// Decodes without [`Event::check`]: the event was checked on arrival, and the upstream checks it
/// again.
fn decode(payload: &[u8]) -> Result<Event, Undecodable> {
    Ok(proto::Event::decode(payload)?.try_into()?)
}

/// 50% to 100% of `pause`, so that collectors do not return to a recovered upstream all at once.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.5..=1.0))
}
