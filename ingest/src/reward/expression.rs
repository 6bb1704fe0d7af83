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
use cel::common::ast::{EntryExpr, Expr, IdedExpr, MapExpr, StructExpr};
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
    /// Those of them that are texts.
    text_metrics: Arc<[String]>,
    /// Those of them whose values about turns it can read.
    of_turns: Arc<[String]>,
    /// See [`Contents::uses`].
    uses: Arc<[Vec<String>]>,
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
        let read = expression.metrics.iter().filter(|name| expression.reads_turns(name));
        expression.of_turns = read.cloned().collect();
        for used in expression.uses.iter() {
            if let [turn, how, name, ..] = used.as_slice()
                && (turn == "turn" && how != "count" && expression.text_metrics.contains(name))
            {
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
        let uses = Contents::of(&program).uses;
        for used in &uses {
            let name = used[0];
            ensure!(
                built_in.contains(&name) || metrics.iter().any(|metric| metric.name == name),
                "names {name:?}, which is neither a metric ([[ingest.metric]]) nor one of {}",
                built_in.join(", ")
            );
        }
        let uses = uses
            .iter()
            .map(|used| used.iter().map(|&name| name.to_owned()).collect());
        let uses = uses.collect();
        let is_text = |metric: &&Metric| matches!(metric.metric_type, MetricType::Comment | MetricType::Demonstration);
        Ok(Self {
            uses,
            program: Arc::new(program),
            metrics: metrics.iter().map(|metric| metric.name.clone()).collect(),
            text_metrics: metrics
                .iter()
                .filter(is_text)
                .map(|metric| metric.name.clone())
                .collect(),
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
        read.map(|name| (name.as_str(), self.text_metrics.contains(name) && self.refers_to(name)))
    }

    /// Whether feedback of this metric can change the reward. For an episode: whether feedback about
    /// the episode can.
    pub fn reads(&self, metric: &str) -> bool {
        self.metrics.iter().any(|name| name == metric)
            && self.uses.iter().any(|used| used[0] == metric || used[0] == "all")
    }

    /// Whether it can read the value of this metric. For an episode: of feedback about the episode.
    pub(crate) fn refers_to(&self, metric: &str) -> bool {
        let can_be = |used: &Vec<String>| match used.as_slice() {
            [all, rest @ ..] if all == "all" => rest.first().is_none_or(|name| name == metric),
            used => used[0] == metric,
        };
        self.metrics.iter().any(|name| name == metric) && self.uses.iter().any(can_be)
    }

    /// Whether it uses `turn.<how>.<metric>`, or `turn` otherwise, so that it may stand for any metric.
    fn reads_turns(&self, metric: &str) -> bool {
        self.uses.iter().any(|used| match used.as_slice() {
            [turn, how, name, ..] if turn == "turn" && OF_TURNS.contains(&how.as_str()) => name == metric,
            used => used[0] == "turn",
        })
    }

    /// The metrics whose feedback about turns can change the reward of an episode.
    pub(crate) fn turn_metrics(&self) -> &[String] {
        &self.of_turns
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
        !Contents::of(&program).has_struct,
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

/// What an expression is made of.
#[derive(Debug)]
struct Contents<'a> {
    /// Each use of a variable, with the fields that are read of it: `turn.first.kept` has three names.
    /// It may stand for any field of the last one. What a comprehension such as
    /// `all.retry.filter(x, x > 1.0)` binds is no variable.
    uses: Vec<Vec<&'a str>>,
    /// It has a literal such as `Point{x: 1}`, at which the interpreter panics.
    has_struct: bool,
}

impl<'a> Contents<'a> {
    fn of(program: &'a Program) -> Self {
        let mut contents = Self {
            uses: Vec::new(),
            has_struct: false,
        };
        contents.add(&program.expression().expr, &[]);
        contents
    }

    /// Adds an expression inside comprehensions that have bound these names.
    fn add(&mut self, expression: &'a Expr, bound: &[&'a str]) {
        self.has_struct |= matches!(expression, Expr::Struct(_));
        if let Some(used) = names(expression) {
            if !bound.contains(&used[0]) {
                self.uses.push(used);
            }
            return;
        }
        let parts: Vec<&IdedExpr> = match expression {
            Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => Vec::new(),
            Expr::Select(select) => vec![select.operand.as_ref()],
            Expr::List(list) => list.elements.iter().collect(),
            Expr::Call(call) => call.target.as_deref().into_iter().chain(&call.args).collect(),
            Expr::Map(MapExpr { entries }) | Expr::Struct(StructExpr { entries, .. }) => {
                let parts = entries.iter().flat_map(|entry| match &entry.expr {
                    EntryExpr::StructField(field) => vec![&field.value],
                    EntryExpr::MapEntry(entry) => vec![&entry.key, &entry.value],
                });
                parts.collect()
            }
            Expr::Comprehension(all) => {
                self.add(&all.iter_range.expr, bound);
                let binds = [Some(&all.iter_var), all.iter_var2.as_ref(), Some(&all.accu_var)];
                let binds = binds.into_iter().flatten().map(String::as_str);
                let bound: Vec<&str> = bound.iter().copied().chain(binds).collect();
                for part in [&all.accu_init, &all.loop_cond, &all.loop_step, &all.result] {
                    self.add(&part.expr, &bound);
                }
                return;
            }
        };
        for part in parts {
            self.add(&part.expr, bound);
        }
    }
}

/// `["turn", "first", "kept"]` of `turn.first.kept`. `None`: it is something else.
fn names(expression: &Expr) -> Option<Vec<&str>> {
    match expression {
        Expr::Ident(name) => Some(vec![name.as_str()]),
        Expr::Select(select) => {
            let mut names = names(&select.operand.expr)?;
            names.push(&select.field);
            Some(names)
        }
        _ => None,
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
