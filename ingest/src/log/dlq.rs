//! The dead-letter queue, `<prefix>.dlq.v1`: records that cannot be used, as they were, with
//! headers that say why and where they came from. Delivery is at least once, so a crash can repeat
//! a record.

pub(super) mod reader;
pub(super) mod record;
pub mod replay;

use rdkafka::message::OwnedHeaders;

use super::Position;
use super::producer::Headers;

/// Why a record is on the dead-letter queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The bytes are not an event.
    Undecodable,
    /// The event breaks a rule.
    Invalid,
    /// The tables have another event with the same identity.
    Conflict,
    /// The generation of this feedback never arrived.
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

/// A record to be put on the dead-letter queue.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    pub reason: Reason,
    /// An explanation for people.
    pub detail: String,
    /// `None` if it was made from a row, not from a record.
    pub from: Option<Position>,
    pub content_type: String,
    /// The record's `traceparent` and `tracestate`, so that a replay stays in its trace.
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
            headers.set_position(from);
        }
        headers.set_all(&self.trace);
        headers.0
    }
}
