//! Forwards the spool to the upstream, oldest events first.
//!
//! A segment is removed once the upstream has accepted, or permanently refused, every event in it.
//! After a restart, events may be sent again, which is harmless because an identical event is a
//! no-op. Events of one episode keep their order; others are sent concurrently. An event that cannot
//! be forwarded for a reason of its own leaves this order ([`postponed`]), so that it stops no other.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use event_log::event::{self, Event, Undecodable, proto};
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

mod post;
mod postponed;

use post::{Outcome, Retry, Upstream};
use postponed::Postponed;

const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// A forwarded segment that is idle for this long is sealed, so that it can be removed.
const SEAL_AFTER: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// An event that the upstream does not take for a reason of its own is set aside after this many of
/// the longest pauses, or after one while others are set aside.
const PAUSES_BEFORE_POSTPONING: u32 = 10;

/// Sends the spooled events until shutdown.
pub(crate) struct Forwarder {
    folder: Arc<Folder>,
    queue: Arc<Queue>,
    commands: SyncSender<Command>,
    upstream: Upstream,
    postponed: Arc<Postponed>,
    /// For postponed events.
    upstream_of_postponed: Upstream,
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

/// An event of a segment.
#[derive(Clone, Copy)]
struct Spooled<'a> {
    at_us: i64,
    payload: &'a [u8],
}

