//! The connection to the broker: which cluster, which topics, and how topics are created.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::{Client, ClientContext, DefaultClientContext};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Headers, Message};
use rdkafka::{Offset, TopicPartitionList};
use serde::{Deserialize, Serialize};

use super::producer::RECORD_BYTES_MAX;
use crate::event::{Body, Event};

const TOPICS_TIMEOUT: Duration = Duration::from_secs(30);
const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);
const METADATA_TIMEOUT: Duration = Duration::from_secs(5);
const CLUSTER_TIMEOUT: Duration = Duration::from_secs(15);
const TOPICS_POLL: Duration = Duration::from_millis(50);
const CLEANUP_POLICY: &str = "cleanup.policy";
const RETENTION_MS: &str = "retention.ms";
const RETENTION_BYTES: &str = "retention.bytes";
/// Beyond this the oldest dead letters are removed, bytes. Who sends broken events cannot fill the disk
/// on which the broker keeps the others.
const DEAD_LETTERS_BYTES_MAX: u64 = 16 << 30;
/// What a batch adds to its only record, at most.
const BATCH_BYTES_MAX: usize = 1024;

/// The cluster and its topics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClientOptions {
    /// `host:port`, comma-separated. Default: 127.0.0.1:9092.
    pub brokers: String,
    /// Prefix of the names of topics and consumer groups. Default: springtide.
    pub topic_prefix: String,
    /// Retention of topics that Springtide creates, hours. Default: 168.
    pub log_retention_hours: u32,
    /// Maximum size of each of their partitions, bytes; 0: no limit. Default: 0.
    pub log_bytes_max: u64,
    /// Retention of the dead-letter queue, days. Default: 90.
    pub dead_letter_retention_days: u32,
    /// Any librdkafka setting. Overrides Springtide's own. Default: none.
    pub librdkafka: BTreeMap<String, String>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            brokers: "127.0.0.1:9092".to_owned(),
            topic_prefix: "springtide".to_owned(),
            log_retention_hours: 168,
            log_bytes_max: 0,
            dead_letter_retention_days: 90,
            librdkafka: BTreeMap::new(),
        }
    }
}

/// The names of the topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topics {
    pub generation: String,
    pub feedback: String,
    pub version: String,
    pub dlq: String,
}

impl Topics {
    /// The topic of this event.
    pub fn of(&self, event: &Event) -> &str {
        match event.body {
            Body::Generation(_) => &self.generation,
            Body::Feedback(_) | Body::Retraction(_) | Body::EpisodeEnd(_) => &self.feedback,
        }
    }
}

impl ClientOptions {
    pub fn topics(&self) -> Topics {
        let name = |topic: &str| format!("{}.{topic}.v1", self.topic_prefix);
        Topics {
            generation: name("generation"),
            feedback: name("feedback"),
            version: name("version"),
            dlq: name("dlq"),
        }
    }

    /// The configuration of a client with Springtide's settings. The operator's settings override
    /// them.
    pub fn config(&self, settings: &[(&str, &str)]) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.brokers);
        config.set("client.id", "springtide");
        for (key, value) in settings {
            config.set(*key, *value);
        }
        for (key, value) in &self.librdkafka {
            config.set(key, value);
        }
        config
    }
}

/// The settings of a topic.
#[derive(Debug, Clone, Copy)]
struct Settings {
    retention_ms: u64,
    /// Per partition; 0: no limit.
    retention_bytes: u64,
    /// Largest record. Absent: the broker's default.
    record_bytes_max: Option<usize>,
}

impl Settings {
    fn properties(self) -> Vec<(&'static str, String)> {
        let bytes = match self.retention_bytes {
            0 => "-1".to_owned(),
            bytes => bytes.to_string(),
        };
        let mut properties = vec![
            // A compacted topic would keep one record of an episode, because they have the same key.
            (CLEANUP_POLICY, "delete".to_owned()),
            (RETENTION_MS, self.retention_ms.to_string()),
            (RETENTION_BYTES, bytes),
        ];
        if let Some(bytes) = self.record_bytes_max {
            properties.push(("max.message.bytes", bytes.to_string()));
        }
        properties
    }

