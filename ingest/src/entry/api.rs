//! The HTTP API: single events, batches and CloudEvents.
//!
//! A 2xx means that the log has acknowledged every event of the request; the tables follow. A
//! conflict with an event that is known by then is a 409. A conflict that shows later becomes a dead
//! letter.
//!
//! ```text
//!  auth ─► intake: decompress, limit, budget
//!       ─► endpoint: request to canonical events
//!       ─► accept: check, compare with what is known, send
//! ```
//!
//! There is no queue. Events that cannot be sent now are refused with a `Retry-After`, and the
//! caller keeps them.

mod accept;
mod answer;
mod batch;
mod body;
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
mod recent;
mod revoke;
mod tally;
mod token;

use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Json as Answer, Router, middleware};
use edge::auth::Auth;
use event_log::payload::Store;
use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::sync::Semaphore;
use tower_http::cors::CorsLayer;
use utoipa::openapi::OpenApi;
use utoipa::{OpenApi as _, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::entry::destination::Destination;
use crate::options::Options;
use crate::upkeep::retention::Room;
use crate::validator::Validator;
use answer::MethodNotAllowed;
use circuit::Circuit;
use intake::Intake;
use known::StoredEvents;
use recent::RecentEvents;
use token::Tokens;

/// The source of events whose request names none.
const SOURCE: &str = "springtide/api";

/// The state of every handler. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api {
    /// `None` in a collector.
    pool: Option<PgPool>,
    /// `None` in a collector: ingest compares what it forwards.
    stored: Option<StoredEvents>,
    /// Stays empty in a collector.
    recent: Arc<RecentEvents>,
    /// `None` in a collector, which has no database. Its callers are trusted, so it verifies no
    /// signature of a token, and forwards none.
    tokens: Option<Arc<Tokens>>,
    destination: Destination,
    /// `None` in a collector, or if not configured.
    payloads: Option<Store>,
    room: Arc<Room>,
    validator: Arc<Validator>,
    circuit: Arc<Circuit>,
    intake: Intake,
    /// Events per request.
    events_max: usize,
    /// Dry runs read the database beside the sink, the closer and the look-up of keys.
    dryruns: Arc<Semaphore>,
    /// Lets pages of other origins send feedback.
    cors: Option<CorsLayer>,
}

/// Dry runs that read at a time.
const DRYRUNS_AT_ONCE: usize = 2;

impl Api {
    /// `pool` is `None` in a collector, which has no database.
    pub(crate) fn new(
        options: &Options,
        pool: Option<PgPool>,
        destination: Destination,
        validator: Arc<Validator>,
    ) -> Self {
        let probe_interval = Duration::from_secs_f64(options.log_probe_seconds);
        Self {
            stored: pool.as_ref().map(StoredEvents::new),
            recent: Arc::new(RecentEvents::new()),
            tokens: pool.clone().map(|pool| Arc::new(Tokens::new(pool))),
            pool,
            destination,
            payloads: None,
            room: Arc::default(),
            validator,
            circuit: Arc::new(Circuit::new(options.log_failures_max, probe_interval)),
            intake: Intake::new(options),
            events_max: options.request_events_max,
            dryruns: Arc::new(Semaphore::new(DRYRUNS_AT_ONCE)),
            cors: options.cors().ok().flatten(),
        }
    }

    /// The time of an event whose request names none, by the database's clock.
    fn now(&self) -> OffsetDateTime {
        self.validator.clock.now()
    }

    /// Bytes of requests that are held in memory now.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held_bytes(&self) -> usize {
        self.intake.held_bytes()
    }

    /// Sets the store of payloads by reference.
    pub(crate) fn with_payloads(self, payloads: Option<Store>) -> Self {
        Self { payloads, ..self }
    }

    /// `room` says whether the tables may grow.
    pub(crate) fn with_room(self, room: Arc<Room>) -> Self {
        Self { room, ..self }
    }

    pub(crate) fn router(self, auth: &Auth) -> Router {
        let (intake, cors) = (self.intake.clone(), self.cors.clone());
        let (routes, document) = document();
        let router = auth
            .protect(intake.guard(routes.events.with_state(self)))
            .layer(middleware::from_fn(tally::count_refusals))
            .merge(routes.open.layer(Extension(openapi::written(&document))));
        match cors {
            Some(cors) => router.layer(cors),
            None => router,
        }
    }
}

struct Routes {
    events: Router<Api>,
    /// Routes that need no key.
    open: Router,
}

/// All routes and their OpenAPI document.
fn document() -> (Routes, OpenApi) {
    let (events, mut document) = OpenApiRouter::with_openapi(openapi::Base::openapi())
        .routes(routes!(feedback::feedback))
        .routes(routes!(generation::generation))
        .routes(routes!(events::events))
        .routes(routes!(batch::batch))
        .routes(routes!(revoke::retraction))
        .routes(routes!(revoke::episode_end))
        .routes(routes!(payload::payload))
        .split_for_parts();
    let open = OpenApiRouter::new().routes(routes!(health));
    let (open, rest) = open.routes(routes!(openapi::openapi)).split_for_parts();
    document.merge(rest);
    (Routes { events, open }, openapi::complete(document))
}

#[derive(Serialize, ToSchema)]
struct Health {
    /// `ok`.
    status: &'static str,
}

/// Whether the process responds.
#[utoipa::path(
    get,
    path = "/health",
    tag = "operation",
    security(()),
    responses(
        (status = 200, description = "the process responds", body = Health),
        (status = 405, response = MethodNotAllowed)
    )
)]
async fn health() -> Answer<Health> {
    Answer(Health { status: "ok" })
}

#[cfg(test)]
mod tests;
