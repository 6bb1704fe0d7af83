//! A record that the sink has read: its event, or why it cannot be used.

use edge::trace;
use event_log::event::{Event, Undecodable};
use event_log::{DeadLetter, Position, Reason, kafka};
use rdkafka::message::{BorrowedMessage, Message};
use time::OffsetDateTime;
use tracing::Span;

use crate::clock::Times;
use crate::validator::Validator;

/// Exporters keep this many links of a span. All records still link to their transaction.
const LINKS_MAX: usize = 128;

pub(crate) struct Record {
    pub from: Position,
    /// The offset up to which the partition was read before this record. If the tables end earlier,
    /// the records in between are missing.
    pub follows: i64,
    pub event: Result<Event, Unusable>,
    /// From reading to commit. Its parent is the producer's span. Disabled if the record has no
    /// trace.
    pub span: Span,
    key: Vec<u8>,
    value: Vec<u8>,
    content_type: String,
    trace: Vec<(String, String)>,
}

pub(crate) struct Unusable {
    pub reason: Reason,
    pub detail: String,
}

impl Record {
    pub(crate) fn read(message: &BorrowedMessage<'_>, follows: i64, validator: &Validator) -> Self {
        let mut content_type = "application/protobuf".to_owned();
        let mut trace_headers = Vec::new();
        for (key, value) in kafka::headers(message) {
            match key {
                "content-type" => value.clone_into(&mut content_type),
                "traceparent" | "tracestate" => trace_headers.push((key.to_owned(), value.to_owned())),
                _ => {}
            }
        }
        let from = Position {
            topic: message.topic().to_owned(),
            partition: message.partition(),
            offset: message.offset(),
        };
        let value = message.payload().unwrap_or_default().to_vec();
        let event = decode(&content_type, &value, validator);
        Self {
            span: span(&from, &trace_headers, event.as_ref().ok()),
            event,
            follows,
            key: message.key().unwrap_or_default().to_vec(),
            from,
            value,
            content_type,
            trace: trace_headers,
        }
    }

    /// A record that the client library cannot read. Only its position is known.
    pub(crate) fn unreadable(from: Position, follows: i64, why: &str) -> Self {
        let detail = format!("the client library cannot read the batch of this record: {why}");
        Self {
            event: Err(Unusable {
                reason: Reason::Unreadable,
                detail,
            }),
            from,
            follows,
            span: Span::none(),
            key: Vec::new(),
            value: Vec::new(),
            content_type: "application/octet-stream".to_owned(),
            trace: Vec::new(),
        }
    }

    /// The topic and partition.
    pub(crate) fn slot(&self) -> (String, i32) {
        (self.from.topic.clone(), self.from.partition)
    }

    pub(crate) fn value_bytes(&self) -> usize {
        self.value.len()
    }

    /// `written_after`: a time of the database before this record was written, if known.
    pub(crate) fn times(&self, message: &BorrowedMessage<'_>, written_after: Option<OffsetDateTime>) -> Times {
        let stamped_at = message.timestamp().to_millis().and_then(|milliseconds| {
            OffsetDateTime::from_unix_timestamp_nanos(i128::from(milliseconds) * 1_000_000).ok()
        });
        Times {
            stamped_at,
            event_at: self.event.as_ref().ok().map(|event| event.time),
            written_after,
        }
    }

    /// Marks it as refused by the database.
    pub(crate) fn refuse(&mut self, error: &sqlx::Error) {
        self.event = Err(Unusable {
            reason: Reason::Refused,
            detail: error.to_string(),
        });
    }

    pub(crate) fn dead_letter(&self, reason: Reason, detail: impl Into<String>) -> DeadLetter {
        self.span.record("springtide.outcome", reason.as_str());
        DeadLetter {
            reason,
            detail: detail.into(),
            from: Some(self.from.clone()),
            content_type: self.content_type.clone(),
            trace: self.trace.clone(),
            key: self.key.clone(),
            value: self.value.clone(),
        }
    }
}

/// Contains the event's identity, so that traces can be found by row, but not its content.
fn span(from: &Position, trace_headers: &[(String, String)], event: Option<&Event>) -> Span {
    if trace_headers.is_empty() {
        return Span::none();
    }
    let span = tracing::info_span!(
        "ingest.store",
        otel.kind = "consumer",
        messaging.system = "kafka",
        messaging.destination.name = from.topic,
        messaging.destination.partition.id = from.partition,
        messaging.kafka.offset = from.offset,
        cloudevents.event_id = event.map(|event| event.id.as_str()),
        cloudevents.event_source = event.map(|event| event.source.as_str()),
        cloudevents.event_type = event.map(Event::kind),
        // Empty if the event was stored.
        springtide.outcome = tracing::field::Empty,
    );
    trace::set_parent(&span, trace::extract(trace_headers));
    span
}

/// The span of a transaction, with links to and from its records. Disabled if no record has a
/// trace.
pub(crate) fn transaction_span(records: &[Record]) -> Span {
    let traced = || records.iter().filter(|record| !record.span.is_disabled());
    if traced().next().is_none() {
        return Span::none();
    }
    let span = tracing::info_span!(
        parent: None::<tracing::Id>,
        "ingest.transaction",
        otel.kind = "internal",
        messaging.system = "kafka",
        messaging.batch.message_count = records.len(),
    );
    for record in traced() {
        record.span.follows_from(&span);
    }
    for record in traced().take(LINKS_MAX) {
        span.follows_from(&record.span);
    }
    span
}

fn decode(content_type: &str, value: &[u8], validator: &Validator) -> Result<Event, Unusable> {
    // Parameters such as the charset do not matter: JSON is UTF-8.
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    let event = if media_type == "application/json" {
        Event::decode_json(value)
    } else {
        Event::decode(value)
    };
    let event = event.map_err(|error| Unusable {
        reason: match error {
            Undecodable::Invalid(_) => Reason::Invalid,
            Undecodable::Protobuf(_) | Undecodable::Json(_) => Reason::Undecodable,
        },
        detail: describe(&error),
    })?;
    match validator.check(&event, validator.clock.now()) {
        Ok(()) => Ok(event),
        Err(error) => Err(Unusable {
            reason: Reason::Invalid,
            detail: error.to_string(),
        }),
    }
}

/// The error followed by its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
