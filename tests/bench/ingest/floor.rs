//! The baseline: bare consumers that write the sink's rows with `copy`, with as many writers as the
//! product, but without fences, deduplication, closing or dead letters. They use another Postgres
//! client, because the product's client waits about 40 ms per `copy` for a delayed TCP
//! acknowledgement.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use event_log::ClientOptions;
use event_log::event::{Body, Event, Target, Value, time_of};
use futures::SinkExt;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_postgres::{NoTls, Transaction};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// The product's defaults.
const WRITERS: i32 = 2;
const BATCH_RECORDS_MAX: usize = 250;
const BATCH_WAIT: Duration = Duration::from_millis(10);
const HORIZON: time::Duration = time::Duration::seconds(3);

/// Reads both topics from their beginning until shutdown.
pub async fn run(
    options: ClientOptions,
    partitions: i32,
    pool: PgPool,
    database_url: String,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Handle::current();
    let consumers = (0..WRITERS).map(|writer| {
        let (options, pool, stop, runtime) = (options.clone(), pool.clone(), stop.clone(), runtime.clone());
        let database_url = database_url.clone();
        let share: Vec<i32> = (0..partitions)
            .filter(|partition| partition % WRITERS == writer)
            .collect();
        tokio::task::spawn_blocking(move || consume(&options, &share, &pool, &database_url, &stop, &runtime))
    });
    for consumer in futures::future::join_all(consumers).await {
        consumer??;
    }
    Ok(())
}

fn consume(
    options: &ClientOptions,
    partitions: &[i32],
    pool: &PgPool,
    database_url: &str,
    stop: &CancellationToken,
    runtime: &tokio::runtime::Handle,
) -> anyhow::Result<()> {
    let mut config = options.config(ingest::sink::CONSUMER_SETTINGS);
    config.set("group.id", "floor");
    let consumer: BaseConsumer = config.create().context("create consumer")?;
    let topics = options.topics();
    let mut assignment = TopicPartitionList::new();
    for topic in [&topics.generation, &topics.feedback] {
        for partition in partitions {
            assignment.add_partition_offset(topic, *partition, Offset::Beginning)?;
        }
    }
    consumer.assign(&assignment)?;
    runtime.block_on(register(pool, &assignment))?;
    let (mut client, connection) = runtime.block_on(tokio_postgres::connect(database_url, NoTls))?;
    let connection = runtime.spawn(connection);
    // Like the product's sink: rows that a crash loses are still in the log.
    runtime.block_on(client.batch_execute("set synchronous_commit = off"))?;
    while !stop.is_cancelled() {
        let mut events = Vec::new();
        let mut next = BTreeMap::new();
        let mut deadline = Instant::now() + Duration::from_millis(50);
        while events.len() < BATCH_RECORDS_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(message) = consumer.poll(left) else { break };
            let message = message.context("read the log")?;
            if events.is_empty() {
                deadline = Instant::now() + BATCH_WAIT;
            }
            let event = Event::decode(message.payload().unwrap_or_default()).context("decode")?;
            events.push(event);
            next.insert((message.topic().to_owned(), message.partition()), message.offset() + 1);
        }
        if !events.is_empty() {
            runtime.block_on(store(&mut client, &events, &next))?;
        }
    }
    drop(client);
    runtime.block_on(connection)??;
    Ok(())
}

async fn register(pool: &PgPool, assignment: &TopicPartitionList) -> anyhow::Result<()> {
    for element in assignment.elements() {
        sqlx::query!(
            "insert into consumer_offset (consumer, cluster_id, topic, partition) values ('sink', 'floor', $1, $2)",
            element.topic(),
            element.partition()
        )
        .execute(pool)
        .await?;
    }
    Ok(())
}

