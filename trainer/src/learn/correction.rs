//! Corrections for tokens that an engine with other arithmetic sampled.
//!
//! Such an engine logs log μ, and the trainer recomputes it with the weights of the same version.
//! w = recomputed μ / logged μ of one token. Our own engine has w = 1 exactly, others are near 1. A
//! correction gives each trained token a factor, which its loss is multiplied by. It does not depend
//! on the loss. What else makes π and μ differ (exploration, older versions) is the loss's own
//! business, see [`crate::learn::loss`].
//!
//! Factors are constants of the update: no gradient flows through them. A masked token has the factor
//! 0 and stays in every denominator. Log-weights, and sums of them, are clamped to ±20.
//!
//! A sequence is what one engine sampled for one request: a generation, or one turn of an episode.

use serde::{Deserialize, Serialize};

/// A log-weight beyond it says no more.
const LOG_WEIGHT_MAX: f64 = 20.0;

/// Which factor a token gets. verl's names are those of its `rollout_is` and `rollout_rs`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub enum Correction {
    /// 1.
    None,
    /// Truncated importance sampling: min(w, cap). Yao et al. 2025; verl's token-level `rollout_is`.
    Tis { cap: f64 },
    /// w from `low` to `high`, else 0. IcePop, Ling team 2025.
    Icepop { low: f64, high: f64 },
    /// min(Π w, cap) with the product over the sequence, for each of its tokens. verl's
    /// sequence-level `rollout_is`.
    SequenceTis { cap: f64 },
    /// 1 if Π w is from `low` to `high`, else 0, for the whole sequence. verl's `rollout_rs` over a
    /// sequence's product; the mask of MIS (Liu, Li et al. 2025). It is strict with long sequences.
    SequenceMask { low: f64, high: f64 },
    /// 1 if the geometric mean exp(mean log w) of the sequence is from `low` to `high`, else 0. verl's
    /// geometric `rollout_rs`. It treats short and long sequences alike.
    GeometricMask { low: f64, high: f64 },
}

/// Factors of a micro-batch, and what the correction did to it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Corrected {
    /// One per trained token.
    pub factors: Vec<f32>,
    /// Tokens whose weight was above the cap.
    pub truncated: usize,
    /// Tokens with the factor 0.
    pub masked: usize,
    /// Sequences of which every token has the factor 0.
    pub masked_sequences: usize,
    pub sequences: usize,
}

impl Correction {
    /// Refuses constants that make no sense. The text begins with the field.
    pub fn check(&self) -> Result<(), &'static str> {
        let positive = |v: f64| v.is_finite() && v > 0.0;
        match *self {
            Correction::Tis { cap } | Correction::SequenceTis { cap } if !(positive(cap) && cap >= 1.0) => {
                Err("correction.cap must be finite and at least 1")
            }
            Correction::Icepop { low, high }
            | Correction::SequenceMask { low, high }
            | Correction::GeometricMask { low, high }
                if !((0.0..=1.0).contains(&low) && high >= 1.0 && positive(high)) =>
            {
                Err("correction.low must be from 0 to 1, and correction.high finite and at least 1")
            }
            _ => Ok(()),
        }
    }

    /// The factor of each token. `logged` and `recomputed` are log μ of the tokens, sequence after
    /// sequence; `lengths` are the tokens of each sequence and sum to their number.
    pub fn factors(self, logged: &[f32], recomputed: &[f32], lengths: impl IntoIterator<Item = usize>) -> Corrected {
        let clamp = |log_weight: f64| log_weight.clamp(-LOG_WEIGHT_MAX, LOG_WEIGHT_MAX);
        let log_weight = |(&logged, &recomputed): (&f32, &f32)| clamp(f64::from(recomputed) - f64::from(logged));
        let log_weights: Vec<f64> = logged.iter().zip(recomputed).map(log_weight).collect();
        let mut corrected = Corrected::default();
        let mut rest = log_weights.as_slice();
        for length in lengths {
            let (sequence, later) = rest.split_at(length.min(rest.len()));
            rest = later;
            if !sequence.is_empty() {
                self.add_sequence(sequence, &mut corrected);
            }
        }
        corrected
    }

    /// Adds the factors of one sequence with at least one token.
    fn add_sequence(self, log_weights: &[f64], corrected: &mut Corrected) {
        let tokens = log_weights.len();
        let sum: f64 = log_weights.iter().sum();
        let product = sum.clamp(-LOG_WEIGHT_MAX, LOG_WEIGHT_MAX).exp();
        let mean = (sum / tokens as f64).exp();
        let within = |value: f64, low: f64, high: f64| f64::from(u8::from(low <= value && value <= high));
        let factor = |log_weight: &f64| {
            let w = log_weight.exp();
            match self {
                Correction::None => 1.0,
                Correction::Tis { cap } => w.min(cap),
                Correction::Icepop { low, high } => w * within(w, low, high),
                Correction::SequenceTis { cap } => product.min(cap),
                Correction::SequenceMask { low, high } => within(product, low, high),
                Correction::GeometricMask { low, high } => within(mean, low, high),
            }
        };
        let factors: Vec<f32> = log_weights.iter().map(|one| factor(one) as f32).collect();
        corrected.truncated += match self {
            Correction::Tis { cap } => log_weights.iter().filter(|one| one.exp() > cap).count(),
            Correction::SequenceTis { cap } if product > cap => tokens,
            _ => 0,
        };
        let masked = factors.iter().filter(|&&factor| factor == 0.0).count();
        corrected.masked += masked;
        corrected.masked_sequences += usize::from(masked == tokens);
        corrected.sequences += 1;
        corrected.factors.extend(factors);
    }
}

