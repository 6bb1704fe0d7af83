//! Reads the dead-letter queue from its start, or only its newest records, to the end that it had when
//! it was opened.
//!
//! Uses a consumer without a group. Keeps one record in memory.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rdkafka::consumer::{Consumer, ConsumerContext, StreamConsumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::{ClientContext, Offset, TopicPartitionList};

use super::record::{DlqEntry, DlqPosition, DlqRecord, ReplayNote};
use crate::kafka::{self, ClientOptions};

const SETTINGS: &[(&str, &str)] = &[
    // The client library requires it. Offsets are never committed.
    ("group.id", "springtide.letters"),
    ("enable.auto.commit", "false"),
    // Retention may remove the start of the topic during a scan.
    ("auto.offset.reset", "earliest"),
    ("enable.partition.eof", "true"),
    // An interactive command may wait for its user.
    ("max.poll.interval.ms", "86400000"),
];
/// Reading fails if no record arrives for this long.
const WAIT_MAX: Duration = Duration::from_secs(15);

/// The dead-letter queue, up to the end that it had when it was opened.
pub struct DlqReader {
    consumer: StreamConsumer<IgnoreEof>,
    brokers: String,
    topic: String,
    /// By partition: its first offset, and the one after its last.
    ranges: BTreeMap<i32, (i64, i64)>,
    /// Whether older records are left out.
    truncated: bool,
}

/// Does not log the end of a partition as an error.
struct IgnoreEof;

impl ClientContext for IgnoreEof {
    fn error(&self, error: KafkaError, reason: &str) {
        if error.rdkafka_error_code() != Some(RDKafkaErrorCode::PartitionEOF) {
            tracing::warn!(%error, reason, "cannot read the dead-letter queue, will retry");
        }
    }
}

impl ConsumerContext for IgnoreEof {}

impl DlqReader {
    pub async fn open(options: &ClientOptions) -> anyhow::Result<Self> {
        let consumer: StreamConsumer<IgnoreEof> = options
            .config(SETTINGS)
            .create_with_context(IgnoreEof)
            .context("create consumer")?;
        let (topic, brokers) = (options.topics().dlq, options.brokers.clone());
        let read = move || -> anyhow::Result<_> {
            Ok(Self {
                ranges: kafka::partitions(consumer.client(), &topic)?,
                consumer,
                brokers,
                topic,
                truncated: false,
            })
        };
        let opened = tokio::task::spawn_blocking(read).await.context("join")?;
        opened.with_context(|| {
            format!(
                "cannot read the dead-letter queue at {}: is the broker up, and is kafka.topic_prefix = {:?} right?",
                options.brokers, options.topic_prefix
            )
        })
    }

    /// Like [`Self::open`], but only the newest records of each partition, at most `records_max`. Notes
    /// count as records.
    pub async fn open_newest(options: &ClientOptions, records_max: u32) -> anyhow::Result<Self> {
        let mut reader = Self::open(options).await?;
        reader.truncated = narrow(&mut reader.ranges, records_max);
        Ok(reader)
    }

