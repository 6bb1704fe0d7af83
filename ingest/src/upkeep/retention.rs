//! Deletes old generations, with everything about them, by whole weeks and oldest first.
//!
//! A week is deleted because of its age, or because the tables take more than `disk_bytes_max`
//! ([`expiry`]). The table `expired_generation` keeps what became of its generations. A week stays
//! while one of its generations is open, may be trained on by an active run, or shares its context
//! with such a generation. The deletion of a week raises the horizon. [`sweep`] then deletes what
//! lies below it in the other tables, in batches, and events that never had a generation, by age.
//!
//! Generations of some tenants and surfaces lose their content before their week goes ([`content`]).
//!
//! If the tables are too large and no week can be deleted, the API refuses events. A tenant that
//! takes up most of the space at the expense of others is refused earlier ([`Room`]).
//!
//! The file system gets back the space of dropped partitions. Postgres reuses the space of deleted
//! rows.

mod content;
mod expiry;
mod sweep;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use event_log::payload;
use sqlx::{Connection, PgConnection, PgPool};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::options::ContentRetention;
use crate::rows::offset::{self, EventLog};
use crate::validator::Validator;

const INTERVAL: Duration = Duration::from_secs(60);
/// Between two rounds that take content from old generations.
const CONTENT_INTERVAL: Duration = Duration::from_secs(3600);
/// Between two looks for events without a generation. Those with one are read again each time.
const UNATTACHED_INTERVAL: Duration = Duration::from_secs(3600);
/// A look for what a week is needed for may take long. It takes at most this share of the time,
/// unless the disk is full.
const CHECK_SHARE: u32 = 20;
/// One process at a time expires weeks. Others that find it locked skip their turn.
const ADVISORY_LOCK: i64 = 0x7370_7269_6e67_0001;
/// How long a statement of retention may wait for locks. Other statements queue behind it.
const LOCK_TIMEOUT: &str = "500ms";
/// Objects of one query.
const OBJECTS_MAX: i64 = 1_000;
/// Unreferenced objects are kept if they are younger than this, relative to the tables' progress,
/// because an event that refers to one may still arrive.
const OBJECT_AGE_MIN: time::Duration = time::Duration::DAY;
/// Fraction of `disk_bytes_max` above which heavy tenants are refused, and below which they are
/// accepted again. A dropped week should not make room for the tenant that is refused.
const HEAVY_REFUSED_ABOVE: f64 = 0.9;
const HEAVY_ACCEPTED_BELOW: f64 = 0.7;
/// Bytes that the estimate of the tenants' shares reads.
const SAMPLE_BYTES: f64 = 64.0 * 1024.0 * 1024.0;

/// Whose events the tables have room for.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// The tables have reached `disk_bytes_max`.
    full: AtomicBool,
    /// Tenants for which the weeks of others would have to go.
    heavy: RwLock<BTreeSet<String>>,
}

impl Room {
    pub(crate) fn is_full_for(&self, tenant: &str) -> bool {
        let heavy = || {
            self.heavy
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .contains(tenant)
        };
        self.full.load(Ordering::Relaxed) || heavy()
    }

    fn set_heavy(&self, tenants: BTreeSet<String>) {
        *self.heavy.write().unwrap_or_else(PoisonError::into_inner) = tenants;
    }

