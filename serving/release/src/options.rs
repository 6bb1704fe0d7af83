//! Configuration of the release loop and of the experiment.

use super::canary::{Span, Strategy};
use super::{BASE, webhook};
use anyhow::{bail, ensure};
use artifact::assignment::{CHAMPION, EXPLORE_MAX, LEARNER, TEMPERATURE_BOUND_MAX};
use edge::window::Window;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Largest `champion_every`. Each look at the heads walks so many versions.
const CHAMPION_EVERY_MAX: u32 = 1000;

edge::options! {
    /// Options of the release loop, which runs in the control role.
    pub struct Options {
        /// The arms of the experiment until a request sets others, as in `[[release.arm]] alias =
        /// "champion" weight = 0.5`. Default: learner 0.3, champion 0.5, base 0.2.
        #[serde(rename = "arm")]
        pub arms: Vec<ArmOptions> = vec![arm(LEARNER, 0.3, 0.02), arm(CHAMPION, 0.5, 0.0), arm(BASE, 0.2, 0.0)],
        /// `champion` moves to the version of `learner` when it is this many versions behind, 1 to 1000.
        /// Default: 1, so it moves with every new version.
        pub champion_every: u32 = 1 => 1..=CHAMPION_EVERY_MAX,
        /// What moves champion by itself: `follow` (learner), or `canary` (canaries alone, by
        /// evidence).
        pub champion: ChampionBy,
        /// What becomes of learner when a canary did harm that it was trained on top of: `rebase`
        /// (it continues from champion), `pause`, or `continue`.
        pub after_harm: AfterHarm,
        /// Hours in which no canary begins or goes a step further by itself. Harm is looked for all
        /// the time, and people may decide.
        pub freeze: Vec<Window> = Vec::new(),
        /// When versions of `learner` are proposed as canaries.
        pub propose: Option<Cadence> = None,
        /// Who is told of decisions.
        pub webhook: Vec<webhook::Options> = Vec::new(),
        /// How often lines and runs are polled, milliseconds. Moved lines are seen at once.
        pub poll_interval_ms: u64 = 250 => 1..,
        /// How a canary goes on whose proposal does not say it.
        pub canary: Strategy,
    }
}

/// What moves `champion` by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChampionBy {
    /// It follows `learner`: every [`Options::champion_every`]th version.
    #[default]
    Follow,
    /// Canaries alone, by evidence.
    Canary,
}

/// What becomes of `learner` when a version that it was trained on top of did harm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AfterHarm {
    /// It continues from the version of `champion`.
    #[default]
    Rebase,
    /// It is held where it is, so the realtime run pauses until a person decides.
    Pause,
    /// It learns on.
    Continue,
}

edge::options! {
    /// When the version of `learner` is proposed as a canary: as soon as all of it holds and no canary is
    /// under way.
    #[derive(Copy)]
    pub struct Cadence {
        /// So long after the canary before it ended.
        pub every: Span = Span(Duration::from_secs(3600)),
        /// It is this many versions further than the one proposed before, and than `champion`.
        pub versions: u32 = 1 => 1..,
        /// These versions were trained on so many trajectories.
        pub trajectories: u64 = 0,
    }
}

/// One arm of the experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmOptions {
    pub alias: String,
    /// Share of the users. All weights sum to 1.
    pub weight: f64,
    /// Share of the arm's requests in which the policy must not decline, so that a policy that
    /// declines often still gets feedback. 0 to 0.5, default 0.
    #[serde(default)]
    pub explore: f64,
    /// Highest temperature of users' requests of the arm: hotter ones are sampled at it. 0 to 2, and
    /// 0 is greedy. Default: none, so each request is sampled at its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_max: Option<f64>,
    /// Lowest probability of a text that users of the arm are shown: of a less probable one they are
    /// told that the policy declined. 0 to below 1. Default: none, so they are shown all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probability_min: Option<f64>,
}

/// What releases know of the realtime run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Learning {
    /// The alias that it learns from.
    pub alias: LearningAlias,
    /// Whether it runs. Then the alias needs an arm.
    pub enabled: bool,
}

/// The aliases that a realtime run can learn from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LearningAlias {
    #[default]
    Learner,
    /// No arm explores: `champion` follows every head and is learned from.
    Champion,
}

impl LearningAlias {
    pub fn name(self) -> &'static str {
        match self {
            LearningAlias::Learner => LEARNER,
            LearningAlias::Champion => CHAMPION,
        }
    }

    pub fn of(alias: &str) -> Option<Self> {
        [LearningAlias::Learner, LearningAlias::Champion]
            .into_iter()
            .find(|known| known.name() == alias)
    }

    /// The alias to learn from if the configuration names none: `learner` if an arm serves it.
    pub fn by_arms(arms: &[ArmOptions]) -> Self {
        match arms.iter().any(|arm| arm.alias == LEARNER) {
            true => LearningAlias::Learner,
            false => LearningAlias::Champion,
        }
    }
}

impl Default for Learning {
    fn default() -> Self {
        Learning {
            alias: LearningAlias::Learner,
            enabled: true,
        }
    }
}

fn arm(alias: &str, weight: f64, explore: f64) -> ArmOptions {
    ArmOptions {
        alias: alias.into(),
        weight,
        explore,
        temperature_max: None,
        probability_min: None,
    }
}

impl Options {
    /// The default arms where the realtime run learns from `champion`.
    pub fn arms_without_learner() -> Vec<ArmOptions> {
        vec![arm(CHAMPION, 0.6, 0.02), arm(BASE, 0.4, 0.0)]
    }

