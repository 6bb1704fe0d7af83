//! Numbers of bytes for people.

/// Three digits and a unit: `1.53 GB`.
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 999.5 {
            let digits = if unit == "B" || value >= 99.95 {
                0
            } else if value >= 9.995 {
                1
            } else {
                2
            };
            return format!("{value:.digits$} {unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.2} TB")
}

#[cfg(test)]
mod tests {
    #[test]
    fn three_digits_say_how_large() {
        for (count, said) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.00 kB"),
            (15_260, "15.3 kB"),
            (999_600, "1.00 MB"),
            (123_456_789, "123 MB"),
            (2_500_000_000_000, "2.50 TB"),
        ] {
            assert_eq!(super::bytes(count), said);
        }
    }
}
