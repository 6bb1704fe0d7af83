//! What holds for each event that is accepted.

use event_log::event::Event;

/// Limits of an event's Protobuf size: bytes per input byte (a digit and its comma become a 32-bit
/// float), and bytes for fields that get defaults.
const GROWTH_MAX: usize = 4;
const DEFAULTS_BYTES_MAX: usize = 1024;

/// Checks the properties of an accepted event that was read from `input_bytes` bytes.
pub(super) fn check(event: &Event, input_bytes: usize) {
    event.check().expect("an accepted event is valid");
    let bytes = event.encode();
    let bound = GROWTH_MAX * input_bytes + DEFAULTS_BYTES_MAX;
    assert!(bytes.len() <= bound, "{} bytes from {input_bytes}", bytes.len());
    let again = Event::decode(&bytes).expect("what was encoded is an event");
    assert_eq!(again, *event);
    assert_eq!(again.encode(), bytes);
    let json = serde_json::to_vec(event).unwrap();
    let read = Event::decode_json(&json).expect("what was written as JSON is an event");
    assert_eq!(read, *event, "{}", String::from_utf8_lossy(&json));
    assert_eq!(read.digest(), event.digest());
}
