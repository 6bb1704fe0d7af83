//! A reward as a CEL expression (Common Expression Language) over signals. CEL has no loops and no
//! side effects, and always terminates.
//!
//! Variables of a generation's expression, and of the `turn_reward` of a turn:
//! - each metric by its name: its first value by event time, or `null`;
//! - `all.<metric>`: the list of all its values, oldest first;
//! - `declined` and `shown` (bool; `shown` may be `null`), `tokens` (int, sampled tokens) and
//!   `finish_reason` (string).
//!
//! Variables of an episode's expression:
//! - each metric by its name, and `all.<metric>`: feedback about the episode, as above;
//! - `turn.first.<metric>`, `turn.last.<metric>`, `turn.mean.<metric>`, `turn.count.<metric>` and
//!   `turn.all.<metric>`: feedback about its turns. A turn has one value of a metric, its first by
//!   event time, or none. `first` and `last` are those of the first and the last turn that has one
//!   (else `null`), `mean` is over turns that have one (a boolean counts as 0 or 1; else `null`),
//!   `count` is how many have one, and `all` lists them. Turns are in the order of the session. Of
//!   metrics that are texts there is only `count`;
//! - `turns`, `segments` and `tokens` (int), `seconds` (double, from the first token to the last),
//!   `ended` (bool, somebody said that the episode is over), `declined` (bool, every turn was) and
//!   `finish_reason` (string, of the last turn).
//!
//! Values of feedback that was retracted or given after the horizon are not included. The result is
//! the reward, or `null` if there is no signal; the trajectory is then censored. CEL arithmetic
//! does not mix ints and floats: write `2.0`, or `double(n)`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use cel::common::ast::{EntryExpr, Expr};
use cel::{Context, Program, Value};
use event_log::event;

use super::{Closing, Metric, MetricType, Signal};

/// Variables that are not metrics.
const OF_GENERATION: &[&str] = &["all", "declined", "shown", "tokens", "finish_reason"];
const OF_EPISODE: &[&str] = &[
    "all",
    "turn",
    "turns",
    "segments",
    "tokens",
    "seconds",
    "ended",
    "declined",
    "finish_reason",
];
/// How `turn` sums up the values of turns.
const OF_TURNS: [&str; 5] = ["first", "last", "mean", "count", "all"];

/// A reward expression that has been compiled and tested.
#[derive(Debug, Clone)]
pub struct Expression {
    program: Arc<Program>,
    /// All metrics, so that one without a value is `null` instead of unknown.
    metrics: Arc<[String]>,
    /// Those of them whose values it can read.
    referred: Arc<[String]>,
    /// Those of them whose texts it can read.
    texts: Arc<[String]>,
    /// Those of them that are texts.
    text_metrics: Arc<[String]>,
    /// Those of them whose values about turns it can read.
    of_turns: Arc<[String]>,
}

/// What an episode's expression sees besides its own feedback.
#[derive(Debug, Clone, Default)]
pub struct EpisodeFacts {
    pub turns: usize,
    pub segments: usize,
    pub tokens: u64,
    pub seconds: f64,
    pub ended: bool,
    pub declined: bool,
    pub finish_reason: String,
    /// The value of each metric of each turn that has one, in the order of the session.
    pub of_turns: BTreeMap<String, Vec<event::Value>>,
}

/// Longest formula, bytes.
const FORMULA_BYTES_MAX: usize = 1024;
/// Maximum brackets and question marks of an expression, which limits its nesting.
const NESTED_MAX: usize = 64;

