//! Prepares request bodies for the handlers: limits their time, decompresses them, and holds them
//! within the process's budget ([`edge::intake`]).

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use edge::problem::Problem;
use http_body_util::Limited;
use tower_http::decompression::RequestDecompressionLayer;

use crate::options::Options;

const ENCODINGS: &str = "gzip, zstd";

#[derive(Debug, Clone)]
pub(super) struct Intake {
    held: edge::intake::Intake,
    bytes_max: usize,
    read_timeout: Duration,
}

impl Intake {
    pub(super) fn new(options: &Options) -> Self {
        let bytes_max = options.request_bytes_max;
        Self {
            held: edge::intake::Intake::new(options.in_flight_bytes_max, options.tenant_share_max, bytes_max),
            bytes_max,
            read_timeout: Duration::from_secs_f64(options.request_read_seconds_max),
        }
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn held_bytes(&self) -> usize {
        self.held.held_bytes()
    }

    /// Applies to every route of `router`. Needs a [`Principal`](edge::auth::Principal).
    pub(super) fn guard(self, router: Router) -> Router {
        let Self {
            held,
            bytes_max,
            read_timeout,
        } = self;
        // Bodies are complete and limited when they reach the extractors.
        held.guard(router.layer(DefaultBodyLimit::disable()))
            .layer(RequestDecompressionLayer::new())
            .layer(middleware::from_fn_with_state(bytes_max, limit))
            .layer(middleware::from_fn(move |request: Request, next: Next| {
                edge::server::in_time(request, next, read_timeout)
            }))
    }
}

/// Runs before decompression. Refuses unknown encodings and limits the compressed bytes, because a
/// compressed stream that decompresses to nothing could be endless.
async fn limit(State(bytes_max): State<usize>, request: Request, next: Next) -> Response {
    if let Err(problem) = known_encoding(request.headers()) {
        let mut response = problem.into_response();
        let headers = response.headers_mut();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(ENCODINGS));
        return response;
    }
    let limited = request.map(|body| Body::new(Limited::new(body, bytes_max)));
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

#[cfg(test)]
mod tests;
