//! Producers and consumers of different ages on one log. What version 1's first producers wrote is still stored; what a newer
//! one adds to an event is ignored, and changes nothing about which event it is; an event of a kind that is not known here
//! yet waits among the dead letters, byte for byte, until a consumer that knows it gets it back.

use std::time::Duration;

use ingest::event::Event;
use tokio::process::Command;

use crate::ingest::{Service, accept, count, dead_letters, generation, send_raw, stored};
use crate::support::{SPRINGTIDE, Stack};

/// As the first of each kind was written; never changed.
const FIRST: [&str; 4] = [
    include_str!("../ingest/fixtures/generation-v1.hex"),
    include_str!("../ingest/fixtures/feedback-v1.hex"),
    include_str!("../ingest/fixtures/retraction-v1.hex"),
    include_str!("../ingest/fixtures/episode-end-v1.hex"),
];
const PROTOBUF: &str = "application/protobuf";
/// Field 1000, length-delimited, "new".
const UNKNOWN: [u8; 6] = [0xc2, 0x3e, 3, b'n', b'e', b'w'];
/// Of the fields of `Event` that may be a body: the number of one that this version does not know.
const UNKNOWN_BODY: u8 = 15;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_first_producers_wrote_is_stored_by_todays_consumer() {
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
async fn what_a_newer_producer_adds_is_ignored_and_the_event_stays_the_same() {
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
        // As its older sibling sends it.
        send_raw(&stack, topic, PROTOBUF, &event.encode()).await;
    }
    stored(&stack.pool, 4).await;
    let rows = "select (select count(*) from generation) + (select count(*) from feedback)";
    assert_eq!(count(&stack.pool, rows).await, 2);
    assert_eq!(count(&stack.pool, "select count(*) from event_key").await, 2);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kind_that_is_not_known_yet_waits_among_the_dead_letters_and_goes_back_as_it_was() {
    let stack = Stack::start("evolution_kind").await;
    let service = Service::start(&stack).await;
    let mut event = ingest::proto::Event::from(&accept(generation().id, true));
    event.body = None;
    let mut newer = prost::Message::encode_to_vec(&event);
    newer.extend([UNKNOWN_BODY << 3 | 2, 2, b'h', b'i']);
    assert!(Event::decode(&newer).is_err());
    send_raw(&stack, &stack.kafka.topics().feedback, PROTOBUF, &newer).await;
    stored(&stack.pool, 1).await;
    let letters = dead_letters(&stack, 1).await;
    assert_eq!(letters[0].headers["reason"], "invalid");
    assert_eq!(letters[0].headers["detail"], "body: is missing or of an unknown kind");
    assert_eq!(letters[0].value, newer, "the bytes are those that were sent");

    // Whoever knows the kind by then gets the same bytes; this consumer says the same again.
    let replay = Command::new(SPRINGTIDE)
        .args(["dlq", "replay", "0/0", "--yes"])
        .current_dir(stack.dir.path())
        .env("SPRINGTIDE__KAFKA__BROKERS", &stack.kafka.brokers)
        .env("SPRINGTIDE__KAFKA__TOPIC_PREFIX", &stack.kafka.topic_prefix)
        .output();
    let replay = tokio::time::timeout(Duration::from_secs(60), replay)
        .await
        .unwrap()
        .unwrap();
    assert!(replay.status.success(), "{}", String::from_utf8_lossy(&replay.stderr));
    stored(&stack.pool, 2).await;
    // The letter, the note that it was put back, the letter of the record that went back.
    let letters = dead_letters(&stack, 3).await;
    assert_eq!(letters.iter().filter(|letter| letter.value == newer).count(), 2);
    assert_eq!(count(&stack.pool, "select count(*) from event_key").await, 0);
    service.stop().await;
}
