//! A score as Langfuse's public API takes it (`POST /api/public/scores`, `CreateScoreRequest` of its OpenAPI document):
//!
//! | score | feedback |
//! |---|---|
//! | `observationId`, else `traceId` | the generation, else the episode it is about; the other one of both is not needed |
//! | `name` | `metric_name` |
//! | `value`, `dataType` | boolean for `BOOLEAN` (0 or 1), float for `NUMERIC`, text for `CATEGORICAL` and `TEXT`; without a `dataType` a number is a float and a text is a text |
//! | `comment` | a second feedback `comment` about the same thing: that is what the reserved metric is for, and a tag is too short for it |
//! | `environment`, `configId`, `queueId`, `metadata` | tags; of `metadata` the scalars |
//!
//! `sessionId` and `datasetRunId` name things that Springtide has not, so a score about one of them is refused.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value as Json;
use uuid::Uuid;

use crate::event::{Invalid, Target, Value};

/// A field that is not listed is ignored, as Langfuse does: its clients send more with every release.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Score {
    /// The sender's name of the score. Langfuse overwrites an older score of that name; here it is the same feedback.
    pub id: Option<String>,
    trace_id: Option<String>,
    observation_id: Option<String>,
    session_id: Option<String>,
    dataset_run_id: Option<String>,
    name: String,
    value: Json,
    data_type: Option<DataType>,
    comment: Option<String>,
    environment: Option<String>,
    config_id: Option<String>,
    queue_id: Option<String>,
    metadata: Option<Json>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum DataType {
    Numeric,
    Boolean,
    Categorical,
    Text,
    Correction,
}

/// What a score says, without the identity that it gets.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Signals {
    pub target: Target,
    pub metric_name: String,
    pub value: Value,
    pub tags: BTreeMap<String, String>,
    /// Becomes a feedback `comment` of its own.
    pub comment: Option<String>,
}

impl TryFrom<Score> for Signals {
    type Error = Invalid;

    fn try_from(score: Score) -> Result<Self, Invalid> {
        let target = target(&score)?;
        let value = value(score.data_type, score.value)?;
        let mut tags = BTreeMap::new();
        let named = [
            ("environment", score.environment),
            ("config_id", score.config_id),
            ("queue_id", score.queue_id),
        ];
        tags.extend(
            named
                .into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?))),
        );
        metadata(score.metadata, &mut tags)?;
        Ok(Self {
            target,
            metric_name: score.name,
            value,
            tags,
            comment: score.comment.filter(|comment| !comment.is_empty()),
        })
    }
}

fn target(score: &Score) -> Result<Target, Invalid> {
    for (field, value) in [
        ("sessionId", &score.session_id),
        ("datasetRunId", &score.dataset_run_id),
    ] {
        if value.is_some() {
            return Err(Invalid::new(
                field,
                "is not known here: score an observation or a trace",
            ));
        }
    }
    match (&score.observation_id, &score.trace_id) {
        (Some(observation), _) => id("observationId", observation).map(Target::Generation),
        (None, Some(trace)) => id("traceId", trace).map(Target::Episode),
        (None, None) => Err(Invalid::new("traceId", "and observationId are both missing")),
    }
}

/// Trace ids of OpenTelemetry are 32 hexadecimal digits, a UUID without its dashes.
fn id(field: &'static str, text: &str) -> Result<Uuid, Invalid> {
    Uuid::try_parse(text).map_err(|_| Invalid::new(field, "is not the UUID of a generation or an episode"))
}

fn value(data_type: Option<DataType>, value: Json) -> Result<Value, Invalid> {
    let float = |value: Json| value.as_f64().map(Value::Float);
    let text = |value: Json| match value {
        Json::String(text) => Some(Value::Text(text)),
        _ => None,
    };
    let (value, rule) = match data_type {
        Some(DataType::Numeric) => (float(value), "of NUMERIC is a number"),
        Some(DataType::Boolean) => (boolean(&value), "of BOOLEAN is 0 or 1"),
        Some(DataType::Categorical | DataType::Text) => (text(value), "of CATEGORICAL or TEXT is a text"),
        Some(DataType::Correction) => {
            let rule = "CORRECTION is not taken: send a feedback `demonstration`";
            return Err(Invalid::new("dataType", rule));
        }
        None if value.is_number() => (float(value), "is a number or a text"),
        None => (text(value), "is a number or a text"),
    };
    value.ok_or_else(|| Invalid::new("value", rule))
}

