//! `[trainer]` of `springtide.toml`. Every field has a default. Contradictions are refused at load.

use crate::learn::advantage::BaselineKind;
use crate::learn::guards::Limits;
use crate::learn::settings::StepSettings;
use serde::{Deserialize, Serialize};

/// `[trainer]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The realtime run.
    pub realtime: Realtime,
    /// Offline runs.
    pub offline: Offline,
    /// Steps between full checkpoints; default 50. A checkpoint is also published when the deltas
    /// since the last one exceed half of its bytes.
    #[serde(rename = "image_every")]
    pub checkpoint_every: i64,
    /// Make squashed deltas beside training, for replicas that are behind; default true. Needs the
    /// memory of two checkpoints.
    #[serde(rename = "folds")]
    pub squash: bool,
    /// Run states kept per run, newest first; default 2.
    #[serde(rename = "checkpoints_kept")]
    pub run_states_kept: i64,
    /// Threads of the forward pass, shared by all learners, and of libtorch per learner; default 1.
    /// More libtorch threads help on an idle machine and hurt badly beside busy processes.
    pub threads: u16,
    /// Sleep when there is nothing to do, milliseconds; default 200. A trajectory that closes ends
    /// the sleep.
    pub poll_ms: u64,
    /// Key for the serving API, if it requires one. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            realtime: Realtime::default(),
            offline: Offline::default(),
            checkpoint_every: 50,
            squash: true,
            run_states_kept: 2,
            threads: 1,
            poll_ms: 200,
            api_key: None,
        }
    }
}

/// `[trainer.realtime]`: learning from production.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Realtime {
    /// Whether this process runs it; default true.
    pub enabled: bool,
    /// The line that it writes; default `realtime`.
    pub line: String,
    /// The alias whose traffic it learns from and whose moves it follows; default `champion`.
    pub alias: String,
    /// Trajectories per step; default 32.
    pub cohort_size: u32,
    /// What rewards are compared with; default `zero`.
    pub baseline: BaselineKind,
    /// Train an adapter of the line's head instead of all weights; default: all weights. Fields and
    /// defaults are PEFT's; by default it adapts the matrices of all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<model::lora::Config>,
    pub step: StepSettings,
    pub guards: Limits,
    pub alarms: Alarms,
}

/// Fewer generations are not enough to judge a show rate.
pub const SHOW_RATE_WINDOW_MIN: u32 = 100;

/// `[trainer.realtime.alarms]`: alarms that do not stop the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Alarms {
    /// Share of its generations that the learning arm should show, 0 to 1; default 0.1. It should
    /// also show at least a third of what the other arms show.
    pub show_rate_min: f64,
    /// Generations per arm that its show rate is computed from, at least 100; default 500.
    pub show_rate_window: u32,
}

impl Default for Alarms {
    fn default() -> Self {
        Alarms {
            show_rate_min: 0.1,
            show_rate_window: 500,
        }
    }
}

impl Default for Realtime {
    fn default() -> Self {
        Realtime {
            enabled: true,
            line: "realtime".into(),
            alias: "champion".into(),
            cohort_size: 32,
            baseline: BaselineKind::Zero,
            lora: None,
            step: StepSettings::default(),
            guards: Limits::default(),
            alarms: Alarms::default(),
        }
    }
}

/// `[trainer.offline]`: settings that all offline runs share. Settings of one run are in its
/// request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Offline {
    /// Whether this process executes them; default true.
    pub enabled: bool,
    /// How long the fleet may take to serve the run's head, seconds; default 120.
    pub served_timeout_seconds: u64,
    /// How long graded rollouts may take to become trajectories in the database, seconds; default
    /// 60.
    pub arrival_timeout_seconds: u64,
    /// Rollout requests in flight; default 4.
    pub requests_max: usize,
    /// Draws of tasks in a row without different rewards in any group, before the run fails;
    /// default 20.
    pub empty_draws_max: u32,
    pub guards: Limits,
}

impl Default for Offline {
    fn default() -> Self {
        Offline {
            enabled: true,
            served_timeout_seconds: 120,
            arrival_timeout_seconds: 60,
            requests_max: 4,
            empty_draws_max: 20,
            guards: Limits::default(),
        }
    }
}

impl Options {
    /// Refuses values that cannot work. The text names the field as in the file.
    pub fn check(&self) -> Result<(), String> {
        let positive = [
            ("trainer.image_every", self.checkpoint_every >= 1),
            ("trainer.checkpoints_kept", self.run_states_kept >= 1),
            ("trainer.threads", self.threads >= 1),
            ("trainer.poll_ms", self.poll_ms >= 1),
            ("trainer.realtime.cohort_size", self.realtime.cohort_size >= 1),
            ("trainer.offline.requests_max", self.offline.requests_max >= 1),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, holds)| !holds) {
            return Err(format!("{name} must be at least 1"));
        }
        let alarms = &self.realtime.alarms;
        if !(0.0..=1.0).contains(&alarms.show_rate_min) {
            return Err("trainer.realtime.alarms.show_rate_min must be from 0 to 1".into());
        }
        if alarms.show_rate_window < SHOW_RATE_WINDOW_MIN {
            return Err(format!(
                "trainer.realtime.alarms.show_rate_window must be at least {SHOW_RATE_WINDOW_MIN}"
            ));
        }
        if let Some(lora) = &self.realtime.lora {
            lora.check().map_err(|why| format!("trainer.realtime.lora: {why}"))?;
        }
        self.realtime
            .step
            .check()
            .map_err(|why| format!("trainer.realtime.step.{why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(Options::default().check(), Ok(()));
    }

    #[test]
    fn errors_name_the_field_as_in_the_file() {
        let mut options = Options::default();
        options.realtime.cohort_size = 0;
        assert!(options.check().unwrap_err().contains("trainer.realtime.cohort_size"));
        let mut options = Options::default();
        options.realtime.step.optimizer.learning_rate = -1.0;
        assert!(
            options
                .check()
                .unwrap_err()
                .contains("trainer.realtime.step.optimiser.learning_rate")
        );
    }

    #[test]
    fn an_adapter_has_the_fields_of_peft_and_is_checked() {
        let with = |json: &str| serde_json::from_str::<Options>(&format!(r#"{{"realtime": {{"lora": {json}}}}}"#));
        let options = with(r#"{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}"#).unwrap();
        assert_eq!(options.check(), Ok(()));
        assert_eq!(options.realtime.lora.as_ref().unwrap().r, 4);
        let error = with(r#"{"r": 0}"#).unwrap().check().unwrap_err();
        assert!(
            error.contains("trainer.realtime.lora") && error.contains("`r`"),
            "{error}"
        );
        assert!(with(r#"{"lora_dropout": 0.1}"#).is_err());
    }

    #[test]
    fn an_alarm_without_enough_generations_is_refused() {
        let mut options = Options::default();
        options.realtime.alarms.show_rate_window = 99;
        assert!(options.check().unwrap_err().contains("show_rate_window"));
        options.realtime.alarms = Alarms::default();
        options.realtime.alarms.show_rate_min = f64::NAN;
        assert!(options.check().unwrap_err().contains("show_rate_min"));
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let error = serde_json::from_str::<Options>(r#"{"realtime": {"cohort": 3}}"#).unwrap_err();
        assert!(error.to_string().contains("cohort"));
    }
}
