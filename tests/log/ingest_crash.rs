//! Recovery: a database that loses committed transactions (after a crash or a failover), a sink
//! that loses partitions while it writes, and a transaction that takes very long.

use std::time::Duration;

use event_log::event::Event;
use rdkafka::producer::{FutureProducer, FutureRecord};
use sqlx::Executor;
use uuid::Uuid;

use fixture::ingest::{
    Service, Trajectory, accept, count, dead_letters, generation, no_dead_letters, options, send, stored, trajectory,
};
use fixture::{Stack, eventually};

const SOURCE: &str = "tests/crash";
const SOON: Duration = Duration::from_secs(90);

/// Deletes all rows and offsets of the sink. The fences and the running sink stay.
async fn go_back(stack: &Stack) {
    let mut transaction = edge::database::begin(&stack.pool).await.unwrap();
    for table in ["event_key", "generation", "open_generation", "feedback", "trajectory"] {
        let delete = sqlx::AssertSqlSafe(format!("delete from {table}"));
        transaction.execute(delete).await.unwrap();
    }
    let back = "update consumer_offset set next_offset = 0, caught_up_to = null where consumer = 'sink'";
    transaction.execute(back).await.unwrap();
    transaction.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_the_database_lost_are_read_from_the_log_again() {
    let stack = Stack::start("went_back").await;
    let service = Service::start(&stack).await;
    let generations: Vec<_> = (0..20).map(|_| generation()).collect();
    let events: Vec<Event> = generations
        .iter()
        .map(|generation| generation.clone().into_event("default", SOURCE))
        .collect();
    send(&stack, &events).await;
    stored(&stack.pool, 20).await;
    go_back(&stack).await;
    // The sink's position is after the lost records. It must not write the next record and leave a
    // gap.
    let acceptance = accept(generations[0].id, true);
    send(&stack, std::slice::from_ref(&acceptance)).await;
    let after = generation().into_event("default", SOURCE);
    let every_partition: Vec<Event> = (0..10).map(|_| generation().into_event("default", SOURCE)).collect();
    send(&stack, &[&[after], &*every_partition].concat()).await;
    stored(&stack.pool, 32).await;
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 31);
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 1);
    assert_eq!(count(&stack.pool, "select count(*) from event_key").await, 32);
    no_dead_letters(&stack).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_rows_are_read_again_even_without_new_events() {
    let stack = Stack::start("went_back_idle").await;
    let service = Service::start(&stack).await;
    let shown = generation();
    let id = shown.id;
    send(&stack, &[shown.into_event("default", SOURCE), accept(id, true)]).await;
    stored(&stack.pool, 2).await;
    go_back(&stack).await;
    // Closed, and with its feedback.
    stored(&stack.pool, 2).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_in_a_very_long_transaction_still_becomes_a_dead_letter() {
    let stack = Stack::start("long_orphan").await;
    let options = ingest::Options {
        orphan_ttl_seconds: 0.5,
        ..options()
    };
    let service = Service::start_with(&stack, options).await;
    let mut storing = edge::database::begin(&stack.pool_of("ingest")).await.unwrap();
    // As a sink does first.
    let lock = "lock table consumer_offset in row exclusive mode";
    storing.execute(lock).await.unwrap();
    // `stored_at` is the start of the transaction, but the row is visible only after its end.
    let insert = "insert into feedback (id, tenant_id, generation_id, metric_name, value_bool, given_at) \
                  values ($1, 'default', $2, 'accept', true, now())";
    let insert = sqlx::query(insert).bind(Uuid::now_v7()).bind(Uuid::now_v7());
    insert.execute(&mut *storing).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    storing.commit().await.unwrap();
    let records = dead_letters(&stack, 1).await;
    assert_eq!(records[0].headers["reason"], "orphan");
    service.stop().await;
}

/// Sends events to one partition.
async fn send_to(stack: &Stack, partition: i32, events: &[Event]) {
    let producer: FutureProducer = stack.kafka.config(&[]).create().unwrap();
    let topic = stack.kafka.topics().generation;
    for event in events {
        let value = event.encode();
        let record = FutureRecord::<(), _>::to(&topic).partition(partition).payload(&value);
        producer.send(record, SOON).await.unwrap();
    }
}

fn generations(number: usize) -> Vec<Event> {
    let event = |_| generation().into_event("default", SOURCE);
    (0..number).map(event).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_read_between_a_rebalance_and_the_end_of_a_round_are_stored() {
    let mut stack = Stack::start("rebalanced").await;
    let named = |stack: &mut Stack, name: &str| {
        stack.kafka.librdkafka.insert("client.id".to_owned(), name.to_owned());
    };
    // Partitions are assigned by member names: the first of two members gets partition 0 of each
    // topic.
    named(&mut stack, "a");
    let first = Service::start(&stack).await;
    send_to(&stack, 0, &generations(1)).await;
    stored(&stack.pool, 1).await;
    let mut holding_up = edge::database::begin(&stack.pool).await.unwrap();
    holding_up
        .execute("lock table generation in exclusive mode")
        .await
        .unwrap();
    send_to(&stack, 1, &generations(1)).await;
    eventually("a round is blocked", SOON, async || {
        let waiting = "select count(*) from pg_locks where not granted and relation = 'generation'::regclass";
        (count(&stack.pool, waiting).await > 0).then_some(())
    })
    .await;
    send_to(&stack, 0, &generations(10)).await;
    named(&mut stack, "b");
    let second = Service::start(&stack).await;
    eventually("the first sink has partition 0 again", SOON, async || {
        let fence = "select max(fence) from consumer_offset where partition = 0";
        (count(&stack.pool, fence).await == 2).then_some(())
    })
    .await;
    // It keeps reading while its round is blocked.
    tokio::time::sleep(Duration::from_secs(1)).await;
    holding_up.rollback().await.unwrap();
    send_to(&stack, 0, &generations(1)).await;
    stored(&stack.pool, 13).await;
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 13);
    no_dead_letters(&stack).await;
    first.stop().await;
    second.stop().await;
}
