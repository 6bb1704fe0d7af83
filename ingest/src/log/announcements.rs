//! Receives announcements from the end of the topic, without a consumer group. Announcements are hints, so
//! receivers must also poll from time to time.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::Context;
use futures::{Stream, stream};
use prost::Message as _;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};

use super::Announcement;
use super::kafka::{self, ClientOptions};

const SETTINGS: &[(&str, &str)] = &[
    // The client library requires it. Offsets are never committed.
    ("group.id", "springtide.announcements"),
    ("enable.auto.commit", "false"),
    ("auto.offset.reset", "latest"),
];
const METADATA_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a broker error, to avoid a busy loop.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// All announcements after [`Announcements::subscribe`] returned. Never ends: errors are logged and retried.
pub struct Announcements(Pin<Box<dyn Stream<Item = Announcement> + Send>>);

impl Announcements {
    pub async fn subscribe(options: &ClientOptions) -> anyhow::Result<Self> {
        let consumer: StreamConsumer = options
            .config(SETTINGS)
            .create()
            .context("create announcement consumer")?;
        let topic = options.topics().version;
        let consumer = tokio::task::spawn_blocking(move || -> anyhow::Result<_> {
            assign_end(&consumer, &topic)?;
            Ok(consumer)
        })
        .await
        .context("join")??;
        let stream = stream::unfold(consumer, |consumer| async {
            let announcement = next(&consumer).await;
            Some((announcement, consumer))
        });
        Ok(Self(Box::pin(stream)))
    }
}

impl Stream for Announcements {
    type Item = Announcement;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Option<Announcement>> {
        self.0.as_mut().poll_next(context)
    }
}

/// Looks up the end before it returns. The client would do so later and could miss announcements.
fn assign_end(consumer: &StreamConsumer, topic: &str) -> anyhow::Result<()> {
    let mut assignment = TopicPartitionList::new();
    for partition in kafka::partitions(consumer.client(), topic)?.into_keys() {
        let (_, end) = consumer
            .fetch_watermarks(topic, partition, METADATA_TIMEOUT)
            .with_context(|| format!("look up the end of {topic}/{partition}"))?;
        assignment.add_partition_offset(topic, partition, Offset::Offset(end))?;
    }
    consumer.assign(&assignment).context("assign")
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
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}
