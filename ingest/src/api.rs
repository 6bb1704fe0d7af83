//! The HTTP entrance: feedback and generations in JSON. An answer means that the log has acknowledged the event; the
//! tables follow. A contradiction that the tables know already is a 409, one that shows later becomes a dead letter.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post};
use axum::{Json as Answer, Router};
use edge::auth::{Auth, Principal, Role};
use edge::json::Json;
use edge::problem::Problem;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::entrance::Entrance;
use crate::event::{self, Event, Feedback, Generation, Invalid, Target, Value};
use crate::log;
use crate::rules::Rules;
use crate::spool;

/// The source of events that name none.
const SOURCE: &str = "springtide/api";
const BODY_BYTES_MAX: usize = 8 * 1024 * 1024;
/// How long the look for a known contradiction may take; the log is asked all the same.
const LOOK_UP_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub(crate) struct Api {
    /// `None` in a collector.
    pub pool: Option<PgPool>,
    pub producer: Entrance,
    pub rules: Arc<Rules>,
}

impl Api {
    pub(crate) fn router(self, auth: &Auth) -> Router {
        let events = Router::new()
            .route("/v1/feedback", post(feedback))
            .route("/v1/generations", post(generation))
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(self);
        auth.protect(events).route("/health", get(health))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FeedbackRequest {
    /// UUIDv7. The same id again is the same feedback; absent: a new one.
    id: Option<Uuid>,
    generation_id: Option<Uuid>,
    episode_id: Option<Uuid>,
    metric_name: String,
    value: Value,
    #[serde(default)]
    tags: BTreeMap<String, String>,
    /// When it was given; absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    source: Option<String>,
    /// Check it, and do nothing.
    #[serde(default)]
    dryrun: bool,
}

#[derive(Serialize)]
struct FeedbackAnswer {
    feedback_id: Uuid,
}

#[derive(Deserialize)]
struct GenerationRequest {
    #[serde(flatten)]
    generation: Generation,
    /// When its last token was sampled; absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    source: Option<String>,
}

#[derive(Serialize)]
struct GenerationAnswer {
    generation_id: Uuid,
}

async fn feedback(
    State(api): State<Api>,
    principal: Principal,
    Json(request): Json<FeedbackRequest>,
) -> Result<Answer<FeedbackAnswer>, Problem> {
    principal.require(&[Role::Serving, Role::Research])?;
    let target = match (request.generation_id, request.episode_id) {
        (Some(id), None) => Target::Generation(id),
        (None, Some(id)) => Target::Episode(id),
        _ => {
            return Err(Problem::bad_request(
                "exactly one of generation_id and episode_id is needed",
            ));
        }
    };
    let feedback_id = request.id.unwrap_or_else(Uuid::now_v7);
    let feedback = Feedback {
        id: feedback_id,
        target,
        metric_name: request.metric_name,
        value: request.value,
        tags: request.tags,
    };
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    let time = request.time.unwrap_or_else(event::now);
    let event = feedback.into_event(principal.tenant, source, time);
    api.accept(&event, request.dryrun).await?;
    Ok(Answer(FeedbackAnswer { feedback_id }))
}

async fn generation(
    State(api): State<Api>,
    principal: Principal,
    Json(request): Json<GenerationRequest>,
) -> Result<Answer<GenerationAnswer>, Problem> {
    principal.require(&[Role::Serving])?;
    let generation_id = request.generation.id;
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    let mut event = request.generation.into_event(principal.tenant, source);
    if let Some(time) = request.time {
        event.time = event::to_microseconds(time);
    }
    api.accept(&event, false).await?;
    Ok(Answer(GenerationAnswer { generation_id }))
}

async fn health() -> Answer<serde_json::Value> {
    Answer(serde_json::json!({ "status": "ok" }))
}

impl Api {
    async fn accept(&self, event: &Event, dryrun: bool) -> Result<(), Problem> {
        let checked = event.check().and_then(|()| self.rules.check(event, event::now()));
        checked.map_err(|error| invalid(&error))?;
        match self.known(event).await {
            Some(digest) if digest == event.digest() => return Ok(()),
            Some(_) => {
                return Err(Problem::conflict(format!(
                    "the event {:?} of source {:?} came with another body before",
                    event.id, event.source
                )));
            }
            None => {}
        }
        if dryrun {
            return Ok(());
        }
        self.producer.send_event(event).await.map_err(unaccepted)
    }

    /// The digest under which the tables hold this event. Not finding out in time counts as not knowing: the log takes
    /// events while the database is away, and the sink compares again.
    async fn known(&self, event: &Event) -> Option<Vec<u8>> {
        let pool = self.pool.as_ref()?;
        let stored = sqlx::query_scalar!(
            "select digest from event_key where tenant_id = $1 and source = $2 and event_id = $3",
            event.tenant,
            event.source,
            event.id
        )
        .fetch_optional(pool);
        match tokio::time::timeout(LOOK_UP_TIMEOUT, stored).await {
            Ok(Ok(digest)) => digest,
            Ok(Err(error)) => {
                tracing::warn!(%error, "duplicates cannot be looked up");
                None
            }
            Err(_) => {
                tracing::warn!("duplicates cannot be looked up in time");
                None
            }
        }
    }
}

fn invalid(error: &Invalid) -> Problem {
    Problem::bad_request(error).with("field", error.field)
}

fn unaccepted(error: log::Error) -> Problem {
    match error {
        log::Error::Invalid(error) => invalid(&error),
        log::Error::TooLarge { .. } => Problem::too_large(error),
        log::Error::Full => Problem::too_many(error, 1),
        log::Error::Spool(spool::Error::TooLarge) => Problem::too_large(error),
        log::Error::Spool(cause) => Problem::unavailable(cause, cause.retry_after_seconds()),
        log::Error::Unavailable(cause) => {
            tracing::warn!(error = %cause, "event not acknowledged");
            Problem::unavailable("the log did not acknowledge; send the same event again", 1)
        }
    }
}
