//! `[trainer]` of `springtide.toml`. Every field has a default. Invalid values are refused when the
//! file is loaded.

mod alarms;

use crate::advantage::{BaselineKind, Credit};
use crate::grader;
use crate::judge;
use crate::select::caps::Caps;
use crate::settings::{Aggregation, Limits, StepSettings};
use anyhow::{anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

pub use alarms::{Alarms, SHOW_RATE_WINDOW_MIN};

/// `[trainer]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The realtime run.
    pub realtime: Realtime,
    /// Offline runs.
    pub offline: Offline,
    /// `[[trainer.judge]]`: models that graders of offline runs may ask.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub judge: Vec<judge::Options>,
    /// Steps between full checkpoints; default 50. A checkpoint is also published when the deltas
    /// since the last one exceed half of its bytes.
    #[serde(rename = "image_every")]
    pub checkpoint_every: i64,
    /// Make squashed deltas while training runs, for replicas that are behind; default true. Needs
    /// the memory of two checkpoints.
    #[serde(rename = "folds")]
    pub squash: bool,
    /// How many of a run's newest run states are kept; default 2.
    #[serde(rename = "checkpoints_kept")]
    pub run_states_kept: i64,
    /// Number of threads; default 1. All learners share this many for passes and gradients, and a step
    /// has the same bits on any number. Of models whose gradients libtorch computes (experts, latent
    /// attention, bf16 products) libtorch uses this many for each learner, and bits depend on it; more
    /// than one make it much slower when other processes use the CPU.
    pub threads: u16,
    /// Sleep when there is nothing to do, milliseconds; default 200. The sleep ends early when a
    /// trajectory closes.
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
            judge: Vec::new(),
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
    /// Whether this process runs the realtime run; default true.
    pub enabled: bool,
    /// The line that it writes; default `realtime`. No other value is supported yet.
    pub line: String,
    /// The alias whose traffic it learns from: `learner`, or `champion` where no arm explores.
    /// `control` reads it for its first arms. The trainer learns from what the arms in force say:
    /// `learner` if one of them serves it, else `champion`; if this names the other one, it waits.
    /// If a release moves the alias, the run continues from that version. Default: `learner` if a
    /// `[[release.arm]]` serves it, else `champion`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Arms that are learned from beside that alias, such as `champion`; default none. Their answers count if
    /// a version of the line gave them, at most `staleness_max` steps ago: with 0 hardly any does, and those of an arm that
    /// serves another line never count. They may be greedy, so the loss must be `verdicts`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_arms: Vec<String>,
    /// Trajectories per step; default 32. At least a quarter of them have a gradient, however long
    /// the step waits for that.
    pub cohort_size: u32,
    /// Answers that take longer than this from the first token to the last may be missed, because
    /// the step does not wait for them, seconds; default 60.
    pub answer_seconds_max: f64,
    /// A generation is trained on if the oldest version that sampled it is at most this many steps before
    /// the head; 0 to 64, default 0. The loss corrects for it. What older versions sampled is not compared
    /// with the trainer's log-probabilities.
    pub staleness_max: u32,
    /// A session with more tokens is dropped as `too_large`; default 8388608. Each of its turns counts
    /// with its whole context: so much is in memory at once (4 bytes a token), and goes through the
    /// model, but for turns that continue each other, which go together.
    pub trajectory_tokens_max: u64,
    /// How much one user, tenant, surface or replica may weigh in what is trained on.
    pub caps: Caps,
    /// What rewards are compared with; default `zero`.
    pub baseline: BaselineKind,
    /// What each turn of an episode is credited with; default `trajectory`.
    pub credit: Credit,
    /// How much a reward counts for the turn before, with `credit` `to_go`; 0 to 1, default 1.
    pub discount: f64,
    /// If set, train an adapter instead of all weights. Default: not set. Fields and defaults are
    /// PEFT's; by default it adapts the matrices of all layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<model::lora::Config>,
    /// How one step is computed.
    pub step: StepSettings,
    /// Bounds that a step must keep to be published.
    pub guards: Limits,
    /// Alarms; they do not stop the run.
    pub alarms: Alarms,
}

/// Largest allowed `staleness_max`.
const STALENESS_MAX: u32 = 64;

impl Realtime {
    /// The arms that are learned from, if the run follows this alias.
    pub fn arms(&self, alias: &str) -> Vec<String> {
        let others = self.other_arms.iter().filter(|other| *other != alias);
        std::iter::once(alias)
            .chain(others.map(String::as_str))
            .map(str::to_owned)
            .collect()
    }
}

