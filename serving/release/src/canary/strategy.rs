//! How a canary gets its users, in the words of Argo Rollouts: steps of `setWeight`, `pause` and
//! `analysis`. Stored with the canary, so that what it was judged by stays known.
//!
//! ```json
//! {"steps": [{"setWeight": 10}, {"pause": {"duration": "10m"}}, {"analysis": {"successCondition": "not_worse"}},
//!            {"setWeight": 50}, {"analysis": {"successCondition": "better", "timeout": "2d"}}]}
//! ```

use edge::options::{above, above_to};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::time::Duration;

const STEPS_MAX: usize = 32;
const APPROVALS_MAX: u32 = 5;
const CLUSTERS_MAX: usize = 64;
/// A month.
const DURATION_MAX: Duration = Duration::from_secs(31 * 24 * 3600);

/// How one canary goes on, and what ends it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Strategy {
    pub steps: Vec<Step>,
    pub judge: Judge,
    /// Before the first user: how the version does on logged trajectories. Default: it is not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Evaluation>,
    /// Before the first user, after the evaluation: how the version answers real requests, unseen. Default:
    /// it is not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow: Option<Shadow>,
    /// After the last step: how long the new `champion` is compared with the one before, which a few users
    /// keep, and taken back if it does harm. Default: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<Watch>,
    /// How long replicas have to load the version before the first user gets it. Then those that have not
    /// go on without it; if none has, it ends. Default: 5 minutes.
    pub prepare: Span,
    /// Different people who must approve it before anybody gets it. Default: 0.
    pub requires_approval: u32,
}

/// One step. `camelCase`, because these are Argo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Percent of `champion`'s users who get it from here on, above 0 to 100.
    SetWeight(f64),
    /// Only users whom replicas of these clusters answer get it from here on. Empty: those of all
    /// clusters.
    SetClusters(Vec<String>),
    Pause(Pause),
    Analysis(Analysis),
}

/// Waits. Harm is looked for meanwhile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Pause {
    /// Until so long after the step began. Without it: until a person resumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<Span>,
}

/// Waits for evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Analysis {
    pub success_condition: Success,
    /// Then the canary pauses for a person. Default: a day.
    #[serde(default = "Analysis::timeout_default")]
    pub timeout: Span,
}

impl Analysis {
    fn timeout_default() -> Span {
        Span(Duration::from_secs(24 * 3600))
    }
}

/// What the version must show on logged trajectories before the first user gets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Evaluation {
    /// A dataset, such as `held-out@1`.
    pub dataset: String,
    /// The version is refused if its estimated reward is lower than `champion`'s by more than this, with
    /// its whole 95% interval. In units of reward. Default: 0.02.
    #[serde(default = "Evaluation::margin_default")]
    pub margin: f64,
    /// The version is refused if its greedy text is what users wrote, the demonstrations of the dataset,
    /// at more than this many of 100 places fewer than `champion`'s. Also if that cannot be measured.
    /// Default: it is not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right_margin: Option<f64>,
    /// How long the evaluations may take. Then the version is refused. Default: an hour.
    #[serde(default = "Evaluation::timeout_default")]
    pub timeout: Span,
}

impl Evaluation {
    fn margin_default() -> f64 {
        0.02
    }

    fn timeout_default() -> Span {
        Span(Duration::from_secs(3600))
    }
}

edge::options! {
    /// Requests of `champion` that the version answers too, unseen, in the capacity that production leaves.
    #[serde(rename_all = "camelCase")]
    pub struct Shadow {
        /// Percent of `champion`'s requests, above 0 to 100.
        pub percent: f64 = 10.0 => above_to(0.0, 100.0),
        /// Then the answers are enough.
        pub answers: u32 = 200 => 1..,
        /// How long they may take. Then the canary goes on with what there is.
        pub timeout: Span = Span(Duration::from_secs(600)),
    }
}

/// A version that became `champion`, beside the one before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Watch {
    pub duration: Span,
    /// Percent of `champion`'s users who keep the version before, above 0 to 50. Default: 5.
    #[serde(default = "Watch::hold_back_default")]
    pub hold_back: f64,
}

