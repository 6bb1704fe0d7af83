//! Built-in graders of offline runs: a completion and its task give a reward, or an [`Error`] with a
//! code. An environment is a separate program that posts feedback.
//!
//! A grader is a name (`"exact_match"`), or an object with the fields of [OpenAI's
//! graders](https://platform.openai.com/docs/guides/graders): `string_check`, `text_similarity`,
//! `python`, `score_model` and `multi`; or a `rubric`, which is ours. `{{ item.prompt }}`,
//! `{{ item.answer }}`, `{{ item.id }}` (of the task) and
//! `{{ sample.output_text }}` (the completion) are replaced in the texts of an object.

mod context;
mod error;
mod formula;
mod grade;
mod python;
mod score;
mod template;

use crate::random::Random;
use anyhow::ensure;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use uuid::Uuid;

pub use context::Context;
pub use error::{Cause, Error};
use formula::Formula;
pub use python::{Options as SandboxOptions, Sandboxes};
pub use score::{Rubric, ScoreModel};

/// What is graded: a completion of a task.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Its id, which is that of the episode of its generations.
    pub rollout: Uuid,
    pub id: &'a str,
    pub prompt: &'a str,
    pub answer: &'a str,
    pub text: &'a str,
}

/// What a grader gives.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Grade {
    /// A finite number.
    pub reward: f64,
    /// The rewards of the graders that a `multi` grader computes it from, by their names.
    pub parts: BTreeMap<String, f64>,
}

/// Which grader a run uses.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Grader {
    Named(Named),
    OpenAi(OpenAi),
}

/// Compares the completion with the task's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Named {
    /// 1 if the text equals the answer, ignoring blanks at both ends; else 0.
    ExactMatch,
    /// The share of the answer's characters, from its start, that the text starts with.
    PrefixMatch,
    /// 1 if the answer occurs in the text; else 0.
    Contains,
}

/// With OpenAI's names, but for `rubric`. `name` is for people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum OpenAi {
    /// 1 if `input` and `reference` are as `operation` says; else 0.
    StringCheck {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        input: String,
        reference: String,
        operation: Operation,
    },
    /// How similar the texts are, 0 to 1.
    TextSimilarity {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        input: String,
        reference: String,
        evaluation_metric: Similarity,
    },
    /// A number that a judge answers with.
    ScoreModel(ScoreModel),
    /// Whether a judge finds that the completion meets a rubric, or how well.
    Rubric(Rubric),
    /// What the function `grade(sample, item)` of a source in Python returns, in a sandbox.
    Python {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        source: String,
    },
    /// A number computed from the rewards of other graders, which have names.
    Multi {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        graders: BTreeMap<String, OpenAi>,
        /// An expression of these names, such as `0.7 * right + 0.3 * similar`. All numbers are floats.
        calculate_output: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// They are equal.
    Eq,
    /// They are not equal.
    Ne,
    /// The reference occurs in the input.
    Like,
    /// The same, in lower case.
    Ilike,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Similarity {
    /// RapidFuzz's `ratio` / 100: 1 − (insertions + deletions) / (characters of both texts).
    FuzzyMatch,
}

impl Default for Grader {
    fn default() -> Self {
        Grader::Named(Named::ExactMatch)
    }
}

impl<'de> Deserialize<'de> for Grader {
    /// Says what is wrong with an object, which an untagged enum would not.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let read = match value.is_string() {
            true => serde_json::from_value(value).map(Grader::Named),
            false => serde_json::from_value(value).map(Grader::OpenAi),
        };
        read.map_err(|error| D::Error::custom(format!("grader: {error}")))
    }
}

