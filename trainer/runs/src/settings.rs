//! Names and constants of what a step computes, and their bounds: `[trainer.realtime.step]`, and the
//! loss of a GRPO run. The formulas are in `trainer/src/learn`.

use edge::options::above;
use serde::{Deserialize, Serialize};

edge::options! {
    /// One optimizer step.
    #[derive(Copy)]
    pub struct StepSettings {
        /// Or: { name = "ppo_clip", low = 0.2, high = 0.28 }, { name = "gspo", low = 3e-4, high =
        /// 4e-4 }; for rewards that are accepts and rejects: { name = "verdicts", weight_max = 20.0
        /// }.
        pub loss: Loss = Loss::ReinforceIs { cap: 2.0 },
        /// Tokens that an engine with other arithmetic sampled get a factor, from w = recomputed /
        /// logged probability: min(w, cap). Our own engine has w = 1, so nothing changes for it. Or:
        /// { name = "none" }.
        pub correction: Correction = Correction::Tis { cap: 2.0 },
        /// Or `token-mean`, `seq-mean-token-mean`.
        pub aggregation: Aggregation,
        #[serde(rename = "optimiser")]
        pub optimizer: OptimizerSettings,
        /// Tokens that go through the model together. Changes memory, not results.
        pub micro_batch_tokens: usize = 4096 => 1..,
        /// What a forward pass may keep for its gradient besides each layer's input, in bytes.
        /// What does not fit is computed again. Changes memory and speed, not results.
        pub activation_bytes_max: u64 = 1 << 30,
    }
}

impl StepSettings {
    /// Refuses constants that make no sense. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        self.optimizer.check_ranges("optimiser")?;
        self.check_ranges("")?;
        self.correction.check().map_err(str::to_owned)?;
        self.loss.check().map_err(str::to_owned)
    }
}

/// Which loss a run minimizes, with its constants.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub enum Loss {
    /// REINFORCE with a truncated importance weight. With `cap` 5 it is CISPO (MiniMax 2025).
    ReinforceIs { cap: f64 },
    /// PPO's clipped objective, with a dual clip if `dual` is given. A cohort gets one update, so π/μ is 1 for
    /// what the head sampled, and only tokens of older versions are clipped.
    PpoClip {
        low: f64,
        high: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dual: Option<f64>,
    },
    /// PPO's clipped objective with one ratio for a whole generation: the geometric mean of its tokens'
    /// π/μ. Its authors use `seq-mean-token-mean`, `low` 3e-4 and `high` 4e-4.
    Gspo { low: f64, high: f64 },
    /// For rewards that are verdicts: above 0 is an accept, below 0 a reject. The likelihood of the verdicts.
    Verdicts { weight_max: f64 },
    /// Cross-entropy with the advantage as its weight, for supervised runs. The sampler's
    /// log-probabilities are not used.
    CrossEntropy,
}

impl Loss {
    /// Refuses constants out of range.
    pub fn check(&self) -> Result<(), &'static str> {
        let positive = |v: f64| v.is_finite() && v > 0.0;
        match *self {
            Loss::ReinforceIs { cap } if !positive(cap) => Err("loss.cap must be finite and above 0"),
            Loss::PpoClip { low, high, dual }
                if !(positive(low) && positive(high) && dual.is_none_or(|dual| dual > 1.0)) =>
            {
                Err("loss.low and loss.high must be finite and above 0, and loss.dual above 1")
            }
            Loss::Gspo { low, high } if !(positive(low) && positive(high)) => {
                Err("loss.low and loss.high must be finite and above 0")
            }
            Loss::Verdicts { weight_max } if !positive(weight_max) => Err("loss.weight_max must be finite and above 0"),
            _ => Ok(()),
        }
    }

    /// Whether it needs no sampler's log-probabilities. Then they are not compared either, and nothing corrects
    /// for older versions.
    pub fn is_supervised(&self) -> bool {
        matches!(self, Loss::CrossEntropy)
    }

    /// Whether it reads the policy's own probabilities, at temperature 1 and without filters, however an answer was
    /// sampled. So it learns from greedy answers, too. In all other losses an advantage that is k > 0 times as
    /// large makes it k times as large, as GRPO and `seq-mean-token-mean` need it.
    pub fn reads_own_probabilities(&self) -> bool {
        matches!(self, Loss::Verdicts { .. })
    }
}

