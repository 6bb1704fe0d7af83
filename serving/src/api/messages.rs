//! `POST /v1/messages`: Anthropic's Messages API. The request becomes a chat of the version's own
//! template; sampling, log and feedback are those of every other answer. Springtide's fields
//! (`generation_id`, `version`, `feedback_token`, …) are beside Anthropic's.

mod body;

use super::Api;
use super::choice::Chunk;
use super::completions::{Frames, QueuedRequest};
use super::deadline::Deadline;
use super::error::for_openai;
use super::outcome::{ChoiceOutcome, FinishedChoice, StopReason};
use super::request::GenerationRequest;
use axum::extract::State;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use body::MessagesRequest;
use edge::Problem;
use edge::auth::Principal;
use edge::json::Json;
use futures::Stream;
use ingest::event::FinishReason;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use uuid::Uuid;

pub async fn messages(
    State(api): State<Arc<Api>>,
    principal: Principal,
    deadline: Deadline,
    Json(body): Json<MessagesRequest>,
) -> Result<Response, Problem> {
    let mut request = GenerationRequest::chat(body.into_chat()?, &api.options, &principal.tenant)?;
    request.deadline = deadline;
    let request = Arc::new(request);
    let queued = QueuedRequest::submit(&api, request.clone(), &principal).await?;
    let mut message = Message::new(&request.model, queued.prompt_tokens);
    if request.stream {
        let stream = MessageStream {
            tail: VecDeque::new(),
            frames: Some(queued.frames().await?),
            message: Some(message),
        };
        let response = axum::response::Sse::new(stream.into_events()).keep_alive(KeepAlive::default());
        return Ok(response.into_response());
    }
    for finished in queued.finished().await? {
        message.finish(&finished);
        if !finished.outcome.declined {
            message.content.push(json!({"type": "text", "text": finished.text}));
        }
    }
    Ok(Json(message).into_response())
}

/// Anthropic's message.
#[derive(Debug, Serialize)]
struct Message {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: String,
    content: Vec<Value>,
    /// Null until the message has ended.
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    usage: Usage,
    #[serde(flatten)]
    springtide: Option<Springtide>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Usage {
    input_tokens: usize,
    output_tokens: usize,
}

/// Springtide's fields, without `stop_reason`, whose name is Anthropic's here.
#[derive(Debug, Clone, Serialize)]
struct Springtide {
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_id: Option<Uuid>,
    version: i64,
    root: String,
    arm: String,
    declined: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    feedback_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    captured: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    untrainable: Option<&'static str>,
}

impl From<&ChoiceOutcome> for Springtide {
    fn from(outcome: &ChoiceOutcome) -> Self {
        let ChoiceOutcome {
            stop_reason: _,
            generation_id,
            version,
            root,
            arm,
            declined,
            feedback_token,
            captured,
            untrainable,
        } = outcome.clone();
        Springtide {
            generation_id,
            version,
            root,
            arm,
            declined,
            feedback_token,
            captured,
            untrainable,
        }
    }
}

impl Message {
    fn new(model: &str, input_tokens: usize) -> Self {
        Message {
            id: format!("msg_{}", Uuid::now_v7().simple()),
            kind: "message",
            role: "assistant",
            model: model.to_owned(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: Usage {
                input_tokens,
                output_tokens: 0,
            },
            springtide: None,
        }
    }

    fn finish(&mut self, finished: &FinishedChoice) {
        let stop = &finished.outcome.stop_reason;
        self.stop_sequence = match stop {
            Some(StopReason::Text(stop)) => Some(stop.clone()),
            Some(StopReason::Token(_)) | None => None,
        };
        self.stop_reason = Some(match (finished.reason, &self.stop_sequence) {
            (FinishReason::Length, _) => "max_tokens",
            (FinishReason::Stop | FinishReason::Abort, Some(_)) => "stop_sequence",
            (FinishReason::Stop | FinishReason::Abort, None) => "end_turn",
        });
        self.usage.output_tokens = finished.tokens.len();
        self.springtide = Some((&finished.outcome).into());
    }
}

/// The events of a streamed message: `message_start`, one text block, `message_delta`,
/// `message_stop`.
struct MessageStream {
    /// Events to send before the next frame is read.
    tail: VecDeque<Sse>,
    /// `None` once the message has ended.
    frames: Option<Frames>,
    /// Taken when it has begun.
    message: Option<Message>,
}

impl MessageStream {
    fn into_events(self) -> impl Stream<Item = Result<Sse, Infallible>> {
        futures::stream::unfold(self, |mut stream| async move {
            let event = stream.next().await?;
            Some((Ok(event), stream))
        })
    }

    async fn next(&mut self) -> Option<Sse> {
        if let Some(message) = self.message.take() {
            self.tail
                .push_back(event("message_start", &json!({"message": message})));
            let block = json!({"index": 0, "content_block": {"type": "text", "text": ""}});
            self.tail.push_back(event("content_block_start", &block));
        }
        while self.tail.is_empty() {
            let frame = self.frames.as_mut()?.next().await;
            match frame {
                Some(Ok(chunk)) => self.add(&chunk),
                Some(Err(problem)) => {
                    self.frames = None;
                    self.tail.push_back(event("error", &for_openai(&problem).document()));
                }
                None => self.frames = None,
            }
        }
        self.tail.pop_front()
    }

    fn add(&mut self, chunk: &Chunk) {
        if !chunk.text.is_empty() {
            let delta = json!({"index": 0, "delta": {"type": "text_delta", "text": chunk.text}});
            self.tail.push_back(event("content_block_delta", &delta));
        }
        if let Some(finished) = &chunk.finished {
            let mut message = Message::new("", 0);
            message.finish(finished);
            self.tail.push_back(event("content_block_stop", &json!({"index": 0})));
            let delta = json!({
                "delta": {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence},
                "usage": {"output_tokens": message.usage.output_tokens},
                "springtide": message.springtide,
            });
            self.tail.push_back(event("message_delta", &delta));
            self.tail.push_back(event("message_stop", &json!({})));
            self.frames = None;
        }
    }
}

/// An event whose data has its name as `type`, as Anthropic's clients expect.
fn event(name: &str, data: &Value) -> Sse {
    let mut data = data.clone();
    data["type"] = name.into();
    Sse::default().event(name).data(data.to_string())
}