/// What a correction did in one step, to all tokens of the head's version.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    pub tokens: usize,
    pub sequences: usize,
    /// Share of tokens whose weight was above the cap.
    pub truncated: f64,
    /// Share of tokens with the factor 0.
    pub masked: f64,
    /// Share of sequences of which every token is masked.
    pub masked_sequences: f64,
    /// Effective sample size of the factors f: (Σf)² / (n Σf²), from 0 to 1. 1: all are equal.
    pub ess: f64,
}

/// Sums over micro-batches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    tokens: usize,
    sequences: usize,
    truncated: usize,
    masked: usize,
    masked_sequences: usize,
    factors: f64,
    squares: f64,
}

impl Sums {
    pub fn add(&mut self, corrected: &Corrected) {
        self.tokens += corrected.factors.len();
        self.sequences += corrected.sequences;
        self.truncated += corrected.truncated;
        self.masked += corrected.masked;
        self.masked_sequences += corrected.masked_sequences;
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
            sequences: self.sequences,
            truncated: self.truncated as f64 / tokens,
            masked: self.masked as f64 / tokens,
            masked_sequences: self.masked_sequences as f64 / self.sequences.max(1) as f64,
            ess: if self.squares > 0.0 { ess } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences: w = 4, 0.5, 1 (product 2, geometric mean 2^(1/3)) and 0.25, 1 (0.25, 0.5).
    fn corrected(correction: Correction) -> Corrected {
        let logged = [-3.0_f32; 5];
        let recomputed: Vec<f32> = [4.0_f64, 0.5, 1.0, 0.25, 1.0]
            .iter()
            .map(|w| (-3.0 + w.ln()) as f32)
            .collect();
        correction.factors(&logged, &recomputed, [3, 2])
    }

    fn check(correction: Correction, factors: [f64; 5], truncated: usize, masked: usize, masked_sequences: usize) {
        let got = corrected(correction);
        for (got, want) in got.factors.iter().zip(factors) {
            assert!(
                (f64::from(*got) - want).abs() < 1e-5,
                "{correction:?}: {got} against {want}"
            );
        }
        assert_eq!(got.factors.len(), 5);
        assert_eq!(
            (got.truncated, got.masked, got.masked_sequences, got.sequences),
            (truncated, masked, masked_sequences, 2),
            "{correction:?}"
        );
    }

    #[test]
    fn each_factor_matches_a_computation_by_hand() {
        check(Correction::None, [1.0; 5], 0, 0, 0);
        check(Correction::Tis { cap: 2.0 }, [2.0, 0.5, 1.0, 0.25, 1.0], 1, 0, 0);
        let icepop = Correction::Icepop { low: 0.4, high: 2.0 };
        check(icepop, [0.0, 0.5, 1.0, 0.0, 1.0], 0, 2, 0);
        let sequence_tis = Correction::SequenceTis { cap: 1.5 };
        check(sequence_tis, [1.5, 1.5, 1.5, 0.25, 0.25], 3, 0, 0);
        let sequence_mask = Correction::SequenceMask { low: 0.5, high: 3.0 };
        check(sequence_mask, [1.0, 1.0, 1.0, 0.0, 0.0], 0, 2, 1);
        let geometric_mask = Correction::GeometricMask { low: 0.25, high: 1.25 };
        check(geometric_mask, [0.0, 0.0, 0.0, 1.0, 1.0], 0, 3, 1);
    }

    #[test]
    fn equal_log_probabilities_are_not_touched_by_any_correction() {
        let logged = [-0.5_f32, -7.25, -1e-8];
        for correction in [
            Correction::None,
            Correction::Tis { cap: 1.0 },
            Correction::Icepop { low: 1.0, high: 1.0 },
            Correction::SequenceTis { cap: 1.0 },
            Correction::SequenceMask { low: 1.0, high: 1.0 },
            Correction::GeometricMask { low: 1.0, high: 1.0 },
        ] {
            let got = correction.factors(&logged, &logged, [1, 2]);
            assert_eq!(got.factors, [1.0; 3], "{correction:?}");
            assert_eq!((got.truncated, got.masked), (0, 0));
        }
    }

    #[test]
    fn the_summary_has_shares_of_tokens_and_sequences_and_the_effective_sample_size() {
        let mut sums = Sums::default();
        sums.add(&corrected(Correction::Icepop { low: 0.4, high: 2.0 })); // 0, ½, 1, 0, 1
        sums.add(&corrected(Correction::SequenceMask { low: 0.5, high: 3.0 })); // 1, 1, 1, 0, 0
        let summary = sums.summary();
        assert_eq!((summary.tokens, summary.sequences), (10, 4));
        assert!((summary.masked - 0.4).abs() < 1e-9);
        assert!((summary.masked_sequences - 0.25).abs() < 1e-9);
        assert!((summary.ess - 5.5 * 5.5 / (10.0 * 5.25)).abs() < 1e-6);
        assert_eq!(Sums::default().summary(), Summary::default());
    }

    #[test]
    fn impossible_tokens_have_a_finite_factor() {
        let got = Correction::None.factors(&[0.0], &[f32::NEG_INFINITY], [1]);
        assert_eq!(got.factors, [1.0]);
        let got = Correction::SequenceTis { cap: 2.0 }.factors(&[0.0; 3], &[f32::NEG_INFINITY; 3], [3]);
        assert!(got.factors.iter().all(|factor| factor.is_finite() && *factor > 0.0));
    }

    #[test]
    fn a_correction_is_read_by_its_name_and_checked() {
        let read = |json: &str| serde_json::from_str::<Correction>(json);
        assert_eq!(read(r#"{"name": "none"}"#).unwrap(), Correction::None);
        assert_eq!(
            read(r#"{"name": "tis", "cap": 2}"#).unwrap(),
            Correction::Tis { cap: 2.0 }
        );
        let masked = Correction::GeometricMask { low: 0.99, high: 1.01 };
        assert_eq!(
            read(r#"{"name": "geometric_mask", "low": 0.99, "high": 1.01}"#).unwrap(),
            masked
        );
        assert!(read(r#"{"name": "tis", "caps": 2}"#).is_err());
        assert_eq!(masked.check(), Ok(()));
        for bad in [
            Correction::Tis { cap: 0.5 },
            Correction::SequenceTis { cap: f64::NAN },
            Correction::Icepop { low: 1.5, high: 2.0 },
            Correction::SequenceMask {
                low: 0.5,
                high: f64::INFINITY,
            },
            Correction::GeometricMask { low: -0.5, high: 2.0 },
        ] {
            assert!(bad.check().unwrap_err().starts_with("correction."), "{bad:?}");
        }
    }

    #[cfg(feature = "torch")]
    #[test]
    fn a_factor_scales_the_gradient_of_its_token_and_has_none_itself() {
        use crate::learn::loss::reinforce_is;
        use tch::{Kind, Tensor};
        // π = ½, ½ now; recomputed μ is π; the engine logged ¼ (w = 2) and ⅛ (w = 4, masked)
        let logs = |p: &[f64]| -> Vec<f32> { p.iter().map(|p| p.ln() as f32).collect() };
        let (logged, recomputed) = (logs(&[0.25, 0.125]), logs(&[0.5, 0.5]));
        let correction = Correction::Icepop { low: 0.5, high: 3.0 };
        let factors = correction.factors(&logged, &recomputed, [2]).factors;
        let logp = Tensor::from_slice(&recomputed).set_requires_grad(true);
        let advantage = Tensor::from_slice(&[0.75_f32, -0.25]);
        let terms = reinforce_is(&logp, &Tensor::from_slice(&recomputed), &advantage, 2.0);
        let corrected = terms.per_token * Tensor::from_slice(&factors);
        corrected.sum(Kind::Float).backward();
        let gradient = Vec::<f32>::try_from(logp.grad()).unwrap();
        assert!((gradient[0] + 1.5).abs() < 1e-6, "−w A = −2 · 0.75: {gradient:?}");
        assert_eq!(gradient[1], 0.0);
    }
}
