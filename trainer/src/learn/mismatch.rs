//! Train/sampler mismatch: how far recomputed log-probabilities are from the logged ones.
//!
//! Pure arithmetic over the trained tokens of a cohort. Those that were sampled by the version that
//! is recomputed should differ by rounding at most. A larger difference means wrong weights, ids or
//! sampling parameters. [`crate::learn::guards`] decides what follows. Tokens of older versions are
//! measured apart: theirs differ by what the policy has learned since.

use serde::{Deserialize, Serialize};

/// Differences between logged and recomputed log μ, in nats unless said. μ is the distribution that
/// was sampled from: π, or π without the decline token where exploration masked it. v = recomputed
/// μ / logged μ. w = π / logged μ is the importance weight before truncation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Mismatch {
    pub tokens: usize,
    /// mean(−log v): an unbiased estimate of KL(logged‖recomputed).
    pub k1: f64,
    /// mean(v − log v − 1): the same, never negative per token.
    pub k3: f64,
    /// Effective sample size (Σw)² / (n Σw²), in (0, 1].
    pub ess: f64,
    pub weight_mean: f64,
    pub difference_mean: f64,
    pub difference_p99: f64,
    pub difference_max: f64,
}

/// `logged` and `recomputed` are log μ, `policy` is log π, all of the same tokens.
pub fn measure(logged: &[f32], recomputed: &[f32], policy: &[f32]) -> Mismatch {
    let n = logged.len().min(recomputed.len()).min(policy.len());
    if n == 0 {
        return Mismatch::default();
    }
    let (mut k1, mut k3, mut weights, mut squares, mut differences_sum) = (0.0, 0.0, 0.0, 0.0, 0.0);
    let mut differences = Vec::with_capacity(n);
    let clamp = |log_ratio: f64| log_ratio.clamp(-20.0, 20.0);
    for ((&logged, &recomputed), &pi) in logged.iter().zip(recomputed).zip(policy) {
        let log_v = clamp(f64::from(recomputed) - f64::from(logged));
        let w = clamp(f64::from(pi) - f64::from(logged)).exp();
        k1 -= log_v;
        k3 += log_v.exp() - log_v - 1.0;
        weights += w;
        squares += w * w;
        differences_sum += log_v.abs();
        differences.push((f64::from(recomputed) - f64::from(logged)).abs());
    }
    differences.sort_by(f64::total_cmp);
    let count = n as f64;
    Mismatch {
        tokens: n,
        k1: k1 / count,
        k3: k3 / count,
        ess: weights * weights / (count * squares),
        weight_mean: weights / count,
        difference_mean: differences_sum / count,
        difference_p99: differences[(n * 99).div_ceil(100).saturating_sub(1)],
        difference_max: differences[n - 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without exploration μ is π.
    fn measure_free(logged: &[f32], recomputed: &[f32]) -> Mismatch {
        measure(logged, recomputed, recomputed)
    }

    #[test]
    fn explored_tokens_have_a_smaller_weight_and_no_mismatch() {
        // the second token was sampled without a decline of probability 1/2: w = 1/2
        let ln2 = std::f32::consts::LN_2;
        let m = measure(&[-1.0, -1.0], &[-1.0, -1.0], &[-1.0, -1.0 - ln2]);
        assert_eq!((m.k1, m.k3, m.difference_max), (0.0, 0.0, 0.0));
        assert!((m.weight_mean - 0.75).abs() < 1e-6);
        assert!((m.ess - 1.5 * 1.5 / (2.0 * 1.25)).abs() < 1e-6);
    }

    #[test]
    fn equal_log_probabilities_have_no_mismatch() {
        let m = measure_free(&[-1.0, -2.0, -0.5], &[-1.0, -2.0, -0.5]);
        assert_eq!((m.k1, m.k3, m.ess, m.difference_max), (0.0, 0.0, 1.0, 0.0));
        assert_eq!((m.tokens, m.weight_mean), (3, 1.0));
    }

    #[test]
    fn the_measures_match_a_computation_by_hand() {
        // w = 2 and 1/2: log w = ±ln 2
        let ln2 = std::f32::consts::LN_2;
        let m = measure_free(&[-2.0, -1.0], &[-2.0 + ln2, -1.0 - ln2]);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} against {b}");
        close(m.k1, 0.0);
        close(m.k3, (2.5 - 2.0) / 2.0); // (2 − ln2 − 1 + 0.5 + ln2 − 1) / 2
        close(m.ess, 2.5 * 2.5 / (2.0 * 4.25));
        close(m.weight_mean, 1.25);
        close(m.difference_mean, std::f64::consts::LN_2);
        close(m.difference_max, std::f64::consts::LN_2);
    }

    #[test]
    fn an_infinite_logged_value_shows_as_an_infinite_difference() {
        let m = measure_free(&[f32::NEG_INFINITY, -1.0], &[-1.0, -1.0]);
        assert_eq!(m.difference_max, f64::INFINITY);
        assert!(m.weight_mean.is_finite());
    }

    #[test]
    fn no_tokens_give_zeros() {
        assert_eq!(measure_free(&[], &[]), Mismatch::default());
    }
}
