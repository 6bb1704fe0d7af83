//! Writes to the log: idempotent, acknowledged by all in-sync replicas, bounded.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use time::format_description::well_known::Rfc3339;

use super::dlq::{EXTENTS, Extent};
use super::{Announcement, ClientOptions, DeadLetter, Error, Position, Topics};
use crate::event::Event;

/// Springtide's producer settings. `[kafka.librdkafka]` overrides them. Public for benchmarks.
pub const PRODUCER_SETTINGS: &[(&str, &str)] = &[
    ("enable.idempotence", "true"),
    ("acks", "all"),
    ("linger.ms", "1"),
    ("message.timeout.ms", "5000"),
    // Unacknowledged records.
    ("queue.buffering.max.messages", "50000"),
    ("queue.buffering.max.kbytes", "65536"),
];
/// Largest event: its record with key and headers, bytes. `message.max.bytes` in
/// `[kafka.librdkafka]` replaces it.
const EVENT_BYTES_MAX: usize = 1_000_000;
/// Largest record of any kind: a dead letter may hold an event of another producer.
pub(super) const RECORD_BYTES_MAX: usize = 16 * 1024 * 1024;
/// What a dead letter may add to an event.
const LETTER_BYTES_MAX: usize = 64 * 1024;
/// What the wire format adds to a record's key, value and headers, at most.
const OVERHEAD_BYTES_MAX: usize = 36;
/// How long a dead letter waits for room.
const ROOM_TIMEOUT: Duration = Duration::from_secs(2);
const ROOM_POLL: Duration = Duration::from_millis(20);
/// How long a shutdown waits for unacknowledged records.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(6);

/// Writes to the log. Cheap to clone: clones share a connection and its bounds.
#[derive(Clone)]
pub struct Producer {
    options: Arc<ClientOptions>,
    pub(super) topics: Arc<Topics>,
    inner: Arc<RwLock<FutureProducer>>,
    event_bytes_max: usize,
    /// Dead letters that are sent together share it. One that is sent alone has it for itself.
    dead_letters: Arc<tokio::sync::RwLock<()>>,
}

impl Producer {
    /// Connects in the background. If the broker is unavailable, the first send fails.
    pub fn new(options: &ClientOptions) -> Result<Self, Error> {
        Ok(Self {
            topics: Arc::new(options.topics()),
            inner: Arc::new(RwLock::new(connect(options)?)),
            event_bytes_max: event_bytes_max(options).unwrap_or(usize::MAX),
            dead_letters: Arc::default(),
            options: Arc::new(options.clone()),
        })
    }

    /// Returns once the log has acknowledged the event (`acks=all`), or after 5 s. Sends the
    /// current span along.
    pub async fn send_event(&self, event: &Event) -> Result<(), Error> {
        event.check()?;
        self.send_encoded(event, &event.encode()).await
    }

    /// Like [`Self::send_event`], for an event that has been checked and encoded.
    pub(crate) async fn send_encoded(&self, event: &Event, value: &[u8]) -> Result<(), Error> {
        let mut headers = Headers::of(event);
        headers.set("content-type", "application/protobuf");
        headers.set_all(&edge::trace::inject());
        let topic = self.topics.of(event);
        let key = event.key();
        if key.len() + value.len() + headers.bytes() + OVERHEAD_BYTES_MAX > self.event_bytes_max {
            let size_bytes = value.len();
            return Err(Error::TooLarge { size_bytes });
        }
        self.send(topic, &key, value, headers.0).await.map(drop)
    }

    /// Announces a new object to followers. An announcement may be repeated or lost.
    pub async fn send_announcement(&self, announcement: &Announcement) -> Result<(), Error> {
        let mut headers = Headers::new();
        headers.set("ce_type", "springtide.announcement.v1");
        headers.set("content-type", "application/protobuf");
        let value = prost::Message::encode_to_vec(announcement);
        let key = announcement.policy.as_bytes();
        self.send(&self.topics.version, key, &value, headers.0).await.map(drop)
    }

