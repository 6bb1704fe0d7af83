//! How a surface turns signals into a reward: pure. Storing definitions is next door, in [`stored`]; when a trajectory
//! closes is the closer's business.

mod expression;
mod metric;
pub mod stored;

use serde::{Deserialize, Serialize};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

pub use expression::Expression;
pub use metric::{Level, Metric, MetricType, Optimize};

use crate::event::{Purpose, Value};

/// A surface: what decides, what it is worth, how long one waits for it. Stored as JSON in `reward_definition`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The surface.
    pub name: String,
    /// The metric whose feedback decides; beside `reward`, whose feedback closes where `close_on_feedback`. Default: accept.
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
    /// A CEL expression over all metrics that alone decides, instead of `accept`, `reject` and `decline`
    /// ([`Expression`] says what it can name). Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<String>,
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
            reward: None,
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
        anyhow::ensure!(
            matches!(self.metric_type, MetricType::Boolean | MetricType::Float),
            "ingest.surface {name:?}: metric_type must be boolean or float; a {} has no worth",
            self.metric_type.as_str()
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

/// A definition that is ready to score.
#[derive(Debug, Clone)]
pub struct Rule {
    pub definition: Definition,
    expression: Option<Expression>,
}

impl Rule {
    /// `metrics`: all that there are. Refuses an expression that cannot be read or computed.
    pub fn new(definition: Definition, metrics: &[Metric]) -> anyhow::Result<Self> {
        use anyhow::Context;
        let expression = definition.reward.as_deref();
        let expression = expression.map(|text| Expression::new(text, metrics)).transpose();
        let expression = expression.with_context(|| format!("ingest.surface {:?}: reward", definition.name))?;
        Ok(Self { definition, expression })
    }

    /// Whether feedback about this metric can change the reward.
    fn reads(&self, metric: &str) -> bool {
        match &self.expression {
            Some(expression) => expression.reads(metric),
            None => metric == self.definition.metric,
        }
    }
}

/// A generation whose horizon has passed.
#[derive(Debug, Clone)]
pub struct Closing {
    pub purpose: Purpose,
    pub declined: bool,
    pub consent: bool,
    /// Absent: the surface did not say.
    pub shown: Option<bool>,
    /// Sampled ones.
    pub tokens: u32,
    pub finish_reason: String,
    /// Event time at which the horizon has passed.
    pub closes_at: OffsetDateTime,
    /// Event time at which the episode ended, if it did.
    pub ended_at: Option<OffsetDateTime>,
}

impl Closing {
    /// One that expressions are tried on.
    pub(crate) fn example() -> Self {
        Self {
            purpose: Purpose::Production,
            declined: false,
            consent: true,
            shown: None,
            tokens: 1,
            finish_reason: "stop".to_owned(),
            closes_at: OffsetDateTime::UNIX_EPOCH,
            ended_at: None,
        }
    }
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
        /// What decided: `accept`, `reject`, `decline`, `value`, `expression`.
        signal: &'static str,
        /// Event time of the deciding feedback; of an expression, of the last one that it reads.
        feedback_at: Option<OffsetDateTime>,
    },
    Censored {
        code: &'static str,
    },
}