impl Watch {
    fn hold_back_default() -> f64 {
        5.0
    }
}

/// What the evidence must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Success {
    /// At most [`Judge::margin`] worse than `champion`.
    NotWorse,
    /// Better than `champion`.
    Better,
}

edge::options! {
    /// What the evidence is compared with. Rewards are those of the policy's definition.
    #[derive(Copy)]
    #[serde(rename_all = "camelCase")]
    pub struct Judge {
        /// How much lower the mean reward may be for `not_worse`, in units of reward.
        pub margin: f64 = 0.02 => above(0.0),
        /// The difference that one wants to see soonest, in units of reward.
        pub effect: f64 = 0.05 => above(0.0),
        /// How often at most a canary that is no worse counts as harm, and one that is no better as
        /// better, however often it is looked at. The five guards add up to a tenth of it each.
        pub alpha: f64 = 0.05 => 0.0001..=0.5,
        /// Users of each side, below which nothing is concluded from rewards.
        pub users_min: u32 = 20,
        /// An answer that takes longer is slow, in milliseconds. More slow answers are harm, as more declined
        /// ones are. Default: none, so nothing is said about time.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub slow_ms: Option<u32> = None,
        /// How much longer or shorter answers may be, as a share of those of `champion`. More holds
        /// the canary.
        pub length_margin: f64 = 0.3,
    }
}

impl Default for Strategy {
    /// A tenth of the users until it is not worse, then half until it is better.
    fn default() -> Self {
        let analysis = |success_condition| {
            Step::Analysis(Analysis {
                success_condition,
                timeout: Analysis::timeout_default(),
            })
        };
        Strategy {
            steps: vec![
                Step::SetWeight(10.0),
                analysis(Success::NotWorse),
                Step::SetWeight(50.0),
                analysis(Success::Better),
            ],
            judge: Judge::default(),
            evaluation: None,
            shadow: None,
            watch: None,
            prepare: Span(Duration::from_secs(300)),
            requires_approval: 0,
        }
    }
}

impl Strategy {
    /// The error names the first field that is wrong, and what it can be.
    pub fn check(&self) -> Result<(), String> {
        let steps = &self.steps;
        if !(1..=STEPS_MAX).contains(&steps.len()) {
            return Err(format!("steps has {} entries; give 1 to {STEPS_MAX}", steps.len()));
        }
        let after_clusters = usize::from(matches!(steps[0], Step::SetClusters(_)));
        if !matches!(steps.get(after_clusters), Some(Step::SetWeight(_))) {
            return Err(
                "steps must begin with setWeight, or with setClusters and then setWeight: before it, nobody gets the version"
                    .to_owned(),
            );
        }
        let mut last = 0.0;
        // empty: all clusters, if anybody gets it yet
        let (mut before, mut limited): (Vec<String>, bool) = (Vec::new(), false);
        for step in steps {
            if let Step::SetWeight(weight) = step {
                if !(*weight > last && *weight <= 100.0) {
                    return Err(format!(
                        "setWeight is {weight} after {last}; weights are percent, above the one before, up to 100"
                    ));
                }
                (last, limited) = (*weight, true);
            }
            if let Step::SetClusters(clusters) = step {
                if clusters.iter().any(String::is_empty) || clusters.len() > CLUSTERS_MAX {
                    return Err(format!(
                        "setClusters names an empty cluster, or more than {CLUSTERS_MAX}; give their names, or [] for all"
                    ));
                }
                let all_before = before.is_empty() && limited;
                let grows = before.iter().all(|cluster| clusters.contains(cluster)) && !all_before;
                if !clusters.is_empty() && !grows {
                    return Err(format!(
                        "setClusters is {clusters:?} after {before:?}: no user goes back, so name those again, or give [] for all"
                    ));
                }
                (before, limited) = (clusters.clone(), true);
            }
        }
        if self.requires_approval > APPROVALS_MAX {
            return Err(format!(
                "requiresApproval is {}; give 0 to {APPROVALS_MAX}",
                self.requires_approval
            ));
        }
        if let Some(evaluation) = &self.evaluation {
            let margin = evaluation.margin;
            if !(margin.is_finite() && margin >= 0.0) {
                return Err(format!("evaluation.margin is {margin}; give 0 or more"));
            }
            let right_margin = evaluation.right_margin.unwrap_or_default();
            if !(0.0..=100.0).contains(&right_margin) {
                return Err(format!("evaluation.rightMargin is {right_margin}; give 0 to 100"));
            }
            if !evaluation.dataset.contains('@') {
                return Err(format!(
                    "evaluation.dataset is {:?}; give its name and version, such as \"held-out@1\"",
                    evaluation.dataset
                ));
            }
        }
        if let Some(shadow) = &self.shadow {
            shadow.check_ranges("shadow")?;
        }
        if let Some(Watch { hold_back, .. }) = self.watch
            && !(hold_back > 0.0 && hold_back <= 50.0)
        {
            return Err(format!(
                "watch.holdBack is {hold_back}; give a number above 0, up to 50"
            ));
        }
        self.judge.check_ranges("judge")?;
        let Judge {
            users_min,
            slow_ms,
            length_margin,
            ..
        } = self.judge;
        if users_min < 2 {
            return Err(format!("judge.usersMin is {users_min}; give 2 or more"));
        }
        if slow_ms == Some(0) {
            return Err("judge.slowMs is 0; give 1 or more, or leave it out".to_owned());
        }
        if !(length_margin.is_finite() && length_margin > 0.0) {
            return Err(format!("judge.lengthMargin is {length_margin}; give a number above 0"));
        }
        Ok(())
    }