impl Expression {
    /// Compiles the expression of a generation or of a turn, and tests it without signals and with
    /// one signal of each metric, so that most errors show at startup.
    pub fn new(text: &str, metrics: &[Metric]) -> anyhow::Result<Self> {
        let expression = Self::compile(text, metrics, OF_GENERATION)?;
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

    /// The same for the expression of an episode.
    pub fn of_episode(text: &str, metrics: &[Metric]) -> anyhow::Result<Self> {
        if let Some(metric) = metrics.iter().find(|metric| OF_EPISODE.contains(&metric.name.as_str())) {
            bail!(
                "the metric {:?} has the name of a variable of episodes; rename the metric",
                metric.name
            );
        }
        let mut expression = Self::compile(text, metrics, OF_EPISODE)?;
        let read = expression.metrics.iter().filter(|name| reads_turns(text, name));
        expression.of_turns = read.cloned().collect();
        for name in expression.text_metrics.iter() {
            let how = ["first", "last", "mean", "all"]
                .into_iter()
                .find(|how| text.contains(&format!("turn.{how}.{name}")));
            if let Some(how) = how {
                bail!("has turn.{how}.{name}, but of a text about turns there is only turn.count.{name}");
            }
        }
        let mut facts = EpisodeFacts {
            turns: 2,
            segments: 1,
            tokens: 2,
            seconds: 1.0,
            finish_reason: "stop".to_owned(),
            ..EpisodeFacts::default()
        };
        expression
            .episode_reward(&facts, &[])
            .context("without any feedback; write `metric == null ? null : …`")?;
        let signals: Vec<Signal> = metrics.iter().map(example).collect();
        facts.of_turns = signals
            .iter()
            .map(|signal| (signal.metric.clone(), vec![signal.value.clone()]))
            .collect();
        let about_episode: Vec<&Signal> = signals.iter().collect();
        expression
            .episode_reward(&facts, &about_episode)
            .context("with one feedback event of each metric about the episode and about a turn")?;
        expression
            .episode_reward(&facts, &[])
            .context("with one feedback event of each metric about a turn and none about the episode")?;
        facts.of_turns = BTreeMap::new();
        expression
            .episode_reward(&facts, &about_episode)
            .context("with one feedback event of each metric about the episode and none about a turn")?;
        Ok(expression)
    }

    fn compile(text: &str, metrics: &[Metric], built_in: &[&str]) -> anyhow::Result<Self> {
        let program = program(text)?;
        let known = |name: &str| built_in.contains(&name) || metrics.iter().any(|metric| metric.name == name);
        for name in program.references().variables() {
            ensure!(
                known(name) || is_bound(text, name),
                "names {name:?}, which is neither a metric ([[ingest.metric]]) nor one of {}",
                built_in.join(", ")
            );
        }
        let text_metrics = metrics
            .iter()
            .filter(|metric| matches!(metric.metric_type, MetricType::Comment | MetricType::Demonstration))
            .map(|metric| metric.name.clone());
        let text_metrics: Vec<String> = text_metrics.collect();
        let texts = text_metrics
            .iter()
            .filter(|name| text.contains(name.as_str()) || is_indexed(text, "all"));
        let references = program.references();
        let referred: Vec<String> = metrics
            .iter()
            .map(|metric| metric.name.clone())
            .filter(|name| references.has_variable(name) || refers_through(text, "all", name))
            .collect();
        drop(references);
        Ok(Self {
            program: Arc::new(program),
            referred: referred.into(),
            metrics: metrics.iter().map(|metric| metric.name.clone()).collect(),
            texts: texts.cloned().collect(),
            text_metrics: text_metrics.into(),
            of_turns: Arc::default(),
        })
    }

    /// The reward of a generation or of a turn. `None` if there is no signal. `signals` are those
    /// that count, in the order of event time.
    pub fn reward(&self, closing: &Closing, signals: &[&Signal]) -> anyhow::Result<Option<f64>> {
        let mut context = self.context(signals);
        context.add_variable_from_value("declined", closing.declined);
        context.add_variable_from_value("shown", closing.shown.map_or(Value::Null, Value::Bool));
        context.add_variable_from_value("tokens", i64::from(closing.tokens));
        context.add_variable_from_value("finish_reason", closing.finish_reason.clone());
        self.execute(&context)
    }

    /// The reward of an episode. `signals` are those about the episode that count, in the order of
    /// event time.
    pub fn episode_reward(&self, facts: &EpisodeFacts, signals: &[&Signal]) -> anyhow::Result<Option<f64>> {
        let int = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let mut context = self.context(signals);
        context.add_variable_from_value("turn", self.of_turns(facts));
        context.add_variable_from_value("turns", int(facts.turns as u64));
        context.add_variable_from_value("segments", int(facts.segments as u64));
        context.add_variable_from_value("tokens", int(facts.tokens));
        context.add_variable_from_value("seconds", facts.seconds);
        context.add_variable_from_value("ended", facts.ended);
        context.add_variable_from_value("declined", facts.declined);
        context.add_variable_from_value("finish_reason", facts.finish_reason.clone());
        self.execute(&context)
    }

    /// The metrics by their names, and `all`.
    fn context(&self, signals: &[&Signal]) -> Context<'static> {
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
        context
    }

