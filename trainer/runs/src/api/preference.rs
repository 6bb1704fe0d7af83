//! Runs that learn from preferences over a dataset, as they are asked for and kept in their rows: `dpo`
//! and `kto`.

use crate::dataset::Reference;
use crate::door::TrainedBy;
use crate::settings::{Aggregation, Loss, OptimizerSettings, StepSettings};
use serde::{Deserialize, Serialize};

/// Pairs or trajectories of a step. All of them are in memory at once.
const BATCH_MAX: u32 = 1024;

/// The configuration of a DPO run: of two trajectories with the same prompt, the one with the higher
/// reward is preferred.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dpo {
    pub dataset: Reference,
    /// Who computes the steps; default `springtide`. `external`: whoever leases the cohorts.
    #[serde(default, skip_serializing_if = "TrainedBy::is_springtide")]
    pub trainer: TrainedBy,
    /// Optimizer steps. Has no default: how many pairs a dataset has is known when the run reads it.
    pub steps: i64,
    /// Pairs per step, default 16.
    #[serde(default = "pairs")]
    pub batch_size: u32,
    /// Default 5e-6.
    #[serde(default = "learning_rate")]
    pub learning_rate: f64,
    /// How strongly the policy is held to the base version, default 0.1. Less: it goes further.
    #[serde(default = "beta")]
    pub beta: f64,
    /// Rewards of a pair differ by at least this. Default 0: they differ.
    #[serde(default)]
    pub margin: f64,
    /// What the trajectories of a pair have in common; default `prompt`.
    #[serde(default)]
    pub pair_by: PairBy,
    /// Seed of the order of pairs and of an adapter's initial factors; default 0.
    #[serde(default)]
    pub seed: u64,
    /// Train an adapter of the base instead of all weights. Fields and defaults are PEFT's; by
    /// default it adapts the matrices of all layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<model::lora::Config>,
}

/// What makes two trajectories comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PairBy {
    /// The token ids of the first turn's prompt.
    #[default]
    Prompt,
    /// The group of rollouts that they were sampled in.
    Group,
}

/// The configuration of a KTO run: a trajectory is desirable or not by its reward, without a partner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kto {
    pub dataset: Reference,
    /// Who computes the steps; default `springtide`. `external`: whoever leases the cohorts.
    #[serde(default, skip_serializing_if = "TrainedBy::is_springtide")]
    pub trainer: TrainedBy,
    /// Optimizer steps. Default: as many as read the dataset once.
    #[serde(default)]
    pub steps: Option<i64>,
    /// Trajectories per step, at least 2; default 32.
    #[serde(default = "trajectories")]
    pub batch_size: u32,
    /// Default 5e-6.
    #[serde(default = "learning_rate")]
    pub learning_rate: f64,
    /// How strongly the policy is held to the base version, default 0.1. Less: it goes further.
    #[serde(default = "beta")]
    pub beta: f64,
    /// Trajectories with at least this reward are desirable, the others undesirable.
    pub threshold: f64,
    /// Weight of the loss of desirable trajectories; default 1.
    #[serde(default = "weight")]
    pub desirable_weight: f64,
    /// Weight of the loss of undesirable ones; default 1.
    #[serde(default = "weight")]
    pub undesirable_weight: f64,
    /// Seed of the order of trajectories and of an adapter's initial factors; default 0.
    #[serde(default)]
    pub seed: u64,
    /// Train an adapter of the base instead of all weights. Fields and defaults are PEFT's; by
    /// default it adapts the matrices of all layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<model::lora::Config>,
}

fn pairs() -> u32 {
    16
}

fn trajectories() -> u32 {
    32
}

fn learning_rate() -> f64 {
    5e-6
}

fn beta() -> f64 {
    0.1
}

fn weight() -> f64 {
    1.0
}

impl Dpo {
    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let holds = self.margin.is_finite() && self.margin >= 0.0;
        if !holds {
            return Err("margin must be finite and at least 0".into());
        }
        check(
            self.steps,
            (self.batch_size, 1),
            self.learning_rate,
            self.beta,
            self.trainer.check_lora(self.lora.as_ref()),
        )
    }
}

