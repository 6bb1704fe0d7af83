//! Reads the records of the dead-letter queue: dead letters, and notes that one was replayed.
//!
//! Missing or broken headers only reduce what is known about a record. No record is skipped.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

use prost::Message as _;
use rdkafka::message::{Headers, Message};
use serde_json::Value;
use time::OffsetDateTime;

use crate::Position;
use crate::event::{Event, Undecodable, proto};

/// Header of a note: the position of the replayed record.
pub(super) const REPLAYED: &str = "springtide-replayed";
/// Headers of a shortened record: the bytes of the whole value, and their BLAKE3 digest.
pub(super) const VALUE_BYTES: &str = "value-bytes";
pub(super) const VALUE_DIGEST: &str = "value-digest";
/// Header of a note: a repaired event was sent instead of the original bytes.
pub(super) const EDITED: &str = "edited";

/// A position on the dead-letter queue, written `partition/offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DlqPosition {
    pub partition: i32,
    pub offset: i64,
}

impl Display for DlqPosition {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.partition, self.offset)
    }
}

impl FromStr for DlqPosition {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let position = text.split_once('/').and_then(|(partition, offset)| {
            Some(Self {
                partition: partition.parse().ok()?,
                offset: offset.parse().ok()?,
            })
        });
        position
            .filter(|position| position.partition >= 0 && position.offset >= 0)
            .ok_or("write PARTITION/OFFSET as `springtide dlq list` prints it, for example 0/17")
    }
}

/// A record of the topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DlqEntry {
    Record(DlqRecord),
    Replayed(ReplayNote),
}

/// A record that could not be used, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DlqRecord {
    pub position: DlqPosition,
    /// When it was put here. `None` if the broker stores no times.
    pub time: Option<OffsetDateTime>,
    /// As [`super::Reason::as_str`]. Other versions may have other reasons.
    pub reason: String,
    /// An explanation for people. May quote user text.
    pub detail: String,
    /// Where the record came from. `None` if it was made from a row.
    pub from: Option<Position>,
    pub content_type: String,
    /// `traceparent` and `tracestate`.
    pub trace: Vec<(String, String)>,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    /// What the value was if the queue did not take the record whole. Its key and its headers may be
    /// shortened too. The whole record is at [`Self::from`] until retention removes it.
    pub shortened: Option<Original>,
}

/// The value of a record that was shortened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Original {
    pub value_bytes: u64,
    /// BLAKE3, hexadecimal.
    pub value_digest: String,
}

/// The note that a record was replayed. The record itself stays, because the log is append-only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayNote {
    pub record: DlqPosition,
    pub time: Option<OffsetDateTime>,
    /// Where the record was sent.
    pub to: Option<Position>,
    /// A repaired event was sent instead of the original bytes.
    pub edited: bool,
}

/// The identity of an event. Also readable from most invalid events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `generation`, `feedback`, …
    pub kind: &'static str,
    pub tenant: String,
    pub source: String,
    pub id: String,
}

impl DlqEntry {
    pub fn read(message: &impl Message) -> Self {
        let mut record = DlqRecord {
            position: DlqPosition {
                partition: message.partition(),
                offset: message.offset(),
            },
            time: message.timestamp().to_millis().and_then(|milliseconds| {
                OffsetDateTime::from_unix_timestamp_nanos(i128::from(milliseconds) * 1_000_000).ok()
            }),
            reason: String::new(),
            detail: String::new(),
            from: None,
            content_type: "application/protobuf".to_owned(),
            trace: Vec::new(),
            key: message.key().unwrap_or_default().to_vec(),
            value: message.payload().unwrap_or_default().to_vec(),
            shortened: None,
        };
        let (mut value_bytes, mut value_digest) = (None, String::new());
        let (mut topic, mut partition, mut offset) = (None, None, None);
        let (mut replayed, mut edited) = (None, false);
        for header in message.headers().into_iter().flat_map(Headers::iter) {
            let text = String::from_utf8_lossy(header.value.unwrap_or_default());
            match header.key {
                "reason" => record.reason = text.into_owned(),
                "detail" => record.detail = text.into_owned(),
                "content-type" => record.content_type = text.into_owned(),
                "topic" => topic = Some(text.into_owned()),
                "partition" => partition = text.parse().ok(),
                "offset" => offset = text.parse().ok(),
                "traceparent" | "tracestate" => record.trace.push((header.key.to_owned(), text.into_owned())),
                VALUE_BYTES => value_bytes = text.parse().ok(),
                VALUE_DIGEST => value_digest = text.into_owned(),
                REPLAYED => replayed = text.parse().ok(),
                EDITED => edited = text == "true",
                _ => {}
            }
        }
        let position = match (topic, partition, offset) {
            (Some(topic), Some(partition), Some(offset)) => Some(Position {
                topic,
                partition,
                offset,
            }),
            _ => None,
        };
        match replayed {
            Some(position_of_record) => Self::Replayed(ReplayNote {
                record: position_of_record,
                time: record.time,
                to: position,
                edited,
            }),
            None => Self::Record(DlqRecord {
                from: position,
                shortened: value_bytes.map(|value_bytes| Original {
                    value_bytes,
                    value_digest,
                }),
                ..record
            }),
        }
    }
}

impl DlqRecord {
    /// Whether the record says that its bytes are JSON.
    pub fn is_json(&self) -> bool {
        let media_type = self.content_type.split(';').next().unwrap_or_default();
        media_type.trim() == "application/json"
    }

    /// The event, even if it breaks a rule.
    pub fn event(&self) -> Result<Event, Undecodable> {
        if self.is_json() {
            return Ok(serde_json::from_slice(&self.value)?);
        }
        Ok(proto::Event::decode(&*self.value)?.try_into()?)
    }

