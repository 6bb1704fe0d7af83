//! How one step is computed, as configuration: which loss, how it is aggregated, the optimiser's constants.
//!
//! Plain data that every build can read, also the one without libtorch; the arithmetic is in `loss` and `optim`.

use crate::batch::Counts;
use serde::{Deserialize, Serialize};

/// Which loss a run minimises, with its constants.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub enum Loss {
    /// −sg(min(ρ, cap)) · A · log π with ρ = exp(log π − log μ): REINFORCE with a truncated importance weight.
    ReinforceIs { cap: f64 },
    /// PPO's clipped objective with a dual clip for negative advantages (Ye et al. 2020).
    PpoClip { low: f64, high: f64, dual: f64 },
}

/// How the tokens of a cohort become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// Every token counts the same.
    TokenMean,
    /// Every sequence is the sum of its tokens, and counts once: −A Σ log π is the policy gradient itself.
    #[default]
    SeqMeanTokenSum,
}

impl Aggregation {
    /// What the sum over all tokens is divided by. `counts` are the whole cohort's.
    pub fn denominator(self, counts: Counts) -> f64 {
        match self {
            Aggregation::TokenMean => counts.tokens.max(1) as f64,
            Aggregation::SeqMeanTokenSum => counts.sequences.max(1) as f64,
        }
    }
}

/// Constants of AdamW (Loshchilov and Hutter 2019).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optimiser {
    /// Step size, default 3e-4.
    pub learning_rate: f64,
    /// Decay of the first moment, default 0.9.
    pub beta1: f64,
    /// Decay of the second moment, default 0.95.
    pub beta2: f64,
    /// Added to the root of the second moment, default 1e-8.
    pub epsilon: f64,
    /// Decoupled decay of matrices (vectors such as norms are left alone), default 0.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm, default 1.
    pub clip_norm: f64,
}

impl Default for Optimiser {
    fn default() -> Self {
        Optimiser {
            learning_rate: 3e-4,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.0,
            clip_norm: 1.0,
        }
    }
}

/// One optimiser step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepSettings {
    /// Default: `reinforce_is` with its weight truncated at 2.
    pub loss: Loss,
    /// Default: `seq-mean-token-sum`.
    pub aggregation: Aggregation,
    pub optimiser: Optimiser,
    /// Padded tokens that go through the network together; default 4096. Changes memory, not results.
    pub micro_batch_tokens: usize,
}

impl Default for StepSettings {
    fn default() -> Self {
        StepSettings {
            loss: Loss::ReinforceIs { cap: 2.0 },
            aggregation: Aggregation::default(),
            optimiser: Optimiser::default(),
            micro_batch_tokens: 4096,
        }
    }
}

impl StepSettings {
    /// Refuses constants with which a step makes no sense. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let o = &self.optimiser;
        let unit = |v: f64| (0.0..1.0).contains(&v);
        let positive = |v: f64| v.is_finite() && v > 0.0;
        let loss = match self.loss {
            Loss::ReinforceIs { cap } => positive(cap),
            Loss::PpoClip { low, high, dual } => positive(low) && positive(high) && dual > 1.0,
        };
        let rules = [
            (positive(o.learning_rate), "optimiser.learning_rate must be above 0"),
            (unit(o.beta1), "optimiser.beta1 must be in [0, 1)"),
            (unit(o.beta2), "optimiser.beta2 must be in [0, 1)"),
            (positive(o.epsilon), "optimiser.epsilon must be above 0"),
            (
                o.weight_decay.is_finite() && o.weight_decay >= 0.0,
                "optimiser.weight_decay must not be negative",
            ),
            (positive(o.clip_norm), "optimiser.clip_norm must be above 0"),
            (self.micro_batch_tokens > 0, "micro_batch_tokens must be above 0"),
            (
                loss,
                "loss has a constant that is out of range: cap, low, high > 0 and dual > 1",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, why)) => Err((*why).to_string()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_divided_by_the_whole_cohorts_tokens_or_sequences() {
        let counts = Counts {
            sequences: 2,
            tokens: 5,
        };
        assert_eq!(Aggregation::TokenMean.denominator(counts), 5.0);
        assert_eq!(Aggregation::SeqMeanTokenSum.denominator(counts), 2.0);
        assert_eq!(Aggregation::TokenMean.denominator(Counts::default()), 1.0);
    }
}
