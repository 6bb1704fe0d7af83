//! The trainer's part of `springtide.toml`. Every field has a default; contradictions are refused at load.

use crate::guards::Limits;
use crate::settings::StepSettings;
use crate::silence::GENERATIONS_MIN;
use serde::{Deserialize, Serialize};

/// `[trainer]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The realtime run.
    pub realtime: Realtime,
    /// Offline runs.
    pub offline: Offline,
    /// Every this many steps a version is published as a whole image beside its delta, and sooner where the deltas since the
    /// last one would take more than half of its bytes; default 50.
    pub image_every: i64,
    /// Whether deltas over several steps are made beside training, for replicas that are behind; default true. It takes
    /// the memory of two images while it goes on.
    pub folds: bool,
    /// Checkpoints kept per run, newest first; default 2.
    pub checkpoints_kept: i64,
    /// Threads of the forward pass, shared by all learners, and of libtorch per learner; default 1. Libtorch's help on an idle
    /// machine and hurt badly beside busy processes.
    pub threads: u16,
    /// How long to sleep when there is nothing to do, milliseconds; default 200. Trajectories that close end the sleep.
    pub poll_ms: u64,
    /// Key for the serving API, where it asks for one. Never printed.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            realtime: Realtime::default(),
            offline: Offline::default(),
            image_every: 50,
            folds: true,
            checkpoints_kept: 2,
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
    /// The line it writes to; default `realtime`.
    pub line: String,
    /// The alias whose traffic it learns from, and whose moves it follows; default `champion`.
    pub alias: String,
    /// Trajectories of one step; default 32.
    pub cohort_size: u32,
    /// What a reward is compared with; default `zero`.
    pub baseline: BaselineKind,
    /// Train an adapter of the version that the line stands on, instead of all weights; default: all weights. Fields and
    /// defaults are PEFT's, targets all layers' matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<policy::lora::Config>,
    pub step: StepSettings,
    pub guards: Limits,
    pub alarms: Alarms,
}

/// `[trainer.realtime.alarms]`: what people are told while the run goes on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Alarms {
    /// Share of its generations that the learning arm should show, 0 to 1; default 0.1. A third of what the other arms show
    /// is asked for in any case.
    pub show_rate_min: f64,
    /// Latest generations of an arm that its show rate is taken over, at least 100; default 500.
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

/// What a production reward is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaselineKind {
    /// The running mean of its class, before this step.
    Ema,
    /// Nothing.
    Zero,
}

/// `[trainer.offline]`: what all offline runs share. What one run asks for is in its request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Offline {
    /// Whether this process executes them; default true.
    pub enabled: bool,
    /// How long the fleet may take until it serves the run's head, seconds; default 120.
    pub served_timeout_seconds: u64,
    /// How long graded rollouts may take until they are trajectories in the database, seconds; default 60.
    pub arrival_timeout_seconds: u64,
    /// Rollout requests in flight at once; default 4.
    pub requests_max: usize,
    /// Draws of tasks in a row in which no group had different rewards, before the run fails; default 20.
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
    /// Refuses values that cannot work together. The text names the field as the file spells it.
    pub fn check(&self) -> Result<(), String> {
        let positive = [
            ("trainer.image_every", self.image_every >= 1),
            ("trainer.checkpoints_kept", self.checkpoints_kept >= 1),
            ("trainer.threads", self.threads >= 1),
            ("trainer.poll_ms", self.poll_ms >= 1),
            ("trainer.realtime.cohort_size", self.realtime.cohort_size >= 1),
            ("trainer.offline.requests_max", self.offline.requests_max >= 1),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, holds)| !holds) {
            return Err(format!("{name} must be at least 1"));
        }
        if self.realtime.line.is_empty() || self.realtime.line.starts_with("run-") {
            return Err("trainer.realtime.line must be a name that does not start with `run-`".into());
        }
        let alarms = &self.realtime.alarms;
        if !(0.0..=1.0).contains(&alarms.show_rate_min) {
            return Err("trainer.realtime.alarms.show_rate_min must be from 0 to 1".into());
        }
        if i64::from(alarms.show_rate_window) < GENERATIONS_MIN {
            return Err(format!(
                "trainer.realtime.alarms.show_rate_window must be at least {GENERATIONS_MIN}"
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
    fn the_defaults_hold_together() {
        assert_eq!(Options::default().check(), Ok(()));
    }

    #[test]
    fn contradictions_are_named_as_the_file_spells_them() {
        let mut options = Options::default();
        options.realtime.cohort_size = 0;
        assert!(options.check().unwrap_err().contains("trainer.realtime.cohort_size"));
        let mut options = Options::default();
        options.realtime.step.optimiser.learning_rate = -1.0;
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
    fn an_alarm_that_could_never_judge_is_refused() {
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
