//! Deletes one week of generations.
//!
//! ```text
//!  refuse   a constraint refuses new generations of the week, so nothing in it opens again
//!  check    what needs the week? Then it stays (too old: still refused; for room: accepted again)
//!  count    its generations by what became of them, in slices; those without a partition go here
//!  drop     one short transaction: counts, horizon, partition
//! ```
//!
//! Each step commits by itself, and a later round continues where one stopped. Refusing and
//! dropping need locks that wait for every reader of the partition. They give up after
//! [`super::LOCK_TIMEOUT`], because other statements queue behind them. (`detach partition …
//! concurrently` would wait without a queue, but Postgres does not allow it for a table with a
//! default partition.)

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Retention, measure, sweep};
use crate::upkeep::partition::{self, Week};

/// Generations that one transaction counts.
const SLICE_ROWS: i64 = 20_000;

impl Retention {
    pub(super) async fn expire_weeks(&self, connection: &mut PgConnection, now: OffsetDateTime) -> anyhow::Result<()> {
        let mut bytes = measure(&self.pool).await.context("measure the tables")?;
        let mut is_held = false;
        for week in weeks(connection).await.context("list weeks")? {
            let is_old = self.age_max.is_some_and(|age_max| week.next().start() <= now - age_max);
            // Never the current week.
            let needs_room = self.is_too_large(bytes) && week.next().start() <= now;
            if !is_old && !needs_room {
                break;
            }
            let name = week.name();
            if !expire(connection, week, is_old)
                .await
                .with_context(|| format!("expire {name}"))?
            {
                is_held = true;
                break;
            }
            bytes = measure(&self.pool).await.context("measure the tables")?;
        }
        metrics::gauge!("springtide_ingest_retention_held").set(if is_held { 1.0 } else { 0.0 });
        Ok(())
    }
}

/// Returns false if the week must stay for now.
async fn expire(connection: &mut PgConnection, week: Week, is_old: bool) -> anyhow::Result<bool> {
    let (name, until) = (week.name(), week.next().first_id());
    // A week that is deleted for room alone must not refuse events while it stays.
    if !is_old && is_needed(connection, week).await? {
        return Ok(false);
    }
    let refused = sqlx::query!("select refuse_generations($1, $2)", name, until);
    if partition::unless_busy(refused.execute(&mut *connection).await, &name)
        .context("refuse generations")?
        .is_none()
    {
        return Ok(false);
    }
    if is_needed(connection, week).await? {
        stay(connection, &name, is_old).await?;
        return Ok(false);
    }
    count(connection, &name, until).await.context("count generations")?;
    // Before the horizon moves, because the trainer deletes dispositions below it.
    sweep::generations_without_week(connection, until).await?;
    let dropped = sqlx::query_scalar!("select drop_generations($1, $2) as \"generations!\"", name, until);
    let dropped = partition::unless_busy(dropped.fetch_one(connection).await, &name);
    let Some(generations) = dropped.context("drop the partition")? else {
        return Ok(false);
    };
    let why = if is_old { "age" } else { "room" };
    metrics::counter!("springtide_ingest_expired_total", "why" => why).increment(generations.unsigned_abs());
    tracing::info!(partition = name, generations, why, "a week was deleted");
    Ok(true)
}

async fn is_needed(connection: &mut PgConnection, week: Week) -> anyhow::Result<bool> {
    let needed = sqlx::query_scalar!("select generations_needed($1)", week.next().first_id())
        .fetch_one(connection)
        .await
        .context("find what needs the week")?;
    if let Some(by) = &needed {
        tracing::warn!(
            partition = week.name(),
            by,
            "a week that should be deleted is still needed"
        );
    }
    Ok(needed.is_some())
}

/// Forgets the counts, which may change until the week goes. A week that is not too old accepts
/// generations again.
async fn stay(connection: &mut PgConnection, name: &str, is_old: bool) -> anyhow::Result<()> {
    if is_old {
        sqlx::query!(
            "with counted as (delete from expiring_generation) \
             update generation_expiry set counted_id = '00000000-0000-0000-0000-000000000000'"
        )
        .execute(connection)
        .await
        .context("reset the counts")?;
    } else {
        let accepted = sqlx::query!("select accept_generations($1)", name);
        partition::unless_busy(accepted.execute(connection).await, name).context("accept generations again")?;
    }
    Ok(())
}

/// Counts the generations of a partition, from where an earlier round stopped.
async fn count(connection: &mut PgConnection, name: &str, until: Uuid) -> sqlx::Result<()> {
    let mut after = sqlx::query_scalar!("select counted_id from generation_expiry")
        .fetch_one(&mut *connection)
        .await?;
    let end = Uuid::from_u128(until.as_u128().saturating_sub(1));
    while after < end {
        let last = sqlx::query_scalar!(
            "select id from generation where id > $1 and id < $2 order by id offset $3 limit 1",
            after,
            until,
            SLICE_ROWS - 1
        )
        .fetch_optional(&mut *connection)
        .await?;
        let last = last.unwrap_or(end);
        sqlx::query_file!("src/upkeep/retention/count.sql", after, last, name)
            .execute(&mut *connection)
            .await?;
        after = last;
    }
    Ok(())
}

/// The weeks that have a partition, and those from the oldest generation without one, oldest first.
pub(super) async fn weeks(connection: &mut PgConnection) -> sqlx::Result<Vec<Week>> {
    let names = sqlx::query_scalar!(
        "select c.relname::text as \"name!\" from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = 'generation'::regclass"
    )
    .fetch_all(&mut *connection)
    .await?;
    let mut weeks: Vec<Week> = names.iter().filter_map(|name| Week::from_name(name)).collect();
    let oldest = sqlx::query_scalar!(
        "select id from generation_default \
         where id >= coalesce((select until_id from generation_horizon), '00000000-0000-0000-0000-000000000000') \
         order by id limit 1"
    )
    .fetch_optional(connection)
    .await?;
    weeks.extend(oldest.and_then(time_of).map(Week::of));
    weeks.sort_by_key(|week| week.start());
    weeks.dedup();
    Ok(weeks)
}

/// The time in the first 48 bits of an id or a bound. `None`: the nil id.
pub(super) fn time_of(id: Uuid) -> Option<OffsetDateTime> {
    let milliseconds = i128::try_from(id.as_u128() >> 80)
        .ok()
        .filter(|milliseconds| *milliseconds > 0)?;
    OffsetDateTime::from_unix_timestamp_nanos(milliseconds * 1_000_000).ok()
}
