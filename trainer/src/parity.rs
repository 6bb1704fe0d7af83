//! Alarms on the logged log-probabilities of the head's samples, one for each engine. None stops anything.
//!
//! - `ours`: our own engine computes what the trainer does, so any difference at all means another
//!   machine code, other weights, or somebody who changes what is logged.
//! - by name, such as `vllm int4-sym-g32.1`: other engines differ by rounding. The mean k3 over the tokens of the latest samples says
//!   by how much; above a bound their distribution has drifted. Each token counts with at most
//!   [`TOKEN_K3_MAX`](crate::learn::mismatch::TOKEN_K3_MAX), so that it takes many. Quarantined samples
//!   do not count: they have an alarm of their own.
//!
//! The windows are empty when a run is opened.

use crate::learn::mismatch::SampleMismatch;
use crate::share_alarm::WINDOW;
use runs::alarm::Alarm;
use serde_json::json;
use sqlx::PgPool;
use std::collections::VecDeque;
use uuid::Uuid;

/// Fewer samples do not end an alarm, and have no mean.
const SAMPLES_MIN: usize = 32;

/// The alarm of one engine, and its window.
#[derive(Debug)]
pub(crate) struct Parity {
    /// As generations name it; `None`: ours.
    engine: Option<String>,
    /// Newest last.
    latest: VecDeque<SampleMismatch>,
    alarm: Alarm,
}

impl Parity {
    /// With the state of the alarm when the run was last executed.
    pub async fn open(pool: &PgPool, run: Uuid, engine: Option<String>) -> sqlx::Result<Self> {
        let alarm = Alarm::open(pool, run, format!("parity_{}", name(engine.as_deref()))).await?;
        Ok(Parity::new(engine, alarm))
    }

    fn new(engine: Option<String>, alarm: Alarm) -> Self {
        Parity {
            engine,
            latest: VecDeque::new(),
            alarm,
        }
    }

    /// `accepted`: the sample is not quarantined.
    pub fn record(&mut self, mismatch: SampleMismatch, accepted: bool) {
        if self.engine.is_some() && !accepted {
            return;
        }
        if self.latest.len() == WINDOW {
            self.latest.pop_front();
        }
        self.latest.push_back(mismatch);
    }

    /// Mean k3 over the tokens of the window, nats. Each counts with at most `TOKEN_K3_MAX`.
    fn k3(&self) -> f64 {
        let tokens: usize = self.latest.iter().map(|one| one.tokens).sum();
        let sum: f64 = self.latest.iter().map(|one| one.k3 * one.tokens as f64).sum();
        sum / tokens.max(1) as f64
    }

    /// Samples of the window with any difference.
    fn inexact(&self) -> usize {
        self.latest.iter().filter(|one| !one.is_exact()).count()
    }

    /// Whether the alarm is to be on now. Ours begins with one sample that is not exact, and ends when
    /// none of the window is left. The other begins above `k3_max`, and ends at half of it.
    fn is_off(&self, k3_max: f64) -> bool {
        let (enough, is_active) = (self.latest.len() >= SAMPLES_MIN, self.alarm.is_active());
        match self.engine {
            None => self.inexact() > 0 || is_active && !enough,
            Some(_) if !enough => is_active,
            Some(_) if is_active => self.k3() > k3_max / 2.0,
            Some(_) => self.k3() > k3_max,
        }
    }

    /// Begins or ends the alarm, as an event of the run.
    pub async fn watch(&mut self, pool: &PgPool, run: Uuid, line: &str, k3_max: f64) -> sqlx::Result<()> {
        let is_off = self.is_off(k3_max);
        let (k3, message) = (self.k3(), self.message(is_off, k3_max));
        let data = json!({"k3": k3, "inexact": self.inexact(), "samples": self.latest.len()});
        self.alarm.set(pool, run, is_off, &message, data).await?;
        let labels = [
            ("line", line.to_owned()),
            ("engine", name(self.engine.as_deref()).to_owned()),
        ];
        metrics::gauge!("springtide_train_parity_alarm", &labels).set(self.alarm.gauge());
        metrics::gauge!("springtide_train_parity_k3_nats", &labels).set(k3);
        Ok(())
    }

