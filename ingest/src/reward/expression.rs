//! A reward as an expression over signals, in CEL (the Common Expression Language): no loops, no side effects, ends always.
//!
//! What an expression can name:
//! - each metric, by its name: the first standing value by event time, or `null`;
//! - `all.<metric>`: the list of all its standing values, oldest first;
//! - `declined` and `shown` (bool; `shown` may be `null`), `tokens` (int, how many were sampled), `finish_reason` (string).
//!
//! It gives a number, the reward, or `null`: then there is no signal and the trajectory is censored. An int and a float do
//! not mix in CEL arithmetic: write `2.0`, or `double(n)`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use cel::{Context, Program, Value};

use super::{Closing, Metric, MetricType, Signal};
use crate::event;

/// Names that are no metrics.
const BUILT_IN: [&str; 5] = ["all", "declined", "shown", "tokens", "finish_reason"];

/// A reward expression that has been read and tried.
#[derive(Debug, Clone)]
pub struct Expression {
    program: Arc<Program>,
    /// Every metric, so that one without a value is `null` and not unknown.
    metrics: Arc<[String]>,
}

/// Brackets and question marks of one expression: what nests.
const NESTED_MAX: usize = 64;

impl Expression {
    /// Reads an expression and tries it: once without any signal, once with one of each metric. What it cannot compute then
    /// it could not compute later.
    pub fn new(text: &str, metrics: &[Metric]) -> anyhow::Result<Self> {
        // The parser loses count beyond its own limit of 96 and panics.
        let nested = text.matches(['(', '[', '{', '?']).count();
        ensure!(
            nested <= NESTED_MAX,
            "has {nested} brackets and question marks, at most {NESTED_MAX} are read"
        );
        let program = Program::compile(text).map_err(|error| anyhow::anyhow!("is no CEL expression: {error}"))?;
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
        };
        let closing = Closing::example();
        expression
            .reward(&closing, &[])
            .context("without any feedback; write `metric == null ? null : …`")?;
        let signals: Vec<Signal> = metrics.iter().map(example).collect();
        let standing: Vec<&Signal> = signals.iter().collect();
        expression
            .reward(&closing, &standing)
            .context("with one feedback of each metric")?;
        Ok(expression)
    }

    /// The reward, `None` for no signal. `standing`: feedback within the horizon that was not taken back, by event time.
    pub fn reward(&self, closing: &Closing, standing: &[&Signal]) -> anyhow::Result<Option<f64>> {
        let mut first: BTreeMap<&str, Value> = BTreeMap::new();
        let mut all: HashMap<String, Vec<Value>> = self.metrics.iter().map(|name| (name.clone(), Vec::new())).collect();
        for signal in standing {
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
        let reward = match self.program.execute(&context).context("it cannot be computed")? {
            Value::Null => return Ok(None),
            Value::Float(reward) => reward,
            Value::Int(reward) => reward as f64,
            Value::UInt(reward) => reward as f64,
            other => bail!("it gives a {}, not a number or null", other.type_of()),
        };
        ensure!(reward.is_finite(), "it gives {reward}");
        Ok(Some(reward))
    }

    /// Whether feedback about this metric can change the reward.
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

/// Whether `name` is the variable of a comprehension such as `all.retry.filter(x, x > 1.0)`.
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

/// A signal of a metric, to try an expression on.
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
        let standing: Vec<&Signal> = signals.iter().collect();
        let expression = Expression::new(text, &metrics()).unwrap();
        expression.reward(&Closing::example(), &standing).unwrap()
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", Expression::new(text, &metrics()).unwrap_err())
    }

    #[test]
    fn a_metric_is_its_first_value_or_null_and_all_are_a_list() {
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
    fn what_cannot_be_computed_is_refused_before_anything_is_scored() {
        assert!(refusal("accept ?").contains("is no CEL expression"));
        assert!(refusal("acept ? 1.0 : 0.0").contains("names \"acept\""));
        let missing = refusal("accept ? 1.0 : 0.0");
        assert!(missing.contains("without any feedback"), "{missing}");
        let text = refusal("accept == null ? null : 'good'");
        assert!(text.contains("not a number"), "{text}");
        let mixed = refusal("kept == null ? null : kept * 2");
        assert!(mixed.contains("with one feedback of each metric"), "{mixed}");
        assert!(refusal("1.0 / 0.0").contains("it gives inf"));
    }

    #[test]
    fn it_is_known_which_metrics_matter() {
        let expression = Expression::new("accept == null ? null : 1.0", &metrics()).unwrap();
        assert!(expression.reads("accept") && !expression.reads("kept") && !expression.reads("nothing"));
    }

    #[test]
    fn what_nests_too_deep_for_the_parser_is_refused_before_it() {
        let text = format!("{}declined ? 0.0 : kept == null* doublella()", "(".repeat(121));
        assert!(refusal(&text).contains("123 brackets"), "{}", refusal(&text));
        let most = format!("{}1.0{}", "(".repeat(NESTED_MAX), ")".repeat(NESTED_MAX));
        assert_eq!(reward(&most, &[]), Some(1.0));
    }
}
