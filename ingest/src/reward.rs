//! Computes the reward of a trajectory from its signals, and until when signals count. Pure
//! functions, except for [`stored`], which stores the definitions. [`episode`] is about surfaces
//! whose trajectory is an episode.

pub(crate) mod episode;
mod expression;
mod metric;
pub mod stored;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

pub use expression::{EpisodeFacts, Expression};
pub use metric::{Level, Metric, MetricType, Optimize};

use event_log::event::{Purpose, Value, to_microseconds};
use event_log::lease::Lease;

/// The metric that says how many characters of a shown text, from its beginning, are still there. Every
/// surface of generations reads it beside its own. It changes no reward: a trainer learns from it which
/// tokens were right.
pub const KEPT_CHARACTERS: &str = "kept_characters";

/// What the trajectory of a surface is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    #[default]
    Generation,
    Episode,
}

impl Unit {
    fn is_generation(&self) -> bool {
        *self == Self::Generation
    }
}

/// A surface: the metric that decides, the rewards of its values, and the horizon. Stored as JSON
/// in `reward_definition`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The surface.
    pub name: String,
    /// `generation`, or `episode`: the generations of an episode share one trajectory, and the
    /// horizon counts from the last of them. Feedback about the episode decides its reward. Default:
    /// generation.
    #[serde(default, skip_serializing_if = "Unit::is_generation")]
    pub trajectory: Unit,
    /// The metric whose feedback decides. With `reward`, it only decides for `close_on_feedback`.
    /// Default: accept.
    #[serde(default = "accept_metric")]
    pub metric: String,
    /// `boolean` or `float`. Default: boolean.
    #[serde(default = "boolean")]
    pub metric_type: MetricType,
    /// How long after a generation, or the last turn of an episode, feedback counts, seconds.
    pub horizon_seconds: f64,
    /// Reward of a true. Default: 0.75.
    #[serde(default = "three_quarters")]
    pub accept: f64,
    /// Reward of a false. Default: −0.25.
    #[serde(default = "minus_one_quarter")]
    pub reject: f64,
    /// Reward of a declined generation, or of an episode in which every turn was declined. Absent:
    /// feedback decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decline: Option<f64>,
    /// Smallest reward that is trained on. A trajectory whose reward is smaller keeps it and is
    /// quarantined by the trainer. Default: −1, or the smallest of `accept`, `reject` and `decline`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_min: Option<f64>,
    /// Largest reward that is trained on. Default: 1, or the largest of `accept`, `reject` and
    /// `decline`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_max: Option<f64>,
    /// `rollout`: production generations of this surface are quarantined by the trainer, because
    /// its feedback is a grader's. The surface named `rollout` is always of this kind. Default:
    /// generations of every purpose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purpose: Option<Purpose>,
    /// A CEL expression over all metrics ([`Expression`]) that replaces `accept`, `reject` and
    /// `decline`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<String>,
    /// A CEL expression over one turn of an episode and the feedback about that turn: the turn's own
    /// reward, stored beside the episode's. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn_reward: Option<String>,
    /// Close when the episode ends instead of at the horizon. Later feedback does not count. For
    /// harnesses that know when they are done. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub close_on_episode_end: bool,
    /// Close when the deciding feedback arrives instead of at the horizon. Useful for graders. With
    /// users it would favor fast feedback. Default: false.
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
    /// An answer that users accept or reject within ten minutes.
    pub fn completion() -> Self {
        Self {
            name: "completion".to_owned(),
            trajectory: Unit::Generation,
            metric: accept_metric(),
            metric_type: MetricType::Boolean,
            horizon_seconds: 600.0,
            accept: 0.75,
            reject: -0.25,
            decline: Some(0.0),
            reward_min: None,
            reward_max: None,
            purpose: None,
            reward: None,
            turn_reward: None,
            close_on_episode_end: false,
            close_on_feedback: false,
        }
    }

    /// A rollout. A grader's float closes it. A GRPO run takes the reward from the table `rollout`.
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

    /// The rollout of a harness: a session that ends with its reward.
    pub fn environment() -> Self {
        Self {
            name: Lease::SURFACE.to_owned(),
            trajectory: Unit::Episode,
            purpose: Some(Purpose::Rollout),
            horizon_seconds: 86_400.0,
            close_on_feedback: false,
            close_on_episode_end: true,
            ..Self::rollout()
        }
    }

    pub fn horizon(&self) -> Duration {
        Duration::seconds_f64(self.horizon_seconds)
    }

    /// Refuses values out of range.
    pub fn check(&self) -> anyhow::Result<()> {
        let name = &self.name;
        anyhow::ensure!(!name.is_empty(), "ingest.surface: a name is empty");
        // the trainer separates a surface from a turn with one
        anyhow::ensure!(
            !name.contains(char::is_control),
            "ingest.surface {name:?}: a name must not contain control characters"
        );
        anyhow::ensure!(!self.metric.is_empty(), "ingest.surface {name:?}: metric is empty");
        anyhow::ensure!(
            self.horizon_seconds > 0.0 && self.horizon_seconds <= 31.0 * 86_400.0,
            "ingest.surface {name:?}: horizon_seconds must be between 0 and 31 days"
        );
        anyhow::ensure!(
            matches!(self.metric_type, MetricType::Boolean | MetricType::Float),
            "ingest.surface {name:?}: metric_type must be boolean or float; a {} has no reward",
            self.metric_type.as_str()
        );
        for value in [self.accept, self.reject, self.decline.unwrap_or(0.0)] {
            anyhow::ensure!(value.is_finite(), "ingest.surface {name:?}: a reward is not finite");
        }
        anyhow::ensure!(
            self.purpose.is_none_or(|purpose| purpose == Purpose::Rollout),
            "ingest.surface {name:?}: purpose may only be rollout"
        );
        anyhow::ensure!(
            self.turn_reward.is_none() || self.trajectory == Unit::Episode,
            "ingest.surface {name:?}: turn_reward needs trajectory = \"episode\"; a generation has only `reward`"
        );
        anyhow::ensure!(
            name != "rollout" || self.trajectory == Unit::Generation,
            "ingest.surface \"rollout\": trajectory must be \"generation\"; episodes of a harness have the surface \
             \"environment\""
        );
        anyhow::ensure!(
            name != Lease::SURFACE || self.trajectory == Unit::Episode && self.close_on_episode_end,
            "ingest.surface \"environment\": trajectory must be \"episode\" and close_on_episode_end true, because the \
             harness of a rollout ends it with its reward"
        );
        self.check_bounds()
    }

    fn check_bounds(&self) -> anyhow::Result<()> {
        let name = &self.name;
        let given = [self.reward_min, self.reward_max];
        anyhow::ensure!(
            given.into_iter().flatten().all(f64::is_finite),
            "ingest.surface {name:?}: reward_min or reward_max is not finite"
        );
        let (min, max) = (
            self.reward_min.unwrap_or(f64::NEG_INFINITY),
            self.reward_max.unwrap_or(f64::INFINITY),
        );
        anyhow::ensure!(
            min < max,
            "ingest.surface {name:?}: reward_min must be below reward_max"
        );
        // an expression replaces them
        let own = [Some(self.accept), Some(self.reject), self.decline];
        let used = self.reward.is_none() && self.metric_type == MetricType::Boolean;
        for value in own.into_iter().flatten().filter(|_| used) {
            anyhow::ensure!(
                (min..=max).contains(&value),
                "ingest.surface {name:?}: the reward {value} lies outside reward_min and reward_max"
            );
        }
        Ok(())
    }

    /// The reward of a feedback value, and what decided.
    fn reward_of(&self, value: &Value) -> Option<(f64, &'static str)> {
        match (self.metric_type, value) {
            (MetricType::Boolean, Value::Bool(true)) => Some((self.accept, "accept")),
            (MetricType::Boolean, Value::Bool(false)) => Some((self.reject, "reject")),
            (MetricType::Float, Value::Float(value)) => Some((*value, "value")),
            _ => None,
        }
    }
}

