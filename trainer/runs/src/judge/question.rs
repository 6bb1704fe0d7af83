//! What a judge is asked: messages, how it samples, and the digest that names the question.

use event_log::judge::Question;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

/// A message of the conversation that a judge reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub role: Role,
    pub content: String,
}

/// Who wrote a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
}

/// How a judge samples. OpenAI's names, with its `max_completions_tokens`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Of the first vote. The others have the numbers after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u32>,
    /// Tokens of an answer, and of what a model thinks before it; default 2048.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_completions_tokens: Option<u32>,
    /// As the endpoint calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_effort: Option<String>,
}

impl Sampling {
    /// Refuses what no endpoint takes. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        let rules = [
            (
                (0.0..=2.0).contains(&self.temperature.unwrap_or(0.0)),
                "temperature must be from 0 to 2",
            ),
            (
                (0.0..=1.0).contains(&self.top_p.unwrap_or(1.0)) && self.top_p != Some(0.0),
                "top_p must be above 0 and at most 1",
            ),
            (
                (1..=65_536).contains(&self.max_completions_tokens.unwrap_or(1)),
                "max_completions_tokens must be from 1 to 65536",
            ),
            (
                self.reasoning_effort
                    .as_ref()
                    .is_none_or(|effort| (1..=32).contains(&effort.len())),
                "reasoning_effort must have 1 to 32 characters",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, why)) => Err((*why).to_owned()),
            None => Ok(()),
        }
    }
}

/// One vote that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Vote<'a> {
    /// The judge's name.
    pub judge: &'a str,
    /// The model that is asked for.
    pub model: &'a str,
    pub question: Question,
    pub messages: &'a [Message],
    pub sampling: &'a Sampling,
    /// 0, 1, …
    pub index: u32,
}

impl Vote<'_> {
    fn seed(&self) -> Option<u32> {
        self.sampling.seed.map(|seed| seed.wrapping_add(self.index))
    }

    /// The body of the request.
    pub fn request(&self) -> Json {
        let mut body = event_log::judge::request(self.question, self.model, &json!(self.messages));
        let sampling = self.sampling;
        for (field, value) in [
            ("temperature", sampling.temperature.map(|value| json!(value))),
            ("top_p", sampling.top_p.map(|value| json!(value))),
            ("seed", self.seed().map(|value| json!(value))),
            (
                "max_completion_tokens",
                sampling.max_completions_tokens.map(|value| json!(value)),
            ),
            (
                "reasoning_effort",
                sampling.reasoning_effort.as_ref().map(|value| json!(value)),
            ),
        ] {
            if let Some(value) = value {
                body[field] = value;
            }
        }
        body
    }

    /// Names the vote: everything that determines its answer but the weights of the model.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("springtide 2026-12 vote of a judge");
        let mut add = |part: &str| {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        };
        add(self.judge);
        add(self.model);
        add(&match self.question {
            Question::YesOrNo => "yes or no".to_owned(),
            Question::Number { min, max } => format!("{min} to {max}"),
        });
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        let sampling = self.sampling;
        add(&number(sampling.temperature));
        add(&number(sampling.top_p));
        add(&number(self.seed().map(f64::from)));
        add(&number(sampling.max_completions_tokens.map(f64::from)));
        add(sampling.reasoning_effort.as_deref().unwrap_or_default());
        add(&self.index.to_string());
        for message in self.messages {
            add(match message.role {
                Role::System => "system",
                Role::Developer => "developer",
                Role::User => "user",
                Role::Assistant => "assistant",
            });
            add(&message.content);
        }
        *hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(change: impl FnOnce(&mut Vec<Message>, &mut Sampling, &mut Vote<'_>)) -> [u8; 32] {
        let mut messages = vec![Message {
            role: Role::User,
            content: "is it right?".into(),
        }];
        let mut sampling = Sampling::default();
        let mut vote = Vote {
            judge: "right",
            model: "small",
            question: Question::YesOrNo,
            messages: &[],
            sampling: &Sampling::default(),
            index: 0,
        };
        change(&mut messages, &mut sampling, &mut vote);
        Vote {
            messages: &messages,
            sampling: &sampling,
            ..vote
        }
        .digest()
    }

    #[test]
    fn everything_that_determines_an_answer_is_in_its_name() {
        type Change = fn(&mut Vec<Message>, &mut Sampling, &mut Vote<'_>);
        let changes: [Change; 13] = [
            |_, _, _| {},
            |_, _, vote| vote.judge = "other",
            |_, _, vote| vote.model = "large",
            |_, _, vote| vote.question = Question::Number { min: 0.0, max: 1.0 },
            |_, _, vote| vote.question = Question::Number { min: 0.0, max: 2.0 },
            |_, _, vote| vote.index = 1,
            |_, sampling, _| sampling.temperature = Some(0.0),
            |_, sampling, _| sampling.top_p = Some(0.5),
            |_, sampling, _| sampling.seed = Some(0),
            |_, sampling, _| sampling.max_completions_tokens = Some(16),
            |_, sampling, _| sampling.reasoning_effort = Some("low".into()),
            |messages, _, _| messages[0].role = Role::System,
            |messages, _, _| messages[0].content += " ",
        ];
        let digests: std::collections::BTreeSet<_> = changes.into_iter().map(digest).collect();
        assert_eq!(digests.len(), changes.len());
        // Stored with every answer, so it must never change by itself.
        assert_eq!(
            hex::encode(digest(|_, _, _| {})),
            "2e019d40ff4761c79ded0865bec510adcec9fb703528346fb39d02181565442d"
        );
    }

    #[test]
    fn votes_of_one_question_have_seeds_one_after_the_other() {
        let sampling = Sampling {
            seed: Some(7),
            max_completions_tokens: Some(16),
            ..Sampling::default()
        };
        let vote = Vote {
            judge: "right",
            model: "small",
            question: Question::YesOrNo,
            messages: &[],
            sampling: &sampling,
            index: 2,
        };
        let body = vote.request();
        assert_eq!(
            (&body["seed"], &body["max_completion_tokens"], &body["model"]),
            (&json!(9), &json!(16), &json!("small"))
        );
        assert!(body.get("temperature").is_none(), "{body}");
    }
}