    /// What a person reads when it begins or ends.
    fn message(&self, begins: bool, k3_max: f64) -> String {
        let (inexact, latest, k3) = (self.inexact(), self.latest.len(), self.k3());
        match (&self.engine, begins) {
            (None, true) => format!(
                "{inexact} of the latest {latest} samples of our own engine do not have the trainer's log-probabilities, \
                 which are equal to the last bit on every machine: compare the builds and `policy.compute` of `serve` and \
                 `train`, and see which replica sampled them (`select g.replica, count(*) from disposition d join \
                 generation g on g.id = d.generation_id where d.code = 'quarantined_logprob' group by g.replica`). An \
                 engine that is not ours names itself in `engine`"
            ),
            (None, false) => {
                format!("the latest {latest} samples of our own engine have the trainer's log-probabilities")
            }
            (Some(engine), true) => format!(
                "log-probabilities of {engine} have drifted: mean k3 of its latest {latest} samples is {k3:.2e} nats, more \
                 than {k3_max:.2e}: compare its dtype and version with before, and look at the mismatch of the steps"
            ),
            (Some(engine), false) => {
                format!("mean k3 of the latest {latest} samples of {engine} is {k3:.2e} nats")
            }
        }
    }
}

/// Of an engine in alarms and metrics.
pub(crate) fn name(engine: Option<&str>) -> &str {
    engine.unwrap_or("ours")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::guards;
    use runs::settings::Limits;

    fn ours(active: bool) -> Parity {
        Parity::new(None, Alarm::new("parity_ours", active))
    }

    fn remote() -> Parity {
        Parity::new(Some("vllm".into()), Alarm::new("parity_vllm", false))
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
        let mut parity = ours(false);
        parity.record(mismatch(0.0, 0.0), true);
        assert_eq!(change(&mut parity), None);
        parity.record(mismatch(1e-15, 1e-7), true);
        assert_eq!(change(&mut parity), Some(true));
        assert!(parity.message(true, 1e-3).starts_with("1 of the latest 2 samples"));
        for _ in 0..WINDOW - 1 {
            parity.record(mismatch(0.0, 0.0), true);
        }
        assert_eq!(change(&mut parity), None, "it is still in the window");
        parity.record(mismatch(0.0, 0.0), true);
        assert_eq!(change(&mut parity), Some(false));
        parity.record(mismatch(f64::NAN, f64::NAN), true);
        assert_eq!(change(&mut parity), Some(true));
    }

    #[test]
    fn other_engines_are_judged_by_their_mean_and_never_by_one_sample() {
        let mut parity = remote();
        // one token at log v = +5 has a k3 of 142, and its window a mean of 0.017
        let tokens = |log_v: f32| (0..16).map(move |at| (-6.0, if at == 0 { -6.0 + log_v } else { -6.0 }));
        let outlier = SampleMismatch::of(tokens(5.0));
        assert!(guards::accepts(&Limits::default(), false, &outlier));
        parity.record(outlier, true);
        assert_eq!(change(&mut parity), None, "one sample is no distribution");
        for _ in 0..WINDOW - 1 {
            parity.record(SampleMismatch::of(tokens(0.02)), true);
            assert_eq!(change(&mut parity), None);
        }
        assert_eq!(parity.latest.len(), WINDOW, "the outlier is still there");
        assert!(parity.k3() > 1e-5 && parity.k3() < 1e-4, "{}", parity.k3());
        for _ in 0..WINDOW {
            parity.record(mismatch(4e-3, 0.2), true);
        }
        assert_eq!(change(&mut parity), Some(true));
        for _ in 0..WINDOW {
            parity.record(mismatch(1e-5, 0.02), true);
        }
        assert_eq!(change(&mut parity), Some(false));
    }

    #[test]
    fn a_quarantined_sample_counts_for_our_engine_and_not_for_others() {
        let wrong = mismatch(0.2, 12.0);
        for (mut parity, counted) in [(ours(false), 1), (remote(), 0)] {
            parity.record(wrong, false);
            assert_eq!(parity.latest.len(), counted, "{parity:?}");
        }
    }

    #[test]
    fn an_alarm_that_was_on_stays_on_until_there_are_enough_samples() {
        let mut parity = ours(true);
        for _ in 0..SAMPLES_MIN - 1 {
            parity.record(mismatch(0.0, 0.0), true);
            assert_eq!(change(&mut parity), None);
        }
        parity.record(mismatch(0.0, 0.0), true);
        assert_eq!(change(&mut parity), Some(false));
    }
}
