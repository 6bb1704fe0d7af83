//! `POST /v1/completions` and `POST /v1/chat/completions`: checked, routed, queued, and answered in one piece or as server-sent events.

use super::ask::Ask;
use super::chat::ChatRequest;
use super::choice::{Choice, Finished, Frame, Outlet};
use super::wire::{self, Completion, CompletionRequest, Part, Usage};
use super::{Api, explore, no_route, record};
use crate::engine::{Refused, Request};
use crate::routing::Route;
use axum::extract::State;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use edge::Problem;
use edge::auth::{Principal, Role};
use edge::json::Json;
use futures::Stream;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::Instrument;
use uuid::Uuid;

/// Frames on their way to a streaming caller; a slow one holds up its own choices and nobody else's.
const FRAMES_WAITING_MAX: usize = 64;

pub async fn completions(
    State(api): State<Arc<Api>>,
    principal: Principal,
    Json(request): Json<CompletionRequest>,
) -> Result<Response, Problem> {
    principal.require(&[Role::Serving, Role::Research])?;
    let ask = Ask::new(request, &api.options, &principal.tenant)?;
    answer(&api, ask, &principal.tenant).await
}

/// `POST /v1/chat/completions`.
pub async fn chat_completions(
    State(api): State<Arc<Api>>,
    principal: Principal,
    Json(request): Json<ChatRequest>,
) -> Result<Response, Problem> {
    principal.require(&[Role::Serving, Role::Research])?;
    let ask = Ask::chat(request, &api.options, &principal.tenant)?;
    answer(&api, ask, &principal.tenant).await
}

async fn answer(api: &Arc<Api>, ask: Ask, tenant: &str) -> Result<Response, Problem> {
    let ask = Arc::new(ask);
    let route = api
        .routing
        .route(&api.policy, &ask.model, &ask.user_key)
        .map_err(|error| no_route(&error))?;
    let request = Begun::begin(api, ask, &route, tenant)?;
    if request.ask.stream {
        stream(request).await
    } else {
        whole(request).await
    }
}

/// A request whose choices are queued.
struct Begun {
    ask: Arc<Ask>,
    head: Head,
    choices: Vec<Choice>,
    prompt_tokens: usize,
    cancelled: CancellationToken,
    /// Cancels the choices when the caller goes away.
    caller: DropGuard,
}

/// What every chunk begins with.
#[derive(Clone)]
struct Head {
    object: &'static str,
    id: String,
    created: i64,
    model: String,
}

impl Head {
    fn completion(&self, choices: Vec<wire::Choice>, usage: Option<Usage>) -> Completion {
        Completion {
            id: self.id.clone(),
            object: self.object,
            created: self.created,
            model: self.model.clone(),
            choices,
            usage,
        }
    }
}

impl Begun {
    fn begin(api: &Arc<Api>, ask: Arc<Ask>, route: &Route, tenant: &str) -> Result<Self, Problem> {
        let prompt_ids = ask.prompt_ids(&route.version)?;
        let max_tokens = ask.room(prompt_ids.len(), &route.version, api.options.max_tokens_default)?;
        let seed = ask.seed.unwrap_or_else(|| rand::random::<u64>() >> 1);
        let submitted = Instant::now();
        let parent = ask.episode_id.and_then(|episode| api.sessions.parent(tenant, episode));
        let mut requests = Vec::with_capacity(ask.n);
        let mut choices = Vec::with_capacity(ask.n);
        for index in 0..ask.n {
            // every event of a sequence fits, so the engine never waits for a caller
            let (events, heard) = mpsc::channel(max_tokens + 1);
            let seed = record::seed_of(seed, index);
            let toss = explore::toss(&ask, route, seed);
            requests.push(Request {
                version: route.version.clone(),
                prompt: prompt_ids.clone(),
                max_tokens,
                params: ask.params.clone(),
                seed,
                stop_ids: Vec::new(),
                suppressed: toss.and_then(|toss| toss.suppressed),
                top_logprobs: ask.logprobs.unwrap_or(0),
                class: ask.class(),
                priority: ask.priority,
                events,
                submitted,
            });
            choices.push(Choice {
                api: api.clone(),
                tenant: tenant.to_owned(),
                ask: ask.clone(),
                route: route.clone(),
                prompt_ids: prompt_ids.clone(),
                parent: parent.clone(),
                seed,
                toss,
                events: heard,
                submitted,
            });
        }
        api.engine.submit(requests).map_err(|refused| match refused {
            Refused::Full { waiting } => {
                metrics::counter!("springtide_requests_refused_total").increment(1);
                Problem::too_many(format!("{waiting} choices wait for a slot already; ask again later"), 1)
            }
            Refused::Stopped => Problem::unavailable("the engine has stopped; ask again shortly", 2),
        })?;
        let cancelled = CancellationToken::new();
        Ok(Begun {
            head: Head {
                object: match (ask.is_chat(), ask.stream) {
                    (false, _) => "text_completion",
                    (true, false) => "chat.completion",
                    (true, true) => "chat.completion.chunk",
                },
                id: match ask.is_chat() {
                    false => format!("cmpl-{}", Uuid::now_v7().simple()),
                    true => format!("chatcmpl-{}", Uuid::now_v7().simple()),
                },
                created: time::OffsetDateTime::now_utc().unix_timestamp(),
                model: ask.model.clone(),
            },
            prompt_tokens: prompt_ids.len(),
            ask,
            choices,
            caller: cancelled.clone().drop_guard(),
            cancelled,
        })
    }
}

