//! The items of a response, and the events that a streaming caller gets while they grow. Pure.

use crate::api::answer::call_id;
use serde_json::{Value, json};
use text::answer::{Call, Part};
use uuid::Uuid;

/// Name and data, which still lack `type` and `sequence_number`.
pub type Event = (&'static str, Value);

/// The items so far. The last one may still grow.
#[derive(Debug, Default)]
pub struct Output {
    items: Vec<Value>,
    open: Option<Open>,
}

/// An item whose text grows.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
}

impl Kind {
    fn item(self, id: &str, status: &str, content: &[Value]) -> Value {
        match self {
            Kind::Message => {
                json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
            }
            Kind::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
        }
    }

    fn part(self, text: &str) -> Value {
        match self {
            Kind::Message => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        }
    }
}

impl Output {
    /// Returns what happens.
    pub fn add(&mut self, part: Part) -> Vec<Event> {
        match part {
            Part::Text(text) => self.add_text(Kind::Message, &text),
            Part::Reasoning(text) => self.add_text(Kind::Reasoning, &text),
            Part::Call(call) => self.add_call(call),
        }
    }

    fn add_text(&mut self, kind: Kind, text: &str) -> Vec<Event> {
        let mut events = Vec::new();
        let is_open = self.open.as_ref().is_some_and(|open| open.kind == kind);
        if !is_open {
            events.extend(self.close("completed"));
            events.extend(self.open(kind));
        }
        let index = self.items.len();
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
            let place = json!({"item_id": open.id, "output_index": index, "content_index": 0, "delta": text});
            events.push(match kind {
                Kind::Message => ("response.output_text.delta", with(place, "logprobs", json!([]))),
                Kind::Reasoning => ("response.reasoning_text.delta", place),
            });
        }
        events
    }

    fn open(&mut self, kind: Kind) -> [Event; 2] {
        let prefix = match kind {
            Kind::Message => "msg",
            Kind::Reasoning => "rs",
        };
        let (id, index) = (new_id(prefix), self.items.len());
        let item = kind.item(&id, "in_progress", &[]);
        let part = json!({"item_id": id, "output_index": index, "content_index": 0, "part": kind.part("")});
        self.open = Some(Open {
            kind,
            id,
            text: String::new(),
        });
        [
            (
                "response.output_item.added",
                json!({"output_index": index, "item": item}),
            ),
            ("response.content_part.added", part),
        ]
    }

    /// Ends the output. `status`: `completed` or `incomplete`. An empty answer is a message without text, because clients
    /// read the first item.
    pub fn end(&mut self, status: &str) -> Vec<Event> {
        let mut events = Vec::new();
        if self.items.is_empty() && self.open.is_none() {
            events.extend(self.open(Kind::Message));
        }
        events.extend(self.close(status));
        events
    }

    /// Ends the item that grows.
    fn close(&mut self, status: &str) -> Vec<Event> {
        let Some(Open { kind, id, text }) = self.open.take() else {
            return Vec::new();
        };
        let index = self.items.len();
        let place = json!({"item_id": id, "output_index": index, "content_index": 0});
        let part = kind.part(&text);
        let item = kind.item(&id, status, std::slice::from_ref(&part));
        self.items.push(item.clone());
        let done = with(place.clone(), "text", text.into());
        vec![
            match kind {
                Kind::Message => ("response.output_text.done", with(done, "logprobs", json!([]))),
                Kind::Reasoning => ("response.reasoning_text.done", done),
            },
            ("response.content_part.done", with(place, "part", part)),
            (
                "response.output_item.done",
                json!({"output_index": index, "item": item}),
            ),
        ]
    }

    fn add_call(&mut self, Call { name, arguments }: Call) -> Vec<Event> {
        let mut events = self.close("completed");
        let (id, index) = (new_id("fc"), self.items.len());
        let started = json!({"id": id, "type": "function_call", "status": "in_progress", "call_id": call_id(),
                             "name": name, "arguments": ""});
        let item = with(
            with(started.clone(), "arguments", arguments.as_str().into()),
            "status",
            "completed".into(),
        );
        let place = json!({"item_id": id, "output_index": index});
        self.items.push(item.clone());
        events.extend([
            (
                "response.output_item.added",
                json!({"output_index": index, "item": started}),
            ),
            (
                "response.function_call_arguments.delta",
                with(place.clone(), "delta", arguments.as_str().into()),
            ),
            (
                "response.function_call_arguments.done",
                with(with(place, "name", name.into()), "arguments", arguments.into()),
            ),
            (
                "response.output_item.done",
                json!({"output_index": index, "item": item}),
            ),
        ]);
        events
    }

    pub fn into_items(self) -> Vec<Value> {
        self.items
    }
}

fn with(mut object: Value, field: &str, value: Value) -> Value {
    object[field] = value;
    object
}

fn new_id(prefix: &str) -> String {
    format!("{prefix}_{}", Uuid::now_v7().simple())
}
