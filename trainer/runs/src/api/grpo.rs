//! What a GRPO run is asked for: who makes its rollouts, how they are compared, how its steps are made.

use crate::advantage::{self, GroupAdvantage};
use crate::door::TrainedBy;
use crate::grader::Grader;
use crate::settings::{Aggregation, Loss, OptimizerSettings, StepSettings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// What becomes of rollouts whose last answer is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Overlong {
    /// They are trained on as all others.
    #[default]
    Keep,
    /// A rollout whose last answer was cut off (finish reason `length`) is left out: none of its tokens
    /// is trained on, and its reward is in no mean and no deviation. DAPO's overlong filtering (arXiv
    /// 2503.14476, §3.4) leaves such rewards in the means.
    Mask,
    /// A last answer of more than `from` tokens loses reward, linearly up to 1 at `max_tokens`:
    /// [`advantage::overlong_penalty`]. It counts in the comparison alone: the reward in the log and
    /// `reward_mean` are without it.
    Penalty {
        /// Tokens, below `max_tokens`.
        from: u32,
    },
}

impl Overlong {
    /// Added to the reward of a rollout whose last answer has so many tokens.
    pub fn penalty(self, tokens: u32, max_tokens: u32) -> f64 {
        match self {
            Overlong::Keep | Overlong::Mask => 0.0,
            Overlong::Penalty { from } => advantage::overlong_penalty(tokens, from, max_tokens),
        }
    }
}

