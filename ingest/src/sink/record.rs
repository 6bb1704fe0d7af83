//! One record as it was read: its event, or why it is none.

use edge::trace;
use rdkafka::message::{BorrowedMessage, Headers, Message};
use tracing::Span;

use crate::event::{self, Event, Undecodable};
use crate::log::{DeadLetter, Position, Reason};
use crate::rules::Rules;

/// Links of one span that exporters keep; the others still lead from the record to its transaction.
const LINKS_MAX: usize = 128;

pub(super) struct Record {
    pub from: Position,
    /// The offset that its partition had been read up to before it. Where the tables hold less than that, what lies between
    /// was read and not stored.
    pub follows: i64,
    pub event: Result<Event, Unusable>,
    /// From reading to the commit; its parent is the span that sent the record. Disabled where no trace came along.
    pub span: Span,
    key: Vec<u8>,
    value: Vec<u8>,
    content_type: String,
    trace: Vec<(String, String)>,
}

pub(super) struct Unusable {
    pub reason: Reason,
    pub detail: String,
}

impl Record {
    pub(super) fn read(message: &BorrowedMessage<'_>, follows: i64, rules: &Rules) -> Self {
        let mut content_type = "application/protobuf".to_owned();
        let mut trace_headers = Vec::new();
        for header in message.headers().into_iter().flat_map(Headers::iter) {
            let value = header.value.and_then(|value| str::from_utf8(value).ok());
            let Some(value) = value else { continue };
            match header.key {
                "content-type" => value.clone_into(&mut content_type),
                "traceparent" | "tracestate" => {
                    trace_headers.push((header.key.to_owned(), value.to_owned()));
                }
                _ => {}
            }
        }
        let from = Position {
            topic: message.topic().to_owned(),
            partition: message.partition(),
            offset: message.offset(),
        };
        let value = message.payload().unwrap_or_default().to_vec();
        let event = decode(&content_type, &value, rules);
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

    /// The database does not take it.
    pub(super) fn refuse(&mut self, error: &sqlx::Error) {
        self.event = Err(Unusable {
            reason: Reason::Refused,
            detail: error.to_string(),
        });
    }

    pub(super) fn dead_letter(&self, reason: Reason, detail: impl Into<String>) -> DeadLetter {
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

/// The event's names are in it, so that a row leads to its trace; nothing that it holds is.
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
        // Absent: stored.
        springtide.outcome = tracing::field::Empty,
    );
    trace::set_parent(&span, trace::extract(trace_headers));
    span
}

/// Of the transaction that writes these: each record's span and it link to each other. Disabled where none has a trace.
pub(super) fn transaction_span(records: &[Record]) -> Span {
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

fn decode(content_type: &str, value: &[u8], rules: &Rules) -> Result<Event, Unusable> {
    // Parameters such as a charset say nothing that JSON leaves open.
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
    match rules.check(&event, event::now()) {
        Ok(()) => Ok(event),
        Err(error) => Err(Unusable {
            reason: Reason::Invalid,
            detail: error.to_string(),
        }),
    }
}

/// The error with its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
