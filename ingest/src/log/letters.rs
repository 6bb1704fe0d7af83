//! Reading the dead letters as people do: from the topic's beginning to its end as it was when the reading began, with a
//! consumer of its own, no group and no memory. Holds one record at a time.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rdkafka::consumer::{Consumer, ConsumerContext, StreamConsumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::{ClientContext, Offset, TopicPartitionList};

use super::letter::{Entry, Letter, Place, Replayed};
use crate::kafka::{self, ClientOptions};

const SETTINGS: &[(&str, &str)] = &[
    // Required by the client library; nothing is ever committed under it.
    ("group.id", "springtide.letters"),
    ("enable.auto.commit", "false"),
    // Retention may remove the beginning while it is read.
    ("auto.offset.reset", "earliest"),
    ("enable.partition.eof", "true"),
    // A person may think for long between two looks.
    ("max.poll.interval.ms", "86400000"),
];
const METADATA_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the log may be silent before reading gives up.
const SILENCE_MAX: Duration = Duration::from_secs(15);

/// The topic of dead letters, as long as it was when it was opened.
pub struct Letters {
    consumer: StreamConsumer<Quiet>,
    brokers: String,
    topic: String,
    /// By partition: its first offset, and the one after its last.
    ranges: BTreeMap<i32, (i64, i64)>,
}

/// The end of a partition is no error here.
struct Quiet;

impl ClientContext for Quiet {
    fn error(&self, error: KafkaError, reason: &str) {
        if error.rdkafka_error_code() != Some(RDKafkaErrorCode::PartitionEOF) {
            tracing::warn!(%error, reason, "the dead letters cannot be read right now");
        }
    }
}

impl ConsumerContext for Quiet {}

impl Letters {
    pub async fn open(options: &ClientOptions) -> anyhow::Result<Self> {
        let consumer: StreamConsumer<Quiet> = options
            .config(SETTINGS)
            .create_with_context(Quiet)
            .context("create consumer")?;
        let (topic, brokers) = (options.topics().dlq, options.brokers.clone());
        let read = move || -> anyhow::Result<_> {
            let mut ranges = BTreeMap::new();
            for (partition, first) in kafka::partitions(consumer.client(), &topic)? {
                let (_, end) = consumer
                    .fetch_watermarks(&topic, partition, METADATA_TIMEOUT)
                    .with_context(|| format!("look up the end of {topic}/{partition}"))?;
                ranges.insert(partition, (first, end));
            }
            Ok(Self {
                consumer,
                brokers,
                topic,
                ranges,
            })
        };
        let opened = tokio::task::spawn_blocking(read).await.context("join")?;
        opened.with_context(|| {
            format!(
                "the dead letters cannot be read at {}: is the broker up, and is kafka.topic_prefix = {:?} right?",
                options.brokers, options.topic_prefix
            )
        })
    }

    /// Its name.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.values().all(|(first, end)| first >= end)
    }

    /// Everything on the topic, each partition in order. One scan at a time.
    pub fn scan(&self) -> anyhow::Result<Scan<'_>> {
        self.read(&self.ranges)
    }

    /// The notes about replays, by letter; of several about one, the last.
    pub async fn replayed(&self) -> anyhow::Result<HashMap<Place, Replayed>> {
        let mut notes = HashMap::new();
        let mut scan = self.scan()?;
        while let Some(entry) = scan.next().await? {
            if let Entry::Replayed(note) = entry {
                notes.insert(note.letter, note);
            }
        }
        Ok(notes)
    }

    /// One letter.
    pub async fn letter(&self, place: Place) -> anyhow::Result<Letter> {
        self.check(place)?;
        let only = BTreeMap::from([(place.partition, (place.offset, place.offset + 1))]);
        match self.read(&only)?.next().await? {
            Some(Entry::Letter(letter)) if letter.place == place => Ok(letter),
            Some(Entry::Replayed(note)) => bail!(
                "{place} is no letter but the note that the letter {} was replayed",
                note.letter
            ),
            _ => bail!("the letter {place} is gone: retention has removed it"),
        }
    }

    /// Refuses a place where no letter can lie.
    pub fn check(&self, place: Place) -> anyhow::Result<()> {
        ensure!(!self.is_empty(), "{} holds no letters", self.topic);
        let range = self.ranges.get(&place.partition);
        let (first, end) = range.with_context(|| {
            format!(
                "{} has no partition {}: `springtide dlq list` prints the letters that there are",
                self.topic, place.partition
            )
        })?;
        ensure!(
            (*first..*end).contains(&place.offset),
            "there is no letter {place}: {} has offsets {first} to {} there",
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
        Ok(Scan { letters: self, ends })
    }
}

/// One reading.
pub struct Scan<'a> {
    letters: &'a Letters,
    /// Of the partitions that are not read to their end yet.
    ends: BTreeMap<i32, i64>,
}

impl Scan<'_> {
    /// `None` at the end.
    pub async fn next(&mut self) -> anyhow::Result<Option<Entry>> {
        while !self.ends.is_empty() {
            let received = tokio::time::timeout(SILENCE_MAX, self.letters.consumer.recv()).await;
            let received = received.with_context(|| {
                format!(
                    "the log has been silent for {} s: is the broker at {} up?",
                    SILENCE_MAX.as_secs(),
                    self.letters.brokers
                )
            })?;
            let message = match received {
                Ok(message) => message,
                Err(KafkaError::PartitionEOF(partition)) => {
                    self.ends.remove(&partition);
                    continue;
                }
                Err(error) => {
                    // News about brokers that the client goes on dealing with; if it cannot, the silence ends this.
                    tracing::warn!(%error, "the dead letters cannot be read right now");
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
                return Ok(Some(Entry::read(&message)));
            }
        }
        Ok(None)
    }
}
