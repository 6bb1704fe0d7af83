//! How far the tables are behind the log, for `/metrics`: of every partition, also of one that no sink reads. Every process
//! says the same, from what the log and the tables say.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rdkafka::consumer::BaseConsumer;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::kafka::{self, ClientOptions};

const INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Lag {
    pub pool: PgPool,
    pub kafka: ClientOptions,
    pub cluster_id: String,
    /// The event topics.
    pub topics: Vec<String>,
    pub shutdown: CancellationToken,
}

type Slot = (String, i32);

/// Where the tables are in one partition.
#[derive(Clone, Copy)]
struct Place {
    next_offset: i64,
    /// Everything that the log took before this moment is in the tables.
    caught_up_to: OffsetDateTime,
}

impl Lag {
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let consumer: BaseConsumer = self.kafka.config(&[]).create().context("create client")?;
        let consumer = Arc::new(consumer);
        let began = OffsetDateTime::now_utc();
        let mut places = BTreeMap::new();
        while !self.shutdown.is_cancelled() {
            // What is away says nothing new, and the seconds go on.
            match self.places(began).await {
                Ok(found) => places = found,
                Err(error) => tracing::debug!(%error, "offsets cannot be read right now"),
            }
            for (slot, place) in &places {
                let age = OffsetDateTime::now_utc() - place.caught_up_to;
                let seconds = age.as_seconds_f64().max(0.0);
                metrics::gauge!("springtide_ingest_lag_seconds", &labels(slot)).set(seconds);
            }
            match self.ends(&consumer, &places).await {
                Ok(ends) => tell(&places, &ends),
                Err(error) => tracing::debug!(error = %format!("{error:#}"), "the log's ends are unknown"),
            }
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
        Ok(())
    }

    /// A partition that was never caught up with counts from `began`.
    async fn places(&self, began: OffsetDateTime) -> sqlx::Result<BTreeMap<Slot, Place>> {
        let rows = sqlx::query!(
            "select topic, partition, next_offset, caught_up_to from consumer_offset \
             where consumer = 'sink' and cluster_id = $1 and topic = any($2)",
            self.cluster_id,
            &self.topics
        )
        .fetch_all(&self.pool)
        .await?;
        let places = rows.into_iter().map(|row| {
            let place = Place {
                next_offset: row.next_offset,
                caught_up_to: row.caught_up_to.unwrap_or(began),
            };
            ((row.topic, row.partition), place)
        });
        Ok(places.collect())
    }

    async fn ends(
        &self,
        consumer: &Arc<BaseConsumer>,
        places: &BTreeMap<Slot, Place>,
    ) -> anyhow::Result<BTreeMap<Slot, i64>> {
        let (consumer, slots) = (consumer.clone(), places.keys().cloned().collect::<Vec<_>>());
        tokio::task::spawn_blocking(move || kafka::ends(&consumer, &slots))
            .await
            .context("join")?
    }
}

fn tell(places: &BTreeMap<Slot, Place>, ends: &BTreeMap<Slot, i64>) {
    for (slot, end) in ends {
        let Some(place) = places.get(slot) else { continue };
        let behind = (end - place.next_offset).max(0);
        metrics::gauge!("springtide_ingest_lag_records", &labels(slot)).set(behind as f64);
    }
}

fn labels((topic, partition): &Slot) -> [(&'static str, String); 2] {
    [("topic", topic.clone()), ("partition", partition.to_string())]
}
