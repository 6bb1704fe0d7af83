//! Producers and consumers of different versions on one log. Records of the first version are still
//! stored. Fields that newer producers add are ignored and do not change the event's identity.
//! Events of unknown kinds become dead letters, byte for byte, until a newer consumer gets them
//! back.

use std::time::Duration;

use event_log::event::Event;
use tokio::process::Command;

use fixture::ingest::{Service, accept, count, dead_letters, generation, send_raw, stored};
use fixture::{SPRINGTIDE, Stack};

/// The first version of each kind. Never change these.
const FIRST: [&str; 4] = [
    include_str!("../../ingest/log/fixtures/generation-v1.hex"),
    include_str!("../../ingest/log/fixtures/feedback-v1.hex"),
    include_str!("../../ingest/log/fixtures/retraction-v1.hex"),
    include_str!("../../ingest/log/fixtures/episode-end-v1.hex"),
];
const PROTOBUF: &str = "application/protobuf";
/// Field 1000, length-delimited, "new".
const UNKNOWN: [u8; 6] = [0xc2, 0x3e, 3, b'n', b'e', b'w'];
/// The field number of a body that this version does not know.
const UNKNOWN_BODY: u8 = 15;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_the_first_version_are_stored() {
    let stack = Stack::start("evolution_old").await;
    let service = Service::start(&stack).await;
    let topics = stack.kafka.topics();
    for (fixture, topic) in FIRST
        .iter()
        .zip([&topics.generation, &topics.feedback, &topics.feedback, &topics.feedback])
    {
        send_raw(&stack, topic, PROTOBUF, &bytes(fixture)).await;
    }
    stored(&stack.pool, 4).await;
    let rows = "select (select count(*) from generation) + (select count(*) from feedback) \
                + (select count(*) from retraction) + (select count(*) from episode_end)";
    assert_eq!(count(&stack.pool, rows).await, 4);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_ignored_and_the_event_stays_the_same() {
    let stack = Stack::start("evolution_new").await;
    let service = Service::start(&stack).await;
    let topics = stack.kafka.topics();
    for (event, topic) in [
        (
            generation().into_event("default", "tests/evolution"),
            &topics.generation,
        ),
        (accept(generation().id, true), &topics.feedback),
    ] {
        let mut newer = event.encode();
        newer.extend(UNKNOWN);
        send_raw(&stack, topic, PROTOBUF, &newer).await;
        // As an older producer sends it.
        send_raw(&stack, topic, PROTOBUF, &event.encode()).await;
    }
    stored(&stack.pool, 4).await;
    let rows = "select (select count(*) from generation) + (select count(*) from feedback)";
    assert_eq!(count(&stack.pool, rows).await, 2);
    assert_eq!(count(&stack.pool, "select count(*) from event_key").await, 2);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_of_an_unknown_kind_becomes_a_dead_letter_and_can_be_replayed_unchanged() {
    let stack = Stack::start("evolution_kind").await;
    let service = Service::start(&stack).await;
    let mut event = event_log::event::proto::Event::from(&accept(generation().id, true));
    event.body = None;
    let mut newer = prost::Message::encode_to_vec(&event);
    newer.extend([UNKNOWN_BODY << 3 | 2, 2, b'h', b'i']);
    assert!(Event::decode(&newer).is_err());
    send_raw(&stack, &stack.kafka.topics().feedback, PROTOBUF, &newer).await;
    stored(&stack.pool, 1).await;
    let records = dead_letters(&stack, 1).await;
    assert_eq!(records[0].headers["reason"], "invalid");
    assert_eq!(records[0].headers["detail"], "body: is missing or of an unknown kind");
    assert_eq!(records[0].value, newer, "the bytes are unchanged");

    // A newer consumer would get the same bytes. This one refuses them again.
    let replay = Command::new(&*SPRINGTIDE)
        .args(["dlq", "replay", "0/0", "--yes"])
        .current_dir(stack.dir.path())
        .envs(stack.kafka_environment())
        .output();
    let replay = tokio::time::timeout(Duration::from_secs(60), replay)
        .await
        .unwrap()
        .unwrap();
    assert!(replay.status.success(), "{}", String::from_utf8_lossy(&replay.stderr));
    stored(&stack.pool, 2).await;
    // The dead letter, the note about the replay, and the dead letter of the replayed record.
    let records = dead_letters(&stack, 3).await;
    assert_eq!(records.iter().filter(|record| record.value == newer).count(), 2);
    assert_eq!(count(&stack.pool, "select count(*) from event_key").await, 0);
    service.stop().await;
}
