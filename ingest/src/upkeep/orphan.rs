//! Copies feedback whose generation never arrived to the dead-letter queue, and marks its row.
//!
//! A generation that arrives later still joins its feedback. The mark only prevents a second copy.
//!
//! The sweep goes through feedback by the time at which it was stored. Its progress is a row of
//! `consumer_offset`, whose lock ensures that only one sweep runs.

use std::time::Duration;

use anyhow::Context;
use event_log::event::{Event, Feedback, Target};
use event_log::{DeadLetter, Producer, Reason};
use futures::future::try_join_all;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::rows::feedback;
use crate::rows::transaction::begin;

/// Feedback events of one transaction.
const BATCH_MAX: i64 = 500;
const SOURCE: &str = "springtide/ingest/orphan";

pub(crate) struct OrphanSweep {
    pub pool: PgPool,
    pub producer: Producer,
    /// How long feedback may wait for its generation.
    pub ttl: time::Duration,
    pub shutdown: CancellationToken,
}

impl OrphanSweep {
    pub(crate) async fn run(self) {
        // Ten times per TTL, but at least every minute.
        let tenth = Duration::try_from(self.ttl / 10).unwrap_or_default();
        let interval = tenth.clamp(Duration::from_millis(200), Duration::from_secs(60));
        while !self.shutdown.is_cancelled() {
            match self.round().await {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => tracing::warn!(error = %format!("{error:#}"), "cannot sweep orphans, will retry"),
            }
            self.shutdown.run_until_cancelled(tokio::time::sleep(interval)).await;
        }
    }

    /// Sweeps one batch. Returns whether there may be more.
    async fn round(&self) -> anyhow::Result<bool> {
        let mut transaction = begin(&self.pool).await.context("begin")?;
        let Some(from) = lease(&mut transaction).await.context("take the lease")? else {
            return Ok(false);
        };
        let until = oldest_transaction(&mut transaction)
            .await
            .context("look for transactions")?;
        // By the database's clock, which no host of ingest can move.
        let until = until - self.ttl;
        let rows = sqlx::query_file!("src/upkeep/orphan.sql", from, until, BATCH_MAX)
            .fetch_all(&mut *transaction)
            .await
            .context("find orphans")?;
        let more = i64::try_from(rows.len()) == Ok(BATCH_MAX);
        // A full batch continues at its last row, which is marked by then.
        let reached = rows.last().filter(|_| more).map_or(until, |row| row.stored_at);
        let (mut tenants, mut ids) = (Vec::new(), Vec::<Uuid>::new());
        let mut records = Vec::new();
        for row in rows {
            let target = match (row.generation_id, row.episode_id) {
                (Some(id), _) => Target::Generation(id),
                (None, Some(id)) => Target::Episode(id),
                (None, None) => continue,
            };
            let feedback = Feedback {
                id: row.id,
                target,
                metric_name: row.metric_name,
                value: feedback::value(row.value_bool, row.value_float, row.value_text),
                tags: serde_json::from_value(row.tags).context("read tags")?,
            };
            tenants.push(row.tenant_id.clone());
            ids.push(row.id);
            let event = feedback.into_event(row.tenant_id, SOURCE, row.given_at);
            records.push(dead_letter(&event));
        }
        // Concurrently, because the transaction must be short.
        let sends = records.iter().map(|record| self.producer.send_dead_letter(record));
        try_join_all(sends).await.context("send dead letters")?;
        sqlx::query!(
            "update feedback f set orphaned_at = now() from unnest($1::text[], $2::uuid[]) as orphan (tenant_id, id) \
             where f.id = orphan.id and f.tenant_id = orphan.tenant_id",
            &tenants,
            &ids
        )
        .execute(&mut *transaction)
        .await
        .context("mark orphans")?;
        sqlx::query!(
            "update consumer_offset set caught_up_to = $1, updated_at = now() where consumer = 'orphan-sweep'",
            reached
        )
        .execute(&mut *transaction)
        .await
        .context("store progress")?;
        transaction.commit().await.context("commit")?;
        Ok(more)
    }
}

/// Where the last sweep ended. `None` while another sweep is running.
async fn lease(connection: &mut PgConnection) -> sqlx::Result<Option<OffsetDateTime>> {
    sqlx::query!(
        "insert into consumer_offset (consumer, cluster_id, topic, partition, caught_up_to) \
         values ('orphan-sweep', '', 'feedback', 0, 'epoch') on conflict do nothing"
    )
    .execute(&mut *connection)
    .await?;
    let held = sqlx::query_scalar!(
        "select caught_up_to from consumer_offset where consumer = 'orphan-sweep' for update skip locked"
    )
    .fetch_optional(connection)
    .await?;
    Ok(held.flatten())
}

/// The start of the oldest running transaction of a sink, or now.
///
/// Rows get the time at which their transaction began. A sweep beyond that time would miss feedback
/// that is committed later. The first thing that a sink does is to lock its offsets, and nobody else
/// does so for long. A reader, such as a backup, does not delay the sweep.
async fn oldest_transaction(connection: &mut PgConnection) -> sqlx::Result<OffsetDateTime> {
    // Separate from the query for orphans, which then sees all transactions that have ended by now.
    sqlx::query_scalar!(
        "select coalesce(min(a.xact_start), clock_timestamp()) as \"until!\" from pg_stat_activity a \
         where a.datname = current_database() and a.pid <> pg_backend_pid() \
           and exists (select from pg_locks l where l.pid = a.pid and l.relation = 'consumer_offset'::regclass \
                       and l.database = a.datid and l.mode <> 'AccessShareLock')"
    )
    .fetch_one(connection)
    .await
}

fn dead_letter(event: &Event) -> DeadLetter {
    DeadLetter {
        reason: Reason::Orphan,
        detail: "its generation never arrived".to_owned(),
        from: None,
        content_type: "application/protobuf".to_owned(),
        trace: Vec::new(),
        key: event.key().to_vec(),
        value: event.encode(),
    }
}
