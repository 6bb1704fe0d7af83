//! The body of `POST /v1/messages`, and the chat request that it stands for.

use crate::api::body::{ChatRequest, CommonFields, UnknownFields};
use crate::api::{constraint, request, thinking_variables};
use edge::Problem;
use model::sampling::Params;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use text::chat::Value as TemplateValue;

/// Anthropic's names, and Springtide's own beside them.
#[derive(Debug, Clone, Deserialize)]
pub struct MessagesRequest {
    model: String,
    /// Required to sample, and absent where tokens are counted.
    max_tokens: Option<i64>,
    messages: Vec<Message>,
    /// A text, or a list of text blocks.
    system: Option<Content>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Value>,
    /// `user_id` is the key of the caller's user; the rest is as in a chat.
    metadata: Option<Map<String, Value>>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    session_id: Option<String>,
    surface: Option<String>,
    priority: Option<i64>,
    #[serde(flatten)]
    unknown: UnknownFields,
}

#[derive(Debug, Clone, Deserialize)]
struct Message {
    role: Role,
    content: Content,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    User,
    Assistant,
    /// In the middle of a conversation.
    System,
}

/// Blocks are template values, because these keep the order of a call's arguments.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<TemplateValue>),
}

/// Only tools that the caller runs itself.
#[derive(Debug, Clone, Deserialize)]
struct Tool {
    /// `custom`, or absent. Others are run by Anthropic.
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<TemplateValue>,
}

/// The model thinks as long as it likes: a budget and a way to show it are ignored.
#[derive(Debug, Clone, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: ThinkingKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ThinkingKind {
    Enabled,
    Adaptive,
    Disabled,
}

#[derive(Debug, Clone, Deserialize)]
struct OutputConfig {
    effort: Option<String>,
    /// A JSON schema that the answer follows.
    format: Option<Value>,
    #[serde(flatten)]
    unknown: UnknownFields,
}

impl MessagesRequest {
    /// `session`: used if the body has none.
    pub fn into_chat(self, session: Option<String>) -> Result<ChatRequest, Problem> {
        self.unknown.refuse()?;
        if let Some(config) = &self.output_config {
            config.unknown.refuse()?;
        }
        let tool_choice = match &self.tool_choice {
            None => "auto".into(),
            Some(choice) => match (choice["type"].as_str(), choice["name"].as_str()) {
                (Some(kind @ ("auto" | "none")), _) => kind.into(),
                (Some("any"), _) => "required".into(),
                (Some("tool"), Some(name)) => json!({"type": "function", "function": {"name": name}}),
                _ => {
                    let detail = "the type of tool_choice must be auto, none, any, or tool with a name";
                    return Err(bad(detail).with("field", "tool_choice"));
                }
            },
        };
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            messages.push(chat_message("system", text_of(system, "system")?));
        }
        for (index, message) in self.messages.into_iter().enumerate() {
            add_message(&mut messages, message, index)?;
        }
        let prefilled = messages.last().is_some_and(is_prefill);
        let mut metadata = self.metadata.unwrap_or_default();
        let user = match metadata.remove("user_id") {
            None | Some(Value::Null) => None,
            Some(Value::String(user)) => Some(request::name("metadata.user_id", without_session(user))?),
            Some(_) => return Err(bad("metadata.user_id must be a string")),
        };
        let tools = self
            .tools
            .map(|tools| tools.into_iter().map(Tool::into_function).collect::<Result<_, _>>());
        let thinks = self.thinking.map(|thinking| thinking.kind != ThinkingKind::Disabled);
        let (effort, response_format) = match self.output_config {
            Some(config) => (config.effort, config.format),
            None => (None, None),
        };
        // the chat has other names for these: an error has the one that the caller knows
        constraint::of_format(response_format.as_ref(), "output_config.format")?;
        let stops = self.stop_sequences.map(Value::from);
        request::stops("stop_sequences", stops.clone())?;
        let defaults = Params::default();
        Ok(ChatRequest {
            messages,
            continue_final_message: Some(prefilled),
            tools: tools.transpose()?,
            tool_choice: Some(tool_choice),
            response_format,
            chat_template_kwargs: thinks.map(thinking_variables),
            separate_reasoning: thinks,
            reasoning_effort: effort,
            params: Params {
                temperature: self.temperature.unwrap_or(defaults.temperature),
                top_p: self.top_p.unwrap_or(defaults.top_p),
                top_k: self.top_k.unwrap_or(defaults.top_k),
                ..defaults
            },
            common: CommonFields {
                max_tokens: self.max_tokens,
                stop: stops,
                stream: self.stream,
                user,
                session_id: self.session_id.or(session),
                surface: self.surface,
                priority: self.priority,
                metadata: Some(metadata),
                ..CommonFields::of_model(self.model)
            },
            ..ChatRequest::default()
        })
    }

    /// Says that `max_tokens` is missing, if it is.
    pub fn check_max_tokens(&self) -> Result<(), Problem> {
        match self.max_tokens {
            Some(_) => Ok(()),
            None => Err(bad("missing field `max_tokens`; give at least 1").with("field", "max_tokens")),
        }
    }
}

