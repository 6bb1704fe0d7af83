//! The database's clock, which all processes share, as seen from this host.
//!
//! One clock decides when something is over: Postgres'. The sink marks with it up to when the
//! tables hold the log, rows carry it as `stored_at`, and a generation closes one horizon after it
//! was stored. So the clock of a host that runs ingest does not matter. A producer's clock only
//! decides how its events compare with each other: which feedback is within a horizon.
//!
//! Clocks that disagree are reported: this host's with the database's as a gauge, producers' by
//! counting records whose times cannot be right.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use time::{Duration, OffsetDateTime};

use event_log::event;

/// Smaller differences are not reported.
const TOLERANCE: Duration = Duration::SECOND;
/// How long a producer may hold a record back: ours wait up to 5 s for an acknowledgement.
const HELD_BACK_MAX: Duration = Duration::seconds(6);
const WARNING_INTERVAL: std::time::Duration = std::time::Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// By how much the database's clock is ahead of this host's, microseconds.
    ahead_us: AtomicI64,
    host_warning: Warning,
    producer_warning: Warning,
}

/// The times of a record that must agree with the database's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// The record's timestamp: by the clock of its producer, or of the broker.
    pub stamped_at: Option<OffsetDateTime>,
    /// The event's time, if it can be read.
    pub event_at: Option<OffsetDateTime>,
    /// The record was written after this time of the database, if that is known.
    pub written_after: Option<OffsetDateTime>,
}

impl Clock {
    /// The database's time, estimated. This host's before the first observation.
    pub(crate) fn now(&self) -> OffsetDateTime {
        event::now() + self.ahead()
    }

    /// The later of the database's time and this host's.
    pub(crate) fn latest(&self) -> OffsetDateTime {
        event::now() + self.ahead().max(Duration::ZERO)
    }

    /// By how much the database's clock is ahead of this host's. Zero if they may agree.
    pub(crate) fn ahead(&self) -> Duration {
        Duration::microseconds(self.ahead_us.load(Ordering::Relaxed))
    }

    /// The database answered with its time. This host asked and got the answer at the other two.
    pub(crate) fn observe(&self, database: OffsetDateTime, asked_at: OffsetDateTime, answered_at: OffsetDateTime) {
        let ahead = if database > answered_at {
            database - answered_at
        } else if database < asked_at {
            database - asked_at
        } else {
            Duration::ZERO
        };
        let ahead_us = i64::try_from(ahead.whole_microseconds()).unwrap_or(0);
        self.ahead_us.store(ahead_us, Ordering::Relaxed);
        let seconds = -ahead.as_seconds_f64();
        metrics::gauge!("springtide_ingest_clock_offset_seconds").set(seconds);
        if ahead.abs() > TOLERANCE && self.host_warning.is_due() {
            tracing::warn!(
                seconds,
                "this host's clock is ahead of the database's (behind, if negative)"
            );
        }
    }

    /// Reports a record whose times cannot be right.
    pub(crate) fn check(&self, times: Times, topic: &str, partition: i32) {
        let Some(seconds) = disagreement(times, self.now()) else {
            return;
        };
        let direction = if seconds > 0.0 { "ahead" } else { "behind" };
        metrics::counter!("springtide_ingest_clock_disagreements_total", "clock" => direction).increment(1);
        if self.producer_warning.is_due() {
            tracing::warn!(
                seconds,
                topic,
                partition,
                "a record's time is ahead of the database's clock (behind, if negative): \
                 a producer's clock is wrong, so its feedback may not count"
            );
        }
    }
}

/// By how many seconds the clock that wrote these times is ahead, if that is certain.
fn disagreement(times: Times, now: OffsetDateTime) -> Option<f64> {
    let latest = times.stamped_at.max(times.event_at)?;
    if latest > now + TOLERANCE {
        return Some((latest - now).as_seconds_f64());
    }
    let (stamped_at, written_after) = times.stamped_at.zip(times.written_after)?;
    (stamped_at + HELD_BACK_MAX < written_after).then(|| (stamped_at - written_after).as_seconds_f64())
}

/// Limits a warning to one per [`WARNING_INTERVAL`].
#[derive(Debug, Default)]
struct Warning(Mutex<Option<Instant>>);

impl Warning {
    fn is_due(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| last.elapsed() >= WARNING_INTERVAL);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> OffsetDateTime {
        OffsetDateTime::UNIX_EPOCH + Duration::seconds(seconds)
    }

    #[test]
    fn an_answer_that_took_long_says_nothing_about_the_clocks() {
        let clock = Clock::default();
        clock.observe(at(105), at(100), at(110));
        assert_eq!(clock.ahead(), Duration::ZERO);
        clock.observe(at(170), at(100), at(110));
        assert_eq!(clock.ahead(), Duration::MINUTE);
        assert!(clock.now() > event::now() + Duration::seconds(59));
        assert!(clock.latest() > event::now() + Duration::seconds(59));
        clock.observe(at(40), at(100), at(110));
        assert_eq!(clock.ahead(), -Duration::MINUTE);
        assert!(clock.now() < event::now() - Duration::seconds(59));
        assert!(clock.latest() >= event::now() - Duration::SECOND);
    }

    #[test]
    fn only_times_that_cannot_be_right_are_reported() {
        let times = |stamped: i64, event: i64, after: Option<i64>| Times {
            stamped_at: Some(at(stamped)),
            event_at: Some(at(event)),
            written_after: after.map(at),
        };
        let now = at(1_000);
        // A record of a backlog, and an event that a collector kept for long.
        assert_eq!(disagreement(times(10, 5, None), now), None);
        assert_eq!(disagreement(times(999, 5, Some(998)), now), None);
        // Held back by its producer.
        assert_eq!(disagreement(times(995, 995, Some(999)), now), None);
        assert_eq!(disagreement(times(900, 900, Some(990)), now), Some(-90.0));
        assert_eq!(disagreement(times(1_060, 900, None), now), Some(60.0));
        assert_eq!(disagreement(times(990, 1_060, Some(980)), now), Some(60.0));
        let unstamped = Times {
            stamped_at: None,
            ..times(0, 5, Some(990))
        };
        assert_eq!(disagreement(unstamped, now), None);
    }
}
