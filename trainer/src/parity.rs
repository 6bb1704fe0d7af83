//! Two alarms on the logged log-probabilities of the head's samples. Neither stops anything.
//!
//! - `ours`: our own engine computes what the trainer does, so any difference at all means another
//!   machine code, other weights, or somebody who changes what is logged.
//! - `remote`: other engines differ by rounding. The mean k3 over the tokens of the latest samples says
//!   by how much; above a bound their distribution has drifted. Each token counts with at most
//!   [`TOKEN_K3_MAX`](crate::learn::mismatch::TOKEN_K3_MAX), so that it takes many. Quarantined samples
//!   do not count: they have an alarm of their own.
//!
//! Pure. The windows are empty when a run is opened.

use crate::learn::mismatch::SampleMismatch;
use crate::share_alarm::WINDOW;
use std::collections::VecDeque;

/// Fewer samples do not end an alarm, and have no mean.
const SAMPLES_MIN: usize = 32;

/// Whose engine sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engines {
    Ours,
    Remote,
}

impl Engines {
    pub const ALL: [Engines; 2] = [Engines::Ours, Engines::Remote];

    /// The label of the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Engines::Ours => "ours",
            Engines::Remote => "remote",
        }
    }

    /// The alarm's name in `run_event.data`.
    pub fn alarm(self) -> &'static str {
        match self {
            Engines::Ours => "parity_ours",
            Engines::Remote => "parity_remote",
        }
    }
}

/// One alarm and its window.
#[derive(Debug)]
pub(crate) struct Parity {
    engines: Engines,
    /// Newest last.
    latest: VecDeque<SampleMismatch>,
    active: bool,
}

/// The alarm begins or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Begins,
    Ends,
}

impl Parity {
    /// `active`: the state of the alarm when the run was last executed.
    pub fn new(engines: Engines, active: bool) -> Self {
        Parity {
            engines,
            latest: VecDeque::new(),
            active,
        }
    }

    /// `accepted`: the sample is not quarantined.
    pub fn record(&mut self, mismatch: SampleMismatch, accepted: bool) {
        if self.engines == Engines::Remote && !accepted {
            return;
        }
        if self.latest.len() == WINDOW {
            self.latest.pop_front();
        }
        self.latest.push_back(mismatch);
    }

    /// Mean k3 over the tokens of the window, nats. Each counts with at most `TOKEN_K3_MAX`.
    pub fn k3(&self) -> f64 {
        let tokens: usize = self.latest.iter().map(|one| one.tokens).sum();
        let sum: f64 = self.latest.iter().map(|one| one.k3 * one.tokens as f64).sum();
        sum / tokens.max(1) as f64
    }

    /// Samples of the window with any difference.
    pub fn inexact(&self) -> usize {
        self.latest.iter().filter(|one| !one.is_exact()).count()
    }

    /// Samples of the window.
    pub fn len(&self) -> usize {
        self.latest.len()
    }

    /// Whether the alarm begins or ends. Ours begins with one sample that is not exact, and ends when
    /// none of the window is left. The other begins above `k3_max`, and ends at half of it.
    pub fn change(&mut self, k3_max: f64) -> Option<Change> {
        let enough = self.latest.len() >= SAMPLES_MIN;
        let (begins, ends) = match self.engines {
            Engines::Ours => (self.inexact() > 0, enough && self.inexact() == 0),
            Engines::Remote => {
                let k3 = self.k3();
                (enough && k3 > k3_max, enough && k3 <= k3_max / 2.0)
            }
        };
        let change = match self.active {
            false if begins => Change::Begins,
            true if ends => Change::Ends,
            _ => return None,
        };
        self.active = change == Change::Begins;
        Some(change)
    }

