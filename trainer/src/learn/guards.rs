//! What a step must satisfy to be published. Pure checks on numbers that were measured elsewhere.
//!
//! After a breach nothing is published and the weights and the optimizer stay as they were. The
//! cohort is dropped with a `guard_…` code, because the same step would fail again, and the run
//! continues with new data. After several breaches in a row it pauses.
//!
//! What is wrong with one sample is not a breach: a sample whose logged log-probabilities differ
//! too much is quarantined alone, before its gradient is added.

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
    /// Largest |logged − recomputed| log-probability of a sample's trained tokens, nats; default
    /// 0.01. A sample beyond it is quarantined.
    pub difference_max: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            gradient_norm_max: 1000.0,
            kl_max: 0.5,
            difference_max: 0.01,
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
            ("difference_max", self.difference_max),
        ];
        match limits.iter().find(|(_, limit)| !limit.is_finite() || *limit <= 0.0) {
            Some((name, limit)) => Err(format!("{name} is {limit}; it must be finite and above 0")),
            None => Ok(()),
        }
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
    fn each_breach_has_its_code() {
        let limits = Limits {
            gradient_norm_max: 10.0,
            kl_max: 0.1,
            difference_max: 1e-4,
        };
        let code = |r: Result<(), Breach>| r.unwrap_err().code();
        assert_eq!(code(limits.before_update(f64::NAN, 1.0)), "guard_loss");
        assert_eq!(code(limits.before_update(0.0, f64::INFINITY)), "guard_gradient");
        assert_eq!(code(limits.before_update(0.0, 10.5)), "guard_gradient");
        assert_eq!(code(limits.after_update(0.11)), "guard_kl");
        assert_eq!(code(limits.after_update(f64::NAN)), "guard_kl");
    }
}
