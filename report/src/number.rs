//! Numbers as people read them: a real minus sign, a sign on differences, a dash for no value.

use crate::Interval;

const NO_VALUE: &str = "–";

/// `digits` is the number of digits after the point, here and below.
pub fn decimal(value: Option<f64>, digits: usize) -> String {
    value.map_or(NO_VALUE.to_owned(), |value| minus(&format!("{value:.digits$}")))
}

/// With a plus or minus sign.
pub fn signed(value: Option<f64>, digits: usize) -> String {
    value.map_or(NO_VALUE.to_owned(), |value| minus(&format!("{value:+.digits$}")))
}

/// `share` of 1.
pub fn percent(share: Option<f64>, digits: usize) -> String {
    share.map_or(NO_VALUE.to_owned(), |share| format!("{:.digits$}%", 100.0 * share))
}

/// Both ends of an interval.
pub fn range(ends: Option<[f64; 2]>, digits: usize) -> String {
    ends.map_or(NO_VALUE.to_owned(), |[low, high]| {
        format!("{} … {}", signed(Some(low), digits), signed(Some(high), digits))
    })
}

/// `+0.030 (95% +0.010 … +0.050)`
pub fn interval(interval: Option<Interval>, digits: usize) -> String {
    interval.map_or(NO_VALUE.to_owned(), |Interval { mean, ci95 }| {
        format!("{} (95% {})", signed(Some(mean), digits), range(Some(ci95), digits))
    })
}

/// `2.3e−6`
pub fn scientific(value: Option<f64>) -> String {
    value.map_or(NO_VALUE.to_owned(), |value| match value {
        0.0 => "0".to_owned(),
        _ => minus(&format!("{value:.1e}")),
    })
}

fn minus(text: &str) -> String {
    text.replace('-', "−")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_a_real_minus_sign_and_no_value_is_a_dash() {
        let value = Interval {
            mean: -0.3,
            ci95: [-0.5, 0.1],
        };
        assert_eq!(interval(Some(value), 1), "−0.3 (95% −0.5 … +0.1)");
        assert_eq!(
            (decimal(None, 1), percent(Some(0.123), 0)),
            ("–".to_owned(), "12%".to_owned())
        );
        assert_eq!(
            (scientific(Some(2.34e-6)), scientific(Some(0.0))),
            ("2.3e−6".to_owned(), "0".to_owned())
        );
    }
}
