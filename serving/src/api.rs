//! The OpenAI-compatible API of one replica: POST /v1/completions and /v1/chat/completions, GET /v1/models, GET /health.
//!
//! A request is checked (`ask`), routed, and sampled as one task per choice (`choice`), which ends when the log has
//! acknowledged the generation; only then does the caller see the final chunk. A caller that goes away cancels its
//! choices; what was sampled by then is logged as aborted. It neither trains nor releases anything.

mod ask;
mod chat;
mod choice;
mod complete;
mod experts;
mod explore;
mod record;
mod sessions;
mod stop;
mod wire;

use crate::engine::Handle;
use crate::options::ServeOptions;
use crate::routing::{NoRoute, Routing};
use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};
use edge::Problem;
use edge::auth::Principal;
use edge::json::Json;
use futures::future::BoxFuture;
use ingest::event::Event;
use ingest::log::{self, Producer};
use ingest::payload::Store as Payloads;
use std::sync::Arc;
use tokio_util::task::TaskTracker;

pub use sessions::Sessions;

/// Where generations are written down. Resolves when they are safe.
pub trait Log: Send + Sync {
    fn append<'a>(&'a self, event: &'a Event) -> BoxFuture<'a, Result<(), log::Error>>;
}

impl Log for Producer {
    fn append<'a>(&'a self, event: &'a Event) -> BoxFuture<'a, Result<(), log::Error>> {
        Box::pin(self.send_event(event))
    }
}

/// What the handlers share.
pub struct Api {
    pub policy: String,
    pub options: ServeOptions,
    pub engine: Handle,
    pub routing: Arc<Routing>,
    pub log: Arc<dyn Log>,
    /// Where the experts of a mixture go; none: they are not logged.
    pub payloads: Option<Payloads>,
    /// What the next turn of a session is compared with.
    pub sessions: Sessions,
    /// Choices at work; they outlive their caller by one log entry.
    pub choices: TaskTracker,
}

impl Api {
    /// Source of every event that this replica logs.
    fn source(&self) -> String {
        format!("springtide/serve/{}", self.options.replica)
    }
}

/// The routes that need a caller; put them behind `edge::auth`.
pub fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/v1/completions", post(complete::completions))
        .route("/v1/chat/completions", post(complete::chat_completions))
        .route("/v1/models", get(models))
        .with_state(api)
}

/// `GET /health`, open to anyone: 200 once a version serves, 503 before.
pub fn health(api: Arc<Api>) -> Router {
    Router::new().route("/health", get(health_of)).with_state(api)
}

async fn models(State(api): State<Arc<Api>>, _principal: Principal) -> Json<wire::Models> {
    Json(wire::models(&api.policy, &api.routing))
}

async fn health_of(State(api): State<Arc<Api>>) -> Result<Json<wire::Health>, Problem> {
    if !api.routing.ready() {
        return Err(no_route(&NoRoute::NotReady(api.policy.clone())));
    }
    Ok(Json(wire::health(&api.options.replica, &api.routing)))
}

fn no_route(error: &NoRoute) -> Problem {
    match error {
        NoRoute::NotReady(_) => Problem::unavailable(error, 1),
        NoRoute::Unknown { known, .. } => Problem::not_found(error).with("models", known.clone()),
        NoRoute::NotResident { resident, .. } => Problem::not_found(error).with("models", resident.clone()),
    }
}

#[cfg(test)]
mod tests;
