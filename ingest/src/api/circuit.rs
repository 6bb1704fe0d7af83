//! A log that does not acknowledge is not asked by every request: after some failures in a row requests are refused at once,
//! and one in a while goes through to see whether the log is back. Without it each request would wait for its timeout, and
//! what waits takes memory.

use std::sync::{Mutex, PoisonError};
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
    /// While it is open: from when on the next probe may go.
    probe_at: Option<Instant>,
}

/// The log is away, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Open;

impl Circuit {
    /// Opens after `failures_max` failures in a row and then lets one send through in every `probe_interval`.
    pub(super) fn new(failures_max: u32, probe_interval: Duration) -> Self {
        Self {
            failures_max,
            probe_interval,
            state: Mutex::default(),
        }
    }

    /// Whether a send would go through at `now`; takes no probe.
    pub(super) fn look(&self, now: Instant) -> Result<(), Open> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.probe_at {
            Some(probe_at) if now < probe_at => Err(Open),
            _ => Ok(()),
        }
    }

    /// Before each send; its end is told to [`Self::acknowledged`] or [`Self::failed`]. One that was given up needs to tell
    /// nothing: the next probe goes all the same.
    pub(super) fn pass(&self, now: Instant) -> Result<(), Open> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.probe_at {
            None => Ok(()),
            Some(probe_at) if now < probe_at => Err(Open),
            Some(_) => {
                state.probe_at = Some(now + self.probe_interval);
                Ok(())
            }
        }
    }

    pub(super) fn acknowledged(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failures = 0;
        if state.probe_at.take().is_some() {
            tracing::info!("the log acknowledges again");
            metrics::gauge!("springtide_ingest_circuit_open").set(0.0);
        }
    }

    pub(super) fn failed(&self, now: Instant) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failures = state.failures.saturating_add(1);
        if state.failures >= self.failures_max && state.probe_at.is_none() {
            state.probe_at = Some(now + self.probe_interval);
            tracing::warn!(
                failures = state.failures,
                "the log is away, requests are refused at once"
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
            circuit.pass(at).unwrap();
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
            circuit.acknowledged();
        }
        assert_eq!(circuit.pass(now), Ok(()));
        circuit.failed(now);
        circuit.failed(now);
        assert_eq!(circuit.pass(now), Ok(()));
        circuit.failed(now);
        assert_eq!(circuit.pass(now), Err(Open));
    }

    #[test]
    fn a_thousand_requests_a_second_for_an_hour_are_one_probe_a_second() {
        let start = Instant::now();
        let circuit = opened(start);
        let mut probes = 0;
        for millisecond in 0..3_600_000 {
            let now = start + Duration::from_millis(millisecond);
            if circuit.look(now).is_ok() {
                circuit.pass(now).unwrap();
                probes += 1;
                circuit.failed(now);
            }
        }
        assert_eq!(probes, 3_599);
    }

    #[test]
    fn of_many_at_the_same_moment_one_is_the_probe() {
        let start = Instant::now();
        let circuit = opened(start);
        let later = start + INTERVAL;
        let passed = (0..100).filter(|_| circuit.pass(later).is_ok()).count();
        assert_eq!(passed, 1);
        // The probe was given up without a word; the next one goes all the same.
        assert_eq!(circuit.pass(later + INTERVAL), Ok(()));
    }

    #[test]
    fn one_acknowledgement_closes_it() {
        let start = Instant::now();
        let circuit = opened(start);
        assert_eq!(circuit.look(start), Err(Open));
        circuit.acknowledged();
        assert_eq!(circuit.look(start), Ok(()));
        assert_eq!(circuit.pass(start), Ok(()));
        circuit.failed(start);
        assert_eq!(circuit.pass(start), Ok(()), "the count starts over");
    }
}
