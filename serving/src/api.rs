//! The API of one replica: OpenAI's `POST /v1/completions`, `/v1/chat/completions` and
//! `/v1/responses`, Anthropic's `POST /v1/messages`, `GET /v1/models`, `GET /health`.
//!
//! A body (`body`) is checked (`request`), routed, made token ids (`prompts`), sampled by one task
//! per choice (`choice`), and answered (`answer`). Calls of tools and reasoning are found in the text
//! of the answer ([`text::answer`]); what is logged are the sampled ids. A task ends when the log has
//! acknowledged its generation; only then does the caller get the final chunk. If the caller
//! disconnects, its choices are canceled, and the tokens sampled so far are logged as aborted.

mod answer;
mod bar;
mod body;
mod choice;
mod completions;
mod constraint;
mod deadline;
mod detokenize;
mod error;
mod experts;
mod exploration;
mod lease;
mod log_state;
mod messages;
mod outcome;
mod prompts;
mod request;
mod responses;
mod sessions;
mod shadow;
mod stop;

use crate::engine::{Engine, LoadedVersion, SubmitError};
use crate::options::Options;
use crate::routing::{RouteError, RouteTable};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use edge::Problem;
use edge::auth::Scope;
use edge::json::Json;
use edge::path::Path;
use edge::routes::{Routes, get, post};
use edge::sampler::SamplerKey;
use event_log::event::Event;
use event_log::payload::Store as Payloads;
use event_log::{self as log, Producer};
use futures::future::BoxFuture;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use text::chat::Value as TemplateValue;
use tokio_util::task::TaskTracker;

pub use error::shape_errors;
pub use log_state::LogState;
pub use prompts::Prompts;
pub use sessions::Sessions;
pub use shadow::Shadow;

/// How long all engines may be away before a replica is no longer ready.
const LOST_MAX: Duration = Duration::from_secs(10);

/// Where generations are logged. Resolves once the event is acknowledged.
pub trait Log: Send + Sync {
    fn append<'a>(&'a self, event: &'a Event) -> BoxFuture<'a, Result<(), log::Error>>;
}

impl Log for Producer {
    fn append<'a>(&'a self, event: &'a Event) -> BoxFuture<'a, Result<(), log::Error>> {
        Box::pin(self.send_event(event))
    }
}

/// Shared by all handlers.
pub struct Api {
    pub policy: String,
    pub options: Options,
    pub engine: Arc<dyn Engine>,
    pub prompts: Prompts,
    pub routes: Arc<RouteTable>,
    pub log: Arc<dyn Log>,
    /// Whether the log took the last answer.
    pub log_state: LogState,
    pub lost: Lost,
    /// Where the experts of mixture models are logged; `None`: not logged.
    pub payloads: Option<Payloads>,
    /// The previous turns of sessions.
    pub sessions: Sessions,
    /// Signs every generation.
    pub sampler: SamplerKey,
    /// Unseen answers of a canary.
    pub shadow: Shadow,
    /// Running choices. A choice outlives its caller until it is logged.
    pub choices: TaskTracker,
}

impl Api {
    /// Source of every event that this replica logs.
    fn source(&self) -> String {
        format!("springtide/serve/{}", self.options.replica)
    }
}

/// All routes. `/health` is open to anyone: 200 once a version serves, 503 before.
pub fn routes(api: Arc<Api>) -> Routes {
    Routes::new()
        .route(
            Scope::Completions,
            "/v1/completions",
            "Complete a prompt",
            post(completions::completions),
        )
        .route(
            Scope::Completions,
            "/v1/chat/completions",
            "Answer a conversation",
            post(completions::chat_completions),
        )
        .route(
            Scope::Completions,
            "/v1/responses",
            "Answer a conversation, in the form of OpenAI's Responses",
            post(responses::responses),
        )
        .route(
            Scope::Completions,
            "/v1/messages",
            "Answer a conversation, in Anthropic's form",
            post(messages::messages).json_errors(),
        )
        .route(
            Scope::Completions,
            "/v1/messages/count_tokens",
            "Count the tokens of a conversation, in Anthropic's form",
            post(messages::count_tokens).json_errors(),
        )
        .route(
            Scope::Completions,
            "/lease/{lease}/v1/completions",
            "Complete a prompt, in a rollout",
            post(completions::completions),
        )
        .route(
            Scope::Completions,
            "/lease/{lease}/v1/chat/completions",
            "Answer a conversation, in a rollout",
            post(completions::chat_completions),
        )
        .route(
            Scope::Completions,
            "/lease/{lease}/v1/responses",
            "Answer a conversation in a rollout, in the form of OpenAI's Responses",
            post(responses::responses),
        )
        .route(
            Scope::Completions,
            "/lease/{lease}/v1/messages",
            "Answer a conversation in a rollout, in Anthropic's form",
            post(messages::messages).json_errors(),
        )
        .route(
            Scope::Completions,
            "/lease/{lease}/v1/messages/count_tokens",
            "Count the tokens of a conversation in a rollout, in Anthropic's form",
            post(messages::count_tokens).json_errors(),
        )
        .route(
            Scope::Read,
            "/v1/models",
            "List the policy and its loaded versions",
            get(models).also_for(Scope::Completions),
        )
        .route(
            Scope::Read,
            "/v1/models/{id}",
            "Show the policy or one of its loaded versions, by its id in the list",
            get(one_model).also_for(Scope::Completions),
        )
        .open_route("/health", "Whether a version serves", get(get_health))
        .with_state(api)
}

