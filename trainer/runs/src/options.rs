//! `[trainer]` of `springtide.toml`. Every field has a default. Invalid values are refused when the
//! file is loaded.

mod alarms;

use crate::advantage::{BaselineKind, Credit};
use crate::door::TrainedBy;
use crate::grader;
use crate::judge;
use crate::select::caps::Caps;
use crate::settings::{Aggregation, Limits, StepSettings};
use anyhow::{anyhow, bail, ensure};
use std::collections::BTreeSet;

pub use alarms::{Alarms, SHOW_RATE_WINDOW_MIN};

edge::options! {
    /// `[trainer]`.
    pub struct Options {
        /// The realtime run.
        pub realtime: Realtime,
        /// Offline runs.
        pub offline: Offline,
        /// `[[trainer.launcher]]`: commands that train the cohorts of runs.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub launcher: Vec<Launcher> = Vec::new(),
        /// `[[trainer.judge]]`: models that graders of offline runs may ask.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub judge: Vec<judge::Options> = Vec::new(),
        /// Steps between full checkpoints. A checkpoint is also published when the deltas since the
        /// last one exceed half of its bytes.
        #[serde(rename = "image_every")]
        pub checkpoint_every: i64 = 50 => 1..,
        /// Make squashed deltas while training runs, for replicas that are behind. Needs the memory
        /// of two checkpoints.
        #[serde(rename = "folds")]
        pub squash: bool = true,
        /// How many of a run's newest run states are kept.
        #[serde(rename = "checkpoints_kept")]
        pub run_states_kept: i64 = 2 => 1..,
        /// Number of threads. All learners share this many for passes and gradients, and a step has
        /// the same bits on any number. Of models whose gradients libtorch computes (experts, latent
        /// attention, bf16 products) libtorch uses this many for each learner, and bits depend on
        /// it; more than one make it much slower when other processes use the CPU.
        pub threads: u16 = 1 => 1..,
        /// Sleep when there is nothing to do, milliseconds. The sleep ends early when a trajectory
        /// closes.
        pub poll_ms: u64 = 200 => 1..,
        /// Key for the serving API, if it requires one. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
    }
}

edge::options! {
    /// `[[trainer.launcher]]`: a command that leases a run's cohorts and commits them, such as torchrun. It
    /// gets `SPRINGTIDE_RUN`, `SPRINGTIDE_CONTROL` and `SPRINGTIDE_API_KEY`, and is started again when it
    /// ends.
    pub struct Launcher {
        /// How runs name it.
        pub name: String,
        /// The program and its arguments; no shell reads them.
        pub command: Vec<String>,
        /// It is not started again after so many further ends in a row without a step between them: the run
        /// pauses.
        pub restarts_max: u32 = 3,
        /// Key for `control`, with the scopes `train` and `read`. Never printed.
        #[serde(skip_serializing)]
        pub api_key: Option<String> = None,
    }
}

