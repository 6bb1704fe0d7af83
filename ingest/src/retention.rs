//! What is too old goes, and what takes too much room: whole weeks of generations, the oldest first, with everything about them.
//! What became of them stays in the books (`expired_generation`). Nothing goes that is open, that a run which has not ended may
//! train on, or that such a one shares its context with. While there is more than `disk_bytes_max` and nothing may go, the
//! entrance refuses.
//!
//! The space of a dropped week is the file system's again; that of rows deleted from the other tables is used again by Postgres.

mod unnamed;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::partition::Week;
use crate::payload;
use crate::rules::Rules;
use crate::sink;
pub(crate) use unnamed::Unnamed;

const INTERVAL: Duration = Duration::from_secs(60);
/// How long a drop may wait for everybody who uses the tables; they wait behind it.
const LOCK_TIMEOUT: &str = "3s";
/// Objects deleted in one round.
const OBJECTS_MAX: i64 = 1_000;
/// Objects written that long before what the tables are known to hold, or later, stay although nothing refers to them: an
/// event that names one may be on its way.
const OBJECT_AGE_MIN: time::Duration = time::Duration::DAY;

/// Whether the store has room for more: `false` while it takes more than it may.
#[derive(Debug, Default)]
pub(crate) struct Room {
    full: AtomicBool,
}

impl Room {
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }
}

pub(crate) struct Retention {
    pub pool: PgPool,
    /// `None`: for ever.
    pub keep: Option<time::Duration>,
    /// `None`: as much as there is.
    pub disk_bytes_max: Option<u64>,
    pub payloads: Option<payload::Store>,
    pub cluster_id: String,
    /// The event topics.
    pub topics: Vec<String>,
    pub rules: Arc<Rules>,
    pub room: Arc<Room>,
    pub shutdown: CancellationToken,
}

impl Retention {
    pub(crate) async fn run(self) {
        while !self.shutdown.is_cancelled() {
            if let Err(error) = self.round(OffsetDateTime::now_utc()).await {
                tracing::warn!(error = %format!("{error:#}"), "retention did not work, will be tried again");
            }
            tokio::select! {
                () = self.shutdown.cancelled() => {}
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Drops what may go, and says whether there is room.
    async fn round(&self, now: OffsetDateTime) -> anyhow::Result<()> {
        let mut bytes = measure(&self.pool).await.context("measure the tables")?;
        let too_much = |bytes: u64| self.disk_bytes_max.is_some_and(|max| bytes > max);
        for week in weeks(&self.pool).await.context("list partitions")? {
            let old = self.keep.is_some_and(|keep| week.next().begins() <= now - keep);
            // The week that is being written to never goes.
            let crowded = too_much(bytes) && week.next().begins() <= now;
            if !old && !crowded {
                break;
            }
            if !self.expire(week, if old { "age" } else { "room" }).await? {
                break;
            }
            bytes = measure(&self.pool).await.context("measure the tables")?;
        }
        self.room.full.store(too_much(bytes), Ordering::Relaxed);
        metrics::gauge!("springtide_ingest_disk_full").set(if too_much(bytes) { 1.0 } else { 0.0 });
        self.rules
            .keep_from(horizon(&self.pool).await.context("read the horizon")?);
        let known = sink::caught_up_to(&self.pool, &self.cluster_id, &self.topics).await;
        match known.context("read progress")? {
            Some(known) => self.delete_objects(known - OBJECT_AGE_MIN).await,
            None => Ok(()),
        }
    }

    /// False if the week has to stay.
    async fn expire(&self, week: Week, why: &'static str) -> anyhow::Result<bool> {
        let until = week.next().first_id();
        let mut transaction = self.pool.begin().await.context("begin")?;
        let needed = sqlx::query_scalar!("select generations_needed($1)", until)
            .fetch_one(&mut *transaction)
            .await
            .context("ask who needs the week")?;
        metrics::gauge!("springtide_ingest_retention_held").set(if needed.is_some() { 1.0 } else { 0.0 });
        if let Some(needed) = needed {
            tracing::warn!(
                partition = week.name(),
                by = needed,
                "a week should go and is needed still"
            );
            return Ok(false);
        }
        sqlx::query!("select set_config('lock_timeout', $1, true)", LOCK_TIMEOUT)
            .fetch_one(&mut *transaction)
            .await
            .context("limit the wait for locks")?;
        let generations = sqlx::query_scalar!(
            "select expire_generations($1, $2, $3)",
            week.name(),
            until,
            week.next().begins()
        )
        .fetch_one(&mut *transaction)
        .await
        .with_context(|| format!("drop {}", week.name()))?;
        transaction.commit().await.context("commit")?;
        let generations = generations.unwrap_or(0);
        metrics::counter!("springtide_ingest_expired_total", "why" => why).increment(generations.unsigned_abs());
        tracing::info!(partition = week.name(), generations, why, "a week went");
        Ok(true)
    }

    /// Objects that nothing refers to, behind the transaction that removed the last reference.
    async fn delete_objects(&self, written_before: OffsetDateTime) -> anyhow::Result<()> {
        let Some(payloads) = &self.payloads else { return Ok(()) };
        let rows = sqlx::query!(
            "select tenant_id, digest, exists (select from payload_reference p \
             where p.digest = u.digest and p.tenant_id = u.tenant_id) as \"wanted!\" \
             from payload_unreferenced u order by since limit $1",
            OBJECTS_MAX
        )
        .fetch_all(&self.pool)
        .await
        .context("find objects that nothing refers to")?;
        for row in rows {
            let digest: [u8; 32] = row.digest.as_slice().try_into().unwrap_or_default();
            if !row.wanted {
                let written = payloads.written_at(&row.tenant_id, &digest).await?;
                if written.is_some_and(|at| at >= written_before) {
                    continue;
                }
                payloads.delete(&row.tenant_id, &digest).await?;
            }
            sqlx::query!(
                "delete from payload_unreferenced where tenant_id = $1 and digest = $2",
                row.tenant_id,
                row.digest
            )
            .execute(&self.pool)
            .await
            .context("forget an object")?;
        }
        Ok(())
    }
}

/// Bytes of what ingest writes, indexes and all; each table and partition is a metric.
async fn measure(pool: &PgPool) -> sqlx::Result<u64> {
    let rows = sqlx::query_file!("src/retention/sizes.sql").fetch_all(pool).await?;
    let mut total = 0;
    for row in rows {
        let bytes = row.bytes.unsigned_abs();
        metrics::gauge!("springtide_ingest_table_bytes", "table" => row.name).set(bytes as f64);
        total += bytes;
    }
    metrics::gauge!("springtide_ingest_disk_bytes").set(total as f64);
    Ok(total)
}

/// The weeks that have a partition, oldest first.
async fn weeks(pool: &PgPool) -> sqlx::Result<Vec<Week>> {
    let names = sqlx::query_scalar!(
        "select c.relname::text as \"name!\" from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = 'generation'::regclass"
    )
    .fetch_all(pool)
    .await?;
    let mut weeks: Vec<Week> = names.iter().filter_map(|name| Week::named(name)).collect();
    weeks.sort_by_key(|week| week.begins());
    Ok(weeks)
}

/// The smallest id that is kept; nil: all of them.
pub(crate) async fn horizon(pool: &PgPool) -> sqlx::Result<Uuid> {
    let horizon = sqlx::query_scalar!("select until_id from generation_horizon")
        .fetch_optional(pool)
        .await?;
    Ok(horizon.unwrap_or_default())
}
