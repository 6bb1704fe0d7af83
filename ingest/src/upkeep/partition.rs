//! Creates the partitions of `generation` ahead of time: one per week, from the smallest UUIDv7 of
//! its Monday. [`super::retention`] drops old ones.

use std::time::Duration;

use anyhow::Context;
use sqlx::PgPool;
use time::{OffsetDateTime, Time, UtcDateTime};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const INTERVAL: Duration = Duration::from_secs(6 * 3600);
const WEEKS_AHEAD: i64 = 4;

/// Creates the partitions of this week and of the next [`WEEKS_AHEAD`].
pub(crate) async fn ensure(pool: &PgPool, now: OffsetDateTime) -> anyhow::Result<()> {
    for ahead in 0..=WEEKS_AHEAD {
        let week = Week::of(now + time::Duration::weeks(ahead));
        let created = sqlx::query!(
            "select create_generation_partition($1, $2, $3)",
            week.name(),
            week.first_id(),
            week.next().first_id()
        )
        .execute(pool)
        .await;
        match created {
            Ok(_) => {}
            // The default partition already has rows of that week. They stay there and remain
            // readable.
            Err(error) if is_check_violation(&error) => {
                tracing::warn!(
                    partition = week.name(),
                    "this week's rows stay in the default partition"
                );
            }
            Err(error) => {
                return Err(error).with_context(|| format!("create partition {}", week.name()));
            }
        }
    }
    Ok(())
}

/// Creates partitions ahead of time until the shutdown.
pub(crate) async fn run(pool: PgPool, shutdown: CancellationToken) {
    loop {
        if shutdown
            .run_until_cancelled(tokio::time::sleep(INTERVAL))
            .await
            .is_none()
        {
            return;
        }
        if let Err(error) = ensure(&pool, OffsetDateTime::now_utc()).await {
            tracing::error!(error = %format!("{error:#}"), "cannot create partitions ahead of time, will retry");
        }
    }
}

fn is_check_violation(error: &sqlx::Error) -> bool {
    let error = error.as_database_error();
    error.is_some_and(sqlx::error::DatabaseError::is_check_violation)
}

/// A week, represented by its Monday in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Week(OffsetDateTime);

impl Week {
    fn of(time: OffsetDateTime) -> Self {
        let day = UtcDateTime::from(time).replace_time(Time::MIDNIGHT);
        let since_monday = i64::from(day.weekday().number_days_from_monday());
        Self((day - time::Duration::days(since_monday)).into())
    }

    /// The week of the partition with this name, if it is a weekly partition.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let (year, week) = name.strip_prefix("generation_")?.split_once('w')?;
        let date =
            time::Date::from_iso_week_date(year.parse().ok()?, week.parse().ok()?, time::Weekday::Monday).ok()?;
        let week = Self(date.midnight().assume_utc());
        (week.name() == name).then_some(week)
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
        let (year, week, _) = self.0.to_iso_week_date();
        format!("generation_{year}w{week:02}")
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