/// A definition with its compiled expression.
#[derive(Debug, Clone)]
pub struct Rule {
    pub definition: Definition,
    expression: Option<Expression>,
    turn_expression: Option<Expression>,
}

impl Rule {
    /// `metrics` are all metrics of the configuration. Refuses an invalid expression.
    pub fn new(definition: Definition, metrics: &[Metric]) -> anyhow::Result<Self> {
        use anyhow::Context;
        let expression = definition.reward.as_deref().map(|text| match definition.trajectory {
            Unit::Generation => Expression::new(text, metrics),
            Unit::Episode => Expression::of_episode(text, metrics),
        });
        let expression = expression.transpose();
        let expression = expression.with_context(|| format!("ingest.surface {:?}: reward", definition.name))?;
        let turn_expression = definition.turn_reward.as_deref();
        let turn_expression = turn_expression.map(|text| Expression::new(text, metrics)).transpose();
        let turn_expression =
            turn_expression.with_context(|| format!("ingest.surface {:?}: turn_reward", definition.name))?;
        Ok(Self {
            definition,
            expression,
            turn_expression,
        })
    }

    pub(crate) fn is_of_episodes(&self) -> bool {
        self.definition.trajectory == Unit::Episode
    }

    /// The metrics whose feedback is read: it can change the reward or when it is given, or says what was
    /// kept. Each with whether the text of its feedback is. For an episode: whose feedback about the episode can.
    pub(crate) fn metrics(&self) -> BTreeMap<&str, bool> {
        let mut metrics = BTreeMap::new();
        if !self.is_of_episodes() {
            metrics.insert(KEPT_CHARACTERS, false);
        }
        // Without an expression, it decides; with one, it may still end the horizon.
        if self.expression.is_none() || self.definition.close_on_feedback {
            metrics.insert(self.definition.metric.as_str(), false);
        }
        if let Some(expression) = &self.expression {
            metrics.extend(expression.metrics());
        }
        metrics
    }

