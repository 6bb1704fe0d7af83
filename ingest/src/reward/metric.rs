//! What feedback can be about: named metrics, each with one type.

use serde::{Deserialize, Serialize};

use crate::event::{Target, Value};

/// What kind of value a metric takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricType {
    /// True is worth `accept`, false is worth `reject`.
    Boolean,
    /// The value is the reward.
    Float,
    /// Text, for people.
    Comment,
    /// Text: what should have been generated.
    Demonstration,
}

impl MetricType {
    pub fn takes(self, value: &Value) -> bool {
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

/// Which way is better. For people and pages; a reward says itself what it is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimize {
    #[default]
    Max,
    Min,
}

/// `[[ingest.metric]]`: a name that feedback may use, and what it takes. Names that nobody declared take any value and
/// decide nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    pub name: String,
    /// `boolean`, `float`, `comment` or `demonstration`.
    #[serde(rename = "type")]
    pub metric_type: MetricType,
    /// `generation` or `episode`; absent: feedback may be about either, and about an episode means all its generations.
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

    /// What is wrong with feedback of this metric: the field and the rule.
    pub fn check(&self, target: Target, value: &Value) -> Result<(), (&'static str, String)> {
        let Self { name, metric_type, .. } = self;
        if !metric_type.takes(value) {
            let (wants, is) = (metric_type.as_str(), value.kind());
            return Err(("value", format!("metric {name:?} takes a {wants}, not a {is}")));
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
    fn feedback_keeps_the_type_and_the_level_of_its_metric() {
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
    }
}
