//! The metrics of feedback: each has a name and one type of value.

use serde::{Deserialize, Serialize};

use event_log::event::{Target, Value};

/// The type of a metric's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricType {
    /// The surface's `accept` and `reject` are the rewards of true and false.
    Boolean,
    /// The value is the reward.
    Float,
    /// Text for people.
    Comment,
    /// The text that should have been generated.
    Demonstration,
}

impl MetricType {
    pub fn accepts(self, value: &Value) -> bool {
        matches!(
            (self, value),
            (Self::Boolean, Value::Bool(_))
                | (Self::Float, Value::Float(_))
                | (Self::Comment | Self::Demonstration, Value::Text(_))
        )
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Boolean => "boolean",
            Self::Float => "float",
            Self::Comment => "comment",
            Self::Demonstration => "demonstration",
        }
    }
}

/// What a metric is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Generation,
    Episode,
}

/// Which direction is better. Only for display; rewards do not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimize {
    #[default]
    Max,
    Min,
}

/// `[[ingest.metric]]`: a metric that feedback may use. Undeclared metrics accept any value and
/// never decide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    pub name: String,
    /// `boolean`, `float`, `comment` or `demonstration`.
    #[serde(rename = "type")]
    pub metric_type: MetricType,
    /// `generation` or `episode`. Absent: either. Feedback about an episode counts for all its
    /// generations.
    #[serde(default)]
    pub level: Option<Level>,
    /// `max` or `min`. Default: max.
    #[serde(default)]
    pub optimize: Optimize,
}

impl Metric {
    pub fn new(name: &str, metric_type: MetricType) -> Self {
        Self {
            name: name.to_owned(),
            metric_type,
            level: None,
            optimize: Optimize::Max,
        }
    }

    /// Checks feedback of this metric. The error is the field and the rule that it breaks.
    pub fn check(&self, target: Target, value: &Value) -> Result<(), (&'static str, String)> {
        let Self { name, metric_type, .. } = self;
        if !metric_type.accepts(value) {
            let (wants, is) = (metric_type.as_str(), value.kind());
            return Err(("value", format!("metric {name:?} takes a {wants}, not a {is}")));
        }
        if let Value::Float(characters) = value
            && name == super::KEPT_CHARACTERS
            && (*characters < 0.0 || characters.fract() != 0.0)
        {
            return Err((
                "value",
                format!("metric {name:?} counts characters: a whole number from 0"),
            ));
        }
        match (self.level, target) {
            (Some(Level::Generation), Target::Episode(_)) => Err((
                "episode_id",
                format!("metric {name:?} is about a generation: send generation_id"),
            )),
            (Some(Level::Episode), Target::Generation(_)) => Err((
                "generation_id",
                format!("metric {name:?} is about an episode: send episode_id"),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn feedback_must_match_the_type_and_level_of_its_metric() {
        let solved = Metric {
            level: Some(Level::Episode),
            ..Metric::new("solved", MetricType::Boolean)
        };
        let (generation, episode) = (Target::Generation(Uuid::nil()), Target::Episode(Uuid::nil()));
        assert!(solved.check(episode, &Value::Bool(true)).is_ok());
        let (field, rule) = solved.check(generation, &Value::Bool(true)).unwrap_err();
        assert_eq!((field, rule.contains("send episode_id")), ("generation_id", true));
        let (field, rule) = solved.check(episode, &Value::Float(1.0)).unwrap_err();
        assert_eq!(
            (field, rule.as_str()),
            ("value", "metric \"solved\" takes a boolean, not a float")
        );
        let anywhere = Metric::new("comment", MetricType::Comment);
        assert!(anywhere.check(generation, &Value::Text("well".to_owned())).is_ok());
        assert!(anywhere.check(episode, &Value::Bool(true)).is_err());
        let kept = Metric::new(super::super::KEPT_CHARACTERS, MetricType::Float);
        let takes = [3.0, 0.0, -1.0, 1.5].map(|value| kept.check(generation, &Value::Float(value)).is_ok());
        assert_eq!(takes, [true, true, false, false]);
    }
}
