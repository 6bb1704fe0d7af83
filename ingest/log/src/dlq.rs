//! The dead-letter queue, `<prefix>.dlq.v1`: records that cannot be used, as they were, with
//! headers that say why and where they came from. Delivery is at least once, so a crash can repeat
//! a record.
//!
//! No record can stop its partition because of its size: if the queue does not take it whole, the
//! queue gets its beginning, or only its reason, position, size and digest ([`Extent`]).

pub(super) mod reader;
pub(super) mod record;
pub mod replay;

use super::Position;
use super::headers::Headers;

/// Why a record is on the dead-letter queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The client library cannot read the batch: it is damaged, or compressed as nobody here can read.
    Unreadable,
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
            Self::Unreadable => "unreadable",
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

/// How much of a dead letter is sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Extent {
    Whole,
    /// The first bytes of the value, and bounded headers.
    Beginning,
    /// No value, and bounded headers.
    Reference,
}

/// From the most to the least.
pub(super) const EXTENTS: [Extent; 3] = [Extent::Whole, Extent::Beginning, Extent::Reference];

/// Bytes of a value in a [`Extent::Beginning`].
const BEGINNING_BYTES: usize = 64 * 1024;
/// Bytes of a detail. Decoders quote what they could not read, however long it is.
const DETAIL_BYTES_MAX: usize = 4 * 1024;
/// Bytes of the key, of each other header and of a detail, unless the record is sent whole.
const BOUNDED_BYTES_MAX: usize = 256;

impl DeadLetter {
    /// Its headers on the queue, unless it is shortened. For tests.
    pub fn headers(&self) -> rdkafka::message::OwnedHeaders {
        self.parts(Extent::Whole).2.inner
    }

    /// Its key, value and headers on the queue.
    pub(super) fn parts(&self, extent: Extent) -> (&[u8], &[u8], Headers) {
        let (value_bytes_max, bytes_max, detail_bytes_max) = match extent {
            Extent::Whole => (usize::MAX, usize::MAX, DETAIL_BYTES_MAX),
            Extent::Beginning => (BEGINNING_BYTES, BOUNDED_BYTES_MAX, BOUNDED_BYTES_MAX),
            Extent::Reference => (0, BOUNDED_BYTES_MAX, BOUNDED_BYTES_MAX),
        };
        let mut headers = Headers::new()
            .with("reason", self.reason.as_str())
            .with("detail", beginning(&self.detail, detail_bytes_max))
            .with("content-type", beginning(&self.content_type, bytes_max));
        if let Some(from) = &self.from {
            headers = headers.with_position(from);
        }
        let trace = self.trace.iter().filter(|(_, value)| value.len() <= bytes_max);
        for (key, value) in trace {
            headers = headers.with(key, value);
        }
        if !matches!(extent, Extent::Whole) {
            headers = headers
                .with(record::VALUE_BYTES, &self.value.len().to_string())
                .with(record::VALUE_DIGEST, blake3::hash(&self.value).to_hex().as_str());
        }
        let key = &self.key[..self.key.len().min(bytes_max)];
        let value = &self.value[..self.value.len().min(value_bytes_max)];
        (key, value, headers)
    }
}

/// At most `bytes_max` bytes of a text, whole characters.
fn beginning(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter() -> DeadLetter {
        let long = "ä".repeat(1_000_000);
        DeadLetter {
            reason: Reason::Undecodable,
            detail: long.clone(),
            from: Some(Position {
                topic: "t".repeat(249),
                partition: i32::MAX,
                offset: i64::MAX,
            }),
            content_type: long.clone(),
            trace: vec![
                ("traceparent".to_owned(), "00-1-2-01".to_owned()),
                ("tracestate".to_owned(), long.clone()),
            ],
            key: long.clone().into_bytes(),
            value: long.into_bytes(),
        }
    }

    #[test]
    fn a_reference_to_the_longest_record_takes_two_kilobytes() {
        let letter = letter();
        let (key, value, headers) = letter.parts(Extent::Reference);
        assert!(value.is_empty());
        let bytes = key.len() + headers.bytes;
        assert!(bytes < 2_000, "{bytes}");
        let (key, value, headers) = letter.parts(Extent::Beginning);
        assert_eq!(value.len(), BEGINNING_BYTES);
        assert!(key.len() + headers.bytes < 2_000);
    }

    #[test]
    fn a_whole_record_keeps_all_but_a_long_detail() {
        let letter = letter();
        let (key, value, headers) = letter.parts(Extent::Whole);
        assert_eq!((key, value), (&*letter.key, &*letter.value));
        let others = letter.content_type.len() + letter.trace[1].1.len();
        assert!(headers.bytes < others + DETAIL_BYTES_MAX + 2_000);
    }
}