    /// Puts a record on the dead-letter queue, or as much of it as the queue takes.
    ///
    /// Fails only if a retry may help. If the queue refuses even a reference to the record, that is
    /// logged: the record is still at its position, and must not stop the records after it.
    pub async fn send_dead_letter(&self, record: &DeadLetter) -> Result<(), Error> {
        let extent = {
            let _together = self.dead_letters.read().await;
            match self.try_dead_letter(record, Extent::Whole).await {
                Err(Error::TooLarge { .. } | Error::Refused(_)) => None,
                result => Some(result.map(|()| Extent::Whole)?),
            }
        };
        let extent = match extent {
            Some(extent) => Some(extent),
            None => self.send_dead_letter_alone(record).await?,
        };
        let reason = record.reason.as_str();
        if let Some(extent) = extent {
            metrics::counter!("springtide_ingest_dead_letters_total", "reason" => reason).increment(1);
            if !matches!(extent, Extent::Whole) {
                metrics::counter!("springtide_ingest_dead_letters_shortened_total").increment(1);
            }
            return Ok(());
        }
        metrics::counter!("springtide_ingest_dead_letters_refused_total").increment(1);
        let from = record.from.as_ref();
        tracing::error!(
            reason,
            topic = from.map(|from| from.topic.as_str()),
            partition = from.map(|from| from.partition),
            offset = from.map(|from| from.offset),
            queue = self.topics.dlq,
            "the dead-letter queue refuses even a reference to this record, which remains only at its position"
        );
        Ok(())
    }