    /// The variable `turn`: a map of maps.
    fn of_turns(&self, facts: &EpisodeFacts) -> HashMap<String, HashMap<String, Value>> {
        let mut maps: HashMap<String, HashMap<String, Value>> =
            OF_TURNS.iter().map(|how| ((*how).to_owned(), HashMap::new())).collect();
        for name in self.metrics.iter() {
            let values = facts.of_turns.get(name).map_or(&[][..], Vec::as_slice);
            let mut set = |how: &str, value: Value| {
                if let Some(map) = maps.get_mut(how) {
                    map.insert(name.clone(), value);
                }
            };
            set("count", Value::Int(i64::try_from(values.len()).unwrap_or(i64::MAX)));
            if self.text_metrics.contains(name) {
                continue;
            }
            let one = |value_of_turn: Option<&event::Value>| value_of_turn.map_or(Value::Null, value);
            set("first", one(values.first()));
            set("last", one(values.last()));
            set("mean", mean(values).map_or(Value::Null, Value::Float));
            set("all", Value::from(values.iter().map(value).collect::<Vec<_>>()));
        }
        maps
    }

    fn execute(&self, context: &Context<'_>) -> anyhow::Result<Option<f64>> {
        execute(&self.program, context)
    }

    /// The metrics whose feedback can change the reward, each with whether its text can. For an
    /// episode: whose feedback about the episode can.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = (&str, bool)> {
        let read = self.metrics.iter().filter(|name| self.reads(name));
        read.map(|name| (name.as_str(), self.texts.contains(name)))
    }

    /// Whether feedback of this metric can change the reward. For an episode: whether feedback about
    /// the episode can.
    pub fn reads(&self, metric: &str) -> bool {
        let references = self.program.references();
        self.metrics.iter().any(|name| name == metric)
            && (references.has_variable(metric) || references.has_variable("all"))
    }

    /// Whether it can read the value of this metric. For an episode: of feedback about the episode.
    pub(crate) fn refers_to(&self, metric: &str) -> bool {
        self.referred.iter().any(|name| name == metric)
    }

    /// The metrics whose feedback about turns can change the reward of an episode.
    pub(crate) fn turn_metrics(&self) -> &[String] {
        &self.of_turns
    }
}

/// A number computed from numbers that have names, in CEL.
#[derive(Debug)]
pub struct Formula {
    program: Program,
}

impl Formula {
    /// Compiles it, and tries it with 0, 0.5 and 1 for every number. It must use all of them. The error
    /// goes on from its field's name.
    pub fn new(text: &str, names: &[&str]) -> anyhow::Result<Self> {
        ensure!(
            text.len() <= FORMULA_BYTES_MAX,
            "has {} bytes; at most {FORMULA_BYTES_MAX} are allowed",
            text.len()
        );
        let program = program(text)?;
        ensure!(
            is_arithmetic(&program.expression().expr),
            "is more than arithmetic: there are numbers, names, operators and functions of them"
        );
        let references = program.references();
        if let Some(unused) = names.iter().find(|name| !references.has_variable(**name)) {
            bail!("does not use {unused:?}");
        }
        for name in references.variables() {
            ensure!(
                names.contains(&name),
                "names {name:?}, which is none of {}",
                names.join(", ")
            );
        }
        drop(references);
        let formula = Self { program };
        for number in [0.0, 0.5, 1.0] {
            let tried: Vec<(&str, f64)> = names.iter().map(|name| (*name, number)).collect();
            let why = || format!("with {number} for every name");
            formula.value(&tried).with_context(why)?;
        }
        Ok(formula)
    }

    /// Fails if the result is no number, or not finite.
    pub fn value(&self, numbers: &[(&str, f64)]) -> anyhow::Result<f64> {
        let mut context = Context::default();
        for (name, number) in numbers {
            context.add_variable_from_value(*name, *number);
        }
        execute(&self.program, &context)?.context("returns null, not a number")
    }
}

fn program(text: &str) -> anyhow::Result<Program> {
    // The parser panics beyond its own limit of 96.
    let nested = text.matches(['(', '[', '{', '?']).count();
    ensure!(
        nested <= NESTED_MAX,
        "has {nested} brackets and question marks; at most {NESTED_MAX} are allowed"
    );
    let program = Program::compile(text).map_err(|error| anyhow::anyhow!("is not a CEL expression: {error}"))?;
    ensure!(
        !makes_struct(&program.expression().expr),
        "makes a structure, but there are only numbers, texts, lists and maps"
    );
    Ok(program)
}

