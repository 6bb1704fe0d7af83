//! Built-in graders of offline runs: a completion and its task give a reward. Pure functions of texts.
//! Judges and environments are separate programs that post feedback.
//!
//! A grader is a name (`"exact_match"`), or an object with the fields of [OpenAI's
//! graders](https://platform.openai.com/docs/guides/graders): `string_check`, `text_similarity` and
//! `multi`. `{{ item.prompt }}`, `{{ item.answer }}`, `{{ item.id }}` (of the task) and
//! `{{ sample.output_text }}` (the completion) are replaced in the texts of an object.

mod template;

use ingest::reward::Formula;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// What is graded: a completion of a task.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    pub id: &'a str,
    pub prompt: &'a str,
    pub answer: &'a str,
    pub text: &'a str,
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

/// With OpenAI's names. `name` is for people.
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

    /// The reward. An error is no reward of 0: the rollout has none.
    pub fn grade(&self, sample: &Sample<'_>) -> anyhow::Result<f64> {
        match self {
            Grader::Named(grader) => Ok(grader.grade(sample.text, sample.answer)),
            Grader::OpenAi(grader) => grader.grade(sample),
        }
    }
}

impl Named {
    fn grade(self, text: &str, answer: &str) -> f64 {
        match self {
            Named::ExactMatch => f64::from(text.trim() == answer.trim()),
            Named::PrefixMatch => {
                let wanted = answer.chars().count();
                if wanted == 0 {
                    return f64::from(text.is_empty());
                }
                let got = text.chars().zip(answer.chars()).take_while(|(t, a)| t == a).count();
                got as f64 / wanted as f64
            }
            Named::Contains => f64::from(text.contains(answer)),
        }
    }
}

