//! `POST /v1/completions` and `POST /v1/chat/completions`: check, route, queue, then answer as a
//! whole or as server-sent events.

use super::answer::{Choice, Completion, Content, ContentStream, Header, Usage, prompt_logprobs};
use super::body::{ChatRequest, CompletionRequest};
use super::choice::{self, ChoiceTask, Chunk, Frame, FrameSender};
use super::deadline::{self, Deadline};
use super::error::for_openai;
use super::lease::Leased;
use super::outcome::FinishedChoice;
use super::request::GenerationRequest;
use super::{Api, exploration};
use crate::engine::caller::Caller;
use crate::routing::Route;
use axum::extract::State;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use edge::Problem;
use edge::auth::{Principal, Scope};
use edge::intake::Held;
use edge::json::Json;
use futures::Stream;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::answer::Layout;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::Instrument;
use uuid::Uuid;

/// Frames buffered for a streaming caller. A slow caller only delays its own choices.
const FRAMES_BUFFERED_MAX: usize = 64;

pub async fn completions(
    State(api): State<Arc<Api>>,
    principal: Principal,
    deadline: Deadline,
    leased: Leased,
    held: Held,
    Json(body): Json<CompletionRequest>,
) -> Result<Response, Problem> {
    let mut requests = GenerationRequest::completions(body, &api.options, &principal.tenant)?;
    for request in &mut requests {
        request.deadline = deadline;
        leased.label(request)?;
    }
    if requests.len() > 1 && requests.iter().any(|request| request.episode_id.is_some()) {
        return Err(Problem::bad_request(
            "a turn of a session has one prompt; leave out session_id, or send one request per prompt",
        ));
    }
    answer(&api, requests, &principal, &held).await
}

pub async fn chat_completions(
    State(api): State<Arc<Api>>,
    principal: Principal,
    deadline: Deadline,
    leased: Leased,
    held: Held,
    Json(body): Json<ChatRequest>,
) -> Result<Response, Problem> {
    let mut request = GenerationRequest::chat(body, &api.options, &principal.tenant)?;
    request.deadline = deadline;
    leased.label(&mut request)?;
    answer(&api, vec![request], &principal, &held).await
}

/// Answers all prompts of a request. Only a single one is streamed.
async fn answer(
    api: &Arc<Api>,
    requests: Vec<GenerationRequest>,
    principal: &Principal,
    held: &Held,
) -> Result<Response, Problem> {
    let mut queued = Vec::with_capacity(requests.len());
    // a prompt that fails ends the others, whose users have not left them
    let given_up = CancellationToken::new();
    for request in requests {
        queued.push(QueuedRequest::submit(api, Arc::new(request), principal, held, &given_up).await?);
    }
    match queued.pop() {
        Some(only) if only.request.stream => only.stream().await,
        last => respond_at_once(queued.into_iter().chain(last).collect()).await,
    }
}

async fn respond_at_once(queued: Vec<QueuedRequest>) -> Result<Response, Problem> {
    let of_prompt = |queued: &QueuedRequest| (queued.request.clone(), queued.layout.clone());
    let prompts: Vec<_> = queued.iter().map(of_prompt).collect();
    let prompt_tokens = queued.iter().map(|queued| queued.prompt_tokens).sum();
    let Some((first, _)) = prompts.first() else {
        return Err(Problem::bad_request("prompt is an empty list; send at least one"));
    };
    let header = Header::new(first);
    let finished = futures::future::try_join_all(queued.into_iter().map(QueuedRequest::finished)).await?;
    let of_prompt = |(finished, (request, _)): (&Vec<FinishedChoice>, &(Arc<GenerationRequest>, _))| {
        let sampled: usize = finished.iter().map(|finished| finished.tokens.len()).sum();
        if request.hides_answer { 0 } else { sampled }
    };
    let sampled = finished.iter().zip(&prompts).map(of_prompt).sum();
    let mut choices = Vec::new();
    let mut of_chat = None;
    for ((request, layout), mut finished) in prompts.iter().zip(finished) {
        if let Some(best) = request.best {
            finished.sort_by(|one, other| other.mean_logprob().total_cmp(&one.mean_logprob()));
            finished.truncate(best);
        }
        for finished in &finished {
            let (text, tokens) = match request.hides_answer {
                true => ("", &[][..]),
                false => (finished.shown_text(), finished.shown_tokens()),
            };
            let content = Content::whole(layout.parse(text));
            choices.push(Choice::new(request, choices.len(), content, tokens, Some(finished)));
        }
        let first = finished.first().filter(|_| request.is_chat());
        of_chat = first.and_then(|first| prompt_logprobs(request, first));
    }
    let completion = Completion {
        header: &header,
        choices,
        prompt_logprobs: of_chat,
        usage: Some(Usage::new(prompt_tokens, sampled)),
    };
    Ok(Json(completion).into_response())
}

