//! Computes when a packet arrives, or whether it is dropped. Pure, without a clock.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

/// The properties of a link, for each direction separately.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditions {
    /// Bits of IP packets per second; `None`: unlimited.
    pub rate_bits: Option<u64>,
    /// One way; a round trip takes it twice.
    pub delay: Duration,
    /// Share of packets lost. A lost packet still uses the link.
    pub loss: f64,
    /// Bytes that may wait for the link. Further packets are dropped.
    pub queue_bytes: u64,
}

impl Conditions {
    /// As fast as this machine can forward.
    pub const FREE: Self = Self {
        rate_bits: None,
        delay: Duration::ZERO,
        loss: 0.0,
        queue_bytes: u64::MAX,
    };
}

/// The result for one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    Due(Duration),
    Lost,
    /// Dropped, because the queue was full.
    Full,
}

/// One direction of a link. Times are relative to any fixed moment.
pub struct Wire {
    /// When the last packet has been sent.
    free_at: Duration,
    random: SmallRng,
}

impl Wire {
    pub fn new(seed: u64) -> Self {
        Self {
            free_at: Duration::ZERO,
            random: SmallRng::seed_from_u64(seed),
        }
    }

    /// A packet enters at `now`, which must not be earlier than for the previous one.
    pub fn enter(&mut self, now: Duration, bytes: usize, conditions: &Conditions) -> Delivery {
        if let Some(rate_bits) = conditions.rate_bits {
            let waiting = self.free_at.saturating_sub(now);
            if bytes_in(waiting, rate_bits).saturating_add(bytes as u64) > conditions.queue_bytes {
                return Delivery::Full;
            }
            let nanos = bytes as u64 * 8 * 1_000_000_000 / rate_bits.max(1);
            self.free_at = self.free_at.max(now) + Duration::from_nanos(nanos);
        } else {
            self.free_at = now;
        }
        if conditions.loss > 0.0 && self.random.random_bool(conditions.loss.min(1.0)) {
            return Delivery::Lost;
        }
        Delivery::Due(self.free_at + conditions.delay)
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
    /// One kilobyte per millisecond.
    const SLOW: Conditions = Conditions {
        rate_bits: Some(8_000_000),
        delay: Duration::from_millis(50),
        loss: 0.0,
        queue_bytes: 3000,
    };

    #[test]
    fn packets_are_sent_one_after_the_other_and_arrive_after_the_delay() {
        let mut wire = Wire::new(1);
        assert_eq!(wire.enter(MS, 1000, &SLOW), Delivery::Due(52 * MS));
        assert_eq!(wire.enter(MS, 500, &SLOW), Delivery::Due(52 * MS + MS / 2));
        assert_eq!(
            wire.enter(10 * MS, 1000, &SLOW),
            Delivery::Due(61 * MS),
            "the link was idle in between"
        );
    }

    #[test]
    fn a_packet_for_a_full_queue_is_dropped_and_uses_no_time() {
        let mut wire = Wire::new(1);
        for sent in 1..=3 {
            assert_eq!(wire.enter(MS, 1000, &SLOW), Delivery::Due((51 + sent) * MS));
        }
        assert_eq!(wire.enter(MS, 1000, &SLOW), Delivery::Full);
        assert_eq!(wire.enter(2 * MS, 1000, &SLOW), Delivery::Due(55 * MS));
    }

    #[test]
    fn the_configured_share_is_lost_and_a_seed_loses_the_same_packets() {
        let lossy = Conditions {
            loss: 0.01,
            ..Conditions::FREE
        };
        let lost = |seed| {
            let mut wire = Wire::new(seed);
            let packets = 0..100_000u64;
            packets
                .filter(|_| wire.enter(MS, 1500, &lossy) == Delivery::Lost)
                .collect::<Vec<_>>()
        };
        // ten standard deviations
        assert!((690..1310).contains(&lost(7).len()), "{}", lost(7).len());
        assert_eq!(lost(7), lost(7));
        assert_ne!(lost(7), lost(8));
    }
}
