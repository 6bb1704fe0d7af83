//! A reward as a CEL expression (Common Expression Language) over signals. CEL has no loops and no
//! side effects, and always terminates.
//!
//! Variables:
//! - each metric by its name: its first value by event time, or `null`;
//! - `all.<metric>`: the list of all its values, oldest first;
//! - `declined` and `shown` (bool; `shown` may be `null`), `tokens` (int, sampled tokens) and
//!   `finish_reason` (string).
//!
//! Values of feedback that was retracted or given after the horizon are not included. The result is
//! the reward, or `null` if there is no signal; the trajectory is then censored. CEL arithmetic
//! does not mix ints and floats: write `2.0`, or `double(n)`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use cel::{Context, Program, Value};

use super::{Closing, Metric, MetricType, Signal};
use crate::event;

/// Variables that are not metrics.
const BUILT_IN: [&str; 5] = ["all", "declined", "shown", "tokens", "finish_reason"];

/// A reward expression that has been compiled and tested.
#[derive(Debug, Clone)]
pub struct Expression {
    program: Arc<Program>,
    /// All metrics, so that one without a value is `null` instead of unknown.
    metrics: Arc<[String]>,
    /// Those of them whose texts it can read.
    texts: Arc<[String]>,
}

/// Maximum brackets and question marks of an expression, which limits its nesting.
const NESTED_MAX: usize = 64;

impl Expression {
    /// Compiles an expression and tests it without signals and with one signal of each metric, so
    /// that most errors show at startup.
    pub fn new(text: &str, metrics: &[Metric]) -> anyhow::Result<Self> {
        // The parser panics beyond its own limit of 96.
        let nested = text.matches(['(', '[', '{', '?']).count();
        ensure!(
            nested <= NESTED_MAX,
            "has {nested} brackets and question marks; at most {NESTED_MAX} are allowed"
        );
        let program = Program::compile(text).map_err(|error| anyhow::anyhow!("is not a CEL expression: {error}"))?;
        let known = |name: &str| BUILT_IN.contains(&name) || metrics.iter().any(|metric| metric.name == name);
        for name in program.references().variables() {
            ensure!(
                known(name) || is_bound(text, name),
                "names {name:?}, which is neither a metric ([[ingest.metric]]) nor one of {}",
                BUILT_IN.join(", ")
            );
        }
        let expression = Self {
            program: Arc::new(program),
            metrics: metrics.iter().map(|metric| metric.name.clone()).collect(),
            texts: metrics
                .iter()
                .filter(|metric| matches!(metric.metric_type, MetricType::Comment | MetricType::Demonstration))
                .map(|metric| &metric.name)
                .filter(|name| text.contains(name.as_str()) || is_all_indexed(text))
                .cloned()
                .collect(),
        };
        let closing = Closing::example();
        expression
            .reward(&closing, &[])
            .context("without any feedback; write `metric == null ? null : …`")?;
        let signals: Vec<Signal> = metrics.iter().map(example).collect();
        let signals: Vec<&Signal> = signals.iter().collect();
        expression
            .reward(&closing, &signals)
            .context("with one feedback event of each metric")?;
        Ok(expression)
    }

    /// The reward. `None` if there is no signal. `signals` are those that count, in the order of
    /// event time.
    pub fn reward(&self, closing: &Closing, signals: &[&Signal]) -> anyhow::Result<Option<f64>> {
        let mut first: BTreeMap<&str, Value> = BTreeMap::new();
        let mut all: HashMap<String, Vec<Value>> = self.metrics.iter().map(|name| (name.clone(), Vec::new())).collect();
        for signal in signals {
            let Some(values) = all.get_mut(&signal.metric) else {
                continue;
            };
            let value = value(&signal.value);
            first.entry(&signal.metric).or_insert_with(|| value.clone());
            values.push(value);
        }
        let mut context = Context::default();
        for name in self.metrics.iter() {
            let value = first.remove(name.as_str()).unwrap_or(Value::Null);
            context.add_variable_from_value(name.as_str(), value);
        }
        context.add_variable_from_value("all", all);
        context.add_variable_from_value("declined", closing.declined);
        context.add_variable_from_value("shown", closing.shown.map_or(Value::Null, Value::Bool));
        context.add_variable_from_value("tokens", i64::from(closing.tokens));
        context.add_variable_from_value("finish_reason", closing.finish_reason.clone());
        let reward = match self.program.execute(&context).context("cannot be computed")? {
            Value::Null => return Ok(None),
            Value::Float(reward) => reward,
            Value::Int(reward) => reward as f64,
            Value::UInt(reward) => reward as f64,
            other => bail!("returns a {}, not a number or null", other.type_of()),
        };
        ensure!(reward.is_finite(), "returns {reward}");
        Ok(Some(reward))
    }

    /// The metrics whose feedback can change the reward, each with whether its text can.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = (&str, bool)> {
        let read = self.metrics.iter().filter(|name| self.reads(name));
        read.map(|name| (name.as_str(), self.texts.contains(name)))
    }

    /// Whether feedback of this metric can change the reward.
    pub fn reads(&self, metric: &str) -> bool {
        let references = self.program.references();
        self.metrics.iter().any(|name| name == metric)
            && (references.has_variable(metric) || references.has_variable("all"))
    }
}

