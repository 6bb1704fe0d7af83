//! Two alarms on the logged log-probabilities of the head's samples. Neither stops anything.
//!
//! - `ours`: our own engine computes what the trainer does, so any difference at all means another
//!   machine code, other weights, or somebody who changes what is logged.
//! - `remote`: other engines differ by rounding. The mean k3 over the tokens of an engine's latest samples
//!   says by how much; above a bound their distribution has drifted. Each token counts with at most
//!   [`TOKEN_K3_MAX`](crate::learn::mismatch::TOKEN_K3_MAX), so that it takes many. Quarantined samples
//!   do not count: they have an alarm of their own.
//!
//! The windows are empty when a run is opened.

use crate::learn::mismatch::SampleMismatch;
use crate::share_alarm::WINDOW;
use runs::alarm::Alarm;
use serde_json::json;
use sqlx::PgPool;
use std::collections::{BTreeMap, VecDeque};
use uuid::Uuid;

/// Fewer samples do not end an alarm, and have no mean.
const SAMPLES_MIN: usize = 32;

/// Whose engine sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engines {
    Ours,
    Remote,
}

impl Engines {
    /// The alarm's name in `run_event.data`, and the label of its metrics.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Engines::Ours => ("parity_ours", "ours"),
            Engines::Remote => ("parity_remote", "remote"),
        }
    }
}

/// One alarm and its window.
#[derive(Debug)]
pub(crate) struct Parity {
    engines: Engines,
    /// With their engines, newest last.
    latest: VecDeque<(Option<String>, SampleMismatch)>,
    alarm: Alarm,
}

impl Parity {
    /// With the state of the alarm when the run was last executed.
    pub async fn open(pool: &PgPool, run: Uuid, engines: Engines) -> sqlx::Result<Self> {
        let alarm = Alarm::open(pool, run, engines.names().0).await?;
        Ok(Parity::new(engines, alarm))
    }

    fn new(engines: Engines, alarm: Alarm) -> Self {
        Parity {
            engines,
            latest: VecDeque::new(),
            alarm,
        }
    }

    /// `accepted`: the sample is not quarantined.
    pub fn record(&mut self, engine: Option<&str>, mismatch: SampleMismatch, accepted: bool) {
        if self.engines == Engines::Remote && !accepted {
            return;
        }
        if self.latest.len() == WINDOW {
            self.latest.pop_front();
        }
        self.latest.push_back((engine.map(str::to_owned), mismatch));
    }

    /// The engine that is farthest off among those with enough samples in the window, its samples, and their mean
    /// k3 over tokens, nats. Each token counts with at most `TOKEN_K3_MAX`.
    fn farthest(&self) -> Option<(&str, usize, f64)> {
        let mut sums: BTreeMap<&str, (usize, usize, f64)> = BTreeMap::new();
        for (engine, one) in &self.latest {
            let (samples, tokens, k3) = sums.entry(engine.as_deref().unwrap_or("ours")).or_default();
            *samples += 1;
            *tokens += one.tokens;
            *k3 += one.k3 * one.tokens as f64;
        }
        let enough = sums.into_iter().filter(|(_, (samples, ..))| *samples >= SAMPLES_MIN);
        let means = enough.map(|(engine, (samples, tokens, k3))| (engine, samples, k3 / tokens.max(1) as f64));
        means.max_by(|(.., a), (.., b)| a.total_cmp(b))
    }

    fn k3(&self) -> f64 {
        self.farthest().map_or(0.0, |(.., k3)| k3)
    }

    /// Samples of the window with any difference.
    fn inexact(&self) -> usize {
        self.latest.iter().filter(|(_, one)| !one.is_exact()).count()
    }

    /// Whether the alarm is to be on now. Ours begins with one sample that is not exact, and ends when
    /// none of the window is left. The other begins above `k3_max`, and ends at half of it.
    fn is_off(&self, k3_max: f64) -> bool {
        let (enough, is_active) = (self.latest.len() >= SAMPLES_MIN, self.alarm.is_active());
        match self.engines {
            Engines::Ours => self.inexact() > 0 || is_active && !enough,
            Engines::Remote if self.farthest().is_none() => is_active,
            Engines::Remote if is_active => self.k3() > k3_max / 2.0,
            Engines::Remote => self.k3() > k3_max,
        }
    }

    /// Begins or ends the alarm, as an event of the run.
    pub async fn watch(&mut self, pool: &PgPool, run: Uuid, line: &str, k3_max: f64) -> sqlx::Result<()> {
        let is_off = self.is_off(k3_max);
        let (k3, message) = (self.k3(), self.message(is_off, k3_max));
        let data = json!({"k3": k3, "inexact": self.inexact(), "samples": self.latest.len()});
        self.alarm.set(pool, run, is_off, &message, data).await?;
        let labels = [("line", line.to_owned()), ("engine", self.engines.names().1.to_owned())];
        metrics::gauge!("springtide_train_parity_alarm", &labels).set(self.alarm.gauge());
        metrics::gauge!("springtide_train_parity_k3_nats", &labels).set(k3);
        Ok(())
    }