async fn store(
    client: &mut tokio_postgres::Client,
    events: &[Event],
    next: &BTreeMap<(String, i32), i64>,
) -> anyhow::Result<()> {
    let transaction = client.transaction().await?;
    let mut keys = Copy::new(5);
    let mut generations = Copy::new(38);
    let mut open = Copy::new(3);
    let mut feedback = Copy::new(10);
    for event in events {
        let key = &mut keys;
        key.row().text(&event.tenant).text(&event.source).text(&event.id);
        key.text(event.body.kind()).bytes(&event.digest());
        match &event.body {
            Body::Generation(_) => {
                generation(&mut generations, event);
                open_generation(&mut open, event);
            }
            Body::Feedback(_) => feedback_row(&mut feedback, event),
            _ => {}
        }
    }
    copy(
        &transaction,
        "event_key (tenant_id, source, event_id, kind, digest)",
        keys,
    )
    .await?;
    let columns = "generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, \
         run_id, task_id, group_id, surface, episode_id, segment, turn, parent_id, user_key, arm, arm_probability, \
         prompt_prefix_len, prompt_prefix_hash, prompt_ids, token_ids, logprobs, train_mask, payload_digest, temperature, \
         top_p, seed, finish_reason, declined, shown, consent, sampled_at, decline_suppressed, finished_at)";
    copy(&transaction, columns, generations).await?;
    copy(
        &transaction,
        "open_generation (generation_id, surface, closes_at)",
        open,
    )
    .await?;
    let columns = "feedback (id, tenant_id, generation_id, episode_id, metric_name, value_bool, value_float, value_text, \
         tags, given_at)";
    copy(&transaction, columns, feedback).await?;
    let topics: Vec<&str> = next.keys().map(|(topic, _)| topic.as_str()).collect();
    let numbers: Vec<i32> = next.keys().map(|(_, partition)| *partition).collect();
    let offsets: Vec<i64> = next.values().copied().collect();
    transaction
        .execute(
            "update consumer_offset o set next_offset = p.next_offset, updated_at = now() \
             from unnest($1::text[], $2::int[], $3::bigint[]) as p (topic, partition, next_offset) \
             where consumer = 'sink' and cluster_id = 'floor' and o.topic = p.topic and o.partition = p.partition",
            &[&topics, &numbers, &offsets],
        )
        .await?;
    transaction.commit().await?;
    Ok(())
}

fn generation(copy: &mut Copy, event: &Event) {
    let Body::Generation(body) = &event.body else { return };
    let version = body.versions.last();
    let spans: Vec<_> = body.versions.iter().map(|span| (span.version, span.tokens)).collect();
    copy.row().uuid(body.id).text(&event.tenant).text(&body.policy);
    copy.i64(version.map_or(0, |span| span.version));
    copy.i64(body.versions.iter().map(|span| span.version).min().unwrap_or(0));
    copy.json(&serde_json::json!(spans));
    copy.bytes(version.map_or(&[], |span| &span.root));
    copy.text(&body.line).text(&body.replica).text(body.purpose.as_str());
    copy.optional(body.run_id, |copy, id| copy.uuid(id));
    copy.optional(body.task_id.as_ref(), |copy, id| copy.text(id));
    copy.optional(body.group_id.as_ref(), |copy, id| copy.text(id));
    copy.text(&body.surface).uuid(body.episode_id);
    copy.i32(body.segment.cast_signed()).i32(body.turn.cast_signed());
    copy.optional(body.parent_id, |copy, id| copy.uuid(id));
    copy.text(&body.user_key).text(&body.arm).f32(body.arm_probability);
    copy.i32(body.prompt_prefix.map_or(0, |prefix| prefix.length.cast_signed()));
    copy.optional(body.prompt_prefix, |copy, prefix| copy.bytes(&prefix.hash));
    copy.array(23, body.prompt_ids.iter().map(|id| id.to_be_bytes()));
    copy.array(23, body.token_ids.iter().map(|id| id.to_be_bytes()));
    copy.array(700, body.logprobs.iter().map(|logprob| logprob.to_be_bytes()));
    let mask = body.train_mask.as_ref();
    copy.optional(mask, |copy, mask| {
        copy.array(16, mask.iter().map(|&trained| [u8::from(trained)]))
    });
    copy.optional(body.payload.as_ref(), |copy, payload| copy.bytes(&payload.digest));
    copy.f32(body.temperature).f32(body.top_p);
    copy.optional(body.seed, |copy, seed| copy.i64(seed.cast_signed()));
    copy.text(body.finish_reason.as_str()).bool(body.declined);
    copy.optional(body.shown, |copy, shown| copy.bool(shown));
    copy.bool(body.consent).time(time_of(body.id).unwrap_or(event.time));
    copy.bool(body.decline_suppressed).time(event.time);
}

