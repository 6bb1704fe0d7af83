//! Quantiles of durations, in milliseconds.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

#[derive(Debug, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl Quantiles {
    pub fn of(durations: impl Iterator<Item = Duration>) -> anyhow::Result<Self> {
        let mut histogram = Histogram::<u64>::new(3)?;
        for duration in durations {
            histogram.record(duration.as_micros().try_into()?)?;
        }
        let ms = |micros: u64| micros as f64 / 1e3;
        Ok(Quantiles {
            p50: ms(histogram.value_at_quantile(0.5)),
            p99: ms(histogram.value_at_quantile(0.99)),
            max: ms(histogram.max()),
        })
    }
}
