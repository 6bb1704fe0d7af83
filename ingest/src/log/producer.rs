//! Writes to the log: idempotent, acknowledged by all in-sync replicas, bounded.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use time::format_description::well_known::Rfc3339;

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
/// How long a shutdown waits for unacknowledged records.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(6);

/// Writes to the log. Cheap to clone: clones share a connection and its bounds.
#[derive(Clone)]
pub struct Producer {
    options: Arc<ClientOptions>,
    pub(super) topics: Arc<Topics>,
    inner: Arc<RwLock<FutureProducer>>,
}

impl Producer {
    /// Connects in the background. If the broker is unavailable, the first send fails.
    pub fn new(options: &ClientOptions) -> Result<Self, Error> {
        Ok(Self {
            topics: Arc::new(options.topics()),
            inner: Arc::new(RwLock::new(connect(options)?)),
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
        self.send(topic, &event.key(), value, headers.0).await.map(drop)
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

    /// Puts a record on the dead-letter queue.
    pub async fn send_dead_letter(&self, record: &DeadLetter) -> Result<(), Error> {
        let headers = record.headers();
        self.send(&self.topics.dlq, &record.key, &record.value, headers).await?;
        metrics::counter!("springtide_ingest_dead_letters_total", "reason" => record.reason.as_str()).increment(1);
        Ok(())
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
    options.config(PRODUCER_SETTINGS).create().map_err(Error::Unavailable)
}

fn into_error(error: KafkaError, size_bytes: usize) -> Error {
    match error.rdkafka_error_code() {
        Some(RDKafkaErrorCode::QueueFull) => Error::Full,
        Some(RDKafkaErrorCode::MessageSizeTooLarge) => Error::TooLarge { size_bytes },
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