/// The configuration of a GRPO run, kept in its row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Who computes the steps: `springtide` (default), or `external`: whoever leases the cohorts,
    /// `POST /v1/runs/{id}/cohorts`.
    #[serde(skip_serializing_if = "TrainedBy::is_springtide")]
    pub trainer: TrainedBy,
    /// Default `completion`.
    pub environment: Environment,
    /// Of completions; default `exact_match`. Other environments reward their rollouts.
    pub grader: Grader,
    /// Default `dr_grpo`. `gdpo` needs a `multi` grader whose `calculate_output` is a weighted sum.
    pub advantage: GroupAdvantage,
    /// Default `reinforce_is` with its weight truncated at 2.
    pub loss: Loss,
    /// Default `seq-mean-token-sum`.
    pub aggregation: Aggregation,
    /// Rollouts per task, default 8.
    pub group_size: u32,
    /// Tasks per step, default 4.
    pub tasks_per_step: u32,
    /// A task whose rollouts teach nothing, mostly because their rewards are equal, is replaced by
    /// another one before the step: it is made of `tasks_per_step` groups with a gradient. Dynamic
    /// sampling of DAPO (arXiv 2503.14476, §3.2). Default false.
    pub dynamic_sampling: bool,
    /// With `dynamic_sampling`: a step draws at most so many times `tasks_per_step` tasks, 1 to 100,
    /// default 10. Then it is made of the groups that it has.
    pub draws_per_step_max: u32,
    /// The reward of a rollout that took too long: its harness or environment gave it up because of the time, or the
    /// completion broke its python grader. Default 0. Left out, such failures would be a way to lose nothing.
    pub failure_reward: f64,
    /// What becomes of rollouts whose last answer is too long; default `keep`.
    pub overlong: Overlong,
    /// How many steps the head may be away from the oldest version that sampled a token that is
    /// trained on, 0 to 64, default 4. Rollouts of so many further steps are made while a step is
    /// computed.
    pub staleness_max: u32,
    /// Optimizer steps, default 10.
    pub steps: i64,
    /// Default 5e-5.
    pub learning_rate: f64,
    /// Longest answer in tokens, default 32. A harness outside chooses its own.
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
            trainer: TrainedBy::default(),
            environment: Environment::default(),
            grader: Grader::default(),
            advantage: GroupAdvantage::default(),
            loss: StepSettings::default().loss,
            aggregation: Aggregation::default(),
            group_size: 8,
            tasks_per_step: 4,
            dynamic_sampling: false,
            draws_per_step_max: 10,
            failure_reward: 0.0,
            overlong: Overlong::Keep,
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
                "loss.name: cross_entropy is for supervised runs",
            ),
            (
                !self.loss.reads_own_probabilities(),
                "loss.name: verdicts is for accepts and rejects of users",
            ),
            (
                (1..=256).contains(&self.tasks_per_step),
                "tasks_per_step must be in 1..=256",
            ),
            (
                (1..=100).contains(&self.draws_per_step_max),
                "draws_per_step_max must be in 1..=100",
            ),
            (self.staleness_max <= 64, "staleness_max must be in 0..=64"),
            (self.failure_reward.is_finite(), "failure_reward must be finite"),
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
        self.check_overlong()?;
        self.weights()?;
        self.trainer.check_lora(self.lora.as_ref())
    }

    fn check_overlong(&self) -> Result<(), String> {
        let Overlong::Penalty { from } = self.overlong else {
            return Ok(());
        };
        if matches!(self.environment, Environment::Pull { .. }) {
            return Err(
                "overlong: a harness outside chooses how long answers may be, so max_tokens is no measure of \
                        them: let it give less reward, or use `mask`"
                    .into(),
            );
        }
        match from < self.max_tokens {
            true => Ok(()),
            false => Err(format!(
                "overlong.penalty.from is {from}; it must be below max_tokens, {}",
                self.max_tokens
            )),
        }
    }

    /// The graders whose rewards are compared one by one, with their weights. Empty: the whole reward is
    /// compared. Refuses a grader that has no weights if the advantage needs them.
    pub fn weights(&self) -> Result<BTreeMap<String, f64>, String> {
        match self.advantage {
            GroupAdvantage::Gdpo => self.grader.weights().map_err(|why| format!("advantage: gdpo {why}")),
            GroupAdvantage::DrGrpo | GroupAdvantage::Grpo | GroupAdvantage::Rloo => Ok(BTreeMap::new()),
        }
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
    fn requests_of_published_methods_are_accepted_as_the_guide_has_them() {
        let guide = include_str!("../../../../docs/guide-research.md");
        let (_, methods) = guide.split_once("### Published methods by name").unwrap();
        let rows = methods.lines().skip_while(|line| !line.starts_with('|')).skip(2);
        let rows = rows.take_while(|line| line.starts_with('|'));
        let requests: Vec<&str> = rows
            .filter_map(|row| row.split('`').nth(1).filter(|request| request.starts_with('"')))
            .collect();
        assert_eq!(
            requests.len(),
            7,
            "GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO, PPO: {requests:?}"
        );
        for request in requests {
            let request = format!("{{{request}}}");
            let config = read(&request).expect(&request);
            assert_eq!(config.check(), Ok(()), "{request}");
            let known = serde_json::to_value(&config).unwrap();
            let named: serde_json::Map<_, _> = serde_json::from_str(&request).unwrap();
            assert!(named.keys().all(|field| known.get(field).is_some()), "{request}");
        }
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
            "loss": {"name": "ppo_clip", "low": 0.2, "high": 0.28}}"#;
        let config = read(request).unwrap();
        assert_eq!((config.advantage, config.check()), (GroupAdvantage::Rloo, Ok(())));
        let settings = config.step_settings();
        assert_eq!(
            (settings.loss, settings.aggregation),
            (config.loss, Aggregation::TokenMean)
        );
        let verdicts = Loss::Verdicts { weight_max: 20.0 };
        for loss in [Loss::CrossEntropy, verdicts, Loss::ReinforceIs { cap: 0.0 }] {
            let config = Config { loss, ..config.clone() };
            assert!(config.check().unwrap_err().starts_with("loss."), "{loss:?}");
        }
        let request = r#"{"tasks": [], "lora": {"r": 2, "target_modules": "all-linear"}}"#;
        let mut config = read(request).unwrap();
        assert_eq!(config.check(), Ok(()));
        config.lora.as_mut().unwrap().lora_alpha = 0.0;
        assert!(config.check().unwrap_err().starts_with("lora"));
    }

    #[test]
    fn overlong_rollouts_are_kept_masked_or_penalized() {
        let overlong = |value: &str| read(&format!(r#"{{"max_tokens": 8, "overlong": {value}}}"#));
        assert_eq!(read("{}").unwrap().overlong, Overlong::Keep);
        assert_eq!(overlong(r#""mask""#).unwrap().overlong, Overlong::Mask);
        let config = overlong(r#"{"penalty": {"from": 4}}"#).unwrap();
        assert_eq!(config.check(), Ok(()));
        let penalties = [4, 5, 8].map(|tokens| config.overlong.penalty(tokens, config.max_tokens));
        assert_eq!(penalties, [0.0, -0.25, -1.0]);
        let late = overlong(r#"{"penalty": {"from": 8}}"#).unwrap();
        assert!(late.check().unwrap_err().contains("below max_tokens, 8"));
        let pulled = Config {
            environment: Environment::Pull { lease_seconds: 60 },
            ..config
        };
        assert!(pulled.check().unwrap_err().starts_with("overlong"));
        assert!(overlong(r#"{"penalty": {"from": 4, "to": 5}}"#).is_err());
        assert!(overlong(r#""drop""#).is_err());
    }

    #[test]
    fn gdpo_needs_graders_that_are_summed_with_weights() {
        let gdpo = |grader: &str| read(&format!(r#"{{"advantage": "gdpo", "grader": {grader}}}"#)).unwrap();
        let multi = |formula: &str| {
            let check = r#"{"type": "string_check", "operation": "eq", "input": "a", "reference": "b"}"#;
            gdpo(&format!(
                r#"{{"type": "multi", "graders": {{"right": {check}, "short": {check}}}, "calculate_output": "{formula}"}}"#
            ))
        };
        let config = multi("0.75 * right + short / 4.0 - 1.0");
        assert_eq!(config.check(), Ok(()));
        let weights = [("right".into(), 0.75), ("short".into(), 0.25)];
        assert_eq!(config.weights(), Ok(BTreeMap::from(weights)));
        for product in ["right * short", "right > 0.5 ? short : 0.0 * short"] {
            let refused = multi(product).check().unwrap_err();
            assert!(
                refused.starts_with("advantage: gdpo") && refused.contains("weighted sum"),
                "{refused}"
            );
        }
        assert!(gdpo(r#""contains""#).check().unwrap_err().contains("multi"));
        let summed = Config {
            advantage: GroupAdvantage::Grpo,
            ..multi("right * short")
        };
        assert_eq!((summed.check(), summed.weights()), (Ok(()), Ok(BTreeMap::new())));
    }

    #[test]
    fn the_tasks_that_a_step_draws_have_a_bound() {
        assert!(!read("{}").unwrap().dynamic_sampling);
        let config = read(r#"{"dynamic_sampling": true}"#).unwrap();
        assert_eq!((config.draws_per_step_max, config.check()), (10, Ok(())));
        let unbounded = Config {
            draws_per_step_max: 0,
            ..config
        };
        assert!(unbounded.check().unwrap_err().starts_with("draws_per_step_max"));
    }
}
