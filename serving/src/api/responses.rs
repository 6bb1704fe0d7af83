//! `POST /v1/responses`: OpenAI's Responses API, without its state: nothing is stored, so each
//! request brings the whole conversation. It becomes a chat of the version's own template; sampling,
//! log and feedback are those of every other answer.

mod body;
mod output;
mod stream;

use super::completions::QueuedRequest;
use super::deadline::Deadline;
use super::lease::Leased;
use super::outcome::{ChoiceOutcome, FinishedChoice};
use super::request::GenerationRequest;
use super::{Api, session_of};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use body::{Echo, ResponsesRequest};
use edge::Problem;
use edge::auth::Principal;
use edge::intake::Held;
use edge::json::Json;
use event_log::event::FinishReason;
use output::Output;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use stream::ResponseStream;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub async fn responses(
    State(api): State<Arc<Api>>,
    principal: Principal,
    deadline: Deadline,
    leased: Leased,
    held: Held,
    headers: HeaderMap,
    Json(body): Json<ResponsesRequest>,
) -> Result<Response, Problem> {
    let (chat, mut echo) = body.into_chat(session_of(&headers))?;
    let mut request = GenerationRequest::chat(chat, &api.options, &principal.tenant)?;
    request.deadline = deadline;
    leased.label(&mut request)?;
    let request = Arc::new(request);
    let queued = QueuedRequest::submit(&api, request.clone(), &principal, &held, &CancellationToken::new()).await?;
    echo.temperature = queued.temperature;
    let mut document = Document::new(&request.model, queued.prompt_tokens, echo);
    if request.stream {
        return Ok(ResponseStream::new(document, queued).await?.into_response());
    }
    let layout = queued.layout.clone();
    for finished in queued.finished().await? {
        let mut output = Output::default();
        for part in layout.parse(finished.shown_text()) {
            output.add(part);
        }
        document.finish(&finished, output);
    }
    Ok(Json(document).into_response())
}

/// OpenAI's response object.
#[derive(Debug, Serialize)]
struct Document {
    id: String,
    object: &'static str,
    /// Unix seconds.
    created_at: i64,
    model: String,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    status: &'static str,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    output: Vec<Value>,
    previous_response_id: Option<String>,
    /// Whatever the request says.
    store: bool,
    truncation: &'static str,
    usage: Option<Usage>,
    #[serde(flatten)]
    echo: Echo,
    #[serde(flatten)]
    springtide: Option<ChoiceOutcome>,
    #[serde(skip)]
    input_tokens: usize,
}

#[derive(Debug, Serialize)]
struct Usage {
    input_tokens: usize,
    input_tokens_details: Value,
    output_tokens: usize,
    /// Reasoning is counted with the rest.
    output_tokens_details: Value,
    total_tokens: usize,
}

impl Document {
    fn new(model: &str, input_tokens: usize, echo: Echo) -> Self {
        Document {
            id: format!("resp_{}", Uuid::now_v7().simple()),
            object: "response",
            created_at: time::OffsetDateTime::now_utc().unix_timestamp(),
            model: model.to_owned(),
            status: "in_progress",
            error: None,
            incomplete_details: None,
            output: Vec::new(),
            previous_response_id: None,
            store: false,
            truncation: "disabled",
            usage: None,
            echo,
            springtide: None,
            input_tokens,
        }
    }

    /// Returns the events that end the output.
    fn finish(&mut self, finished: &FinishedChoice, mut output: Output) -> Vec<output::Event> {
        let is_cut = finished.reason == FinishReason::Length;
        self.status = match is_cut {
            true => "incomplete",
            false => "completed",
        };
        self.incomplete_details = is_cut.then(|| json!({"reason": "max_output_tokens"}));
        let events = output.end(self.status);
        self.output = output.into_items();
        let output_tokens = finished.tokens.len();
        self.usage = Some(Usage {
            input_tokens: self.input_tokens,
            input_tokens_details: json!({"cached_tokens": 0}),
            output_tokens,
            output_tokens_details: json!({"reasoning_tokens": 0}),
            total_tokens: self.input_tokens + output_tokens,
        });
        self.springtide = Some(finished.outcome.clone());
        events
    }

    fn fail(&mut self, problem: &Problem) {
        let code = match problem.status.as_u16() {
            429 => "rate_limit_exceeded",
            _ => "server_error",
        };
        self.status = "failed";
        self.error = Some(json!({"code": code, "message": problem.to_string()}));
    }
}
