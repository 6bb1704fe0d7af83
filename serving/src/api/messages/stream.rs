//! The events of a streamed message: `message_start`, `ping`, for each block `content_block_start`,
//! its deltas and `content_block_stop`, then `message_delta` and `message_stop`.

use super::{Message, block};
use crate::api::choice::Chunk;
use crate::api::completions::{Frames, QueuedRequest, one_line};
use crate::api::error::for_anthropic;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response, sse};
use edge::Problem;
use futures::Stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use text::answer::{Parser, Part};

pub struct MessageStream {
    /// Events to send before the next frame is read.
    events: VecDeque<Sse>,
    /// `None` once the message has ended.
    frames: Option<Frames>,
    message: Message,
    parser: Parser,
    blocks: Blocks,
}

/// The blocks so far.
#[derive(Debug, Default)]
struct Blocks {
    started: usize,
    open: Option<Open>,
    calls_tools: bool,
}

/// The kind of the block that further pieces belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
}

impl MessageStream {
    pub async fn new(message: Message, queued: QueuedRequest) -> Result<Self, Problem> {
        let parser = Parser::new((*queued.layout).clone());
        let frames = queued.frames().await?;
        let start = event("message_start", json!({"message": &message}));
        Ok(MessageStream {
            events: [start, event("ping", json!({}))].into(),
            frames: Some(frames),
            message,
            parser,
            blocks: Blocks::default(),
        })
    }

    pub fn into_response(self) -> Response {
        let ping = KeepAlive::default().event(event("ping", json!({})));
        sse::Sse::new(self.into_events()).keep_alive(ping).into_response()
    }

    fn into_events(self) -> impl Stream<Item = Result<Sse, Infallible>> {
        futures::stream::unfold(self, |mut stream| async move {
            let event = stream.next().await?;
            Some((Ok(event), stream))
        })
    }

    async fn next(&mut self) -> Option<Sse> {
        while self.events.is_empty() {
            let frame = self.frames.as_mut()?.next().await;
            match frame {
                Some(Ok(chunk)) => self.add(&chunk),
                Some(Err(problem)) => {
                    self.frames = None;
                    self.events.push_back(event("error", for_anthropic(&problem)));
                }
                None => self.frames = None,
            }
        }
        self.events.pop_front()
    }

    fn add(&mut self, chunk: &Chunk) {
        let mut parts = self.parser.push(&chunk.text);
        if chunk.finished.is_some() {
            parts.extend(self.parser.finish());
        }
        for part in parts {
            self.blocks.add(part, &mut self.events);
        }
        if let Some(finished) = &chunk.finished {
            self.blocks.close(&mut self.events);
            let message = &mut self.message;
            message.finish(finished, self.blocks.calls_tools);
            let delta = json!({
                "delta": {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence},
                "usage": message.usage,
                "springtide": message.springtide,
            });
            self.events.push_back(event("message_delta", delta));
            self.events.push_back(event("message_stop", json!({})));
            self.frames = None;
        }
    }
}

impl Blocks {
    fn add(&mut self, part: Part, events: &mut VecDeque<Sse>) {
        match part {
            Part::Text(text) => {
                self.open(Open::Text, Part::Text(String::new()), events);
                self.delta(&json!({"type": "text_delta", "text": text}), events);
            }
            Part::Reasoning(text) => {
                self.open(Open::Thinking, Part::Reasoning(String::new()), events);
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), events);
            }
            Part::Call(mut call) => {
                self.close(events);
                self.calls_tools = true;
                let input = std::mem::replace(&mut call.arguments, "{}".into());
                self.start(Part::Call(call), events);
                self.delta(&json!({"type": "input_json_delta", "partial_json": input}), events);
                self.stop(events);
            }
        }
    }

    fn open(&mut self, kind: Open, empty: Part, events: &mut VecDeque<Sse>) {
        if self.open != Some(kind) {
            self.close(events);
            self.start(empty, events);
            self.open = Some(kind);
        }
    }

    fn start(&mut self, empty: Part, events: &mut VecDeque<Sse>) {
        let start = json!({"index": self.started, "content_block": block(empty)});
        events.push_back(event("content_block_start", start));
        self.started += 1;
    }

    fn delta(&self, delta: &Value, events: &mut VecDeque<Sse>) {
        let delta = json!({"index": self.started.saturating_sub(1), "delta": delta});
        events.push_back(event("content_block_delta", delta));
    }

    fn close(&mut self, events: &mut VecDeque<Sse>) {
        let Some(open) = self.open.take() else { return };
        if open == Open::Thinking {
            self.delta(&json!({"type": "signature_delta", "signature": ""}), events);
        }
        self.stop(events);
    }

    fn stop(&self, events: &mut VecDeque<Sse>) {
        let stop = json!({"index": self.started.saturating_sub(1)});
        events.push_back(event("content_block_stop", stop));
    }
}

/// An event whose data has its name as `type`, as Anthropic's clients expect.
fn event(name: &str, mut data: Value) -> Sse {
    data["type"] = name.into();
    Sse::default().event(name).data(one_line(&data.to_string()))
}
