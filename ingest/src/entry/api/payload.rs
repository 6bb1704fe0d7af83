//! `PUT /v1/payloads/{digest}`: uploads a payload, for producers that cannot reach the object
//! store.
//!
//! Upload a payload before the event that names it: events whose payload is missing are refused.

use std::time::Duration;

use axum::Json as Answer;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use edge::auth::{Principal, Scope};
use edge::path::Path;
use edge::problem::Problem;
use event_log::event::{Body, Event, Invalid, PayloadRef};
use event_log::payload::{self, Store};
use futures::StreamExt;
use futures::stream;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;
use super::answer::{NoSuchPath, Refusal, invalid};
use super::body;

/// How long checking a payload may take. After that the event is accepted unchecked.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Concurrent checks of one request.
const CHECKS_MAX: usize = 16;

/// What an event names, together with the media type.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Stored {
    /// BLAKE3, 64 hexadecimal digits.
    digest: String,
    size_bytes: u64,
}

/// Upload a payload.
///
/// `digest` is the BLAKE3 of the bytes in lower case. Repeating an upload is harmless. At most
/// `ingest.request_bytes_max` bytes; write larger payloads to the object store.
#[utoipa::path(
    put,
    path = "/v1/payloads/{digest}",
    tag = "events",
    security(("bearer" = ["generations"]), ()),
    params(("digest" = String, Path, description = "BLAKE3 of the bytes, 64 hexadecimal digits", pattern = "^[0-9a-f]{64}$")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 200, description = "stored", body = Stored),
        (status = 404, response = NoSuchPath),
        Refusal
    )
)]
pub(super) async fn payload(
    State(api): State<Api>,
    principal: Principal,
    Path(digest): Path<String>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Answer<Stored>, Problem> {
    principal.require(Scope::Generations)?;
    if body::media_type(&headers).as_deref() != Some("application/octet-stream") {
        let detail = "send content-type: application/octet-stream; the event names the payload's media type";
        return Err(Problem::unsupported_media_type(detail));
    }
    let Some(store) = &api.payloads else {
        return Err(Problem::not_implemented(
            "no payload store is configured (ingest.payload_store); collectors have none",
        ));
    };
    if bytes.is_empty() {
        return Err(invalid(&Invalid::new("payload", "is empty")));
    }
    let payload = PayloadRef::of(&bytes, "");
    let named = hex::encode(payload.digest);
    if named != digest {
        return Err(invalid(&Invalid::new(
            "digest",
            format!("does not match: the BLAKE3 of the bytes is {named}"),
        )));
    }
    let size_bytes = payload.size_bytes;
    store.put(&principal.tenant, bytes, "").await.map_err(|error| {
        tracing::warn!(error = %error, cause = ?std::error::Error::source(&error), "cannot store payload");
        Problem::unavailable("the object store did not accept the payload; send it again", 1)
    })?;
    Ok(Answer(Stored { digest, size_bytes }))
}

/// Refuses events whose payloads are missing. Events whose check fails or times out pass; readers
/// check again.
pub(super) async fn check_stored(
    store: Option<&Store>,
    mut events: Vec<Result<Event, Problem>>,
) -> Vec<Result<Event, Problem>> {
    let Some(store) = store else { return events };
    let checks: Vec<_> = events
        .iter()
        .enumerate()
        .filter_map(|(index, event)| {
            let event = event.as_ref().ok()?;
            let Body::Generation(generation) = &event.body else {
                return None;
            };
            let payloads = [("payload", &generation.payload), ("experts", &generation.experts)];
            let named = payloads.iter().any(|(_, payload)| payload.is_some());
            named.then_some(async move {
                check_all(store, &event.tenant, payloads)
                    .await
                    .map_err(|why| (index, why))
            })
        })
        .collect();
    let checked: Vec<_> = stream::iter(checks).buffered(CHECKS_MAX).collect().await;
    for (index, problem) in checked.into_iter().filter_map(Result::err) {
        events[index] = Err(problem);
    }
    events
}

async fn check_all(
    store: &Store,
    tenant: &str,
    payloads: [(&'static str, &Option<PayloadRef>); 2],
) -> Result<(), Problem> {
    for (field, payload) in payloads {
        if let Some(payload) = payload {
            check_one(store, tenant, field, payload).await?;
        }
    }
    Ok(())
}

async fn check_one(store: &Store, tenant: &str, field: &'static str, payload: &PayloadRef) -> Result<(), Problem> {
    let Ok(found) = tokio::time::timeout(CHECK_TIMEOUT, store.check_exists(tenant, payload)).await else {
        return Ok(());
    };
    match found {
        Ok(()) => Ok(()),
        Err(error @ (payload::Error::Missing | payload::Error::Differs(_))) => Err(invalid(&Invalid::new(
            field,
            format!(
                "{error}; send its bytes first: PUT /v1/payloads/{}",
                hex::encode(payload.digest)
            ),
        ))),
        Err(error) => {
            tracing::warn!(%error, "cannot check payload");
            Ok(())
        }
    }
}
