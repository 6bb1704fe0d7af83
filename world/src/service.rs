//! The role `springtide world`: worlds over HTTP, for harnesses of rollouts.
//!
//! ```text
//! POST   /v1/worlds            {"image", "ttl_seconds"}              201 {"id", "image", "ttl_seconds"}
//! POST   /v1/worlds/{id}/run   {"program", "stdin", "files", "limits"}   {"ended", "stdout", "stderr", "wall_ms"}
//! DELETE /v1/worlds/{id}                                             204
//! GET    /v1/worlds                                                  {"image", "ready", "used", "worlds_max"}
//! GET    /health
//! ```
//! A world that nobody ends dies at its time to live, also while a program runs in it. Worlds do not
//! outlive the role.

pub mod body;
mod options;
mod registry;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use edge::auth::{Auth, Scope};
use edge::json::Json;
use edge::path::Path as Segment;
use edge::problem::Problem;
use edge::routes::{Routes, delete, get, post};
use edge::server::Listener;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::provider::{Error, Provider as _};
use crate::vm::Pool;
use body::{Create, Created, Ran, Run};
pub use options::Options;
use registry::Registry;

/// Program, input and files of one request.
const RUN_BYTES_MAX: usize = 16 << 20;
/// Of one command's standard output and standard error, each.
const OUTPUT_BYTES_MAX: u64 = 8 << 20;
const RETRY_SECONDS: u32 = 1;

#[derive(Clone)]
struct Service {
    pool: Arc<Pool>,
    registry: Registry,
    options: Arc<Options>,
}

/// Boots the image, then serves worlds until `shutdown`. `folder` is this role's alone. `metrics` is
/// merged into its routes.
pub async fn run(
    options: &Options,
    folder: &Path,
    listener: Listener,
    metrics: Router,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let auth = Auth::fixed(options.caller_key.as_deref()).requests_per_second_max(options.requests_per_second_max);
    let pool = Pool::start(options.machine.clone(), folder, options.ready, options.worlds_max);
    let pool = tokio::select! {
        pool = pool => pool.context("make the snapshot of world.machine.image")?,
        () = shutdown.cancelled() => return Ok(()),
    };
    tracing::info!(
        image = options.name,
        boot_ms = pool.snapshot().boot().as_millis(),
        "worlds are ready"
    );
    let registry = Registry::new();
    let router = routes(options, pool, registry.clone()).protected_by(&auth, "Springtide world");
    let served = edge::server::run(listener, router.merge(metrics), shutdown).await;
    registry.end_all();
    served
}

fn routes(options: &Options, pool: Pool, registry: Registry) -> Routes {
    let service = Service {
        pool: Arc::new(pool),
        registry,
        options: Arc::new(options.clone()),
    };
    Routes::new()
        .route(Scope::Read, "/v1/worlds", "What the pool of worlds holds", get(list))
        .route(Scope::Completions, "/v1/worlds", "Create a world", post(create))
        .route(Scope::Completions, "/v1/worlds/{id}", "End a world", delete(end))
        .route(
            Scope::Completions,
            "/v1/worlds/{id}/run",
            "Run a program in a world",
            post(run_program).body_bytes_max(RUN_BYTES_MAX),
        )
        .open_route("/health", "Whether the process responds", get(async || "ok"))
        .with_state(service)
}

async fn list(State(service): State<Service>) -> Json<Value> {
    let state = service.pool.state();
    Json(json!({
        "image": service.options.name,
        "ready": state.ready,
        "used": state.used,
        "worlds_max": state.worlds_max,
    }))
}

async fn create(
    State(service): State<Service>,
    Json(request): Json<Create>,
) -> Result<(StatusCode, Json<Created>), Problem> {
    let options = &service.options;
    if let Some(image) = request.image.as_ref().filter(|image| **image != options.name) {
        let detail = format!(
            "there is no image {image:?} here: give {:?}, or leave it out",
            options.name
        );
        return Err(Problem::not_found(detail));
    }
    let ttl_seconds = request.ttl_seconds.unwrap_or(options.ttl_seconds);
    if !(1..=options.ttl_seconds_max).contains(&ttl_seconds) {
        let detail = format!("ttl_seconds is {ttl_seconds}: give 1 to {}", options.ttl_seconds_max);
        return Err(Problem::bad_request(detail));
    }
    // Goes on if the caller leaves: the world is not half made then, and dies at its time to live.
    let made = tokio::spawn(async move {
        let world = service.pool.create().await?;
        metrics::counter!("springtide_world_created_total").increment(1);
        Ok(service.registry.add(world, Duration::from_secs(ttl_seconds)))
    });
    let id = made.await.map_err(Problem::internal)?.map_err(problem)?;
    let image = options.name.clone();
    Ok((StatusCode::CREATED, Json(Created { id, image, ttl_seconds })))
}

async fn run_program(
    State(service): State<Service>,
    Segment(id): Segment<Uuid>,
    Json(run): Json<Run>,
) -> Result<Json<Ran>, Problem> {
    let limits = run.limits;
    if limits.output_bytes > OUTPUT_BYTES_MAX {
        let detail = format!(
            "limits.output_bytes is {}: give at most {OUTPUT_BYTES_MAX}",
            limits.output_bytes
        );
        return Err(Problem::bad_request(detail));
    }
    if run.program.is_empty() {
        return Err(Problem::bad_request(
            "program is empty: give a program and its arguments",
        ));
    }
    let output = service.registry.run(id, run.into()).await?;
    Ok(Json(output.map_err(problem)?.into()))
}

async fn end(State(service): State<Service>, Segment(id): Segment<Uuid>) -> Result<StatusCode, Problem> {
    service.registry.end(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn problem(error: Error) -> Problem {
    match error {
        Error::Full(detail) => Problem::unavailable(detail, RETRY_SECONDS),
        Error::Refused(detail) => Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "world-refused",
            "The world refused the command",
        )
        .detail(detail),
        Error::Lost(_) => Problem::new(StatusCode::GONE, "world-lost", "The world is lost").detail(error),
        Error::Unusable(_) => Problem::internal(error),
    }
}