fn open_generation(copy: &mut Copy, event: &Event) {
    let Body::Generation(body) = &event.body else { return };
    let closes_at = event.time + HORIZON;
    copy.row().uuid(body.id).text(&body.surface).time(closes_at);
}

fn feedback_row(copy: &mut Copy, event: &Event) {
    let Body::Feedback(body) = &event.body else { return };
    let (generation, episode) = match body.target {
        Target::Generation(id) => (Some(id), None),
        Target::Episode(id) => (None, Some(id)),
    };
    copy.row().uuid(body.id).text(&event.tenant);
    copy.optional(generation, |copy, id| copy.uuid(id));
    copy.optional(episode, |copy, id| copy.uuid(id));
    copy.text(&body.metric_name);
    let (truth, number, text) = match &body.value {
        Value::Bool(value) => (Some(*value), None, None),
        Value::Float(value) => (None, Some(*value), None),
        Value::Text(value) => (None, None, Some(value)),
    };
    copy.optional(truth, |copy, value| copy.bool(value));
    copy.optional(number, |copy, value| copy.field(&value.to_be_bytes()));
    copy.optional(text, |copy, value| copy.text(value));
    copy.json(&serde_json::json!(body.tags)).time(event.time);
}

async fn copy(transaction: &Transaction<'_>, columns: &str, rows: Copy) -> anyhow::Result<()> {
    let statement = format!("copy {columns} from stdin (format binary)");
    let into = transaction.copy_in(&statement).await?;
    futures::pin_mut!(into);
    into.send(Bytes::from(rows.finish())).await?;
    into.finish().await?;
    Ok(())
}

/// Rows in the binary format of `copy`.
struct Copy {
    bytes: Vec<u8>,
    columns: i16,
}

impl Copy {
    fn new(columns: i16) -> Self {
        let mut bytes = b"PGCOPY\n\xff\r\n\0".to_vec();
        bytes.extend([0; 8]);
        Self { bytes, columns }
    }

    fn finish(mut self) -> Vec<u8> {
        self.bytes.extend((-1_i16).to_be_bytes());
        self.bytes
    }

    fn row(&mut self) -> &mut Self {
        self.bytes.extend(self.columns.to_be_bytes());
        self
    }

    fn field(&mut self, bytes: &[u8]) -> &mut Self {
        let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
        self.bytes.extend(length.to_be_bytes());
        self.bytes.extend(bytes);
        self
    }

    fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T) -> &mut Self) {
        match value {
            Some(value) => drop(write(self, value)),
            None => self.bytes.extend((-1_i32).to_be_bytes()),
        }
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.field(text.as_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.field(bytes)
    }

    fn uuid(&mut self, id: Uuid) -> &mut Self {
        self.field(id.as_bytes())
    }

    fn i32(&mut self, value: i32) -> &mut Self {
        self.field(&value.to_be_bytes())
    }

    fn i64(&mut self, value: i64) -> &mut Self {
        self.field(&value.to_be_bytes())
    }

    fn f32(&mut self, value: f32) -> &mut Self {
        self.field(&value.to_be_bytes())
    }

    fn bool(&mut self, value: bool) -> &mut Self {
        self.field(&[u8::from(value)])
    }

    fn json(&mut self, value: &serde_json::Value) -> &mut Self {
        self.field(format!("\u{1}{value}").as_bytes())
    }

    /// Microseconds since 2000.
    fn time(&mut self, time: OffsetDateTime) -> &mut Self {
        const EPOCH_UNIX_US: i128 = 946_684_800_000_000;
        let micros = time.unix_timestamp_nanos() / 1_000 - EPOCH_UNIX_US;
        self.i64(i64::try_from(micros).unwrap_or(i64::MAX))
    }

    fn array<const N: usize>(&mut self, type_oid: i32, items: impl ExactSizeIterator<Item = [u8; N]>) -> &mut Self {
        let count = items.len();
        let mut field = Vec::with_capacity(20 + count * (4 + N));
        let word = |value: usize| i32::try_from(value).unwrap_or(i32::MAX).to_be_bytes();
        field.extend(word(usize::from(count > 0))); // dimensions
        field.extend(word(0)); // no nulls
        field.extend(type_oid.to_be_bytes());
        if count > 0 {
            field.extend(word(count));
            field.extend(word(1)); // lower bound
        }
        for item in items {
            field.extend(word(N));
            field.extend(item);
        }
        self.field(&field)
    }
}
