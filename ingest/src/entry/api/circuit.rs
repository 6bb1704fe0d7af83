//! A circuit breaker in front of the log. After some failures in a row, requests are refused at
//! once, and one send per interval probes whether the log is back. Without it every request would
//! wait for its timeout and hold memory.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Circuit {
    failures_max: u32,
    probe_interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In a row.
    failures: u32,
    /// The time of the next probe. `None`: the circuit is closed.
    probe_at: Option<Instant>,
}

impl State {
    fn allows(&self, now: Instant) -> bool {
        self.probe_at.is_none_or(|probe_at| now >= probe_at)
    }
}

impl Circuit {
    /// Opens after `failures_max` failures in a row, and then allows one send per `probe_interval`.
    pub(super) fn new(failures_max: u32, probe_interval: Duration) -> Self {
        Self {
            failures_max,
            probe_interval,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a send would be allowed at `now`.
    pub(super) fn allows(&self, now: Instant) -> bool {
        self.state().allows(now)
    }

    /// Call before each send. Returns whether it is allowed, and takes the probe if the circuit is
    /// open. The caller reports the result with [`Self::succeeded`] or [`Self::failed`], unless the
    /// send is canceled.
    pub(super) fn try_send(&self, now: Instant) -> bool {
        let mut state = self.state();
        let allowed = state.allows(now);
        if allowed && let Some(probe_at) = &mut state.probe_at {
            *probe_at = now + self.probe_interval;
        }
        allowed
    }

    pub(super) fn succeeded(&self) {
        let mut state = self.state();
        state.failures = 0;
        if state.probe_at.take().is_some() {
            tracing::info!("the log is available again");
            metrics::gauge!("springtide_ingest_circuit_open").set(0.0);
        }
    }

    pub(super) fn failed(&self, now: Instant) {
        let mut state = self.state();
        state.failures = state.failures.saturating_add(1);
        if state.failures >= self.failures_max && state.probe_at.is_none() {
            state.probe_at = Some(now + self.probe_interval);
            tracing::warn!(
                failures = state.failures,
                "the log is unavailable, refusing requests at once"
            );
            metrics::gauge!("springtide_ingest_circuit_open").set(1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(1);

    fn opened(at: Instant) -> Circuit {
        let circuit = Circuit::new(3, INTERVAL);
        for _ in 0..3 {
            assert!(circuit.try_send(at));
            circuit.failed(at);
        }
        circuit
    }

    #[test]
    fn only_failures_in_a_row_open_it() {
        let now = Instant::now();
        let circuit = Circuit::new(3, INTERVAL);
        for _ in 0..10 {
            circuit.failed(now);
            circuit.failed(now);
            circuit.succeeded();
        }
        assert!(circuit.try_send(now));
        circuit.failed(now);
        circuit.failed(now);
        assert!(circuit.try_send(now));
        circuit.failed(now);
        assert!(!circuit.try_send(now));
    }

    #[test]
    fn a_thousand_requests_a_second_for_an_hour_make_one_probe_a_second() {
        let start = Instant::now();
        let circuit = opened(start);
        let mut probes = 0;
        for millisecond in 0..3_600_000 {
            let now = start + Duration::from_millis(millisecond);
            if circuit.allows(now) {
                assert!(circuit.try_send(now));
                probes += 1;
                circuit.failed(now);
            }
        }
        assert_eq!(probes, 3_599);
    }

    #[test]
    fn only_one_of_many_concurrent_sends_is_the_probe() {
        let start = Instant::now();
        let circuit = opened(start);
        let later = start + INTERVAL;
        let allowed = (0..100).filter(|_| circuit.try_send(later)).count();
        assert_eq!(allowed, 1);
        // The canceled probe does not block the next one.
        assert!(circuit.try_send(later + INTERVAL));
    }

    #[test]
    fn one_acknowledgement_closes_it() {
        let start = Instant::now();
        let circuit = opened(start);
        assert!(!circuit.allows(start));
        circuit.succeeded();
        assert!(circuit.allows(start));
        assert!(circuit.try_send(start));
        circuit.failed(start);
        assert!(circuit.try_send(start), "the count starts over");
    }
}
