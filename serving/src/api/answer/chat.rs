//! The parts of a choice in the answer of `POST /v1/chat/completions`.

use crate::api::outcome::{self, SampledToken};
use rand::Rng;
use rand::distr::Alphanumeric;
use serde::Serialize;
use text::answer::Part;

/// The answer, or what came since the previous chunk.
#[derive(Debug, Serialize)]
pub struct Message {
    /// Not in later chunks of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Null where there are only calls or reasoning.
    content: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Serialize)]
struct ToolCall {
    /// In chunks: the place of the call among those of its choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    name: String,
    /// A JSON object.
    arguments: String,
}

impl Message {
    pub fn whole(parts: Vec<Part>) -> Self {
        let mut message = Message::empty();
        for part in parts {
            message.add(part, None);
        }
        message.role = Some("assistant");
        message.without_empty_content()
    }

    /// `calls`: how many calls earlier chunks had.
    pub fn chunk(parts: Vec<Part>, with_role: bool, mut calls: usize) -> Self {
        let mut message = Message::empty();
        for part in parts {
            let index = calls;
            calls += usize::from(matches!(part, Part::Call(_)));
            message.add(part, Some(index));
        }
        message.role = with_role.then_some("assistant");
        message.without_empty_content()
    }

    fn empty() -> Self {
        Message {
            role: None,
            content: Some(String::new()),
            reasoning_content: String::new(),
            tool_calls: Vec::new(),
        }
    }

    fn add(&mut self, part: Part, index: Option<usize>) {
        match part {
            Part::Text(text) => self.content.get_or_insert_default().push_str(&text),
            Part::Reasoning(text) => self.reasoning_content.push_str(&text),
            Part::Call(call) => self.tool_calls.push(ToolCall {
                index,
                id: call_id(),
                kind: "function",
                function: Function {
                    name: call.name,
                    arguments: call.arguments,
                },
            }),
        }
    }

    fn without_empty_content(mut self) -> Self {
        let has_more = !self.tool_calls.is_empty() || !self.reasoning_content.is_empty();
        self.content = self.content.filter(|content| !(content.is_empty() && has_more));
        self
    }
}

/// A new id for a call. Mistral's templates take nothing but nine letters and digits.
pub fn call_id() -> String {
    let mut rng = rand::rng();
    std::iter::repeat_with(|| char::from(rng.sample(Alphanumeric)))
        .take(9)
        .collect()
}

/// `logprob` is of the distribution sampled from, `top_logprobs` at temperature 1.
#[derive(Debug, Serialize)]
pub struct Logprobs {
    content: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize)]
struct TokenLogprob {
    #[serde(flatten)]
    token: TokenText,
    top_logprobs: Vec<TokenText>,
}

#[derive(Debug, Serialize)]
struct TokenText {
    token: String,
    logprob: f32,
    /// Null if the token has no text of its own.
    bytes: Option<Vec<u8>>,
}

impl Logprobs {
    pub fn of(tokens: &[SampledToken]) -> Self {
        let token_text = |token: &outcome::TokenText, logprob: f32| TokenText {
            token: token.text.clone(),
            logprob,
            bytes: token.bytes.clone(),
        };
        let content = tokens.iter().map(|token| TokenLogprob {
            token: token_text(&token.text, token.logprob),
            top_logprobs: token
                .top
                .iter()
                .map(|(token, logprob)| token_text(token, *logprob))
                .collect(),
        });
        Logprobs {
            content: content.collect(),
        }
    }
}