impl Kto {
    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let weights = [
            ("desirable_weight", self.desirable_weight),
            ("undesirable_weight", self.undesirable_weight),
        ];
        if let Some((field, _)) = weights.iter().find(|(_, weight)| !(0.0..=1000.0).contains(weight)) {
            return Err(format!("{field} must be in 0..=1000"));
        }
        if !self.threshold.is_finite() {
            return Err("threshold must be finite".into());
        }
        check(
            self.steps.unwrap_or(1),
            (self.batch_size, 2),
            self.learning_rate,
            self.beta,
            self.trainer.check_lora(self.lora.as_ref()),
        )
    }
}

/// What both kinds have. `batch`: its size and the smallest one.
fn check(steps: i64, batch: (u32, u32), learning_rate: f64, beta: f64, lora: Result<(), String>) -> Result<(), String> {
    let (size, smallest) = batch;
    if !(1..=1_000_000).contains(&steps) {
        return Err("steps must be in 1..=1000000".into());
    }
    if !(smallest..=BATCH_MAX).contains(&size) {
        return Err(format!("batch_size must be in {smallest}..={BATCH_MAX}"));
    }
    if !(learning_rate > 0.0 && learning_rate <= 1.0) {
        return Err("learning_rate must be in (0, 1]".into());
    }
    if !(beta > 0.0 && beta <= 100.0) {
        return Err("beta must be in (0, 100]".into());
    }
    lora
}

/// The settings of the steps of both kinds. The loss is that of
/// `trainer/src/learn/preference.rs`, whose derivatives are the advantages.
pub fn step_settings(learning_rate: f64) -> StepSettings {
    StepSettings {
        loss: Loss::CrossEntropy,
        aggregation: Aggregation::SeqMeanTokenSum,
        optimizer: OptimizerSettings {
            learning_rate,
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dpo_run_takes_defaults_and_refuses_the_impossible() {
        let run: Dpo = serde_json::from_str(r#"{"dataset": "a@1", "steps": 10}"#).unwrap();
        assert_eq!((run.batch_size, run.beta, run.pair_by), (16, 0.1, PairBy::Prompt));
        assert_eq!(run.check(), Ok(()));
        for (change, field) in [
            (
                Dpo {
                    beta: 0.0,
                    ..run.clone()
                },
                "beta",
            ),
            (
                Dpo {
                    margin: -1.0,
                    ..run.clone()
                },
                "margin",
            ),
            (
                Dpo {
                    batch_size: 0,
                    ..run.clone()
                },
                "batch_size",
            ),
            (
                Dpo {
                    steps: 0,
                    ..run.clone()
                },
                "steps",
            ),
            (
                Dpo {
                    learning_rate: 2.0,
                    ..run.clone()
                },
                "learning_rate",
            ),
        ] {
            let error = change.check().unwrap_err();
            assert!(error.starts_with(field), "{error}");
        }
        let missing = serde_json::from_str::<Dpo>(r#"{"dataset": "a@1"}"#).unwrap_err();
        assert!(missing.to_string().contains("steps"), "{missing}");
        let group: Dpo = serde_json::from_str(r#"{"dataset": "a@1", "steps": 1, "pair_by": "group"}"#).unwrap();
        assert_eq!(group.pair_by, PairBy::Group);
    }

    #[test]
    fn a_kto_run_needs_a_threshold_and_weights_that_are_not_negative() {
        let run: Kto = serde_json::from_str(r#"{"dataset": "a@1", "threshold": 0.5}"#).unwrap();
        assert_eq!((run.batch_size, run.desirable_weight, run.steps), (32, 1.0, None));
        assert_eq!(run.check(), Ok(()));
        for (change, field) in [
            (
                Kto {
                    batch_size: 1,
                    ..run.clone()
                },
                "batch_size",
            ),
            (
                Kto {
                    threshold: f64::NAN,
                    ..run.clone()
                },
                "threshold",
            ),
            (
                Kto {
                    undesirable_weight: -1.0,
                    ..run.clone()
                },
                "undesirable_weight",
            ),
            (
                Kto {
                    desirable_weight: f64::INFINITY,
                    ..run.clone()
                },
                "desirable_weight",
            ),
        ] {
            let error = change.check().unwrap_err();
            assert!(error.starts_with(field), "{error}");
        }
        assert!(serde_json::from_str::<Kto>(r#"{"dataset": "a@1"}"#).is_err());
    }
}
