//! Times, sizes and names as people read them.

use maud::{Markup, html};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

/// How long before `now`: `3 min`. Future times are now.
pub fn age(at: OffsetDateTime, now: OffsetDateTime) -> String {
    let seconds = (now - at).whole_seconds().max(0);
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// `3 min ago`, with the exact time for pointers and programs.
pub fn ago(at: OffsetDateTime, now: OffsetDateTime) -> Markup {
    let exact = at.format(&Rfc3339).unwrap_or_default();
    html! { time datetime=(exact) title=(exact) { (age(at, now)) " ago" } }
}

/// A time of day, with the day where it is not today. In UTC.
pub fn clock(at: OffsetDateTime, now: OffsetDateTime) -> Markup {
    let (at, now) = (at.to_offset(time::UtcOffset::UTC), now.to_offset(time::UtcOffset::UTC));
    let text = match at.date() == now.date() {
        true => at.format(format_description!("[hour]:[minute]:[second]")),
        false => at.format(format_description!("[year]-[month]-[day] [hour]:[minute]")),
    };
    let exact = at.format(&Rfc3339).unwrap_or_default();
    html! { time datetime=(exact) title=(exact) { (text.unwrap_or_default()) } }
}

/// `12,345`
pub fn count(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("−{text}") } else { text }
}

/// `1.2 MiB`
pub fn bytes(number: i64) -> String {
    let number = number.max(0) as f64;
    match number {
        n if n < 1024.0 => format!("{n:.0} B"),
        n if n < 1_048_576.0 => format!("{:.1} KiB", n / 1024.0),
        n if n < 1_073_741_824.0 => format!("{:.1} MiB", n / 1_048_576.0),
        n => format!("{:.2} GiB", n / 1_073_741_824.0),
    }
}

/// A link to a version's page.
pub fn version(serial: i64) -> Markup {
    html! { a href=(format!("/versions/{serial}")) { (serial) } }
}

pub fn version_or_none(serial: Option<i64>) -> Markup {
    match serial {
        Some(serial) => version(serial),
        None => html! { "–" },
    }
}

/// The last digits of an id: the first ones are a time, which neighbours share.
pub fn short(id: uuid::Uuid) -> String {
    let text = id.simple().to_string();
    format!("…{}", text.get(20..).unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-11-26 12:00 UTC);

    #[test]
    fn ages_have_the_unit_that_is_read_quickly() {
        for (seconds, expected) in [
            (-5, "0 s"),
            (119, "119 s"),
            (120, "2 min"),
            (7200, "2 h"),
            (200_000, "2 days"),
        ] {
            assert_eq!(age(NOW - time::Duration::seconds(seconds), NOW), expected);
        }
    }

    #[test]
    fn the_day_stands_where_it_is_not_today() {
        let of = |at| clock(at, NOW).into_string();
        assert!(of(datetime!(2026-11-26 09:05 UTC)).contains(">09:05:00<"));
        assert!(of(datetime!(2026-11-25 09:05 UTC)).contains(">2026-11-25 09:05<"));
    }

    #[test]
    fn numbers_are_grouped_and_sizes_have_units() {
        assert_eq!(
            (count(7), count(1234), count(-1_234_567)),
            ("7".into(), "1,234".into(), "−1,234,567".into())
        );
        assert_eq!(
            (bytes(10), bytes(2048), bytes(3 << 30)),
            ("10 B".into(), "2.0 KiB".into(), "3.00 GiB".into())
        );
    }
}
