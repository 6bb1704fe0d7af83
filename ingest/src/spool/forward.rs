//! From the spool to the upstream, oldest first. A segment goes once the upstream has taken, or refused for good, every
//! event of it; what a restart interrupts is sent again, which the events' identity makes harmless. Events of one episode
//! keep their order; others go side by side.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use futures::future::try_join_all;
use prost::Message;
use serde_json::Value;
use time::format_description::well_known::Rfc3339;
use tokio_util::sync::CancellationToken;

use super::Options;
use super::folder::Folder;
use super::queue::{Queue, Segment};
use super::refused::{self, Refused};
use super::request::Request;
use super::segment::{HEADER_BYTES, Header};
use super::writer::Command;
use crate::event::{self, Event, Undecodable};
use crate::proto;

mod post;

use post::{Outcome, Upstream};

const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// How long the last segment must be idle, and forwarded, before it is closed so that it can go.
const SEAL_AFTER: Duration = Duration::from_secs(1);
const LEVEL_INTERVAL: Duration = Duration::from_secs(1);

/// Sends what the spool holds, until the stop.
pub(crate) struct Forwarder {
    folder: Arc<Folder>,
    queue: Arc<Queue>,
    commands: SyncSender<Command>,
    upstream: Upstream,
    lanes: usize,
    backoff_max: Duration,
}

/// How far a segment is forwarded.
struct Position {
    number: u64,
    offset: u64,
    /// `None` before the first look, and where it is damaged.
    header: Option<Header>,
}

