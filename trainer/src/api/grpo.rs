//! What a GRPO run is asked for: who makes its rollouts, how they are compared, how its steps are made.

use crate::learn::advantage::GroupAdvantage;
use crate::learn::loss::{Aggregation, Loss};
use crate::learn::optimizer::OptimizerSettings;
use crate::learn::settings::StepSettings;
use crate::runs::grader::Grader;
use serde::{Deserialize, Serialize};

/// Who makes the rollouts of a run, and rewards them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Environment {
    /// A rollout is one completion of the task's prompt. The grader rewards it.
    #[default]
    Completion,
    /// A harness outside leases them: `POST /v1/runs/{id}/leases`.
    Pull {
        /// How long a harness may work without a renewal, 10 to 86400; default 600.
        #[serde(default = "lease_seconds")]
        lease_seconds: u32,
    },
    /// The trainer calls the environment: `reset`, `step` and `score` below this URL.
    Push {
        url: String,
        /// Calls of `step` before the rollout is scored, 1 to 1000; default 16.
        #[serde(default = "turns_max")]
        turns_max: u32,
        /// From `reset` to `score`, 1 to 86400; default 600.
        #[serde(default = "lease_seconds")]
        timeout_seconds: u32,
    },
}

fn lease_seconds() -> u32 {
    600
}

fn turns_max() -> u32 {
    16
}

impl Environment {
    fn check(&self) -> Result<(), String> {
        let refused = |field: &str, range: &str| Err(format!("environment.{field} must be in {range}"));
        match self {
            Environment::Pull { lease_seconds } if !(10..=86_400).contains(lease_seconds) => {
                refused("lease_seconds", "10..=86400")
            }
            Environment::Push { url, .. } if !url.starts_with("http://") && !url.starts_with("https://") => {
                Err("environment.url must begin with http:// or https://".into())
            }
            Environment::Push { turns_max, .. } if !(1..=1000).contains(turns_max) => refused("turns_max", "1..=1000"),
            Environment::Push { timeout_seconds, .. } if !(1..=86_400).contains(timeout_seconds) => {
                refused("timeout_seconds", "1..=86400")
            }
            _ => Ok(()),
        }
    }
}

/// The configuration of a GRPO run, kept in its row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Default `completion`.
    pub environment: Environment,
    /// Of completions; default `exact_match`. Other environments reward their rollouts.
    pub grader: Grader,
    /// Default `dr_grpo`.
    pub advantage: GroupAdvantage,
    /// Default `reinforce_is` with its weight truncated at 2.
    pub loss: Loss,
    /// Default `seq-mean-token-sum`.
    pub aggregation: Aggregation,
    /// Rollouts per task, default 8.
    pub group_size: u32,
    /// Tasks per step, default 4.
    pub tasks_per_step: u32,
    /// How many steps the head may be away from the oldest version that sampled a token that is
    /// trained on, 0 to 64, default 4. Rollouts of so many further steps are made while a step is
    /// computed.
    pub staleness_max: u32,
    /// Optimizer steps, default 10.
    pub steps: i64,
    /// Default 5e-5.
    pub learning_rate: f64,
    /// Longest rollout in tokens, default 32.
    pub max_tokens: u32,
    /// Default 1.
    pub temperature: f32,
    /// Seed of the order of tasks and of an adapter's initial factors; default 0.
    pub seed: u64,
    /// Train an adapter of the base instead of all weights. Fields and defaults are PEFT's; by
    /// default it adapts the matrices of all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<model::lora::Config>,
    /// Judges are not asked: their stored answers count, and a rollout without one has no grade.
    /// Default false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replay: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            environment: Environment::default(),
            grader: Grader::default(),
            advantage: GroupAdvantage::default(),
            loss: StepSettings::default().loss,
            aggregation: Aggregation::default(),
            group_size: 8,
            tasks_per_step: 4,
            staleness_max: 4,
            steps: 10,
            learning_rate: 5e-5,
            max_tokens: 32,
            temperature: 1.0,
            seed: 0,
            lora: None,
            replay: false,
        }
    }
}

impl Config {
    /// Refuses values that cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let rules = [
            (
                (2..=128).contains(&self.group_size),
                "group_size must be in 2..=128: a group of one has no mean",
            ),
            (
                !self.loss.is_supervised(),
                "loss.name must be reinforce_is or ppo_clip: cross_entropy is for supervised runs",
            ),
            (
                (1..=256).contains(&self.tasks_per_step),
                "tasks_per_step must be in 1..=256",
            ),
            (self.staleness_max <= 64, "staleness_max must be in 0..=64"),
            (
                self.environment == Environment::Completion || self.grader == Grader::default(),
                "grader: it is for completions; another environment rewards its rollouts, so leave the grader out",
            ),
            ((1..=100_000).contains(&self.steps), "steps must be in 1..=100000"),
            (
                self.learning_rate > 0.0 && self.learning_rate <= 1.0,
                "learning_rate must be in (0, 1]",
            ),
            ((1..=8192).contains(&self.max_tokens), "max_tokens must be in 1..=8192"),
            (
                self.temperature > 0.0 && self.temperature <= 2.0,
                "temperature must be in (0, 2]: greedy rollouts do not differ",
            ),
        ];
        if let Some((_, why)) = rules.iter().find(|(holds, _)| !holds) {
            return Err((*why).to_string());
        }
        self.environment.check()?;
        self.grader.check()?;
        self.loss.check()?;
        let lora = self.lora.as_ref().map_or(Ok(()), model::lora::Config::check);
        lora.map_err(|why| format!("lora: {why}"))
    }

    /// The settings of its steps.
    pub fn step_settings(&self) -> StepSettings {
        StepSettings {
            loss: self.loss,
            aggregation: self.aggregation,
            optimizer: OptimizerSettings {
                learning_rate: self.learning_rate,
                ..OptimizerSettings::default()
            },
            ..StepSettings::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> serde_json::Result<Config> {
        serde_json::from_str(json)
    }

    #[test]
    fn a_request_takes_defaults_and_refuses_the_impossible() {
        let config = read(r#"{"steps": 3, "tasks": []}"#).unwrap();
        assert_eq!((config.steps, config.group_size), (3, 8));
        assert_eq!(config.check(), Ok(()));
        let lonely = Config {
            group_size: 1,
            ..config
        };
        assert!(lonely.check().unwrap_err().starts_with("group_size"));
        let request = r#"{"tasks": [], "advantage": "rloo", "aggregation": "token-mean",
            "loss": {"name": "ppo_clip", "low": 0.2, "high": 0.28, "dual": 3}}"#;
        let config = read(request).unwrap();
        assert_eq!((config.advantage, config.check()), (GroupAdvantage::Rloo, Ok(())));
        let settings = config.step_settings();
        assert_eq!(
            (settings.loss, settings.aggregation),
            (config.loss, Aggregation::TokenMean)
        );
        for loss in [Loss::CrossEntropy, Loss::ReinforceIs { cap: 0.0 }] {
            let config = Config { loss, ..config.clone() };
            assert!(config.check().unwrap_err().starts_with("loss."), "{loss:?}");
        }
        let request = r#"{"tasks": [], "lora": {"r": 2, "target_modules": "all-linear"}}"#;
        let mut config = read(request).unwrap();
        assert_eq!(config.check(), Ok(()));
        config.lora.as_mut().unwrap().lora_alpha = 0.0;
        assert!(config.check().unwrap_err().starts_with("lora"));
    }
}
