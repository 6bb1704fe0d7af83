//! The body of `POST /v1/responses`, and the chat request that it stands for.

mod input;

use crate::api::body::{ChatRequest, CommonFields, UnknownFields, with_field_names};
use crate::api::{constraint, request, thinking_variables};
use edge::Problem;
use input::Input;
use model::sampling::Params;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use text::chat::Value as TemplateValue;

/// OpenAI's names, and Springtide's own beside them.
#[derive(Debug, Clone, Deserialize)]
pub struct ResponsesRequest {
    model: String,
    input: Input,
    /// The first system message.
    instructions: Option<String>,
    /// Template values, because these keep the order of a schema's properties.
    tools: Option<Vec<TemplateValue>>,
    tool_choice: Option<Value>,
    max_output_tokens: Option<i64>,
    reasoning: Option<Reasoning>,
    text: Option<Text>,
    include: Option<Vec<String>>,
    stream: Option<bool>,
    metadata: Option<Map<String, Value>>,
    parallel_tool_calls: Option<bool>,
    seed: Option<i64>,
    user: Option<String>,
    safety_identifier: Option<String>,
    session_id: Option<String>,
    surface: Option<String>,
    priority: Option<i64>,

    // accepted only with values that ask for nothing
    background: Option<bool>,
    conversation: Option<Value>,
    previous_response_id: Option<String>,
    prompt: Option<Value>,
    top_logprobs: Option<i64>,
    truncation: Option<String>,

    #[serde(flatten, deserialize_with = "with_field_names")]
    params: Params,
    #[serde(flatten)]
    unknown: UnknownFields,
}

/// `summary` is ignored: reasoning is given as it is.
#[derive(Debug, Clone, Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

/// `verbosity` is ignored.
#[derive(Debug, Clone, Deserialize)]
struct Text {
    format: Option<Value>,
}

/// What the answer repeats of the request.
#[derive(Debug, Clone, Serialize)]
pub struct Echo {
    instructions: Option<String>,
    max_output_tokens: Option<i64>,
    metadata: Map<String, Value>,
    parallel_tool_calls: bool,
    reasoning: Value,
    /// Replaced by what is sampled at, which an arm may bound.
    pub temperature: f32,
    text: Value,
    tool_choice: Value,
    /// Those that the model was shown.
    tools: Vec<TemplateValue>,
    top_p: f32,
}

impl ResponsesRequest {
    /// `session`: used if the body has none.
    pub fn into_chat(self, session: Option<String>) -> Result<(ChatRequest, Echo), Problem> {
        self.unknown.refuse()?;
        self.refuse_what_is_not_offered()?;
        let tools = self.tools.unwrap_or_default();
        // the model is not shown those that the server would have to run
        let functions: Vec<TemplateValue> = tools.into_iter().filter(is_function).collect();
        let tool_choice = self.tool_choice.unwrap_or_else(|| "auto".into());
        let format = self.text.and_then(|text| text.format);
        let format = format.unwrap_or_else(|| json!({"type": "text"}));
        // the chat has other names for these: an error has the one that the caller knows
        constraint::of_format(Some(&format), "text.format")?;
        request::tokens_wanted("max_output_tokens", self.max_output_tokens)?;
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone());
        let metadata = self.metadata.unwrap_or_default();
        let echo = Echo {
            instructions: self.instructions.clone(),
            max_output_tokens: self.max_output_tokens,
            metadata: metadata.clone(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            reasoning: json!({"effort": effort, "summary": null}),
            temperature: self.params.temperature,
            text: json!({"format": &format}),
            tool_choice: tool_choice.clone(),
            tools: functions.clone(),
            top_p: self.params.top_p,
        };
        let chat = ChatRequest {
            messages: self.input.into_messages(self.instructions)?,
            tools: Some(functions.iter().map(chat_tool).collect()),
            tool_choice: Some(tool_choice),
            response_format: Some(format),
            chat_template_kwargs: (effort.as_deref() == Some("none")).then(|| thinking_variables(false)),
            separate_reasoning: Some(self.reasoning.is_some()),
            reasoning_effort: effort,
            params: self.params,
            common: CommonFields {
                max_tokens: self.max_output_tokens,
                stream: self.stream,
                seed: self.seed,
                user: self.user,
                safety_identifier: self.safety_identifier,
                session_id: self.session_id.or(session),
                surface: self.surface,
                priority: self.priority,
                metadata: Some(metadata),
                ..CommonFields::of_model(self.model)
            },
            ..ChatRequest::default()
        };
        Ok((chat, echo))
    }

    fn refuse_what_is_not_offered(&self) -> Result<(), Problem> {
        let state = "nothing is stored here: send the whole conversation as input";
        let wants_logprobs = self
            .include
            .iter()
            .flatten()
            .any(|what| what == "message.output_text.logprobs");
        let has = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
        for (field, refused, advice) in [
            ("previous_response_id", self.previous_response_id.is_some(), state),
            ("conversation", has(&self.conversation), state),
            ("prompt", has(&self.prompt), state),
            (
                "background",
                self.background == Some(true),
                "an answer is given only to who waits for it",
            ),
            (
                "truncation",
                self.truncation
                    .as_ref()
                    .is_some_and(|truncation| truncation != "disabled"),
                "shorten the input where you know what can go",
            ),
            (
                "top_logprobs",
                self.top_logprobs.is_some_and(|k| k != 0),
                "ask /v1/chat/completions for log-probabilities",
            ),
            (
                "include",
                wants_logprobs,
                "ask /v1/chat/completions for log-probabilities",
            ),
        ] {
            if refused {
                let problem = bad(format!("{field} is not offered: {advice}"));
                return Err(problem.with("field", field));
            }
        }
        Ok(())
    }
}

fn is_function(tool: &TemplateValue) -> bool {
    tool.get_attr("type")
        .is_ok_and(|kind| kind.as_str() == Some("function"))
}

/// A function in the form of a chat's tools.
fn chat_tool(tool: &TemplateValue) -> TemplateValue {
    let fields = ["name", "description", "parameters"].map(|name| (name, tool.get_attr(name).unwrap_or_default()));
    let given = fields
        .into_iter()
        .filter(|(_, value)| !value.is_undefined() && !value.is_none());
    TemplateValue::from_pairs([
        ("type", "function".into()),
        ("function", TemplateValue::from_pairs(given)),
    ])
}

fn bad(detail: impl std::fmt::Display) -> Problem {
    Problem::bad_request(detail)
}

#[cfg(test)]
mod tests;
