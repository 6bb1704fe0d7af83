//! `POST /v1/retractions`: withdraws a feedback event. `POST /v1/episode-ends`: marks an episode as
//! complete.

use axum::Json as Answer;
use axum::extract::State;
use edge::auth::{Principal, Scope};
use edge::problem::Problem;
use edge::query::Query;
use event_log::event::{EpisodeEnd, Retraction};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use super::answer::{Preview, Refusal};
use super::body::{self, JsonText};
use super::dryrun;
use super::{Api, SOURCE};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RetractionRequest {
    /// UUIDv7. Resending the same id is a no-op. Absent: a new one; repeated retractions are
    /// harmless.
    id: Option<Uuid>,
    feedback_id: Uuid,
    /// A text for people.
    #[serde(default)]
    reason: String,
    /// When it was withdrawn. Absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// The producer. Absent: `springtide/api`.
    source: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AcceptedRetraction {
    retraction_id: Uuid,
    /// In dry runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Preview>,
}

/// Withdraw a feedback event.
///
/// If the trajectory is still open at that time, the feedback has no effect. A later retraction is
/// stored and marked late. A retraction may arrive before its feedback event.
#[utoipa::path(
    post,
    path = "/v1/retractions",
    tag = "events",
    security(("bearer" = ["feedback"]), ()),
    params(dryrun::Options),
    request_body = RetractionRequest,
    responses((status = 200, description = "acknowledged by the log", body = AcceptedRetraction), Refusal)
)]
pub(super) async fn retraction(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    JsonText(text): JsonText,
) -> Result<Answer<AcceptedRetraction>, Problem> {
    principal.require(Scope::Feedback)?;
    principal.require_trusted()?;
    let request: RetractionRequest = body::read_short(&text)?;
    let retraction_id = request.id.unwrap_or_else(Uuid::now_v7);
    let retraction = Retraction {
        id: retraction_id,
        feedback_id: request.feedback_id,
        reason: request.reason,
    };
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    let event = retraction.into_event(principal.tenant, source, request.time.unwrap_or(api.now()));
    let (_, dryrun) = api.take_one(event, options.dryrun).await?;
    Ok(Answer(AcceptedRetraction { retraction_id, dryrun }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EpisodeEndRequest {
    episode_id: Uuid,
    /// When it ended. Absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// The producer. Absent: `springtide/api`.
    source: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AcceptedEpisodeEnd {
    episode_id: Uuid,
    /// In dry runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Preview>,
}

/// Mark an episode as complete.
///
/// If its surface has `close_on_episode_end`, its open generations close. If sources report several
/// ends, the earliest counts. Further ends from the same source are the same event, whatever their
/// time.
#[utoipa::path(
    post,
    path = "/v1/episode-ends",
    tag = "events",
    security(("bearer" = ["feedback"]), ()),
    params(dryrun::Options),
    request_body = EpisodeEndRequest,
    responses((status = 200, description = "acknowledged by the log", body = AcceptedEpisodeEnd), Refusal)
)]
pub(super) async fn episode_end(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    JsonText(text): JsonText,
) -> Result<Answer<AcceptedEpisodeEnd>, Problem> {
    principal.require(Scope::Feedback)?;
    principal.require_trusted()?;
    let request: EpisodeEndRequest = body::read_short(&text)?;
    let episode_id = request.episode_id;
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    let time = request.time.unwrap_or(api.now());
    let event = EpisodeEnd { episode_id }.into_event(principal.tenant, source, time);
    let (_, dryrun) = api.take_one(event, options.dryrun).await?;
    Ok(Answer(AcceptedEpisodeEnd { episode_id, dryrun }))
}
