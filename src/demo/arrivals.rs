//! When somebody pauses: an open-loop Poisson process with the shape of a real code-completion service
//! (models/arrivals/azure_code_2023.toml says where it comes from). Knows nothing of what happens at a pause; a slow
//! server does not slow the arrivals down.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::draw::Draws;

/// Relative rate per slot of a real service, mean 1 over the hour.
#[derive(Debug, Clone, Deserialize)]
pub struct Shape {
    slot_seconds: u32,
    /// Lowest and highest relative rate; 0 < low ≤ 1 ≤ high.
    clip: [f64; 2],
    relative_rate: Vec<f64>,
}

/// One pause to come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Since the start of the run.
    pub at: Duration,
    pub user: usize,
    /// How many pauses this user had before.
    pub nth: u64,
}

impl Shape {
    pub fn azure_code_2023() -> anyhow::Result<Self> {
        let shape: Self = toml::from_str(include_str!("../../models/arrivals/azure_code_2023.toml"))
            .context("read the table of arrivals")?;
        let [low, high] = shape.clip;
        ensure!(
            shape.slot_seconds > 0 && !shape.relative_rate.is_empty(),
            "the table of arrivals is empty"
        );
        ensure!(
            0.0 < low && low <= 1.0 && 1.0 <= high,
            "the table of arrivals has a clip that excludes the mean"
        );
        Ok(shape)
    }

    /// The slots that a run plays: from a place in the hour that the seed decides, at the trace's own pace, around the end
    /// if need be. Levelled again, so that any stretch of the hour has a mean of 1 within the clip.
    fn stretch(&self, seed: u64, length: Duration) -> Vec<f64> {
        let slots = (length.as_secs_f64() / f64::from(self.slot_seconds)).ceil().max(1.0) as usize;
        let start = Draws::new("springtide demo start 1", &[seed]).below(self.relative_rate.len());
        let rates = self
            .relative_rate
            .iter()
            .cycle()
            .skip(start)
            .take(slots)
            .copied()
            .collect::<Vec<_>>();
        level(&rates, self.clip)
    }
}

/// clip(scale · rate) at the scale where the mean is 1, by bisection: the mean rises with the scale.
fn level(rates: &[f64], [low, high]: [f64; 2]) -> Vec<f64> {
    let at = |scale: f64| {
        rates
            .iter()
            .map(|rate| (rate * scale).clamp(low, high))
            .collect::<Vec<_>>()
    };
    let (mut below, mut above) = (0.0, 1e6);
    for _ in 0..100 {
        let middle = f64::midpoint(below, above);
        if at(middle).iter().sum::<f64>() < rates.len() as f64 {
            below = middle;
        } else {
            above = middle;
        }
    }
    at(above)
}

/// The arrivals of one run, in order. A function of its arguments alone.
#[derive(Debug)]
pub struct Arrivals {
    seed: u64,
    relative_rate: Vec<f64>,
    slot_seconds: f64,
    /// Mean pauses per second.
    rate: f64,
    seconds: f64,
    /// Where the last arrival was, seconds.
    now: f64,
    drawn: u64,
    pauses_by_user: Vec<u64>,
}

impl Arrivals {
    pub fn new(shape: &Shape, seed: u64, rate: f64, length: Duration, users: usize) -> Self {
        Self {
            seed,
            relative_rate: shape.stretch(seed, length),
            slot_seconds: f64::from(shape.slot_seconds),
            rate,
            seconds: length.as_secs_f64(),
            now: 0.0,
            drawn: 0,
            pauses_by_user: vec![0; users],
        }
    }
}

impl Iterator for Arrivals {
    type Item = Arrival;

