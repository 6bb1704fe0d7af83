//! The forms of a conversation that a template may want.
//!
//! OpenAI's API lets a caller write a content as a text or as parts, and arguments of calls as a
//! text. A template often knows one form, and drops or misprints another without an error. So the
//! forms are tried in turn, until one brings every text into the prompt. What no form brings there
//! is refused by name: the model would answer, and be trained on, a prompt that nobody wrote.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::{Error, python};

/// How the messages are given to the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    content: Content,
    /// Arguments of calls stay the text that the API has; else they are objects.
    arguments_as_text: bool,
    /// A missing content is `none`, for templates that ask for that; else it is undefined.
    missing_as_none: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    AsGiven,
    /// Parts become their texts with line breaks between, as in vLLM.
    Text,
    /// A text becomes one part, for templates that read nothing else.
    Parts,
}

/// The forms to try, the usual one first. Those after the first of a `content` are for templates
/// that fail.
pub fn of(messages: &[Value]) -> impl Iterator<Item = Vec<Form>> {
    let content_is = |kind| messages.iter().any(|message| field(message, "content").kind() == kind);
    let calls = messages
        .iter()
        .any(|message| !field(message, "tool_calls").is_undefined());
    let lacks = content_is(ValueKind::Undefined);
    let mut contents = vec![Content::AsGiven];
    contents.extend(content_is(ValueKind::Seq).then_some(Content::Text));
    contents.extend(content_is(ValueKind::String).then_some(Content::Parts));
    contents.into_iter().map(move |content| {
        let forms = [(false, false), (true, false), (false, true), (true, true)].into_iter();
        let useful = forms.filter(|&(as_text, as_none)| (calls || !as_text) && (lacks || !as_none));
        let form = |(arguments_as_text, missing_as_none)| Form {
            content,
            arguments_as_text,
            missing_as_none,
        };
        useful.map(form).collect()
    })
}

impl Form {
    pub fn of_message(self, message: &Value) -> Value {
        let content = field(message, "content");
        let mut message = match (self.content, content.kind()) {
            (Content::Text, ValueKind::Seq) => match texts(&content) {
                Some(texts) => with(message, "content", texts.join("\n").into()),
                None => message.clone(),
            },
            (Content::Parts, ValueKind::String) => {
                let part = Value::from_pairs([("type", Value::from("text")), ("text", content)]);
                with(message, "content", vec![part].into())
            }
            (_, ValueKind::Undefined) if self.missing_as_none => with(message, "content", ().into()),
            _ => message.clone(),
        };
        let calls = field(&message, "tool_calls");
        if !self.arguments_as_text && calls.kind() == ValueKind::Seq {
            let calls: Value = items(&calls).map(|call| with_object(&call)).collect();
            message = with(&message, "tool_calls", calls);
        }
        message
    }
}

/// A call whose arguments are an object, if they are JSON of one. The order of an object's keys
/// stays, so that the prompt has what the model sampled. No arguments are an empty object.
fn with_object(call: &Value) -> Value {
    let function = field(call, "function");
    let arguments = field(&function, "arguments");
    let object = match arguments.as_str() {
        Some(text) if text.trim().is_empty() => Some(Value::from_pairs::<_, Value, Value>([])),
        Some(text) => serde_json::from_str(text).ok(),
        None => None,
    };
    match object.filter(|object: &Value| object.kind() == ValueKind::Map) {
        Some(object) => with(call, "function", with(&function, "arguments", object)),
        None => call.clone(),
    }
}

/// Messages of `developer` as `system`, if the template does not know the former.
pub fn with_known_role(message: Value, source: &str) -> Value {
    match field(&message, "role").as_str() == Some("developer") && !source.contains("developer") {
        true => with(&message, "role", "system".into()),
        false => message,
    }
}

/// What a template prints of a part that it does not read.
const PRINTED_PART: [&str; 2] = ["'type': 'text'", "\"type\": \"text\""];

/// What of the messages did not come into the prompt.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Missing {
    /// Texts that are not there as they were written.
    texts: usize,
    /// Nothing of this message, by its place, is in the prompt.
    message: Option<usize>,
}

impl Missing {
    pub fn of(messages: &[Value], prompt: &str) -> Self {
        let mut missing = Missing::default();
        // messages usually come in order, so that the whole prompt is searched once
        let mut from = 0;
        for (place, message) in messages.iter().enumerate() {
            let content = field(message, "content");
            let is_list = content.kind() == ValueKind::Seq;
            // a template may leave out an assistant's thoughts, or its text beside calls
            let by_assistant = field(message, "role").as_str() == Some("assistant");
            let parts: Vec<Value> = match is_list {
                true => items(&content).collect(),
                false if by_assistant => continue,
                false => vec![content],
            };
            for part in parts {
                let text = if is_list { field(&part, "text") } else { part.clone() };
                let Some(text) = text.as_str().map(str::trim).filter(|text| !text.is_empty()) else {
                    continue;
                };
                let misprinted = is_list && PRINTED_PART.iter().any(|printed| prompt.contains(printed));
                let at = prompt[from..].find(text).map(|at| from + at);
                if let Some(at) = at {
                    from = at + text.len();
                }
                let whole = at.is_some()
                    || prompt.contains(text)
                    || prompt.contains(python::json(&text.into()).trim_matches('"'));
                missing.texts += usize::from(misprinted || !whole);
                // a template may change a text, but not all of its words
                let gone = misprinted || !(whole || text.split_whitespace().take(64).any(|word| prompt.contains(word)));
                if gone && !by_assistant && missing.message.is_none() {
                    missing.message = Some(place);
                }
            }
        }
        missing
    }

    pub fn is_nothing(self) -> bool {
        self == Missing::default()
    }

    /// Refuses a prompt without one of the messages.
    pub fn refuse(self, messages: &[Value]) -> Result<(), Error> {
        let Some(place) = self.message else {
            return Ok(());
        };
        let role = field(&messages[place], "role");
        let parts = field(&messages[place], "content").kind() == ValueKind::Seq;
        let advice = match parts {
            true => "give its content as a text",
            false => "give the message another role",
        };
        Err(Error::Conversation(format!(
            "the chat template leaves out messages[{place}] of the role {role}, or a part of it; {advice}"
        )))
    }
}

/// The texts of parts. `None`: there are others.
fn texts(parts: &Value) -> Option<Vec<String>> {
    items(parts)
        .map(|part| match part.as_str() {
            Some(text) => Some(text.to_owned()),
            None => field(&part, "text").as_str().map(str::to_owned),
        })
        .collect()
}

fn items(list: &Value) -> impl Iterator<Item = Value> {
    list.try_iter().into_iter().flatten()
}

fn field(map: &Value, name: &str) -> Value {
    map.get_attr(name).unwrap_or_default()
}

/// `map` with another value of a field.
fn with(map: &Value, name: &str, value: Value) -> Value {
    let mut fields: Vec<(Value, Value)> = items(map)
        .map(|key| {
            let value = map.get_item(&key).unwrap_or_default();
            (key, value)
        })
        .collect();
    match fields.iter_mut().find(|(key, _)| key.as_str() == Some(name)) {
        Some((_, old)) => *old = value,
        None => fields.push((name.into(), value)),
    }
    Value::from_pairs(fields)
}
