//! Reads request bodies before the handlers see them: decompresses, limits size and time, and
//! counts the bytes against the process's budget until the request is answered. Handlers get the
//! whole body in memory.

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use edge::auth::Principal;
use edge::problem::Problem;
use futures::StreamExt;
use http_body_util::{LengthLimitError, Limited};
use tower_http::decompression::RequestDecompressionLayer;

use super::budget::{Budget, Permit};
use crate::options::{Options, REQUEST_BYTES};

const ENCODINGS: &str = "gzip, zstd";

#[derive(Debug, Clone)]
pub(super) struct Intake {
    budget: Budget,
    bytes_max: usize,
    read_timeout: Duration,
}

impl Intake {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            budget: Budget::new(options.in_flight_bytes_max, options.tenant_share_max),
            bytes_max: options.request_bytes_max,
            read_timeout: Duration::from_secs_f64(options.request_read_seconds_max),
        }
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn held_bytes(&self) -> usize {
        self.budget.held_bytes()
    }

    /// Applies to every route of `router`. Needs a [`Principal`].
    pub(super) fn guard(self, router: Router) -> Router {
        router
            // Bodies are complete and limited when they reach the extractors.
            .layer(DefaultBodyLimit::disable())
            .layer(middleware::from_fn_with_state(self.clone(), hold))
            .layer(RequestDecompressionLayer::new())
            .layer(middleware::from_fn_with_state(self, limit))
    }
}

/// Runs before decompression. Refuses unknown encodings and limits the compressed bytes, because a
/// compressed stream that decompresses to nothing could be endless.
async fn limit(State(intake): State<Intake>, request: Request, next: Next) -> Response {
    if let Err(problem) = known_encoding(request.headers()) {
        let mut response = problem.into_response();
        let headers = response.headers_mut();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(ENCODINGS));
        return response;
    }
    let limited = request.map(|body| Body::new(Limited::new(body, intake.bytes_max)));
    next.run(limited).await
}

fn known_encoding(headers: &HeaderMap) -> Result<(), Problem> {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let known = match (encodings.next(), encodings.next()) {
        (None, _) => true,
        (Some(encoding), None) => [&b"gzip"[..], b"zstd", b"identity"].contains(&encoding.as_bytes()),
        // Nested encodings make decompression bombs larger.
        (Some(_), Some(_)) => false,
    };
    if known {
        return Ok(());
    }
    Err(Problem::unsupported_media_type(format!(
        "Content-Encoding must be absent or one of {ENCODINGS}"
    )))
}

/// Runs after decompression. Reads the body within the limits and keeps its permit until the
/// request is answered.
async fn hold(State(intake): State<Intake>, request: Request, next: Next) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let principal = parts.extensions.get::<Principal>();
    let principal = principal.ok_or_else(|| Problem::internal("the route is not behind Auth::protect"))?;
    let key = principal.key.map(|key| key.id);
    let reserved = intake.budget.reserve(&principal.tenant, key, REQUEST_BYTES);
    let mut permit = reserved.map_err(|_| busy())?;
    let bytes = tokio::time::timeout(
        intake.read_timeout,
        read(body, &parts.headers, intake.bytes_max, &mut permit),
    );
    let bytes = bytes.await.map_err(|_| too_slow(intake.read_timeout))??;
    let response = next.run(Request::from_parts(parts, Body::from(bytes))).await;
    drop(permit);
    Ok(response)
}

async fn read(body: Body, headers: &HeaderMap, bytes_max: usize, permit: &mut Permit) -> Result<Bytes, Problem> {
    let too_large = || Problem::too_large(format!("the body is larger than {bytes_max} bytes"));
    // Refuses early if the client declares the length. Decompression removes the header.
    let declared = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    let declared_len: usize = declared.unwrap_or(0);
    if declared_len > bytes_max {
        return Err(too_large());
    }
    permit.grow(declared_len).map_err(|_| busy())?;
    let mut held = declared_len;
    let mut bytes = Vec::with_capacity(declared_len);
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| unreadable(&error).unwrap_or_else(too_large))?;
        let length = bytes.len() + chunk.len();
        if length > bytes_max {
            return Err(too_large());
        }
        if length > held {
            permit.grow(length - held).map_err(|_| busy())?;
            held = length;
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

/// `None`: the compressed body exceeds the limit.
fn unreadable(error: &axum::Error) -> Option<Problem> {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return None;
        }
        cause = error.source();
    }
    Some(Problem::bad_request(format!("the body cannot be read: {error}")))
}

fn busy() -> Problem {
    Problem::too_many("too many request bytes are in flight; send the same request again", 1)
}

fn too_slow(limit: Duration) -> Problem {
    let title = "The request body took too long to arrive";
    Problem::new(StatusCode::REQUEST_TIMEOUT, "too-slow", title)
        .detail(format!("the body was not complete after {limit:?}"))
}

#[cfg(test)]
mod tests;
