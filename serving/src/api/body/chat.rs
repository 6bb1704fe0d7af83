//! The body of `POST /v1/chat/completions`. A chat request is a completion whose prompt the
//! version's own template renders; everything after the prompt is the same.

use super::{CommonFields, UnknownFields, with_field_names};
use crate::api::constraint::{self, Constraint, ToolChoice};
use crate::api::request::tokens_wanted;
use crate::api::thinking_variables;
use edge::Problem;
use model::sampling::Params;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use text::answer::Tools;
use text::chat::{Conversation, Value as TemplateValue, ValueKind};

/// OpenAI's limit.
const TOP_LOGPROBS_MAX: i64 = 20;

#[derive(Debug, Clone, Default, Deserialize)]
pub struct ChatRequest {
    /// As the template reads them: `role`, `content` and any other fields it knows.
    pub messages: Vec<TemplateValue>,
    /// Rendered into the prompt by templates that support them.
    pub tools: Option<Vec<TemplateValue>>,
    pub documents: Option<Vec<TemplateValue>>,
    /// Further variables of the template.
    pub chat_template_kwargs: Option<BTreeMap<String, TemplateValue>>,
    /// Default: true, unless the final message is continued.
    pub add_generation_prompt: Option<bool>,
    /// The model continues the last message.
    pub continue_final_message: Option<bool>,
    /// OpenAI's new name of `max_tokens`.
    pub max_completion_tokens: Option<i64>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<i64>,
    /// SGLang's name: reasoning is `reasoning_content` instead of a part of `content`.
    pub separate_reasoning: Option<bool>,
    /// A variable for templates that know it.
    pub reasoning_effort: Option<String>,
    pub tool_choice: Option<Value>,
    pub response_format: Option<Value>,

    #[serde(flatten, deserialize_with = "with_field_names")]
    pub params: Params,
    #[serde(flatten, deserialize_with = "with_field_names")]
    pub common: CommonFields,
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl ChatRequest {
    /// How many of the most probable tokens to list with each sampled one. `None`: no
    /// log-probabilities at all.
    pub fn top_logprobs(&self) -> Result<Option<usize>, Problem> {
        let k = self.top_logprobs.unwrap_or(0);
        match self.logprobs.unwrap_or(false) {
            false if k != 0 => Err(Problem::bad_request("top_logprobs needs logprobs: true")),
            false => Ok(None),
            true if (0..=TOP_LOGPROBS_MAX).contains(&k) => Ok(Some(k as usize)),
            true => Err(Problem::bad_request(format!(
                "top_logprobs is {k}; give 0 to {TOP_LOGPROBS_MAX}"
            ))),
        }
    }

    pub fn max_tokens(&self) -> Result<Option<i64>, Problem> {
        match (self.max_completion_tokens, self.common.max_tokens) {
            (Some(new), Some(old)) if new != old => Err(Problem::bad_request(format!(
                "max_completion_tokens is {new} and max_tokens, its old name, is {old}; give one"
            ))),
            (new, old) => {
                // so that an error has the name that the caller knows
                tokens_wanted("max_completion_tokens", new)?;
                Ok(new.or(old))
            }
        }
    }

    /// What the prompt is rendered from, and the rest of the request.
    pub fn into_conversation(self) -> Result<(Conversation, Option<Constraint>, Params, CommonFields), Problem> {
        self.unknown.refuse()?;
        let choice = ToolChoice::read(self.tool_choice.as_ref())?;
        let format = constraint::of_format(self.response_format.as_ref(), "response_format")?;
        let tools = self
            .tools
            .filter(|tools| choice != ToolChoice::None && !tools.is_empty());
        // schemas are read only if they are needed
        let constraint = match (&tools, format) {
            (Some(_), None) if choice == ToolChoice::Auto => None,
            (Some(tools), format) => {
                let tools = serde_json::to_value(tools).unwrap_or_default();
                let tools = Tools::of(tools.as_array().map_or(&[], Vec::as_slice));
                let call = choice.constraint(&tools)?;
                call.or(format.map(|format| format.or_call(&tools)))
            }
            (None, format) => choice.constraint(&Tools::default())?.or(format),
        };
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        if let Some(effort) = self.reasoning_effort {
            variables.entry("reasoning_effort".into()).or_insert(effort.into());
        }
        if constraint.is_some() {
            // there is no room for thoughts in the JSON
            for (name, value) in thinking_variables(false) {
                variables.entry(name).or_insert(value);
            }
        }
        let continued = self.continue_final_message.unwrap_or(false);
        if continued && constraint.is_some() {
            return Err(Problem::bad_request(
                "an answer that continues a message follows no format and calls no tool that it must; \
                 leave out the last message, or the format and the tool_choice",
            ));
        }
        let messages = self.messages.iter().enumerate();
        let messages = messages.map(|(place, message)| with_text_parts(message, place));
        let conversation = Conversation {
            messages: messages.collect::<Result<_, _>>()?,
            tools,
            documents: self.documents,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!continued),
            continue_final_message: continued.then(|| "content".to_owned()),
            variables,
            ..Conversation::default()
        };
        Ok((conversation, constraint, self.params, self.common))
    }
}

