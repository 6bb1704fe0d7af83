//! How a surface turns signals into a reward: pure. Storing definitions is next door, in [`stored`]; when a trajectory
//! closes is the closer's business.

pub mod stored;

use serde::{Deserialize, Serialize};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::event::{Purpose, Value};

/// What kind of value a metric takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricType {
    /// True is worth `accept`, false is worth `reject`.
    Boolean,
    /// The value is the reward.
    Float,
}

impl MetricType {
    pub fn takes(self, value: &Value) -> bool {
        matches!(
            (self, value),
            (Self::Boolean, Value::Bool(_)) | (Self::Float, Value::Float(_))
        )
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Boolean => "boolean",
            Self::Float => "float",
        }
    }
}

/// A surface: what decides, what it is worth, how long one waits for it. Stored as JSON in `reward_definition`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The surface.
    pub name: String,
    /// The metric whose feedback decides. Default: accept.
    #[serde(default = "accept_metric")]
    pub metric: String,
    /// `boolean` or `float`. Default: boolean.
    #[serde(default = "boolean")]
    pub metric_type: MetricType,
    /// How long after a generation its feedback counts, seconds.
    pub horizon_seconds: f64,
    /// Reward of a true. Default: 0.75.
    #[serde(default = "three_quarters")]
    pub accept: f64,
    /// Reward of a false. Default: −0.25.
    #[serde(default = "minus_one_quarter")]
    pub reject: f64,
    /// Reward of a declined generation. Absent: declining is no signal, feedback decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decline: Option<f64>,
    /// Close when the episode ends instead of waiting for the horizon; feedback given after the end does not count. For
    /// harnesses that know when they are done. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub close_on_episode_end: bool,
    /// Close as soon as the deciding feedback is there instead of waiting for the horizon. Where users give feedback this
    /// would favour the fast ones; for graders it saves the wait. Default: false.
    #[serde(default)]
    pub close_on_feedback: bool,
}

fn accept_metric() -> String {
    "accept".to_owned()
}
fn boolean() -> MetricType {
    MetricType::Boolean
}
fn three_quarters() -> f64 {
    0.75
}
fn minus_one_quarter() -> f64 {
    -0.25
}

impl Definition {
    /// A code completion: shown, then taken or not within 3 seconds.
    pub fn completion() -> Self {
        Self {
            name: "completion".to_owned(),
            metric: accept_metric(),
            metric_type: MetricType::Boolean,
            horizon_seconds: 3.0,
            accept: 0.75,
            reject: -0.25,
            decline: Some(0.0),
            close_on_episode_end: false,
            close_on_feedback: false,
        }
    }

    /// A rollout: a grader's float is the reward.
    pub fn rollout() -> Self {
        Self {
            name: "rollout".to_owned(),
            metric: "reward".to_owned(),
            metric_type: MetricType::Float,
            horizon_seconds: 3600.0,
            decline: None,
            close_on_feedback: true,
            ..Self::completion()
        }
    }

    pub fn horizon(&self) -> Duration {
        Duration::seconds_f64(self.horizon_seconds)
    }

    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        let name = &self.name;
        anyhow::ensure!(!name.is_empty(), "ingest.surface: a name is empty");
        anyhow::ensure!(!self.metric.is_empty(), "ingest.surface {name:?}: metric is empty");
        anyhow::ensure!(
            self.horizon_seconds > 0.0 && self.horizon_seconds <= 31.0 * 86_400.0,
            "ingest.surface {name:?}: horizon_seconds must be between 0 and 31 days"
        );
        for value in [self.accept, self.reject, self.decline.unwrap_or(0.0)] {
            anyhow::ensure!(value.is_finite(), "ingest.surface {name:?}: a reward is not finite");
        }
        Ok(())
    }

    fn worth(&self, value: &Value) -> Option<(f64, &'static str)> {
        match (self.metric_type, value) {
            (MetricType::Boolean, Value::Bool(true)) => Some((self.accept, "accept")),
            (MetricType::Boolean, Value::Bool(false)) => Some((self.reject, "reject")),
            (MetricType::Float, Value::Float(value)) => Some((*value, "value")),
            _ => None,
        }
    }
}

