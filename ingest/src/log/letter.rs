//! One record of `<prefix>.dlq.v1` as it is read: a letter, or the note that a letter was replayed. Reads whatever is
//! there: a header that is missing or broken makes a letter say less, never disappear.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

use prost::Message as _;
use rdkafka::message::{Headers, Message};
use serde::Deserialize;
use serde_json::Value;
use time::OffsetDateTime;

use super::Position;
use crate::event::{Event, Undecodable};
use crate::proto;

/// On a note: the letter that was replayed. On a replayed record, with the topic before it: the letter that it was.
pub(super) const REPLAYED: &str = "springtide-replayed";
/// On a note: the record that went back is not the one in the letter.
pub(super) const EDITED: &str = "edited";

/// Where a letter lies on the topic of dead letters; written `partition/offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub partition: i32,
    pub offset: i64,
}

impl Display for Place {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.partition, self.offset)
    }
}

impl FromStr for Place {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let place = text.split_once('/').and_then(|(partition, offset)| {
            Some(Self {
                partition: partition.parse().ok()?,
                offset: offset.parse().ok()?,
            })
        });
        place
            .filter(|place| place.partition >= 0 && place.offset >= 0)
            .ok_or("write PARTITION/OFFSET as `springtide dlq list` prints it, for example 0/17")
    }
}

/// What a record on the topic is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Letter(Letter),
    Replayed(Replayed),
}

/// A record that could not be used, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Letter {
    pub place: Place,
    /// When it was put here; `None` where the broker keeps no times.
    pub time: Option<OffsetDateTime>,
    /// As [`super::Reason::as_str`]; another version's may be unknown here.
    pub reason: String,
    /// In words. May quote what was sent.
    pub detail: String,
    /// Where the record stood; `None` for a letter that was made from a row.
    pub from: Option<Position>,
    pub content_type: String,
    /// `traceparent` and `tracestate`.
    pub trace: Vec<(String, String)>,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

/// The note that a letter was put back. The letter itself stays: a log is only ever appended to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    pub letter: Place,
    pub time: Option<OffsetDateTime>,
    /// Where the record stands now.
    pub to: Option<Position>,
    /// A repaired event went back, not the letter's own bytes.
    pub edited: bool,
}

/// What an event is called, read without its rules: also of most invalid events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `generation`, `feedback`, …
    pub kind: &'static str,
    pub tenant: String,
    pub source: String,
    pub id: String,
}