fn value(value: &event::Value) -> Value {
    match value {
        event::Value::Bool(value) => Value::Bool(*value),
        event::Value::Float(value) => Value::Float(*value),
        event::Value::Text(value) => Value::String(Arc::new(value.clone())),
    }
}

/// Whether `all` is used otherwise than as `all.<metric>`, so that it may stand for any metric.
fn is_all_indexed(text: &str) -> bool {
    let in_name = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices("all").any(|(at, all)| {
        let (before, after) = (&text[..at], text[at + all.len()..].trim_start());
        let is_variable = !before.ends_with(in_name)
            && !before.trim_end().ends_with('.')
            && !text[at + all.len()..].starts_with(in_name);
        is_variable && !after.starts_with('.')
    })
}

/// Whether a comprehension such as `all.retry.filter(x, x > 1.0)` binds `name`.
fn is_bound(text: &str, name: &str) -> bool {
    ["all", "exists", "exists_one", "filter", "map"]
        .iter()
        .any(|comprehension| {
            let call = format!(".{comprehension}(");
            text.match_indices(&call).any(|(at, _)| {
                text[at + call.len()..]
                    .trim_start()
                    .strip_prefix(name)
                    .is_some_and(|rest| rest.trim_start().starts_with(','))
            })
        })
}

/// An example signal of a metric.
fn example(metric: &Metric) -> Signal {
    Signal {
        id: uuid::Uuid::nil(),
        metric: metric.name.clone(),
        value: match metric.metric_type {
            MetricType::Boolean => event::Value::Bool(true),
            MetricType::Float => event::Value::Float(1.0),
            MetricType::Comment | MetricType::Demonstration => event::Value::Text("well".to_owned()),
        },
        given_at: time::OffsetDateTime::UNIX_EPOCH,
        retracted_at: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics() -> Vec<Metric> {
        vec![
            Metric::new("accept", MetricType::Boolean),
            Metric::new("kept", MetricType::Float),
            Metric::new("retry", MetricType::Float),
        ]
    }

    fn signal(metric: &str, value: event::Value) -> Signal {
        Signal {
            metric: metric.to_owned(),
            value,
            ..example(&metrics()[0])
        }
    }

    fn reward(text: &str, signals: &[Signal]) -> Option<f64> {
        let signals: Vec<&Signal> = signals.iter().collect();
        let expression = Expression::new(text, &metrics()).unwrap();
        expression.reward(&Closing::example(), &signals).unwrap()
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", Expression::new(text, &metrics()).unwrap_err())
    }

    #[test]
    fn a_metric_is_its_first_value_or_null_and_all_is_a_list() {
        let accepted = signal("accept", event::Value::Bool(true));
        let rejected = signal("accept", event::Value::Bool(false));
        let text = "accept == null ? null : (accept ? 0.75 : -0.25)";
        assert_eq!(reward(text, &[]), None);
        assert_eq!(reward(text, &[accepted.clone(), rejected.clone()]), Some(0.75));
        assert_eq!(reward(text, &[rejected, accepted]), Some(-0.25));
        let retries = [(); 3].map(|()| signal("retry", event::Value::Float(1.0)));
        assert_eq!(reward("-0.5 * double(all.retry.size())", &retries), Some(-1.5));
        assert_eq!(reward("all.retry.filter(n, n > 2.0).size()", &retries), Some(0.0));
    }

    #[test]
    fn signals_can_be_weighed_against_each_other() {
        let text = "declined ? 0.0 : kept == null ? null : kept - 0.1 * double(all.retry.size())";
        let signals = [
            signal("kept", event::Value::Float(0.5)),
            signal("retry", event::Value::Float(1.0)),
            signal("unknown", event::Value::Float(9.0)),
        ];
        assert_eq!(reward(text, &signals), Some(0.4));
    }

    #[test]
    fn an_expression_that_cannot_be_computed_is_refused_at_startup() {
        assert!(refusal("accept ?").contains("is not a CEL expression"));
        assert!(refusal("acept ? 1.0 : 0.0").contains("names \"acept\""));
        let missing = refusal("accept ? 1.0 : 0.0");
        assert!(missing.contains("without any feedback"), "{missing}");
        let text = refusal("accept == null ? null : 'good'");
        assert!(text.contains("not a number"), "{text}");
        let mixed = refusal("kept == null ? null : kept * 2");
        assert!(mixed.contains("with one feedback event of each metric"), "{mixed}");
        assert!(refusal("1.0 / 0.0").contains("returns inf"));
    }

    #[test]
    fn an_expression_knows_which_metrics_it_reads() {
        let expression = Expression::new("accept == null ? null : 1.0", &metrics()).unwrap();
        assert!(expression.reads("accept") && !expression.reads("kept") && !expression.reads("nothing"));
    }

    #[test]
    fn too_deep_nesting_is_refused_before_the_parser() {
        let text = format!("{}declined ? 0.0 : kept == null* doublella()", "(".repeat(121));
        assert!(refusal(&text).contains("123 brackets"), "{}", refusal(&text));
        let most = format!("{}1.0{}", "(".repeat(NESTED_MAX), ")".repeat(NESTED_MAX));
        assert_eq!(reward(&most, &[]), Some(1.0));
    }
}