    /// Checks all values. The error names the first invalid one.
    pub fn check(&self) -> anyhow::Result<()> {
        check_arms("release.arm", &self.arms)?;
        self.check_ranges("release")?;
        if let Some(cadence) = &self.propose {
            cadence.check_ranges("release.propose")?;
            ensure!(
                self.champion == ChampionBy::Canary,
                "[release.propose] is set, but release.champion is \"follow\": set it to \"canary\", so that champion stays where \
                 it is while a canary is compared with it"
            );
        }
        webhook::check(&self.webhook)?;
        if let Err(error) = self.canary.check() {
            bail!("release.canary.{error}");
        }
        Ok(())
    }
}

/// Checks the arms of an experiment, which errors call `name`.
pub(super) fn check_arms(name: &str, arms: &[ArmOptions]) -> anyhow::Result<()> {
    ensure!(
        !arms.is_empty(),
        "{name} is empty; name at least champion with weight 1"
    );
    let total: f64 = arms.iter().map(|arm| arm.weight).sum();
    if (total - 1.0).abs() > 1e-6 || arms.iter().any(|arm| arm.weight.is_nan() || arm.weight <= 0.0) {
        bail!(
            "{name} weights are {:?}; each must be above 0, and they must sum to 1",
            arms.iter().map(|arm| arm.weight).collect::<Vec<_>>()
        );
    }
    for (i, arm) in arms.iter().enumerate() {
        ensure!(
            arms[..i].iter().all(|other| other.alias != arm.alias),
            "{name} names {:?} twice",
            arm.alias
        );
        ensure!(
            (0.0..=EXPLORE_MAX).contains(&arm.explore),
            "{name} {:?} has explore = {}; give 0 to {EXPLORE_MAX}",
            arm.alias,
            arm.explore
        );
        if let Some(max) = arm.temperature_max {
            ensure!(
                (0.0..=TEMPERATURE_BOUND_MAX).contains(&max),
                "{name} {:?} has temperature_max = {max}; give 0 to {TEMPERATURE_BOUND_MAX}, or leave it out for no bound",
                arm.alias
            );
        }
        if let Some(min) = arm.probability_min {
            ensure!(
                (0.0..1.0).contains(&min),
                "{name} {:?} has probability_min = {min}; give 0 to below 1, or leave it out to show all texts",
                arm.alias
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Options::default().check().unwrap();
        check_arms("arms", &Options::arms_without_learner()).unwrap();
    }

    #[test]
    fn an_error_names_the_invalid_field() {
        let refusal = |change: &dyn Fn(&mut Options)| {
            let mut options = Options::default();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        assert!(refusal(&|o| o.arms[0].weight = 0.7).contains("release.arm weights"));
        assert!(refusal(&|o| o.arms[0].weight = f64::NAN).contains("release.arm weights"));
        assert!(refusal(&|o| o.arms.clear()).contains("release.arm is empty"));
        assert!(refusal(&|o| o.arms[0].alias = "base".into()).contains("\"base\" twice"));
        assert!(refusal(&|o| o.arms[0].explore = 0.6).contains("explore = 0.6"));
        for max in [-0.1, 2.5, f64::NAN] {
            let error = refusal(&|o| o.arms[1].temperature_max = Some(max));
            assert!(
                error.contains(&format!("temperature_max = {max}; give 0 to 2")),
                "{error}"
            );
        }
        for min in [-0.1, 1.0, f64::NAN] {
            let error = refusal(&|o| o.arms[1].probability_min = Some(min));
            assert!(
                error.contains(&format!("probability_min = {min}; give 0 to below 1")),
                "{error}"
            );
        }
        assert!(refusal(&|o| o.propose = Some(Cadence::default())).contains("set it to \"canary\""));
        let none = Cadence {
            versions: 0,
            ..Cadence::default()
        };
        assert!(refusal(&|o| o.propose = Some(none)).contains("release.propose.versions is 0"));
        for n in [0, 1001] {
            assert!(refusal(&|o| o.champion_every = n).contains("release.champion_every"));
        }
    }

    #[test]
    fn a_bound_on_the_temperature_is_from_greedy_to_the_hottest_request() {
        for max in [0.0, 0.3, 2.0] {
            let mut options = Options::default();
            options.arms[1].temperature_max = Some(max);
            options.check().unwrap();
        }
    }

    #[test]
    fn a_bar_is_any_probability_below_1() {
        for min in [0.0, 0.25, 0.999] {
            let mut options = Options::default();
            options.arms[1].probability_min = Some(min);
            options.check().unwrap();
        }
    }

    #[test]
    fn absent_bounds_of_an_arm_are_not_written() {
        let written = r#"{"alias":"champion","weight":0.5,"explore":0.0}"#;
        let mut arm: ArmOptions = serde_json::from_str(written).unwrap();
        assert_eq!(arm, super::arm(CHAMPION, 0.5, 0.0));
        assert_eq!(serde_json::to_string(&arm).unwrap(), written);
        (arm.temperature_max, arm.probability_min) = (Some(0.3), Some(0.25));
        let text = serde_json::to_string(&arm).unwrap();
        assert_eq!(
            text,
            written.replace('}', r#","temperature_max":0.3,"probability_min":0.25}"#)
        );
        assert_eq!(serde_json::from_str::<ArmOptions>(&text).unwrap(), arm);
    }

    #[test]
    fn the_run_learns_from_learner_if_an_arm_serves_it_and_else_from_champion() {
        let mut arms = Options::default().arms;
        assert_eq!(LearningAlias::by_arms(&arms), LearningAlias::Learner);
        arms.remove(0);
        assert_eq!(LearningAlias::by_arms(&arms), LearningAlias::Champion);
        assert_eq!(LearningAlias::of("learner"), Some(LearningAlias::Learner));
        assert_eq!(LearningAlias::of("champion"), Some(LearningAlias::Champion));
        assert_eq!(LearningAlias::of("base"), None);
    }
}
