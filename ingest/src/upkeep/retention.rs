//! Deletes old generations, with everything about them, by whole weeks and oldest first.
//!
//! A week is deleted because of its age, or because the tables take more than `disk_bytes_max`. The
//! table `expired_generation` keeps what became of its generations. A week stays while one of its
//! generations is open, may be trained on by an active run, or shares its context with such a
//! generation. If the tables are too large and no week can be deleted, the API refuses events.
//!
//! The file system gets back the space of a dropped week. Postgres reuses the space of deleted
//! rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::partition::Week;
use crate::payload;
use crate::rows::offset::{self, EventLog};
use crate::validator::Validator;

const INTERVAL: Duration = Duration::from_secs(60);
/// How long a drop may wait for its locks. Other statements queue behind it.
const LOCK_TIMEOUT: &str = "3s";
/// Objects deleted per round.
const OBJECTS_MAX: i64 = 1_000;
/// Unreferenced objects are kept if they are younger than this, relative to the tables' progress,
/// because an event that refers to one may still arrive.
const OBJECT_AGE_MIN: time::Duration = time::Duration::DAY;

/// Whether the tables have reached `disk_bytes_max`.
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
    /// Maximum age. `None`: unlimited.
    pub age_max: Option<time::Duration>,
    /// `None`: unlimited.
    pub disk_bytes_max: Option<u64>,
    pub payloads: Option<payload::Store>,
    pub log: EventLog,
    pub validator: Arc<Validator>,
    pub room: Arc<Room>,
    pub shutdown: CancellationToken,
}

impl Retention {
    pub(crate) async fn run(self) {
        while !self.shutdown.is_cancelled() {
            if let Err(error) = self.round(OffsetDateTime::now_utc()).await {
                tracing::warn!(error = %format!("{error:#}"), "retention failed, will retry");
            }
            self.shutdown.run_until_cancelled(tokio::time::sleep(INTERVAL)).await;
        }
    }

    /// Deletes what can be deleted, and updates [`Room`].
    async fn round(&self, now: OffsetDateTime) -> anyhow::Result<()> {
        let mut bytes = measure(&self.pool).await.context("measure the tables")?;
        let too_large = |bytes: u64| self.disk_bytes_max.is_some_and(|max| bytes > max);
        for week in weeks(&self.pool).await.context("list partitions")? {
            let is_old = self.age_max.is_some_and(|age_max| week.next().start() <= now - age_max);
            // Never the current week.
            let needs_room = too_large(bytes) && week.next().start() <= now;
            if !is_old && !needs_room {
                break;
            }
            if !self.expire(week, if is_old { "age" } else { "room" }).await? {
                break;
            }
            bytes = measure(&self.pool).await.context("measure the tables")?;
        }
        self.room.full.store(too_large(bytes), Ordering::Relaxed);
        metrics::gauge!("springtide_ingest_disk_full").set(if too_large(bytes) { 1.0 } else { 0.0 });
        self.validator
            .reject_before(horizon(&self.pool).await.context("read the retention horizon")?);
        let known = offset::caught_up_to(&self.pool, &self.log).await;
        match known.context("read progress")? {
            Some(known) => self.delete_objects(known - OBJECT_AGE_MIN).await,
            None => Ok(()),
        }
    }

    /// Returns false if the week must stay.
    async fn expire(&self, week: Week, why: &'static str) -> anyhow::Result<bool> {
        let until = week.next().first_id();
        let mut transaction = self.pool.begin().await.context("begin")?;
        let needed = sqlx::query_scalar!("select generations_needed($1)", until)
            .fetch_one(&mut *transaction)
            .await
            .context("find what needs the week")?;
        metrics::gauge!("springtide_ingest_retention_held").set(if needed.is_some() { 1.0 } else { 0.0 });
        if let Some(needed) = needed {
            tracing::warn!(
                partition = week.name(),
                by = needed,
                "a week that should be deleted is still needed"
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
            week.next().start()
        )
        .fetch_one(&mut *transaction)
        .await
        .with_context(|| format!("drop {}", week.name()))?;
        transaction.commit().await.context("commit")?;
        let generations = generations.unwrap_or(0);
        metrics::counter!("springtide_ingest_expired_total", "why" => why).increment(generations.unsigned_abs());
        tracing::info!(partition = week.name(), generations, why, "a week was deleted");
        Ok(true)
    }

    /// Deletes objects whose last reference was removed by an earlier transaction.
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
        .context("find unreferenced objects")?;
        for row in rows {
            if !row.wanted {
                let digest = row.digest.as_slice().try_into().unwrap_or_default();
                let key = payload::Key::new(&row.tenant_id, digest);
                let written_at = payloads.written_at(&key).await?;
                if written_at.is_some_and(|at| at >= written_before) {
                    continue;
                }
                payloads.delete(&key).await?;
            }
            sqlx::query!(
                "delete from payload_unreferenced where tenant_id = $1 and digest = $2",
                row.tenant_id,
                row.digest
            )
            .execute(&self.pool)
            .await
            .context("remove an unreferenced object from the list")?;
        }
        Ok(())
    }
}

/// The bytes of ingest's tables with indexes. Sets a metric for each table and partition.
async fn measure(pool: &PgPool) -> sqlx::Result<u64> {
    let rows = sqlx::query_file!("src/upkeep/sizes.sql").fetch_all(pool).await?;
    let mut total = 0;
    for row in rows {
        let bytes = row.bytes.unsigned_abs();
        metrics::gauge!("springtide_ingest_table_bytes", "table" => row.name).set(bytes as f64);
        total += bytes;
    }
    metrics::gauge!("springtide_ingest_disk_bytes").set(total as f64);
    Ok(total)
}

/// The weeks with a partition, oldest first.
async fn weeks(pool: &PgPool) -> sqlx::Result<Vec<Week>> {
    let names = sqlx::query_scalar!(
        "select c.relname::text as \"name!\" from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = 'generation'::regclass"
    )
    .fetch_all(pool)
    .await?;
    let mut weeks: Vec<Week> = names.iter().filter_map(|name| Week::from_name(name)).collect();
    weeks.sort_by_key(|week| week.start());
    Ok(weeks)
}

/// The smallest id that retention keeps; nil: all.
pub(crate) async fn horizon(pool: &PgPool) -> sqlx::Result<Uuid> {
    let horizon = sqlx::query_scalar!("select until_id from generation_horizon")
        .fetch_optional(pool)
        .await?;
    Ok(horizon.unwrap_or_default())
}