impl OpenAi {
    fn check(&self) -> Result<(), String> {
        match self {
            OpenAi::StringCheck { input, reference, .. } | OpenAi::TextSimilarity { input, reference, .. } => {
                template::check(input).map_err(|why| format!("input: {why}"))?;
                template::check(reference).map_err(|why| format!("reference: {why}"))
            }
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

    fn grade(&self, sample: &Sample<'_>) -> anyhow::Result<f64> {
        match self {
            OpenAi::StringCheck {
                input,
                reference,
                operation,
                ..
            } => {
                let (input, reference) = (template::fill(input, sample), template::fill(reference, sample));
                Ok(f64::from(match operation {
                    Operation::Eq => input == reference,
                    Operation::Ne => input != reference,
                    Operation::Like => input.contains(&reference),
                    Operation::Ilike => input.to_lowercase().contains(&reference.to_lowercase()),
                }))
            }
            OpenAi::TextSimilarity {
                input,
                reference,
                evaluation_metric: Similarity::FuzzyMatch,
                ..
            } => {
                let (input, reference) = (template::fill(input, sample), template::fill(reference, sample));
                Ok(rapidfuzz::fuzz::ratio(input.chars(), reference.chars()))
            }
            OpenAi::Multi {
                graders,
                calculate_output,
                ..
            } => {
                let rewards = graders
                    .iter()
                    .map(|(name, grader)| Ok((name.as_str(), grader.grade(sample)?)));
                let rewards: Vec<(&str, f64)> = rewards.collect::<anyhow::Result<_>>()?;
                formula(calculate_output, graders)?.value(&rewards)
            }
        }
    }
}

fn formula(text: &str, graders: &BTreeMap<String, OpenAi>) -> anyhow::Result<Formula> {
    let names: Vec<&str> = graders.keys().map(String::as_str).collect();
    Formula::new(text, &names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample<'a>(text: &'a str, answer: &'a str) -> Sample<'a> {
        Sample {
            id: "7",
            prompt: "1 + 1 =",
            answer,
            text,
        }
    }

    fn read(grader: serde_json::Value) -> Result<Grader, String> {
        let grader: Grader = serde_json::from_value(grader).map_err(|error| error.to_string())?;
        grader.check().map(|()| grader)
    }

    fn grade(grader: serde_json::Value, text: &str, answer: &str) -> f64 {
        read(grader).unwrap().grade(&sample(text, answer)).unwrap()
    }

    #[test]
    fn exact_match_ignores_blanks_at_the_ends_only() {
        let grade = |text, answer| grade(json!("exact_match"), text, answer);
        assert_eq!(grade(" let x = 1; \n", "let x = 1;"), 1.0);
        assert_eq!(grade("let  x = 1;", "let x = 1;"), 0.0);
        assert_eq!(grade("", "x"), 0.0);
    }

    #[test]
    fn prefix_match_rewards_every_matching_character() {
        let grade = |text, answer| grade(json!("prefix_match"), text, answer);
        assert_eq!(grade("abcx", "abcd"), 0.75);
        assert_eq!(grade("abcd and more", "abcd"), 1.0);
        assert_eq!(grade("", "abcd"), 0.0);
        assert_eq!(grade("größe", "größer"), 5.0 / 6.0);
    }

    #[test]
    fn contains_finds_the_answer_anywhere() {
        let grade = |text, answer| grade(json!("contains"), text, answer);
        assert_eq!(grade("the answer is 42.", "42"), 1.0);
        assert_eq!(grade("the answer is 4", "42"), 0.0);
    }

    fn string_check(operation: &str) -> serde_json::Value {
        json!({"type": "string_check", "name": "right", "operation": operation,
            "input": "{{ sample.output_text }}", "reference": "is {{item.answer}}"})
    }

    #[test]
    fn string_checks_compare_texts_with_the_tasks_fields_in_them() {
        for (operation, text, expected) in [
            ("eq", "is Two", 1.0),
            ("eq", "it is Two", 0.0),
            ("ne", "it is Two", 1.0),
            ("like", "it is Two.", 1.0),
            ("like", "it is two.", 0.0),
            ("ilike", "it is two.", 1.0),
        ] {
            assert_eq!(
                grade(string_check(operation), text, "Two"),
                expected,
                "{operation} {text}"
            );
        }
    }

    fn similarity(input: &str) -> serde_json::Value {
        json!({"type": "text_similarity", "input": input, "reference": "{{ item.answer }}",
            "evaluation_metric": "fuzzy_match"})
    }

    #[test]
    fn similarity_counts_insertions_and_deletions() {
        let grade = |text, answer| grade(similarity("{{ sample.output_text }}"), text, answer);
        // one insertion among 14 + 15 characters
        assert!((grade("this is a test", "this is a test!") - (1.0 - 1.0 / 29.0)).abs() < 1e-9);
        assert_eq!((grade("same", "same"), grade("ab", "cd")), (1.0, 0.0));
    }

    #[test]
    fn several_graders_are_put_together_by_an_expression() {
        let multi = |output: &str| {
            json!({"type": "multi", "calculate_output": output, "graders": {
                "right": string_check("like"), "similar": similarity("{{ sample.output_text }}")}})
        };
        let expected = 0.75 + 0.25 * (2.0 * 3.0 / 9.0);
        let got = grade(multi("0.75 * right + 0.25 * similar"), "is Two", "Two");
        assert!((got - expected).abs() < 1e-9, "{got}");
        // no number, no reward
        let divided = read(multi("right == 1.0 && similar < 1.0 ? 1.0 / 0.0 : right"));
        assert!(divided.unwrap().grade(&sample("is Two", "Two")).is_err());
        let long = format!("right + similar{}", " + 1.0".repeat(200));
        for (output, reason) in [
            ("right + similar + wrong", "wrong"),
            ("right +", "calculate_output"),
            ("right == similar", "not a number"),
            ("right", "similar"),
            ("similar / right", "with 0"),
            ("right + similar + [1.0].map(x, x)[0]", "arithmetic"),
            (&long, "1024"),
        ] {
            let refused = read(multi(output)).unwrap_err();
            assert!(
                refused.starts_with("grader: calculate_output") && refused.contains(reason),
                "{refused}"
            );
        }
        let none = json!({"type": "multi", "calculate_output": "1.0", "graders": {}});
        assert!(read(none).unwrap_err().contains("graders"));
        let nested = json!({"type": "multi", "calculate_output": "a", "graders": {"a": multi("right")}});
        assert!(read(nested).unwrap_err().contains("graders.a"));
    }

    #[test]
    fn what_cannot_work_is_refused_with_the_field() {
        for (grader, reason) in [
            (json!("bleu"), "bleu"),
            (json!({"type": "python", "source": ""}), "python"),
            (
                similarity("{{ item.reference_answer }}"),
                "input: `item.reference_answer`",
            ),
            (similarity("{{ item.answer"), "input: `{{` without `}}`"),
            (
                json!({"type": "text_similarity", "input": "a", "reference": "b", "evaluation_metric": "meteor"}),
                "meteor",
            ),
            (
                json!({"type": "string_check", "input": "a", "reference": "b", "operation": "eq", "case": 1}),
                "case",
            ),
        ] {
            let refused = read(grader).unwrap_err();
            assert!(refused.starts_with("grader: ") && refused.contains(reason), "{refused}");
        }
    }

    #[test]
    fn a_grader_is_kept_as_it_was_asked_for() {
        for grader in [json!("contains"), string_check("eq"), similarity("{{item.id}}")] {
            assert_eq!(serde_json::to_value(read(grader.clone()).unwrap()).unwrap(), grader);
        }
    }
}