impl Entry {
    pub(crate) fn read(message: &impl Message) -> Self {
        let mut letter = Letter {
            place: Place {
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
        };
        let (mut topic, mut partition, mut offset) = (None, None, None);
        let (mut replayed, mut edited) = (None, false);
        for header in message.headers().into_iter().flat_map(Headers::iter) {
            let text = String::from_utf8_lossy(header.value.unwrap_or_default());
            match header.key {
                "reason" => letter.reason = text.into_owned(),
                "detail" => letter.detail = text.into_owned(),
                "content-type" => letter.content_type = text.into_owned(),
                "topic" => topic = Some(text.into_owned()),
                "partition" => partition = text.parse().ok(),
                "offset" => offset = text.parse().ok(),
                "traceparent" | "tracestate" => letter.trace.push((header.key.to_owned(), text.into_owned())),
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
            Some(place) => Self::Replayed(Replayed {
                letter: place,
                time: letter.time,
                to: position,
                edited,
            }),
            None => Self::Letter(Letter {
                from: position,
                ..letter
            }),
        }
    }
}

impl Letter {
    /// Whether the record says that its bytes are JSON.
    pub fn is_json(&self) -> bool {
        let media_type = self.content_type.split(';').next().unwrap_or_default();
        media_type.trim() == "application/json"
    }

    /// The event, whatever rule it breaks.
    pub fn event(&self) -> Result<Event, Undecodable> {
        if self.is_json() {
            return Ok(serde_json::from_slice(&self.value)?);
        }
        Ok(proto::Event::decode(&*self.value)?.try_into()?)
    }

    /// What the event is called, where so much can be read.
    pub fn identity(&self) -> Option<Identity> {
        let (kind, tenant, source, id) = if self.is_json() {
            #[derive(Deserialize)]
            struct Named {
                tenant: String,
                source: String,
                id: String,
                #[serde(flatten)]
                rest: serde_json::Map<String, Value>,
            }
            let named: Named = serde_json::from_slice(&self.value).ok()?;
            let kinds = ["generation", "feedback", "retraction", "episode_end"];
            let kind = kinds
                .into_iter()
                .find(|kind| named.rest.get(*kind).is_some_and(|body| !body.is_null()))?;
            (kind, named.tenant, named.source, named.id)
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

    fn letter(value: &[u8], content_type: &str) -> Letter {
        match Entry::read(&message(value, &[("content-type", content_type)])) {
            Entry::Letter(letter) => letter,
            Entry::Replayed(_) => panic!("a letter"),
        }
    }

    fn feedback() -> Event {
        let feedback = Feedback {
            id: uuid::Uuid::from_u128(1), // no UUIDv7: it breaks a rule
            target: Target::Generation(uuid::Uuid::from_u128(2)),
            metric_name: "comment".to_owned(),
            value: crate::event::Value::Text("what the user wrote".to_owned()),
            tags: Default::default(),
        };
        feedback.into_event("default", "app", crate::event::now())
    }

    #[test]
    fn a_letter_says_why_and_where_from() {
        let headers = [
            ("reason", "invalid"),
            ("detail", "value: is missing"),
            ("topic", "springtide.feedback.v1"),
            ("partition", "3"),
            ("offset", "99"),
            ("traceparent", "00-1-2-01"),
        ];
        let Entry::Letter(letter) = Entry::read(&message(b"x", &headers)) else {
            panic!("a letter");
        };
        assert_eq!(letter.place.to_string(), "0/17");
        assert_eq!(letter.time.unwrap().unix_timestamp(), 1);
        assert_eq!((&*letter.reason, &*letter.detail), ("invalid", "value: is missing"));
        let from = Position {
            topic: "springtide.feedback.v1".to_owned(),
            partition: 3,
            offset: 99,
        };
        assert_eq!(letter.from, Some(from));
        assert_eq!(letter.trace, [("traceparent".to_owned(), "00-1-2-01".to_owned())]);
        assert_eq!((&*letter.key, &*letter.value), (&b"key"[..], &b"x"[..]));
    }

    #[test]
    fn broken_headers_hide_no_letter() {
        for headers in [
            &[("partition", "three"), ("topic", "t")][..],
            &[("springtide-replayed", "nonsense")],
            &[],
        ] {
            let Entry::Letter(letter) = Entry::read(&message(b"x", headers)) else {
                panic!("a letter");
            };
            assert_eq!(letter.from, None);
        }
    }

    #[test]
    fn a_note_names_the_letter_and_where_it_went() {
        let headers = [
            ("springtide-replayed", "0/5"),
            ("topic", "t"),
            ("partition", "1"),
            ("offset", "7"),
            ("edited", "true"),
        ];
        let Entry::Replayed(note) = Entry::read(&message(b"", &headers)) else {
            panic!("a note");
        };
        assert_eq!(note.letter, "0/5".parse().unwrap());
        assert_eq!(note.to.unwrap().offset, 7);
        assert!(note.edited);
    }

    #[test]
    fn an_invalid_event_still_has_a_name_in_both_forms() {
        let event = feedback();
        assert!(event.check().is_err());
        let expected = Identity {
            kind: "feedback",
            tenant: "default".to_owned(),
            source: "app".to_owned(),
            id: event.id.clone(),
        };
        let protobuf = letter(&event.encode(), "application/protobuf");
        assert_eq!(protobuf.identity(), Some(expected.clone()));
        assert_eq!(protobuf.event().unwrap(), event);
        let json = letter(&serde_json::to_vec(&event).unwrap(), "application/json; charset=utf-8");
        assert_eq!(json.identity(), Some(expected));
        assert_eq!(json.event().unwrap(), event);
    }

    #[test]
    fn what_is_no_event_has_no_name() {
        assert_eq!(letter(b"\xff\xff", "application/protobuf").identity(), None);
        assert_eq!(letter(b"", "application/protobuf").identity(), None);
        assert_eq!(letter(b"{\"tenant\": 1}", "application/json").identity(), None);
    }

    #[test]
    fn a_place_is_written_as_it_is_read_and_nothing_else_is_one() {
        let place: Place = "3/41".parse().unwrap();
        assert_eq!(place.to_string(), "3/41");
        for text in ["41", "3/", "/41", "-1/3", "3/-1", "a/b", ""] {
            assert!(text.parse::<Place>().is_err(), "{text}");
        }
    }
}