    /// The event's identity, if it can be read.
    pub fn identity(&self) -> Option<Identity> {
        let (kind, tenant, source, id) = if self.is_json() {
            let event: Value = serde_json::from_slice(&self.value).ok()?;
            let text = |name| event.get(name)?.as_str().map(str::to_owned);
            let kinds = ["generation", "feedback", "retraction", "episode_end"];
            let kind = kinds.into_iter().find(|kind| !event[*kind].is_null())?;
            (kind, text("tenant")?, text("source")?, text("id")?)
        } else {
            let event = proto::Event::decode(&*self.value).ok()?;
            let kind = match event.body? {
                proto::event::Body::Generation(_) => "generation",
                proto::event::Body::Feedback(_) => "feedback",
                proto::event::Body::Retraction(_) => "retraction",
                proto::event::Body::EpisodeEnd(_) => "episode_end",
            };
            (kind, event.tenant, event.source, event.id)
        };
        Some(Identity {
            kind,
            tenant,
            source,
            id,
        })
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::message::{Header, OwnedHeaders, OwnedMessage, Timestamp};

    use super::*;
    use crate::event::{Feedback, Target};

    fn message(value: &[u8], headers: &[(&str, &str)]) -> OwnedMessage {
        let headers = headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header {
                key,
                value: Some(*value),
            })
        });
        OwnedMessage::new(
            Some(value.to_vec()),
            Some(b"key".to_vec()),
            "springtide.dlq.v1".to_owned(),
            Timestamp::CreateTime(1_000),
            0,
            17,
            Some(headers),
        )
    }

    fn record(value: &[u8], content_type: &str) -> DlqRecord {
        match DlqEntry::read(&message(value, &[("content-type", content_type)])) {
            DlqEntry::Record(record) => record,
            DlqEntry::Replayed(_) => panic!("a record"),
        }
    }

    fn feedback() -> Event {
        let feedback = Feedback {
            id: uuid::Uuid::from_u128(1), // not a UUIDv7, which breaks a rule
            target: Target::Generation(uuid::Uuid::from_u128(2)),
            metric_name: "comment".to_owned(),
            value: crate::event::Value::Text("what the user wrote".to_owned()),
            tags: Default::default(),
        };
        feedback.into_event("default", "app", crate::event::now())
    }

    #[test]
    fn a_record_has_its_reason_and_origin() {
        let headers = [
            ("reason", "invalid"),
            ("detail", "value: is missing"),
            ("topic", "springtide.feedback.v1"),
            ("partition", "3"),
            ("offset", "99"),
            ("traceparent", "00-1-2-01"),
        ];
        let DlqEntry::Record(record) = DlqEntry::read(&message(b"x", &headers)) else {
            panic!("a record");
        };
        assert_eq!(record.position.to_string(), "0/17");
        assert_eq!(record.time.unwrap().unix_timestamp(), 1);
        assert_eq!((&*record.reason, &*record.detail), ("invalid", "value: is missing"));
        let from = Position {
            topic: "springtide.feedback.v1".to_owned(),
            partition: 3,
            offset: 99,
        };
        assert_eq!(record.from, Some(from));
        assert_eq!(record.trace, [("traceparent".to_owned(), "00-1-2-01".to_owned())]);
        assert_eq!((&*record.key, &*record.value), (&b"key"[..], &b"x"[..]));
    }

    #[test]
    fn broken_headers_hide_no_record() {
        for headers in [
            &[("partition", "three"), ("topic", "t")][..],
            &[("springtide-replayed", "nonsense")],
            &[],
        ] {
            let DlqEntry::Record(record) = DlqEntry::read(&message(b"x", headers)) else {
                panic!("a record");
            };
            assert_eq!(record.from, None);
        }
    }

    #[test]
    fn a_note_names_the_replayed_record_and_its_destination() {
        let headers = [
            ("springtide-replayed", "0/5"),
            ("topic", "t"),
            ("partition", "1"),
            ("offset", "7"),
            ("edited", "true"),
        ];
        let DlqEntry::Replayed(note) = DlqEntry::read(&message(b"", &headers)) else {
            panic!("a note");
        };
        assert_eq!(note.record, "0/5".parse().unwrap());
        assert_eq!(note.to.unwrap().offset, 7);
        assert!(note.edited);
    }

    #[test]
    fn an_invalid_event_has_an_identity_in_both_forms() {
        let event = feedback();
        assert!(event.check().is_err());
        let expected = Identity {
            kind: "feedback",
            tenant: "default".to_owned(),
            source: "app".to_owned(),
            id: event.id.clone(),
        };
        let protobuf = record(&event.encode(), "application/protobuf");
        assert_eq!(protobuf.identity(), Some(expected.clone()));
        assert_eq!(protobuf.event().unwrap(), event);
        let json = record(&serde_json::to_vec(&event).unwrap(), "application/json; charset=utf-8");
        assert_eq!(json.identity(), Some(expected));
        assert_eq!(json.event().unwrap(), event);
    }

    #[test]
    fn bytes_that_are_not_an_event_have_no_identity() {
        assert_eq!(record(b"\xff\xff", "application/protobuf").identity(), None);
        assert_eq!(record(b"", "application/protobuf").identity(), None);
        assert_eq!(record(b"{\"tenant\": 1}", "application/json").identity(), None);
    }

    #[test]
    fn a_position_round_trips_and_other_texts_are_refused() {
        let position: DlqPosition = "3/41".parse().unwrap();
        assert_eq!(position.to_string(), "3/41");
        for text in ["41", "3/", "/41", "-1/3", "3/-1", "a/b", ""] {
            assert!(text.parse::<DlqPosition>().is_err(), "{text}");
        }
    }
}
