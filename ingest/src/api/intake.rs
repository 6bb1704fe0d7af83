//! What every request with a body passes before its handler: its encoding undone, its size limited while it arrives, its
//! bytes taken from the process's budget until it is answered. A handler finds the whole body in memory.

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
use crate::options::Options;

/// What a request is counted with beside its body, so that the number of requests in flight is bounded too.
pub(crate) const REQUEST_BYTES: usize = 4 * 1024;
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
    pub(super) fn held(&self) -> usize {
        self.budget.held()
    }

    /// Puts every route of `router` behind it. Needs a [`Principal`].
    pub(super) fn guard(self, router: Router) -> Router {
        router
            // The bodies that reach it are whole and limited already.
            .layer(DefaultBodyLimit::disable())
            .layer(middleware::from_fn_with_state(self.clone(), hold))
            .layer(RequestDecompressionLayer::new())
            .layer(middleware::from_fn_with_state(self, limit))
    }
}

/// Before decompression: only encodings that are known, and no more compressed bytes than plain ones. Without the second,
/// a stream that decompresses to nothing could be endless.
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
        // One inside the other is how bombs grow.
        (Some(_), Some(_)) => false,
    };
    if known {
        return Ok(());
    }
    Err(Problem::unsupported_media_type(format!(
        "Content-Encoding is none, or one of {ENCODINGS}"
    )))
}

/// After decompression: reads the body within size, time and budget, and holds what it took until the answer is there.
async fn hold(State(intake): State<Intake>, request: Request, next: Next) -> Result<Response, Problem> {
    let tenant = request
        .extensions()
        .get::<Principal>()
        .map(|principal| principal.tenant.clone());
    let tenant = tenant.ok_or_else(|| Problem::internal("a route that needs a caller is not protected"))?;
    let (parts, body) = request.into_parts();
    let mut permit = intake.budget.reserve(&tenant, REQUEST_BYTES).map_err(|_| busy())?;
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
    // Told by honest clients, and taken away by decompression: the sooner it is refused the better.
    let told = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    let told: usize = told.unwrap_or(0);
    if told > bytes_max {
        return Err(too_large());
    }
    permit.grow(told).map_err(|_| busy())?;
    let mut held = told;
    let mut bytes = Vec::with_capacity(told);
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

/// `None`: longer than allowed, before decompression.
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
    Problem::too_many(
        "too many bytes of requests are in flight; send the same request again",
        1,
    )
}

fn too_slow(limit: Duration) -> Problem {
    Problem::new(
        StatusCode::REQUEST_TIMEOUT,
        "too-slow",
        "The request took too long to arrive",
    )
    .detail(format!("the body was not complete after {limit:?}"))
}

#[cfg(test)]
mod tests;
