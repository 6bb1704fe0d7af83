//! `PUT /v1/payloads/{digest}`: the bytes of a payload, for producers that do not reach the object store themselves. Before the
//! event that names them: an event whose payload is not there is refused.

use std::time::Duration;

use axum::Json as Answer;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use edge::auth::{Principal, Role};
use edge::problem::Problem;
use futures::StreamExt;
use futures::stream;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;
use super::accept::invalid;
use super::body;
use super::openapi::Refusal;
use crate::event::{Body, Event, Invalid, PayloadRef};
use crate::payload::{self, Store};

/// How long the look for a payload may take; the log is asked all the same.
const LOOK_UP_TIMEOUT: Duration = Duration::from_millis(500);
/// Payloads of one request that are looked for at once.
const LOOKS_MAX: usize = 16;

/// What an event says of it, beside its media type.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Stored {
    /// BLAKE3, 64 hexadecimal digits.
    digest: String,
    size_bytes: u64,
}

/// The bytes of a payload.
///
/// Under the BLAKE3 of the bytes, in lower case. The same again is harmless. At most `ingest.request_bytes_max`; longer ones are
/// written to the object store.
#[utoipa::path(
    put,
    path = "/v1/payloads/{digest}",
    tag = "events",
    params(("digest" = String, Path, description = "BLAKE3 of the bytes, 64 hexadecimal digits", pattern = "^[0-9a-f]{64}$")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "in the object store", body = Stored), Refusal)
)]
pub(super) async fn payload(
    State(api): State<Api>,
    principal: Principal,
    Path(digest): Path<String>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Result<Answer<Stored>, Problem> {
    principal.require(&[Role::Serving])?;
    if body::media_type(&headers).as_deref() != Some("application/octet-stream") {
        let detail = "send bytes as content-type: application/octet-stream; what they are is said by the event";
        return Err(Problem::unsupported_media_type(detail));
    }
    let Some(store) = &api.payloads else {
        return Err(Problem::not_implemented(
            "no object store for payloads is configured here (ingest.payload_store); a collector has none",
        ));
    };
    if bytes.is_empty() {
        return Err(invalid(&Invalid::new("payload", "has no bytes")));
    }
    let payload = PayloadRef::of(&bytes, "");
    let named = hex::encode(payload.digest);
    if named != digest {
        return Err(invalid(&Invalid::new(
            "digest",
            format!("the bytes have the digest {named}"),
        )));
    }
    let size_bytes = payload.size_bytes;
    store.put(&principal.tenant, bytes, "").await.map_err(|error| {
        tracing::warn!(error = %error, cause = ?std::error::Error::source(&error), "payload not stored");
        Problem::unavailable("the object store did not take it; send the same again", 1)
    })?;
    Ok(Answer(Stored { digest, size_bytes }))
}

/// Refuses events whose payloads are known not to be there. Not finding out in time counts as not knowing: readers find out.
pub(super) async fn look(store: Option<&Store>, events: Vec<Result<Event, Problem>>) -> Vec<Result<Event, Problem>> {
    let refers = |event: &Event| matches!(&event.body, Body::Generation(body) if body.payload.is_some() || body.experts.is_some());
    let Some(store) = store.filter(|_| events.iter().flatten().any(refers)) else {
        return events;
    };
    let looks = events.into_iter().map(|event| async {
        let event = event?;
        if let Body::Generation(generation) = &event.body {
            for (field, payload) in [("payload", &generation.payload), ("experts", &generation.experts)] {
                if let Some(payload) = payload {
                    there(store, &event.tenant, field, payload).await?;
                }
            }
        }
        Ok(event)
    });
    stream::iter(looks).buffered(LOOKS_MAX).collect().await
}

async fn there(store: &Store, tenant: &str, field: &'static str, payload: &PayloadRef) -> Result<(), Problem> {
    let found = match tokio::time::timeout(LOOK_UP_TIMEOUT, store.look(tenant, payload)).await {
        Ok(found) => found,
        Err(_) => return Ok(()),
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
            tracing::warn!(%error, "payloads cannot be looked for");
            Ok(())
        }
    }
}
