//! Reads the log into the tables. Rows and offsets are written in one transaction.
//!
//! Kafka's group protocol only assigns partitions. A fence in the database refuses a sink that no
//! longer owns a partition. Every record becomes a row, a known duplicate or a dead letter, so no
//! record can block its partition.
//!
//! One thread reads the records of a round. The writers share them by partition, and each writes
//! one transaction. Meanwhile the thread reads the next round, which starts when all writers have
//! finished. So each partition is written in order, and rounds share no state. Another thread looks
//! up the ends of the partitions.

mod consumer;
mod proof;
mod round;
mod write;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use event_log::event;
use event_log::kafka::ClientOptions;
use event_log::{Position, Producer, unreadable};
use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::judge::Judges;
use crate::reward::stored::Surfaces;
use crate::rows::offset;
use crate::rows::record::Record;
use crate::validator::Validator;
use consumer::{Assigner, Failure, Observer};
pub use proof::Samplers;
use round::Round;

/// How often the ends of the partitions are looked up. The closer waits for this.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long a poll waits if nothing is being written. Also the delay of a stop.
const IDLE_POLL: Duration = Duration::from_millis(50);
/// How long a poll waits while a round is being written. Also the delay of the next round.
const BUSY_POLL: Duration = Duration::from_millis(2);
/// Bytes of the values of a round, plus one value. Decoded events are a small multiple of it.
const ROUND_BYTES_MAX: usize = 16 * 1024 * 1024;
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Springtide's consumer settings. `[kafka.librdkafka]` overrides them. Public for benchmarks.
pub const CONSUMER_SETTINGS: &[(&str, &str)] = &[
    ("enable.auto.commit", "false"),
    // The database has the offsets. A log without these offsets is an error, not a fresh start.
    ("auto.offset.reset", "error"),
    ("session.timeout.ms", "6000"),
    ("heartbeat.interval.ms", "2000"),
    ("partition.assignment.strategy", "range"),
    // Fetched records in memory.
    ("queued.max.messages.kbytes", "32768"),
    // Of one partition at a time. Behind a backlog, a round then has records of several partitions,
    // which the writers can share.
    ("fetch.message.max.bytes", "262144"),
    ("fetch.wait.max.ms", "50"),
    // After a batch with a wrong checksum librdkafka 2.12 looks for the next one at a wrong place.
    // gzip, lz4 and zstd refuse most of what is damaged by themselves.
    ("check.crcs", "false"),
    // How soon added partitions are assigned. Nothing closes before.
    ("topic.metadata.refresh.interval.ms", "2000"),
];

pub struct Sink {
    pub pool: PgPool,
    pub producer: Producer,
    pub kafka: ClientOptions,
    pub cluster_id: String,
    pub surfaces: Arc<Surfaces>,
    pub judges: Judges,
    pub validator: Arc<Validator>,
    pub samplers: Samplers,
    pub batch_records_max: usize,
    pub batch_wait: Duration,
    /// Concurrent transactions.
    pub writers: usize,
    pub accept_other_log: bool,
    pub shutdown: CancellationToken,
}

impl Sink {
    /// Reads until the shutdown. An error means that continuing could lose or duplicate events.
    pub async fn run(self) -> anyhow::Result<()> {
        let runtime = Handle::current();
        let sink = Arc::new(self);
        tokio::task::spawn_blocking(move || sink.run_blocking(&runtime))
            .await
            .context("join sink")?
    }

