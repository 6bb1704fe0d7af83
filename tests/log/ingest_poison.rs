//! Records of every size that nobody can use: each one is put aside with its reason and position,
//! and its partition goes on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use event_log::event::Event;
use event_log::{DlqEntry, DlqReader, DlqRecord, Position, Producer};
use futures::future::join_all;
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use uuid::Uuid;

use fixture::broker::Broker;
use fixture::ingest::{Service, accept, count, generation, no_dead_letters};
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(120);
const MIB: usize = 1024 * 1024;
/// What a broker accepts unless it is configured: `message.max.bytes`.
const BROKER_BYTES_MAX: usize = 1_048_588;

/// Limits the records of a topic.
pub async fn limit(stack: &Stack, topic: &str, bytes_max: usize) {
    let bytes_max = bytes_max.to_string();
    alter(
        stack,
        topic,
        &[("max.message.bytes", &bytes_max), ("retention.ms", "-1")],
    )
    .await;
}

/// Replaces the settings of a topic.
async fn alter(stack: &Stack, topic: &str, settings: &[(&str, &str)]) {
    let admin: AdminClient<DefaultClientContext> = stack.kafka.config(&[]).create().unwrap();
    let config = AlterConfig::new(ResourceSpecifier::Topic(topic));
    let config = settings
        .iter()
        .fold(config, |config, (name, value)| config.set(name, value));
    let results = admin.alter_configs(&[config], &AdminOptions::new()).await.unwrap();
    assert!(results.into_iter().all(|result| result.is_ok()));
}

/// A producer of another kind, which sends whatever the broker accepts.
fn foreign(stack: &Stack) -> FutureProducer {
    stack
        .kafka
        .config(&[])
        .set("message.max.bytes", (64 * MIB).to_string())
        .set("queue.buffering.max.kbytes", (128 * 1024).to_string())
        .create()
        .unwrap()
}

/// Sends a record to partition 0 of the feedback topic. `None` if the broker refuses its size.
async fn send(
    producer: &FutureProducer,
    stack: &Stack,
    key: &[u8],
    value: &[u8],
    headers: &[(&str, &str)],
) -> Option<Position> {
    let topic = stack.kafka.topics().feedback;
    let headers = headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
        headers.insert(Header {
            key,
            value: Some(*value),
        })
    });
    let record = FutureRecord::to(&topic)
        .partition(0)
        .key(key)
        .payload(value)
        .headers(headers);
    match producer.send(record, SOON).await {
        Ok(delivery) => Some(Position {
            topic: topic.clone(),
            partition: delivery.partition,
            offset: delivery.offset,
        }),
        Err((error, _)) => {
            assert_eq!(error.rdkafka_error_code(), Some(RDKafkaErrorCode::MessageSizeTooLarge));
            None
        }
    }
}

/// Bytes that are no event. Two of the same size differ.
pub fn poison(bytes: usize) -> Vec<u8> {
    let mut value = vec![0xff; bytes];
    let id = *Uuid::now_v7().as_bytes();
    let marked = bytes.min(id.len());
    value[bytes - marked..].copy_from_slice(&id[..marked]);
    value
}

/// All dead letters, once there are at least `number`.
async fn letters(stack: &Stack, number: usize) -> Vec<DlqRecord> {
    eventually("the dead letters arrive", SOON, async || {
        let reader = DlqReader::open(&stack.kafka).await.unwrap();
        let mut scan = reader.scan().unwrap();
        let mut letters = Vec::new();
        while let Some(entry) = scan.next().await.unwrap() {
            if let DlqEntry::Record(record) = entry {
                letters.push(record);
            }
        }
        (letters.len() >= number).then_some(letters)
    })
    .await
}

/// Waits until the tables hold this feedback.
async fn has_feedback(stack: &Stack, event: &Event) {
    let id: Uuid = event.id.parse().unwrap();
    eventually("the feedback behind the poison is stored", SOON, async || {
        sqlx::query_scalar::<_, i32>("select 1 from feedback where id = $1")
            .bind(id)
            .fetch_optional(&stack.pool)
            .await
            .unwrap()
    })
    .await;
}

