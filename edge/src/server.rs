//! The HTTP server: TLS, limits on connections, tracing spans, metrics and graceful shutdown. The
//! caller binds the listener.
//!
//! ```text
//! accept ─► room ─► TLS handshake ─► header ─► body ─► handler ─► response ─► next header …
//!           cap      head            head     body    no limit   write       idle
//! ```
//! The second line names the field of [`Limits`] that ends a step. When all connections are taken,
//! the one that has waited longest for its client is closed: for a request, for its body, or for the
//! client to take a response. So a client that sends or takes nothing, or does so slowly, never keeps others
//! out.
//!
//! A panic in a handler becomes a 500 problem document; the process keeps running.

mod body;
mod connection;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::Version;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use nix::sys::socket::Backlog;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument;

pub use self::body::in_time;
use self::body::{Received, Sent};
use self::connection::{Connections, Slot, Watched};
use crate::auth::Guesses;
use crate::host::Hosts;
use crate::problem::Problem;
use crate::tls::{self, Stream};
use crate::trace;

/// Where a role says whether it is ready.
const HEALTH: &str = "/health";
/// Pause after the process could not accept a connection, for example without file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Largest header of an HTTP/1 request; also how much of a body is read ahead.
const HTTP1_BUFFER_BYTES_MAX: usize = 64 << 10;
const HTTP1_HEADERS_MAX: usize = 100;
/// Requests that one HTTP/2 connection may have open.
const HTTP2_STREAMS_MAX: u32 = 128;
const HTTP2_HEADER_BYTES_MAX: u32 = 32 << 10;
const HTTP2_STREAM_WINDOW_BYTES: u32 = 256 << 10;
const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
const HTTP2_SEND_BUFFER_BYTES_MAX: usize = 128 << 10;
/// A client that does not answer an HTTP/2 ping within this time is gone.
const HTTP2_PING: Duration = Duration::from_secs(20);

/// What clients of one listener may take. [`Limits::head`] is the shortest of the times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Open connections. Default: 4096.
    pub connections_max: usize,
    /// For the TLS handshake, and for each request's header. Default: 10 s.
    pub head: Duration,
    /// From a request's header to the end of its body. Default: 60 s.
    pub body: Duration,
    /// How long a client may take nothing of a response that is ready. Each KiB that it takes is
    /// worth a second. Default: 60 s.
    pub write: Duration,
    /// Between two requests of a connection, counted like `write`. Default: 75 s.
    pub idle: Duration,
    /// After a shutdown was requested: how long `/health` answers 503 while everything else goes on, so
    /// that whoever sends requests here stops doing so first. Default: 0.
    pub unready: Duration,
    /// Then, how long open requests may still take. Default: 20 s.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            head: Duration::from_secs(10),
            body: Duration::from_secs(60),
            write: Duration::from_secs(60),
            idle: Duration::from_secs(75),
            unready: Duration::ZERO,
            drain: Duration::from_secs(20),
        }
    }
}

/// A bound address, and who may connect to it how.
pub struct Listener {
    tcp: TcpListener,
    limits: Limits,
    tls: Option<Arc<tls::Acceptor>>,
    hosts: Option<Arc<Hosts>>,
}

impl Listener {
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Speaks only TLS.
    #[must_use]
    pub fn tls(mut self, acceptor: tls::Acceptor) -> Self {
        self.tls = Some(Arc::new(acceptor));
        self
    }

    /// Answers only requests to `hosts`, and none that another site's page makes in a browser. For
    /// roles that need no key.
    #[must_use]
    pub fn only_for(mut self, hosts: Hosts) -> Self {
        self.hosts = Some(Arc::new(hosts));
        self
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// The base URL of this address.
    pub fn url(&self) -> io::Result<String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        Ok(format!("{scheme}://{}", self.local_addr()?))
    }
}

impl From<TcpListener> for Listener {
    fn from(tcp: TcpListener) -> Self {
        Self {
            tcp,
            limits: Limits::default(),
            tls: None,
            hosts: None,
        }
    }
}

/// Serves `router` until `shutdown`. Then its health is 503 for [`Limits::unready`]; after that it accepts
/// no connections and waits up to [`Limits::drain`] for open requests. Connections that are still open
/// then, or when the future is dropped, are cut.
pub async fn run(listener: Listener, router: Router, shutdown: CancellationToken) -> anyhow::Result<()> {
    let connections = Connections::new(listener.limits.connections_max);
    run_with(listener, router, shutdown, connections).await
}

async fn run_with(
    listener: Listener,
    router: Router,
    shutdown: CancellationToken,
    connections: Connections,
) -> anyhow::Result<()> {
    let Listener {
        tcp,
        limits,
        tls,
        hosts,
    } = listener;
    let address = tcp.local_addr().context("read listening address")?;
    // As long a queue as the kernel allows. When it is full, a client is heard a second later.
    nix::sys::socket::listen(&tcp, Backlog::MAXALLOWABLE).context("lengthen the queue of new connections")?;
    let router = with_layers(with_problems(router), limits, hosts, shutdown.clone());
    let stop = CancellationToken::new();
    let cut = CancellationToken::new();
    let _cut = cut.clone().drop_guard();
    if let Some(tls) = tls.clone() {
        tokio::spawn(
            cut.clone()
                .run_until_cancelled_owned(async move { tls.follow_files().await }),
        );
    }
    tracing::info!(%address, tls = tls.is_some(), connections_max = limits.connections_max, "listening");

    let tasks = TaskTracker::new();
    let accept = async {
        loop {
            let tcp = match tcp.accept().await {
                Ok((tcp, _)) => tcp,
                Err(error) => {
                    not_accepted(&error, &connections).await;
                    continue;
                }
            };
            let slot = connections.room().await;
            let served = serve(tcp, slot, tls.clone(), router.clone(), limits, stop.clone());
            let cut = cut.clone();
            tasks.spawn(async move { cut.run_until_cancelled(served).await });
        }
    };
    let leave = async {
        shutdown.cancelled().await;
        tokio::time::sleep(limits.unready).await;
    };
    tokio::select! {
        () = leave => {}
        () = accept => {}
    }
    stop.cancel();
    drop(tcp);
    tasks.close();
    let drained = tokio::time::timeout(limits.drain, tasks.wait());
    if drained.await.is_err() {
        tracing::warn!(%address, seconds = limits.drain.as_secs_f64(), "stopped with requests still open");
    }
    Ok(())
}