/// How the losses of a cohort's tokens are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// Every token counts the same.
    TokenMean,
    /// Sum over the tokens of a trajectory, mean over trajectories. The gradient of −A Σ log π is
    /// the policy gradient without a bias for length: a trajectory's sum is divided by neither its
    /// tokens nor its turns, so a short session weighs no more for being short (Dr. GRPO, Liu et al.
    /// 2025).
    #[default]
    SeqMeanTokenSum,
    /// Mean over the tokens of a trajectory, mean over trajectories, as GRPO was published (Shao et al.
    /// 2024). A token of a long trajectory counts less than one of a short one.
    SeqMeanTokenMean,
}

/// Which factor a token gets that an engine with other arithmetic sampled. w is its recomputed μ / its
/// logged μ; `trainer/src/learn/correction.rs` has the rest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub enum Correction {
    /// 1.
    None,
    /// Truncated importance sampling: min(w, cap). Yao et al. 2025; verl's token-level `rollout_is`.
    Tis { cap: f64 },
}

impl Correction {
    /// Refuses constants that make no sense. The text begins with the field.
    pub fn check(&self) -> Result<(), &'static str> {
        match *self {
            Correction::Tis { cap } if !(cap.is_finite() && cap >= 1.0) => {
                Err("correction.cap must be finite and at least 1")
            }
            _ => Ok(()),
        }
    }
}

edge::options! {
    /// Constants of AdamW (Loshchilov and Hutter 2019).
    #[derive(Copy)]
    pub struct OptimizerSettings {
        /// Step size.
        pub learning_rate: f64 = 3e-4 => above(0.0),
        /// Decay of the first moment.
        pub beta1: f64 = 0.9 => 0.0..1.0,
        /// Decay of the second moment.
        pub beta2: f64 = 0.95 => 0.0..1.0,
        /// Added to the root of the second moment.
        pub epsilon: f64 = 1e-8 => above(0.0),
        /// Decoupled decay of matrices. Vectors such as norms do not decay.
        pub weight_decay: f64 = 0.0 => 0.0..f64::INFINITY,
        /// Gradients are scaled down to this global norm.
        pub clip_norm: f64 = 1.0 => above(0.0),
    }
}

edge::options! {
    /// Bounds of one optimizer step.
    #[derive(Copy)]
    pub struct Limits {
        /// Global gradient norm before clipping, in units of the loss.
        pub gradient_norm_max: f64 = 1000.0 => above(0.0),
        /// KL(old‖new) in nats, exact over the vocabulary, mean over at least a quarter of the
        /// trained tokens, or as many as fit in 256 MiB.
        pub kl_max: f64 = 0.5 => above(0.0),
        /// Largest |logged − recomputed| log-probability of a trained token that our own engine
        /// sampled, nats; 0: exact. A sample beyond it is quarantined, not the cohort.
        pub difference_max: f64 = 0.0 => 0.0..f64::INFINITY,
        /// Largest mean k3 of the trained tokens of a sample of another engine, nats. A token counts
        /// with at most 0.2, so almost a quarter of the tokens may be off by any amount, and at 0.2
        /// or more nothing is quarantined. A sample beyond it is not from the version that it names.
        /// If those of most users are, on every replica and whatever the engine, the run pauses.
        pub k3_max: f64 = 0.05 => above(0.0),
        /// How far a trainer outside may move the weights in one step: the norm of their change, as a part
        /// of the parent's norm.
        pub change_max: f64 = 0.1 => above(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_is_read_by_its_name_and_checked() {
        let read = |json: &str| serde_json::from_str::<Correction>(json);
        assert_eq!(read(r#"{"name": "none"}"#).unwrap(), Correction::None);
        let tis = read(r#"{"name": "tis", "cap": 2}"#).unwrap();
        assert_eq!(tis, Correction::Tis { cap: 2.0 });
        assert_eq!(tis.check(), Ok(()));
        assert!(read(r#"{"name": "tis", "caps": 2}"#).is_err());
        for cap in [0.5, f64::NAN, f64::INFINITY] {
            let error = Correction::Tis { cap }.check().unwrap_err();
            assert!(error.starts_with("correction."), "{cap}");
        }
    }
}
