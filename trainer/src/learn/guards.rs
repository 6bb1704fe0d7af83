//! What a step must satisfy to be published. Pure checks on numbers that were measured elsewhere.
//!
//! After a breach nothing is published and the weights and the optimizer stay as they were. The
//! cohort is dropped with a `guard_…` code, because the same step would fail again, and the run
//! continues with new data. After several breaches in a row it pauses.
//!
//! What is wrong with one sample is not a breach: a sample whose logged log-probabilities differ
//! too much is quarantined alone, before its gradient is added. What our own engine sampled has to be
//! exact. What another engine sampled is judged by the mean over its tokens, of which each counts with
//! at most [`TOKEN_K3_MAX`](crate::learn::mismatch::TOKEN_K3_MAX). A few tokens that are far off are
//! left to the correction of the step ([`crate::learn::correction`]); with other weights most tokens
//! are off.

use crate::learn::mismatch::SampleMismatch;
use serde::{Deserialize, Serialize};

/// Bounds of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Global gradient norm before clipping, in units of the loss; default 1000.
    pub gradient_norm_max: f64,
    /// KL(old‖new) in nats, exact over the vocabulary, mean over at least a quarter of the trained
    /// tokens, or as many as fit in 256 MiB; default 0.5.
    pub kl_max: f64,
    /// Largest |logged − recomputed| log-probability of the trained tokens of a sample of our own
    /// engine, nats; default 0: exact. A sample beyond it is quarantined.
    pub difference_max: f64,
    /// Largest mean k3 of the trained tokens of a sample of another engine, nats; default 0.05. A token
    /// counts with at most 0.2, so almost a quarter of the tokens may be off by any amount, and at 0.2 or
    /// more nothing is quarantined. A sample beyond it is not from the version that it names. If those of
    /// most users are, on every replica and whatever the engine, the run pauses.
    pub k3_max: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            gradient_norm_max: 1000.0,
            kl_max: 0.5,
            difference_max: 0.0,
            k3_max: 0.05,
        }
    }
}

/// The bound that was broken. Its text is the reason that people read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Breach {
    #[error("the loss is {0}, not a finite number")]
    Loss(f64),
    #[error("the gradient norm is {0}, not a finite number")]
    GradientNotFinite(f64),
    #[error("the gradient norm {norm:.3} is above its bound of {limit}")]
    GradientNorm { norm: f64, limit: f64 },
    #[error("the update would leave values that are not finite in `{0}`")]
    Parameters(String),
    #[error("KL(old‖new) on the cohort is {kl:.5} nats, above its bound of {limit}")]
    Kl { kl: f64, limit: f64 },
}

impl Breach {
    /// The disposition code of the dropped cohort.
    pub fn code(&self) -> &'static str {
        match self {
            Breach::Loss(_) => "guard_loss",
            Breach::GradientNotFinite(_) | Breach::GradientNorm { .. } => "guard_gradient",
            Breach::Parameters(_) => "guard_parameters",
            Breach::Kl { .. } => "guard_kl",
        }
    }
}

impl Limits {
    /// Refuses limits that are not finite or not above 0. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let limits = [
            ("gradient_norm_max", self.gradient_norm_max),
            ("kl_max", self.kl_max),
            ("k3_max", self.k3_max),
        ];
        if let Some((name, limit)) = limits.iter().find(|(_, limit)| !limit.is_finite() || *limit <= 0.0) {
            return Err(format!("{name} is {limit}; it must be finite and above 0"));
        }
        let exact = self.difference_max;
        if !exact.is_finite() || exact < 0.0 {
            return Err(format!("difference_max is {exact}; it must be finite and not below 0"));
        }
        Ok(())
    }

    /// Whether a sample of the head may be trained on. False if a log-probability is not a number.
    pub fn accepts(&self, is_ours: bool, mismatch: &SampleMismatch) -> bool {
        match is_ours {
            true => mismatch.difference_max <= self.difference_max,
            // a token that μ cannot produce has an infinite difference
            false => mismatch.difference_max.is_finite() && mismatch.k3 <= self.k3_max,
        }
    }

    /// Whether a sample cannot be from the version that it names, whatever engine sampled it.
    pub fn is_gross(&self, mismatch: &SampleMismatch) -> bool {
        !self.accepts(false, mismatch)
    }

    /// Checks after the backward pass.
    pub fn before_update(&self, loss: f64, norm: f64) -> Result<(), Breach> {
        if !loss.is_finite() {
            return Err(Breach::Loss(loss));
        }
        if !norm.is_finite() {
            return Err(Breach::GradientNotFinite(norm));
        }
        if norm > self.gradient_norm_max {
            return Err(Breach::GradientNorm {
                norm,
                limit: self.gradient_norm_max,
            });
        }
        Ok(())
    }

    /// Checks the new weights on the cohort.
    pub fn after_update(&self, kl: f64) -> Result<(), Breach> {
        if kl.is_finite() && kl <= self.kl_max {
            return Ok(());
        }
        Err(Breach::Kl { kl, limit: self.kl_max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_step_passes() {
        let limits = Limits::default();
        assert_eq!(limits.before_update(-0.3, 12.0), Ok(()));
        assert_eq!(limits.after_update(0.004), Ok(()));
    }

    #[test]
    fn our_engine_has_to_be_exact_and_others_are_judged_by_their_mean() {
        let limits = Limits::default();
        let of = |k3, difference_max| SampleMismatch {
            tokens: 8,
            k3,
            difference_max,
        };
        let both = |mismatch: SampleMismatch| (limits.accepts(true, &mismatch), limits.accepts(false, &mismatch));
        assert_eq!(both(of(0.0, 0.0)), (true, true));
        assert_eq!(both(of(1e-14, 1e-7)), (false, true));
        assert_eq!(both(of(0.049, 0.9)), (false, true), "no maximum judges another engine");
        assert_eq!(both(of(0.051, 0.4)), (false, false));
        assert_eq!(both(of(0.01, f64::INFINITY)), (false, false));
        assert_eq!(both(of(f64::NAN, f64::NAN)), (false, false));
        assert!(!limits.is_gross(&of(1e-5, 5e-3)) && limits.is_gross(&of(0.051, 0.4)));
    }

    #[test]
    fn each_breach_has_its_code() {
        let limits = Limits {
            gradient_norm_max: 10.0,
            kl_max: 0.1,
            ..Limits::default()
        };
        let code = |r: Result<(), Breach>| r.unwrap_err().code();
        assert_eq!(code(limits.before_update(f64::NAN, 1.0)), "guard_loss");
        assert_eq!(code(limits.before_update(0.0, f64::INFINITY)), "guard_gradient");
        assert_eq!(code(limits.before_update(0.0, 10.5)), "guard_gradient");
        assert_eq!(code(limits.after_update(0.11)), "guard_kl");
        assert_eq!(code(limits.after_update(f64::NAN)), "guard_kl");
    }
}
