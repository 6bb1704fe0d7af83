//! One record as it was read: its event, or why it is none.

use edge::trace;
use rdkafka::message::{BorrowedMessage, Headers, Message};
use tracing::Span;

use crate::event::{self, Event, Undecodable};
use crate::log::{DeadLetter, Position, Reason};
use crate::rules::Rules;

pub(super) struct Record {
    pub from: Position,
    pub event: Result<Event, Unusable>,
    /// From reading to the commit; its parent is the span that sent the record. Disabled where no trace came along.
    _span: Span,
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
    pub(super) fn read(message: &BorrowedMessage<'_>, rules: &Rules) -> Self {
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
        Self {
            event: decode(&content_type, &value, rules),
            _span: span(&from, &trace_headers),
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

fn span(from: &Position, trace_headers: &[(String, String)]) -> Span {
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
    );
    trace::set_parent(&span, trace::extract(trace_headers));
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