/// The policy itself, for which the experiment decides per user, then each loaded version by its
/// aliases and its serial.
fn listed(api: &Api) -> Vec<Value> {
    let model = |id: String, version: Option<&LoadedVersion>| {
        json!({
            "id": id,
            "object": "model",
            "created": 0,
            "owned_by": "springtide",
            "version": version.map(|version| version.serial),
            "root": version.map(|version| version.root.to_string()),
            "max_model_len": version.map(|version| version.context),
        })
    };
    let served = api.routes.served();
    let mut models = Vec::new();
    if !served.is_empty() {
        models.push(model(api.policy.clone(), None));
    }
    for (version, mut names) in served {
        names.push(version.serial.to_string());
        let ids = names.iter().map(|name| format!("{}@{name}", api.policy));
        models.extend(ids.map(|id| model(id, Some(&version))));
    }
    models
}

async fn models(State(api): State<Arc<Api>>) -> Json<Value> {
    Json(json!({"object": "list", "data": listed(&api)}))
}

async fn one_model(State(api): State<Arc<Api>>, Path(id): Path<String>) -> Result<Json<Value>, Problem> {
    let model = listed(&api).into_iter().find(|model| model["id"] == id.as_str());
    model
        .map(Json)
        .ok_or_else(|| Problem::not_found(format!("model {id} is not served; GET /v1/models lists those that are")))
}

/// Since when no arm has had an engine, as far as `/health` was asked.
#[derive(Debug, Default)]
pub struct Lost(Mutex<Option<Instant>>);

impl Lost {
    /// Whether all engines have been away for longer than one takes to change its version.
    fn for_long(&self, lost: bool, now: Instant) -> bool {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match lost {
            true => now.duration_since(*since.get_or_insert(now)) >= LOST_MAX,
            false => {
                *since = None;
                false
            }
        }
    }
}

async fn get_health(State(api): State<Arc<Api>>) -> Result<Json<Value>, Problem> {
    if !api.routes.ready() {
        return Err(no_route(&RouteError::NotReady(api.policy.clone())));
    }
    let served = api.routes.served();
    let shares: BTreeMap<i64, f64> = api.routes.shares().into_iter().collect();
    let arms = served
        .iter()
        .filter(|(version, _)| shares.get(&version.serial).is_some_and(|&share| share > 0.0));
    let (without, with): (Vec<_>, Vec<_>) = arms.partition(|(version, _)| api.engine.unavailable(version).is_some());
    let without: Vec<i64> = without.iter().map(|(version, _)| version.serial).collect();
    if api
        .lost
        .for_long(with.is_empty() && !without.is_empty(), Instant::now())
    {
        let detail = format!("no engine serves any arm: versions {without:?} wait for one");
        return Err(Problem::unavailable(detail, 1));
    }
    Ok(Json(json!({
        "status": "ready",
        "without_engine": without,
        "replica": api.options.replica,
        "epoch": api.routes.epoch(),
        "versions": served.iter().map(|(version, _)| version.serial).collect::<Vec<_>>(),
    })))
}

/// Where coding agents name the session that a request belongs to: Claude Code, and Codex.
const SESSION_HEADERS: [&str; 2] = ["x-claude-code-session-id", "session-id"];

fn session_of(headers: &HeaderMap) -> Option<String> {
    let session = SESSION_HEADERS.iter().find_map(|name| headers.get(*name))?;
    session.to_str().ok().map(str::to_owned)
}

/// The variables that templates name differently: whether the model should think.
fn thinking_variables(thinks: bool) -> BTreeMap<String, TemplateValue> {
    ["enable_thinking", "thinking"]
        .map(|name| (name.to_owned(), thinks.into()))
        .into()
}

/// 429: in a full queue, other requests took the place of this one.
fn displaced() -> Problem {
    let detail = "other callers' requests took this one's place in the full queue; try again later";
    Problem::too_many(detail, 2)
}

/// 429: the engine had no slot for too long.
fn expired() -> Problem {
    Problem::too_many("no slot became free in time; try again later", 2)
}

/// Why the engine did not queue a request.
fn not_submitted(error: SubmitError) -> Problem {
    match error {
        SubmitError::Full { waiting } => {
            metrics::counter!("springtide_requests_refused_total").increment(1);
            Problem::too_many(
                format!("{waiting} choices wait for a slot already, and this caller has its share; try again later"),
                1,
            )
        }
        SubmitError::Stopped => Problem::unavailable("the engine has stopped; try again shortly", 2),
    }
}

/// 503: the engine's own limit.
fn busy() -> Problem {
    Problem::unavailable("the engine of this model has too many requests; try again shortly", 2)
}

/// 502: what the engine answered is no answer to the request.
fn unusable(reason: String) -> Problem {
    let title = "The engine's answer cannot be used";
    Problem::new(StatusCode::BAD_GATEWAY, "unusable-answer", title).detail(reason)
}

fn no_route(error: &RouteError) -> Problem {
    match error {
        RouteError::NotReady(_) => Problem::unavailable(error, 1),
        RouteError::Unknown { known: models, .. } | RouteError::NotLoaded { loaded: models, .. } => {
            Problem::not_found(error).with("models", models.clone())
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
