//! Deletes one week of generations.
//!
//! ```text
//!  refuse   a constraint refuses new generations of the week, so nothing in it opens again
//!  check    what needs the week? Then it stays (too old: still refused; otherwise: accepted again)
//!  count    its generations by what became of them, in slices; those without a partition go here
//!  drop     one short transaction: counts, horizon, partition
//! ```
//!
//! Each step commits by itself, and a later round continues where one stopped. Refusing and
//! dropping need locks that wait for every reader of the partition. They give up after
//! [`super::LOCK_TIMEOUT`], because other statements queue behind them. (`detach partition …
//! concurrently` would wait without a queue, but Postgres does not allow it for a table with a
//! default partition.)
//!
//! A round begins with the week that an earlier one began to refuse. If it no longer has to go, it
//! accepts generations again before anything else, because only one refused week is on record.

use std::time::{Duration, Instant};

use anyhow::Context;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{CHECK_SHARE, INTERVAL, Retention, measure, sweep};
use crate::upkeep::partition::{self, Week};
use crate::validator::Validator;

/// Generations that one transaction counts.
const SLICE_ROWS: i64 = 20_000;

/// How a round ended, as far as the next one depends on it.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// How long it took to find what needs the weeks.
    checked_for: Duration,
    /// Whether the next round may soon do better: a reader was in the way, or the tables are too
    /// large.
    is_urgent: bool,
}

impl Ended {
    /// From the beginning of the round to that of the next one.
    pub(super) fn interval(&self) -> Duration {
        match self.is_urgent {
            true => INTERVAL,
            false => INTERVAL.max(self.checked_for * CHECK_SHARE),
        }
    }
}

/// What became of a week that should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Deleted,
    /// It stays, because something needs it.
    Needed,
    /// Another transaction was in the way.
    Busy,
}

impl Retention {
    pub(super) async fn expire_weeks(
        &self,
        connection: &mut PgConnection,
        now: OffsetDateTime,
    ) -> anyhow::Result<Ended> {
        let mut bytes = measure(&self.pool).await.context("measure the tables")?;
        let weeks = weeks(connection).await.context("list weeks")?;
        let is_old = |week: Week| self.age_max.is_some_and(|age_max| is_past(week, age_max, now));
        // Never the current week.
        let needs_room = |week: Week, bytes| self.is_too_large(bytes) && week.next().start() <= now;
        let mut ended = Ended::default();
        let refused = refused_week(connection).await.context("find the refused week")?;
        if let Some(week) = refused
            && !is_old(week)
            && !(needs_room(week, bytes) && weeks.first() == Some(&week))
            && accept(connection, week).await? == Outcome::Busy
        {
            ended.is_urgent = true;
            return Ok(ended);
        }
        let mut is_held = false;
        for week in weeks {
            if !is_old(week) && !needs_room(week, bytes) {
                break;
            }
            let outcome = expire(connection, week, is_old(week), &self.validator, &mut ended.checked_for).await;
            let outcome = outcome.with_context(|| format!("expire {}", week.name()))?;
            if outcome != Outcome::Deleted {
                is_held = true;
                ended.is_urgent = outcome == Outcome::Busy;
                break;
            }
            bytes = measure(&self.pool).await.context("measure the tables")?;
        }
        ended.is_urgent |= self.is_too_large(bytes);
        metrics::gauge!("springtide_ingest_retention_held").set(if is_held { 1.0 } else { 0.0 });
        Ok(ended)
    }
}

fn is_past(week: Week, age_max: time::Duration, now: OffsetDateTime) -> bool {
    week.next().start() <= now - age_max
}

