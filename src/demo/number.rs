//! How numbers are written for people: a sign where there is a comparison, a dash where there is nothing to say. Pure.

use super::interval::Interval;

/// With `digits` after the point.
pub fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("–".to_owned(), |value| format!("{value:.digits$}"))
}

pub fn signed(value: Option<f64>, digits: usize) -> String {
    value.map_or("–".to_owned(), |value| format!("{value:+.digits$}"))
}

/// A share of 1.
pub fn percent(share: Option<f64>, digits: usize) -> String {
    share.map_or("–".to_owned(), |share| format!("{:.digits$}%", 100.0 * share))
}

pub fn range(ends: Option<[f64; 2]>, digits: usize) -> String {
    ends.map_or("–".to_owned(), |[low, high]| {
        format!("{low:+.digits$} … {high:+.digits$}")
    })
}

/// A mean with its interval; `by user` says what the interval is clustered by.
pub fn interval(interval: Option<Interval>, digits: usize) -> String {
    interval.map_or("–".to_owned(), |Interval { mean, ci95 }| {
        format!("{mean:+.digits$} (95% {}, by user)", range(Some(ci95), digits))
    })
}
