//! Feedback whose generation never came: a copy goes to the dead letters, the row is marked. A generation that comes
//! after all still finds its feedback; the mark only says that somebody was told.
//!
//! The sweep moves along the time at which feedback was stored, and remembers how far it is as one more consumer in
//! `consumer_offset`: its row is also the lease that keeps two sweeps apart.

use std::time::Duration;

use anyhow::Context;
use futures::future::try_join_all;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::event::{Event, Feedback, Target, Value};
use crate::log::{DeadLetter, Producer, Reason};
use crate::transaction::begin;

/// Feedback swept in one transaction.
const BATCH_MAX: i64 = 500;
const SOURCE: &str = "springtide/ingest/orphan";

pub(crate) struct Sweep {
    pub pool: PgPool,
    pub producer: Producer,
    /// How long feedback may wait for its generation.
    pub ttl: time::Duration,
    pub shutdown: CancellationToken,
}

impl Sweep {
    pub(crate) async fn run(self) {
        // Ten times in a lifetime, at least every minute.
        let tenth = Duration::try_from(self.ttl / 10).unwrap_or_default();
        let interval = tenth.clamp(Duration::from_millis(200), Duration::from_secs(60));
        while !self.shutdown.is_cancelled() {
            match self.round().await {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => tracing::warn!(error = %format!("{error:#}"), "orphans not swept, will be tried again"),
            }
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                () = tokio::time::sleep(interval) => {}
            }
        }
    }

    /// Sweeps one batch; says whether there may be more.
    async fn round(&self) -> anyhow::Result<bool> {
        let mut transaction = begin(&self.pool).await.context("begin")?;
        let Some(from) = lease(&mut transaction).await.context("take the lease")? else {
            return Ok(false);
        };
        let until = settled(&mut transaction).await.context("look for transactions")?;
        let until = until.min(OffsetDateTime::now_utc() - self.ttl);
        let rows = sqlx::query_file!("src/orphan/sweep.sql", from, until, BATCH_MAX)
            .fetch_all(&mut *transaction)
            .await
            .context("find orphans")?;
        let more = i64::try_from(rows.len()) == Ok(BATCH_MAX);
        // A full batch ends in the middle of the stretch; its last row is looked at again and is marked by then.
        let reached = rows.last().filter(|_| more).map_or(until, |row| row.stored_at);
        let mut ids: Vec<Uuid> = Vec::new();
        let mut letters = Vec::new();
        for row in rows {
            let target = match (row.generation_id, row.episode_id) {
                (Some(id), _) => Target::Generation(id),
                (None, Some(id)) => Target::Episode(id),
                (None, None) => continue,
            };
            let value = match (row.value_bool, row.value_float, row.value_text) {
                (Some(value), _, _) => Value::Bool(value),
                (_, Some(value), _) => Value::Float(value),
                (_, _, value) => Value::Text(value.unwrap_or_default()),
            };
            let tags = serde_json::from_value(row.tags).context("read tags")?;
            let feedback = Feedback {
                id: row.id,
                target,
                metric_name: row.metric_name,
                value,
                tags,
            };
            let event = feedback.into_event(row.tenant_id, SOURCE, row.given_at);
            letters.push(letter(&event));
            ids.push(row.id);
        }
        // All at once: a transaction must not wait long.
        let sends = letters.iter().map(|letter| self.producer.send_dead_letter(letter));
        try_join_all(sends).await.context("send dead letters")?;
        sqlx::query!("update feedback set orphaned_at = now() where id = any($1)", &ids)
            .execute(&mut *transaction)
            .await
            .context("mark orphans")?;
        sqlx::query!(
            "update consumer_offset set caught_up_to = $1, updated_at = now() where consumer = 'orphan-sweep'",
            reached
        )
        .execute(&mut *transaction)
        .await
        .context("remember how far")?;
        transaction.commit().await.context("commit")?;
        Ok(more)
    }
}

/// From where to go on; `None` while another sweep is at it.
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

/// The moment before which no transaction began that is still storing. Its feedback will have been stored at its beginning, and
/// must not come to lie behind the sweep, however long it takes: it would never become a dead letter. Who else works in the
/// database under the same name holds the sweep up, and loses nothing by it.
async fn settled(connection: &mut PgConnection) -> sqlx::Result<OffsetDateTime> {
    // A statement of its own: what has ended by now is seen by the next one.
    sqlx::query_scalar!(
        "select coalesce(min(xact_start), clock_timestamp()) as \"until!\" from pg_stat_activity \
         where datname = current_database() and usename = current_user and pid <> pg_backend_pid()"
    )
    .fetch_one(connection)
    .await
}

fn letter(event: &Event) -> DeadLetter {
    DeadLetter {
        reason: Reason::Orphan,
        detail: "its generation never came".to_owned(),
        from: None,
        content_type: "application/protobuf".to_owned(),
        trace: Vec::new(),
        key: event.key().to_vec(),
        value: event.encode(),
    }
}
