//! `POST /v1/generations`: one generation, for engines that do not write to the log themselves.

use axum::Json as Answer;
use axum::extract::State;
use edge::auth::{Principal, Scope};
use edge::problem::Problem;
use edge::query::Query;
use event_log::event::{self, Generation};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;
use uuid::Uuid;

use super::answer::{Preview, Refusal};
use super::body::{self, JsonText};
use super::dryrun;
use super::idempotency::IdempotencyKey;
use super::{Api, SOURCE};

/// The members of the request that are not the generation's. A second pass reads them, because
/// flattening both into one struct would buffer every token.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = GenerationEnvelope)]
struct Envelope {
    /// When the last token was sampled. Absent: now.
    #[serde(default, with = "time::serde::rfc3339::option")]
    time: Option<OffsetDateTime>,
    /// The producer. Absent: `springtide/api`.
    source: Option<String>,
    /// Check and join without writing anything, like the query parameter.
    #[serde(default)]
    dryrun: bool,
}

#[derive(ToSchema)]
#[schema(as = GenerationRequest)]
#[expect(dead_code, reason = "only its schema is used")]
struct Request {
    #[serde(flatten)]
    generation: Generation,
    #[serde(flatten)]
    envelope: Envelope,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedGeneration)]
pub(super) struct Accepted {
    generation_id: Uuid,
    /// In dry runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    dryrun: Option<Preview>,
}

/// Send a generation.
///
/// Its `generation_id` is the event's identity. An `Idempotency-Key` is checked but has no effect.
#[utoipa::path(
    post,
    path = "/v1/generations",
    tag = "events",
    security(("bearer" = ["generations"]), ()),
    params(
        dryrun::Options,
        (
            "Idempotency-Key" = Option<String>,
            Header,
            description = "checked, but without effect; printable ASCII",
            min_length = 1,
            max_length = 255
        )
    ),
    request_body = Request,
    responses((status = 200, description = "acknowledged by the log", body = Accepted), Refusal)
)]
pub(super) async fn generation(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    _: IdempotencyKey,
    JsonText(text): JsonText,
) -> Result<Answer<Accepted>, Problem> {
    principal.require(Scope::Generations)?;
    let generation: Generation = body::read(&text)?;
    let envelope: Envelope = body::read(&text)?;
    let generation_id = generation.id;
    if generation.proof.is_some() && envelope.time.is_none() {
        return Err(Problem::bad_request(
            "a proof covers the event's time: send the signed `time` too",
        ));
    }
    let source = envelope.source.unwrap_or_else(|| SOURCE.to_owned());
    let mut event = generation.into_event(principal.tenant, source);
    event.time = event::to_microseconds(envelope.time.unwrap_or(api.now()));
    let (_, dryrun) = api.take_one(event, options.dryrun || envelope.dryrun).await?;
    Ok(Answer(Accepted { generation_id, dryrun }))
}
