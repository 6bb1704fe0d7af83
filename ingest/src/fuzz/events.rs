//! The canonical forms of an event: Protobuf, JSON, and the request that a collector forwards it as.

use prost::Message;
use serde_json::Value;

use super::requests;
use crate::event::{Body, Event, Target};
use crate::proto;

/// What an event takes in Protobuf, at most, for each byte of what it was read from (a number of one digit and its comma
/// become a 32-bit float), and for the fields that were filled in.
const GROWTH_MAX: usize = 4;
const FILLED_IN_BYTES_MAX: usize = 1024;

pub(super) fn protobuf(input: &[u8]) -> bool {
    let Ok(event) = Event::decode(input) else { return false };
    holds(&event, input.len());
    requests::forwarded(&event);
    true
}

pub(super) fn json(input: &[u8]) -> bool {
    let Ok(event) = Event::decode_json(input) else {
        return false;
    };
    holds(&event, input.len());
    // An unknown member is passed over, and may hold half of a surrogate pair: that is JSON, and no text.
    if let Ok(json) = serde_json::from_slice(input) {
        unambiguous(&event, &json);
    }
    true
}

/// What an accepted event holds, read from `input_bytes`.
pub(super) fn holds(event: &Event, input_bytes: usize) {
    event.check().expect("an accepted event keeps the rules");
    let bytes = event.encode();
    let bound = GROWTH_MAX * input_bytes + FILLED_IN_BYTES_MAX;
    assert!(bytes.len() <= bound, "{} bytes from {input_bytes}", bytes.len());
    let again = Event::decode(&bytes).expect("what was encoded is an event");
    assert_eq!(again, *event);
    assert_eq!(again.encode(), bytes);
    let json = serde_json::to_vec(event).unwrap();
    let read = Event::decode_json(&json).expect("what was written as JSON is an event");
    assert_eq!(read, *event, "{}", String::from_utf8_lossy(&json));
    assert_eq!(read.digest(), event.digest());
}

/// No part of `json` was passed over that says something else than what was taken.
fn unambiguous(event: &Event, json: &Value) {
    let said = |object: &Value, name: &str| object.get(name).is_some_and(|member| !member.is_null());
    let kinds = ["generation", "feedback", "retraction", "episode_end"];
    let bodies = kinds.into_iter().filter(|kind| said(json, kind)).count();
    assert_eq!(bodies, 1, "one event of several bodies: {json}");
    if let Body::Feedback(feedback) = &event.body {
        let about_generation = matches!(feedback.target, Target::Generation(_));
        let feedback = &json["feedback"];
        assert_eq!(said(feedback, "generation_id"), about_generation, "{json}");
        assert_eq!(said(feedback, "episode_id"), !about_generation, "{json}");
    }
}

pub(super) fn announcement(input: &[u8]) -> bool {
    let Ok(announcement) = proto::Announcement::decode(input) else {
        return false;
    };
    let bytes = announcement.encode_to_vec();
    assert_eq!(proto::Announcement::decode(&*bytes), Ok(announcement));
    true
}