/// A generation whose horizon has passed.
#[derive(Debug, Clone)]
pub struct Closing {
    pub purpose: Purpose,
    pub declined: bool,
    pub consent: bool,
    /// Event time at which the horizon has passed.
    pub closes_at: OffsetDateTime,
    /// Event time at which the episode ended, if it did.
    pub ended_at: Option<OffsetDateTime>,
}

/// One feedback about it.
#[derive(Debug, Clone)]
pub struct Signal {
    pub id: Uuid,
    pub metric: String,
    pub value: Value,
    pub given_at: OffsetDateTime,
    /// Event time at which it was first taken back, if it was.
    pub retracted_at: Option<OffsetDateTime>,
}

/// What a closed trajectory is.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Rewarded {
        reward: f64,
        /// What decided: `accept`, `reject`, `decline`, `value`.
        signal: &'static str,
        /// Event time of the deciding feedback.
        feedback_at: Option<OffsetDateTime>,
    },
    Censored {
        code: &'static str,
    },
}

/// Consent first, then purpose, then a decline; then the first feedback by event time (by id where two are equal) that
/// was given within the horizon and not taken back within it. What happened after the horizon does not count, however
/// early it was stored.
pub fn score(definition: Option<&Definition>, closing: &Closing, signals: &[Signal]) -> Outcome {
    let censored = |code| Outcome::Censored { code };
    if !closing.consent {
        return censored("no_consent");
    }
    if closing.purpose == Purpose::Evaluation {
        return censored("evaluation");
    }
    let Some(definition) = definition else {
        return censored("unknown_surface");
    };
    if let (true, Some(reward)) = (closing.declined, definition.decline) {
        return Outcome::Rewarded {
            reward,
            signal: "decline",
            feedback_at: None,
        };
    }
    let ended_at = closing.ended_at.filter(|_| definition.close_on_episode_end);
    let closes_at = ended_at.map_or(closing.closes_at, |ended_at| ended_at.min(closing.closes_at));
    let (retracted, standing): (Vec<_>, Vec<_>) = signals
        .iter()
        .filter(|signal| signal.metric == definition.metric)
        .filter(|signal| signal.given_at <= closes_at)
        .filter_map(|signal| Some((signal, definition.worth(&signal.value)?)))
        .partition(|(signal, _)| signal.retracted_at.is_some_and(|at| at <= closes_at));
    let first = standing
        .into_iter()
        .min_by_key(|(signal, _)| (signal.given_at, signal.id));
    match first {
        Some((signal, (reward, name))) => Outcome::Rewarded {
            reward,
            signal: name,
            feedback_at: Some(signal.given_at),
        },
        None if !retracted.is_empty() => censored("retracted"),
        None => censored("no_feedback"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: OffsetDateTime = time::macros::datetime!(2026-11-21 12:00 UTC);

    fn closing() -> Closing {
        Closing {
            purpose: Purpose::Production,
            declined: false,
            consent: true,
            closes_at: START + Duration::seconds(4),
            ended_at: None,
        }
    }

    fn accept(id: u128, value: bool, after_ms: i64) -> Signal {
        Signal {
            id: Uuid::from_u128(id),
            metric: "accept".to_owned(),
            value: Value::Bool(value),
            given_at: START + Duration::milliseconds(after_ms),
            retracted_at: None,
        }
    }

    fn reward(outcome: &Outcome) -> f64 {
        match outcome {
            Outcome::Rewarded { reward, .. } => *reward,
            Outcome::Censored { code } => panic!("censored: {code}"),
        }
    }

    #[test]
    fn the_first_feedback_by_event_time_decides_whatever_the_order_of_arrival() {
        let surface = Definition::completion();
        let signals = [accept(1, false, 900), accept(2, true, 300)];
        let outcome = score(Some(&surface), &closing(), &signals);
        assert_eq!(
            outcome,
            Outcome::Rewarded {
                reward: 0.75,
                signal: "accept",
                feedback_at: Some(START + Duration::milliseconds(300)),
            }
        );
    }

    #[test]
    fn of_two_at_the_same_moment_the_smaller_id_decides() {
        let surface = Definition::completion();
        let signals = [accept(2, true, 300), accept(1, false, 300)];
        assert_eq!(reward(&score(Some(&surface), &closing(), &signals)), -0.25);
    }

    #[test]
    fn feedback_after_the_horizon_is_no_signal() {
        let surface = Definition::completion();
        let on_the_edge = score(Some(&surface), &closing(), &[accept(1, true, 4_000)]);
        assert_eq!(reward(&on_the_edge), 0.75);
        let after = score(Some(&surface), &closing(), &[accept(1, true, 4_001)]);
        assert_eq!(after, Outcome::Censored { code: "no_feedback" });
    }

    fn retracted(after_ms: i64, signal: Signal) -> Signal {
        Signal {
            retracted_at: Some(START + Duration::milliseconds(after_ms)),
            ..signal
        }
    }

    #[test]
    fn feedback_that_is_taken_back_within_the_horizon_never_counted() {
        let surface = Definition::completion();
        let taken_back = retracted(2_000, accept(1, true, 300));
        let alone = score(Some(&surface), &closing(), std::slice::from_ref(&taken_back));
        assert_eq!(alone, Outcome::Censored { code: "retracted" });
        let next = score(Some(&surface), &closing(), &[taken_back, accept(2, false, 900)]);
        assert_eq!(reward(&next), -0.25, "the next one decides");
        let too_late = retracted(4_001, accept(1, true, 300));
        assert_eq!(reward(&score(Some(&surface), &closing(), &[too_late])), 0.75);
    }

    #[test]
    fn an_episode_that_ended_heard_everything_where_the_surface_says_so() {
        let ended = Closing {
            ended_at: Some(START + Duration::seconds(1)),
            ..closing()
        };
        let signals = [accept(1, true, 1_500)];
        let surface = Definition::completion();
        assert_eq!(reward(&score(Some(&surface), &ended, &signals)), 0.75);
        let closing_at_the_end = Definition {
            close_on_episode_end: true,
            ..surface
        };
        let outcome = score(Some(&closing_at_the_end), &ended, &signals);
        assert_eq!(outcome, Outcome::Censored { code: "no_feedback" });
    }

    #[test]
    fn a_decline_is_rewarded_whatever_is_said_about_it() {
        let surface = Definition::completion();
        let declined = Closing {
            declined: true,
            ..closing()
        };
        let outcome = score(Some(&surface), &declined, &[accept(1, false, 10)]);
        assert_eq!(reward(&outcome), 0.0);
    }

    #[test]
    fn a_declined_rollout_is_what_its_grader_says() {
        let declined = Closing {
            declined: true,
            ..closing()
        };
        let signal = Signal {
            metric: "reward".to_owned(),
            value: Value::Float(0.5),
            ..accept(1, true, 10)
        };
        assert_eq!(reward(&score(Some(&Definition::rollout()), &declined, &[signal])), 0.5);
    }

    #[test]
    fn consent_comes_before_everything() {
        let refused = Closing {
            consent: false,
            declined: true,
            purpose: Purpose::Evaluation,
            ..closing()
        };
        let outcome = score(Some(&Definition::completion()), &refused, &[]);
        assert_eq!(outcome, Outcome::Censored { code: "no_consent" });
    }

    #[test]
    fn other_metrics_and_other_types_decide_nothing() {
        let comment = Signal {
            metric: "comment".to_owned(),
            value: Value::Text("nice".to_owned()),
            ..accept(1, true, 1)
        };
        let number = Signal {
            value: Value::Float(1.0),
            ..accept(2, true, 2)
        };
        let outcome = score(Some(&Definition::completion()), &closing(), &[comment, number]);
        assert_eq!(outcome, Outcome::Censored { code: "no_feedback" });
    }

    #[test]
    fn a_surface_that_nobody_defined_is_censored() {
        let outcome = score(None, &closing(), &[accept(1, true, 1)]);
        assert_eq!(
            outcome,
            Outcome::Censored {
                code: "unknown_surface"
            }
        );
    }
}
