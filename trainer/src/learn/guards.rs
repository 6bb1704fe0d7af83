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
use runs::settings::Limits;

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

/// Whether a sample of the head may be trained on. False if a log-probability is not a number.
pub fn accepts(limits: &Limits, is_ours: bool, mismatch: &SampleMismatch) -> bool {
    match is_ours {
        true => mismatch.difference_max <= limits.difference_max,
        // a token that μ cannot produce has an infinite difference
        false => mismatch.difference_max.is_finite() && mismatch.k3 <= limits.k3_max,
    }
}

/// Whether a sample cannot be from the version that it names, whatever engine sampled it.
pub fn is_gross(limits: &Limits, mismatch: &SampleMismatch) -> bool {
    !accepts(limits, false, mismatch)
}

/// Checks after the backward pass.
pub fn before_update(limits: &Limits, loss: f64, norm: f64) -> Result<(), Breach> {
    if !loss.is_finite() {
        return Err(Breach::Loss(loss));
    }
    if !norm.is_finite() {
        return Err(Breach::GradientNotFinite(norm));
    }
    if norm > limits.gradient_norm_max {
        return Err(Breach::GradientNorm {
            norm,
            limit: limits.gradient_norm_max,
        });
    }
    Ok(())
}

/// Checks the new weights on the cohort.
pub fn after_update(limits: &Limits, kl: f64) -> Result<(), Breach> {
    if kl.is_finite() && kl <= limits.kl_max {
        return Ok(());
    }
    Err(Breach::Kl {
        kl,
        limit: limits.kl_max,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_step_passes() {
        let limits = Limits::default();
        assert_eq!(before_update(&limits, -0.3, 12.0), Ok(()));
        assert_eq!(after_update(&limits, 0.004), Ok(()));
    }

    #[test]
    fn our_engine_has_to_be_exact_and_others_are_judged_by_their_mean() {
        let limits = Limits::default();
        let of = |k3, difference_max| SampleMismatch {
            tokens: 8,
            k3,
            difference_max,
        };
        let both = |mismatch: SampleMismatch| (accepts(&limits, true, &mismatch), accepts(&limits, false, &mismatch));
        assert_eq!(both(of(0.0, 0.0)), (true, true));
        assert_eq!(both(of(1e-14, 1e-7)), (false, true));
        assert_eq!(both(of(0.049, 0.9)), (false, true), "no maximum judges another engine");
        assert_eq!(both(of(0.051, 0.4)), (false, false));
        assert_eq!(both(of(0.01, f64::INFINITY)), (false, false));
        assert_eq!(both(of(f64::NAN, f64::NAN)), (false, false));
        assert!(!is_gross(&limits, &of(1e-5, 5e-3)) && is_gross(&limits, &of(0.051, 0.4)));
    }

    #[test]
    fn each_breach_has_its_code() {
        let limits = Limits {
            gradient_norm_max: 10.0,
            kl_max: 0.1,
            ..Limits::default()
        };
        let code = |r: Result<(), Breach>| r.unwrap_err().code();
        assert_eq!(code(before_update(&limits, f64::NAN, 1.0)), "guard_loss");
        assert_eq!(code(before_update(&limits, 0.0, f64::INFINITY)), "guard_gradient");
        assert_eq!(code(before_update(&limits, 0.0, 10.5)), "guard_gradient");
        assert_eq!(code(after_update(&limits, 0.11)), "guard_kl");
        assert_eq!(code(after_update(&limits, f64::NAN)), "guard_kl");
    }
}