    /// Whether the alarm has begun and not ended.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// What a person reads when it begins or ends.
    pub fn message(&self, change: Change, k3_max: f64) -> String {
        let (inexact, latest, k3) = (self.inexact(), self.len(), self.k3());
        match (self.engines, change) {
            (Engines::Ours, Change::Begins) => format!(
                "{inexact} of the latest {latest} samples of our own engine do not have the trainer's log-probabilities, \
                 which are equal to the last bit on every machine: compare the builds and `policy.compute` of `serve` and \
                 `train`, and see which replica sampled them (`select g.replica, count(*) from disposition d join \
                 generation g on g.id = d.generation_id where d.code = 'quarantined_logprob' group by g.replica`). An \
                 engine that is not ours names itself in `engine`"
            ),
            (Engines::Ours, Change::Ends) => {
                format!("the latest {latest} samples of our own engine have the trainer's log-probabilities")
            }
            (Engines::Remote, Change::Begins) => format!(
                "log-probabilities of other engines have drifted: mean k3 of the latest {latest} samples is {k3:.2e} nats, \
                 more than {k3_max:.2e}: compare their dtype and version with before, and look at the mismatch of the steps"
            ),
            (Engines::Remote, Change::Ends) => {
                format!("mean k3 of the latest {latest} samples of other engines is {k3:.2e} nats")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::guards;
    use runs::settings::Limits;

    fn mismatch(k3: f64, difference_max: f64) -> SampleMismatch {
        SampleMismatch {
            tokens: 4,
            k3,
            difference_max,
        }
    }

    #[test]
    fn one_inexact_sample_of_our_engine_begins_the_alarm_until_it_has_left_the_window() {
        let mut parity = Parity::new(Engines::Ours, false);
        parity.record(mismatch(0.0, 0.0), true);
        assert_eq!(parity.change(1e-3), None);
        parity.record(mismatch(1e-15, 1e-7), true);
        assert_eq!(parity.change(1e-3), Some(Change::Begins));
        assert!(
            parity
                .message(Change::Begins, 1e-3)
                .starts_with("1 of the latest 2 samples")
        );
        for _ in 0..WINDOW - 1 {
            parity.record(mismatch(0.0, 0.0), true);
        }
        assert_eq!(parity.change(1e-3), None, "it is still in the window");
        parity.record(mismatch(0.0, 0.0), true);
        assert_eq!(parity.change(1e-3), Some(Change::Ends));
        parity.record(mismatch(f64::NAN, f64::NAN), true);
        assert_eq!(parity.change(1e-3), Some(Change::Begins));
    }

    #[test]
    fn other_engines_are_judged_by_their_mean_and_never_by_one_sample() {
        let mut parity = Parity::new(Engines::Remote, false);
        // one token at log v = +5 has a k3 of 142, and its window a mean of 0.017
        let tokens = |log_v: f32| (0..16).map(move |at| (-6.0, if at == 0 { -6.0 + log_v } else { -6.0 }));
        let outlier = SampleMismatch::of(tokens(5.0));
        assert!(guards::accepts(&Limits::default(), false, &outlier));
        parity.record(outlier, true);
        assert_eq!(parity.change(1e-3), None, "one sample is no distribution");
        for _ in 0..WINDOW - 1 {
            parity.record(SampleMismatch::of(tokens(0.02)), true);
            assert_eq!(parity.change(1e-3), None);
        }
        assert_eq!(parity.len(), WINDOW, "the outlier is still there");
        assert!(parity.k3() > 1e-5 && parity.k3() < 1e-4, "{}", parity.k3());
        for _ in 0..WINDOW {
            parity.record(mismatch(4e-3, 0.2), true);
        }
        assert_eq!(parity.change(1e-3), Some(Change::Begins));
        for _ in 0..WINDOW {
            parity.record(mismatch(1e-5, 0.02), true);
        }
        assert_eq!(parity.change(1e-3), Some(Change::Ends));
    }

    #[test]
    fn a_quarantined_sample_counts_for_our_engine_and_not_for_others() {
        let wrong = mismatch(0.2, 12.0);
        for (engines, counted) in [(Engines::Ours, 1), (Engines::Remote, 0)] {
            let mut parity = Parity::new(engines, false);
            parity.record(wrong, false);
            assert_eq!(parity.len(), counted, "{engines:?}");
        }
    }

    #[test]
    fn an_alarm_that_was_on_stays_on_until_there_are_enough_samples() {
        let mut parity = Parity::new(Engines::Ours, true);
        for _ in 0..SAMPLES_MIN - 1 {
            parity.record(mismatch(0.0, 0.0), true);
            assert_eq!(parity.change(1e-3), None);
        }
        parity.record(mismatch(0.0, 0.0), true);
        assert_eq!(parity.change(1e-3), Some(Change::Ends));
        assert!(!parity.is_active());
    }
}