    /// Percent of `champion`'s users while the step is under way.
    pub fn weight(&self, step: usize) -> f64 {
        let so_far = self.steps.iter().take(step + 1).rev();
        so_far
            .filter_map(|step| match step {
                Step::SetWeight(weight) => Some(*weight),
                Step::SetClusters(_) | Step::Pause(_) | Step::Analysis(_) => None,
            })
            .next()
            .unwrap_or(0.0)
    }

    /// Whose users get it while the step is under way. `None`: those of all clusters.
    pub fn clusters(&self, step: usize) -> Option<Vec<String>> {
        let so_far = self.steps.iter().take(step + 1).rev();
        let last = so_far
            .filter_map(|step| match step {
                Step::SetClusters(clusters) => Some(clusters.clone()),
                _ => None,
            })
            .next();
        last.filter(|clusters| !clusters.is_empty())
    }
}

/// A length of time, written as in Argo: a number and `s`, `m`, `h` or `d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{}s", self.0.as_secs()))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Span::read(&text).ok_or_else(|| {
            serde::de::Error::custom(format!(
                "{text:?} is no duration: give a whole number with s, m, h or d, such as \"10m\", up to 31d"
            ))
        })
    }
}

impl Span {
    fn read(text: &str) -> Option<Span> {
        let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let seconds = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 24 * 3600,
            _ => return None,
        };
        let number: u32 = number.parse().ok()?;
        let span = Duration::from_secs(u64::from(number) * seconds);
        (span > Duration::ZERO && span <= DURATION_MAX).then_some(Span(span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: Value) -> Result<Strategy, String> {
        let strategy: Strategy = serde_json::from_value(value).map_err(|error| error.to_string())?;
        strategy.check().map(|()| strategy)
    }

    #[test]
    fn a_strategy_is_read_as_argo_writes_it_and_keeps_its_meaning() {
        let strategy = read(json!({
            "steps": [{"setWeight": 5}, {"pause": {"duration": "10m"}}, {"analysis": {"successCondition": "better"}},
                      {"setWeight": 100}, {"pause": {}}],
            "judge": {"margin": 0.01}, "requiresApproval": 2,
        }))
        .unwrap();
        let Step::Pause(pause) = &strategy.steps[1] else {
            panic!("{strategy:?}")
        };
        assert_eq!(pause.duration, Some(Span(Duration::from_secs(600))));
        assert_eq!((strategy.judge.margin, strategy.judge.alpha), (0.01, 0.05));
        let weights: Vec<f64> = (0..5).map(|step| strategy.weight(step)).collect();
        assert_eq!(weights, [5.0, 5.0, 5.0, 100.0, 100.0]);
        assert_eq!(read(serde_json::to_value(&strategy).unwrap()), Ok(strategy));
        Strategy::default().check().unwrap();
    }

    #[test]
    fn clusters_come_one_after_another() {
        let strategy = read(json!({"steps": [
            {"setClusters": ["eu"]}, {"setWeight": 10}, {"setClusters": ["eu", "us"]}, {"setWeight": 50}, {"setClusters": []},
        ]}))
        .unwrap();
        let clusters: Vec<Option<usize>> = (0..5)
            .map(|step| strategy.clusters(step).map(|clusters| clusters.len()))
            .collect();
        assert_eq!(clusters, [Some(1), Some(1), Some(2), Some(2), None]);
        assert_eq!(Strategy::default().clusters(3), None);
    }

    #[test]
    fn errors_name_the_field_and_what_it_can_be() {
        for (value, expected) in [
            (json!({"steps": []}), "steps has 0 entries"),
            (json!({"steps": [{"pause": {}}]}), "must begin with setWeight"),
            (
                json!({"steps": [{"setClusters": ["eu"]}, {"pause": {}}]}),
                "setClusters and then setWeight",
            ),
            (
                json!({"steps": [{"setClusters": ["eu", "us"]}, {"setWeight": 5}, {"setClusters": ["eu"]}]}),
                "no user goes back",
            ),
            (
                json!({"steps": [{"setWeight": 5}, {"setClusters": ["eu"]}]}),
                "no user goes back",
            ),
            (
                json!({"steps": [{"setClusters": [""]}, {"setWeight": 5}]}),
                "setClusters names an empty",
            ),
            (json!({"steps": [{"setWeight": 0}]}), "setWeight is 0 after 0"),
            (
                json!({"steps": [{"setWeight": 20}, {"setWeight": 10}]}),
                "setWeight is 10 after 20",
            ),
            (json!({"steps": [{"setWeight": 101}]}), "setWeight is 101"),
            (
                json!({"steps": [{"setWeight": 5}, {"pause": {"duration": "soon"}}]}),
                "\"soon\" is no duration",
            ),
            (
                json!({"steps": [{"setWeight": 5}, {"pause": {"duration": "0s"}}]}),
                "\"0s\" is no duration",
            ),
            (
                json!({"steps": [{"setWeight": 5}, {"pause": {"duration": "é"}}]}),
                "\"é\" is no duration",
            ),
            (
                json!({"steps": [{"setWeight": 5}, {"analysis": {"successCondition": "good"}}]}),
                "unknown variant `good`",
            ),
            (json!({"judge": {"alpha": 0}}), "judge.alpha is 0"),
            (json!({"judge": {"margin": 0}}), "judge.margin is 0"),
            (json!({"judge": {"effect": -1}}), "judge.effect is -1"),
            (json!({"judge": {"usersMin": 1}}), "judge.usersMin is 1"),
            (json!({"judge": {"slowMs": 0}}), "judge.slowMs is 0"),
            (json!({"judge": {"lengthMargin": 0}}), "judge.lengthMargin is 0"),
            (json!({"evaluation": {"dataset": "held-out"}}), "such as \"held-out@1\""),
            (
                json!({"evaluation": {"dataset": "a@1", "margin": -1}}),
                "evaluation.margin is -1",
            ),
            (
                json!({"evaluation": {"dataset": "a@1", "rightMargin": -1}}),
                "evaluation.rightMargin is -1",
            ),
            (json!({"shadow": {"percent": 0}}), "shadow.percent is 0"),
            (json!({"shadow": {"answers": 0}}), "shadow.answers is 0"),
            (json!({"requiresApproval": 9}), "requiresApproval is 9"),
            (json!({"weights": [1]}), "unknown field `weights`"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert!(error.contains(expected), "{value}: {error}");
        }
    }
}
