//! Attacks of a producer with access to the broker: bytes that are no event, of every size around the
//! limits, and transactions that it aborts or leaves open.

use std::time::{Duration, Instant};

use rdkafka::error::KafkaResult;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::LONG;
use super::attacker::{Did, Place};
use crate::ingest_poison::poison as undecodable;
use fixture::ingest::accept;

/// The limits of Springtide and of Kafka, bytes: a name, a comment (and the beginning of a dead
/// letter), a request of feedback, an event, a broker's record (`message.max.bytes`), a request, a
/// dead letter (and a round of the sink).
const LIMITS: [usize; 7] = [256, 64 << 10, 512 << 10, 1_000_000, 1_048_588, 8 << 20, 16 << 20];
/// What a record's key and headers, a batch and a dead letter add to its value.
const ADDED_BYTES_MAX: usize = 640;
const ADDED_STEP: usize = 40;
/// Limits above this are too large to try all of these.
const SWEPT_MAX: usize = 2 << 20;
const SMALL_PER_SECOND: f64 = 100.0;
const SMALL_BYTES: usize = 100;
/// The broker aborts a transaction that is open for longer.
const TRANSACTION_TIMEOUT_MS: &str = "5000";

fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1];
    for limit in LIMITS {
        sizes.extend([limit - 1, limit, limit + 1]);
        if (1_000_000..SWEPT_MAX).contains(&limit) {
            sizes.extend(
                (ADDED_STEP..=ADDED_BYTES_MAX)
                    .step_by(ADDED_STEP)
                    .map(|less| limit - less),
            );
        } else {
            sizes.push(limit - limit.min(100));
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Sends all sizes once, evenly over the time, and small ones beside them.
pub async fn poison(place: Place, stop: CancellationToken) -> Did {
    let producer: FutureProducer = place
        .kafka
        .config(&[])
        .set("message.max.bytes", (64 << 20).to_string())
        .set("queue.buffering.max.kbytes", (128 << 10).to_string())
        .create()
        .unwrap();
    let sizes = sizes();
    let topics = [place.kafka.topics().feedback, place.kafka.topics().generation];
    let started = Instant::now();
    let mut did = Did::default();
    let (mut sent, mut large, mut bytes) = (0_usize, 0_usize, 0_usize);
    // Also after the others have stopped: every size must be tried.
    while !stop.is_cancelled() || large < sizes.len() {
        let elapsed = started.elapsed().as_secs_f64();
        let due = (elapsed / place.seconds * sizes.len() as f64) as usize;
        let size = match sizes.get(large) {
            Some(size) if large < due || stop.is_cancelled() => {
                large += 1;
                *size
            }
            _ => SMALL_BYTES,
        };
        let topic = &topics[sent % 2];
        let partition = i32::try_from(sent / 2).unwrap() % place.partitions;
        let value = undecodable(size);
        let record = FutureRecord::to(topic).partition(partition).key("any").payload(&value);
        let delivery = producer.send(record, LONG).await.unwrap();
        did.dead_letters
            .insert((topic.clone(), delivery.partition, delivery.offset));
        sent += 1;
        bytes += size;
        tokio::time::sleep(Duration::from_secs_f64(1.0 / SMALL_PER_SECOND)).await;
    }
    did.text = format!(
        "{sent} records, {} of them of {} to {} bytes around the limits; {} MiB in all",
        sizes.len(),
        sizes[0],
        sizes[sizes.len() - 1],
        bytes >> 20
    );
    did
}

async fn blocking(producer: &FutureProducer, step: fn(&FutureProducer) -> KafkaResult<()>) {
    let producer = producer.clone();
    tokio::task::spawn_blocking(move || step(&producer))
        .await
        .unwrap()
        .unwrap();
}

async fn transactional(place: &Place) -> FutureProducer {
    let producer: FutureProducer = place
        .kafka
        .config(&[])
        .set(
            "transactional.id",
            format!("{}-{}", place.kafka.topic_prefix, Uuid::now_v7()),
        )
        .set("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS)
        .create()
        .unwrap();
    blocking(&producer, |producer| producer.init_transactions(LONG)).await;
    producer
}

/// Begins a transaction with a record in every partition of both topics.
async fn begin(producer: &FutureProducer, place: &Place) {
    blocking(producer, FutureProducer::begin_transaction).await;
    for topic in [place.kafka.topics().feedback, place.kafka.topics().generation] {
        for partition in 0..place.partitions {
            let event = accept(Uuid::now_v7(), true);
            let (key, value) = (event.key(), event.encode());
            let record = FutureRecord::to(&topic)
                .partition(partition)
                .key(&key[..])
                .payload(&value);
            producer.send(record, LONG).await.unwrap();
        }
    }
}

/// One transaction after the other, all aborted.
pub async fn abort(place: Place, stop: CancellationToken) -> Did {
    let producer = transactional(&place).await;
    let mut aborted = 0;
    while !stop.is_cancelled() {
        begin(&producer, &place).await;
        blocking(&producer, |producer| producer.abort_transaction(LONG)).await;
        aborted += 1;
    }
    Did {
        text: format!("{aborted} transactions aborted, each with a record in every partition"),
        ..Did::default()
    }
}

/// Goes away in the middle of a transaction, so that only the broker can end it.
pub async fn leave_open(place: Place, stop: CancellationToken) -> Did {
    let producer = transactional(&place).await;
    begin(&producer, &place).await;
    // Ends its threads; the broker hears nothing.
    drop(producer);
    stop.cancelled().await;
    Did {
        text: format!("one transaction over every partition, with a timeout of {TRANSACTION_TIMEOUT_MS} ms"),
        ..Did::default()
    }
}