    /// Whether the queue has older records, which [`Self::open_newest`] left out.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// The topic's name.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.values().all(|(first, end)| first >= end)
    }

    /// All records of the topic, each partition in order. Only one scan at a time.
    pub fn scan(&self) -> anyhow::Result<Scan<'_>> {
        self.read(&self.ranges)
    }

    /// The last note about each replayed record.
    pub async fn replayed(&self) -> anyhow::Result<HashMap<DlqPosition, ReplayNote>> {
        let mut notes = HashMap::new();
        let mut scan = self.scan()?;
        while let Some(entry) = scan.next().await? {
            if let DlqEntry::Replayed(note) = entry {
                notes.insert(note.record, note);
            }
        }
        Ok(notes)
    }

    /// The record at a position.
    pub async fn record(&self, position: DlqPosition) -> anyhow::Result<DlqRecord> {
        self.check(position)?;
        let only = BTreeMap::from([(position.partition, (position.offset, position.offset + 1))]);
        match self.read(&only)?.next().await? {
            Some(DlqEntry::Record(record)) if record.position == position => Ok(record),
            Some(DlqEntry::Replayed(note)) => bail!(
                "{position} is not a dead letter but the note that {} was replayed",
                note.record
            ),
            _ => bail!("{position} no longer exists: retention has removed it"),
        }
    }

    /// Refuses a position that does not exist.
    pub fn check(&self, position: DlqPosition) -> anyhow::Result<()> {
        ensure!(!self.is_empty(), "{} holds no records", self.topic);
        let range = self.ranges.get(&position.partition);
        let (first, end) = range.with_context(|| {
            format!(
                "{} has no partition {}: `springtide dlq list` prints the existing records",
                self.topic, position.partition
            )
        })?;
        ensure!(
            !self.truncated || position.offset >= *first,
            "{position} is not among the newest records, which alone are read here: `springtide dlq` reads all"
        );
        ensure!(
            (*first..*end).contains(&position.offset),
            "there is no record {position}: {} has offsets {first} to {} in that partition",
            self.topic,
            end - 1
        );
        Ok(())
    }

    fn read(&self, ranges: &BTreeMap<i32, (i64, i64)>) -> anyhow::Result<Scan<'_>> {
        let ends: BTreeMap<i32, i64> = ranges
            .iter()
            .filter(|(_, (first, end))| first < end)
            .map(|(partition, (_, end))| (*partition, *end))
            .collect();
        let mut assignment = TopicPartitionList::new();
        for partition in ends.keys() {
            let (first, _) = ranges[partition];
            assignment.add_partition_offset(&self.topic, *partition, Offset::Offset(first))?;
        }
        self.consumer.assign(&assignment).context("assign")?;
        Ok(Scan { reader: self, ends })
    }
}

/// Keeps the last `records_max` offsets of each partition. Returns whether others were left out.
fn narrow(ranges: &mut BTreeMap<i32, (i64, i64)>, records_max: u32) -> bool {
    let mut narrowed = false;
    for (first, end) in ranges.values_mut() {
        let newest = end.saturating_sub(i64::from(records_max));
        if *first < newest {
            *first = newest;
            narrowed = true;
        }
    }
    narrowed
}

/// One pass over the topic.
pub struct Scan<'a> {
    reader: &'a DlqReader,
    /// The ends of the partitions that are not finished.
    ends: BTreeMap<i32, i64>,
}

impl Scan<'_> {
    /// `None` at the end.
    pub async fn next(&mut self) -> anyhow::Result<Option<DlqEntry>> {
        while !self.ends.is_empty() {
            let received = tokio::time::timeout(WAIT_MAX, self.reader.consumer.recv()).await;
            let received = received.with_context(|| {
                format!(
                    "no record arrived for {} s: is the broker at {} up?",
                    WAIT_MAX.as_secs(),
                    self.reader.brokers
                )
            })?;
            let message = match received {
                Ok(message) => message,
                Err(KafkaError::PartitionEOF(partition)) => {
                    self.ends.remove(&partition);
                    continue;
                }
                Err(error) => {
                    // The client handles broker errors. If it cannot, the timeout ends the scan.
                    tracing::warn!(%error, "cannot read the dead-letter queue, will retry");
                    continue;
                }
            };
            let partition = message.partition();
            let Some(end) = self.ends.get(&partition).copied() else {
                continue;
            };
            if message.offset() + 1 >= end {
                self.ends.remove(&partition);
            }
            if message.offset() < end {
                return Ok(Some(DlqEntry::read(&message)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_newest_records_of_each_partition_are_kept() {
        let all = BTreeMap::from([(0, (0, 7)), (1, (90, 100)), (2, (5, 5))]);
        let mut ranges = all.clone();
        assert!(!narrow(&mut ranges, 10));
        assert_eq!(ranges, all);
        assert!(narrow(&mut ranges, 3));
        assert_eq!(ranges, BTreeMap::from([(0, (4, 7)), (1, (97, 100)), (2, (5, 5))]));
    }
}