/// Everybody may go later than others, but only some may go first.
fn check_priority(priority: i32, principal: &Principal) -> Result<(), Problem> {
    if priority >= 0 || principal.scopes.allow(Scope::Priority) {
        return Ok(());
    }
    Err(Problem::forbidden(format!(
        "priority is {priority}: below 0 a request goes before those of other callers, which needs a key with the scope \
         `priority` too; give 0 or more, or leave it out"
    )))
}

/// The route of a request, once an engine takes requests for its version.
pub(super) async fn available_route(
    api: &Api,
    request: &GenerationRequest,
    submitted: Instant,
) -> Result<Route, Problem> {
    let wait_max = Duration::from_millis(api.options.queue_wait_ms_max);
    loop {
        let route = api
            .routes
            .route(&api.policy, &request.model, &request.user_key)
            .map_err(|error| super::no_route(&error))?;
        let Some(changed) = api.engine.unavailable(&route.version) else {
            return Ok(route);
        };
        // an engine changes its version once no request holds it
        drop(route);
        if submitted.elapsed() > wait_max {
            return Err(Problem::unavailable(
                "no engine serves this model now; try again shortly",
                2,
            ));
        }
        tokio::select! {
            () = changed => {}
            () = request.deadline.passed() => return Err(deadline::exceeded()),
        }
    }
}

/// A request whose choices are queued.
pub struct QueuedRequest {
    request: Arc<GenerationRequest>,
    pub layout: Arc<Layout>,
    choices: Vec<ChoiceTask>,
    /// What they are sampled at: that of the request, within the bound of its arm.
    pub temperature: f32,
    pub prompt_tokens: usize,
    submitted: Instant,
    headers_wait_max: Duration,
    canceled: CancellationToken,
    /// Dropped with the caller's future or stream; cancels all choices.
    caller: DropGuard,
}

/// What a streaming caller is sent. Dropping it cancels the choices.
pub struct Frames {
    first: Option<Frame>,
    rest: mpsc::Receiver<Frame>,
    _caller: DropGuard,
}

impl Frames {
    /// `None`: every choice has ended.
    pub async fn next(&mut self) -> Option<Frame> {
        match self.first.take() {
            Some(frame) => Some(frame),
            None => self.rest.recv().await,
        }
    }
}

impl Header {
    fn new(request: &GenerationRequest) -> Self {
        let (object, prefix) = match (request.is_chat(), request.stream) {
            (false, _) => ("text_completion", "cmpl"),
            (true, false) => ("chat.completion", "chatcmpl"),
            (true, true) => ("chat.completion.chunk", "chatcmpl"),
        };
        Header {
            object,
            id: format!("{prefix}-{}", Uuid::now_v7().simple()),
            created: time::OffsetDateTime::now_utc().unix_timestamp(),
            model: request.model.clone(),
        }
    }
}