impl Tool {
    fn into_function(self) -> Result<TemplateValue, Problem> {
        let kind = self.kind.as_deref().unwrap_or("custom");
        if kind != "custom" {
            return Err(bad(format!(
                "the tool {:?} has the type {kind:?}, which Anthropic runs; give tools with an input_schema",
                self.name
            )));
        }
        let mut function = vec![("name", self.name.into())];
        function.extend(self.description.map(|description| ("description", description.into())));
        function.extend(self.input_schema.map(|schema| ("parameters", schema)));
        Ok(object([("type", "function".into()), ("function", object(function))]))
    }
}

/// One message of Anthropic's may be several of a chat: each tool's result is one.
fn add_message(messages: &mut Vec<TemplateValue>, message: Message, index: usize) -> Result<(), Problem> {
    let role = match message.role {
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::System => "system",
    };
    let blocks = match message.content {
        Content::Text(text) => {
            messages.push(chat_message(role, text));
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    let (mut text, mut reasoning) = (String::new(), String::new());
    let mut calls = Vec::new();
    for block in &blocks {
        let kind = text_field(block, "type").unwrap_or_default();
        match (kind.as_str(), message.role) {
            ("text", _) => text.push_str(&text_of_block(block, &format!("messages[{index}]"))?),
            ("thinking", Role::Assistant) => reasoning.push_str(&text_field(block, "thinking").unwrap_or_default()),
            // encrypted by Anthropic
            ("redacted_thinking", Role::Assistant) => {}
            ("tool_use", Role::Assistant) => {
                let function = object([("name", field(block, "name")), ("arguments", field(block, "input"))]);
                calls.push(object([
                    ("id", field(block, "id")),
                    ("type", "function".into()),
                    ("function", function),
                ]));
            }
            ("tool_result", Role::User) => {
                let content = field(block, "content");
                let content = match content.is_none() || content.is_undefined() {
                    true => String::new(),
                    false => text_of(Content::deserialize(content).map_err(bad)?, "a tool_result")?,
                };
                messages.push(object([
                    ("role", "tool".into()),
                    ("tool_call_id", field(block, "tool_use_id")),
                    ("content", content.into()),
                ]));
            }
            _ => {
                return Err(bad(format!(
                    "messages[{index}] has a block of type {kind:?}; give text, tool_use and thinking (of the assistant) \
                     or tool_result (of the user)"
                )));
            }
        }
    }
    if text.is_empty() && calls.is_empty() && reasoning.is_empty() {
        return Ok(());
    }
    let mut fields = vec![("role", role.into()), ("content", text.into())];
    if !reasoning.is_empty() {
        fields.push(("reasoning_content", reasoning.into()));
    }
    if !calls.is_empty() {
        fields.push(("tool_calls", calls.into()));
    }
    messages.push(object(fields));
    Ok(())
}

/// The model continues what the caller wrote for it.
fn is_prefill(last: &TemplateValue) -> bool {
    let is_assistant = text_field(last, "role").as_deref() == Some("assistant");
    let text = text_field(last, "content").unwrap_or_default();
    is_assistant && !text.is_empty() && field(last, "tool_calls").is_undefined()
}

fn chat_message(role: &str, content: String) -> TemplateValue {
    object([("role", role.into()), ("content", content.into())])
}

fn object(fields: impl IntoIterator<Item = (&'static str, TemplateValue)>) -> TemplateValue {
    TemplateValue::from_pairs(fields)
}

fn field(block: &TemplateValue, name: &str) -> TemplateValue {
    block.get_attr(name).unwrap_or_default()
}

fn text_field(block: &TemplateValue, name: &str) -> Option<String> {
    field(block, name).as_str().map(str::to_owned)
}

fn text_of(content: Content, what: &str) -> Result<String, Problem> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Blocks(blocks) => blocks.iter().map(|block| text_of_block(block, what)).collect(),
    }
}

fn text_of_block(block: &TemplateValue, what: &str) -> Result<String, Problem> {
    match (text_field(block, "type").as_deref(), text_field(block, "text")) {
        (Some("text"), Some(text)) => Ok(text),
        _ => Err(bad(format!("{what} has a block that is no text; give text blocks"))),
    }
}

fn bad(detail: impl std::fmt::Display) -> Problem {
    Problem::bad_request(detail)
}

/// Claude Code adds the session to the user: by it, each session would be another user.
fn without_session(user: String) -> String {
    if let Ok(Value::Object(mut parts)) = serde_json::from_str(&user) {
        parts.remove("session_id");
        return Value::Object(parts).to_string();
    }
    match user.rsplit_once("_session_") {
        Some((user, _)) if !user.is_empty() => user.to_owned(),
        _ => user,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(fields: Value) -> Result<ChatRequest, String> {
        let mut body = json!({"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]});
        if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
            body.extend(fields);
        }
        let request: MessagesRequest = serde_json::from_str(&body.to_string()).map_err(|error| error.to_string())?;
        request.into_chat(None).map_err(|problem| problem.to_string())
    }

    fn messages(chat: &ChatRequest) -> Value {
        serde_json::to_value(&chat.messages).unwrap()
    }

    #[test]
    fn sessions_of_one_device_are_of_one_user() {
        let user = |id: &str| chat(json!({"metadata": {"user_id": id}})).unwrap().common.user.unwrap();
        assert_eq!(
            user("user_1f_account_2e_session_a"),
            user("user_1f_account_2e_session_b")
        );
        assert_ne!(
            user("user_1f_account_2e_session_a"),
            user("user_1f_account_3e_session_a")
        );
        assert_eq!(
            user(r#"{"device_id": "d", "session_id": "a"}"#),
            user(r#"{"device_id": "d", "session_id": "b"}"#)
        );
        assert_eq!(user("ana"), "ana");
    }

    #[test]
    fn a_conversation_with_tools_becomes_a_chat() {
        let request = chat(json!({
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {}}],
            "messages": [
                {"role": "user", "content": "How warm is it?"},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}]},
                    {"type": "text", "text": "Well?"},
                ]},
            ],
            "tools": [{"name": "weather", "description": "now", "input_schema": {"type": "object"}}],
            "stop_sequences": ["END", "a", "b", "c", "d"],
            "top_k": 4,
            "metadata": {"user_id": "u1"},
        }))
        .unwrap();
        let call = json!({"id": "t1", "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Bonn"}}});
        assert_eq!(
            messages(&request),
            json!([
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How warm is it?"},
                {"role": "assistant", "content": "I look.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "t1", "content": "21"},
                {"role": "user", "content": "Well?"},
            ])
        );
        assert_eq!(request.tools.as_ref().unwrap().len(), 1);
        assert_eq!(request.common.stop, Some(json!(["END", "a", "b", "c", "d"])));
        assert_eq!((request.common.user.as_deref(), request.params.top_k), (Some("u1"), 4));
    }

    #[test]
    fn the_models_own_words_at_the_end_are_continued() {
        let user = json!({"role": "user", "content": "JSON, please"});
        let block = |block: Value| json!([user, {"role": "assistant", "content": [block]}]);
        for (messages, continued) in [
            (json!([user, {"role": "assistant", "content": "{"}]), true),
            (block(json!({"type": "text", "text": "{"})), true),
            (
                block(json!({"type": "tool_use", "id": "t", "name": "f", "input": {}})),
                false,
            ),
            (json!([user, {"role": "assistant", "content": ""}]), false),
            (json!([user]), false),
        ] {
            let request = chat(json!({"messages": messages})).unwrap();
            assert_eq!(request.continue_final_message, Some(continued), "{messages}");
            let (conversation, ..) = request.into_conversation().unwrap();
            assert_eq!(conversation.add_generation_prompt, !continued);
        }
    }

    #[test]
    fn what_claude_code_sends_is_understood() {
        let request = chat(json!({
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
                {"role": "system", "content": "Agents: none."},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "Write", "input": {"path": "z", "content": "a"}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": true}]},
            ],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "tools": [{"name": "Write", "input_schema": {}, "type": "custom"}],
        }))
        .unwrap();
        let messages = serde_json::to_string(&request.messages).unwrap();
        assert!(
            messages.contains(r#""arguments":{"path":"z","content":"a"}"#),
            "{messages}"
        );
        assert!(messages.contains(r#""reasoning_content":"Hm.""#), "{messages}");
        assert!(
            messages.contains(r#"{"role":"system","content":"Agents: none."}"#),
            "{messages}"
        );
        assert_eq!(
            (request.separate_reasoning, request.reasoning_effort.as_deref()),
            (Some(true), Some("high"))
        );
    }

    #[test]
    fn what_is_not_offered_is_refused_by_name() {
        let image = json!([{"role": "user", "content": [{"type": "image"}]}]);
        for (fields, expected) in [
            (json!({"thinking": {"type": "always"}}), "unknown variant `always`"),
            (
                json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
                "which Anthropic runs",
            ),
            (
                json!({"output_config": {"task_budget": 3}}),
                "unknown field `task_budget`",
            ),
            (json!({"tool_choice": {"type": "some"}}), "tool_choice must be"),
            (json!({"messages": image}), "a block of type \"image\""),
            (
                json!({"system": [{"type": "image"}]}),
                "system has a block that is no text",
            ),
            (json!({"beams": 3}), "unknown field `beams`"),
            (
                json!({"output_config": {"format": {"type": "grammar"}}}),
                "the type of output_config.format must be",
            ),
            (
                json!({"output_config": {"format": {"type": "json_schema"}}}),
                "output_config.format has no schema",
            ),
            (
                json!({"stop_sequences": vec!["a"; 65]}),
                "stop_sequences must be a string or a list of at most 64",
            ),
            (
                json!({"stop_sequences": [""]}),
                "stop_sequences has a string of 0 bytes",
            ),
            (json!({"metadata": {"user_id": ""}}), "metadata.user_id has 0 bytes"),
        ] {
            let refused = chat(fields).map(drop).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