/// One answer, once every choice is in the log.
async fn whole(request: Begun) -> Result<Response, Problem> {
    let Begun {
        ask,
        head,
        choices,
        prompt_tokens,
        cancelled,
        caller,
    } = request;
    let mut tasks = Vec::with_capacity(choices.len());
    for choice in choices {
        let (tracker, cancelled) = (choice.api.choices.clone(), cancelled.clone());
        let task = async move { choice.run(&cancelled, None).await };
        tasks.push(tracker.spawn(task.in_current_span()));
    }
    let mut answers = Vec::with_capacity(tasks.len());
    let mut sampled = 0;
    for (index, task) in tasks.into_iter().enumerate() {
        let finished = task
            .await
            .map_err(Problem::internal)??
            .ok_or_else(|| Problem::internal("a choice was cancelled while its caller waited"))?;
        sampled += finished.tokens.len();
        // a client that only reads `text` shows nothing when the policy chose to show nothing
        let text = if finished.declined {
            String::new()
        } else {
            finished.text.clone()
        };
        let tokens = &finished.tokens;
        answers.push(wire::Choice::finished(
            &ask,
            index,
            Part::Whole,
            &finished,
            text,
            tokens,
        ));
    }
    drop(caller);
    let usage = Usage::new(prompt_tokens, sampled);
    Ok(Json(head.completion(answers, Some(usage))).into_response())
}

/// Server-sent events. What fails before the first token is still an HTTP error.
async fn stream(request: Begun) -> Result<Response, Problem> {
    let Begun {
        ask,
        head,
        choices,
        prompt_tokens,
        cancelled,
        caller,
    } = request;
    let (frames, mut heard) = mpsc::channel(FRAMES_WAITING_MAX);
    for (index, choice) in choices.into_iter().enumerate() {
        let (tracker, cancelled) = (choice.api.choices.clone(), cancelled.clone());
        let mut outlet = Outlet::new(index, &ask, frames.clone());
        let task = async move {
            let result = choice.run(&cancelled, Some(&mut outlet)).await;
            outlet.close(result).await;
        };
        tracker.spawn(task.in_current_span());
    }
    drop(frames);
    let first = match heard.recv().await {
        Some(Frame::Failed(problem)) => return Err(problem),
        first => first,
    };
    let state = Streaming {
        begun: vec![false; ask.n],
        ask,
        head,
        first,
        heard,
        prompt_tokens,
        sampled: 0,
        last: Last::Open,
        _caller: caller,
    };
    let response = axum::response::Sse::new(state.events()).keep_alive(KeepAlive::default());
    Ok(response.into_response())
}

/// How far the end of a stream has come.
enum Last {
    Open,
    Usage,
    Done,
    Closed,
}

struct Streaming {
    ask: Arc<Ask>,
    head: Head,
    first: Option<Frame>,
    heard: mpsc::Receiver<Frame>,
    prompt_tokens: usize,
    sampled: usize,
    /// Choices of which something was told.
    begun: Vec<bool>,
    last: Last,
    _caller: DropGuard,
}

impl Streaming {
    fn events(self) -> impl Stream<Item = Result<Sse, Infallible>> {
        futures::stream::unfold(self, |mut state| async move {
            let event = state.next().await?;
            Some((Ok(event), state))
        })
    }

    async fn next(&mut self) -> Option<Sse> {
        loop {
            match self.last {
                Last::Open => {
                    let frame = match self.first.take() {
                        Some(frame) => Some(frame),
                        None => self.heard.recv().await,
                    };
                    match frame {
                        Some(frame) => return Some(self.frame(frame)),
                        None if self.ask.include_usage => self.last = Last::Usage,
                        None => self.last = Last::Done,
                    }
                }
                Last::Usage => {
                    self.last = Last::Done;
                    let usage = Usage::new(self.prompt_tokens, self.sampled);
                    return Some(chunk(&self.head.completion(Vec::new(), Some(usage))));
                }
                Last::Done => {
                    self.last = Last::Closed;
                    return Some(Sse::default().data("[DONE]"));
                }
                Last::Closed => return None,
            }
        }
    }

    /// Whether this is the first that is told of a choice.
    fn part(&mut self, index: usize) -> Part {
        match std::mem::replace(&mut self.begun[index], true) {
            true => Part::Further,
            false => Part::First,
        }
    }

    fn frame(&mut self, frame: Frame) -> Sse {
        let choice = match frame {
            Frame::Piece { index, text, tokens } => {
                let part = self.part(index);
                wire::Choice::piece(&self.ask, index, part, text, &tokens)
            }
            Frame::Finished {
                index,
                finished,
                text,
                tokens,
            } => {
                let finished: Finished = *finished;
                self.sampled += finished.tokens.len();
                let part = self.part(index);
                wire::Choice::finished(&self.ask, index, part, &finished, text, &tokens)
            }
            Frame::Failed(problem) => {
                self.last = Last::Closed;
                return error(&problem);
            }
        };
        chunk(&self.head.completion(vec![choice], None))
    }
}

fn chunk(completion: &Completion) -> Sse {
    match serde_json::to_string(completion) {
        Ok(json) => Sse::default().data(json),
        Err(failed) => error(&Problem::internal(failed)),
    }
}

/// An error inside a stream: the problem document, with the member `error` that OpenAI's clients look for.
fn error(problem: &Problem) -> Sse {
    let document = problem.clone().with(
        "error",
        serde_json::json!({
            "message": problem.to_string(),
            "type": problem.type_,
            "code": problem.status.as_u16(),
        }),
    );
    Sse::default().event("error").data(document.document().to_string())
}