    /// Inversion: an exponential amount of expected arrivals is walked off slot by slot.
    fn next(&mut self) -> Option<Arrival> {
        let mut draws = Draws::new("springtide demo arrival 1", &[self.seed, self.drawn]);
        let mut left = draws.exponential();
        loop {
            let slot = (self.now / self.slot_seconds).floor();
            let rate = self.rate * *self.relative_rate.get(slot as usize)?;
            let slot_end = (slot + 1.0) * self.slot_seconds;
            let to_slot_end = (slot_end - self.now) * rate;
            if left < to_slot_end {
                self.now += left / rate;
                break;
            }
            left -= to_slot_end;
            self.now = slot_end;
        }
        if self.now >= self.seconds {
            return None;
        }
        self.drawn += 1;
        let user = draws.below(self.pauses_by_user.len());
        let nth = self.pauses_by_user[user];
        self.pauses_by_user[user] += 1;
        Some(Arrival {
            at: Duration::from_secs_f64(self.now),
            user,
            nth,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seed: u64, minutes: u64) -> Vec<Arrival> {
        let shape = Shape::azure_code_2023().unwrap();
        Arrivals::new(&shape, seed, 8.0, Duration::from_secs(60 * minutes), 300).collect()
    }

    #[test]
    fn the_committed_table_has_a_mean_of_one_within_its_clip() {
        let shape = Shape::azure_code_2023().unwrap();
        let mean = shape.relative_rate.iter().sum::<f64>() / shape.relative_rate.len() as f64;
        assert!((mean - 1.0).abs() < 1e-3, "{mean}");
        assert!(shape.relative_rate.iter().all(|rate| (0.5..=2.0).contains(rate)));
        assert_eq!(shape.relative_rate.len(), 343);
    }

    #[test]
    fn levelling_keeps_the_clip_and_restores_the_mean() {
        assert_eq!(level(&[0.5, 0.5], [0.5, 2.0]), [1.0, 1.0]);
        let levelled = level(&[0.5, 0.5, 2.0], [0.5, 2.0]);
        assert!((levelled.iter().sum::<f64>() - 3.0).abs() < 1e-9, "{levelled:?}");
        assert!((levelled[0] - 0.5).abs() < 1e-9 && (levelled[2] - 2.0).abs() < 1e-9);
    }

    #[test]
    fn arrivals_are_in_order_inside_the_run_and_repeat_for_the_same_seed() {
        let arrivals = run(1, 3);
        assert_eq!(arrivals, run(1, 3));
        assert_ne!(arrivals, run(2, 3));
        assert!(arrivals.is_sorted_by_key(|arrival| arrival.at));
        assert!(
            arrivals
                .iter()
                .all(|arrival| arrival.at < Duration::from_secs(180) && arrival.user < 300)
        );
    }

    #[test]
    fn the_mean_rate_is_the_one_asked_for_whatever_the_seed_and_length() {
        for (seed, minutes) in [(1, 10), (2, 10), (3, 60), (4, 90)] {
            let expected = 8.0 * 60.0 * minutes as f64;
            let got = run(seed, minutes).len() as f64;
            assert!(
                (got - expected).abs() < 4.0 * expected.sqrt(),
                "{got} arrivals, expected {expected}"
            );
        }
    }

    #[test]
    fn slots_differ_in_rate_as_the_table_says() {
        let shape = Shape::azure_code_2023().unwrap();
        let length = Duration::from_secs(3430);
        let levels = shape.stretch(5, length);
        let mut counts = vec![0.0; levels.len()];
        for arrival in Arrivals::new(&shape, 5, 8.0, length, 300) {
            counts[(arrival.at.as_secs() / 10) as usize] += 1.0;
        }
        let (mut busy, mut calm) = ((0.0, 0.0), (0.0, 0.0));
        for (count, level) in counts.iter().zip(&levels) {
            let side = if *level > 1.0 { &mut busy } else { &mut calm };
            *side = (side.0 + count, side.1 + level * 80.0);
        }
        for (got, expected) in [busy, calm] {
            assert!((got / expected - 1.0f64).abs() < 0.05, "{got} of {expected}");
        }
    }

    #[test]
    fn a_users_pauses_are_numbered_without_gaps() {
        let arrivals = run(6, 5);
        let mut of_user = arrivals
            .iter()
            .filter(|arrival| arrival.user == 17)
            .map(|arrival| arrival.nth);
        assert_eq!(of_user.next(), Some(0));
        assert_eq!(of_user.next(), Some(1));
    }
}