impl Forwarder {
    /// Recovers the folder of postponed events. Blocks.
    pub(super) fn new(
        folder: Arc<Folder>,
        queue: Arc<Queue>,
        commands: SyncSender<Command>,
        upstream: &str,
        options: &Options,
    ) -> anyhow::Result<Self> {
        let postponed = Arc::new(Folder::open(&folder.postponed())?);
        let contents = postponed.recover()?;
        queue.grow(contents.used);
        let upstream = Upstream::new(upstream, options)?;
        Ok(Self {
            folder,
            queue,
            commands,
            upstream_of_postponed: upstream.apart(),
            upstream,
            postponed: Arc::new(Postponed::new(postponed, &contents)),
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
            () = self.forward_postponed() => {}
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
        let bytes = self.on_disk(&self.folder, "read a segment", read).await;
        let mut begin = 0;
        if offset == 0 {
            position.header = SegmentHeader::decode(&bytes, number);
            begin = if position.header.is_some() { HEADER_BYTES } else { 0 };
        }
        position.offset = end;
        let first = offset + begin as u64;
        let Some(header) = position.header else {
            self.keep_damaged(&self.folder, number, first, bytes).await;
            return;
        };
        let bytes = &bytes[begin..];
        let scan = header.scan(first, bytes);
        // All bytes were flushed before, so a torn end is damage too.
        for range in scan.damaged.into_iter().chain(scan.torn) {
            let at = first + range.start as u64;
            self.keep_damaged(&self.folder, number, at, bytes[range].to_vec()).await;
        }
        if let Some(record) = scan.records.first() {
            self.queue.set_oldest(record.spooled_at_us);
        }
        let events = scan.records.into_iter().map(|record| Spooled {
            at_us: record.spooled_at_us,
            payload: &bytes[record.payload],
        });
        self.deliver(events).await;
    }

    /// Sends the events in up to `requests_max` sequences. All events of an episode are in the same
    /// sequence.
    async fn deliver(&self, events: impl Iterator<Item = Spooled<'_>>) {
        let mut sequences: Vec<Vec<Spooled<'_>>> = vec![Vec::new(); self.requests_max];
        for event in events {
            let key = decode(event.payload).map_or([0; 16], |event| event.key());
            // The last bits of a UUIDv7 are random.
            let index = u128::from_be_bytes(key) % self.requests_max as u128;
            if let Some(sequence) = sequences.get_mut(usize::try_from(index).unwrap_or_default()) {
                sequence.push(event);
            }
        }
        let sends = sequences.into_iter().map(|sequence| async {
            for event in sequence {
                self.send(event).await;
            }
        });
        join_all(sends).await;
    }

    /// Returns once the upstream has accepted the event, or has refused it and the refusal is on
    /// disk, or once the event is postponed.
    async fn send(&self, event: Spooled<'_>) {
        let mut pause = BACKOFF_MIN;
        let mut refused_since = None;
        while let Some(retry) = self.try_once(&self.upstream, event.payload).await {
            if retry.of_event {
                let since: &mut Instant = refused_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.patience() {
                    return self.postpone(event).await;
                }
            } else {
                refused_since = None;
            }
            self.pause(pause, &retry).await;
            pause = (2 * pause).min(self.backoff_max);
        }
    }

    /// How long an event is tried before it is postponed. Shorter while others are, because then the
    /// upstream is known to refuse some.
    fn patience(&self) -> Duration {
        match self.postponed.level() {
            (0, _) => PAUSES_BEFORE_POSTPONING * self.backoff_max,
            _ => self.backoff_max,
        }
    }

    /// Sends an event once. `None`: the upstream has accepted it, or has refused it and the refusal is
    /// on disk.
    async fn try_once(&self, upstream: &Upstream, payload: &[u8]) -> Option<Retry> {
        let readable = decode(payload).ok();
        let Some((request, event)) = readable.and_then(|event| Some((Request::of(&event).ok()?, event))) else {
            let raw = Value::String(hex::encode(payload));
            let problem = Value::String("this version of the collector cannot read the event".to_owned());
            self.refuse(None, problem, raw).await;
            return None;
        };
        match upstream.post(&request).await {
            Outcome::Accepted => {
                metrics::counter!("springtide_spool_forwarded_total").increment(1);
                None
            }
            Outcome::Refused { status, problem } => {
                let event = serde_json::to_value(&event).unwrap_or_else(|_| hex::encode(payload).into());
                self.refuse(Some(status), problem, event).await;
                None
            }
            Outcome::Retry(retry) => Some(retry),
        }
    }

    async fn pause(&self, pause: Duration, retry: &Retry) {
        let retry_after = retry.after.unwrap_or_default().min(10 * self.backoff_max);
        sleep(jittered(pause).max(retry_after)).await;
    }

    /// Returns once the event is on disk among the postponed ones.
    async fn postpone(&self, event: Spooled<'_>) {
        let (postponed, payload) = (self.postponed.clone(), event.payload.to_vec());
        let add = move |_: &Folder| postponed.add(event.at_us, &payload);
        let bytes = self.on_disk(&self.folder, "postpone an event", add).await;
        self.queue.grow(bytes);
        metrics::counter!("springtide_spool_postponed_total").increment(1);
        tracing::error!(
            folder = %self.folder.postponed().display(),
            "the upstream, or a proxy before it, does not take an event; it is set aside and tried again"
        );
    }

    /// Tries the postponed events again, in order and one at a time.
    async fn forward_postponed(&self) {
        let mut last = 0;
        loop {
            let Some(number) = self.postponed.after(last).or_else(|| self.postponed.after(0)) else {
                self.postponed.added().await;
                continue;
            };
            last = number;
            let postponed = self.postponed.clone();
            let read = move |_: &Folder| postponed.read(number);
            let bytes = self.on_disk(&self.folder, "read a postponed event", read).await;
            match self.postponed.payload(number, &bytes) {
                Some(payload) => {
                    if let Some(retry) = self.try_once(&self.upstream_of_postponed, payload).await {
                        self.pause(self.backoff_max, &retry).await;
                        continue;
                    }
                }
                None => self.keep_damaged(&self.postponed.folder, number, 0, bytes).await,
            }
            self.remove_file(&self.postponed.folder, number).await;
            self.queue.shrink(self.postponed.forget(number));
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
            refused::append(&folder.refused(), &refused)?;
            folder.flush()
        };
        self.on_disk(&self.folder, "keep a refused event", keep).await;
        let label = status.map_or("none".to_owned(), |status| status.to_string());
        metrics::counter!("springtide_spool_refused_total", "status" => label).increment(1);
        tracing::error!(
            status,
            problem = problem_type,
            file = %self.folder.refused().display(),
            "the upstream refused an event permanently"
        );
    }

    async fn keep_damaged(&self, folder: &Arc<Folder>, number: u64, offset: u64, bytes: Vec<u8>) {
        let length = bytes.len() as u64;
        let keep = move |folder: &Folder| folder.keep_damaged(number, offset, &bytes);
        let Some(file) = self.on_disk(folder, "keep damaged bytes", keep).await else {
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
        self.remove_file(&self.folder, number).await;
        self.queue.remove(number);
    }

    async fn remove_file(&self, folder: &Arc<Folder>, number: u64) {
        let remove = move |folder: &Folder| match folder.remove(number) {
            // A previous try removed it and then failed to flush the folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => folder.flush(),
            other => other,
        };
        self.on_disk(folder, "remove a segment", remove).await;
    }

    /// Repeats `work` until it succeeds: a failing disk must not make an event skipped or lost.
    async fn on_disk<T, F>(&self, folder: &Arc<Folder>, what: &'static str, work: F) -> T
    where
        T: Send + 'static,
        F: Fn(&Folder) -> io::Result<T> + Send + Sync + 'static,
    {
        let work = Arc::new(work);
        let mut pause = BACKOFF_MIN;
        loop {
            let (folder, work) = (folder.clone(), work.clone());
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
            let (postponed, oldest_postponed_us) = self.postponed.level();
            let oldest_us = level.oldest_us.into_iter().chain(oldest_postponed_us).min();
            let now_us = event::now().unix_timestamp_nanos() / 1_000;
            let age_us = oldest_us.map_or(0, |oldest| now_us - i128::from(oldest)).max(0);
            let segments = u32::try_from(level.segments).unwrap_or(u32::MAX);
            metrics::gauge!("springtide_spool_bytes").set(level.bytes as f64);
            metrics::gauge!("springtide_spool_segments").set(f64::from(segments));
            metrics::gauge!("springtide_spool_postponed_events").set(postponed as f64);
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
