//! Runs the parts of ingest together: API, sink, closer and upkeep. If one fails, all stop.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use edge::auth::Auth;
use edge::server::Listener;
use event_log::Producer;
use event_log::kafka::{self, ClientOptions};
use event_log::payload;
use rdkafka::consumer::{BaseConsumer, Consumer};
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::close::closer::{Closer, Place};
use crate::close::unscored::Unscored;
use crate::entry::api::Api;
use crate::entry::destination::Destination;
use crate::judging::Judging;
use crate::options::Options;
use crate::reward::stored;
use crate::rows::join::visible::Visible;
use crate::rows::offset::{self, EventLog};
use crate::rows::sink::{Samplers, Sink};
use crate::upkeep::lag::Lag;
use crate::upkeep::orphan::OrphanSweep;
use crate::upkeep::partition;
use crate::upkeep::retention::{self, Retention, Room};
use crate::upkeep::unreferenced::UnreferencedSweep;
use crate::validator::Validator;

/// Runs ingest until `shutdown`. Serves `extra` beside its own routes. Fails early if continuing
/// could lose or duplicate events.
pub async fn run(
    options: Options,
    kafka: ClientOptions,
    pool: PgPool,
    auth: Auth,
    listener: Listener,
    extra: Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    options.check()?;
    kafka::ensure_topics(&kafka, options.partitions).await?;
    let log = register_log(&options, &kafka, &pool).await?;
    partition::ensure(&pool).await?;
    let surfaces = Arc::new(stored::store(&pool, options.rules()?).await?);
    let skew = time::Duration::seconds_f64(options.clock_skew_seconds_max);
    let judges = options.judges()?;
    let validator = Arc::new(Validator::new(options.metrics()?, skew).with_judges(&judges));
    let age_max = time::Duration::days(options.retention_days.into());
    let age_max = Some(age_max).filter(|age_max| !age_max.is_zero());
    retention::inform(&pool, &validator, age_max).await?;
    let producer = Producer::new(&kafka).context("create producer")?;
    let payloads = options.payload_store.as_deref().map(payload::Store::open).transpose()?;
    let room = Arc::new(Room::default());

    let stop = shutdown.child_token();
    let mut parts: JoinSet<anyhow::Result<()>> = JoinSet::new();
    let destination = Destination::Log(producer.clone());
    let api = Api::new(&options, Some(pool.clone()), destination, validator.clone())
        .with_payloads(payloads.clone())
        .with_room(room.clone());
    let router = api.router(&auth).merge(extra);
    parts.spawn(edge::server::run(listener, router, stop.clone()));
    let lag = Lag {
        pool: pool.clone(),
        kafka: kafka.clone(),
        log: log.clone(),
        validator: validator.clone(),
        shutdown: stop.clone(),
    };
    parts.spawn(lag.run());
    let sink = Sink {
        pool: pool.clone(),
        producer: producer.clone(),
        kafka,
        cluster_id: log.cluster_id.clone(),
        surfaces: surfaces.clone(),
        judges: judges.clone(),
        validator: validator.clone(),
        samplers: Samplers::default(),
        batch_records_max: options.batch_records_max,
        batch_wait: Duration::from_millis(options.batch_wait_ms),
        writers: options.writers,
        accept_other_log: options.accept_other_log,
        shutdown: stop.clone(),
    };
    parts.spawn(sink.run());
    let closer = Closer {
        pool: pool.clone(),
        log: log.clone(),
        surfaces,
        judges: judges.clone(),
        grace: time::Duration::seconds_f64(options.close_grace_seconds),
        unscored: Unscored::new(options.unscored_share_max),
        visible: Visible::default(),
        places: (Place::START, Place::START),
        shutdown: stop.clone(),
    };
    parts.spawn(until_stopped(closer.run()));
    for judge in judges.iter() {
        let judging = Judging::new(pool.clone(), producer.clone(), judge.clone(), stop.clone())?;
        parts.spawn(until_stopped(judging.run()));
    }
    let orphans = OrphanSweep {
        pool: pool.clone(),
        producer: producer.clone(),
        ttl: time::Duration::seconds_f64(options.orphan_ttl_seconds),
        shutdown: stop.clone(),
    };
    parts.spawn(until_stopped(orphans.run()));
    parts.spawn(until_stopped(partition::run(pool.clone(), stop.clone())));
    let ttl = time::Duration::hours(options.payload_unnamed_hours.into());
    if let Some(payloads) = payloads.clone().filter(|_| !ttl.is_zero()) {
        let unreferenced = UnreferencedSweep {
            pool: pool.clone(),
            payloads,
            log: log.clone(),
            ttl,
            shutdown: stop.clone(),
        };
        parts.spawn(until_stopped(unreferenced.run()));
    }
    let retention = Retention {
        pool,
        age_max,
        content: options.retention.clone(),
        disk_bytes_max: Some(options.disk_bytes_max).filter(|max| *max > 0),
        disk_tenant_share_max: options.disk_tenant_share_max,
        clock_skew_max: skew,
        payloads,
        log,
        validator,
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

/// A part that only ends at the shutdown.
pub(crate) async fn until_stopped(part: impl Future<Output = ()>) -> anyhow::Result<()> {
    part.await;
    Ok(())
}

/// Waits for all parts. The first that fails or ends early stops the others.
pub(crate) async fn join(parts: &mut JoinSet<anyhow::Result<()>>, stop: &CancellationToken) -> anyhow::Result<()> {
    let mut result = Ok(());
    while let Some(ended) = parts.join_next().await {
        let early = !stop.is_cancelled();
        let ended = match ended.context("a part of ingest panicked") {
            Ok(Ok(())) if early => Err(anyhow::anyhow!("a part of ingest ended unexpectedly")),
            Ok(ended) => ended,
            Err(error) => Err(error),
        };
        stop.cancel();
        result = result.and(ended);
    }
    result
}

/// Checks that the tables were filled from this log, and registers its partitions.
async fn register_log(options: &Options, client: &ClientOptions, pool: &PgPool) -> anyhow::Result<EventLog> {
    let names = client.topics();
    let topics = vec![names.generation, names.feedback];
    let client_options = client.clone();
    let look_up = move || -> anyhow::Result<_> {
        let cluster_id = kafka::cluster_id(&client_options)?;
        let consumer: BaseConsumer = client_options.config(&[]).create().context("create client")?;
        let mut partitions = BTreeMap::new();
        for topic in &topics {
            for (partition, (first, _)) in kafka::partitions(consumer.client(), topic)? {
                partitions.insert((topic.clone(), partition), first);
            }
        }
        Ok((EventLog { cluster_id, topics }, partitions))
    };
    let (log, partitions) = tokio::task::spawn_blocking(look_up).await.context("join")??;
    let other = offset::other_cluster(pool, &log).await.context("read offsets")?;
    if let Some(other) = other {
        if !options.accept_other_log {
            return Err(kafka::another_log(client, &other, &log.cluster_id));
        }
        tracing::error!(
            from = other,
            to = log.cluster_id,
            "another cluster, continuing as configured"
        );
    }
    offset::register(pool, &log.cluster_id, &partitions)
        .await
        .context("register partitions")?;
    Ok(log)
}
