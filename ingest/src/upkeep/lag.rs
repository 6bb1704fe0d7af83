//! Metrics of how far the tables are behind the log, for every partition, including those that no
//! sink reads, and of open episodes. Every process reports the same values, because they come from
//! the log and the tables.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use event_log::kafka::{self, ClientOptions};
use rdkafka::consumer::BaseConsumer;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::rows::offset::{EventLog, Slot};
use crate::validator::Validator;

const INTERVAL: Duration = Duration::from_secs(1);
/// Rounds between two looks at the open episodes, which read all of them.
const EPISODES_EVERY: u32 = 15;

pub(crate) struct Lag {
    pub pool: PgPool,
    pub kafka: ClientOptions,
    pub log: EventLog,
    pub validator: Arc<Validator>,
    pub shutdown: CancellationToken,
}

/// What the tables hold of a partition.
#[derive(Clone, Copy)]
struct Progress {
    next_offset: i64,
    /// The tables hold all events from before this time.
    caught_up_to: OffsetDateTime,
}

impl Lag {
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let consumer: BaseConsumer = self.kafka.config(&[]).create().context("create client")?;
        let consumer = Arc::new(consumer);
        let started_at = self.validator.clock.now();
        let mut progress = BTreeMap::new();
        let mut rounds = (0..EPISODES_EVERY).cycle();
        while !self.shutdown.is_cancelled() {
            // If the database is unavailable, the lag grows from the last known progress.
            match self.progress(started_at).await {
                Ok(found) => progress = found,
                Err(error) => tracing::debug!(%error, "cannot read offsets, will retry"),
            }
            for (slot, progress) in &progress {
                let age = self.validator.clock.now() - progress.caught_up_to;
                let seconds = age.as_seconds_f64().max(0.0);
                metrics::gauge!("springtide_ingest_lag_seconds", &labels(slot)).set(seconds);
            }
            match self.ends(&consumer, &progress).await {
                Ok(ends) => record_metrics(&progress, &ends),
                Err(error) => tracing::debug!(error = %format!("{error:#}"), "cannot look up the ends of the log"),
            }
            if rounds.next() == Some(0)
                && let Err(error) = self.count_episodes().await
            {
                tracing::debug!(%error, "cannot count open episodes, will retry");
            }
            self.shutdown.run_until_cancelled(tokio::time::sleep(INTERVAL)).await;
        }
        Ok(())
    }

    async fn count_episodes(&self) -> sqlx::Result<()> {
        let open = sqlx::query!(
            "select count(*) as \"count!\", coalesce(max(turns), 0) as \"turns!\", \
                    coalesce(extract(epoch from clock_timestamp() - min(opened_at)), 0)::double precision as \"age!\" \
             from open_episode where turns > 0"
        );
        let open = open.fetch_one(&self.pool).await?;
        metrics::gauge!("springtide_ingest_open_episodes").set(open.count as f64);
        metrics::gauge!("springtide_ingest_open_episode_turns_max").set(f64::from(open.turns));
        metrics::gauge!("springtide_ingest_open_episode_age_seconds_max").set(open.age);
        Ok(())
    }

    /// A partition without a caught-up time counts from `started_at`.
    async fn progress(&self, started_at: OffsetDateTime) -> sqlx::Result<BTreeMap<Slot, Progress>> {
        let rows = sqlx::query!(
            "select topic, partition, next_offset, caught_up_to from consumer_offset \
             where consumer = 'sink' and cluster_id = $1 and topic = any($2)",
            self.log.cluster_id,
            &self.log.topics
        )
        .fetch_all(&self.pool)
        .await?;
        let progress = rows.into_iter().map(|row| {
            let progress = Progress {
                next_offset: row.next_offset,
                caught_up_to: row.caught_up_to.unwrap_or(started_at),
            };
            ((row.topic, row.partition), progress)
        });
        Ok(progress.collect())
    }

    async fn ends(
        &self,
        consumer: &Arc<BaseConsumer>,
        progress: &BTreeMap<Slot, Progress>,
    ) -> anyhow::Result<BTreeMap<Slot, i64>> {
        let (consumer, slots) = (consumer.clone(), progress.keys().cloned().collect::<Vec<_>>());
        tokio::task::spawn_blocking(move || kafka::ends(&consumer, &slots))
            .await
            .context("join")?
    }
}

fn record_metrics(progress: &BTreeMap<Slot, Progress>, ends: &BTreeMap<Slot, i64>) {
    for (slot, end) in ends {
        let Some(progress) = progress.get(slot) else { continue };
        let behind = (end - progress.next_offset).max(0);
        metrics::gauge!("springtide_ingest_lag_records", &labels(slot)).set(behind as f64);
    }
}

fn labels((topic, partition): &Slot) -> [(&'static str, String); 2] {
    [("topic", topic.clone()), ("partition", partition.to_string())]
}