impl QueuedRequest {
    pub async fn submit(
        api: &Arc<Api>,
        request: Arc<GenerationRequest>,
        principal: &Principal,
        held: &Held,
        given_up: &CancellationToken,
    ) -> Result<Self, Problem> {
        check_priority(request.priority, principal)?;
        let submitted = Instant::now();
        let tenant = &principal.tenant;
        let caller = Caller::new(tenant, principal.key.map(|key| key.id)).working_on(request.work());
        let route = available_route(api, &request, submitted).await?;
        let deadline = request.deadline;
        let (prompt_ids, constraint) = match request.prompt_is_short() && request.constraint.is_none() {
            true => (request.prompt_ids(&route.version)?, None),
            false => {
                let (class, request, version) = (request.class(), request.clone(), route.version.clone());
                let work = move || Ok((request.prompt_ids(&version)?, request.constrain(&version)?));
                tokio::select! {
                    prepared = api.prompts.run(class, &caller, work) => prepared?,
                    () = deadline.passed() => return Err(deadline::exceeded()),
                }
            }
        };
        let max_tokens = request.tokens_to_sample(prompt_ids.len(), &route.version, api.options.max_tokens_default)?;
        // the bytes of a request say nothing of what it asks to list
        let listed = request.listed_bytes(prompt_ids.len(), max_tokens);
        held.charge(listed, "ask for fewer log-probabilities, tokens or choices")?;
        let layout = Arc::new(request.layout(&route.version, api.options.tool_format, &prompt_ids));
        let params = request.params_on(&route);
        let request_seed = request.first_seed(&params);
        let parent = request
            .episode_id
            .and_then(|episode| api.sessions.parent(tenant, episode));
        let (samples, choices): (Vec<_>, Vec<_>) = (0..request.n)
            .map(|index| {
                let seed = choice::seed(request_seed, index);
                let exploration = exploration::explore(&request, &params, &route, seed);
                let mut choice = ChoiceTask {
                    api: api.clone(),
                    tenant: tenant.clone(),
                    request: request.clone(),
                    layout: layout.clone(),
                    route: route.clone(),
                    params: params.clone(),
                    prompt_ids: prompt_ids.clone(),
                    parent: parent.clone(),
                    seed,
                    exploration,
                    caller: caller.clone(),
                    max_tokens,
                    constraint: constraint.clone(),
                    // until it is submitted
                    events: mpsc::channel(1).1,
                    submitted,
                    given_up: given_up.clone(),
                    unseen: false,
                };
                (choice.sample(), choice)
            })
            .unzip();
        api.engine.submit(samples).map_err(super::not_submitted)?;
        let canceled = CancellationToken::new();
        Ok(QueuedRequest {
            temperature: params.temperature,
            prompt_tokens: prompt_ids.len(),
            request,
            layout,
            choices,
            submitted,
            headers_wait_max: api.options.headers_wait_max,
            caller: canceled.clone().drop_guard(),
            canceled,
        })
    }

    /// All choices, once they are in the log.
    pub async fn finished(self) -> Result<Vec<FinishedChoice>, Problem> {
        let mut tasks = Vec::with_capacity(self.choices.len());
        for choice in self.choices {
            let (tracker, canceled) = (choice.api.choices.clone(), self.canceled.clone());
            let given_up = choice.given_up.clone();
            let task = async move {
                let result = choice.run(&canceled, None).await;
                result.inspect_err(|_| given_up.cancel())
            };
            tasks.push(tracker.spawn(task.in_current_span()));
        }
        let mut choices = Vec::with_capacity(tasks.len());
        for task in tasks {
            let finished = task
                .await
                .map_err(Problem::internal)??
                .ok_or_else(|| Problem::internal("a choice was canceled while its caller waited"))?;
            choices.push(finished);
        }
        drop(self.caller);
        Ok(choices)
    }