    /// The broker refuses a batch as a whole, and what it refused may have been another record of
    /// the batch. So the record is sent again while no other is, and then less of it. Returns how
    /// much the queue took.
    async fn send_dead_letter_alone(&self, record: &DeadLetter) -> Result<Option<Extent>, Error> {
        let _alone = self.dead_letters.write().await;
        for extent in EXTENTS {
            match self.try_dead_letter(record, extent).await {
                Ok(()) => return Ok(Some(extent)),
                Err(Error::TooLarge { .. } | Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    async fn try_dead_letter(&self, record: &DeadLetter, extent: Extent) -> Result<(), Error> {
        let (key, value, headers) = record.parts(extent);
        let sent = self.send_with_room(&self.topics.dlq, key, value, &headers.0);
        sent.await.map(drop)
    }

    /// Like [`Self::send`], but waits shortly for room among the unacknowledged records. Many dead
    /// letters at once may need more than there is.
    async fn send_with_room(
        &self,
        topic: &str,
        key: &[u8],
        value: &[u8],
        headers: &OwnedHeaders,
    ) -> Result<Position, Error> {
        let started = Instant::now();
        loop {
            match self.send(topic, key, value, headers.clone()).await {
                Err(Error::Full) if started.elapsed() < ROOM_TIMEOUT => tokio::time::sleep(ROOM_POLL).await,
                result => return result,
            }
        }
    }

    /// Returns the record's position once the log has acknowledged it.
    pub(super) async fn send(
        &self,
        topic: &str,
        key: &[u8],
        value: &[u8],
        headers: OwnedHeaders,
    ) -> Result<Position, Error> {
        let started = Instant::now();
        let record = FutureRecord::to(topic).key(key).payload(value).headers(headers);
        let queued = {
            let producer = self.inner.read().unwrap_or_else(PoisonError::into_inner);
            producer.send_result(record).map_err(|(error, _)| error)
        };
        let result = match queued {
            Ok(delivery) => match delivery.await {
                Ok(Ok(delivery)) => Ok(Position {
                    topic: topic.to_owned(),
                    partition: delivery.partition,
                    offset: delivery.offset,
                }),
                Ok(Err((error, _))) => Err(error),
                // The producer was replaced before the acknowledgement.
                Err(_) => Err(KafkaError::Canceled),
            },
            Err(error) => Err(error),
        };
        let outcome = if result.is_ok() { "acknowledged" } else { "failed" };
        metrics::counter!("springtide_log_records_total", "outcome" => outcome).increment(1);
        metrics::histogram!("springtide_log_acknowledge_seconds").record(started.elapsed().as_secs_f64());
        result.map_err(|error| {
            self.replace_if_broken();
            into_error(error, value.len())
        })
    }

    /// Once the broker has forgotten an idempotent producer, all its sends fail, so a new one
    /// replaces it. This can repeat records, which the identity of events makes harmless.
    fn replace_if_broken(&self) {
        let mut producer = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let Some((code, reason)) = producer.client().fatal_error() else {
            return;
        };
        match connect(&self.options) {
            Ok(fresh) => {
                tracing::warn!(%code, reason, "producer replaced after a fatal error");
                *producer = fresh;
            }
            Err(error) => tracing::error!(%code, reason, %error, "cannot replace the producer"),
        }
    }

    /// Waits for all acknowledgements, for the end of a process. Blocks.
    pub fn flush(&self) {
        let producer = self.inner.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Err(error) = producer.flush(FLUSH_TIMEOUT) {
            tracing::warn!(%error, "records not acknowledged at shutdown");
        }
    }
}

fn connect(options: &ClientOptions) -> Result<FutureProducer, Error> {
    let mut config = options.config(PRODUCER_SETTINGS);
    // The client refuses a value that is not a number.
    if let Some(event_bytes_max) = event_bytes_max(options) {
        let record_bytes_max = RECORD_BYTES_MAX.max(event_bytes_max.saturating_add(LETTER_BYTES_MAX));
        // A longer record would wait for room for ever.
        let room = config
            .get("queue.buffering.max.kbytes")
            .and_then(|room| room.trim().parse().ok());
        let room = room.map_or(usize::MAX, |kbytes: usize| kbytes.saturating_mul(1024));
        config.set("message.max.bytes", record_bytes_max.min(room).to_string());
    }
    config.create().map_err(Error::Unavailable)
}

/// `None` if the operator's limit is not a number.
fn event_bytes_max(options: &ClientOptions) -> Option<usize> {
    match options.librdkafka.get("message.max.bytes") {
        Some(limit) => limit.trim().parse().ok(),
        None => Some(EVENT_BYTES_MAX),
    }
}

fn into_error(error: KafkaError, size_bytes: usize) -> Error {
    match error.rdkafka_error_code() {
        Some(RDKafkaErrorCode::QueueFull) => Error::Full,
        Some(
            RDKafkaErrorCode::MessageSizeTooLarge
            | RDKafkaErrorCode::MessageBatchTooLarge
            | RDKafkaErrorCode::InvalidMessageSize,
        ) => Error::TooLarge { size_bytes },
        Some(RDKafkaErrorCode::InvalidRecord) => Error::Refused(error),
        _ => Error::Unavailable(error),
    }
}

/// The headers of a record.
pub(super) struct Headers(pub OwnedHeaders);

impl Headers {
    pub(super) fn new() -> Self {
        Self(OwnedHeaders::new_with_capacity(10))
    }

    /// The event's CloudEvents attributes.
    pub(super) fn of(event: &Event) -> Self {
        let time = event.time.format(&Rfc3339).unwrap_or_default();
        let mut headers = Self::new();
        headers.set("ce_specversion", "1.0");
        headers.set("ce_id", &event.id);
        headers.set("ce_source", &event.source);
        headers.set("ce_type", event.kind());
        headers.set("ce_time", &time);
        headers
    }

    pub(super) fn set(&mut self, key: &str, value: &str) {
        let headers = std::mem::replace(&mut self.0, OwnedHeaders::new_with_capacity(0));
        self.0 = headers.insert(Header {
            key,
            value: Some(value),
        });
    }

    /// What the headers add to a record, at most.
    pub(super) fn bytes(&self) -> usize {
        // Each length takes at most five bytes.
        let headers = self.0.iter();
        headers
            .map(|header| header.key.len() + header.value.map_or(0, <[u8]>::len) + 10)
            .sum()
    }

    pub(super) fn set_all(&mut self, headers: &[(String, String)]) {
        for (key, value) in headers {
            self.set(key, value);
        }
    }

    pub(super) fn set_position(&mut self, position: &Position) {
        self.set("topic", &position.topic);
        self.set("partition", &position.partition.to_string());
        self.set("offset", &position.offset.to_string());
    }
}
