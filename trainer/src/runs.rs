//! Runs over HTTP: schedule one, read what it does, pause, resume, cancel. The shape of `/v1/fine_tuning/jobs`.
//!
//! Only rows are written here. The executor in `springtide train` reads them; it need not be up. Needs no libtorch.

mod control;
pub mod create;
mod view;

pub use create::{Config, Task};
pub(crate) use view::limit;
pub use view::{List, Run};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use sqlx::PgPool;
use std::sync::Arc;

/// A request with all its tasks.
const BODY_BYTES_MAX: usize = 32 << 20;

/// What the handlers share.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub pool: PgPool,
    pub policy: Arc<str>,
}

/// `/v1/runs` and below, for one policy.
pub fn router(pool: PgPool, policy: &str) -> Router {
    let create = post(create::create).layer(DefaultBodyLimit::max(BODY_BYTES_MAX));
    Router::new()
        .route("/v1/runs", create.get(view::list))
        .route("/v1/runs/{id}", get(view::one))
        .route("/v1/runs/{id}/events", get(view::events))
        .route("/v1/runs/{id}/checkpoints", get(view::checkpoints))
        .route("/v1/runs/{id}/cancel", post(control::cancel))
        .route("/v1/runs/{id}/pause", post(control::pause))
        .route("/v1/runs/{id}/resume", post(control::resume))
        .with_state(Shared {
            pool,
            policy: policy.into(),
        })
}

/// A database error as a problem: logged here, once.
#[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
pub(crate) fn database(error: sqlx::Error) -> edge::problem::Problem {
    edge::problem::Problem::internal(format!("database: {error}"))
}
