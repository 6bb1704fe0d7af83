//! From the log into the tables. Rows and offsets are written in one transaction; Kafka's group protocol only says who
//! reads which partition, and a fence in the database refuses whoever no longer does. Every record ends as a row, a known
//! duplicate or a dead letter, and its partition moves on.
//!
//! Deliberately blocking and sequential on a thread of its own (poll, decode, write, again): a consumer that does one thing
//! at a time has no state between its partitions to get wrong. More throughput is more processes.

mod consumer;
mod offset;
mod record;
mod references;
mod revoke;
mod rows;
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

pub use offset::{Claim, caught_up_to, claim};
pub(crate) use offset::{other_cluster, register};

/// How often each partition's end is looked up, so that the closer knows how far the tables are.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long one poll waits where there is nothing to read; also how fast a stop is noticed.
const IDLE_POLL: Duration = Duration::from_millis(50);
const RESTART_PAUSE: Duration = Duration::from_secs(1);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);

const SETTINGS: &[(&str, &str)] = &[
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
    pub accept_other_log: bool,
    pub shutdown: CancellationToken,
}

impl Sink {
    /// Reads until the stop. An error means that going on would lose or double events.
    pub async fn run(self) -> anyhow::Result<()> {
        let runtime = Handle::current();
        tokio::task::spawn_blocking(move || self.run_blocking(&runtime))
            .await
            .context("join sink")?
    }

    fn run_blocking(&self, runtime: &Handle) -> anyhow::Result<()> {
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
    fn consume(&self, runtime: &Handle) -> Result<(), Failure> {
        let group = format!("{}.sink", self.kafka.topic_prefix);
        let topics = self.kafka.topics();
        let assigner = Assigner::new(
            runtime.clone(),
            self.pool.clone(),
            self.cluster_id.clone(),
            self.accept_other_log,
        );
        let consumer: BaseConsumer<Assigner> = self
            .kafka
            .config(SETTINGS)
            .set("group.id", &group)
            .create_with_context(assigner)
            .context("create consumer")
            .map_err(Failure::Lost)?;
        consumer
            .subscribe(&[&topics.generation, &topics.feedback])
            .context("subscribe")
            .map_err(Failure::Lost)?;
        let mut progress_at = Instant::now();
        while !self.shutdown.is_cancelled() {
            let records = self.gather(&consumer)?;
            if !records.is_empty() {
                let fences = consumer.context().fences();
                let advanced = runtime.block_on(self.store(&fences, records))?;
                consumer.context().advance(&advanced);
            }
            if progress_at.elapsed() >= PROGRESS_INTERVAL {
                progress_at = Instant::now();
                consumer.context().check_membership()?;
                consumer::observe_progress(&consumer)?;
            }
        }
        Ok(())
    }

    /// Waits for a record, and a little longer for more. What was read under an assignment that changed meanwhile is
    /// forgotten: whoever has the partition now starts from the database's offset.
    fn gather(&self, consumer: &BaseConsumer<Assigner>) -> Result<Vec<Record>, Failure> {
        let assignment = consumer.context().assignment();
        let mut records = Vec::new();
        let mut deadline = Instant::now() + IDLE_POLL;
        while records.len() < self.batch_records_max {
            let left = deadline.saturating_duration_since(Instant::now());
            match consumer.poll(left) {
                Some(Ok(message)) => {
                    if records.is_empty() {
                        deadline = Instant::now() + self.batch_wait;
                    }
                    records.push(Record::read(&message, &self.rules));
                }
                Some(Err(error)) => self.judge(consumer, error)?,
                None => break,
            }
        }
        let context = consumer.context();
        if let Some(failure) = context.take_failure() {
            return Err(failure);
        }
        if context.assignment() != assignment {
            records.clear();
        }
        Ok(records)
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

    /// Writes a batch, waiting out a database that is away. A batch with a row that the database refuses is written one
    /// by one, so that one such record never holds up a partition.
    async fn store(&self, fences: &offset::Fences, records: Vec<Record>) -> Result<offset::Next, Failure> {
        match self.write(fences, &records).await {
            Err(write::Error::Refused(error)) => {
                tracing::warn!(%error, records = records.len(), "a row was refused, writing one by one");
            }
            other => return into_failure(other),
        }
        let mut advanced = offset::Next::new();
        for mut record in records {
            let result = match self.write(fences, std::slice::from_ref(&record)).await {
                Err(write::Error::Refused(error)) => {
                    record.refuse(&error);
                    self.write(fences, std::slice::from_ref(&record)).await
                }
                other => other,
            };
            advanced.extend(into_failure(result)?);
        }
        Ok(advanced)
    }

    async fn write(&self, fences: &offset::Fences, records: &[Record]) -> Result<offset::Next, write::Error> {
        let mut pause = Duration::from_millis(100);
        loop {
            let error = match self.transaction(fences, records).await {
                Err(write::Error::Away(error)) => error,
                other => return other,
            };
            tracing::warn!(error = %format!("{error:#}"), "batch not written, will be tried again");
            tokio::select! {
                () = self.shutdown.cancelled() => return Err(write::Error::Stopped),
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(RETRY_PAUSE_MAX),
            }
        }
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

fn into_failure(result: Result<offset::Next, write::Error>) -> Result<offset::Next, Failure> {
    match result {
        Ok(next) => Ok(next),
        // Nothing was written, and the stop is noticed by the loop.
        Err(write::Error::Stopped) => Ok(offset::Next::new()),
        Err(error) => Err(Failure::Lost(error.into())),
    }
}