    /// The metrics whose feedback about turns can change the reward of the episode or of the turn,
    /// each with whether its text can.
    pub(crate) fn turn_metrics(&self) -> BTreeMap<&str, bool> {
        let of_episode = self.expression.iter().flat_map(Expression::turn_metrics);
        let mut metrics: BTreeMap<&str, bool> = of_episode.map(|name| (name.as_str(), false)).collect();
        for (name, reads_text) in self.turn_expression.iter().flat_map(Expression::metrics) {
            *metrics.entry(name).or_default() |= reads_text;
        }
        metrics
    }

    /// Whether the value of this metric can matter, so that a missing one must not be taken for none.
    /// Other than [`Self::metrics`], an expression that uses `all.<metric>` refers to that metric
    /// alone.
    pub(crate) fn refers_to(&self, metric: &str) -> bool {
        let decides = self.expression.is_none() || self.definition.close_on_feedback;
        (decides && metric == self.definition.metric)
            || self
                .expression
                .as_ref()
                .is_some_and(|expression| expression.refers_to(metric))
    }

    /// The same for feedback about turns.
    pub(crate) fn turns_refer_to(&self, metric: &str) -> bool {
        let of_episode = self.expression.iter().flat_map(Expression::turn_metrics);
        let of_turn = self.turn_expression.as_ref();
        of_episode.into_iter().any(|name| name == metric)
            || of_turn.is_some_and(|expression| expression.refers_to(metric))
    }

    /// Whether turns are looked at one by one.
    pub(crate) fn reads_turns(&self) -> bool {
        self.turn_expression.is_some() || !self.turn_metrics().is_empty()
    }

    /// Whether feedback about this metric can change the reward. For an episode: whether feedback
    /// about the episode can.
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
    /// Absent: unknown.
    pub shown: Option<bool>,
    /// Number of sampled tokens.
    pub tokens: u32,
    pub finish_reason: String,
    /// Event time at which the horizon starts.
    pub starts_at: OffsetDateTime,
    /// Event time at which the episode ended, if it did.
    pub ended_at: Option<OffsetDateTime>,
}

impl Closing {
    /// An example on which expressions are tested.
    pub(crate) fn example() -> Self {
        Self {
            purpose: Purpose::Production,
            declined: false,
            consent: true,
            shown: None,
            tokens: 1,
            finish_reason: "stop".to_owned(),
            starts_at: OffsetDateTime::UNIX_EPOCH,
            ended_at: None,
        }
    }

