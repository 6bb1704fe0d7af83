//! The canonical forms of an event: Protobuf, JSON, and the request with which a collector forwards
//! it.

use event_log::event::proto;
use event_log::event::{Body, Event, Target};
use prost::Message;
use serde_json::Value;

use super::accepted::check;
use super::requests;

pub(super) fn protobuf(input: &[u8]) -> bool {
    let Ok(event) = Event::decode(input) else { return false };
    check(&event, input.len());
    requests::forwarded(&event);
    true
}

pub(super) fn json(input: &[u8]) -> bool {
    let Ok(event) = Event::decode_json(input) else {
        return false;
    };
    check(&event, input.len());
    // `Value` rejects unknown members with half a surrogate pair, which the event's decoder
    // ignores.
    if let Ok(json) = serde_json::from_slice(input) {
        unambiguous(&event, &json);
    }
    true
}

/// The decoder ignored no member of `json` that contradicts the event.
fn unambiguous(event: &Event, json: &Value) {
    let present = |object: &Value, name: &str| object.get(name).is_some_and(|member| !member.is_null());
    let kinds = ["generation", "feedback", "retraction", "episode_end"];
    let bodies = kinds.into_iter().filter(|kind| present(json, kind)).count();
    assert_eq!(bodies, 1, "several bodies in one event: {json}");
    if let Body::Feedback(feedback) = &event.body {
        let about_generation = matches!(feedback.target, Target::Generation(_));
        let feedback = &json["feedback"];
        assert_eq!(present(feedback, "generation_id"), about_generation, "{json}");
        assert_eq!(present(feedback, "episode_id"), !about_generation, "{json}");
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
