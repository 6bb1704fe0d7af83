//! A moment as commands take it, or an age, on their command lines.

use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A moment, or how long ago it was.
pub fn since(text: &str) -> Result<OffsetDateTime, String> {
    if let Ok(moment) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(moment);
    }
    let ago = age(text)
        .ok()
        .and_then(|age| OffsetDateTime::now_utc().checked_sub(age.try_into().ok()?));
    ago.ok_or_else(|| "give a moment such as 2026-11-21T03:00:00Z, or an age such as 90s, 30m, 2h, 7d".to_owned())
}

/// How long something lasts, or ago it was: a number with its unit.
pub fn age(text: &str) -> Result<Duration, String> {
    let units = [("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)];
    let age = units.into_iter().find_map(|(unit, seconds)| {
        let count: u64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(Duration::from_secs(count.checked_mul(seconds)?))
    });
    age.ok_or_else(|| "give a number with its unit, such as 90s, 30m, 2h, 7d".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn a_time_is_a_moment_or_an_age() {
        assert_eq!(since("2026-11-21T03:00:00Z").unwrap(), datetime!(2026-11-21 03:00 UTC));
        let moment = since("2h").unwrap();
        let ago = OffsetDateTime::now_utc() - moment;
        assert!((7_200..7_260).contains(&ago.whole_seconds()), "{ago}");
        for text in ["yesterday", "-3h", "h", "99999999999999999d", ""] {
            assert!(since(text).is_err(), "{text}");
        }
    }
}
