//! When a run comes again: the five fields of cron and a time zone, such as `0 3 * * 1-5 Europe/Berlin`.
//!
//! ```text
//! minute 0-59 | hour 0-23 | day of the month 1-31 | month 1-12 | day of the week 0-7, 0 and 7: Sunday
//! ```
//! A field is `*`, a number, a range `1-5`, each with a step (`*/15`), or a list of these. Where both days
//! are given, either is enough, as POSIX says of crontab. A time that a change of clocks leaves out is
//! that much later on that day; one that it repeats is taken once.

use jiff::civil::{Date, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use time::OffsetDateTime;

/// Days that are searched: the longest gap is that of 29 February around a year such as 2100.
const DAYS_MAX: usize = 9 * 366;

/// Points in time.
#[derive(Clone, PartialEq)]
pub struct Cron {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    /// 0: Sunday.
    weekdays: u64,
    /// Whether the days of the month, and those of the week, are not `*`.
    days_chosen: [bool; 2],
    zone: TimeZone,
    /// As it was written.
    text: String,
}

impl Cron {
    /// The first point after this time. `None`: no calendar has one, such as 31 February.
    pub fn next_after(&self, at: OffsetDateTime) -> Option<OffsetDateTime> {
        let after = Timestamp::from_second(at.unix_timestamp()).ok()?;
        let mut day = after.to_zoned(self.zone.clone()).date();
        for _ in 0..DAYS_MAX {
            if self.is_on(day)
                && let Some(found) = self.on(day).find(|found| *found > after)
            {
                return OffsetDateTime::from_unix_timestamp(found.as_second()).ok();
            }
            day = day.checked_add(1.day()).ok()?;
        }
        None
    }

    fn is_on(&self, day: Date) -> bool {
        let of_month = has(self.days, day.day());
        let of_week = has(self.weekdays, day.weekday().to_sunday_zero_offset());
        let fits = match self.days_chosen {
            [true, true] => of_month || of_week,
            _ => of_month && of_week,
        };
        fits && has(self.months, day.month())
    }

    fn on(&self, day: Date) -> impl Iterator<Item = Timestamp> {
        let (hours, minutes) = (self.hours, self.minutes);
        let hours = (0..24).filter(move |hour| has(hours, *hour));
        let times = hours.flat_map(move |hour| {
            let minutes = (0..60).filter(move |minute| has(minutes, *minute));
            minutes.filter_map(move |minute| Time::new(hour, minute, 0, 0).ok())
        });
        times.filter_map(move |time| {
            let zoned = day.to_datetime(time).to_zoned(self.zone.clone()).ok()?;
            Some(zoned.timestamp())
        })
    }
}

fn has(set: u64, value: i8) -> bool {
    u32::try_from(value).is_ok_and(|value| (set >> value) & 1 == 1)
}

impl FromStr for Cron {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [minute, hour, day, month, weekday, zone] = words[..] else {
            return Err(format!(
                "{text:?} does not say when: write the five fields of cron and a time zone, such as \
                 `0 3 * * * Europe/Berlin`"
            ));
        };
        let weekdays = field("day of the week", weekday, 0, 7)?;
        let cron = Cron {
            minutes: field("minute", minute, 0, 59)?,
            hours: field("hour", hour, 0, 23)?,
            days: field("day of the month", day, 1, 31)?,
            months: field("month", month, 1, 12)?,
            weekdays: weekdays | ((weekdays >> 7) & 1),
            days_chosen: [day != "*", weekday != "*"],
            zone: TimeZone::get(zone).map_err(|_| format!("{zone:?} is no time zone of the IANA database"))?,
            text: text.to_owned(),
        };
        match cron.next_after(OffsetDateTime::UNIX_EPOCH) {
            Some(_) => Ok(cron),
            None => Err(format!("{text:?} never comes: no month has that day")),
        }
    }
}

/// The values of a field, as bits.
fn field(name: &str, text: &str, low: u32, high: u32) -> Result<u64, String> {
    let wrong =
        || format!("{text:?} is no {name}: it is `*`, {low} to {high}, a range, a step `*/2`, or a list of these");
    let number = |text: &str| text.parse::<u32>().ok().filter(|value| (low..=high).contains(value));
    let mut set = 0;
    for part in text.split(',') {
        let (range, step) = match part.split_once('/') {
            None => (part, None),
            Some((range, step)) => (
                range,
                Some(step.parse::<u32>().ok().filter(|step| *step > 0).ok_or_else(wrong)?),
            ),
        };
        let (first, last) = match range.split_once('-') {
            _ if range == "*" => (low, high),
            Some((first, last)) => (number(first).ok_or_else(wrong)?, number(last).ok_or_else(wrong)?),
            None => {
                let first = number(range).ok_or_else(wrong)?;
                (first, if step.is_some() { high } else { first })
            }
        };
        if first > last {
            return Err(wrong());
        }
        for value in (first..=last).step_by(step.unwrap_or(1) as usize) {
            set |= 1 << value;
        }
    }
    Ok(set)
}