edge::options! {
    /// `[trainer.realtime]`: learning from production.
    pub struct Realtime {
        /// Whether this process runs the realtime run.
        pub enabled: bool = true,
        /// Who computes its steps: `springtide`, this process; `external`, whoever leases its cohorts; or
        /// { launcher = "NAME" }, the same, started by this process.
        #[serde(skip_serializing_if = "TrainedBy::is_springtide")]
        pub trainer: TrainedBy,
        /// The alias whose traffic it learns from: `learner`, or `champion` where no arm explores.
        /// `control` reads it for its first arms. The trainer learns from what the arms in force say:
        /// `learner` if one of them serves it, else `champion`; if this names the other one, it waits.
        /// If a release moves the alias, the run continues from that version. Default: `learner` if a
        /// `[[release.arm]]` serves it, else `champion`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub alias: Option<String> = None,
        /// Arms that are learned from beside that alias, such as `champion`. Their answers count if
        /// a version of the line gave them, at most `staleness_max` steps ago: with 0 hardly any
        /// does, and those of an arm that serves another line never count. They may be greedy, so
        /// the loss must be `verdicts`.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub other_arms: Vec<String> = Vec::new(),
        /// Trajectories per step; an episode is one. At least a quarter of them have a gradient,
        /// however long that takes.
        pub cohort_size: u32 = 32 => 1..,
        /// A cohort is also full when it has so many trained tokens. Default: not set.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub cohort_tokens: Option<u64> = None,
        /// A cohort with a trajectory is also full so many seconds after the step before. Default: not set.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub cohort_seconds: Option<f64> = None,
        /// Answers that take longer from the first token to the last may be missed, seconds. The
        /// step waits for the others, so that it does not favor short answers.
        pub answer_seconds_max: f64 = 60.0 => 0.0..=86_400.0,
        /// A generation is trained on if the oldest version that sampled it is at most so many steps
        /// before the head, 0 to 64. For sessions, set it to the steps that most of them last. The
        /// loss corrects for it, so it must not be `cross_entropy`. Samples of older versions are
        /// not compared with the trainer's log-probabilities.
        pub staleness_max: u32 = 0 => 0..=STALENESS_MAX,
        /// A session with more tokens is dropped as `too_large`. Each of its turns counts with its
        /// whole context: so much is in memory at once (4 bytes a token), and goes through the
        /// model, but for turns that continue each other, which go together.
        pub trajectory_tokens_max: u64 = 1 << 23 => 1..,
        /// Share of `cohort_size` in which users' `demonstration`s take the place of what was sampled, 0 to 1. They
        /// write into the weights more directly than verdicts. Only with the loss `verdicts`, and only of keys
        /// with the scope `teach`.
        pub demonstration_share_max: f64 = 0.0 => 0.0..=1.0,
        /// How much one user, tenant, surface or replica may weigh in what is trained on.
        pub caps: Caps,
        /// What rewards are compared with: `zero`, or `ema` (running mean).
        pub baseline: BaselineKind = BaselineKind::Zero,
        /// What each turn of an episode is credited with: `trajectory` (the episode's reward),
        /// `to_go` (that and the turn rewards from this turn on, discounted) or `turn` (the turn's
        /// own reward, if it has one).
        pub credit: Credit,
        /// How much a reward counts for the turn before, with `credit` `to_go`; 0 to 1.
        pub discount: f64 = 1.0 => 0.0..=1.0,
        /// If set, train an adapter instead of all weights. Default: not set. Fields and defaults are
        /// PEFT's; by default it adapts the matrices of all layers.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub lora: Option<model::lora::Config> = None,
        /// How one step is computed.
        pub step: StepSettings,
        /// Bounds that a step must keep to be published.
        pub guards: Limits,
        /// Alarms; they do not stop the run.
        pub alarms: Alarms,
    }
}

/// The line that the realtime run writes, which the release loop follows.
pub const REALTIME_LINE: &str = "realtime";
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

edge::options! {
    /// `[trainer.offline]`: settings that all offline runs share. Settings of one run are in its
    /// request.
    pub struct Offline {
        /// Whether this process runs offline runs.
        pub enabled: bool = true,
        /// How long the fleet may take to serve the run's head, seconds. Then the run fails.
        pub served_timeout_seconds: u64 = 120,
        /// How long graded rollouts may take to become trajectories in the database, seconds. Then
        /// the run continues with those that have arrived.
        pub arrival_timeout_seconds: u64 = 60,
        /// Runs that train or evaluate side by side. Each has the memory of a model, and of its
        /// optimizer's state if it trains.
        pub runs_max: usize = 1 => 1..,
        /// Rollouts that the trainer makes at a time for one run: completions, and sessions with
        /// environments that it calls.
        pub rollouts_max: usize = 32 => 1..,
        /// The run fails after this many draws of tasks in a row in which every group had equal
        /// rewards.
        pub empty_draws_max: u32 = 20,
        /// Where graders in Python run.
        pub sandbox: grader::SandboxOptions,
        /// Bounds that a step must keep to be published.
        pub guards: Limits,
    }
}

