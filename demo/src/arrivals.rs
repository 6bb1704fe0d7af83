//! When users pause: a Poisson process with a constant mean rate. It is open loop, so a slow server
//! does not slow the arrivals down.

use std::time::Duration;

use crate::random::Draws;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Since the start of the run.
    pub at: Duration,
    pub user: usize,
    /// How many pauses this user had before.
    pub nth: u64,
}

/// The arrivals of one run, in order. They depend only on the arguments.
#[derive(Debug)]
pub struct Arrivals {
    seed: u64,
    pauses_per_second: f64,
    length_seconds: f64,
    now_seconds: f64,
    drawn: u64,
    pauses_by_user: Vec<u64>,
}

impl Arrivals {
    pub fn new(seed: u64, pauses_per_second: f64, length: Duration, users: usize) -> Self {
        Self {
            seed,
            pauses_per_second,
            length_seconds: length.as_secs_f64(),
            now_seconds: 0.0,
            drawn: 0,
            pauses_by_user: vec![0; users],
        }
    }
}

impl Iterator for Arrivals {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let mut draws = Draws::new("springtide demo arrival 1", &[self.seed, self.drawn]);
        self.now_seconds += draws.exponential() / self.pauses_per_second;
        if self.now_seconds >= self.length_seconds {
            return None;
        }
        self.drawn += 1;
        let user = draws.below(self.pauses_by_user.len());
        let nth = self.pauses_by_user[user];
        self.pauses_by_user[user] += 1;
        Some(Arrival {
            at: Duration::from_secs_f64(self.now_seconds),
            user,
            nth,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seed: u64, minutes: u64) -> Vec<Arrival> {
        Arrivals::new(seed, 8.0, Duration::from_secs(60 * minutes), 300).collect()
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
    fn the_mean_rate_is_the_one_asked_for() {
        for (seed, minutes) in [(1, 10), (2, 10), (3, 60)] {
            let expected = 8.0 * 60.0 * minutes as f64;
            let got = run(seed, minutes).len() as f64;
            assert!(
                (got - expected).abs() < 4.0 * expected.sqrt(),
                "{got} arrivals, expected {expected}"
            );
        }
    }

    #[test]
    fn the_pauses_of_a_user_are_numbered_without_gaps() {
        let numbers = run(6, 5)
            .into_iter()
            .filter(|arrival| arrival.user == 17)
            .map(|arrival| arrival.nth);
        assert!(numbers.clone().eq(0..numbers.count() as u64));
    }
}
