//! A record that could not be used, on its way to `<prefix>.dlq.v1`: its bytes as they were, and headers that say why and
//! where from. Delivery is at least once: the same letter may appear twice after a crash.

use rdkafka::message::OwnedHeaders;

use super::producer::Headers;

/// Why a record became a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The bytes are no event.
    Undecodable,
    /// An event that breaks a rule.
    Invalid,
    /// The same identity with another body is in the tables already.
    Conflict,
    /// Feedback whose generation never came.
    Orphan,
    /// The database refused the row.
    Refused,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::Invalid => "invalid",
            Self::Conflict => "conflict",
            Self::Orphan => "orphan",
            Self::Refused => "refused",
        }
    }
}

/// Where a record stood in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
}

#[derive(Debug, Clone)]
pub struct DeadLetter {
    pub reason: Reason,
    /// In words, for people.
    pub detail: String,
    /// `None` for a letter that was made from a row, not from a record.
    pub from: Option<Position>,
    pub content_type: String,
    /// `traceparent` and `tracestate` of the record, so that a replay stays in its trace.
    pub trace: Vec<(String, String)>,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

impl DeadLetter {
    pub(crate) fn headers(&self) -> OwnedHeaders {
        let mut headers = Headers::new();
        headers.set("reason", self.reason.as_str());
        headers.set("detail", &self.detail);
        headers.set("content-type", &self.content_type);
        if let Some(from) = &self.from {
            headers.set("topic", &from.topic);
            headers.set("partition", &from.partition.to_string());
            headers.set("offset", &from.offset.to_string());
        }
        for (key, value) in &self.trace {
            headers.set(key, value);
        }
        headers.0
    }
}
