//! Receives announcements from the end of the topic, without a consumer group. Announcements are
//! hints, so receivers must also poll from time to time.

use std::time::Duration;

use anyhow::Context;
use futures::stream::{self, BoxStream, StreamExt};
use prost::Message as _;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::error::KafkaResult;
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};

use super::kafka::{self, ClientOptions};
use super::{Announcement, unreadable};

const SETTINGS: &[(&str, &str)] = &[
    // The client library requires it. Offsets are never committed.
    ("group.id", "springtide.announcements"),
    ("enable.auto.commit", "false"),
    ("auto.offset.reset", "latest"),
];
/// Pause after a broker error, to avoid a busy loop.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Announcements. Never ends: errors are logged and retried.
pub type Announcements = BoxStream<'static, Announcement>;

/// Subscribes to all announcements that are sent after this returns.
pub async fn subscribe(options: &ClientOptions) -> anyhow::Result<Announcements> {
    let consumer: StreamConsumer = options
        .config(SETTINGS)
        .create()
        .context("create announcement consumer")?;
    let topic = options.topics().version;
    let consumer = tokio::task::spawn_blocking(move || -> anyhow::Result<_> {
        assign_end(&consumer, &topic)?;
        Ok(consumer)
    });
    let consumer = consumer.await.context("join")??;
    let announcements = stream::unfold(consumer, |consumer| async {
        let announcement = next(&consumer).await;
        Some((announcement, consumer))
    });
    Ok(announcements.boxed())
}

/// Looks up the end before it returns. The client would do so later and could miss announcements.
fn assign_end(consumer: &StreamConsumer, topic: &str) -> anyhow::Result<()> {
    let mut assignment = TopicPartitionList::new();
    for (partition, (_, end)) in kafka::partitions(consumer.client(), topic)? {
        assignment.add_partition_offset(topic, partition, Offset::Offset(end))?;
    }
    consumer.assign(&assignment).context("assign")
}

/// What is left out are only hints.
fn skip_to_end(consumer: &StreamConsumer) -> KafkaResult<()> {
    let mut assignment = consumer.assignment()?;
    assignment.set_all_offsets(Offset::End)?;
    consumer.assign(&assignment)
}

async fn next(consumer: &StreamConsumer) -> Announcement {
    loop {
        match consumer.recv().await {
            Ok(message) => match Announcement::decode(message.payload().unwrap_or_default()) {
                Ok(announcement) => return announcement,
                Err(error) => tracing::warn!(%error, "announcement ignored"),
            },
            Err(error) => {
                tracing::warn!(%error, "cannot read announcements, will retry");
                if unreadable::may_be_of_a_batch(&error)
                    && let Err(error) = skip_to_end(consumer)
                {
                    tracing::warn!(%error, "cannot skip announcements that cannot be read");
                }
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}