fn execute(program: &Program, context: &Context<'_>) -> anyhow::Result<Option<f64>> {
    let number = match program.execute(context).context("cannot be computed")? {
        Value::Null => return Ok(None),
        Value::Float(number) => number,
        Value::Int(number) => number as f64,
        Value::UInt(number) => number as f64,
        other => bail!("returns a {}, not a number or null", other.type_of()),
    };
    ensure!(number.is_finite(), "returns {number}");
    Ok(Some(number))
}

/// Whether it has neither loops nor collections, so that it is computed in the time that it takes to
/// read.
fn is_arithmetic(expression: &Expr) -> bool {
    match expression {
        Expr::Ident(_) | Expr::Literal(_) => true,
        Expr::Call(call) => {
            let target = call.target.as_deref();
            target
                .into_iter()
                .chain(&call.args)
                .all(|part| is_arithmetic(&part.expr))
        }
        _ => false,
    }
}

/// Whether it has a literal such as `Point{x: 1}`, at which the interpreter panics.
fn makes_struct(expression: &Expr) -> bool {
    match expression {
        Expr::Struct(_) => true,
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => false,
        Expr::Select(select) => makes_struct(&select.operand.expr),
        Expr::List(list) => list.elements.iter().any(|element| makes_struct(&element.expr)),
        Expr::Call(call) => {
            let target = call.target.as_deref();
            target
                .into_iter()
                .chain(&call.args)
                .any(|part| makes_struct(&part.expr))
        }
        Expr::Map(map) => map.entries.iter().any(|entry| match &entry.expr {
            EntryExpr::StructField(_) => true,
            EntryExpr::MapEntry(entry) => makes_struct(&entry.key.expr) || makes_struct(&entry.value.expr),
        }),
        Expr::Comprehension(all) => [
            &all.iter_range,
            &all.accu_init,
            &all.loop_cond,
            &all.loop_step,
            &all.result,
        ]
        .into_iter()
        .any(|part| makes_struct(&part.expr)),
    }
}

/// `None` if there is none. A boolean counts as 0 or 1.
fn mean(values: &[event::Value]) -> Option<f64> {
    let numbers = values.iter().map(|value| match value {
        event::Value::Bool(value) => f64::from(u8::from(*value)),
        event::Value::Float(value) => *value,
        event::Value::Text(_) => 0.0,
    });
    (!values.is_empty()).then(|| numbers.sum::<f64>() / values.len() as f64)
}

fn value(value: &event::Value) -> Value {
    match value {
        event::Value::Bool(value) => Value::Bool(*value),
        event::Value::Float(value) => Value::Float(*value),
        event::Value::Text(value) => Value::String(Arc::new(value.clone())),
    }
}

/// What follows each use of the variable `name`.
fn uses<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let in_name = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(name).filter_map(move |(at, name)| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        let is_variable =
            !before.ends_with(in_name) && !before.trim_end().ends_with('.') && !after.starts_with(in_name);
        is_variable.then(|| after.trim_start())
    })
}

/// Whether `name` is used otherwise than as `name.<metric>`, so that it may stand for any metric.
fn is_indexed(text: &str, name: &str) -> bool {
    uses(text, name).any(|after| !after.starts_with('.'))
}

/// Whether `list` is used as `list.<metric>`, or otherwise, so that it may stand for any.
fn refers_through(text: &str, list: &str, metric: &str) -> bool {
    uses(text, list).any(|after| match after.strip_prefix('.') {
        None => true,
        Some(rest) => first_name(rest) == metric,
    })
}

/// The name with which the text begins.
fn first_name(text: &str) -> &str {
    let text = text.trim_start();
    let end = text.find(|character: char| !character.is_alphanumeric() && character != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Whether `turn` is used as `turn.<how>.<metric>`, or otherwise, so that it may stand for any.
fn reads_turns(text: &str, metric: &str) -> bool {
    uses(text, "turn").any(|after| {
        let how_and_metric = || {
            let (how, rest) = after.strip_prefix('.')?.trim_start().split_once('.')?;
            OF_TURNS.contains(&how.trim_end()).then(|| first_name(rest))
        };
        how_and_metric().is_none_or(|name| name == metric || name.is_empty())
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
mod tests;
