//! The dead-letter queue: its records with headers, repaired events, and positions.

use event_log::event;
use event_log::event::proto;
use event_log::kafka::ClientOptions;
use event_log::{DeadLetter, DlqEntry, DlqPosition, DlqRecord, Reason};
use prost::Message as _;
use rdkafka::message::{Header, OwnedHeaders, OwnedMessage, Timestamp};

use super::{accepted, requests};
use crate::options::Options;

const TOPIC: &str = "springtide.dlq.v1";

/// The input is header lines, an empty line and the record's value.
pub(super) fn record(input: &[u8]) -> bool {
    let (lines, value) = requests::split(input);
    let mut headers = OwnedHeaders::new();
    for (key, value) in requests::headers(lines) {
        // librdkafka cuts keys at a NUL.
        let Ok(key) = str::from_utf8(key) else { continue };
        if !key.contains('\0') {
            let value = Some(value);
            headers = headers.insert(Header { key, value });
        }
    }
    match DlqEntry::read(&message(value, headers)) {
        DlqEntry::Replayed(note) => {
            assert_eq!(note.record.to_string().parse(), Ok(note.record));
            false
        }
        DlqEntry::Record(record) => {
            check_rewritten(&record);
            let topics = ClientOptions::default().topics();
            if let Ok(topic) = record.destination(&topics) {
                assert!([topics.generation.as_str(), &topics.feedback].contains(&topic));
            }
            let identity = record.identity();
            let Ok(event) = record.event() else { return false };
            let identity = identity.expect("an event has an identity");
            assert_eq!((&identity.source, &identity.id), (&event.source, &event.id));
            assert_eq!(event.kind(), format!("springtide.{}.v1", identity.kind));
            // Valid events survive the JSON form that is shown for repair. Invalid ones may hold a
            // NaN, which JSON lacks.
            let json = serde_json::to_vec(&event).unwrap();
            if event.check().is_ok() {
                assert_eq!(serde_json::from_slice::<event::Event>(&json).unwrap(), event);
            }
            true
        }
    }
}

fn message(value: &[u8], headers: OwnedHeaders) -> OwnedMessage {
    let time = Timestamp::CreateTime(1_000);
    let (value, key) = (Some(value.to_vec()), Some(b"key".to_vec()));
    OwnedMessage::new(value, key, TOPIC.to_owned(), time, 0, 17, Some(headers))
}

/// A DLQ record that is written once more reads the same.
fn check_rewritten(record: &DlqRecord) {
    let dead = DeadLetter {
        reason: Reason::Invalid,
        detail: record.detail.clone(),
        from: record.from.clone(),
        content_type: record.content_type.clone(),
        trace: record.trace.clone(),
        key: record.key.clone(),
        value: record.value.clone(),
    };
    let DlqEntry::Record(again) = DlqEntry::read(&message(&dead.value, dead.headers())) else {
        panic!("a DLQ record was read as a note");
    };
    // A long detail is cut.
    assert!(record.detail.starts_with(&again.detail));
    let expected = DlqRecord {
        reason: Reason::Invalid.as_str().to_owned(),
        detail: again.detail.clone(),
        shortened: None,
        ..record.clone()
    };
    assert_eq!(again, expected);
}

/// A repaired event in JSON.
pub(super) fn repair(input: &[u8]) -> bool {
    let Ok(event) = crate::repaired(&Options::default(), input, event::now()) else {
        return false;
    };
    accepted::check(&event, input.len());
    assert!(proto::Event::decode(&*event.encode()).is_ok());
    true
}

pub(super) fn position(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let Ok(position) = text.parse::<DlqPosition>() else {
        return false;
    };
    assert_eq!(position.to_string().parse(), Ok(position));
    true
}
