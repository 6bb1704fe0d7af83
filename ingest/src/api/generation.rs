//! `POST /v1/generations`: one generation of an engine that does not write to the log itself.

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
use super::idempotency::IdempotencyKey;
use super::openapi::{GenerationRequest, Refusal};
use super::query::Query;
use super::{Api, SOURCE};
use crate::event::{self, Generation};

/// What stands beside the generation's own fields, in the same object. Read by a second pass: one that flattens both into
/// one struct would buffer every token.
#[derive(Debug, Deserialize)]
struct Beside {
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    source: Option<String>,
    #[serde(default)]
    dryrun: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedGeneration)]
pub(super) struct Accepted {
    generation_id: Uuid,
    /// Of a dry run only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Outlook>,
}

/// One generation.
///
/// Its `generation_id` is its identity; an `Idempotency-Key` is checked for its form and adds nothing.
#[utoipa::path(
    post,
    path = "/v1/generations",
    tag = "events",
    params(dryrun::Options, IdempotencyKey),
    request_body = GenerationRequest,
    responses((status = 200, description = "acknowledged by the log", body = Accepted), Refusal)
)]
pub(super) async fn generation(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    _: IdempotencyKey,
    JsonText(text): JsonText,
) -> Result<Answer<Accepted>, Problem> {
    principal.require(&[Role::Serving])?;
    let generation: Generation = body::read(&text)?;
    let beside: Beside = body::read(&text)?;
    let generation_id = generation.id;
    let source = beside.source.unwrap_or_else(|| SOURCE.to_owned());
    let mut event = generation.into_event(principal.tenant, source);
    if let Some(time) = beside.time {
        event.time = event::to_microseconds(time);
    }
    let (_, dryrun) = api.take_one(event, options.dryrun || beside.dryrun).await?;
    Ok(Answer(Accepted { generation_id, dryrun }))
}
