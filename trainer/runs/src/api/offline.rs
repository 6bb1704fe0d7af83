//! Runs over a dataset, as they are asked for and kept in their rows: `sft`, `evaluate`, `export`.

use crate::dataset::Reference;
use crate::dataset::file::Format;
use crate::door::TrainedBy;
use crate::settings::{Aggregation, Loss, OptimizerSettings, StepSettings};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The configuration of a supervised run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Supervised {
    pub dataset: Reference,
    /// Who computes the steps; default `springtide`. `external`: whoever leases the cohorts.
    #[serde(default, skip_serializing_if = "TrainedBy::is_springtide")]
    pub trainer: TrainedBy,
    /// What is learned; default `sampled`.
    #[serde(default, skip_serializing_if = "Target::is_sampled")]
    pub target: Target,
    /// Optimizer steps. Default: as many as read the dataset once.
    #[serde(default)]
    pub steps: Option<i64>,
    /// Trajectories per step. Default: 32, or as many as fit into `tokens_per_step`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// Tokens per step instead: whole trajectories, each with its longest turn and that turn's context,
    /// until the next would not fit. A longer one makes a step of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_step: Option<u64>,
    /// Default 5e-5.
    #[serde(default = "learning_rate")]
    pub learning_rate: f64,
    /// Seed of the order of trajectories and of an adapter's initial factors; default 0.
    #[serde(default)]
    pub seed: u64,
    /// Train an adapter of the base instead of all weights. Fields and defaults are PEFT's; by
    /// default it adapts the matrices of all layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<model::lora::Config>,
}

/// What a supervised run learns after each prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// What was sampled.
    #[default]
    Sampled,
    /// What the user sent as what should have been written: the feedback `demonstration`.
    Demonstration,
}

impl Target {
    fn is_sampled(&self) -> bool {
        *self == Target::Sampled
    }
}

fn learning_rate() -> f64 {
    5e-5
}

impl Supervised {
    /// Trajectories per step, without `tokens_per_step`.
    pub fn batch_size(&self) -> u32 {
        self.batch_size.unwrap_or(32)
    }

    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let steps = self.steps.unwrap_or(1);
        let rules = [
            ((1..=1_000_000).contains(&steps), "steps must be in 1..=1000000"),
            (
                (1..=4096).contains(&self.batch_size()),
                "batch_size must be in 1..=4096",
            ),
            (
                (1..=1 << 30).contains(&self.tokens_per_step.unwrap_or(1)),
                "tokens_per_step must be in 1..=1073741824",
            ),
            (
                self.batch_size.is_none() || self.tokens_per_step.is_none(),
                "batch_size and tokens_per_step exclude each other: give one of them",
            ),
            (
                self.target.is_sampled() || self.tokens_per_step.is_none(),
                "tokens_per_step counts what was sampled: with target = demonstration give batch_size instead",
            ),
            (
                self.target.is_sampled() || self.trainer.is_springtide(),
                "trainer: a trainer outside gets what was sampled, so target = demonstration needs trainer = springtide",
            ),
            (
                self.target.is_sampled() || self.steps.is_some(),
                "steps is missing: how many trajectories have a demonstration is known only when the run reads them",
            ),
            (
                self.learning_rate > 0.0 && self.learning_rate <= 1.0,
                "learning_rate must be in (0, 1]",
            ),
        ];
        if let Some((_, why)) = rules.iter().find(|(holds, _)| !holds) {
            return Err((*why).to_string());
        }
        self.trainer.check_lora(self.lora.as_ref())
    }

    /// The settings of its steps: cross-entropy, every trained token counts the same.
    pub fn step_settings(&self) -> StepSettings {
        StepSettings {
            loss: Loss::CrossEntropy,
            aggregation: Aggregation::TokenMean,
            optimizer: OptimizerSettings {
                learning_rate: self.learning_rate,
                ..OptimizerSettings::default()
            },
            ..StepSettings::default()
        }
    }
}

/// The configuration of an evaluation: a version, measured on a dataset. The version is the run's
/// `base_version`, or what `base` is when the run starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    pub dataset: Reference,
    /// An alias such as `champion`, or a line: its version when the run starts, instead of `base_version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Importance weights above this count as this; default 10.
    #[serde(default = "weight_max")]
    pub weight_max: f64,
}

fn weight_max() -> f64 {
    10.0
}

impl Evaluation {
    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        match self.weight_max.is_finite() && self.weight_max >= 1.0 {
            true => Ok(()),
            false => Err("weight_max must be finite and at least 1".into()),
        }
    }
}

/// The configuration of an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    pub dataset: Reference,
    /// Default `jsonl`.
    #[serde(default)]
    pub format: Format,
}

/// An export as its run keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportFor {
    #[serde(flatten)]
    pub export: Export,
    /// Of the key that asked: the file is stored for it.
    pub tenant: String,
    /// Whether the file has the rows of all tenants, for an administrator, or only of `tenant`.
    pub all_tenants: bool,
}

/// Where an export lies: `run.result`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exported {
    pub trajectories: i64,
    pub generations: i64,
    pub bytes: u64,
    /// Prompts that could not be put together.
    pub prompts_missing: i64,
    /// Tenants whose rows the file has.
    pub tenants: Vec<String>,
    /// The lowest id of a generation.
    pub oldest: Option<Uuid>,
    /// Exports of the run's tenant that make the file, one after another. Empty: it has been deleted.
    pub parts: Vec<event_log::payload::PayloadRef>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervised_run_takes_defaults_and_refuses_the_impossible() {
        let run: Supervised = serde_json::from_str(r#"{"dataset": "accepted@1"}"#).unwrap();
        assert_eq!((run.batch_size(), run.steps), (32, None));
        assert_eq!(run.check(), Ok(()));
        assert!(run.step_settings().loss.is_supervised());
        let slow = Supervised {
            learning_rate: 0.0,
            ..run.clone()
        };
        assert!(slow.check().unwrap_err().starts_with("learning_rate"));
        let both = Supervised {
            batch_size: Some(4),
            tokens_per_step: Some(1000),
            ..run.clone()
        };
        assert!(both.check().unwrap_err().contains("exclude"));
        let none = Supervised {
            steps: Some(0),
            ..run.clone()
        };
        assert!(none.check().unwrap_err().starts_with("steps"));
        assert!(serde_json::from_str::<Supervised>(r#"{"dataset": "accepted"}"#).is_err());

        let typed = r#"{"dataset": "all@1", "target": "demonstration", "steps": 4}"#;
        let typed: Supervised = serde_json::from_str(typed).unwrap();
        assert_eq!((typed.target, typed.check()), (Target::Demonstration, Ok(())));
        let pass = Supervised {
            steps: None,
            ..typed.clone()
        };
        assert!(pass.check().unwrap_err().starts_with("steps"));
        let budget = Supervised {
            tokens_per_step: Some(1000),
            ..typed
        };
        assert!(budget.check().unwrap_err().starts_with("tokens_per_step"));
        let kept = serde_json::to_value(&run).unwrap();
        assert!(kept.get("target").is_none(), "the default is left out: {kept}");
    }

    #[test]
    fn an_export_is_kept_with_the_tenant_that_asked() {
        let kept = ExportFor {
            export: serde_json::from_str(r#"{"dataset": "accepted@1", "format": "parquet"}"#).unwrap(),
            tenant: "ours".into(),
            all_tenants: false,
        };
        let json = serde_json::to_value(&kept).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"dataset": "accepted@1", "format": "parquet", "tenant": "ours", "all_tenants": false})
        );
        assert_eq!(serde_json::from_value::<ExportFor>(json).unwrap(), kept);
    }
}
