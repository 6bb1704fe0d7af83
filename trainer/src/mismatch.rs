//! How far the trainer's log-probabilities are from the ones that were logged: the train/sampler mismatch.
//!
//! Pure arithmetic over the trained tokens of a cohort. All of them were sampled by the version that is recomputed, so on
//! one machine the differences should be rounding and nothing else; anything larger means that the wrong weights, ids or
//! temperature were used. What to do about it is decided in [`crate::guards`].

use serde::{Deserialize, Serialize};

/// Differences between logged and recomputed log μ, where μ is what sampled: the policy π, or π without the decline token
/// where exploration masked it. v = recomputed / logged is 1 but for rounding; w = π / μ as logged is the loss's importance
/// weight before its cut. Nats unless said.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Mismatch {
    pub tokens: usize,
    /// mean(−log v): the simple estimate of KL(logged‖recomputed).
    pub k1: f64,
    /// mean(v − log v − 1): the same quantity, never negative per token.
    pub k3: f64,
    /// (Σw)² / (n Σw²): the share of the sample that counts, in (0, 1].
    pub ess: f64,
    pub weight_mean: f64,
    pub difference_mean: f64,
    pub difference_p99: f64,
    pub difference_max: f64,
}

/// log μ as logged and recomputed, and log π, of the same tokens: of equal lengths.
pub fn measure(logged: &[f32], recomputed: &[f32], policy: &[f32]) -> Mismatch {
    let n = logged.len().min(recomputed.len()).min(policy.len());
    if n == 0 {
        return Mismatch::default();
    }
    let (mut k1, mut k3, mut sum, mut squares, mut total) = (0.0, 0.0, 0.0, 0.0, 0.0);
    let mut differences = Vec::with_capacity(n);
    let cut = |log_ratio: f64| log_ratio.clamp(-20.0, 20.0);
    for ((&logged, &recomputed), &pi) in logged.iter().zip(recomputed).zip(policy) {
        let log_v = cut(f64::from(recomputed) - f64::from(logged));
        let w = cut(f64::from(pi) - f64::from(logged)).exp();
        k1 -= log_v;
        k3 += log_v.exp() - log_v - 1.0;
        sum += w;
        squares += w * w;
        total += log_v.abs();
        differences.push((f64::from(recomputed) - f64::from(logged)).abs());
    }
    differences.sort_by(f64::total_cmp);
    let count = n as f64;
    Mismatch {
        tokens: n,
        k1: k1 / count,
        k3: k3 / count,
        ess: sum * sum / (count * squares),
        weight_mean: sum / count,
        difference_mean: total / count,
        difference_p99: differences[(n * 99).div_ceil(100).saturating_sub(1)],
        difference_max: differences[n - 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without exploration: what sampled is the policy.
    fn measure_free(logged: &[f32], recomputed: &[f32]) -> Mismatch {
        measure(logged, recomputed, recomputed)
    }

    #[test]
    fn what_exploration_masked_weighs_less_and_is_no_mismatch() {
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
    fn nothing_is_measured_on_nothing() {
        assert_eq!(measure_free(&[], &[]), Mismatch::default());
    }
}
