//! The HTTP server loop: tracing spans, metrics and graceful shutdown. The caller binds the
//! listener.
//!
//! A panic in a handler becomes a 500 problem document; the process keeps running.

use std::any::Any;
use std::future::IntoFuture;
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument;

use crate::problem::Problem;
use crate::trace;

/// How long open requests may still take after a shutdown was requested.
const DRAIN_SECONDS_MAX: u64 = 20;

/// Serves `router` until `shutdown`, then accepts no connections and waits up to 20 s for open
/// requests.
pub async fn run(listener: TcpListener, router: Router, shutdown: CancellationToken) -> anyhow::Result<()> {
    let address = listener.local_addr().context("read listening address")?;
    let router = with_problems(router)
        .layer(CatchPanicLayer::custom(on_panic))
        .layer(middleware::from_fn(observe));
    tracing::info!(%address, "listening");
    let served = axum::serve(listener, router)
        .with_graceful_shutdown(shutdown.clone().cancelled_owned())
        .into_future();
    let drain_timeout = async {
        shutdown.cancelled().await;
        tokio::time::sleep(Duration::from_secs(DRAIN_SECONDS_MAX)).await;
    };
    tokio::select! {
        result = served => result.context("serve HTTP"),
        () = drain_timeout => {
            tracing::warn!(%address, seconds = DRAIN_SECONDS_MAX, "stopped with requests still open");
            Ok(())
        }
    }
}

/// Adds problem documents for unknown paths (404) and methods (405, with axum's `Allow`). Neither
/// needs an API key.
pub fn with_problems(router: Router) -> Router {
    router
        .fallback(|| async { Problem::not_found("unknown path") })
        .method_not_allowed_fallback(|| async {
            Problem::method_not_allowed("the path does not support this method; see the Allow header")
        })
}

/// Opens a span under the caller's trace and records two metrics per route.
async fn observe(request: Request, next: Next) -> Response {
    let method = request.method().as_str().to_owned();
    // Only known routes become label values, which bounds their number.
    let route = match request.extensions().get::<MatchedPath>() {
        Some(path) => path.as_str().to_owned(),
        None => "unknown".to_owned(),
    };
    let span = tracing::info_span!(
        "http.request",
        otel.name = format!("{method} {route}"),
        otel.kind = "server",
        http.request.method = method,
        http.route = route,
        http.response.status_code = tracing::field::Empty,
    );
    trace::set_parent(&span, trace::extract_http(request.headers()));
    let started = Instant::now();
    let response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    span.record("http.response.status_code", status);
    let labels = [("route", route), ("method", method)];
    metrics::histogram!("springtide_http_request_seconds", &labels).record(started.elapsed().as_secs_f64());
    let [route, method] = labels;
    metrics::counter!(
        "springtide_http_requests_total",
        &[route, method, ("status", status.to_string())]
    )
    .increment(1);
    response
}

#[expect(clippy::needless_pass_by_value, reason = "the signature that CatchPanicLayer needs")]
fn on_panic(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<&str>().copied();
    let message = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let message = message.unwrap_or("no message");
    Problem::internal(format_args!("a handler panicked: {message}")).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::StatusCode;
    use axum::routing::get;
    use tower::ServiceExt;

    #[tokio::test]
    async fn a_panicking_handler_returns_a_500_problem() {
        async fn handler() -> &'static str {
            panic!("on purpose")
        }
        let router = Router::new()
            .route("/", get(handler))
            .layer(CatchPanicLayer::custom(on_panic));
        let request = Request::builder().uri("/").body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }

    #[tokio::test]
    async fn an_open_request_finishes_after_a_shutdown() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let router = Router::new().route(
            "/",
            get(move || async move {
                stop.cancel();
                tokio::time::sleep(Duration::from_millis(100)).await;
                "done"
            }),
        );
        let server = tokio::spawn(run(listener, router, shutdown));
        let answer = tokio::task::spawn_blocking(move || {
            use std::io::{Read, Write};
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream
                .write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                .unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        })
        .await
        .unwrap();
        assert!(answer.ends_with("done"), "{answer}");
        server.await.unwrap().unwrap();
    }
}
