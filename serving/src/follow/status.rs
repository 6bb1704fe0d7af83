//! Health and status of a follower over HTTP.

use super::options::Engine;
use super::proxy::ENGINE;
use crate::remote::Pool;
use crate::routing::RouteTable;
use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use edge::Problem;
use serde::Serialize;
use std::sync::Arc;

#[derive(Clone)]
pub struct Status {
    pub policy: String,
    pub alias: String,
    pub engine: Engine,
    pub routes: Arc<RouteTable>,
    /// Of the one engine, if the follower is in front of it.
    pub pool: Option<Pool>,
}

/// `GET /v1/follow`.
#[derive(Debug, Serialize)]
struct View {
    policy: String,
    alias: String,
    engine: Engine,
    /// Epoch of the assignment in force; 0: none yet.
    epoch: i64,
    /// The version in force; null: none yet.
    version: Option<i64>,
    /// Its content hash.
    root: Option<String>,
    /// Whether requests reach the engine now, or the folder is there.
    ready: bool,
    /// Requests that run on the engine.
    in_flight: Option<usize>,
}

impl Status {
    pub fn ready(&self) -> bool {
        match &self.pool {
            Some(pool) => pool.serves(ENGINE).is_some(),
            None => self.routes.ready(),
        }
    }
}

/// What the caller's key opens.
pub fn routes(status: Status) -> Router {
    Router::new().route("/v1/follow", get(view)).with_state(status)
}

/// For load balancers: 200 while requests may be sent here.
pub fn health(status: Status) -> Router {
    Router::new().route("/health", get(healthy)).with_state(status)
}

async fn view(State(status): State<Status>) -> Json<View> {
    let in_force = status.routes.served().into_iter().next().map(|(version, _)| version);
    Json(View {
        epoch: status.routes.epoch(),
        version: in_force.as_ref().map(|version| version.serial),
        root: in_force.map(|version| version.root.to_string()),
        ready: status.ready(),
        in_flight: status.pool.as_ref().map(|pool| pool.in_flight(ENGINE)),
        policy: status.policy,
        alias: status.alias,
        engine: status.engine,
    })
}

async fn healthy(State(status): State<Status>) -> Result<&'static str, Problem> {
    match status.ready() {
        true => Ok("ok"),
        false => Err(Problem::unavailable("no version is in force and proven", 1)),
    }
}