impl Options {
    /// Refuses values that cannot work. The text names the field as in the file.
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("trainer")?;
        self.realtime.check_ranges("trainer.realtime")?;
        self.realtime.guards.check_ranges("trainer.realtime.guards")?;
        self.realtime.caps.check_ranges("trainer.realtime.caps")?;
        self.offline.check_ranges("trainer.offline")?;
        self.offline.guards.check_ranges("trainer.offline.guards")?;
        self.offline.sandbox.check_ranges("trainer.offline.sandbox")?;
        self.realtime.alarms.check()?;
        ensure!(
            self.realtime.staleness_max == 0 || !self.realtime.step.loss.is_supervised(),
            "trainer.realtime.staleness_max must be 0 with this trainer.realtime.step.loss, which does not weigh the tokens \
             of older versions"
        );
        ensure!(
            self.realtime.trainer.is_springtide() || self.realtime.lora.is_none(),
            "trainer.realtime.lora: a trainer outside publishes all weights; leave it out with trainer.realtime.trainer = \
             \"external\""
        );
        ensure!(
            self.realtime.cohort_tokens != Some(0) && self.realtime.cohort_seconds.is_none_or(|seconds| seconds > 0.0),
            "trainer.realtime.cohort_tokens and cohort_seconds must be above 0"
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
        ensure!(
            self.realtime.demonstration_share_max == 0.0
                || self.realtime.step.loss.reads_own_probabilities() && self.realtime.trainer.is_springtide(),
            "trainer.realtime.demonstration_share_max: only the loss `verdicts` of our own trainer learns from demonstrations; \
             set it to 0"
        );
        let typed = self.realtime.demonstration_share_max;
        ensure!(
            typed == 0.0 || typed * f64::from(self.realtime.cohort_size) >= 1.0,
            "trainer.realtime.demonstration_share_max: that share of cohort_size is less than one trajectory; set it to 0 to \
             learn from no demonstration"
        );
        ensure!(
            typed == 0.0 || self.realtime.cohort_tokens.is_none() && self.realtime.cohort_seconds.is_none(),
            "trainer.realtime.demonstration_share_max is a share of cohort_size, so cohort_tokens and cohort_seconds must not \
             be set"
        );
        let named: BTreeSet<&String> = self.realtime.other_arms.iter().collect();
        ensure!(
            named.len() == self.realtime.other_arms.len(),
            "trainer.realtime.other_arms names an arm twice"
        );
        let Realtime { baseline, step, .. } = &self.realtime;
        ensure!(
            !step.loss.reads_own_probabilities()
                || *baseline == BaselineKind::Zero && step.aggregation != Aggregation::SeqMeanTokenMean,
            "trainer.realtime.step.loss: `verdicts` takes a reward above 0 for an accept and one below 0 for a reject, so it \
             needs trainer.realtime.baseline = \"zero\"; and it sums over a text, so step.aggregation must not be \
             seq-mean-token-mean"
        );
        judge::check(&self.judge)?;
        for (i, launcher) in self.launcher.iter().enumerate() {
            let name = &launcher.name;
            ensure!(
                !name.is_empty() && !launcher.command.is_empty(),
                "trainer.launcher {name:?}: name and command must not be empty"
            );
            ensure!(
                self.launcher.iter().take(i).all(|other| other.name != *name),
                "trainer.launcher {name:?} is declared twice"
            );
        }
        if let TrainedBy::Launcher(name) = &self.realtime.trainer {
            ensure!(
                self.launcher.iter().any(|launcher| launcher.name == *name),
                "trainer.realtime.trainer: there is no [[trainer.launcher]] {name:?}"
            );
        }
        if let Err(why) = self.realtime.step.check() {
            bail!("trainer.realtime.step.{why}");
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