impl Default for Realtime {
    fn default() -> Self {
        Realtime {
            enabled: true,
            line: "realtime".into(),
            alias: None,
            other_arms: Vec::new(),
            cohort_size: 32,
            answer_seconds_max: 60.0,
            staleness_max: 0,
            trajectory_tokens_max: 1 << 23,
            caps: Caps::default(),
            baseline: BaselineKind::Zero,
            credit: Credit::default(),
            discount: 1.0,
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
    /// Whether this process runs offline runs; default true.
    pub enabled: bool,
    /// How long the fleet may take to serve the run's head, seconds; default 120. Then the run fails.
    pub served_timeout_seconds: u64,
    /// How long graded rollouts may take to become trajectories in the database, seconds; default
    /// 60. Then the run continues with those that have arrived.
    pub arrival_timeout_seconds: u64,
    /// Runs that train or evaluate side by side; default 1. Each has the memory of a model, and of its
    /// optimizer's state if it trains.
    pub runs_max: usize,
    /// Rollouts that the trainer makes at a time for one run: completions, and sessions with environments that it
    /// calls; default 32.
    pub rollouts_max: usize,
    /// The run fails after this many draws of tasks in a row in which every group had equal rewards;
    /// default 20.
    pub empty_draws_max: u32,
    /// Where graders in Python run.
    pub sandbox: grader::SandboxOptions,
    /// Bounds that a step must keep to be published.
    pub guards: Limits,
}

impl Default for Offline {
    fn default() -> Self {
        Offline {
            enabled: true,
            served_timeout_seconds: 120,
            arrival_timeout_seconds: 60,
            runs_max: 1,
            rollouts_max: 32,
            empty_draws_max: 20,
            sandbox: grader::SandboxOptions::default(),
            guards: Limits::default(),
        }
    }
}

impl Options {
    /// Refuses values that cannot work. The text names the field as in the file.
    pub fn check(&self) -> anyhow::Result<()> {
        let positive = [
            ("trainer.image_every", self.checkpoint_every >= 1),
            ("trainer.checkpoints_kept", self.run_states_kept >= 1),
            ("trainer.threads", self.threads >= 1),
            ("trainer.poll_ms", self.poll_ms >= 1),
            ("trainer.realtime.cohort_size", self.realtime.cohort_size >= 1),
            (
                "trainer.realtime.trajectory_tokens_max",
                self.realtime.trajectory_tokens_max >= 1,
            ),
            ("trainer.offline.runs_max", self.offline.runs_max >= 1),
            ("trainer.offline.rollouts_max", self.offline.rollouts_max >= 1),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, valid)| !valid) {
            bail!("{name} must be at least 1");
        }
        self.realtime.alarms.check()?;
        ensure!(
            (0.0..=86_400.0).contains(&self.realtime.answer_seconds_max),
            "trainer.realtime.answer_seconds_max must be from 0 to 86400"
        );
        ensure!(
            self.realtime.staleness_max <= STALENESS_MAX,
            "trainer.realtime.staleness_max must be at most {STALENESS_MAX}"
        );
        ensure!(
            self.realtime.staleness_max == 0 || !self.realtime.step.loss.is_supervised(),
            "trainer.realtime.staleness_max must be 0 with this trainer.realtime.step.loss, which does not weigh the tokens \
             of older versions"
        );
        ensure!(
            (0.0..=1.0).contains(&self.realtime.discount),
            "trainer.realtime.discount must be from 0 to 1"
        );
        if let Some(lora) = &self.realtime.lora {
            lora.check().map_err(|why| anyhow!("trainer.realtime.lora: {why}"))?;
        }
        ensure!(
            !self.realtime.step.loss.is_supervised(),
            "trainer.realtime.step.loss: `cross_entropy` is for runs over a dataset: here it would ignore who sampled"
        );
        ensure!(
            self.realtime.other_arms.is_empty() || self.realtime.step.loss.reads_own_probabilities(),
            "trainer.realtime.other_arms: only the loss `verdicts` learns from more arms than that of the alias, because it does \
             not ask how an answer was sampled"
        );
        let named: BTreeSet<&String> = self.realtime.other_arms.iter().collect();
        ensure!(
            named.len() == self.realtime.other_arms.len(),
            "trainer.realtime.other_arms names an arm twice"
        );
        let Realtime { baseline, step, .. } = &self.realtime;
        ensure!(
            step.loss.is_proportional()
                || *baseline == BaselineKind::Zero && step.aggregation != Aggregation::SeqMeanTokenMean,
            "trainer.realtime.step.loss: `verdicts` takes a reward above 0 for an accept and one below 0 for a reject, so it \
             needs trainer.realtime.baseline = \"zero\"; and it sums over a text, so step.aggregation must not be \
             seq-mean-token-mean"
        );
        judge::check(&self.judge)?;
        for (section, checked) in [
            ("trainer.realtime.step", self.realtime.step.check()),
            ("trainer.realtime.guards", self.realtime.guards.check()),
            ("trainer.realtime.caps", self.realtime.caps.check()),
            ("trainer.offline.guards", self.offline.guards.check()),
            ("trainer.offline.sandbox", self.offline.sandbox.check()),
        ] {
            if let Err(why) = checked {
                bail!("{section}.{why}");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(options: &Options) -> String {
        format!("{:#}", options.check().unwrap_err())
    }

    #[test]
    fn the_defaults_are_valid() {
        Options::default().check().unwrap();
    }

    #[test]
    fn errors_name_the_field_as_in_the_file() {
        let mut options = Options::default();
        options.realtime.cohort_size = 0;
        assert!(error(&options).contains("trainer.realtime.cohort_size"));
        let mut options = Options::default();
        options.realtime.trajectory_tokens_max = 0;
        assert!(error(&options).contains("trainer.realtime.trajectory_tokens_max"));
        let mut options = Options::default();
        options.realtime.step.optimizer.learning_rate = -1.0;
        assert!(error(&options).contains("trainer.realtime.step.optimiser.learning_rate"));
    }

    #[test]
    fn an_adapter_has_the_fields_of_peft_and_is_checked() {
        let with = |json: &str| serde_json::from_str::<Options>(&format!(r#"{{"realtime": {{"lora": {json}}}}}"#));
        let options = with(r#"{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}"#).unwrap();
        options.check().unwrap();
        assert_eq!(options.realtime.lora.as_ref().unwrap().r, 4);
        let error = error(&with(r#"{"r": 0}"#).unwrap());
        assert!(
            error.contains("trainer.realtime.lora") && error.contains("`r`"),
            "{error}"
        );
        assert!(with(r#"{"lora_dropout": 0.1}"#).is_err());
    }

    #[test]
    fn guards_must_be_finite_and_above_0() {
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            let mut options = Options::default();
            options.realtime.guards.kl_max = bad;
            assert!(error(&options).contains("trainer.realtime.guards.kl_max"), "{bad}");
            let mut options = Options::default();
            options.offline.guards.k3_max = bad;
            assert!(error(&options).contains("trainer.offline.guards.k3_max"), "{bad}");
            let mut options = Options::default();
            options.realtime.alarms.remote_k3_max = bad;
            assert!(
                error(&options).contains("trainer.realtime.alarms.remote_k3_max"),
                "{bad}"
            );
        }
        let mut options = Options::default();
        options.offline.guards.difference_max = -1.0;
        assert!(error(&options).contains("trainer.offline.guards.difference_max"));
    }

    #[test]
    fn a_correction_is_chosen_by_its_name_and_checked() {
        let with = |json: &str| serde_json::from_str::<Options>(&format!(r#"{{"realtime": {{"step": {json}}}}}"#));
        let options = with(r#"{"correction": {"name": "tis", "cap": 1.5}}"#).unwrap();
        options.check().unwrap();
        let error = error(&with(r#"{"correction": {"name": "tis", "cap": 0}}"#).unwrap());
        assert!(error.contains("trainer.realtime.step.correction.cap"), "{error}");
        assert!(with(r#"{"correction": {"name": "clip", "cap": 2}}"#).is_err());
    }

    #[test]
    fn older_versions_need_a_loss_that_corrects_for_them() {
        let with = |json: &str| serde_json::from_str::<Options>(&format!(r#"{{"realtime": {json}}}"#)).unwrap();
        with(r#"{"staleness_max": 64, "credit": "to_go", "discount": 0.95}"#)
            .check()
            .unwrap();
        assert_eq!(with(r#"{"credit": "turn"}"#).realtime.credit, Credit::Turn);
        for (bad, field) in [
            (r#"{"staleness_max": 65}"#, "staleness_max"),
            (
                r#"{"staleness_max": 1, "step": {"loss": {"name": "cross_entropy"}}}"#,
                "staleness_max",
            ),
            (r#"{"discount": 1.5}"#, "discount"),
            (
                r#"{"baseline": "ema", "step": {"loss": {"name": "verdicts", "weight_max": 20}}}"#,
                "step.loss",
            ),
            (r#"{"other_arms": ["champion"]}"#, "other_arms"),
            (
                r#"{"other_arms": ["a", "a"], "step": {"loss": {"name": "verdicts", "weight_max": 20}}}"#,
                "other_arms",
            ),
        ] {
            let error = error(&with(bad));
            assert!(error.contains(&format!("trainer.realtime.{field}")), "{error}");
        }
    }

    #[test]
    fn verdicts_are_learned_from_in_other_arms_too() {
        let json = r#"{"realtime": {"other_arms": ["champion", "learner"], "step": {"loss": {"name": "verdicts", "weight_max": 20}}}}"#;
        let options: Options = serde_json::from_str(json).unwrap();
        options.check().unwrap();
        assert_eq!(options.realtime.arms("learner"), ["learner", "champion"]);
        assert_eq!(options.realtime.arms("champion"), ["champion", "learner"]);
        assert_eq!(Options::default().realtime.arms("learner"), ["learner"]);
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let error = serde_json::from_str::<Options>(r#"{"realtime": {"cohort": 3}}"#).unwrap_err();
        assert!(error.to_string().contains("cohort"));
    }
}