    fn heavy(&self) -> BTreeSet<String> {
        self.heavy.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

pub(crate) struct Retention {
    pub pool: PgPool,
    /// Maximum age. `None`: unlimited.
    pub age_max: Option<time::Duration>,
    pub content: Vec<ContentRetention>,
    /// `None`: unlimited.
    pub disk_bytes_max: Option<u64>,
    /// Fraction of `disk_bytes_max` that one tenant may take at the expense of others.
    pub disk_tenant_share_max: f64,
    /// Difference between this machine's clock and the database's that is not worth a warning.
    pub clock_skew_max: time::Duration,
    pub payloads: Option<payload::Store>,
    pub log: EventLog,
    pub validator: Arc<Validator>,
    pub room: Arc<Room>,
    pub shutdown: CancellationToken,
}

/// When the expensive parts of a round are due.
struct Schedule {
    expiry_at: Instant,
    content_at: Instant,
    unattached_at: Instant,
}

impl Retention {
    pub(crate) async fn run(self) {
        let now = Instant::now();
        let mut schedule = Schedule {
            expiry_at: now,
            content_at: now,
            unattached_at: now,
        };
        loop {
            match self.shutdown.run_until_cancelled(self.round(&mut schedule)).await {
                None => return,
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    tracing::warn!(error = %format!("{error:#}"), "retention failed, will retry");
                }
            }
            let sleep = self.shutdown.run_until_cancelled(tokio::time::sleep(INTERVAL));
            if sleep.await.is_none() {
                return;
            }
        }
    }

    /// Deletes what can be deleted, and updates [`Room`] and the validator.
    async fn round(&self, schedule: &mut Schedule) -> anyhow::Result<()> {
        // Before the deletion, which may take long. Another process may have refused a week.
        inform(&self.pool, &self.validator, self.age_max).await?;
        let deleted = self.delete(schedule).await;
        inform(&self.pool, &self.validator, self.age_max).await?;
        let bytes = measure(&self.pool).await.context("measure the tables")?;
        let is_full = self.is_too_large(bytes);
        self.room.full.store(is_full, Ordering::Relaxed);
        metrics::gauge!("springtide_ingest_disk_full").set(if is_full { 1.0 } else { 0.0 });
        if let Err(error) = self.update_heavy(bytes).await {
            tracing::warn!(error = %format!("{error:#}"), "cannot estimate the tenants' shares, will retry");
        }
        deleted?;
        let known = offset::caught_up_to(&self.pool, &self.log).await;
        match known.context("read progress")? {
            Some(known) => self.delete_objects(known - OBJECT_AGE_MIN).await,
            None => Ok(()),
        }
    }

    fn is_too_large(&self, bytes: u64) -> bool {
        self.disk_bytes_max.is_some_and(|max| bytes > max)
    }

    /// Expires weeks and sweeps, unless another process does.
    async fn delete(&self, schedule: &mut Schedule) -> anyhow::Result<()> {
        // The lock belongs to the session, so it ends with this connection, however that ends.
        let mut connection = self.pool.acquire().await.context("connect")?.detach();
        let is_locked = sqlx::query_scalar!("select pg_try_advisory_lock($1) as \"locked!\"", ADVISORY_LOCK)
            .fetch_one(&mut connection)
            .await
            .context("lock")?;
        if is_locked {
            sqlx::query!("select set_config('lock_timeout', $1, false)", LOCK_TIMEOUT)
                .fetch_one(&mut connection)
                .await
                .context("limit the wait for locks")?;
            self.delete_alone(&mut connection, schedule).await?;
        }
        connection.close().await.context("disconnect")
    }

    async fn delete_alone(&self, connection: &mut PgConnection, schedule: &mut Schedule) -> anyhow::Result<()> {
        let now = self.now(connection).await.context("read the clock")?;
        let before = horizon(&mut *connection).await.context("read the retention horizon")?;
        if Instant::now() >= schedule.expiry_at {
            let started = Instant::now();
            let ended = self.expire_weeks(connection, now).await?;
            schedule.expiry_at = started + ended.interval();
            inform(&mut *connection, &self.validator, self.age_max).await?;
        }
        let until = horizon(&mut *connection).await.context("read the retention horizon")?;
        sweep::below_horizon(connection, until).await?;
        if Instant::now() >= schedule.content_at && content::forget(connection, &self.content, now).await? {
            schedule.content_at = Instant::now() + CONTENT_INTERVAL;
        }
        if until != before || Instant::now() >= schedule.unattached_at {
            let by_age = self.age_max.map(|age_max| now - age_max);
            if let Some(stored_before) = by_age.max(sweep::time_of(until)) {
                sweep::unattached(connection, stored_before).await?;
            }
            schedule.unattached_at = Instant::now() + UNATTACHED_INTERVAL;
        }
        Ok(())
    }

    async fn now(&self, connection: &mut PgConnection) -> sqlx::Result<OffsetDateTime> {
        let database = sqlx::query_scalar!("select clock_timestamp() as \"now!\"")
            .fetch_one(connection)
            .await?;
        let here = OffsetDateTime::now_utc();
        if (database - here).abs() > self.clock_skew_max {
            tracing::warn!(%database, %here, "the clocks of the database and of this machine differ, using the earlier one");
        }
        Ok(trusted(database, here))
    }

    /// Updates the tenants that are refused because they take up the space of others.
    async fn update_heavy(&self, bytes: u64) -> anyhow::Result<()> {
        let Some(max) = self.disk_bytes_max else { return Ok(()) };
        let used = bytes as f64 / max as f64;
        let mut heavy = self.room.heavy();
        if used < HEAVY_ACCEPTED_BELOW {
            heavy.clear();
        } else if used > HEAVY_REFUSED_ABOVE {
            let mut connection = self.pool.acquire().await?;
            let oldest = expiry::weeks(&mut connection).await?.into_iter().next();
            let percent = (100.0 * SAMPLE_BYTES / bytes as f64).min(100.0);
            let tenants = sqlx::query_file_scalar!(
                "src/upkeep/retention/heavy_tenants.sql",
                percent as f32,
                used,
                self.disk_tenant_share_max,
                oldest.map(|week| week.next().first_id()).unwrap_or_default()
            )
            .fetch_all(&mut *connection)
            .await?;
            for tenant in tenants {
                if heavy.insert(tenant.clone()) {
                    tracing::warn!(
                        tenant,
                        "a tenant takes up the disk space of others, its events are refused"
                    );
                }
            }
        }
        metrics::gauge!("springtide_ingest_disk_heavy_tenants").set(heavy.len() as f64);
        self.room.set_heavy(heavy);
        Ok(())
    }

    /// Deletes objects whose last reference was removed by an earlier transaction.
    async fn delete_objects(&self, written_before: OffsetDateTime) -> anyhow::Result<()> {
        let Some(payloads) = &self.payloads else { return Ok(()) };
        let mut after = OffsetDateTime::UNIX_EPOCH;
        loop {
            let rows = sqlx::query!(
                "select tenant_id, digest, since, exists (select from payload_reference p \
                 where p.digest = u.digest and p.tenant_id = u.tenant_id) as \"wanted!\" \
                 from payload_unreferenced u where since >= $1 order by since limit $2",
                after,
                OBJECTS_MAX
            )
            .fetch_all(&self.pool)
            .await
            .context("find unreferenced objects")?;
            let mut deleted = 0;
            let count = rows.len() as i64;
            for row in rows {
                after = row.since;
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
                deleted += 1;
            }
            // Without progress, the rest is too young.
            if count < OBJECTS_MAX || deleted == 0 {
                return Ok(());
            }
        }
    }
}

/// The earlier of two clocks. Nothing that cannot be undone may follow from a single clock that is
/// ahead.
fn trusted(database: OffsetDateTime, here: OffsetDateTime) -> OffsetDateTime {
    database.min(here)
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

/// Makes the validator refuse what the tables refuse for good: generations that have been deleted, all
/// events about them, and new generations of a week that is too old. The tables would refuse a whole
/// batch for one of these.
pub(crate) async fn inform(
    executor: impl sqlx::PgExecutor<'_>,
    validator: &Validator,
    age_max: Option<time::Duration>,
) -> anyhow::Result<()> {
    let row = sqlx::query!(
        r#"select (select until_id from generation_horizon) as horizon,
                  (select until_id from generation_expiry) as refused, clock_timestamp() as "now!""#
    );
    let row = row.fetch_one(executor).await.context("read the retention horizon")?;
    validator.reject_before(row.horizon.unwrap_or_default());
    let now = trusted(row.now, OffsetDateTime::now_utc());
    if let Some((refused, age_max)) = row.refused.zip(age_max)
        && expiry::is_refused_for_age(refused, age_max, now)
    {
        validator.reject_generations_before(refused);
    }
    Ok(())
}

/// The smallest id that retention keeps; nil: all.
async fn horizon(executor: impl sqlx::PgExecutor<'_>) -> sqlx::Result<Uuid> {
    let horizon = sqlx::query_scalar!("select until_id from generation_horizon")
        .fetch_optional(executor)
        .await?;
    Ok(horizon.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_clock_that_is_a_year_ahead_makes_nothing_old() {
        let now = OffsetDateTime::UNIX_EPOCH + time::Duration::weeks(3000);
        let ahead = now + time::Duration::days(365);
        assert_eq!(trusted(ahead, now), now);
        assert_eq!(trusted(now, ahead), now);
    }

    #[test]
    fn a_full_disk_stops_everybody_and_a_heavy_tenant_only_itself() {
        let room = Room::default();
        room.set_heavy(["busy".to_owned()].into());
        assert!(room.is_full_for("busy") && !room.is_full_for("quiet"));
        room.full.store(true, Ordering::Relaxed);
        assert!(room.is_full_for("quiet"));
    }
}