/// Consent first, then purpose, then a decline; then the first feedback by event time (by id where two are equal) that
/// was given within the horizon and not taken back within it; or, of all that, what the expression makes of it. What
/// happened after the horizon does not count, however early it was stored.
pub fn score(rule: Option<&Rule>, closing: &Closing, signals: &[Signal]) -> Outcome {
    let censored = |code| Outcome::Censored { code };
    if !closing.consent {
        return censored("no_consent");
    }
    if closing.purpose == Purpose::Evaluation {
        return censored("evaluation");
    }
    let Some(rule) = rule else {
        return censored("unknown_surface");
    };
    let definition = &rule.definition;
    let ended_at = closing.ended_at.filter(|_| definition.close_on_episode_end);
    let closes_at = ended_at.map_or(closing.closes_at, |ended_at| ended_at.min(closing.closes_at));
    let (retracted, mut standing): (Vec<&Signal>, Vec<&Signal>) = signals
        .iter()
        .filter(|signal| rule.reads(&signal.metric) && signal.given_at <= closes_at)
        .partition(|signal| signal.retracted_at.is_some_and(|at| at <= closes_at));
    standing.sort_by_key(|signal| (signal.given_at, signal.id));
    let rewarded = match &rule.expression {
        Some(expression) => match expression.reward(closing, &standing) {
            Ok(reward) => reward.map(|reward| (reward, "expression", standing.last().map(|signal| signal.given_at))),
            // What it could not compute may quote what a user wrote, so it is not logged: the code is counted.
            Err(_) => return censored("reward_error"),
        },
        None => match (closing.declined, definition.decline) {
            (true, Some(reward)) => Some((reward, "decline", None)),
            _ => standing.iter().find_map(|signal| {
                let (reward, name) = definition.worth(&signal.value)?;
                Some((reward, name, Some(signal.given_at)))
            }),
        },
    };
    match rewarded {
        Some((reward, signal, feedback_at)) => Outcome::Rewarded {
            reward,
            signal,
            feedback_at,
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
            closes_at: START + Duration::seconds(4),
            ..Closing::example()
        }
    }

    fn rule(definition: Definition) -> Rule {
        let metrics = [
            Metric::new("accept", MetricType::Boolean),
            Metric::new("kept", MetricType::Float),
        ];
        Rule::new(definition, &metrics).unwrap()
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
        let surface = rule(Definition::completion());
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
        let surface = rule(Definition::completion());
        let signals = [accept(2, true, 300), accept(1, false, 300)];
        assert_eq!(reward(&score(Some(&surface), &closing(), &signals)), -0.25);
    }

    #[test]
    fn feedback_after_the_horizon_is_no_signal() {
        let surface = rule(Definition::completion());
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
        let surface = rule(Definition::completion());
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
        let surface = rule(Definition::completion());
        assert_eq!(reward(&score(Some(&surface), &ended, &signals)), 0.75);
        let closing_at_the_end = rule(Definition {
            close_on_episode_end: true,
            ..Definition::completion()
        });
        let outcome = score(Some(&closing_at_the_end), &ended, &signals);
        assert_eq!(outcome, Outcome::Censored { code: "no_feedback" });
    }

    #[test]
    fn a_decline_is_rewarded_whatever_is_said_about_it() {
        let surface = rule(Definition::completion());
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
        assert_eq!(
            reward(&score(Some(&rule(Definition::rollout())), &declined, &[signal])),
            0.5
        );
    }

    #[test]
    fn an_expression_decides_alone_by_event_time_and_without_what_was_taken_back() {
        let surface = rule(Definition {
            reward: Some("declined ? 0.1 : kept == null ? null : kept".to_owned()),
            ..Definition::completion()
        });
        let kept = |value: f64, after_ms: i64| Signal {
            metric: "kept".to_owned(),
            value: Value::Float(value),
            ..accept(after_ms as u128, true, after_ms)
        };
        let signals = [kept(0.9, 900), kept(0.3, 300), accept(7, false, 1), kept(0.5, 5_000)];
        let outcome = score(Some(&surface), &closing(), &signals);
        let last_read = Some(START + Duration::milliseconds(900));
        assert_eq!(
            outcome,
            Outcome::Rewarded {
                reward: 0.3,
                signal: "expression",
                feedback_at: last_read
            }
        );
        let taken_back = [retracted(1_000, kept(0.3, 300)), accept(7, true, 1)];
        let outcome = score(Some(&surface), &closing(), &taken_back);
        assert_eq!(outcome, Outcome::Censored { code: "retracted" });
        assert_eq!(
            score(Some(&surface), &closing(), &[accept(7, true, 1)]),
            Outcome::Censored { code: "no_feedback" }
        );
        let declined = Closing {
            declined: true,
            ..closing()
        };
        assert_eq!(reward(&score(Some(&surface), &declined, &[])), 0.1);
    }

    #[test]
    fn an_expression_that_fails_censors_and_says_so() {
        let surface = rule(Definition {
            reward: Some("kept == null ? null : (kept < 2.0 ? 1.0 : 1.0 / (kept - kept))".to_owned()),
            ..Definition::completion()
        });
        let signal = Signal {
            metric: "kept".to_owned(),
            value: Value::Float(3.0),
            ..accept(1, true, 1)
        };
        let outcome = score(Some(&surface), &closing(), &[signal]);
        assert_eq!(outcome, Outcome::Censored { code: "reward_error" });
    }

    #[test]
    fn consent_comes_before_everything() {
        let refused = Closing {
            consent: false,
            declined: true,
            purpose: Purpose::Evaluation,
            ..closing()
        };
        let outcome = score(Some(&rule(Definition::completion())), &refused, &[]);
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
        let outcome = score(Some(&rule(Definition::completion())), &closing(), &[comment, number]);
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