async fn expire(
    connection: &mut PgConnection,
    week: Week,
    is_old: bool,
    validator: &Validator,
    checked_for: &mut Duration,
) -> anyhow::Result<Outcome> {
    let (name, until) = (week.name(), week.next().first_id());
    // A week that is deleted for room alone must not refuse events while it stays.
    if !is_old && is_needed(connection, week, checked_for).await? {
        return stay(connection, week, is_old).await;
    }
    let refused = sqlx::query!("select refuse_generations($1, $2)", name, until);
    if partition::unless_busy(refused.execute(&mut *connection).await, &name)
        .context("refuse generations")?
        .is_none()
    {
        return Ok(Outcome::Busy);
    }
    if is_old {
        validator.reject_generations_before(until);
    }
    if is_needed(connection, week, checked_for).await? {
        return stay(connection, week, is_old).await;
    }
    count(connection, &name, until).await.context("count generations")?;
    // Before the horizon moves, because the trainer deletes dispositions below it.
    sweep::generations_without_week(connection, until).await?;
    let dropped = sqlx::query_scalar!("select drop_generations($1, $2) as \"generations!\"", name, until);
    let dropped = partition::unless_busy(dropped.fetch_one(connection).await, &name);
    let Some(generations) = dropped.context("drop the partition")? else {
        return Ok(Outcome::Busy);
    };
    let why = if is_old { "age" } else { "room" };
    metrics::counter!("springtide_ingest_expired_total", "why" => why).increment(generations.unsigned_abs());
    tracing::info!(partition = name, generations, why, "a week was deleted");
    Ok(Outcome::Deleted)
}

async fn is_needed(connection: &mut PgConnection, week: Week, checked_for: &mut Duration) -> anyhow::Result<bool> {
    let started = Instant::now();
    let needed = sqlx::query_scalar!("select generations_needed($1)", week.next().first_id())
        .fetch_one(connection)
        .await
        .context("find what needs the week")?;
    *checked_for += started.elapsed();
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
async fn stay(connection: &mut PgConnection, week: Week, is_old: bool) -> anyhow::Result<Outcome> {
    let refused = refused_week(connection).await.context("find the refused week")?;
    if refused != Some(week) {
        return Ok(Outcome::Needed);
    }
    if !is_old {
        return accept(connection, week).await;
    }
    sqlx::query!(
        "with counted as (delete from expiring_generation) \
         update generation_expiry set counted_id = '00000000-0000-0000-0000-000000000000'"
    )
    .execute(connection)
    .await
    .context("reset the counts")?;
    Ok(Outcome::Needed)
}

/// Ends the refusal of a week's generations.
async fn accept(connection: &mut PgConnection, week: Week) -> anyhow::Result<Outcome> {
    let name = week.name();
    let accepted = sqlx::query!("select accept_generations($1)", name);
    let accepted = partition::unless_busy(accepted.execute(connection).await, &name);
    match accepted.context("accept generations again")? {
        Some(_) => Ok(Outcome::Needed),
        None => Ok(Outcome::Busy),
    }
}

/// The week whose generations are refused, if any.
async fn refused_week(connection: &mut PgConnection) -> sqlx::Result<Option<Week>> {
    let until = sqlx::query_scalar!("select until_id from generation_expiry");
    let until = until.fetch_optional(connection).await?;
    Ok(until.and_then(week_before))
}

fn week_before(until: Uuid) -> Option<Week> {
    let end = sweep::time_of(until)?;
    Some(Week::of(end - time::Duration::MILLISECOND))
}

/// Whether these generations, below `until`, are refused for their age. Then they are for good.
pub(super) fn is_refused_for_age(until: Uuid, age_max: time::Duration, now: OffsetDateTime) -> bool {
    week_before(until).is_some_and(|week| is_past(week, age_max, now))
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
    weeks.extend(oldest.and_then(sweep::time_of).map(Week::of));
    weeks.sort_by_key(|week| week.start());
    weeks.dedup();
    Ok(weeks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_check_delays_the_next_round_unless_that_may_soon_do_better() {
        let ended = |checked_for, is_urgent| Ended { checked_for, is_urgent };
        let (brief, long) = (Duration::from_secs(1), Duration::from_secs(600));
        assert_eq!(ended(brief, false).interval(), INTERVAL);
        assert_eq!(ended(long, false).interval(), 20 * long);
        assert_eq!(ended(long, true).interval(), INTERVAL);
    }

    #[test]
    fn the_refused_week_is_the_one_that_ends_there() {
        let week = Week::of(OffsetDateTime::UNIX_EPOCH + time::Duration::weeks(3000));
        let until = week.next().first_id();
        assert_eq!(week_before(until), Some(week));
        let age_max = time::Duration::weeks(2);
        let end = week.next().start();
        assert!(!is_refused_for_age(
            until,
            age_max,
            end + age_max - time::Duration::SECOND
        ));
        assert!(is_refused_for_age(until, age_max, end + age_max));
        assert!(!is_refused_for_age(Uuid::nil(), age_max, end + age_max));
    }
}
