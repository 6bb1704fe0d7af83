//! `POST /v1/events`: CloudEvents, one in structured or binary mode, or a batch of them.

use axum::Json as Answer;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use edge::auth::Principal;
use edge::problem::Problem;
use edge::query::Query;
use event_log::event::{self, Body, Event};
use serde_json::value::RawValue;
use time::OffsetDateTime;

use super::answer::{AcceptedEvent, AcceptedEvents, Outcomes, Refusal, invalid};
use super::{Api, batch, body, dryrun};
use crate::entry::cloudevents::{self, Data, Envelope, Kind, Structured};

const STRUCTURED: &str = "application/cloudevents+json";
const BATCHED: &str = "application/cloudevents-batch+json";

/// Send CloudEvents 1.0.
///
/// `application/cloudevents+json` is one event. `application/cloudevents-batch+json` is an array of
/// events, answered like `/v1/events:batch`. With `ce-` headers, the body is the data of one event.
#[utoipa::path(
    post,
    path = "/v1/events",
    tag = "events",
    security(("bearer" = ["feedback"]), ("bearer" = ["generations"]), ()),
    params(
        dryrun::Options,
        ("ce-specversion" = Option<String>, Header, description = "binary mode: 1.0; the other modes ignore `ce-` headers"),
        ("ce-type" = Option<String>, Header, description = "binary mode: the kind of the event, like `type`"),
        ("ce-source" = Option<String>, Header, description = "binary mode: the producer"),
        ("ce-id" = Option<String>, Header, description = "binary mode: unique within the source"),
        ("ce-time" = Option<String>, Header, description = "binary mode: when it happened, RFC 3339; absent: now"),
    ),
    request_body(content(
        (Structured = "application/cloudevents+json"),
        (Vec<Structured> = "application/cloudevents-batch+json"),
        (Data = "application/json"),
    )),
    responses(
        (status = 200, description = "acknowledged by the log; for a batch, a result for each event", body = AcceptedEvents),
        (status = 207, description = "batch: some events will never be accepted, the others are acknowledged", body = Outcomes),
        Refusal
    )
)]
pub(super) async fn events(
    State(api): State<Api>,
    principal: Principal,
    Query(options): Query<dryrun::Options>,
    headers: HeaderMap,
    text: Bytes,
) -> Result<Response, Problem> {
    let tenant = &principal.tenant;
    let event = match body::media_type(&headers).as_deref() {
        Some(BATCHED) => {
            let items: Vec<&RawValue> = body::read_items(&text, api.events_max)?;
            let events = items
                .iter()
                .map(|item| structured(item.get().as_bytes(), tenant, api.now()));
            return batch::take(&api, &principal, options, &text, events.collect()).await;
        }
        Some(STRUCTURED) => structured(&text, tenant, api.now())?,
        _ if headers.contains_key("ce-specversion") => {
            let header = |name: &str| headers.get(name).map(|value| value.as_bytes());
            let envelope = cloudevents::binary(header, &text).map_err(|error| invalid(&error))?;
            canonical(envelope, tenant, api.now())?
        }
        _ => {
            return Err(Problem::unsupported_media_type(format!(
                "send content-type {STRUCTURED} or {BATCHED}, or ce- headers with application/json; \
                 send canonical events to /v1/events:batch"
            )));
        }
    };
    let event = batch::allowed(&principal, event)?;
    let (event, dryrun) = api.take_one(event, options.dryrun).await?;
    let (source, id) = (event.source, event.id);
    Ok(Answer(AcceptedEvent { source, id, dryrun }).into_response())
}

fn structured(text: &[u8], tenant: &str, now: OffsetDateTime) -> Result<Event, Problem> {
    let event: Structured<'_> = body::read(text)?;
    let envelope = Envelope::try_from(event).map_err(|error| invalid(&error))?;
    canonical(envelope, tenant, now)
}

fn canonical(envelope: Envelope<'_>, tenant: &str, now: OffsetDateTime) -> Result<Event, Problem> {
    let body = match envelope.kind {
        Kind::Generation => Body::Generation(body::read(envelope.data)?),
        Kind::Feedback => Body::Feedback(body::read_short(envelope.data)?),
        Kind::Retraction => Body::Retraction(body::read_short(envelope.data)?),
        Kind::EpisodeEnd => Body::EpisodeEnd(body::read_short(envelope.data)?),
    };
    Ok(Event {
        tenant: tenant.to_owned(),
        source: envelope.source,
        id: envelope.id,
        time: event::to_microseconds(envelope.time.unwrap_or(now)),
        teacher: None,
        body,
    })
}
