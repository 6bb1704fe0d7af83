//! The words of a judge: a chat completion whose answer is constrained by a JSON schema
//! (`response_format` of OpenAI's API, as vLLM and SGLang serve it too), and the strict reading of
//! the answer.
//!
//! Whatever the endpoint promises, an answer counts only if it is exactly what the schema says. All
//! else is a [`Fault`], never a guess. Faults never quote the text or the answer.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::Question;

/// Tokens of an answer, and of what a model thinks before it. With more it is `truncated`. Small,
/// because endpoints refuse what does not fit their context with the prompt.
const ANSWER_TOKENS_MAX: u32 = 2_048;

/// Why a judge has not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Stored and counted under this name.
    pub code: &'static str,
    /// For people. Without text of users or of the judge.
    pub reason: String,
    /// The endpoint's Retry-After.
    pub retry_after: Option<Duration>,
    /// Whether the endpoint did not answer, so that the text is not to blame.
    pub is_of_endpoint: bool,
}

impl Fault {
    /// A model may take too long for one text. Other faults of an endpoint come whatever the text.
    pub fn may_be_of_text(&self) -> bool {
        self.code == "timeout"
    }

    /// Of the answer.
    pub fn new(code: &'static str, reason: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.into(),
            retry_after: None,
            is_of_endpoint: false,
        }
    }
}

/// The median of an odd number of votes. Of zeros and ones, it is the majority.
pub fn median(votes: &[f64]) -> Option<f64> {
    let mut sorted = votes.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// The schema of an answer, as a text that never changes with a library.
pub fn schema_text(question: Question) -> String {
    let answer = match question {
        Question::YesOrNo => r#"{"type":"boolean"}"#.to_owned(),
        Question::Number { min, max } => format!(r#"{{"type":"number","minimum":{min},"maximum":{max}}}"#),
    };
    format!(
        r#"{{"type":"object","properties":{{"answer":{answer}}},"required":["answer"],"additionalProperties":false}}"#
    )
}

/// The body of a request whose answer is constrained by the schema of the question.
pub fn request(question: Question, model: &str, messages: &Json) -> Json {
    let schema: Json = serde_json::from_str(&schema_text(question)).unwrap_or_default();
    json!({
        "model": model,
        "messages": messages,
        "max_completion_tokens": ANSWER_TOKENS_MAX,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "judgement", "strict": true, "schema": schema},
        },
    })
}

/// One answer to a [`request`].
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Of a yes or no: 1 or 0.
    pub answer: f64,
    /// The model that answered, as the endpoint calls it.
    pub model: Option<String>,
    /// The endpoint's `system_fingerprint`.
    pub fingerprint: Option<String>,
}

impl Reply {
    /// Reads the body of an answer.
    pub fn read(question: Question, body: &[u8]) -> Result<Self, Fault> {
        let completion: Completion =
            serde_json::from_slice(body).map_err(|_| Fault::new("malformed", "the answer is not a chat completion"))?;
        let [choice] = completion.choices.as_slice() else {
            let count = completion.choices.len();
            return Err(Fault::new(
                "malformed",
                format!("the answer has {count} choices, not one"),
            ));
        };
        let refusal = choice.message.refusal.as_deref();
        if refusal.is_some_and(|refusal| !refusal.is_empty()) {
            return Err(Fault::new("refused", "the model refused"));
        }
        match choice.finish_reason.as_deref() {
            Some("stop") => {}
            Some("length") => return Err(Fault::new("truncated", "the answer was cut off (finish_reason length)")),
            Some("content_filter") => return Err(Fault::new("refused", "finish_reason content_filter")),
            _ => return Err(Fault::new("malformed", "the finish_reason is not stop")),
        }
        let content = choice.message.content.as_deref().unwrap_or_default();
        Ok(Self {
            answer: read_answer(question, content)?,
            model: completion.model,
            fingerprint: completion.system_fingerprint,
        })
    }
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    model: Option<String>,
    system_fingerprint: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    message: Message,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    refusal: Option<String>,
}

/// What the schema says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer<T> {
    answer: T,
}

fn read_answer(question: Question, content: &str) -> Result<f64, Fault> {
    // The error of the parser may quote the answer.
    let not_schema = |_| Fault::new("not_schema", "the answer is not what its schema says");
    match question {
        Question::YesOrNo => {
            let answer: Answer<bool> = serde_json::from_str(content).map_err(not_schema)?;
            Ok(f64::from(u8::from(answer.answer)))
        }
        Question::Number { min, max } => {
            let answer: Answer<f64> = serde_json::from_str(content).map_err(not_schema)?;
            match (min..=max).contains(&answer.answer) {
                true => Ok(answer.answer),
                false => Err(Fault::new(
                    "out_of_range",
                    format!("the answer is not from {min} to {max}"),
                )),
            }
        }
    }
}
