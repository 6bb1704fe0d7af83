//! How a canary gets its users, in the words of Argo Rollouts: steps of `setWeight`, `pause` and
//! `analysis`. Stored with the canary, so that what it was judged by stays known.
//!
//! ```json
//! {"steps": [{"setWeight": 10}, {"pause": {"duration": "10m"}}, {"analysis": {"successCondition": "not_worse"}},
//!            {"setWeight": 50}, {"analysis": {"successCondition": "better", "timeout": "2d"}}]}
//! ```

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::time::Duration;

const STEPS_MAX: usize = 32;
const APPROVALS_MAX: u32 = 5;
/// A month.
const DURATION_MAX: Duration = Duration::from_secs(31 * 24 * 3600);

/// How one canary goes on, and what ends it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Strategy {
    pub steps: Vec<Step>,
    pub judge: Judge,
    /// Different people who must approve it before anybody gets it. Default: 0.
    pub requires_approval: u32,
}

/// One step. `camelCase`, because these are Argo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Percent of `champion`'s users who get it from here on, above 0 to 100.
    SetWeight(f64),
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

/// What the evidence must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Success {
    /// At most [`Judge::margin`] worse than `champion`.
    NotWorse,
    /// Better than `champion`.
    Better,
}

/// What the evidence is compared with. Rewards are those of the policy's definition.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Judge {
    /// How much lower the mean reward may be for `not_worse`, in units of reward. Default: 0.02.
    pub margin: f64,
    /// The difference that one wants to see soonest, in units of reward. Default: 0.05.
    pub effect: f64,
    /// How often at most a canary that is no worse counts as harm, and one that is no better as better,
    /// however often it is looked at. Default: 0.05.
    pub alpha: f64,
    /// Users of each side, below which nothing is concluded from rewards. Default: 20.
    pub users_min: u32,
}

impl Default for Judge {
    fn default() -> Self {
        Judge {
            margin: 0.02,
            effect: 0.05,
            alpha: 0.05,
            users_min: 20,
        }
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
        if !matches!(steps[0], Step::SetWeight(_)) {
            return Err("steps must begin with setWeight: before it, nobody gets the version".to_owned());
        }
        let mut last = 0.0;
        for step in steps {
            if let Step::SetWeight(weight) = step {
                if !(*weight > last && *weight <= 100.0) {
                    return Err(format!(
                        "setWeight is {weight} after {last}; weights are percent, above the one before, up to 100"
                    ));
                }
                last = *weight;
            }
        }
        if self.requires_approval > APPROVALS_MAX {
            return Err(format!(
                "requiresApproval is {}; give 0 to {APPROVALS_MAX}",
                self.requires_approval
            ));
        }
        let Judge {
            margin,
            effect,
            alpha,
            users_min,
        } = self.judge;
        if !(margin.is_finite() && margin > 0.0) {
            return Err(format!("judge.margin is {margin}; give a number above 0"));
        }
        if !(effect.is_finite() && effect > 0.0) {
            return Err(format!("judge.effect is {effect}; give a number above 0"));
        }
        if !(0.0001..=0.5).contains(&alpha) {
            return Err(format!("judge.alpha is {alpha}; give 0.0001 to 0.5"));
        }
        if users_min < 2 {
            return Err(format!("judge.usersMin is {users_min}; give 2 or more"));
        }
        Ok(())
    }

    /// Percent of `champion`'s users while the step is under way.
    pub fn weight(&self, step: usize) -> f64 {
        let so_far = self.steps.iter().take(step + 1).rev();
        so_far
            .filter_map(|step| match step {
                Step::SetWeight(weight) => Some(*weight),
                Step::Pause(_) | Step::Analysis(_) => None,
            })
            .next()
            .unwrap_or(0.0)
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
    fn errors_name_the_field_and_what_it_can_be() {
        for (value, expected) in [
            (json!({"steps": []}), "steps has 0 entries"),
            (json!({"steps": [{"pause": {}}]}), "must begin with setWeight"),
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
            (json!({"requiresApproval": 9}), "requiresApproval is 9"),
            (json!({"weights": [1]}), "unknown field `weights`"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert!(error.contains(expected), "{value}: {error}");
        }
    }
}