    /// Refuses a topic that was made otherwise and could remove records that the tables do not have.
    /// `property` is what the topic has. It may keep more than is wanted.
    fn check(self, topic: &str, property: impl Fn(&str) -> Option<String>) -> anyhow::Result<()> {
        let change = |name: &str, value: &str| {
            format!("set it with `kafka-configs --alter --topic {topic} --add-config {name}={value}`")
        };
        if let Some(policy) = property(CLEANUP_POLICY) {
            ensure!(
                policy == "delete",
                "the topic {topic} has {CLEANUP_POLICY}={policy}, which removes records with the same key: {}, or give \
                 another kafka.topic_prefix",
                change(CLEANUP_POLICY, "delete")
            );
        }
        for (name, wanted) in self.properties() {
            let is_limit = name == RETENTION_MS || name == RETENTION_BYTES;
            let Some(found) = property(name).filter(|_| is_limit) else {
                continue;
            };
            // Below 0: no limit.
            let limit = |text: &str| text.parse().ok().filter(|limit: &i64| *limit >= 0).unwrap_or(i64::MAX);
            ensure!(
                limit(&found) >= limit(&wanted),
                "the topic {topic} has {name}={found} and so keeps less than `[kafka]` asks for ({wanted}): {}, or \
                 change the setting",
                change(name, &wanted)
            );
        }
        Ok(())
    }
}

/// Creates missing topics with the broker's default replication and waits until all topics are
/// readable.
///
/// Event topics get `partitions` partitions, the others one. Existing topics are not changed, and
/// refused if they could remove what is not read yet. Waits for a cluster that is starting or
/// changing its controller.
pub async fn ensure_topics(options: &ClientOptions, partitions: i32) -> anyhow::Result<()> {
    let admin: AdminClient<DefaultClientContext> = options.config(&[]).create().context("create admin client")?;
    let admin = Arc::new(admin);
    let names = options.topics();
    let hours = |hours: u32| u64::from(hours) * 3_600_000;
    let events = Settings {
        retention_ms: hours(options.log_retention_hours),
        retention_bytes: options.log_bytes_max,
        record_bytes_max: None,
    };
    let dead_letters = Settings {
        retention_ms: hours(options.dead_letter_retention_days.saturating_mul(24)),
        retention_bytes: DEAD_LETTERS_BYTES_MAX,
        // A dead letter is longer than the record that it is about.
        record_bytes_max: Some(RECORD_BYTES_MAX + BATCH_BYTES_MAX),
    };
    let wanted = vec![
        (names.generation, partitions, events),
        (names.feedback, partitions, events),
        // Announcements are only hints.
        (names.version, 1, events),
        (names.dlq, 1, dead_letters),
    ];
    let started = Instant::now();
    loop {
        match create_missing(&admin, &wanted).await {
            Ok(()) => return check_existing(&admin, &wanted).await,
            Err(error) if started.elapsed() >= TOPICS_TIMEOUT => {
                return Err(error.context(format!("create topics at {}", options.brokers)));
            }
            Err(error) => tracing::debug!(error = %format!("{error:#}"), "topics not ready yet"),
        }
        tokio::time::sleep(TOPICS_POLL).await;
    }
}

/// Also fails while a new topic is not yet known to all brokers or has no leader.
async fn create_missing(
    admin: &Arc<AdminClient<DefaultClientContext>>,
    wanted: &[(String, i32, Settings)],
) -> anyhow::Result<()> {
    let client = admin.clone();
    let existing = tokio::task::spawn_blocking(move || topics(client.inner()))
        .await
        .context("join")??;
    let properties: Vec<_> = wanted.iter().map(|(.., settings)| settings.properties()).collect();
    let missing: Vec<_> = wanted
        .iter()
        .zip(&properties)
        .filter(|((name, ..), _)| !existing.contains(name))
        .map(|((name, partitions, _), properties)| {
            let topic = NewTopic::new(name, *partitions, TopicReplication::Fixed(-1));
            let properties = properties.iter();
            properties.fold(topic, |topic, (key, value)| topic.set(key, value))
        })
        .collect();
    if !missing.is_empty() {
        let deadline = AdminOptions::new()
            .request_timeout(Some(ADMIN_TIMEOUT))
            .operation_timeout(Some(ADMIN_TIMEOUT));
        for result in admin
            .create_topics(&missing, &deadline)
            .await
            .context("create topics")?
        {
            match result {
                Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
                Err((name, code)) => bail!("create topic {name}: {code}"),
            }
        }
    }
    let client = admin.clone();
    let names: Vec<String> = wanted.iter().map(|(name, ..)| name.clone()).collect();
    let read = move || {
        names
            .iter()
            .try_for_each(|name| partitions(client.inner(), name).map(drop))
    };
    tokio::task::spawn_blocking(read).await.context("join")?
}

