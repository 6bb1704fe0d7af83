//! From the log into the tables. Rows and offsets are written in one transaction; Kafka's group protocol only says who
//! reads which partition, and a fence in the database refuses whoever no longer does. Every record ends as a row, a known
//! duplicate or a dead letter, and its partition moves on.
//!
//! One thread reads. What it has read is one round: shared out among the writers by partition, each writer one transaction;
//! while a round is written the next one is read, and it begins when all of the one before has ended. So the records of a
//! partition are written in their order, and there is no state between rounds to get wrong.

mod consumer;
mod offset;
mod record;
mod references;
mod revoke;
mod round;
mod rows;
mod settle;
mod write;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use sqlx::PgPool;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::kafka::ClientOptions;
use crate::log::Producer;
use crate::reward::stored::Surfaces;
use crate::rules::Rules;
use consumer::{Assigner, Failure};
use record::Record;
use round::Round;

pub use offset::{Claim, caught_up_to, claim, last_caught_up_to};
pub(crate) use offset::{other_cluster, register};

/// How often each partition's end is looked up, so that the closer knows how far the tables are.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long one poll waits where there is nothing to read; also how fast a stop is noticed.
const IDLE_POLL: Duration = Duration::from_millis(50);
/// How long one poll waits while a round is being written; also how soon its end is noticed.
const BUSY_POLL: Duration = Duration::from_millis(2);
/// Values of one round, or one more; what they are decoded to is a small multiple.
const ROUND_BYTES_MAX: usize = 16 * 1024 * 1024;
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Springtide's settings of the consumer, for whoever wants to compare with it; `[kafka.librdkafka]` wins over them.
pub const CONSUMER_SETTINGS: &[(&str, &str)] = &[
    ("enable.auto.commit", "false"),
    // The database says where to go on; a log that does not reach there is an error and not a fresh start.
    ("auto.offset.reset", "error"),
    ("session.timeout.ms", "6000"),
    ("heartbeat.interval.ms", "2000"),
    ("partition.assignment.strategy", "range"),
    // What may lie fetched in memory.
    ("queued.max.messages.kbytes", "32768"),
    ("fetch.wait.max.ms", "50"),
];

/// Everything the sink needs.
pub struct Sink {
    pub pool: PgPool,
    pub producer: Producer,
    pub kafka: ClientOptions,
    pub cluster_id: String,
    pub surfaces: Arc<Surfaces>,
    pub rules: Arc<Rules>,
    pub batch_records_max: usize,
    pub batch_wait: Duration,
    /// Transactions at once.
    pub writers: usize,
    pub accept_other_log: bool,
    pub shutdown: CancellationToken,
}

impl Sink {
    /// Reads until the stop. An error means that going on would lose or double events.
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
                    tracing::warn!(error = %format!("{error:#}"), "sink starts over from the database's offsets");
                    self.pause(runtime, RESTART_PAUSE);
                }
                Err(Failure::Fatal(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// One membership of the consumer group, until the stop or until something is lost.
    fn consume(self: &Arc<Self>, runtime: &Handle) -> Result<(), Failure> {
        let group = format!("{}.sink", self.kafka.topic_prefix);
        let topics = self.kafka.topics();
        consumer::same_cluster(&self.kafka, &self.cluster_id)?;
        let assigner = Assigner::new(
            runtime.clone(),
            self.pool.clone(),
            self.kafka.clone(),
            self.cluster_id.clone(),
            self.accept_other_log,
        );
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
        let mut progress_at = Instant::now();
        let mut round = Round::none(runtime);
        while !self.shutdown.is_cancelled() {
            let records = self.gather(&consumer, &round)?;
            // Without records: only if it has ended by itself.
            if !records.is_empty() || !round.is_running() {
                consumer.context().advance(&round.end()?);
            }
            if !records.is_empty() {
                round = Round::begin(self, runtime, &consumer.context().claims(), records);
            }
            if progress_at.elapsed() >= PROGRESS_INTERVAL {
                progress_at = Instant::now();
                consumer.context().check_membership()?;
                consumer::observe_progress(&consumer)?;
            }
        }
        round.end().map(drop)
    }

    /// Waits for a record, and a little longer for more; longer still while the round before is being written. A rebalance takes
    /// place inside of a poll: what was read before it is forgotten, because whoever has the partition now starts from the
    /// database's offset; what is read after it counts.
    fn gather(&self, consumer: &BaseConsumer<Assigner>, before: &Round) -> Result<Vec<Record>, Failure> {
        let context = consumer.context();
        let mut assignment = context.assignment();
        let mut forget_if_rebalanced = |records: &mut Vec<Record>| {
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
            forget_if_rebalanced(&mut records);
            match polled {
                Some(Ok(message)) => {
                    let Some(follows) = context.note_read(&message) else {
                        continue;
                    };
                    if records.is_empty() {
                        deadline = Instant::now() + self.batch_wait;
                    }
                    bytes += message.payload_len();
                    records.push(Record::read(&message, follows, &self.rules));
                }
                Some(Err(error)) => self.judge(consumer, error)?,
                None if busy => {}
                None => break,
            }
        }
        match context.take_failure() {
            Some(failure) => Err(failure),
            None => Ok(records),
        }
    }

    /// Most errors of the client are news about brokers that it goes on dealing with itself.
    fn judge(&self, consumer: &BaseConsumer<Assigner>, error: KafkaError) -> Result<(), Failure> {
        if let Some(failure) = consumer.context().take_failure() {
            return Err(failure);
        }
        let over = matches!(
            error.rdkafka_error_code(),
            Some(
                RDKafkaErrorCode::AutoOffsetReset
                    | RDKafkaErrorCode::Fatal
                    | RDKafkaErrorCode::UnknownPartition
                    | RDKafkaErrorCode::UnknownTopicOrPartition
            )
        );
        if over || consumer.client().fatal_error().is_some() {
            return Err(Failure::Lost(anyhow::Error::new(error).context("consume")));
        }
        tracing::warn!(%error, "the log cannot be read right now");
        Ok(())
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
