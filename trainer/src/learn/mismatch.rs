//! Train/sampler mismatch: how far recomputed log-probabilities are from the logged ones.
//!
//! Pure arithmetic over trained tokens. Those that our own engine sampled with the version that is
//! recomputed have no difference at all. Those of other engines differ by rounding, and are judged as
//! a distribution. A larger difference means wrong weights, ids or sampling parameters.
//! [`crate::learn::guards`] decides what follows. Tokens of older versions are measured apart: theirs
//! differ by what the policy has learned since.

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
    #[serde(default)]
    pub difference_p50: f64,
    pub difference_p99: f64,
    pub difference_max: f64,
}

/// Log-ratios are clamped to this before they are exponentiated.
const LOG_RATIO_MAX: f64 = 20.0;

/// A token counts with at most this much k3 when a sample is judged, nats: that of a token whose
/// logged value is 0.7 too high or 0.6 too low. k3 grows exponentially, so without it one token would
/// decide about its whole sample.
pub const TOKEN_K3_MAX: f64 = 0.2;

/// The same of the trained tokens of one sample that the head sampled.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SampleMismatch {
    pub tokens: usize,
    /// mean(min(v − log v − 1, [`TOKEN_K3_MAX`])), nats. Not a number if one of its log-probabilities
    /// is not.
    pub k3: f64,
    /// Not a number if one of its log-probabilities is not; infinite if μ cannot produce a token.
    pub difference_max: f64,
}

impl SampleMismatch {
    /// Of pairs of logged and recomputed log μ.
    pub fn of(tokens: impl Iterator<Item = (f32, f32)>) -> Self {
        let mut mismatch = SampleMismatch::default();
        for (logged, recomputed) in tokens {
            let log_v = f64::from(recomputed) - f64::from(logged);
            let difference = log_v.abs();
            let log_v = log_v.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
            mismatch.tokens += 1;
            let k3 = log_v.exp() - log_v - 1.0;
            // `f64::min` and `f64::max` would ignore NaN
            mismatch.k3 += if k3 > TOKEN_K3_MAX { TOKEN_K3_MAX } else { k3 };
            let largest = mismatch.difference_max;
            if !(largest.is_nan() || largest > difference) {
                mismatch.difference_max = difference;
            }
        }
        mismatch.k3 /= mismatch.tokens.max(1) as f64;
        mismatch
    }

    /// Whether every logged log-probability is the recomputed one, as it always is with our own engine.
    pub fn is_exact(&self) -> bool {
        self.difference_max == 0.0
    }
}

/// `logged` and `recomputed` are log μ, `policy` is log π, all of the same tokens.
pub fn measure(logged: &[f32], recomputed: &[f32], policy: &[f32]) -> Mismatch {
    let n = logged.len().min(recomputed.len()).min(policy.len());
    if n == 0 {
        return Mismatch::default();
    }
    let (mut k1, mut k3, mut weights, mut squares, mut differences_sum) = (0.0, 0.0, 0.0, 0.0, 0.0);
    let mut differences = Vec::with_capacity(n);
    let clamp = |log_ratio: f64| log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
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
        difference_p50: differences[n.div_ceil(2).saturating_sub(1)],
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
    fn quantiles_are_those_of_the_sorted_differences() {
        let recomputed: Vec<f32> = (1..=200).rev().map(|n| n as f32 / 128.0).collect();
        let m = measure_free(&[0.0; 200], &recomputed);
        let of = |n: usize| n as f64 / 128.0;
        assert_eq!(
            (m.difference_p50, m.difference_p99, m.difference_max),
            (of(100), of(198), of(200))
        );
    }

    #[test]
    fn one_sample_has_a_mean_and_a_largest_difference() {
        let ln2 = std::f32::consts::LN_2;
        let of = |pairs: &[(f32, f32)]| SampleMismatch::of(pairs.iter().copied());
        let m = of(&[(-2.0, -2.0 + ln2), (-1.0, -1.0 - ln2)]);
        let of_half = 0.5 + std::f64::consts::LN_2 - 1.0; // 2 has 2 − ln2 − 1 = 0.307
        assert!((m.k3 - (TOKEN_K3_MAX + of_half) / 2.0).abs() < 1e-6, "{m:?}");
        assert!((m.difference_max - std::f64::consts::LN_2).abs() < 1e-6);
        assert!(!m.is_exact() && of(&[(-1.5, -1.5)]).is_exact() && of(&[]).is_exact());
        let not_a_number = of(&[(-1.0, f32::NAN), (-1.0, -9.0)]);
        assert!(not_a_number.difference_max.is_nan() && not_a_number.k3.is_nan());
        assert_eq!(of(&[(-1.0, f32::NEG_INFINITY)]).difference_max, f64::INFINITY);
    }

    #[test]
    fn one_token_adds_a_bounded_amount_however_far_off_it_is() {
        let of = |log_v: f32| {
            let pairs = (0..16).map(|at| (-6.0, if at == 0 { -6.0 + log_v } else { -6.0 }));
            SampleMismatch::of(pairs).k3
        };
        for log_v in [5.0, 50.0, -50.0, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(of(log_v), TOKEN_K3_MAX / 16.0, "{log_v}");
        }
        assert!((of(0.1) * 16.0 - 0.00517).abs() < 1e-5, "{}", of(0.1));
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