/// Refuses topics that were made with other policies. A broker that does not say which ones they have,
/// because of its ACLs, is taken at its operator's word.
async fn check_existing(
    admin: &AdminClient<DefaultClientContext>,
    wanted: &[(String, i32, Settings)],
) -> anyhow::Result<()> {
    let topics: Vec<_> = wanted.iter().map(|(name, ..)| ResourceSpecifier::Topic(name)).collect();
    let deadline = AdminOptions::new().request_timeout(Some(ADMIN_TIMEOUT));
    let described = admin.describe_configs(&topics, &deadline).await;
    for ((topic, _, settings), found) in wanted.iter().zip(described.context("read the topics' settings")?) {
        match found {
            Ok(found) => settings.check(topic, |name| found.get(name).and_then(|entry| entry.value.clone()))?,
            Err(error) => tracing::warn!(topic, %error, "cannot read the topic's cleanup.policy and retention"),
        }
    }
    Ok(())
}

/// The names of all topics. Blocks. A lookup by name could create the topic with the broker's
/// defaults.
fn topics<C: ClientContext>(client: &Client<C>) -> anyhow::Result<BTreeSet<String>> {
    let metadata = client.fetch_metadata(None, METADATA_TIMEOUT).context("list topics")?;
    Ok(metadata.topics().iter().map(|topic| topic.name().to_owned()).collect())
}

/// The first offset of each partition of a topic, and the one after its last. Blocks.
pub fn partitions<C: ClientContext>(client: &Client<C>, topic: &str) -> anyhow::Result<BTreeMap<i32, (i64, i64)>> {
    let ids = partition_ids(client, topic)?.into_iter();
    ids.map(|partition| Ok((partition, range(client, topic, partition)?)))
        .collect()
}

/// The partitions that a topic has now. Blocks.
pub fn partition_ids<C: ClientContext>(client: &Client<C>, topic: &str) -> anyhow::Result<Vec<i32>> {
    let metadata = client
        .fetch_metadata(Some(topic), METADATA_TIMEOUT)
        .with_context(|| format!("look up topic {topic}"))?;
    let partitions = metadata.topics().iter().flat_map(|topic| topic.partitions());
    let ids: Vec<i32> = partitions.map(|partition| partition.id()).collect();
    ensure!(!ids.is_empty(), "topic {topic} does not exist");
    Ok(ids)
}

/// The first offset of a partition, and the one after its last. Blocks.
pub fn range<C: ClientContext>(client: &Client<C>, topic: &str, partition: i32) -> anyhow::Result<(i64, i64)> {
    let range = client.fetch_watermarks(topic, partition, METADATA_TIMEOUT);
    range.with_context(|| format!("look up the offsets of {topic}/{partition}"))
}

/// A client that only looks things up: its connections never wait for a fetch. The ends that it sees
/// include open transactions, because records behind one are acknowledged although nobody can read
/// them yet.
pub fn observer(options: &ClientOptions) -> anyhow::Result<BaseConsumer> {
    let mut config = options.config(&[]);
    config.set("isolation.level", "read_uncommitted");
    config.create().context("create client")
}

/// The cluster's id. Uses a new client, because an existing one returns a cached id. Blocks.
pub fn cluster_id(options: &ClientOptions) -> anyhow::Result<String> {
    let client: BaseConsumer = options.config(&[]).create().context("create client")?;
    let cluster_id = client.client().fetch_cluster_id(CLUSTER_TIMEOUT);
    cluster_id.context("read the cluster's id from the broker")
}