/// Serves one connection to its end.
async fn serve(
    tcp: TcpStream,
    slot: Slot,
    tls: Option<Arc<tls::Acceptor>>,
    router: Router,
    limits: Limits,
    shutdown: CancellationToken,
) {
    let served = async {
        match tokio::time::timeout(limits.head, stream(tcp, tls.as_deref())).await {
            Err(_) => Some("slow_handshake"),
            Ok(Err(error)) => {
                tracing::debug!(error = %format!("{error:#}"), "a connection was refused");
                Some("handshake")
            }
            Ok(Ok(stream)) => http(stream, &slot, router, limits, &shutdown).await,
        }
    };
    tokio::pin!(served);
    let why = loop {
        tokio::select! {
            // first, so that a request that has just arrived is seen
            biased;
            why = &mut served => break why,
            () = slot.connection.evicted() => match slot.connection.waiting_since() {
                Some(_) => break Some("room_for_others"),
                None => slot.keep(),
            },
        }
    };
    if let Some(why) = why {
        metrics::counter!("springtide_http_connections_cut_total", "reason" => why).increment(1);
    }
}

async fn stream(tcp: TcpStream, tls: Option<&tls::Acceptor>) -> anyhow::Result<Stream> {
    tcp.set_nodelay(true).context("send small answers at once")?;
    match tls {
        None => Ok(Stream::Plain(tcp)),
        Some(tls) => tls.accept(tcp).await,
    }
}

/// Why the connection was cut, or `None` if it ended otherwise.
async fn http(
    stream: Stream,
    slot: &Slot,
    router: Router,
    limits: Limits,
    shutdown: &CancellationToken,
) -> Option<&'static str> {
    let connection = slot.connection.clone();
    let io = TokioIo::new(Watched::new(stream, connection.clone()));
    let guesses = Guesses::default();
    let answer = move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(guesses.clone());
        let in_flight = connection.begin(request.version() == Version::HTTP_2);
        let request = request.map(|body| Body::new(Received::new(body, &in_flight)));
        let answer = router.clone().oneshot(request);
        async move { Ok::<_, Infallible>(answer.await?.map(|body| Sent::new(body, in_flight))) }
    };
    let builder = builder();
    let served = builder.serve_connection(io, hyper::service::service_fn(answer));
    tokio::pin!(served);
    // The timer fires at least this often, which is enough to notice every limit in time: none is
    // shorter.
    let look = |now: Instant| now + limits.head;
    let timer = tokio::time::sleep_until(look(Instant::now()));
    tokio::pin!(timer);
    let mut stopping = false;
    loop {
        tokio::select! {
            // first, so that a busy process reads what has arrived before it looks at the time
            biased;
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection failed");
                }
                return None;
            }
            () = &mut timer => {
                let now = Instant::now();
                match slot.connection.deadline(&limits) {
                    Some((deadline, why)) if deadline <= now => return Some(why),
                    Some((deadline, _)) => timer.as_mut().reset(deadline.min(look(now))),
                    None => timer.as_mut().reset(look(now)),
                }
            }
            () = shutdown.cancelled(), if !stopping => {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

fn builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .header_read_timeout(None) // ours knows a slow header from an idle connection
        .max_buf_size(HTTP1_BUFFER_BYTES_MAX)
        .max_headers(HTTP1_HEADERS_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .max_header_list_size(HTTP2_HEADER_BYTES_MAX)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(HTTP2_SEND_BUFFER_BYTES_MAX)
        .keep_alive_interval(HTTP2_PING)
        .keep_alive_timeout(HTTP2_PING);
    builder
}

async fn not_accepted(error: &io::Error, connections: &Connections) {
    let of_the_client = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionAborted,
        io::ErrorKind::ConnectionReset,
    ];
    if !of_the_client.contains(&error.kind()) {
        tracing::warn!(%error, "cannot accept a connection");
        connections.evict(); // its file descriptor may be what lacks
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

fn with_layers(router: Router, limits: Limits, hosts: Option<Arc<Hosts>>, shutdown: CancellationToken) -> Router {
    let mut router = router
        .layer(middleware::from_fn(move |request: Request, next: Next| {
            let leaves = shutdown.is_cancelled() && request.uri().path() == HEALTH;
            async move {
                match leaves {
                    true => Problem::unavailable("this process is stopping; ask another one", 1).into_response(),
                    false => next.run(request).await,
                }
            }
        }))
        .layer(CatchPanicLayer::custom(on_panic))
        .layer(middleware::from_fn(move |request: Request, next: Next| {
            in_time(request, next, limits.body)
        }));
    if let Some(hosts) = hosts {
        router = router.layer(middleware::from_fn_with_state(hosts, crate::host::check));
    }
    router.layer(middleware::from_fn(observe))
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