    /// Event time after which no signal counts: the end of the horizon, or an earlier end by the
    /// rule. Without a rule, there is no horizon.
    pub fn closes_at(&self, rule: Option<&Rule>, signals: &[Signal]) -> OffsetDateTime {
        let Some(definition) = rule.map(|rule| &rule.definition) else {
            return self.starts_at;
        };
        let horizon = to_microseconds(self.starts_at + definition.horizon());
        let ended = self.ended_at.filter(|_| definition.close_on_episode_end);
        let deciding = signals.iter().filter(|signal| signal.metric == definition.metric);
        let decided = deciding.map(|signal| signal.given_at).min();
        let decided = decided.filter(|_| definition.close_on_feedback);
        let early = [ended, decided].into_iter().flatten();
        // Not before it starts: what is dated back must not shut out what others say.
        early.fold(horizon, |at, early| at.min(early.max(self.starts_at)))
    }
}

/// When the horizon of a generation starts: after its last token. The time of its id is a lower
/// bound, so a producer whose clock is behind does not shorten the horizon.
pub fn starts_at(sampled_at: OffsetDateTime, finished_at: OffsetDateTime) -> OffsetDateTime {
    sampled_at.max(finished_at)
}

/// A feedback event about the generation, its episode or its turn.
#[derive(Debug, Clone)]
pub struct Signal {
    pub id: Uuid,
    pub metric: String,
    pub value: Value,
    pub given_at: OffsetDateTime,
    /// Event time of its first retraction, if any.
    pub retracted_at: Option<OffsetDateTime>,
}

/// The result of a trajectory.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Rewarded {
        reward: f64,
        /// What decided: `accept`, `reject`, `decline`, `value`, `expression`.
        signal: &'static str,
        /// Event time of the deciding feedback. For an expression: of the last feedback that it
        /// reads.
        feedback_at: Option<OffsetDateTime>,
    },
    Censored {
        code: &'static str,
    },
}

/// Scores a trajectory of one generation. Events after the horizon do not count, even if they were stored early.
///
/// Checks consent first, then purpose, then a decline. Then the first feedback decides that was
/// given within the horizon and not retracted within it, in the order of event time and id. An
/// expression replaces the last two steps. The code `redefined` means that the surface's
/// trajectories became episodes while the generation was open.
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
    if rule.is_of_episodes() {
        return censored("redefined");
    }
    let definition = &rule.definition;
    let closes_at = closing.closes_at(Some(rule), signals);
    let (retracted, mut counting): (Vec<&Signal>, Vec<&Signal>) = signals
        .iter()
        .filter(|signal| rule.reads(&signal.metric) && signal.given_at <= closes_at)
        .partition(|signal| signal.retracted_at.is_some_and(|at| at <= closes_at));
    counting.sort_by_key(|signal| (signal.given_at, signal.id));
    let rewarded = match &rule.expression {
        Some(expression) => match expression.reward(closing, &counting) {
            Ok(reward) => reward.map(|reward| (reward, "expression", counting.last().map(|signal| signal.given_at))),
            // Not logged, because the error may quote user text. The metric counts the code.
            Err(_) => return censored("reward_error"),
        },
        None => match (closing.declined, definition.decline) {
            (true, Some(reward)) => Some((reward, "decline", None)),
            _ => counting.iter().find_map(|signal| {
                let (reward, name) = definition.reward_of(&signal.value)?;
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

/// How many characters of a generation were kept, by the last feedback about it that counts. `None`:
/// nobody said.
pub(crate) fn kept_characters(closes_at: OffsetDateTime, signals: &[Signal]) -> Option<i32> {
    let counts = |signal: &&Signal| {
        signal.metric == KEPT_CHARACTERS
            && signal.given_at <= closes_at
            && signal.retracted_at.is_none_or(|at| at > closes_at)
    };
    let last = signals
        .iter()
        .filter(counts)
        .max_by_key(|signal| (signal.given_at, signal.id))?;
    match last.value {
        Value::Float(characters) => Some(characters.clamp(0.0, f64::from(i32::MAX)) as i32),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