/// The error if the brokers belong to another cluster than the tables.
pub fn another_log(options: &ClientOptions, tables: &str, log: &str) -> anyhow::Error {
    anyhow!(
        "these tables were filled from the Kafka cluster {tables}, but the brokers {} are the cluster {log}: \
         ingest.accept_other_log = true starts over with the records of this cluster",
        options.brokers
    )
}

/// The offset after the last record of each partition. Blocks. Uses one request, because each
/// request waits for the fetch before it on the same connection.
pub fn ends<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[(String, i32)],
) -> anyhow::Result<BTreeMap<(String, i32), i64>> {
    if partitions.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut request = TopicPartitionList::new();
    for (topic, partition) in partitions {
        request.add_partition_offset(topic, *partition, Offset::End)?;
    }
    let answer = consumer
        .offsets_for_times(request, METADATA_TIMEOUT)
        .context("look up the ends")?;
    let mut ends = BTreeMap::new();
    for element in answer.elements() {
        let (topic, partition) = (element.topic().to_owned(), element.partition());
        element
            .error()
            .with_context(|| format!("look up the end of {topic}/{partition}"))?;
        match element.offset() {
            Offset::Offset(end) => ends.insert((topic, partition), end),
            other => bail!("the end of {topic}/{partition} is {other:?}"),
        };
    }
    Ok(ends)
}

/// The headers of a record that are texts.
pub fn headers(message: &impl Message) -> impl Iterator<Item = (&str, &str)> {
    let headers = message.headers();
    (0..headers.map_or(0, Headers::count)).filter_map(move |index| {
        // The library panics at a name that is not UTF-8. None of ours are such.
        let header = catch_unwind(AssertUnwindSafe(|| headers.map(|headers| headers.get(index))));
        let header = header.ok()??;
        Some((header.key, str::from_utf8(header.value?).ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_names_have_the_prefix_and_the_schema_version() {
        let options = ClientOptions {
            topic_prefix: "blue".to_owned(),
            ..ClientOptions::default()
        };
        assert_eq!(options.topics().generation, "blue.generation.v1");
        assert_eq!(options.topics().dlq, "blue.dlq.v1");
    }

    #[test]
    fn a_topic_that_removes_what_may_not_be_read_yet_is_refused_with_what_to_do() {
        let settings = Settings {
            retention_ms: 3_600_000,
            retention_bytes: 0,
            record_bytes_max: None,
        };
        let check = |policy: &str, age: &str, bytes: &str| {
            let found = [(CLEANUP_POLICY, policy), (RETENTION_MS, age), (RETENTION_BYTES, bytes)];
            let found = BTreeMap::from(found);
            let result = settings.check("t", |name| found.get(name).map(|value| (*value).to_owned()));
            result.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(check("delete", "3600000", "-1"), "");
        assert_eq!(check("delete", "-1", "-1"), "", "it may keep more");
        for policy in ["compact", "compact,delete", "delete,compact"] {
            let refused = check(policy, "-1", "-1");
            assert!(refused.contains("--add-config cleanup.policy=delete"), "{refused}");
        }
        let refused = check("delete", "3599999", "-1");
        assert!(refused.contains("retention.ms=3600000"), "{refused}");
        let refused = check("delete", "-1", "1048576");
        assert!(refused.contains("retention.bytes=-1"), "{refused}");
        // Who may not read the settings is not refused.
        assert!(settings.check("t", |_| None).is_ok());
    }

    #[test]
    fn new_topics_are_made_with_the_policies_that_are_checked() {
        let settings = Settings {
            retention_ms: 1,
            retention_bytes: 2,
            record_bytes_max: None,
        };
        let made = BTreeMap::from_iter(settings.properties());
        assert_eq!(made[CLEANUP_POLICY], "delete");
        assert!(settings.check("t", |name| made.get(name).cloned()).is_ok());
    }

    #[test]
    fn the_operators_settings_override_ours() {
        let options = ClientOptions {
            librdkafka: BTreeMap::from([("acks".to_owned(), "1".to_owned())]),
            ..ClientOptions::default()
        };
        assert_eq!(options.config(&[("acks", "all")]).get("acks"), Some("1"));
    }
}
