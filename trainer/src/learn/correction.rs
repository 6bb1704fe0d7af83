//! Corrections for tokens that an engine with other arithmetic sampled.
//!
//! Such an engine logs log μ, and the trainer recomputes it with the weights of the same version.
//! w = recomputed μ / logged μ of one token. Our own engine has w = 1 exactly, others are near 1. A
//! correction gives each trained token a factor, which its loss is multiplied by. It does not depend
//! on the loss. What else makes π and μ differ (exploration, older versions) is the loss's own
//! business, see [`crate::learn::loss`].
//!
//! Factors are constants of the update: no gradient flows through them. Log-weights are clamped to
//! ±20.

use runs::settings::Correction;
use serde::{Deserialize, Serialize};

/// A log-weight beyond it says no more.
const LOG_WEIGHT_MAX: f64 = 20.0;

/// Factors of a micro-batch, and what the correction did to it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Corrected {
    /// One per trained token.
    pub factors: Vec<f32>,
    /// Tokens whose weight was above the cap.
    pub truncated: usize,
}

/// The factor of each token. `logged` and `recomputed` are log μ of the tokens.
pub fn factors(correction: Correction, logged: &[f32], recomputed: &[f32]) -> Corrected {
    let mut corrected = Corrected::default();
    for (&logged, &recomputed) in logged.iter().zip(recomputed) {
        let log_weight = f64::from(recomputed) - f64::from(logged);
        let w = log_weight.clamp(-LOG_WEIGHT_MAX, LOG_WEIGHT_MAX).exp();
        let factor = match correction {
            Correction::None => 1.0,
            Correction::Tis { cap } => {
                corrected.truncated += usize::from(w > cap);
                w.min(cap)
            }
        };
        corrected.factors.push(factor as f32);
    }
    corrected
}

/// What a correction did in one step, to all tokens of the head's version.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    pub tokens: usize,
    /// Share of tokens whose weight was above the cap.
    pub truncated: f64,
    /// Effective sample size of the factors f: (Σf)² / (n Σf²), from 0 to 1. 1: all are equal.
    pub ess: f64,
}

/// Sums over micro-batches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    tokens: usize,
    truncated: usize,
    factors: f64,
    squares: f64,
}

impl Sums {
    pub fn add(&mut self, corrected: &Corrected) {
        self.tokens += corrected.factors.len();
        self.truncated += corrected.truncated;
        for &factor in &corrected.factors {
            self.factors += f64::from(factor);
            self.squares += f64::from(factor) * f64::from(factor);
        }
    }

    pub fn summary(&self) -> Summary {
        let tokens = self.tokens.max(1) as f64;
        let ess = self.factors * self.factors / (tokens * self.squares);
        Summary {
            tokens: self.tokens,
            truncated: self.truncated as f64 / tokens,
            ess: if self.squares > 0.0 { ess } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// w = 4, 0.5, 1, 0.25 and 1.
    fn corrected(correction: Correction) -> Corrected {
        let recomputed = [4.0_f64, 0.5, 1.0, 0.25, 1.0].map(|w| (-3.0 + w.ln()) as f32);
        factors(correction, &[-3.0; 5], &recomputed)
    }

    fn check(correction: Correction, factors: [f64; 5], truncated: usize) {
        let got = corrected(correction);
        for (got, want) in got.factors.iter().zip(factors) {
            assert!(
                (f64::from(*got) - want).abs() < 1e-5,
                "{correction:?}: {got} against {want}"
            );
        }
        assert_eq!((got.factors.len(), got.truncated), (5, truncated), "{correction:?}");
    }

    #[test]
    fn each_factor_matches_a_computation_by_hand() {
        check(Correction::None, [1.0; 5], 0);
        check(Correction::Tis { cap: 2.0 }, [2.0, 0.5, 1.0, 0.25, 1.0], 1);
        check(Correction::Tis { cap: 4.1 }, [4.0, 0.5, 1.0, 0.25, 1.0], 0);
    }

    #[test]
    fn equal_log_probabilities_are_not_touched_by_any_correction() {
        let logged = [-0.5_f32, -7.25, -1e-8];
        for correction in [Correction::None, Correction::Tis { cap: 1.0 }] {
            let got = factors(correction, &logged, &logged);
            assert_eq!(
                (got.factors.as_slice(), got.truncated),
                ([1.0; 3].as_slice(), 0),
                "{correction:?}"
            );
        }
    }

    #[test]
    fn the_summary_has_the_share_of_truncated_tokens_and_the_effective_sample_size() {
        let mut sums = Sums::default();
        sums.add(&corrected(Correction::Tis { cap: 2.0 })); // 2, ½, 1, ¼, 1
        sums.add(&corrected(Correction::None)); // 1, 1, 1, 1, 1
        let summary = sums.summary();
        assert_eq!(summary.tokens, 10);
        assert!((summary.truncated - 0.1).abs() < 1e-9);
        assert!((summary.ess - 9.75 * 9.75 / (10.0 * 11.3125)).abs() < 1e-6);
        assert_eq!(Sums::default().summary(), Summary::default());
    }

    #[test]
    fn impossible_tokens_have_a_finite_factor() {
        for correction in [Correction::None, Correction::Tis { cap: 2.0 }] {
            let got = factors(correction, &[0.0, f32::NEG_INFINITY], &[f32::NEG_INFINITY, 0.0]);
            let finite = got.factors.iter().all(|factor| factor.is_finite() && *factor > 0.0);
            assert!(finite, "{got:?}");
        }
    }

    #[test]
    fn a_factor_scales_the_gradient_of_its_token_and_has_none_itself() {
        use crate::learn::loss::reinforce_is;
        use tch::{Kind, Tensor};
        // π = ½, ½ now; recomputed μ is π; the engine logged ¼ (w = 2) and ⅛ (w = 4, truncated)
        let logs = |p: &[f64]| -> Vec<f32> { p.iter().map(|p| p.ln() as f32).collect() };
        let (logged, recomputed) = (logs(&[0.25, 0.125]), logs(&[0.5, 0.5]));
        let factors = super::factors(Correction::Tis { cap: 3.0 }, &logged, &recomputed).factors;
        let logp = Tensor::from_slice(&recomputed).set_requires_grad(true);
        let advantage = Tensor::from_slice(&[0.75_f32, -0.25]);
        let terms = reinforce_is(&logp, &Tensor::from_slice(&recomputed), &advantage, 2.0);
        let corrected = terms.per_token * Tensor::from_slice(&factors);
        corrected.sum(Kind::Float).backward();
        let gradient = Vec::<f32>::try_from(logp.grad()).unwrap();
        assert!((gradient[0] + 1.5).abs() < 1e-6, "−w A = −2 · 0.75: {gradient:?}");
        assert!((gradient[1] - 0.75).abs() < 1e-6, "cap · 0.25: {gradient:?}");
    }
}
