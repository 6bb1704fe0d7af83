//! Creates the partitions of `generation` and `trajectory` ahead of time: one per week, from the
//! smallest UUIDv7 of its Monday. [`super::retention`] drops old ones.

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use sqlx::postgres::PgQueryResult;
use time::{OffsetDateTime, Time, UtcDateTime};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const INTERVAL: Duration = Duration::from_secs(6 * 3600);
/// After an attempt that a long reader prevented.
const RETRY_INTERVAL: Duration = Duration::from_secs(300);
const WEEKS_AHEAD: i64 = 4;

/// Creates the partitions of this week and of the next [`WEEKS_AHEAD`]. Returns false if a long
/// reader prevented it. Rows then go to the default partition.
///
/// By both the database's clock and this machine's, because a partition too many does no harm.
pub(crate) async fn ensure(pool: &PgPool) -> anyhow::Result<bool> {
    let database = sqlx::query_scalar!("select clock_timestamp() as \"now!\"");
    let database = database.fetch_one(pool).await.context("read the clock")?;
    for now in [database, OffsetDateTime::now_utc()] {
        for ahead in 0..=WEEKS_AHEAD {
            let week = Week::of(now + time::Duration::weeks(ahead));
            if !create(pool, week).await? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

async fn create(pool: &PgPool, week: Week) -> anyhow::Result<bool> {
    let (from, until) = (week.first_id(), week.next().first_id());
    let name = week.name();
    let created = sqlx::query!("select create_generation_partition($1, $2, $3)", name, from, until);
    if !is_created(created.execute(pool).await, &name)? {
        return Ok(false);
    }
    let name = week.trajectories();
    let created = sqlx::query!("select create_trajectory_partition($1, $2, $3)", name, from, until);
    is_created(created.execute(pool).await, &name)
}

fn is_created(created: sqlx::Result<PgQueryResult>, name: &str) -> anyhow::Result<bool> {
    match unless_busy(created, name) {
        Ok(created) => Ok(created.is_some()),
        // The default partition already has rows of that week. They stay there and remain readable.
        Err(error) if has_code(&error, &[CHECK_VIOLATION]) => {
            tracing::warn!(partition = name, "this week's rows stay in the default partition");
            Ok(true)
        }
        Err(error) => Err(error).with_context(|| format!("create partition {name}")),
    }
}

/// Creates partitions ahead of time until the shutdown.
pub(crate) async fn run(pool: PgPool, shutdown: CancellationToken) {
    // The start of the service may have been prevented from it.
    let mut pause = RETRY_INTERVAL;
    while shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
        pause = match ensure(&pool).await {
            Ok(true) => INTERVAL,
            Ok(false) => RETRY_INTERVAL,
            Err(error) => {
                tracing::error!(error = %format!("{error:#}"), "cannot create partitions ahead of time, will retry");
                RETRY_INTERVAL
            }
        };
    }
}

const CHECK_VIOLATION: &str = "23514";
const LOCK_NOT_AVAILABLE: &str = "55P03";
const DEADLOCK: &str = "40P01";

/// `None` if the statement gave up because other transactions hold the partition.
pub(crate) fn unless_busy<T>(result: sqlx::Result<T>, name: &str) -> sqlx::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if has_code(&error, &[LOCK_NOT_AVAILABLE, DEADLOCK]) => {
            tracing::warn!(partition = name, "a long transaction holds the partition, will retry");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn has_code(error: &sqlx::Error, codes: &[&str]) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| codes.contains(&&*code))
}

/// A week, represented by its Monday in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Week(OffsetDateTime);

impl Week {
    pub(crate) fn of(time: OffsetDateTime) -> Self {
        let day = UtcDateTime::from(time).replace_time(Time::MIDNIGHT);
        let since_monday = i64::from(day.weekday().number_days_from_monday());
        Self((day - time::Duration::days(since_monday)).into())
    }

    /// The week of the partition of generations with this name, if it is a weekly partition.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::parse(name.strip_prefix("generation_")?)
    }

    /// From which id on a partition of trajectories has none, by its name.
    pub(crate) fn end_of_trajectories(name: &str) -> Option<Uuid> {
        Some(Self::parse(name.strip_prefix("trajectory_")?)?.next().first_id())
    }

    fn parse(iso: &str) -> Option<Self> {
        let (year, week) = iso.split_once('w')?;
        let date =
            time::Date::from_iso_week_date(year.parse().ok()?, week.parse().ok()?, time::Weekday::Monday).ok()?;
        let week = Self(date.midnight().assume_utc());
        (week.iso() == iso).then_some(week)
    }

    /// Its first moment.
    pub(crate) fn start(self) -> OffsetDateTime {
        self.0
    }

    pub(crate) fn next(self) -> Self {
        Self(self.0 + time::Duration::weeks(1))
    }

    /// `generation_2026w47`, with the ISO week.
    pub(crate) fn name(self) -> String {
        format!("generation_{}", self.iso())
    }

    fn trajectories(self) -> String {
        format!("trajectory_{}", self.iso())
    }

    fn iso(self) -> String {
        let (year, week, _) = self.0.to_iso_week_date();
        format!("{year}w{week:02}")
    }

    /// The smallest UUIDv7 of the week: its first millisecond in the first 48 bits.
    pub(crate) fn first_id(self) -> Uuid {
        let milliseconds = self.0.unix_timestamp().max(0).cast_unsigned() * 1_000;
        Uuid::from_u128(u128::from(milliseconds) << 80)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn a_week_begins_on_its_monday() {
        let saturday = Week::of(datetime!(2026-11-21 13:37 UTC));
        assert_eq!(saturday, Week::of(datetime!(2026-11-16 0:00 UTC)));
        assert_eq!(saturday.name(), "generation_2026w47");
        assert_ne!(saturday, Week::of(datetime!(2026-11-23 0:00 UTC)));
    }

    #[test]
    fn the_first_week_of_a_year_is_named_by_the_iso_year() {
        assert_eq!(Week::of(datetime!(2027-01-01 0:00 UTC)).name(), "generation_2026w53");
        assert_eq!(Week::of(datetime!(2025-12-31 0:00 UTC)).name(), "generation_2026w01");
    }

    #[test]
    fn only_the_exact_name_of_a_week_is_parsed() {
        let week = Week::of(datetime!(2027-01-01 0:00 UTC));
        assert_eq!(Week::from_name(&week.name()), Some(week));
        for other in [
            "generation_default",
            "generation_2026w1",
            "generation_2026w54",
            "feedback_2026w01",
        ] {
            assert_eq!(Week::from_name(other), None, "{other}");
        }
    }

    #[test]
    fn the_name_of_a_partition_of_trajectories_says_where_it_ends() {
        let week = Week::of(datetime!(2026-11-21 0:00 UTC));
        assert_eq!(
            Week::end_of_trajectories("trajectory_2026w47"),
            Some(week.next().first_id())
        );
        for other in ["trajectory_default", "generation_2026w47"] {
            assert_eq!(Week::end_of_trajectories(other), None, "{other}");
        }
    }

    #[test]
    fn the_bounds_contain_every_uuidv7_of_the_week() {
        let week = Week::of(datetime!(2026-11-21 0:00 UTC));
        let id_at = |time: OffsetDateTime| {
            let seconds = time.unix_timestamp().cast_unsigned();
            Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, time.nanosecond()))
        };
        let first = id_at(datetime!(2026-11-16 0:00 UTC));
        let last = id_at(datetime!(2026-11-22 23:59:59.999 UTC));
        assert!(week.first_id() <= first && last < week.next().first_id());
        assert!(id_at(datetime!(2026-11-15 23:59:59.999 UTC)) < week.first_id());
    }
}
