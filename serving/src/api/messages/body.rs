//! The body of `POST /v1/messages`, and the chat request that it stands for.

use crate::api::body::{ChatRequest, UnknownFields};
use edge::Problem;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Anthropic's names, and Springtide's own beside them.
#[derive(Debug, Clone, Deserialize)]
pub struct MessagesRequest {
    model: String,
    max_tokens: i64,
    messages: Vec<Message>,
    /// A text, or a list of text blocks.
    system: Option<Content>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<Value>,
    /// `user_id` is the key of the caller's user; the rest is as in a chat.
    metadata: Option<Map<String, Value>>,
    thinking: Option<Value>,
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
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Value>),
}

/// Only tools that the caller runs itself.
#[derive(Debug, Clone, Deserialize)]
struct Tool {
    name: String,
    description: Option<String>,
    input_schema: Value,
}

impl MessagesRequest {
    pub fn into_chat(self) -> Result<ChatRequest, Problem> {
        self.unknown.refuse()?;
        if self.thinking.is_some_and(|thinking| thinking["type"] != "disabled") {
            return Err(bad("thinking must be {\"type\": \"disabled\"}; leave it out"));
        }
        let tool_choice = match self.tool_choice.as_ref().map(|choice| choice["type"].as_str()) {
            None | Some(Some("auto")) => "auto",
            Some(Some("none")) => "none",
            Some(_) => {
                return Err(bad(
                    "tool_choice must be {\"type\": \"auto\"} or {\"type\": \"none\"}; sampling cannot be constrained",
                ));
            }
        };
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            messages.push(json!({"role": "system", "content": text_of(system, "system")?}));
        }
        for (index, message) in self.messages.into_iter().enumerate() {
            add_message(&mut messages, message, index)?;
        }
        let mut metadata = self.metadata.unwrap_or_default();
        let user = metadata.remove("user_id");
        let tools = self
            .tools
            .map(|tools| tools.into_iter().map(Tool::into_function).collect::<Vec<_>>());
        let chat = json!({
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tools": tools,
            "tool_choice": tool_choice,
            "metadata": metadata,
            "user": user,
            "session_id": self.session_id,
            "surface": self.surface,
            "priority": self.priority,
        });
        serde_json::from_value(chat).map_err(bad)
    }
}

impl Tool {
    fn into_function(self) -> Value {
        let function = json!({"name": self.name, "description": self.description, "parameters": self.input_schema});
        json!({"type": "function", "function": function})
    }
}

/// One message of Anthropic's may be several of a chat: each tool's result is one.
fn add_message(messages: &mut Vec<Value>, message: Message, index: usize) -> Result<(), Problem> {
    let role = match message.role {
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let blocks = match message.content {
        Content::Text(text) => {
            messages.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    let mut text = String::new();
    let mut calls = Vec::new();
    for block in blocks {
        match (block["type"].as_str(), message.role) {
            (Some("text"), _) => text.push_str(text_block(&block, index)?),
            (Some("tool_use"), Role::Assistant) => {
                // a chat's arguments are a text
                let arguments = block["input"].to_string();
                let function = json!({"name": block["name"], "arguments": arguments});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            (Some("tool_result"), Role::User) => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => {
                        let content = Content::deserialize(content).map_err(bad)?;
                        text_of(content, "a tool_result")?
                    }
                };
                messages.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}));
            }
            (kind, _) => {
                return Err(bad(format!(
                    "messages[{index}] has a block of type {}; give text, tool_use (of the assistant) or tool_result \
                     (of the user)",
                    kind.unwrap_or("unknown")
                )));
            }
        }
    }
    if !calls.is_empty() {
        messages.push(json!({"role": role, "content": text, "tool_calls": calls}));
    } else if !text.is_empty() {
        messages.push(json!({"role": role, "content": text}));
    }
    Ok(())
}

fn text_of(content: Content, what: &str) -> Result<String, Problem> {
    let blocks = match content {
        Content::Text(text) => return Ok(text),
        Content::Blocks(blocks) => blocks,
    };
    let mut text = String::new();
    for block in &blocks {
        match (block["type"].as_str(), block["text"].as_str()) {
            (Some("text"), Some(part)) => text.push_str(part),
            _ => {
                return Err(bad(format!(
                    "{what} has a block that is no text; give text blocks only"
                )));
            }
        }
    }
    Ok(text)
}

fn text_block(block: &Value, index: usize) -> Result<&str, Problem> {
    block["text"]
        .as_str()
        .ok_or_else(|| bad(format!("messages[{index}] has a text block without `text`")))
}

fn bad(detail: impl std::fmt::Display) -> Problem {
    Problem::bad_request(detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(fields: Value) -> Result<ChatRequest, String> {
        let mut body = json!({"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]});
        if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
            body.extend(fields);
        }
        let request: MessagesRequest = serde_json::from_value(body).map_err(|error| error.to_string())?;
        request.into_chat().map_err(|problem| problem.to_string())
    }

    fn messages(chat: &ChatRequest) -> Value {
        serde_json::to_value(&chat.messages).unwrap()
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
            "stop_sequences": ["END"],
            "top_k": 4,
            "metadata": {"user_id": "u1"},
        }))
        .unwrap();
        let call = json!({"id": "t1", "type": "function",
            "function": {"name": "weather", "arguments": "{\"city\":\"Bonn\"}"}});
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
        assert_eq!((request.common.user.as_deref(), request.params.top_k), (Some("u1"), 4));
    }

    #[test]
    fn what_is_not_offered_is_refused_by_name() {
        let image = json!([{"role": "user", "content": [{"type": "image"}]}]);
        for (fields, expected) in [
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": 9}}),
                "thinking must be",
            ),
            (json!({"tool_choice": {"type": "any"}}), "tool_choice must be"),
            (json!({"messages": image}), "a block of type image"),
            (
                json!({"system": [{"type": "image"}]}),
                "system has a block that is no text",
            ),
            (json!({"beams": 3}), "unknown field `beams`"),
            (json!({"max_tokens": null}), "invalid type"),
        ] {
            let refused = chat(fields).map(drop).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
