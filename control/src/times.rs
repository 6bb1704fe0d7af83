//! Times as people and programs write them.

use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A time, or how long ago it was.
pub fn since(text: &str) -> Result<OffsetDateTime, String> {
    if let Ok(time) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(time);
    }
    let ago = age(text)
        .ok()
        .and_then(|age| OffsetDateTime::now_utc().checked_sub(age.try_into().ok()?));
    ago.ok_or_else(|| "give a time such as 2026-11-21T03:00:00Z, or an age such as 90s, 30m, 2h, 7d".to_owned())
}

/// A duration: a number with its unit.
pub fn age(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "give a number with its unit, such as 90s, 30m, 2h, 7d".to_owned())
}

/// Years beyond 9999 have no such form; they give an empty text.
pub fn rfc3339(time: OffsetDateTime) -> String {
    time.format(&Rfc3339).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn a_time_is_a_date_or_an_age() {
        assert_eq!(since("2026-11-21T03:00:00Z").unwrap(), datetime!(2026-11-21 03:00 UTC));
        let time = since("2h").unwrap();
        let ago = OffsetDateTime::now_utc() - time;
        assert!((7_200..7_260).contains(&ago.whole_seconds()), "{ago}");
        for text in ["yesterday", "-3h", "h", "99999999999999999d", ""] {
            assert!(since(text).is_err(), "{text}");
        }
    }
}
