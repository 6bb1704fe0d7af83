//! The headers of a record, and their size.

use rdkafka::message::{Header, OwnedHeaders};
use time::format_description::well_known::Rfc3339;

use super::Position;
use crate::event::Event;

/// The headers of a record.
pub(super) struct Headers {
    pub inner: OwnedHeaders,
    /// What they add to a record, at most.
    pub bytes: usize,
}

impl Headers {
    pub(super) fn new() -> Self {
        Self {
            inner: OwnedHeaders::new_with_capacity(10),
            bytes: 0,
        }
    }

    /// The event's CloudEvents attributes.
    pub(super) fn of(event: &Event) -> Self {
        let time = event.time.format(&Rfc3339).unwrap_or_default();
        Self::new()
            .with("ce_specversion", "1.0")
            .with("ce_id", &event.id)
            .with("ce_source", &event.source)
            .with("ce_type", event.kind())
            .with("ce_time", &time)
    }

    pub(super) fn with(self, key: &str, value: &str) -> Self {
        Self {
            // Each length takes at most five bytes.
            bytes: self.bytes + key.len() + value.len() + 10,
            inner: self.inner.insert(Header {
                key,
                value: Some(value),
            }),
        }
    }

    pub(super) fn with_all(self, headers: &[(String, String)]) -> Self {
        headers.iter().fold(self, |all, (key, value)| all.with(key, value))
    }

    pub(super) fn with_position(self, position: &Position) -> Self {
        self.with("topic", &position.topic)
            .with("partition", &position.partition.to_string())
            .with("offset", &position.offset.to_string())
    }
}
