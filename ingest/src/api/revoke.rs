//! `POST /v1/retractions`: takes a feedback back. `POST /v1/episode-ends`: nothing more will come for an episode.

use axum::Json as Answer;
use axum::extract::State;
use edge::auth::{Principal, Role};
use edge::problem::Problem;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use super::body::{self, JsonText};
use super::dryrun::{self, Outlook};
use super::openapi::Refusal;
use super::query::Query;
use super::{Api, SOURCE};
use crate::event::{self, EpisodeEnd, Retraction};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RetractionRequest {
    /// UUIDv7. The same id again is the same retraction; absent: a new one, which is harmless too.
    id: Option<Uuid>,
    feedback_id: Uuid,
    /// In words, for people.
    #[serde(default)]
    reason: String,
    /// When it was taken back; absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// Who produced it; absent: `springtide/api`.
    source: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AcceptedRetraction {
    retraction_id: Uuid,
    /// Of a dry run only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Outlook>,
}

/// Takes a feedback back.
///
/// As if it had never been given, if its trajectory is still open at that time; later it is kept and marked late. May come
/// before its feedback.
#[utoipa::path(
    post,
    path = "/v1/retractions",
    tag = "events",
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
    principal.require(&[Role::Serving, Role::Research])?;
    let request: RetractionRequest = body::read_feedback(&text)?;
    let retraction_id = request.id.unwrap_or_else(Uuid::now_v7);
    let retraction = Retraction {
        id: retraction_id,
        feedback_id: request.feedback_id,
        reason: request.reason,
    };
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    let event = retraction.into_event(principal.tenant, source, request.time.unwrap_or_else(event::now));
    let (_, dryrun) = api.take_one(event, options.dryrun).await?;
    Ok(Answer(AcceptedRetraction { retraction_id, dryrun }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EpisodeEndRequest {
    episode_id: Uuid,
    /// When it ended; absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// Who says so; absent: `springtide/api`.
    source: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AcceptedEpisodeEnd {
    episode_id: Uuid,
    /// Of a dry run only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Outlook>,
}

/// Nothing more will come for an episode.
///
/// Where its surface has `close_on_episode_end`, what is open closes then. Of several ends of one episode the earliest counts.
/// A source says it once: said again, with whatever time, it is the same event.
#[utoipa::path(
    post,
    path = "/v1/episode-ends",
    tag = "events",
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
    principal.require(&[Role::Serving, Role::Research])?;
    let request: EpisodeEndRequest = body::read_feedback(&text)?;
    let episode_id = request.episode_id;
    let source = request.source.unwrap_or_else(|| SOURCE.to_owned());
    let time = request.time.unwrap_or_else(event::now);
    let event = EpisodeEnd { episode_id }.into_event(principal.tenant, source, time);
    let (_, dryrun) = api.take_one(event, options.dryrun).await?;
    Ok(Answer(AcceptedEpisodeEnd { episode_id, dryrun }))
}