fn boolean(value: &Json) -> Option<Value> {
    let number = value.as_f64()?;
    (number == 0.0 || number == 1.0).then_some(Value::Bool(number == 1.0))
}

fn metadata(metadata: Option<Json>, tags: &mut BTreeMap<String, String>) -> Result<(), Invalid> {
    let members = match metadata {
        None => return Ok(()),
        Some(Json::Object(members)) => members,
        Some(_) => return Err(Invalid::new("metadata", "is not an object")),
    };
    for (name, value) in members {
        let text = match value {
            Json::String(text) => text,
            Json::Number(_) | Json::Bool(_) => value.to_string(),
            Json::Null => continue,
            Json::Array(_) | Json::Object(_) => return Err(Invalid::new("metadata", "holds more than scalars")),
        };
        if tags.insert(name, text).is_some() {
            return Err(Invalid::new("metadata", "holds environment, configId or queueId again"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const GENERATION: &str = "019aa5e6-2f40-7abc-8def-0123456789ab";
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn signals(score: &Json) -> Result<Signals, Invalid> {
        serde_json::from_value::<Score>(score.clone()).unwrap().try_into()
    }

    fn changed(name: &str, value: impl Into<Json>) -> Json {
        let mut score = json!({"observationId": GENERATION, "name": "accept", "value": 1});
        score[name] = value.into();
        score
    }

    #[test]
    fn an_observation_is_a_generation_and_a_trace_an_episode() {
        let both = signals(&changed("traceId", TRACE)).unwrap();
        assert_eq!(both.target, Target::Generation(GENERATION.parse().unwrap()));
        let trace = signals(&json!({"traceId": TRACE, "name": "accept", "value": 1})).unwrap();
        assert_eq!(trace.target, Target::Episode(TRACE.parse().unwrap()));
        let neither = signals(&json!({"name": "accept", "value": 1})).unwrap_err();
        assert_eq!(neither.field, "traceId");
        let span = signals(&changed("observationId", "00f067aa0ba902b7")).unwrap_err();
        assert_eq!(span.field, "observationId");
    }

    #[test]
    fn the_type_decides_what_a_value_is() {
        for (data_type, value, expected) in [
            (json!("NUMERIC"), json!(0.9), Some(Value::Float(0.9))),
            (json!("NUMERIC"), json!("0.9"), None),
            (json!("BOOLEAN"), json!(1), Some(Value::Bool(true))),
            (json!("BOOLEAN"), json!(0.0), Some(Value::Bool(false))),
            (json!("BOOLEAN"), json!(0.5), None),
            (json!("BOOLEAN"), json!(true), None),
            (
                json!("CATEGORICAL"),
                json!("good"),
                Some(Value::Text("good".to_owned())),
            ),
            (json!("CATEGORICAL"), json!(1), None),
            (json!("TEXT"), json!("long"), Some(Value::Text("long".to_owned()))),
            (json!("CORRECTION"), json!("better"), None),
            (Json::Null, json!(1), Some(Value::Float(1.0))),
            (Json::Null, json!("good"), Some(Value::Text("good".to_owned()))),
            (Json::Null, json!(true), None),
        ] {
            let mut score = changed("value", value.clone());
            score["dataType"] = data_type.clone();
            let result = signals(&score).map(|signals| signals.value).ok();
            assert_eq!(result, expected, "{data_type} {value}");
        }
    }

    #[test]
    fn what_stands_beside_the_value_becomes_tags_and_a_comment() {
        let mut score = changed("comment", "because");
        score["environment"] = "production".into();
        score["metadata"] = json!({"editor": "vim", "keys": 5, "none": null});
        score["someNewField"] = true.into();
        let signals = signals(&score).unwrap();
        assert_eq!(signals.comment.as_deref(), Some("because"));
        let tags: Vec<_> = signals.tags.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(tags, [("editor", "vim"), ("environment", "production"), ("keys", "5")]);
    }

    #[test]
    fn what_a_feedback_cannot_say_is_refused_by_its_name() {
        for (name, value) in [
            ("sessionId", json!("s")),
            ("datasetRunId", json!("d")),
            ("metadata", json!({"deep": {}})),
            ("metadata", json!([1])),
        ] {
            assert_eq!(signals(&changed(name, value)).unwrap_err().field, name);
        }
    }
}
