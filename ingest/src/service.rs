//! All of ingest as one service: entrance, sink, closer, sweep and partitions, stopped together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use edge::auth::Auth;
use rdkafka::consumer::{BaseConsumer, Consumer};
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::closer::{Closer, Unscored};
use crate::entrance::Entrance;
use crate::kafka::{self, ClientOptions};
use crate::lag::Lag;
use crate::log::Producer;
use crate::options::Options;
use crate::orphan::Sweep;
use crate::partition;
use crate::payload;
use crate::retention::{self, Retention, Room, Unnamed};
use crate::reward::stored;
use crate::rules::Rules;
use crate::sink::{self, Sink};

/// Runs ingest until `shutdown`: `extra` is served beside its own routes. Returns early, with the reason, when going on
/// would lose or double events.
pub async fn run(
    options: Options,
    kafka: ClientOptions,
    pool: PgPool,
    auth: Auth,
    listener: TcpListener,
    extra: Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    options.check()?;
    kafka::ensure_topics(&kafka, options.partitions).await?;
    let names = kafka.topics();
    let topics = vec![names.generation, names.feedback];
    let cluster_id = enter_log(&options, &kafka, &pool, &topics).await?;
    partition::ensure(&pool, OffsetDateTime::now_utc()).await?;
    let surfaces = Arc::new(stored::store(&pool, options.rules()?).await?);
    let skew = time::Duration::seconds_f64(options.clock_skew_seconds_max);
    let rules = Arc::new(Rules::new(options.metrics()?, skew));
    rules.keep_from(retention::horizon(&pool).await.context("read the horizon")?);
    let producer = Producer::new(&kafka).context("create producer")?;
    let payloads = options.payload_store.as_deref().map(payload::Store::open).transpose()?;

    let stop = shutdown.child_token();
    let mut parts: JoinSet<anyhow::Result<()>> = JoinSet::new();
    let entrance = Entrance::Log(producer.clone());
    let room = Arc::new(Room::default());
    let api = Api::new(&options, Some(pool.clone()), entrance, rules.clone())
        .with_payloads(payloads.clone())
        .with_room(room.clone());
    let router = api.router(&auth).merge(extra);
    parts.spawn(edge::server::run(listener, router, stop.clone()));
    let lag = Lag {
        pool: pool.clone(),
        kafka: kafka.clone(),
        cluster_id: cluster_id.clone(),
        topics: topics.clone(),
        shutdown: stop.clone(),
    };
    parts.spawn(lag.run());
    let sink = Sink {
        pool: pool.clone(),
        producer: producer.clone(),
        kafka,
        cluster_id: cluster_id.clone(),
        surfaces: surfaces.clone(),
        rules: rules.clone(),
        batch_records_max: options.batch_records_max,
        batch_wait: Duration::from_millis(options.batch_wait_ms),
        writers: options.writers,
        accept_other_log: options.accept_other_log,
        shutdown: stop.clone(),
    };
    parts.spawn(sink.run());
    let closer = Closer {
        pool: pool.clone(),
        cluster_id: cluster_id.clone(),
        topics: topics.clone(),
        surfaces,
        grace: time::Duration::seconds_f64(options.close_grace_seconds),
        unscored: Unscored::new(options.unscored_share_max),
        shutdown: stop.clone(),
    };
    parts.spawn(until_stopped(closer.run()));
    let sweep = Sweep {
        pool: pool.clone(),
        producer: producer.clone(),
        ttl: time::Duration::seconds_f64(options.orphan_ttl_seconds),
        shutdown: stop.clone(),
    };
    parts.spawn(until_stopped(sweep.run()));
    parts.spawn(until_stopped(partition::run(pool.clone(), stop.clone())));
    let unnamed_hours = i64::from(options.payload_unnamed_hours);
    if let Some(payloads) = payloads.clone().filter(|_| unnamed_hours > 0) {
        let unnamed = Unnamed {
            pool: pool.clone(),
            payloads,
            cluster_id: cluster_id.clone(),
            topics: topics.clone(),
            keep: time::Duration::hours(unnamed_hours),
            shutdown: stop.clone(),
        };
        parts.spawn(until_stopped(unnamed.run()));
    }
    let days = i64::from(options.retention_days);
    let retention = Retention {
        pool,
        keep: (days > 0).then(|| time::Duration::days(days)),
        disk_bytes_max: Some(options.disk_bytes_max).filter(|max| *max > 0),
        payloads,
        cluster_id,
        topics,
        rules,
        room,
        shutdown: stop.clone(),
    };
    parts.spawn(until_stopped(retention.run()));

    let result = join(&mut parts, &stop).await;
    tokio::task::spawn_blocking(move || producer.flush())
        .await
        .context("flush producer")?;
    result
}

/// A part that only ever ends because it was asked to.
pub(crate) async fn until_stopped(part: impl Future<Output = ()>) -> anyhow::Result<()> {
    part.await;
    Ok(())
}

/// Waits for all parts; the first that fails or ends early stops the others.
pub(crate) async fn join(parts: &mut JoinSet<anyhow::Result<()>>, stop: &CancellationToken) -> anyhow::Result<()> {
    let mut result = Ok(());
    while let Some(ended) = parts.join_next().await {
        let early = !stop.is_cancelled();
        let ended = match ended.context("a part of ingest panicked") {
            Ok(Ok(())) if early => Err(anyhow::anyhow!("a part of ingest ended by itself")),
            Ok(ended) => ended,
            Err(error) => Err(error),
        };
        stop.cancel();
        result = result.and(ended);
    }
    result
}

/// Checks that the broker's log is the one that the tables were filled from, and registers its partitions.
async fn enter_log(
    options: &Options,
    client: &ClientOptions,
    pool: &PgPool,
    topics: &[String],
) -> anyhow::Result<String> {
    let (asked, wanted) = (client.clone(), topics.to_vec());
    let look = move || -> anyhow::Result<_> {
        let cluster_id = kafka::cluster_id(&asked)?;
        let consumer: BaseConsumer = asked.config(&[]).create().context("create client")?;
        let mut all = BTreeMap::new();
        for topic in wanted {
            for (partition, first) in kafka::partitions(consumer.client(), &topic)? {
                all.insert((topic.clone(), partition), first);
            }
        }
        Ok((cluster_id, all))
    };
    let (cluster_id, partitions) = tokio::task::spawn_blocking(look).await.context("join")??;
    let other = sink::other_cluster(pool, &cluster_id, topics)
        .await
        .context("read offsets")?;
    if let Some(other) = other {
        if !options.accept_other_log {
            return Err(kafka::another_log(client, &other, &cluster_id));
        }
        tracing::error!(from = other, to = cluster_id, "another cluster, going on as configured");
    }
    sink::register(pool, &cluster_id, &partitions)
        .await
        .context("register partitions")?;
    Ok(cluster_id)
}