    /// What a person reads when it begins or ends.
    fn message(&self, begins: bool, k3_max: f64) -> String {
        let (inexact, latest) = (self.inexact(), self.latest.len());
        let (engine, samples, k3) = self.farthest().unwrap_or(("other engines", 0, 0.0));
        match (self.engines, begins) {
            (Engines::Ours, true) => format!(
                "{inexact} of the latest {latest} samples of our own engine do not have the trainer's log-probabilities, \
                 which are equal to the last bit on every machine: compare the builds and `policy.compute` of `serve` and \
                 `train`, and see which replica sampled them (`select g.replica, count(*) from disposition d join \
                 generation g on g.id = d.generation_id where d.code = 'quarantined_logprob' group by g.replica`). An \
                 engine that is not ours names itself in `engine`"
            ),
            (Engines::Ours, false) => {
                format!("the latest {latest} samples of our own engine have the trainer's log-probabilities")
            }
            (Engines::Remote, true) => format!(
                "log-probabilities of {engine} have drifted: mean k3 of its latest {samples} samples is {k3:.2e} nats, more \
                 than {k3_max:.2e}: compare its dtype and version with before, and look at the mismatch of the steps"
            ),
            (Engines::Remote, false) => {
                format!("mean k3 of the latest {samples} samples of {engine} is {k3:.2e} nats")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::guards;
    use runs::settings::Limits;

    fn parity(engines: Engines, active: bool) -> Parity {
        Parity::new(engines, Alarm::new(engines.names().0, active))
    }

    /// Whether the alarm begins or ends.
    fn change(parity: &mut Parity) -> Option<bool> {
        let is_off = parity.is_off(1e-3);
        let was_off = std::mem::replace(&mut parity.alarm, Alarm::new("parity", is_off)).is_active();
        (is_off != was_off).then_some(is_off)
    }

    fn mismatch(k3: f64, difference_max: f64) -> SampleMismatch {
        SampleMismatch {
            tokens: 4,
            k3,
            difference_max,
        }
    }

    #[test]
    fn one_inexact_sample_of_our_engine_begins_the_alarm_until_it_has_left_the_window() {
        let mut parity = parity(Engines::Ours, false);
        parity.record(Some("vllm"), mismatch(0.0, 0.0), true);
        assert_eq!(change(&mut parity), None);
        parity.record(Some("vllm"), mismatch(1e-15, 1e-7), true);
        assert_eq!(change(&mut parity), Some(true));
        assert!(parity.message(true, 1e-3).starts_with("1 of the latest 2 samples"));
        for _ in 0..WINDOW - 1 {
            parity.record(Some("vllm"), mismatch(0.0, 0.0), true);
        }
        assert_eq!(change(&mut parity), None, "it is still in the window");
        parity.record(Some("vllm"), mismatch(0.0, 0.0), true);
        assert_eq!(change(&mut parity), Some(false));
        parity.record(Some("vllm"), mismatch(f64::NAN, f64::NAN), true);
        assert_eq!(change(&mut parity), Some(true));
    }

    #[test]
    fn other_engines_are_judged_by_their_mean_and_never_by_one_sample() {
        let mut parity = parity(Engines::Remote, false);
        // one token at log v = +5 has a k3 of 142, and its window a mean of 0.017
        let tokens = |log_v: f32| (0..16).map(move |at| (-6.0, if at == 0 { -6.0 + log_v } else { -6.0 }));
        let outlier = SampleMismatch::of(tokens(5.0));
        assert!(guards::accepts(&Limits::default(), false, &outlier));
        parity.record(Some("vllm"), outlier, true);
        assert_eq!(change(&mut parity), None, "one sample is no distribution");
        for _ in 0..WINDOW - 1 {
            parity.record(Some("vllm"), SampleMismatch::of(tokens(0.02)), true);
            assert_eq!(change(&mut parity), None);
        }
        assert_eq!(parity.latest.len(), WINDOW, "the outlier is still there");
        assert!(parity.k3() > 1e-5 && parity.k3() < 1e-4, "{}", parity.k3());
        for _ in 0..WINDOW {
            parity.record(Some("vllm"), mismatch(4e-3, 0.2), true);
        }
        assert_eq!(change(&mut parity), Some(true));
        for _ in 0..WINDOW {
            parity.record(Some("vllm"), mismatch(1e-5, 0.02), true);
        }
        assert_eq!(change(&mut parity), Some(false));
    }

    #[test]
    fn a_quarantined_sample_counts_for_our_engine_and_not_for_others() {
        let wrong = mismatch(0.2, 12.0);
        for (engines, counted) in [(Engines::Ours, 1), (Engines::Remote, 0)] {
            let mut parity = parity(engines, false);
            parity.record(Some("vllm"), wrong, false);
            assert_eq!(parity.latest.len(), counted, "{engines:?}");
        }
    }

    #[test]
    fn an_alarm_that_was_on_stays_on_until_there_are_enough_samples() {
        let mut parity = parity(Engines::Ours, true);
        for _ in 0..SAMPLES_MIN - 1 {
            parity.record(Some("vllm"), mismatch(0.0, 0.0), true);
            assert_eq!(change(&mut parity), None);
        }
        parity.record(Some("vllm"), mismatch(0.0, 0.0), true);
        assert_eq!(change(&mut parity), Some(false));
    }
}
