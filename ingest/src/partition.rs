//! Partitions of `generation`: one per week, bounded by the smallest UUIDv7 of each Monday, made ahead of time. Old
//! ones go in [`crate::retention`].

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::{OffsetDateTime, Time, UtcDateTime};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const INTERVAL: Duration = Duration::from_secs(6 * 3600);
const WEEKS_AHEAD: i64 = 4;

/// Makes this week's partition and those of the next four.
pub(crate) async fn ensure(pool: &PgPool, now: OffsetDateTime) -> anyhow::Result<()> {
    for ahead in 0..=WEEKS_AHEAD {
        let week = Week::of(now + time::Duration::weeks(ahead));
        let made = sqlx::query!(
            "select create_generation_partition($1, $2, $3)",
            week.name(),
            week.first_id(),
            week.next().first_id()
        )
        .execute(pool)
        .await;
        match made {
            Ok(_) => {}
            // Rows of that week lie in the default partition already: they stay there, readable as ever.
            Err(error) if is_check_violation(&error) => {
                tracing::warn!(
                    partition = week.name(),
                    "this week's rows stay in the default partition"
                );
            }
            Err(error) => {
                return Err(error).with_context(|| format!("make partition {}", week.name()));
            }
        }
    }
    Ok(())
}

/// Keeps partitions ahead of time until the stop.
pub(crate) async fn run(pool: PgPool, shutdown: CancellationToken) {
    while !shutdown.is_cancelled() {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
        if let Err(error) = ensure(&pool, OffsetDateTime::now_utc()).await {
            tracing::error!(error = %format!("{error:#}"), "partitions not made ahead of time");
        }
    }
}

fn is_check_violation(error: &sqlx::Error) -> bool {
    let error = error.as_database_error();
    error.is_some_and(sqlx::error::DatabaseError::is_check_violation)
}

/// A week, by its Monday in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Week(OffsetDateTime);

impl Week {
    fn of(time: OffsetDateTime) -> Self {
        let day = UtcDateTime::from(time).replace_time(Time::MIDNIGHT);
        let since_monday = i64::from(day.weekday().number_days_from_monday());
        Self((day - time::Duration::days(since_monday)).into())
    }

    /// The week of a partition of that name; `None`: it is the partition of no week.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let (year, week) = name.strip_prefix("generation_")?.split_once('w')?;
        let date =
            time::Date::from_iso_week_date(year.parse().ok()?, week.parse().ok()?, time::Weekday::Monday).ok()?;
        let week = Self(date.midnight().assume_utc());
        (week.name() == name).then_some(week)
    }

    /// Its first moment.
    pub(crate) fn begins(self) -> OffsetDateTime {
        self.0
    }

    pub(crate) fn next(self) -> Self {
        Self(self.0 + time::Duration::weeks(1))
    }

    /// `generation_2026w47`, by ISO week.
    pub(crate) fn name(self) -> String {
        let (year, week, _) = self.0.to_iso_week_date();
        format!("generation_{year}w{week:02}")
    }

    /// The smallest UUID with this week's first millisecond in its first 48 bits.
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
    fn a_week_is_found_by_its_name_and_by_no_other() {
        let week = Week::of(datetime!(2027-01-01 0:00 UTC));
        assert_eq!(Week::named(&week.name()), Some(week));
        for other in [
            "generation_default",
            "generation_2026w1",
            "generation_2026w54",
            "feedback_2026w01",
        ] {
            assert_eq!(Week::named(other), None, "{other}");
        }
    }

    #[test]
    fn the_bounds_hold_every_uuidv7_of_the_week() {
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
