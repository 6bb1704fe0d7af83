//! `POST /v1/messages`: Anthropic's Messages API. The request becomes a chat of the version's own
//! template; sampling, log and feedback are those of every other answer. Springtide's fields
//! (`generation_id`, `version`, `feedback_token`, …) are beside Anthropic's.

mod body;
mod stream;

use super::answer::call_id;
use super::completions::QueuedRequest;
use super::deadline::Deadline;
use super::lease::Leased;
use super::outcome::{ChoiceOutcome, FinishedChoice, StopReason};
use super::request::GenerationRequest;
use super::{Api, no_route, session_of};
use crate::engine::caller::Caller;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use body::MessagesRequest;
use edge::Problem;
use edge::auth::Principal;
use edge::intake::Held;
use edge::json::Json;
use event_log::event::FinishReason;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use stream::MessageStream;
use text::answer::Part;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub async fn messages(
    State(api): State<Arc<Api>>,
    principal: Principal,
    deadline: Deadline,
    leased: Leased,
    held: Held,
    headers: HeaderMap,
    Json(body): Json<MessagesRequest>,
) -> Result<Response, Problem> {
    body.check_max_tokens()?;
    let chat = body.into_chat(session_of(&headers))?;
    let mut request = GenerationRequest::chat(chat, &api.options, &principal.tenant)?;
    request.deadline = deadline;
    leased.label(&mut request)?;
    let request = Arc::new(request);
    let queued = QueuedRequest::submit(&api, request.clone(), &principal, &held, &CancellationToken::new()).await?;
    let mut message = Message::new(&request.model, queued.prompt_tokens);
    if request.stream {
        return Ok(MessageStream::new(message, queued).await?.into_response());
    }
    let layout = queued.layout.clone();
    for finished in queued.finished().await? {
        let parts = layout.parse(finished.shown_text());
        message.finish(&finished, parts.iter().any(|part| matches!(part, Part::Call(_))));
        message.content = parts.into_iter().map(block).collect();
    }
    Ok(Json(message).into_response())
}

/// `POST /v1/messages/count_tokens`: the prompt's length for the version that would answer now.
pub async fn count_tokens(
    State(api): State<Arc<Api>>,
    principal: Principal,
    leased: Leased,
    headers: HeaderMap,
    Json(body): Json<MessagesRequest>,
) -> Result<Json<Value>, Problem> {
    let chat = body.into_chat(session_of(&headers))?;
    let mut request = GenerationRequest::chat(chat, &api.options, &principal.tenant)?;
    leased.label(&mut request)?;
    let request = Arc::new(request);
    let route = api
        .routes
        .route(&api.policy, &request.model, &request.user_key)
        .map_err(|error| no_route(&error))?;
    let caller = Caller::new(&principal.tenant, principal.key.map(|key| key.id));
    let class = request.class();
    let count = move || Ok(request.prompt_ids(&route.version)?.len());
    let tokens = api.prompts.run(class, &caller, count).await?;
    Ok(Json(json!({"input_tokens": tokens})))
}

/// A content block.
fn block(part: Part) -> Value {
    match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        // nobody signs it: it is a text like others
        Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Part::Call(call) => {
            // what no value can hold is no call
            let input: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
            json!({"type": "tool_use", "id": call_id(), "name": call.name, "input": input})
        }
    }
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

    fn finish(&mut self, finished: &FinishedChoice, calls_tools: bool) {
        let stop = &finished.outcome.stop_reason;
        self.stop_sequence = match stop {
            Some(StopReason::Text(stop)) => Some(stop.clone()),
            Some(StopReason::Token(_)) | None => None,
        };
        self.stop_reason = Some(match (finished.reason, &self.stop_sequence) {
            (FinishReason::Length, _) => "max_tokens",
            (FinishReason::Stop, _) if calls_tools => "tool_use",
            (FinishReason::Stop | FinishReason::Abort, Some(_)) => "stop_sequence",
            (FinishReason::Stop | FinishReason::Abort, None) => "end_turn",
        });
        self.usage.output_tokens = finished.tokens.len();
        self.springtide = Some((&finished.outcome).into());
    }
}