/// The message with its content of parts as parts of type `text`. Refuses others by their type.
fn with_text_parts(message: &TemplateValue, place: usize) -> Result<TemplateValue, Problem> {
    let content = message.get_attr("content").unwrap_or_default();
    let (ValueKind::Seq, Ok(parts)) = (content.kind(), content.try_iter()) else {
        return Ok(message.clone());
    };
    let field = |part: &TemplateValue, name: &str| part.get_attr(name).unwrap_or_default();
    let text_part = |part: TemplateValue| {
        let kind = field(&part, "type").as_str().map(str::to_owned);
        let text = match kind.as_deref() {
            Some("text" | "input_text" | "output_text") => field(&part, "text"),
            Some("refusal") => field(&part, "refusal"),
            None => part,
            Some(_) => TemplateValue::UNDEFINED,
        };
        match text.kind() {
            ValueKind::String => Ok(TemplateValue::from_pairs([("type", "text".into()), ("text", text)])),
            _ => Err(Problem::bad_request(format!(
                "messages[{place}] has a part of type {:?} or without a text; models read text here, so give parts of \
                 type \"text\"",
                kind.unwrap_or_else(|| "none".into())
            ))),
        }
    };
    let parts: TemplateValue = parts.map(text_part).collect::<Result<Vec<_>, _>>()?.into();
    let keys = message.try_iter().map_err(Problem::bad_request)?;
    let fields = keys.map(|key| {
        let value = match key.as_str() {
            Some("content") => parts.clone(),
            _ => message.get_item(&key).unwrap_or_default(),
        };
        (key, value)
    });
    Ok(TemplateValue::from_pairs(fields))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat(fields: Value) -> ChatRequest {
        let mut body = json!({"model": "demo", "messages": [{"role": "user", "content": "hi"}]});
        if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
            body.extend(fields);
        }
        serde_json::from_value(body).unwrap()
    }

    #[test]
    fn a_chat_request_is_a_completion_whose_prompt_a_template_renders() {
        let request = chat(json!({"max_completion_tokens": 7, "top_k": 4, "logprobs": true}));
        assert_eq!(
            (request.max_tokens().unwrap(), request.top_logprobs().unwrap()),
            (Some(7), Some(0))
        );
        let (conversation, constraint, params, _) = request.into_conversation().unwrap();
        assert_eq!((params.top_k, constraint), (4, None));
        assert!(conversation.add_generation_prompt && conversation.continue_final_message.is_none());
        let (continued, ..) = chat(json!({"continue_final_message": true}))
            .into_conversation()
            .unwrap();
        assert!(!continued.add_generation_prompt && continued.continue_final_message.as_deref() == Some("content"));
    }

    #[test]
    fn parts_are_texts_or_refused_by_their_place_and_type() {
        let of = |content: Value| {
            let messages = json!([{"role": "user", "content": content, "name": "n"}]);
            let (conversation, ..) = chat(json!({"messages": messages})).into_conversation()?;
            Ok::<_, Problem>(serde_json::to_value(&conversation.messages[0]).unwrap())
        };
        let parts =
            json!([{"type": "text", "text": "a", "cache_control": {}}, "b", {"type": "refusal", "refusal": "c"}]);
        let text = |text: &str| json!({"type": "text", "text": text});
        let expected = json!({"role": "user", "content": [text("a"), text("b"), text("c")], "name": "n"});
        assert_eq!(of(parts).unwrap(), expected);
        assert_eq!(of(json!("a")).unwrap()["content"], "a");
        for part in [
            json!({"type": "image_url", "image_url": {"url": "x"}, "text": "y"}),
            json!({"type": "input_audio"}),
            json!({"type": "text"}),
            json!({"type": "text", "text": 3}),
        ] {
            let problem = of(json!([part])).unwrap_err().to_string();
            assert!(
                problem.contains("messages[0]") && problem.contains(part["type"].as_str().unwrap()),
                "{problem}"
            );
        }
    }

    #[test]
    fn a_format_beside_tools_binds_the_text_and_leaves_room_for_calls() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let format = json!({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}});
        let constraint = |choice: &str, continued: bool| {
            let fields = json!({"tools": tools, "response_format": format, "tool_choice": choice, "continue_final_message": continued});
            chat(fields)
                .into_conversation()
                .map(|(_, constraint, ..)| constraint.unwrap())
        };
        let auto = constraint("auto", false).unwrap();
        assert!(auto.calls_tool && auto.schema["anyOf"][0]["type"] == "integer");
        assert_eq!(auto.schema["anyOf"][1]["properties"]["name"]["const"], "f");
        let required = constraint("required", false).unwrap();
        assert_eq!(required.schema["anyOf"].as_array().unwrap().len(), 1);
        let none = constraint("none", false).unwrap();
        assert!(!none.calls_tool && none.schema == json!({"type": "integer"}));
        assert!(
            constraint("auto", true)
                .unwrap_err()
                .to_string()
                .contains("continues a message")
        );
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_advice() {
        for (fields, expected) in [
            (json!({"tool_choice": "required"}), "not among tools"),
            (json!({"tool_choice": "sometimes"}), "tool_choice must be"),
            (
                json!({"response_format": {"type": "grammar"}}),
                "type of response_format must be",
            ),
            (json!({"response_format": "json"}), "type of response_format must be"),
            (json!({"beams": 3}), "unknown field `beams`"),
            (json!({"top_logprobs": 3}), "top_logprobs needs logprobs"),
            (
                json!({"logprobs": true, "top_logprobs": 21}),
                "top_logprobs is 21; give 0 to 20",
            ),
            (json!({"max_tokens": 3, "max_completion_tokens": 4}), "give one"),
            (json!({"max_completion_tokens": 0}), "max_completion_tokens is 0"),
        ] {
            let request = chat(fields);
            let problem = request.top_logprobs().map(drop).and(request.max_tokens().map(drop));
            let problem = problem
                .and(request.into_conversation().map(drop))
                .unwrap_err()
                .to_string();
            assert!(problem.contains(expected), "{problem}");
        }
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let (conversation, ..) = chat(json!({"tools": tools, "tool_choice": "none"}))
            .into_conversation()
            .unwrap();
        assert!(conversation.tools.is_none());
    }
}
