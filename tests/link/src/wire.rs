//! When a packet arrives, if it does: arithmetic without a clock.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

/// What a link does to packets, each way for itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditions {
    /// Bits of IP packets a second; none: as fast as they come.
    pub rate_bits: Option<u64>,
    /// From one end to the other; there and back take it twice.
    pub delay: Duration,
    /// Share of the packets that do not arrive. They take their time on the link.
    pub loss: f64,
    /// Bytes that may wait for the link; a packet that finds no room is dropped.
    pub queue_bytes: u64,
}

impl Conditions {
    /// As fast as this machine forwards.
    pub const FREE: Self = Self {
        rate_bits: None,
        delay: Duration::ZERO,
        loss: 0.0,
        queue_bytes: u64::MAX,
    };
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Due(Duration),
    Lost,
    /// There was no room in the queue.
    Full,
}

/// One way of a link. Times count from any one moment.
pub struct Wire {
    /// When the last packet will have left.
    free_at: Duration,
    dice: SmallRng,
}

impl Wire {
    pub fn new(seed: u64) -> Self {
        Self {
            free_at: Duration::ZERO,
            dice: SmallRng::seed_from_u64(seed),
        }
    }

    /// A packet that comes at `now`, no earlier than the one before.
    pub fn enter(&mut self, now: Duration, bytes: usize, conditions: &Conditions) -> Fate {
        if let Some(rate_bits) = conditions.rate_bits {
            let waiting = self.free_at.saturating_sub(now);
            if bytes_in(waiting, rate_bits).saturating_add(bytes as u64) > conditions.queue_bytes {
                return Fate::Full;
            }
            let nanos = bytes as u64 * 8 * 1_000_000_000 / rate_bits.max(1);
            self.free_at = self.free_at.max(now) + Duration::from_nanos(nanos);
        } else {
            self.free_at = now;
        }
        if conditions.loss > 0.0 && self.dice.random_bool(conditions.loss.min(1.0)) {
            return Fate::Lost;
        }
        Fate::Due(self.free_at + conditions.delay)
    }
}

fn bytes_in(time: Duration, rate_bits: u64) -> u64 {
    let bytes = time.as_nanos() * u128::from(rate_bits) / 8_000_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    /// A kilobyte in a millisecond.
    const SLOW: Conditions = Conditions {
        rate_bits: Some(8_000_000),
        delay: Duration::from_millis(50),
        loss: 0.0,
        queue_bytes: 3000,
    };

    #[test]
    fn packets_leave_one_after_the_other_and_arrive_after_the_delay() {
        let mut wire = Wire::new(1);
        assert_eq!(wire.enter(MS, 1000, &SLOW), Fate::Due(52 * MS));
        assert_eq!(wire.enter(MS, 500, &SLOW), Fate::Due(52 * MS + MS / 2));
        assert_eq!(
            wire.enter(10 * MS, 1000, &SLOW),
            Fate::Due(61 * MS),
            "the link was idle in between"
        );
    }

    #[test]
    fn what_finds_no_room_is_dropped_and_takes_no_time() {
        let mut wire = Wire::new(1);
        for sent in 1..=3 {
            assert_eq!(wire.enter(MS, 1000, &SLOW), Fate::Due((51 + sent) * MS));
        }
        assert_eq!(wire.enter(MS, 1000, &SLOW), Fate::Full);
        assert_eq!(wire.enter(2 * MS, 1000, &SLOW), Fate::Due(55 * MS));
    }

    #[test]
    fn the_share_that_is_lost_is_the_one_asked_for_and_the_same_for_a_seed() {
        let lossy = Conditions {
            loss: 0.01,
            ..Conditions::FREE
        };
        let lost = |seed| {
            let mut wire = Wire::new(seed);
            let packets = 0..100_000u64;
            packets
                .filter(|_| wire.enter(MS, 1500, &lossy) == Fate::Lost)
                .collect::<Vec<_>>()
        };
        // Ten standard deviations.
        assert!((690..1310).contains(&lost(7).len()), "{}", lost(7).len());
        assert_eq!(lost(7), lost(7));
        assert_ne!(lost(7), lost(8));
    }
}