impl fmt::Debug for Cron {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Cron({})", self.text)
    }
}

impl Serialize for Cron {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Cron {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|why| D::Error::custom(format!("schedule.repeats: {why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn next(cron: &str, after: OffsetDateTime) -> OffsetDateTime {
        let cron: Cron = cron.parse().unwrap();
        cron.next_after(after).unwrap()
    }

    #[test]
    fn a_run_comes_again_on_the_clock_of_its_zone() {
        let cases = [
            (
                "0 3 * * * Europe/Berlin",
                datetime!(2026-01-10 01:59 UTC),
                datetime!(2026-01-10 02:00 UTC),
            ),
            (
                "0 3 * * * Europe/Berlin",
                datetime!(2026-01-10 02:00 UTC),
                datetime!(2026-01-11 02:00 UTC),
            ),
            (
                "0 3 * * * Europe/Berlin",
                datetime!(2026-07-10 02:00 UTC),
                datetime!(2026-07-11 01:00 UTC),
            ),
            (
                "*/15 * * * * UTC",
                datetime!(2026-01-10 01:59:59 UTC),
                datetime!(2026-01-10 02:00 UTC),
            ),
            (
                "5/20 4-6 * * * UTC",
                datetime!(2026-01-10 04:25 UTC),
                datetime!(2026-01-10 04:45 UTC),
            ),
            // 10 January 2026 is a Saturday
            (
                "0 0 * * 1-5 UTC",
                datetime!(2026-01-10 00:00 UTC),
                datetime!(2026-01-12 00:00 UTC),
            ),
            (
                "0 0 * * 7 UTC",
                datetime!(2026-01-10 00:00 UTC),
                datetime!(2026-01-11 00:00 UTC),
            ),
            (
                "0 0 1 * 1 UTC",
                datetime!(2026-01-10 00:00 UTC),
                datetime!(2026-01-12 00:00 UTC),
            ),
            (
                "0 0 29 2 * UTC",
                datetime!(2026-01-10 00:00 UTC),
                datetime!(2028-02-29 00:00 UTC),
            ),
            (
                "30 23 31 12 * UTC",
                datetime!(2026-12-31 23:30 UTC),
                datetime!(2027-12-31 23:30 UTC),
            ),
        ];
        for (cron, after, expected) in cases {
            assert_eq!(next(cron, after), expected, "{cron} after {after}");
        }
    }

    #[test]
    fn a_change_of_clocks_neither_loses_nor_repeats_a_run() {
        // 29 March 2026: 02:00 becomes 03:00 in Berlin; 25 October: 03:00 becomes 02:00
        let spring = next("30 2 * * * Europe/Berlin", datetime!(2026-03-28 12:00 UTC));
        assert_eq!(spring, datetime!(2026-03-29 01:30 UTC));
        assert_eq!(
            next("30 2 * * * Europe/Berlin", spring),
            datetime!(2026-03-30 00:30 UTC)
        );
        let autumn = next("30 2 * * * Europe/Berlin", datetime!(2026-10-24 12:00 UTC));
        assert_eq!(autumn, datetime!(2026-10-25 00:30 UTC));
        assert_eq!(
            next("30 2 * * * Europe/Berlin", autumn),
            datetime!(2026-10-26 01:30 UTC)
        );
    }

    #[test]
    fn what_never_comes_or_is_no_cron_is_refused_with_the_reason() {
        for (text, reason) in [
            ("0 3 * * *", "time zone"),
            ("0 3 * * * Nowhere/City", "no time zone"),
            ("60 3 * * * UTC", "minute"),
            ("0 24 * * * UTC", "hour"),
            ("0 3 0 * * UTC", "day of the month"),
            ("0 3 * 13 * UTC", "month"),
            ("0 3 * * 8 UTC", "day of the week"),
            ("5-1 3 * * * UTC", "minute"),
            ("*/0 3 * * * UTC", "minute"),
            ("0 3 31 2 * UTC", "never comes"),
        ] {
            let error = text.parse::<Cron>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
