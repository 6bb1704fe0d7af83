//! Batches that the client library cannot read: damaged on a disk, or compressed with a codec that it
//! was built without.
//!
//! A consumer asks for such a batch again for ever, and its error does not say which one it is. So
//! another client, outside the group, reads at the same positions and looks for the batch's end. Only
//! that batch is given up: the first position that the library does not refuse for its sake is next.
#![expect(unsafe_code, reason = "polls for an error with its offset, which rdkafka drops")]

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::time::{Duration, Instant};

use anyhow::Context;
use rdkafka::bindings::{rd_kafka_consumer_poll, rd_kafka_err2str, rd_kafka_message_destroy, rd_kafka_topic_name};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::{Offset, TopicPartitionList};

use super::kafka::{self, ClientOptions};

const SETTINGS: &[(&str, &str)] = &[
    // The client library requires it. Nothing subscribes or commits.
    ("group.id", "springtide.unreadable"),
    ("enable.auto.commit", "false"),
    ("enable.partition.eof", "true"),
    // It looks once, and knows that it will be refused.
    ("fetch.error.backoff.ms", "1"),
    ("fetch.wait.max.ms", "50"),
];
/// How long positions may take to be read. One that takes longer counts as readable: too little is
/// given up then, and the rest at the next error.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_MS: i32 = 100;

/// The topic and partition.
type Slot = (String, i32);

/// The records of one batch that nobody can read with this library.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    pub slot: Slot,
    pub first: i64,
    /// The offset after its last.
    pub next: i64,
    /// What the library says about it.
    pub why: String,
}

/// Whether a consumer's error may be about the bytes of a batch.
pub fn may_be_of_a_batch(error: &KafkaError) -> bool {
    error.rdkafka_error_code().is_some_and(is_of_a_batch)
}

fn is_of_a_batch(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::BadMessage
            | RDKafkaErrorCode::BadCompression
            | RDKafkaErrorCode::NotImplemented
            | RDKafkaErrorCode::UnsupportedFeature
            | RDKafkaErrorCode::MessageSizeTooLarge
    )
}

/// The batches that cannot be read among those at `positions`, from these positions on. Blocks.
pub fn find(
    options: &ClientOptions,
    settings: &[(&str, &str)],
    positions: &BTreeMap<Slot, i64>,
) -> anyhow::Result<Vec<Batch>> {
    let mut config = options.config(&[settings, SETTINGS].concat());
    let reader = Reader(
        config
            .set("group.id", "springtide.unreadable")
            .create()
            .context("create consumer")?,
    );
    let mut batches = Vec::new();
    for (slot, at) in reader.read(positions)? {
        let At::Refused { base, why } = at else { continue };
        let first = base.max(positions[&slot]);
        let next = reader.end(&slot, first, base)?;
        batches.push(Batch { slot, first, next, why });
    }
    Ok(batches)
}

/// What is at a position.
#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    Readable,
    /// A batch that begins at `base`, which may be before the position.
    Refused {
        base: i64,
        why: String,
    },
}

struct Reader(BaseConsumer);

impl Reader {
    /// The offset after the batch that begins at `base` and includes `first`: steps that double, then
    /// halves. `within` is always inside of it.
    fn end(&self, slot: &Slot, first: i64, base: i64) -> anyhow::Result<i64> {
        let (_, end) = kafka::range(self.0.client(), &slot.0, slot.1)?;
        let end = end.max(first + 1);
        let (mut within, mut beyond) = (first, None);
        let mut step = 1_i64;
        loop {
            let next = match beyond {
                Some(beyond) if beyond - within <= 1 => return Ok(beyond),
                Some(beyond) => i64::midpoint(within, beyond),
                None => within.saturating_add(step).min(end),
            };
            step = step.saturating_mul(2);
            let same = |at: &At| matches!(at, At::Refused { base: other, .. } if *other == base);
            if next < end && self.read(&BTreeMap::from([(slot.clone(), next)]))?.values().any(same) {
                within = next;
            } else {
                beyond = Some(next);
            }
        }
    }

    /// What is at each position, but for those that were not read in time. The end of a partition is
    /// readable.
    fn read(&self, positions: &BTreeMap<Slot, i64>) -> anyhow::Result<BTreeMap<Slot, At>> {
        let mut assignment = TopicPartitionList::new();
        for ((topic, partition), offset) in positions {
            assignment.add_partition_offset(topic, *partition, Offset::Offset(*offset))?;
        }
        self.0.assign(&assignment).context("assign")?;
        let mut found = BTreeMap::new();
        let started = Instant::now();
        while found.len() < positions.len() && started.elapsed() < READ_TIMEOUT {
            if let Some((slot, at)) = self.poll()
                && positions.contains_key(&slot)
            {
                // Only what comes first is at the position.
                found.entry(slot).or_insert(at);
            }
        }
        Ok(found)
    }

    fn poll(&self) -> Option<(Slot, At)> {
        // SAFETY: the client lives as long as `self`, and nobody else polls it. A message is valid
        // until it is destroyed, once, below. Its topic and its payload, which is the text of an
        // error, are null or valid with it; texts of the library end with a zero.
        unsafe {
            let message = rd_kafka_consumer_poll(self.0.client().native_ptr(), POLL_MS);
            let read = message.as_ref()?;
            let code = RDKafkaErrorCode::from(read.err);
            let at = match code {
                RDKafkaErrorCode::NoError | RDKafkaErrorCode::PartitionEOF => Some(At::Readable),
                code if is_of_a_batch(code) => {
                    let text = match read.payload.is_null() {
                        true => rd_kafka_err2str(read.err),
                        false => read.payload.cast_const().cast(),
                    };
                    let why = CStr::from_ptr(text).to_string_lossy().into_owned();
                    let base = read.offset;
                    Some(At::Refused { base, why })
                }
                _ => None,
            };
            let found = at.filter(|_| !read.rkt.is_null()).map(|at| {
                let topic = CStr::from_ptr(rd_kafka_topic_name(read.rkt)).to_string_lossy();
                ((topic.into_owned(), read.partition), at)
            });
            rd_kafka_message_destroy(message);
            found
        }
    }
}

#[cfg(test)]
mod tests;
