//! The HTTP entrance: one event, a batch, CloudEvents, and the dialects of others. A 2xx means that the log has acknowledged
//! every event of the request; the tables follow. A contradiction that the tables know already is a 409, one that shows
//! later becomes a dead letter.
//!
//! ```text
//!  auth ─► intake: decompress, limit, budget ─► a way in: request ─► canonical events ─► accept: check, look up, send
//! ```
//!
//! Deliberately no queue: what cannot be taken now is refused with a `Retry-After`, and the caller keeps it.

mod accept;
mod batch;
mod body;
mod budget;
mod circuit;
mod dryrun;
mod events;
mod feedback;
mod generation;
mod idempotency;
mod intake;
mod known;
mod openapi;
mod payload;
mod query;
mod revoke;
mod scores;
mod tally;

use std::sync::Arc;
use std::time::Duration;

use axum::routing::get;
use axum::{Json as Answer, Router, middleware};
use edge::auth::Auth;
use serde::Serialize;
use sqlx::PgPool;
use utoipa::openapi::OpenApi;
use utoipa::{OpenApi as _, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::entrance::Entrance;
use crate::options::Options;
use crate::payload::Store;
use crate::retention::Room;
use crate::rules::Rules;
use circuit::Circuit;
use intake::Intake;
pub(crate) use intake::REQUEST_BYTES;
use known::Known;

/// The source of events that name none.
const SOURCE: &str = "springtide/api";

/// What every handler works with. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api {
    /// `None` in a collector.
    pool: Option<PgPool>,
    known: Option<Known>,
    entrance: Entrance,
    /// `None` where none is configured, and in a collector.
    payloads: Option<Store>,
    room: Arc<Room>,
    rules: Arc<Rules>,
    circuit: Arc<Circuit>,
    intake: Intake,
    /// Events of one request.
    events_max: usize,
    /// Events of one request that wait for acknowledgement at once.
    sends_max: usize,
}

impl Api {
    /// `pool`: `None` in a collector, which knows no tables.
    pub(crate) fn new(options: &Options, pool: Option<PgPool>, entrance: Entrance, rules: Arc<Rules>) -> Self {
        let probe_interval = Duration::from_secs_f64(options.log_probe_seconds);
        Self {
            known: pool.as_ref().map(Known::new),
            pool,
            entrance,
            payloads: None,
            room: Arc::default(),
            rules,
            circuit: Arc::new(Circuit::new(options.log_failures_max, probe_interval)),
            intake: Intake::new(options),
            events_max: options.request_events_max,
            sends_max: options.request_sends_max,
        }
    }

    /// Bytes of requests that are held now.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> usize {
        self.intake.held()
    }

    /// Where payloads by reference are.
    pub(crate) fn with_payloads(self, payloads: Option<Store>) -> Self {
        Self { payloads, ..self }
    }

    /// Whether the tables may grow.
    pub(crate) fn with_room(self, room: Arc<Room>) -> Self {
        Self { room, ..self }
    }

    pub(crate) fn router(self, auth: &Auth) -> Router {
        let intake = self.intake.clone();
        let (routes, document) = document();
        let document = Arc::new(document);
        let served = get(async move || Answer(document.as_ref().clone()));
        auth.protect(intake.guard(routes.events.with_state(self)))
            .layer(middleware::from_fn(tally::count_refusals))
            .merge(routes.open)
            .route(openapi::PATH, served)
    }
}

struct Routes {
    events: Router<Api>,
    /// That need no key.
    open: Router,
}

/// All routes, and what describes them.
fn document() -> (Routes, OpenApi) {
    let (events, mut document) = ways_in().split_for_parts();
    let (open, rest) = OpenApiRouter::new().routes(routes!(health)).split_for_parts();
    document.merge(rest);
    (Routes { events, open }, openapi::complete(document))
}

/// Every route that takes events.
fn ways_in() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(openapi::Base::openapi())
        .routes(routes!(feedback::feedback))
        .routes(routes!(generation::generation))
        .routes(routes!(events::events))
        .routes(routes!(batch::batch))
        .routes(routes!(revoke::retraction))
        .routes(routes!(revoke::episode_end))
        .routes(routes!(payload::payload))
        .routes(routes!(scores::scores))
}

#[derive(Serialize, ToSchema)]
struct Health {
    /// `ok`.
    status: &'static str,
}

/// Whether the process answers.
#[utoipa::path(get, path = "/health", tag = "operation", security(()), responses((status = 200, description = "it does", body = Health)))]
async fn health() -> Answer<Health> {
    Answer(Health { status: "ok" })
}

#[cfg(test)]
mod tests;