/// Sends poison of these sizes, each followed by feedback. Checks that all feedback is stored and
/// that each record that the broker accepted is a dead letter with its position. Returns the number
/// of whole and of shortened dead letters.
async fn survives(stack: &Stack, sizes: &[usize]) -> (usize, usize) {
    let service = Service::start(stack).await;
    let producer = foreign(stack);
    let mut sent = Vec::new();
    let mut last = None;
    for &size in sizes {
        let value = poison(size);
        if let Some(position) = send(&producer, stack, b"any", &value, &[]).await {
            sent.push((position, value));
        }
        let event = accept(Uuid::now_v7(), true);
        send(&producer, stack, &event.key(), &event.encode(), &[])
            .await
            .unwrap();
        last = Some(event);
    }
    has_feedback(stack, &last.unwrap()).await;
    assert_eq!(
        count(&stack.pool, "select count(*) from feedback").await,
        i64::try_from(sizes.len()).unwrap()
    );
    let letters = letters(stack, sent.len()).await;
    let (mut whole, mut shortened) = (0, 0);
    for (position, value) in &sent {
        let about = letters.iter().find(|letter| letter.from.as_ref() == Some(position));
        let letter = about.unwrap_or_else(|| panic!("no dead letter about {position:?}, {} bytes", value.len()));
        // Few bytes may be an event without its fields.
        let is_short = value.len() < 16 && letter.reason == "invalid";
        assert!(is_short || letter.reason == "undecodable", "{}", letter.reason);
        match &letter.shortened {
            None => {
                assert_eq!(letter.value, *value);
                whole += 1;
            }
            Some(original) => {
                assert_eq!(original.value_bytes, value.len() as u64);
                assert_eq!(original.value_digest, blake3::hash(value).to_hex().as_str());
                assert!(value.starts_with(&letter.value));
                shortened += 1;
            }
        }
    }
    service.stop().await;
    (whole, shortened)
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_that_the_broker_accepts_is_put_aside_whole() {
    let stack = Stack::start("poison").await;
    let mut sizes = vec![0, 1, 999_000];
    // The client's own limit, and the broker's: with and without what a dead letter adds.
    for limit in [1_000_000, BROKER_BYTES_MAX] {
        sizes.extend((0..=600).step_by(40).map(|less| limit - less));
        sizes.extend([limit - 1, limit + 1, limit + 40]);
    }
    let (whole, shortened) = survives(&stack, &sizes).await;
    assert!(whole > 20, "{whole}");
    assert_eq!(shortened, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_beyond_the_limit_of_the_dead_letter_queue_is_put_aside_by_its_position() {
    let stack = Stack::start("poison-long").await;
    let topics = stack.kafka.topics();
    limit(&stack, &topics.feedback, 32 * MIB).await;
    let letters_max = 16 * MIB;
    let sizes = [
        2 * MIB,
        letters_max - 1000,
        letters_max - 100,
        letters_max,
        letters_max + 1,
        17 * MIB,
        20 * MIB,
    ];
    let (whole, shortened) = survives(&stack, &sizes).await;
    assert!(whole >= 2 && shortened >= 3, "{whole} whole, {shortened} shortened");
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_beyond_an_operators_limit_is_put_aside_by_its_position() {
    let stack = Stack::start("poison-limit").await;
    let topics = stack.kafka.topics();
    limit(&stack, &topics.dlq, 2_000).await;
    let sizes = [
        10, 1_000, 1_500, 1_600, 1_700, 1_800, 1_900, 2_000, 2_100, 70_000, 1_000_000,
    ];
    let (whole, shortened) = survives(&stack, &sizes).await;
    assert!(whole >= 2 && shortened >= 3, "{whole} whole, {shortened} shortened");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_queue_that_takes_nothing_does_not_stop_the_partition() {
    let stack = Stack::start("poison-none").await;
    limit(&stack, &stack.kafka.topics().dlq, 100).await;
    let service = Service::start(&stack).await;
    let producer = foreign(&stack);
    send(&producer, &stack, b"any", &poison(5_000), &[]).await.unwrap();
    let event = accept(Uuid::now_v7(), true);
    send(&producer, &stack, &event.key(), &event.encode(), &[])
        .await
        .unwrap();
    has_feedback(&stack, &event).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_and_headers_of_a_megabyte_do_not_stop_the_partition() {
    let stack = Stack::start("poison-headers").await;
    limit(&stack, &stack.kafka.topics().dlq, BROKER_BYTES_MAX).await;
    let service = Service::start(&stack).await;
    let producer = foreign(&stack);
    let long = "x".repeat(1_048_300);
    let value = poison(16);
    let mut positions = Vec::new();
    for (key, header) in [(&*long, "traceparent"), ("any", "traceparent"), ("any", "content-type")] {
        let headers = [(header, if key == long { "" } else { &*long })];
        let position = send(&producer, &stack, key.as_bytes(), &value, &headers).await;
        positions.push(position.unwrap());
    }
    let event = accept(Uuid::now_v7(), true);
    send(&producer, &stack, &event.key(), &event.encode(), &[])
        .await
        .unwrap();
    has_feedback(&stack, &event).await;
    let letters = letters(&stack, positions.len()).await;
    for position in positions {
        let letter = letters
            .iter()
            .find(|letter| letter.from.as_ref() == Some(&position))
            .unwrap();
        assert_eq!(letter.value, value);
        assert_eq!(letter.shortened.as_ref().unwrap().value_bytes, 16);
    }
    service.stop().await;
}

/// Two requests with the same identity race: both are acknowledged, and the second is a conflict.
/// It is as long as an event may be, and its dead letter is longer.
#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_of_the_longest_event_is_put_aside_whole() {
    let stack = Stack::start("poison-race").await;
    let service = Service::start(&stack).await;
    let producer = Producer::new(&stack.kafka).unwrap();
    let first = generation();
    let mut second = first.clone();
    second.prompt_prefix = None;
    second.sampling = None;
    second.train_mask = None;
    second.versions.truncate(1);
    second.versions[0].tokens = 60_000;
    second.token_ids = vec![i32::MAX.cast_unsigned(); 60_000];
    second.logprobs = vec![-0.5; 60_000];
    producer.send_event(&first.into_event("default", "race")).await.unwrap();
    // One token less at a time, each of five bytes, until the log accepts the event.
    let with_tokens = |tokens: usize| {
        let mut longest = second.clone();
        longest.prompt_ids = vec![i32::MAX.cast_unsigned(); tokens];
        longest.into_event("default", "race")
    };
    let room = 1_000_000 - with_tokens(0).encode().len();
    let mut tokens = room / 5;
    let longest = loop {
        let event = with_tokens(tokens);
        match producer.send_event(&event).await {
            Ok(()) => break event,
            Err(event_log::Error::TooLarge { .. }) => tokens -= 1,
            Err(error) => panic!("{error}"),
        }
    };
    let value = longest.encode();
    assert!((999_400..1_000_000).contains(&value.len()), "{}", value.len());
    let letter = letters(&stack, 1).await.remove(0);
    assert_eq!(letter.reason, "conflict");
    assert_eq!(letter.value, value);
    assert_eq!(letter.shortened, None);
    service.stop().await;
}

/// A producer that waits for all records of a batch and compresses them.
fn compressing(stack: &Stack, codec: &str) -> FutureProducer {
    let mut config = stack.kafka.config(&[("linger.ms", "1000")]);
    config.set("compression.type", codec).create().unwrap()
}

/// Sends feedback in one batch. Returns its positions.
async fn send_batch(producer: &FutureProducer, stack: &Stack, events: &[Event]) -> Vec<Position> {
    let sends = events.iter().map(async |event| {
        let sent = send(producer, stack, &event.key(), &event.encode(), &[]).await;
        sent.unwrap()
    });
    join_all(sends).await
}

fn feedback(number: usize) -> Vec<Event> {
    (0..number).map(|_| accept(Uuid::now_v7(), true)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_is_read_whichever_codec_its_producer_compresses_with() {
    let stack = Stack::start("codecs").await;
    let service = Service::start(&stack).await;
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let events = feedback(50);
        send_batch(&compressing(&stack, codec), &stack, &events).await;
        has_feedback(&stack, events.last().unwrap()).await;
    }
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 250);
    no_dead_letters(&stack).await;
    service.stop().await;
}

/// The first segment of partition 0 of a topic, below a broker's folder.
fn segment(folder: &Path, topic: &str) -> Option<PathBuf> {
    std::fs::read_dir(folder).unwrap().flatten().find_map(|entry| {
        let path = entry.path();
        if entry.file_name().to_string_lossy() == format!("{topic}-0") {
            return Some(path.join("00000000000000000000.log"));
        }
        path.is_dir().then(|| segment(&path, topic)).flatten()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_a_disk_has_damaged_becomes_dead_letters_and_its_partition_goes_on() {
    let mut stack = Stack::start("damaged-batch").await;
    let state = stack.dir.path().join("broker");
    std::fs::create_dir(&state).unwrap();
    let broker = Broker::start(&stack, &state).await;
    let shared = stack.use_broker(&broker);
    event_log::ensure_topics(&stack.kafka, 2).await.unwrap();
    let (before, damaged, after) = (feedback(2), feedback(30), feedback(2));
    send_batch(&compressing(&stack, "none"), &stack, &before).await;
    let mut positions = send_batch(&compressing(&stack, "gzip"), &stack, &damaged).await;
    send_batch(&compressing(&stack, "none"), &stack, &after).await;
    let segment = segment(&state, &stack.kafka.topics().feedback).unwrap();
    let mut bytes = std::fs::read(&segment).unwrap();
    let gzip = bytes.windows(3).position(|three| three == [0x1f, 0x8b, 8]).unwrap();
    bytes[gzip + 40] ^= 0xff;
    std::fs::write(&segment, &bytes).unwrap();

    let service = Service::start(&stack).await;
    has_feedback(&stack, after.last().unwrap()).await;
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 4);
    let letters = letters(&stack, damaged.len()).await;
    assert!(
        letters
            .iter()
            .all(|letter| letter.reason == "unreadable" && letter.value.is_empty())
    );
    let mut found: Vec<Position> = letters.iter().flat_map(|letter| letter.from.clone()).collect();
    found.sort_by_key(|position| position.offset);
    positions.sort_by_key(|position| position.offset);
    assert_eq!(found, positions);
    // It has nothing to send again.
    let error = letters[0].destination(&stack.kafka.topics()).unwrap_err();
    assert!(error.to_string().contains("does not hold the whole record"), "{error}");
    service.stop().await;
    drop(broker);
    (stack.kafka, stack.kafka_file) = shared;
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_that_lose_records_are_refused_at_the_start_with_what_to_do() {
    let stack = Stack::start("policies").await;
    let topic = stack.kafka.topics().feedback;
    let refused = async |settings: &[(&str, &str)]| {
        alter(&stack, &topic, settings).await;
        let error = event_log::ensure_topics(&stack.kafka, 4).await.unwrap_err();
        format!("{error:#}")
    };
    let why = refused(&[("cleanup.policy", "compact")]).await;
    assert!(
        why.contains(&topic) && why.contains("--add-config cleanup.policy=delete"),
        "{why}"
    );
    let why = refused(&[("retention.ms", "60000")]).await;
    assert!(why.contains("retention.ms=604800000"), "{why}");
    alter(&stack, &topic, &[("retention.ms", "-1")]).await;
    event_log::ensure_topics(&stack.kafka, 4).await.unwrap();
}
