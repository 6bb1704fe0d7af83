//! Writes to the log: idempotent, acknowledged by all in-sync replicas, bounded.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::OwnedHeaders;
use rdkafka::producer::{BaseRecord, Producer as _, ThreadedProducer};

use super::delivery::{Batch, Outcome, Reports};
use super::dlq::{EXTENTS, Extent};
use super::headers::Headers;
use super::{Announcement, ClientOptions, DeadLetter, Error, Position, Topics};
use crate::event::Event;

/// Springtide's producer settings. `[kafka.librdkafka]` overrides them. Public for benchmarks.
pub const PRODUCER_SETTINGS: &[(&str, &str)] = &[
    ("enable.idempotence", "true"),
    ("acks", "all"),
    // A broker's work is in requests more than in records, and each partition has its own
    // requests. So the records of several small HTTP requests travel together.
    ("linger.ms", "5"),
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
    inner: Arc<RwLock<Arc<ThreadedProducer<Reports>>>>,
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
        let mut results = self.send_encoded(&[(event, &event.encode())]).await;
        results.pop().unwrap_or(Err(Error::Unavailable(KafkaError::Canceled)))
    }

    /// Like [`Self::send_event`], for events that have been checked and encoded. Those with the same
    /// key enter the log in this order. The results are in the same order.
    pub async fn send_encoded(&self, events: &[(&Event, &[u8])]) -> Vec<Result<(), Error>> {
        let (batch, outcomes) = Batch::new(events.len());
        let trace = edge::trace::inject();
        let mut is_sent = Vec::with_capacity(events.len());
        for (index, (event, value)) in events.iter().enumerate() {
            let headers = Headers::of(event)
                .with("content-type", "application/protobuf")
                .with_all(&trace);
            let key = event.key();
            let fits = key.len() + value.len() + headers.bytes + OVERHEAD_BYTES_MAX <= self.event_bytes_max;
            if fits {
                self.enqueue(&batch, index, self.topics.of(event), &key, value, headers.inner);
            }
            is_sent.push(fits);
        }
        drop(batch);
        let outcomes = outcomes.await.unwrap_or_default();
        let mut results = Vec::with_capacity(events.len());
        for ((outcome, is_sent), (_, value)) in outcomes.into_iter().zip(is_sent).zip(events) {
            results.push(match is_sent {
                true => self.result(outcome, value.len()).map(drop),
                false => Err(Error::TooLarge {
                    size_bytes: value.len(),
                }),
            });
        }
        results
    }

    /// Announces a new object to followers. An announcement may be repeated or lost.
    pub async fn send_announcement(&self, announcement: &Announcement) -> Result<(), Error> {
        let headers = Headers::new()
            .with("ce_type", "springtide.announcement.v1")
            .with("content-type", "application/protobuf");
        let value = prost::Message::encode_to_vec(announcement);
        let key = announcement.policy.as_bytes();
        self.send(&self.topics.version, key, &value, headers.inner)
            .await
            .map(drop)
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
        let sent = self.send_with_room(&self.topics.dlq, key, value, &headers.inner);
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
        let (batch, outcomes) = Batch::new(1);
        self.enqueue(&batch, 0, topic, key, value, headers);
        drop(batch);
        let outcome = outcomes.await.ok().and_then(|mut outcomes| outcomes.pop());
        let outcome = outcome.unwrap_or(Err(KafkaError::Canceled));
        let (partition, offset) = self.result(outcome, value.len())?;
        Ok(Position {
            topic: topic.to_owned(),
            partition,
            offset,
        })
    }

    /// Hands a record to the client, which reports it to the batch. Never waits.
    fn enqueue(&self, batch: &Arc<Batch>, index: usize, topic: &str, key: &[u8], value: &[u8], headers: OwnedHeaders) {
        let record = BaseRecord::with_opaque_to(topic, Box::new(batch.delivery(index)));
        let record = record.key(key).payload(value).headers(headers);
        let producer = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        if let Err((error, record)) = producer.send(record) {
            record.delivery_opaque.report(Err(error));
        }
    }

    fn result(&self, outcome: Outcome, size_bytes: usize) -> Result<(i32, i64), Error> {
        let label = if outcome.is_ok() { "acknowledged" } else { "failed" };
        metrics::counter!("springtide_log_records_total", "outcome" => label).increment(1);
        outcome.map_err(|error| {
            self.replace_if_broken();
            into_error(error, size_bytes)
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

fn connect(options: &ClientOptions) -> Result<Arc<ThreadedProducer<Reports>>, Error> {
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
    let producer = config.create_with_context(Reports).map_err(Error::Unavailable)?;
    Ok(Arc::new(producer))
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
