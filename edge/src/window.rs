//! Hours of each day in a time zone, as people write them: `22:00-06:00 Europe/Berlin`.

use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use time::OffsetDateTime;

/// Hours of each day, such as `22:00-06:00 Europe/Berlin`. The end is not part of them; one before the
/// start is on the next day.
#[derive(Clone, PartialEq)]
pub struct Window {
    from: Time,
    to: Time,
    zone: TimeZone,
    /// As it was written.
    text: String,
}

impl Window {
    /// Whether the time is in one of the days' hours.
    pub fn contains(&self, at: OffsetDateTime) -> bool {
        // times that no calendar has are never in a window
        let Ok(at) = Timestamp::from_second(at.unix_timestamp()) else {
            return false;
        };
        let clock = Zoned::new(at, self.zone.clone()).time();
        match self.from < self.to {
            true => (self.from..self.to).contains(&clock),
            false => clock >= self.from || clock < self.to,
        }
    }
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let form =
            || format!("{text:?} is no window; write one as `22:00-06:00 Europe/Berlin`, with 00:00 for midnight");
        let (hours, zone) = text.split_once(' ').ok_or_else(form)?;
        let (from, to) = hours.split_once(['-', '–']).ok_or_else(form)?;
        let zone = zone.trim();
        let zone = TimeZone::get(zone).map_err(|_| format!("{zone:?} is no time zone of the IANA database"))?;
        let (from, to) = (clock(from).ok_or_else(form)?, clock(to).ok_or_else(form)?);
        match from == to {
            true => Err(format!(
                "{text:?} begins when it ends; leave the window out for the whole day"
            )),
            false => Ok(Window {
                from,
                to,
                zone,
                text: text.to_owned(),
            }),
        }
    }
}

/// `HH:MM`.
fn clock(text: &str) -> Option<Time> {
    let (hour, minute) = text.split_once(':')?;
    let number = |digits: &str| {
        let is_right = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_digit());
        is_right.then(|| digits.parse().ok())?
    };
    Time::new(number(hour)?, number(minute)?, 0, 0).ok()
}

impl fmt::Display for Window {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Window({})", self.text)
    }
}

impl Serialize for Window {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Window {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn window(text: &str) -> Window {
        text.parse().unwrap()
    }

    #[test]
    fn a_window_is_on_the_clock_of_its_zone_in_summer_and_in_winter() {
        let night = window("22:00-06:00 Europe/Berlin");
        for (at, open) in [
            (datetime!(2026-01-10 20:59 UTC), false),
            (datetime!(2026-01-10 21:00 UTC), true),
            (datetime!(2026-01-11 04:59:59 UTC), true),
            (datetime!(2026-01-11 05:00 UTC), false),
            (datetime!(2026-07-10 19:59 UTC), false),
            (datetime!(2026-07-10 20:00 UTC), true),
            (datetime!(2026-07-11 04:00 UTC), false),
        ] {
            assert_eq!(night.contains(at), open, "{at}");
        }
        let day = window("09:30–17:00 America/New_York");
        assert!(!day.contains(datetime!(2026-01-10 14:29 UTC)));
        assert!(day.contains(datetime!(2026-01-10 14:30 UTC)));
        assert!(!day.contains(datetime!(2026-01-10 22:00 UTC)));
    }

    #[test]
    fn a_window_is_written_as_it_was_read() {
        let night = window(" 22:00–06:00 Europe/Berlin");
        let json = serde_json::to_string(&night).unwrap();
        assert_eq!(json, "\"22:00–06:00 Europe/Berlin\"");
        assert_eq!(serde_json::from_str::<Window>(&json).unwrap(), night);
        let error = serde_json::from_str::<Window>("\"22:00-06:00 Berlin\"").unwrap_err();
        assert!(error.to_string().contains("no time zone"), "{error}");
    }
}
