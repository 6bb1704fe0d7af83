//! Dead letters: a record with its headers, the repaired event that goes back in its place, and how a letter is named.

use prost::Message as _;
use rdkafka::message::{Header, OwnedHeaders, OwnedMessage, Timestamp};

use super::{events, requests};
use crate::event;
use crate::kafka::ClientOptions;
use crate::log::{DeadLetter, Entry, Letter, Place, Reason, replay};
use crate::options::Options;
use crate::proto;

const TOPIC: &str = "springtide.dlq.v1";

/// Lines of headers, an empty line, the record's value.
pub(super) fn letter(input: &[u8]) -> bool {
    let (lines, value) = requests::split(input);
    let mut headers = OwnedHeaders::new();
    for (key, value) in requests::headers(lines) {
        // The client library ends a key at a NUL.
        let Ok(key) = str::from_utf8(key) else { continue };
        if !key.contains('\0') {
            let value = Some(value);
            headers = headers.insert(Header { key, value });
        }
    }
    match Entry::read(&message(value, headers)) {
        Entry::Replayed(note) => {
            assert_eq!(note.letter.to_string().parse(), Ok(note.letter));
            false
        }
        Entry::Letter(letter) => {
            written_again(&letter);
            let topics = ClientOptions::default().topics();
            if let Ok(topic) = letter.destination(&topics) {
                assert!(
                    [&topics.generation, &topics.feedback]
                        .into_iter()
                        .any(|own| own == topic)
                );
            }
            let identity = letter.identity();
            let Ok(event) = letter.event() else { return false };
            let identity = identity.expect("an event has a name");
            assert_eq!((&identity.source, &identity.id), (&event.source, &event.id));
            assert_eq!(event.kind(), format!("springtide.{}.v1", identity.kind));
            // What is shown for repair reads as it was, whatever rule it breaks; JSON has no word for a NaN.
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

/// A letter that is put aside once more says what it said.
fn written_again(letter: &Letter) {
    let dead = DeadLetter {
        reason: Reason::Invalid,
        detail: letter.detail.clone(),
        from: letter.from.clone(),
        content_type: letter.content_type.clone(),
        trace: letter.trace.clone(),
        key: letter.key.clone(),
        value: letter.value.clone(),
    };
    let again = Entry::read(&message(&dead.value, dead.headers()));
    let expected = Letter {
        reason: Reason::Invalid.as_str().to_owned(),
        ..letter.clone()
    };
    assert_eq!(again, Entry::Letter(expected));
}

/// As a person wrote it.
pub(super) fn repair(input: &[u8]) -> bool {
    let Ok(event) = replay::repaired(&Options::default(), input, event::now()) else {
        return false;
    };
    events::holds(&event, input.len());
    assert!(proto::Event::decode(&*event.encode()).is_ok());
    true
}

pub(super) fn place(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let Ok(place) = text.parse::<Place>() else { return false };
    assert_eq!(place.to_string().parse(), Ok(place));
    true
}