    fn run_blocking(self: &Arc<Self>, runtime: &Handle) -> anyhow::Result<()> {
        while !self.shutdown.is_cancelled() {
            match self.consume(runtime) {
                Ok(()) => return Ok(()),
                Err(Failure::Lost(error)) => {
                    metrics::counter!("springtide_ingest_sink_restarts_total").increment(1);
                    tracing::warn!(error = %format!("{error:#}"), "sink restarts from the offsets in the database");
                    self.pause(runtime, RESTART_PAUSE);
                }
                Err(Failure::Fatal(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// One membership in the consumer group, until the shutdown or a failure.
    fn consume(self: &Arc<Self>, runtime: &Handle) -> Result<(), Failure> {
        let group = format!("{}.sink", self.kafka.topic_prefix);
        let topics = self.kafka.topics();
        self.read_clock(runtime)
            .context("read the database's clock")
            .map_err(Failure::Lost)?;
        self.validator.check_clock().map_err(Failure::Lost)?;
        consumer::same_cluster(&self.kafka, &self.cluster_id)?;
        let observer = Observer::new(&self.kafka).map_err(Failure::Lost)?;
        let assigner = Assigner::new(self.clone(), runtime.clone());
        let consumer: BaseConsumer<Assigner> = self
            .kafka
            .config(CONSUMER_SETTINGS)
            .set("group.id", &group)
            .create_with_context(assigner)
            .context("create consumer")
            .map_err(Failure::Lost)?;
        consumer
            .subscribe(&[&topics.generation, &topics.feedback])
            .context("subscribe")
            .map_err(Failure::Lost)?;
        let stop = self.shutdown.child_token();
        thread::scope(|threads| {
            let (context, stopped) = (consumer.context().clone(), stop.clone());
            threads.spawn(move || observer.run(&context, &stopped));
            let _stop = stop.drop_guard();
            self.read(runtime, &consumer)
        })
    }

    /// Reads and writes rounds until the shutdown or a failure.
    fn read(self: &Arc<Self>, runtime: &Handle, consumer: &BaseConsumer<Assigner>) -> Result<(), Failure> {
        let context = consumer.context();
        let mut round = Round::none(runtime);
        while !self.shutdown.is_cancelled() {
            let records = self.gather(consumer, &round)?;
            // Without new records, the round may continue.
            if records.is_empty() && round.is_running() {
                continue;
            }
            context.advance(&round.end()?);
            context.check_membership()?;
            // Between two rounds, because their transactions lock the rows that this updates.
            consumer::store_progress(consumer)?;
            if !records.is_empty() {
                round = Round::begin(self, runtime, &context.claims(), records);
            }
        }
        round.end().map(drop)
    }

    /// Reads the records of a round. Waits for a first record and shortly for more, or until the
    /// previous round ends.
    ///
    /// A rebalance happens inside a poll. It discards the records before it, because the new owners
    /// start from the offsets in the database.
    fn gather(&self, consumer: &BaseConsumer<Assigner>, before: &Round) -> Result<Vec<Record>, Failure> {
        let context = consumer.context();
        let mut assignment = context.assignment();
        let mut discard_if_rebalanced = |records: &mut Vec<Record>| {
            if context.assignment() != assignment {
                assignment = context.assignment();
                records.clear();
            }
        };
        let mut records: Vec<Record> = Vec::new();
        let mut bytes = 0;
        let mut deadline = Instant::now() + IDLE_POLL;
        while records.len() < self.batch_records_max && bytes < ROUND_BYTES_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            let busy = before.is_running() && !self.shutdown.is_cancelled();
            let polled = consumer.poll(if busy { BUSY_POLL } else { left });
            discard_if_rebalanced(&mut records);
            match polled {
                Some(Ok(message)) => {
                    let Some((follows, written_after)) = context.note_read(&message) else {
                        continue;
                    };
                    if records.is_empty() {
                        deadline = Instant::now() + self.batch_wait;
                    }
                    bytes += message.payload_len();
                    let record = Record::read(&message, follows, &self.validator);
                    self.validator.clock.check(
                        record.times(&message, written_after),
                        message.topic(),
                        message.partition(),
                    );
                    records.push(record);
                }
                Some(Err(error)) => {
                    let of_a_batch = unreadable::may_be_of_a_batch(&error);
                    self.handle_error(consumer, error)?;
                    if of_a_batch {
                        records.extend(self.skip_unreadable(consumer)?);
                    }
                }
                None if busy => {}
                None => break,
            }
        }
        match context.take_failure() {
            Some(failure) => Err(failure),
            None => Ok(records),
        }
    }

    /// Moves on behind batches that the client cannot read. Returns their records, which become dead
    /// letters. A batch that is longer than a round is skipped in parts.
    fn skip_unreadable(&self, consumer: &BaseConsumer<Assigner>) -> Result<Vec<Record>, Failure> {
        let context = consumer.context();
        let positions = context.positions();
        let batches = match unreadable::find(&self.kafka, CONSUMER_SETTINGS, &positions) {
            Ok(batches) => batches,
            Err(error) => {
                tracing::warn!(error = %format!("{error:#}"), "cannot find what cannot be read, will retry");
                return Ok(Vec::new());
            }
        };
        let mut records = Vec::new();
        for batch in batches {
            let most = i64::try_from(self.batch_records_max).unwrap_or(i64::MAX);
            let next = batch.next.min(batch.first.saturating_add(most));
            context.skip_to(consumer, &batch.slot, next).map_err(Failure::Lost)?;
            let (topic, partition) = batch.slot.clone();
            tracing::error!(
                topic,
                partition,
                from = batch.first,
                until = next,
                why = batch.why,
                "records cannot be read"
            );
            // Markers of transactions may be before the batch.
            let mut follows = positions[&batch.slot];
            for offset in batch.first..next {
                let topic = topic.clone();
                let from = Position {
                    topic,
                    partition,
                    offset,
                };
                records.push(Record::unreadable(from, follows, &batch.why));
                follows = offset + 1;
            }
        }
        Ok(records)
    }

    /// The client handles most errors itself.
    fn handle_error(&self, consumer: &BaseConsumer<Assigner>, error: KafkaError) -> Result<(), Failure> {
        if let Some(failure) = consumer.context().take_failure() {
            return Err(failure);
        }
        let is_fatal = matches!(
            error.rdkafka_error_code(),
            Some(
                RDKafkaErrorCode::AutoOffsetReset
                    | RDKafkaErrorCode::Fatal
                    | RDKafkaErrorCode::UnknownPartition
                    | RDKafkaErrorCode::UnknownTopicOrPartition
            )
        );
        if is_fatal || consumer.client().fatal_error().is_some() {
            return Err(Failure::Lost(anyhow::Error::new(error).context("consume")));
        }
        tracing::warn!(%error, "cannot read the log, will retry");
        Ok(())
    }

    /// The database's time. Compares it with this host's. Blocks.
    fn read_clock(&self, runtime: &Handle) -> sqlx::Result<OffsetDateTime> {
        let asked_at = event::now();
        let now = runtime.block_on(offset::now(&self.pool))?;
        self.validator.clock.observe(now, asked_at, event::now());
        Ok(now)
    }

    fn pause(&self, runtime: &Handle, pause: Duration) {
        runtime.block_on(async {
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        });
    }
}