/// Asked to stop; whatever was not acknowledged is still there.
struct Stopped;

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
            lanes: options.requests_max,
            backoff_max: Duration::from_secs_f64(options.backoff_seconds_max),
        })
    }

    pub(crate) async fn run(self, shutdown: CancellationToken) {
        tokio::select! {
            _ = self.forward(&shutdown) => {}
            () = self.report() => {}
        }
    }

    async fn forward(&self, shutdown: &CancellationToken) -> Result<(), Stopped> {
        let mut position = Position::start(0);
        loop {
            if shutdown.is_cancelled() {
                return Err(Stopped);
            }
            let Some((number, segment)) = self.queue.first() else {
                tokio::select! {
                    () = shutdown.cancelled() => {}
                    () = self.queue.changed() => {}
                }
                continue;
            };
            if position.number != number {
                position = Position::start(number);
            }
            if position.offset < segment.length {
                self.advance(&mut position, segment, shutdown).await?;
            } else if segment.sealed {
                self.remove(number, shutdown).await?;
            } else {
                self.queue.forwarded(number, position.offset);
                self.idle(&position, shutdown).await;
            }
        }
    }

    /// Waits for more; a segment that nothing more comes to is closed.
    async fn idle(&self, position: &Position, shutdown: &CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.queue.changed() => {}
            () = tokio::time::sleep(SEAL_AFTER), if position.offset > HEADER_BYTES as u64 => {
                // A writer that is busy has more to append.
                let _ = self.commands.try_send(Command::Seal(position.number));
            }
        }
    }

    /// Forwards what the segment holds beyond `position`.
    async fn advance(
        &self,
        position: &mut Position,
        segment: Segment,
        shutdown: &CancellationToken,
    ) -> Result<(), Stopped> {
        let (number, offset, end) = (position.number, position.offset, segment.length);
        let bytes = self
            .on_disk(shutdown, "read a segment", move |folder| {
                folder.read(number, offset, end)
            })
            .await?;
        let mut begin = 0;
        if offset == 0 {
            position.header = Header::decode(&bytes, number);
            begin = if position.header.is_some() { HEADER_BYTES } else { 0 };
        }
        let first = offset + begin as u64;
        let Some(header) = position.header else {
            self.keep_damaged(number, first, bytes, shutdown).await?;
            position.offset = end;
            return Ok(());
        };
        let bytes = &bytes[begin..];
        let scan = header.scan(first, bytes);
        // All of this was on the disk once, so what is torn here is damaged too.
        for range in scan.damaged.into_iter().chain(scan.torn) {
            let at = first + range.start as u64;
            self.keep_damaged(number, at, bytes[range].to_vec(), shutdown).await?;
        }
        if let Some(record) = scan.records.first() {
            self.queue.oldest(record.spooled_at_us);
        }
        let payloads = scan.records.into_iter().map(|record| &bytes[record.payload]);
        self.deliver(payloads.collect(), shutdown).await?;
        position.offset = end;
        Ok(())
    }

    async fn deliver(&self, payloads: Vec<&[u8]>, shutdown: &CancellationToken) -> Result<(), Stopped> {
        let mut lanes: Vec<Vec<&[u8]>> = vec![Vec::new(); self.lanes];
        for payload in payloads {
            let key = decode(payload).map_or([0; 16], |event| event.key());
            // The end of a UUIDv7 is random, its beginning is not.
            let lane = u128::from_be_bytes(key) % self.lanes as u128;
            if let Some(lane) = lanes.get_mut(usize::try_from(lane).unwrap_or_default()) {
                lane.push(payload);
            }
        }
        let sending = lanes.into_iter().map(|lane| self.send_in_order(lane, shutdown));
        try_join_all(sending).await.map(drop)
    }

    async fn send_in_order(&self, payloads: Vec<&[u8]>, shutdown: &CancellationToken) -> Result<(), Stopped> {
        for payload in payloads {
            self.send(payload, shutdown).await?;
        }
        Ok(())
    }

    /// Returns once the upstream has taken the event, or refused it for good and that is on the disk.
    async fn send(&self, payload: &[u8], shutdown: &CancellationToken) -> Result<(), Stopped> {
        let readable = decode(payload).ok();
        let Some((request, event)) = readable.and_then(|event| Some((Request::of(&event).ok()?, event))) else {
            let raw = Value::String(hex::encode(payload));
            let problem = Value::String("this version of the collector cannot read the event".to_owned());
            return self.refuse(None, problem, raw, shutdown).await;
        };
        let mut pause = BACKOFF_MIN;
        loop {
            let outcome = tokio::select! {
                biased;
                () = shutdown.cancelled() => return Err(Stopped),
                outcome = self.upstream.post(&request) => outcome,
            };
            match outcome {
                Outcome::Taken => {
                    metrics::counter!("springtide_spool_forwarded_total").increment(1);
                    return Ok(());
                }
                Outcome::Refused { status, problem } => {
                    let event = serde_json::to_value(&event).unwrap_or_else(|_| hex::encode(payload).into());
                    return self.refuse(Some(status), problem, event, shutdown).await;
                }
                Outcome::Later { retry_after } => {
                    let asked = retry_after.unwrap_or_default().min(10 * self.backoff_max);
                    wait(jittered(pause).max(asked), shutdown).await?;
                    pause = (2 * pause).min(self.backoff_max);
                }
            }
        }
    }

    async fn refuse(
        &self,
        status: Option<u16>,
        problem: Value,
        event: Value,
        shutdown: &CancellationToken,
    ) -> Result<(), Stopped> {
        // What was sent, and what may quote it, stays in the file.
        let kind = problem["type"].as_str().unwrap_or("none").to_owned();
        let refused = Arc::new(Refused {
            time: event::now().format(&Rfc3339).unwrap_or_default(),
            status,
            problem,
            event,
        });
        let bytes = self
            .on_disk(shutdown, "keep a refused event", move |folder| {
                let bytes = refused::append(&folder.refused(), &refused)?;
                folder.flush()?;
                Ok(bytes)
            })
            .await?;
        self.queue.grow(bytes);
        let label = status.map_or("none".to_owned(), |status| status.to_string());
        metrics::counter!("springtide_spool_refused_total", "status" => label).increment(1);
        tracing::error!(
            status,
            problem = kind,
            file = %self.folder.refused().display(),
            "the upstream refused an event for good"
        );
        Ok(())
    }

    async fn keep_damaged(
        &self,
        number: u64,
        offset: u64,
        bytes: Vec<u8>,
        shutdown: &CancellationToken,
    ) -> Result<(), Stopped> {
        let length = bytes.len() as u64;
        let bytes = Arc::new(bytes);
        let kept = self
            .on_disk(shutdown, "keep damaged bytes", move |folder| {
                folder.keep_damaged(number, offset, &bytes)
            })
            .await?;
        let Some(file) = kept else { return Ok(()) };
        self.queue.grow(length);
        metrics::counter!("springtide_spool_damaged_total").increment(1);
        metrics::counter!("springtide_spool_damaged_bytes_total").increment(length);
        tracing::error!(
            segment = number,
            offset,
            bytes = length,
            file = %file.display(),
            "a part of the spool is damaged; acknowledged events may be in it"
        );
        Ok(())
    }

    async fn remove(&self, number: u64, shutdown: &CancellationToken) -> Result<(), Stopped> {
        self.on_disk(shutdown, "remove a segment", move |folder| {
            match folder.remove(number) {
                // Removed before, and then the folder could not be flushed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => folder.flush(),
                other => other,
            }
        })
        .await?;
        self.queue.remove(number);
        Ok(())
    }

    /// Does it until it works: an event is neither passed over nor forgotten because a disk fails.
    async fn on_disk<T, F>(&self, shutdown: &CancellationToken, what: &'static str, work: F) -> Result<T, Stopped>
    where
        T: Send + 'static,
        F: Fn(&Folder) -> io::Result<T> + Send + Sync + 'static,
    {
        let work = Arc::new(work);
        let mut pause = BACKOFF_MIN;
        loop {
            let (folder, again) = (self.folder.clone(), work.clone());
            let done = tokio::task::spawn_blocking(move || again(&folder)).await;
            match done {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => tracing::error!(%error, what, "the spool's disk fails, will be tried again"),
                Err(error) => tracing::error!(%error, what, "the spool's disk fails, will be tried again"),
            }
            wait(pause, shutdown).await?;
            pause = (2 * pause).min(self.backoff_max);
        }
    }

    /// Keeps the gauges up to date, also while nothing moves.
    async fn report(&self) {
        let mut ticks = tokio::time::interval(LEVEL_INTERVAL);
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

/// Without the rules: they were kept when the event came, and the upstream has its own.
fn decode(payload: &[u8]) -> Result<Event, Undecodable> {
    Ok(proto::Event::decode(payload)?.try_into()?)
}

/// Between half and all of it, so that collectors which lost the same upstream do not come back as one.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.5..=1.0))
}

async fn wait(pause: Duration, shutdown: &CancellationToken) -> Result<(), Stopped> {
    tokio::select! {
        () = shutdown.cancelled() => Err(Stopped),
        () = tokio::time::sleep(pause) => Ok(()),
    }
}
