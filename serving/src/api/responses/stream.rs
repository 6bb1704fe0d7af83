//! The events of a streamed response: `response.created`, `response.in_progress`, those of each item,
//! then `response.completed`, `response.incomplete` or `response.failed`.

use super::Document;
use super::output::{self, Output};
use crate::api::choice::Chunk;
use crate::api::completions::{Frames, QueuedRequest, one_line};
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response, sse};
use edge::Problem;
use futures::Stream;
use serde_json::json;
use std::collections::VecDeque;
use std::convert::Infallible;
use text::answer::Parser;

pub struct ResponseStream {
    /// Events to send before the next frame is read.
    events: VecDeque<Sse>,
    /// Of the next event.
    sequence_number: u64,
    /// `None` once the response has ended.
    frames: Option<Frames>,
    document: Document,
    parser: Parser,
    output: Output,
}

impl ResponseStream {
    pub async fn new(document: Document, queued: QueuedRequest) -> Result<Self, Problem> {
        let parser = Parser::new((*queued.layout).clone());
        let mut stream = ResponseStream {
            events: VecDeque::new(),
            sequence_number: 0,
            frames: Some(queued.frames().await?),
            document,
            parser,
            output: Output::default(),
        };
        stream.send_document("response.created");
        stream.send_document("response.in_progress");
        Ok(stream)
    }

    pub fn into_response(self) -> Response {
        sse::Sse::new(self.into_events())
            .keep_alive(KeepAlive::default())
            .into_response()
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
                    self.document.fail(&problem);
                    self.send_document("response.failed");
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
            let events = self.output.add(part);
            self.send_all(events);
        }
        if let Some(finished) = &chunk.finished {
            let output = std::mem::take(&mut self.output);
            let events = self.document.finish(finished, output);
            self.send_all(events);
            self.send_document(match self.document.status {
                "incomplete" => "response.incomplete",
                _ => "response.completed",
            });
            self.frames = None;
        }
    }

    fn send_document(&mut self, name: &'static str) {
        let data = json!({"response": &self.document});
        self.send_all(vec![(name, data)]);
    }

    fn send_all(&mut self, events: Vec<output::Event>) {
        for (name, mut data) in events {
            data["type"] = name.into();
            data["sequence_number"] = self.sequence_number.into();
            self.sequence_number += 1;
            self.events
                .push_back(Sse::default().event(name).data(one_line(&data.to_string())));
        }
    }
}