    /// The frames of all choices. Waits for the first one, whose problem is the request's, unless that
    /// takes long: then the caller gets its headers and comments, so that no proxy takes it for idle.
    pub async fn frames(self) -> Result<Frames, Problem> {
        let headers_at = self.submitted + self.headers_wait_max;
        let (sender, mut rest) = mpsc::channel(FRAMES_BUFFERED_MAX);
        for (index, choice) in self.choices.into_iter().enumerate() {
            let (tracker, canceled) = (choice.api.choices.clone(), self.canceled.clone());
            let mut sender = FrameSender::new(index, &self.request, sender.clone());
            let given_up = choice.given_up.clone();
            let task = async move {
                let result = choice.run(&canceled, Some(&mut sender)).await;
                let result = result.inspect_err(|_| given_up.cancel());
                sender.finish(result).await;
            };
            tracker.spawn(task.in_current_span());
        }
        drop(sender);
        let first = match tokio::time::timeout_at(headers_at.into(), rest.recv()).await {
            Ok(Some(Err(problem))) => return Err(problem),
            Ok(first) => first,
            Err(_) => None,
        };
        Ok(Frames {
            first,
            rest,
            _caller: self.caller,
        })
    }

    async fn stream(self) -> Result<Response, Problem> {
        let (request, prompt_tokens) = (self.request.clone(), self.prompt_tokens);
        let content = || ContentStream::new(&self.layout);
        let stream = CompletionStream {
            header: Header::new(&request),
            content: std::iter::repeat_with(content).take(request.n).collect(),
            frames: Some(self.frames().await?),
            request,
            tail: VecDeque::new(),
            prompt_tokens,
            sampled: 0,
        };
        let response = axum::response::Sse::new(stream.into_events()).keep_alive(KeepAlive::default());
        Ok(response.into_response())
    }
}

struct CompletionStream {
    request: Arc<GenerationRequest>,
    header: Header,
    /// `None` once the choices have ended.
    frames: Option<Frames>,
    /// What follows the last choice.
    tail: VecDeque<Sse>,
    prompt_tokens: usize,
    sampled: usize,
    /// What was sent of each choice.
    content: Vec<ContentStream>,
}

impl CompletionStream {
    fn into_events(self) -> impl Stream<Item = Result<Sse, Infallible>> {
        futures::stream::unfold(self, |mut stream| async move {
            let event = stream.next().await?;
            Some((Ok(event), stream))
        })
    }

    async fn next(&mut self) -> Option<Sse> {
        if let Some(frames) = &mut self.frames {
            match frames.next().await {
                Some(Ok(chunk)) => return Some(self.chunk_event(chunk)),
                Some(Err(problem)) => {
                    self.frames = None;
                    return Some(error(&problem));
                }
                None => self.frames = None,
            }
            if self.request.include_usage {
                let usage = Usage::new(self.prompt_tokens, self.sampled);
                self.tail.push_back(self.event(Vec::new(), Some(usage)));
            }
            self.tail.push_back(Sse::default().data("[DONE]"));
        }
        self.tail.pop_front()
    }

    fn chunk_event(&mut self, chunk: Chunk) -> Sse {
        let Chunk {
            index,
            text,
            tokens,
            finished,
        } = chunk;
        let content = self.content[index].next(&text, finished.is_some());
        self.sampled += finished.as_ref().map_or(0, |finished| finished.tokens.len());
        let choice = Choice::new(&self.request, index, content, &tokens, finished.as_deref());
        self.event(vec![choice], None)
    }

    fn event(&self, choices: Vec<Choice>, usage: Option<Usage>) -> Sse {
        let completion = Completion {
            header: &self.header,
            choices,
            prompt_logprobs: None,
            usage,
        };
        match serde_json::to_string(&completion) {
            Ok(json) => Sse::default().data(one_line(&json)),
            Err(failed) => error(&Problem::internal(failed)),
        }
    }
}

/// JSON for an event. Some clients end a line at these characters, too, which JSON need not escape.
pub(super) fn one_line(json: &str) -> String {
    json.replace('\u{85}', "\\u0085")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// An error inside a stream.
fn error(problem: &Problem) -> Sse {
    let document = for_openai(problem).document();
    Sse::default().event("error").data(one_line(&document.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_for_every_client() {
        let text = "a\u{2028}b\u{2029}c\u{85}d\ne";
        let json = one_line(&serde_json::to_string(text).unwrap());
        assert!(!json.contains(['\u{2028}', '\u{2029}', '\u{85}', '\n']));
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }
}
