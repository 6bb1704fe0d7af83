//! The input of a response, as the messages of a chat.

use super::bad;
use edge::Problem;
use serde::Deserialize;
use serde_json::{Map, Value};
use text::chat::Value as TemplateValue;

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

/// The messages so far. The items of one turn of the model become one message, as its template wrote
/// it.
#[derive(Debug, Default)]
struct Messages {
    done: Vec<TemplateValue>,
    /// Leading system messages are one, because many templates take no more.
    system: Vec<String>,
    turn: Turn,
}

/// The model's turn that the last items belong to.
#[derive(Debug, Default)]
struct Turn {
    reasoning: String,
    text: String,
    calls: Vec<TemplateValue>,
    has_message: bool,
}

impl Input {
    pub fn into_messages(self, instructions: Option<String>) -> Result<Vec<TemplateValue>, Problem> {
        let mut messages = Messages::default();
        messages.system.extend(instructions);
        match self {
            Input::Text(text) => messages.add("user", text),
            Input::Items(items) => {
                for (index, item) in items.iter().enumerate() {
                    messages.add_item(item, index)?;
                }
            }
        }
        messages.end_turn();
        messages.end_system();
        Ok(messages.done)
    }
}

impl Messages {
    fn add_item(&mut self, item: &Map<String, Value>, index: usize) -> Result<(), Problem> {
        let text = |field: &str| item.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        let kind = match item.get("type").and_then(Value::as_str) {
            None if item.contains_key("role") => "message",
            kind => kind.unwrap_or("unknown"),
        };
        match (kind, text("role").as_str()) {
            ("message", "assistant") => {
                // a second message is another turn
                if self.turn.has_message || !self.turn.calls.is_empty() {
                    self.end_turn();
                }
                self.turn.has_message = true;
                self.turn.text = content(item.get("content"), index)?;
            }
            ("message", "user") => self.add("user", content(item.get("content"), index)?),
            ("message", "system" | "developer") => self.add("system", content(item.get("content"), index)?),
            ("message", role) => {
                return Err(bad(format!(
                    "input[{index}] has the role {role:?}; give user, assistant, system or developer"
                )));
            }
            ("function_call", _) => {
                let function = [("name", text("name")), ("arguments", text("arguments"))];
                self.turn.calls.push(TemplateValue::from_pairs([
                    ("id", TemplateValue::from(text("call_id"))),
                    ("type", "function".into()),
                    ("function", TemplateValue::from_pairs(function)),
                ]));
            }
            ("function_call_output", _) => {
                let output = content(item.get("output"), index)?;
                self.end_turn();
                self.end_system();
                self.done.push(TemplateValue::from_pairs([
                    ("role", "tool".to_owned()),
                    ("tool_call_id", text("call_id")),
                    ("content", output),
                ]));
            }
            ("reasoning", _) => {
                if self.turn.has_message || !self.turn.calls.is_empty() {
                    self.end_turn();
                }
                // that of other servers is encrypted or a summary
                let own = item.get("content").and_then(Value::as_array);
                let texts = own.into_iter().flatten().filter_map(|part| part["text"].as_str());
                self.turn.reasoning.extend(texts);
            }
            (kind, _) => {
                return Err(bad(format!(
                    "input[{index}] has the type {kind:?}; give message, function_call, function_call_output or reasoning"
                )));
            }
        }
        Ok(())
    }

    fn add(&mut self, role: &str, content: String) {
        self.end_turn();
        if role == "system" && self.done.is_empty() {
            self.system.push(content);
            return;
        }
        self.end_system();
        self.push(role, content);
    }

    fn push(&mut self, role: &str, content: String) {
        let fields = [("role", role.to_owned()), ("content", content)];
        self.done.push(TemplateValue::from_pairs(fields));
    }

    fn end_system(&mut self) {
        let system = std::mem::take(&mut self.system);
        if !system.is_empty() {
            self.push("system", system.join("\n\n"));
        }
    }

    fn end_turn(&mut self) {
        let Turn {
            reasoning,
            text,
            calls,
            has_message,
        } = std::mem::take(&mut self.turn);
        if !has_message && calls.is_empty() {
            return;
        }
        self.end_system();
        let mut fields = vec![("role", TemplateValue::from("assistant")), ("content", text.into())];
        if !reasoning.is_empty() {
            fields.push(("reasoning_content", reasoning.into()));
        }
        if !calls.is_empty() {
            fields.push(("tool_calls", calls.into()));
        }
        self.done.push(TemplateValue::from_pairs(fields));
    }
}

/// A text, or the joined texts of parts.
fn content(value: Option<&Value>, index: usize) -> Result<String, Problem> {
    let parts = match value {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        None | Some(Value::Null) => return Ok(String::new()),
        Some(_) => {
            return Err(bad(format!(
                "input[{index}]: the content is neither a text nor a list of parts"
            )));
        }
    };
    let mut text = String::new();
    for part in parts {
        let kind = part["type"].as_str().unwrap_or("unknown");
        match (kind, part["text"].as_str().or(part["refusal"].as_str())) {
            ("input_text" | "output_text" | "text" | "refusal", Some(part)) => text.push_str(part),
            _ => {
                return Err(bad(format!(
                    "input[{index}] has a part of type {kind:?}; give input_text or output_text"
                )));
            }
        }
    }
    Ok(text)
}
