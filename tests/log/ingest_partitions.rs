//! Partitions that end in something else than an event, and partitions that are added: closing
//! neither stops nor runs ahead.

use std::time::Duration;

use event_log::event::{self, Event};
use ingest::reward::Definition;
use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use uuid::Uuid;

use fixture::ingest::{Service, Trajectory, accept, count, generation, options, send, trajectory};
use fixture::{PARTITIONS, Stack, eventually};

const SOON: Duration = Duration::from_secs(90);
const SOURCE: &str = "tests/partitions";

/// A producer of another kind, which writes in transactions.
async fn transactional(stack: &Stack) -> FutureProducer {
    let producer: FutureProducer = stack
        .kafka
        .config(&[])
        .set("transactional.id", &stack.kafka.topic_prefix)
        .create()
        .unwrap();
    blocking(&producer, |producer| producer.init_transactions(SOON)).await;
    producer
}

async fn blocking(
    producer: &FutureProducer,
    step: impl FnOnce(&FutureProducer) -> rdkafka::error::KafkaResult<()> + Send + 'static,
) {
    let producer = producer.clone();
    tokio::task::spawn_blocking(move || step(&producer))
        .await
        .unwrap()
        .unwrap();
}

/// Sends to one partition of the feedback topic.
async fn send_to(producer: &FutureProducer, stack: &Stack, partition: i32, event: &Event) {
    let topic = stack.kafka.topics().feedback;
    let (key, value) = (event.key(), event.encode());
    let record = FutureRecord::to(&topic)
        .partition(partition)
        .key(&key[..])
        .payload(&value);
    producer.send(record, SOON).await.unwrap();
}

/// The end of each partition of the feedback topic, with the records of open transactions.
fn ends(stack: &Stack) -> Vec<i64> {
    let consumer: BaseConsumer = stack
        .kafka
        .config(&[])
        .set("isolation.level", "read_uncommitted")
        .create()
        .unwrap();
    let topic = stack.kafka.topics().feedback;
    (0..PARTITIONS)
        .map(|partition| consumer.fetch_watermarks(&topic, partition, SOON).unwrap().1)
        .collect()
}

async fn stored_generation(stack: &Stack) -> Uuid {
    let generation = generation();
    let id = generation.id;
    send(stack, &[generation.into_event("default", SOURCE)]).await;
    eventually("the generation is stored", SOON, async || {
        sqlx::query_scalar::<_, i32>("select 1 from generation where id = $1")
            .bind(id)
            .fetch_optional(&stack.pool)
            .await
            .unwrap()
    })
    .await;
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn generations_close_behind_partitions_that_end_in_a_marker_of_a_transaction() {
    let stack = Stack::start("transactions").await;
    let service = Service::start(&stack).await;
    let producer = transactional(&stack).await;
    // A commit ends one partition, and an abort the other, so each ends in a marker.
    let committed = accept(Uuid::now_v7(), true);
    blocking(&producer, FutureProducer::begin_transaction).await;
    send_to(&producer, &stack, 0, &committed).await;
    blocking(&producer, |producer| producer.commit_transaction(SOON)).await;
    blocking(&producer, FutureProducer::begin_transaction).await;
    send_to(&producer, &stack, 1, &accept(Uuid::now_v7(), true)).await;
    blocking(&producer, |producer| producer.abort_transaction(SOON)).await;
    assert_eq!(ends(&stack), [2, 2]);

    let id = stored_generation(&stack).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::censored("no_feedback"));
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 1);
    // The tables have read the markers, so that no lag remains and retention may remove them.
    let topic = stack.kafka.topics().feedback;
    eventually("the offsets pass the markers", SOON, async || {
        let offsets: Vec<i64> =
            sqlx::query_scalar("select next_offset from consumer_offset where topic = $1 order by partition")
                .bind(&topic)
                .fetch_all(&stack.pool)
                .await
                .unwrap();
        (offsets == [2, 2]).then_some(())
    })
    .await;

    // A restart reads on behind the markers.
    service.stop().await;
    let service = Service::start(&stack).await;
    let given_at = event::now();
    let id = stored_generation(&stack).await;
    blocking(&producer, FutureProducer::begin_transaction).await;
    for partition in 0..PARTITIONS {
        let feedback = Event {
            time: given_at,
            ..accept(id, true)
        };
        send_to(&producer, &stack, partition, &feedback).await;
    }
    blocking(&producer, |producer| producer.commit_transaction(SOON)).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_of_an_open_transaction_holds_closing_until_it_commits() {
    let stack = Stack::start("transaction-open").await;
    let service = Service::start(&stack).await;
    let producer = transactional(&stack).await;
    blocking(&producer, FutureProducer::begin_transaction).await;
    let open = accept(Uuid::now_v7(), true);
    send_to(&producer, &stack, 0, &open).await;
    let given_at = event::now();
    let id = stored_generation(&stack).await;
    // Acknowledged by the log, but behind the open transaction, so no consumer reads it yet.
    let plain: FutureProducer = stack.kafka.config(&[]).create().unwrap();
    let feedback = Event {
        time: given_at,
        ..accept(id, true)
    };
    send_to(&plain, &stack, 0, &feedback).await;
    // The other partitions pass the horizon.
    let passed = "select count(*) from consumer_offset o, generation g \
                  where o.caught_up_to > g.stored_at + interval '3 s'";
    eventually("the horizon passes", SOON, async || {
        (count(&stack.pool, passed).await == i64::from(2 * PARTITIONS - 1)).then_some(())
    })
    .await;
    assert_eq!(count(&stack.pool, "select count(*) from trajectory").await, 0);
    blocking(&producer, |producer| producer.commit_transaction(SOON)).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_waits_for_partitions_that_were_added() {
    let stack = Stack::start("partition-added").await;
    let options = ingest::Options {
        surface: vec![Definition {
            horizon_seconds: 10.0,
            ..options().surface[0].clone()
        }],
        ..options()
    };
    let service = Service::start_with(&stack, options).await;
    let id = stored_generation(&stack).await;
    let admin: AdminClient<DefaultClientContext> = stack.kafka.config(&[]).create().unwrap();
    let topic = stack.kafka.topics().feedback;
    let more = NewPartitions::new(&topic, usize::try_from(PARTITIONS).unwrap() + 1);
    let results = admin.create_partitions([&more], &AdminOptions::new()).await.unwrap();
    assert!(results.into_iter().all(|result| result.is_ok()));
    // A client that has seen the new partition.
    let producer: FutureProducer = eventually("the partition is there", SOON, async || {
        let producer: FutureProducer = stack.kafka.config(&[]).create().unwrap();
        let metadata = producer.client().fetch_metadata(Some(&topic), SOON).unwrap();
        let partitions = metadata.topics()[0].partitions();
        (partitions.len() > usize::try_from(PARTITIONS).unwrap()).then_some(producer)
    })
    .await;
    send_to(&producer, &stack, PARTITIONS, &accept(id, true)).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}