impl Grader {
    /// Refuses what cannot work. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Grader::Named(_) => Ok(()),
            Grader::OpenAi(grader) => grader.check().map_err(|why| format!("grader: {why}")),
        }
    }

    /// The weights of a `multi` grader's graders. Fails, in words that go on from what needs them, if its
    /// reward is not a weighted sum of theirs, a constant aside.
    pub fn weights(&self) -> Result<BTreeMap<String, f64>, String> {
        let Grader::OpenAi(OpenAi::Multi {
            graders,
            calculate_output,
            ..
        }) = self
        else {
            return Err("compares the rewards of several graders: it needs a grader of type multi".into());
        };
        weights(calculate_output, graders)
            .map_err(|why| format!("needs a calculate_output that is a weighted sum of all graders: {why:#}"))
    }

    /// The judges that it asks.
    pub fn judges(&self) -> Vec<&str> {
        match self {
            Grader::Named(_) => vec![],
            Grader::OpenAi(grader) => grader.judges(),
        }
    }
}

impl OpenAi {
    fn judges(&self) -> Vec<&str> {
        match self {
            OpenAi::ScoreModel(grader) => vec![&grader.model],
            OpenAi::Rubric(grader) => vec![&grader.model],
            OpenAi::Multi { graders, .. } => graders.values().flat_map(OpenAi::judges).collect(),
            OpenAi::StringCheck { .. } | OpenAi::TextSimilarity { .. } | OpenAi::Python { .. } => vec![],
        }
    }

    fn check(&self) -> Result<(), String> {
        match self {
            OpenAi::StringCheck { input, reference, .. } | OpenAi::TextSimilarity { input, reference, .. } => {
                template::check(input).map_err(|why| format!("input: {why}"))?;
                template::check(reference).map_err(|why| format!("reference: {why}"))
            }
            OpenAi::ScoreModel(grader) => grader.check(),
            OpenAi::Rubric(grader) => grader.check(),
            OpenAi::Python { source, .. } => python::check(source),
            OpenAi::Multi {
                graders,
                calculate_output,
                ..
            } => {
                if graders.is_empty() {
                    return Err("graders: a multi grader needs at least one".into());
                }
                for (name, grader) in graders {
                    if matches!(grader, OpenAi::Multi { .. }) {
                        return Err(format!("graders.{name}: a multi grader cannot have another one"));
                    }
                    grader.check().map_err(|why| format!("graders.{name}.{why}"))?;
                }
                let formula = formula(calculate_output, graders);
                formula
                    .map(|_| ())
                    .map_err(|error| format!("calculate_output {error:#}"))
            }
        }
    }
}

fn formula(text: &str, graders: &BTreeMap<String, OpenAi>) -> anyhow::Result<Formula> {
    let names: Vec<&str> = graders.keys().map(String::as_str).collect();
    Formula::new(text, &names)
}

/// The weights of a sum, found by its values at 0 and at 1 of each name, and checked at other points.
fn weights(text: &str, graders: &BTreeMap<String, OpenAi>) -> anyhow::Result<BTreeMap<String, f64>> {
    const POINTS: usize = 16;
    const TOLERANCE: f64 = 1e-9;
    let formula = formula(text, graders)?;
    let names: Vec<&str> = graders.keys().map(String::as_str).collect();
    let value = |point: &[f64]| {
        let named: Vec<(&str, f64)> = names.iter().copied().zip(point.iter().copied()).collect();
        formula.value(&named)
    };
    let mut point = vec![0.0; names.len()];
    let constant = value(&point)?;
    let mut weights = Vec::new();
    for k in 0..names.len() {
        point[k] = 1.0;
        weights.push(value(&point)? - constant);
        point[k] = 0.0;
    }
    let mut random = Random(0);
    for _ in 0..POINTS {
        // from -4 to 4
        point.fill_with(|| random.draw() as f64 / u64::MAX as f64 * 8.0 - 4.0);
        let terms: Vec<f64> = weights
            .iter()
            .zip(&point)
            .map(|(weight, number)| weight * number)
            .collect();
        let (sum, size) = (
            terms.iter().sum::<f64>(),
            terms.iter().map(|term| term.abs()).sum::<f64>(),
        );
        let error = (value(&point)? - constant - sum).abs();
        ensure!(error <= TOLERANCE * (1.0 + constant.abs() + size), "{text:?} is none");
    }
    Ok(names.into_iter().map(str::to_owned).zip(weights).collect())
}

#[cfg(test)]
mod tests;
