//! Passes requests on to an engine that was probed: the routes that sample and a few that read,
//! and no others. Answers are passed on as they come. A caller who leaves ends the request in the
//! engine.

use super::connections::{self, Connection, Connections};
use crate::remote::{EXPECT_WEIGHTS, InFlight, Pass, Pool};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::response::Response;
use axum::routing::{MethodFilter, on};
use edge::Problem;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The only engine of the pool.
pub const ENGINE: usize = 0;
/// What a caller is asked to wait, in seconds.
const RETRY_AFTER: u32 = 1;
/// Tries to find the engine with the weights that were probed. An update may change them meanwhile.
const TRIES: usize = 3;
/// Of a request, passed on. Everything else concerns this hop, or is the caller's secret.
const REQUEST_HEADERS: [HeaderName; 3] = [header::ACCEPT, header::CONTENT_TYPE, header::CONTENT_LENGTH];
/// Also passed on, so that the engine's spans join the caller's trace.
const TRACE_HEADERS: [HeaderName; 2] = [
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
];
/// Of an answer, passed on.
const ANSWER_HEADERS: [HeaderName; 4] = [
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::CACHE_CONTROL,
    header::RETRY_AFTER,
];

/// What kind of engine it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Vllm,
    Sglang,
}

impl Kind {
    /// The routes that are passed on. All others, above all those that change weights, are not.
    fn routes(self) -> &'static [(MethodFilter, &'static str)] {
        match self {
            Kind::Vllm => &[
                (MethodFilter::POST, "/inference/v1/generate"),
                (MethodFilter::POST, "/v1/completions"),
                (MethodFilter::POST, "/v1/chat/completions"),
                (MethodFilter::GET, "/v1/models"),
                (MethodFilter::GET, "/weight_info"),
                (MethodFilter::GET, "/version"),
            ],
            Kind::Sglang => &[
                (MethodFilter::POST, "/generate"),
                (MethodFilter::POST, "/v1/completions"),
                (MethodFilter::POST, "/v1/chat/completions"),
                (MethodFilter::GET, "/v1/models"),
                (MethodFilter::GET, "/model_info"),
            ],
        }
    }

    /// Answers with the name of the weights, as `weight_version`.
    pub fn label_path(self) -> &'static str {
        match self {
            Kind::Vllm => "/weight_info",
            Kind::Sglang => "/model_info",
        }
    }
}

pub struct Proxy {
    pub pool: Pool,
    pub connections: Connections,
    pub in_flight: InFlight,
    /// Longest wait of a request for the end of an update.
    pub wait_max: Duration,
    pub body_bytes_max: u64,
    /// One permit for each request that may sample, or wait to, at the same time.
    pub permits: Arc<Semaphore>,
}

/// The routes of `engine`.
pub fn router(engine: Kind, proxy: &Arc<Proxy>) -> Router {
    let routes = engine.routes().iter();
    routes.fold(Router::new(), |router, &(method, path)| {
        let handler = async move |State(proxy): State<Arc<Proxy>>, request: Request| {
            // the path is ours: nothing that the caller writes chooses the engine's route
            proxy.pass_on(path, request).await
        };
        router.route(path, on(method, handler).with_state(proxy.clone()))
    })
}

impl Proxy {
    async fn pass_on(self: Arc<Self>, path: &'static str, request: Request) -> Result<Response, Problem> {
        let expected = request.headers().get(EXPECT_WEIGHTS).cloned();
        let permit = self.permit(request.method())?;
        let broken = Arc::new(OnceLock::new());
        let forwarded = self.forwarded(path, request, broken.clone())?;
        let (pass, mut connection) = self.admit(expected.as_ref()).await?;
        let answer = match self.connections.send(&mut connection, forwarded).await {
            Ok(answer) => answer,
            Err(error) => return Err(self.not_sent(&error, broken.get())),
        };
        let (parts, body) = answer.into_parts();
        let answer = Answer {
            _permit: permit,
            proxy: self,
            pass,
            connection,
            body,
        };
        let mut response = Response::new(answer.stream());
        *response.status_mut() = parts.status;
        copy(&parts.headers, response.headers_mut(), &ANSWER_HEADERS);
        Ok(response)
    }

    /// What samples is counted. The few routes that read always pass, so an engine that has much to do
    /// looks alive.
    fn permit(&self, method: &Method) -> Result<Option<OwnedSemaphorePermit>, Problem> {
        if method != Method::POST {
            return Ok(None);
        }
        match self.permits.clone().try_acquire_owned() {
            Ok(permit) => Ok(Some(permit)),
            Err(_) => {
                metrics::counter!("springtide_follow_requests_refused_total").increment(1);
                Err(unavailable("the engine has follow.requests_max requests already"))
            }
        }
    }

    /// Lets the request through, over a connection to the engine that was probed. `expected`: the name of
    /// the weights that the caller wants an answer of, if it says so.
    async fn admit(&self, expected: Option<&HeaderValue>) -> Result<(Pass, Connection), Problem> {
        for tried in 1..=TRIES {
            let pass = match self.in_flight {
                InFlight::Drain => self.pool.admit(ENGINE),
                InFlight::Cross => self.pool.admit_after_update(ENGINE, self.wait_max).await,
            };
            let pass = pass.ok_or_else(|| unavailable("the engine holds no version that is proven, or changes it"))?;
            let weights = pass.weights();
            if expected.is_some_and(|expected| expected.as_bytes() != weights.as_bytes()) {
                return Err(Problem::conflict(format!(
                    "the engine holds {weights:?}, not the weights of {EXPECT_WEIGHTS}"
                )));
            }
            match self.connections.get(&weights).await {
                Ok(connection) => return Ok((pass, connection)),
                // an update may have begun meanwhile
                Err(connections::Error::OtherWeights(_)) if tried < TRIES => {}
                Err(error @ connections::Error::Silent(_)) => {
                    // whoever watches the engine notices if it never answers again
                    tracing::debug!(%error, "no connection for a request");
                    return Err(unavailable("the engine is busy and does not answer"));
                }
                Err(error) => {
                    pass.eject(&error.into());
                    break;
                }
            }
        }
        Err(unavailable(
            "the engine does not answer, or is another one than was probed",
        ))
    }

    /// `broken`: is set if the caller's body breaks off.
    fn forwarded(
        &self,
        path: &'static str,
        request: Request,
        broken: Arc<OnceLock<BrokenBody>>,
    ) -> Result<Request, Problem> {
        let (parts, body) = request.into_parts();
        let declared = parts.headers.get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > self.body_bytes_max) {
            return Err(self.too_large());
        }
        let limit = usize::try_from(self.body_bytes_max).unwrap_or(usize::MAX);
        let body = Limited::new(body, limit).map_err(move |error| {
            let _ = broken.set(match error.is::<LengthLimitError>() {
                true => BrokenBody::TooLarge,
                false => BrokenBody::Incomplete,
            });
            error
        });
        let mut forwarded = Request::new(Body::new(body));
        *forwarded.method_mut() = parts.method;
        *forwarded.uri_mut() = Uri::from_static(path);
        copy(&parts.headers, forwarded.headers_mut(), &REQUEST_HEADERS);
        copy(&parts.headers, forwarded.headers_mut(), &TRACE_HEADERS);
        Ok(forwarded)
    }

    /// No caller can make an engine look as if it had failed: one that answers before it has read a whole
    /// body, and closes, only refuses the request.
    fn not_sent(&self, error: &hyper::Error, broken: Option<&BrokenBody>) -> Problem {
        match broken {
            Some(BrokenBody::TooLarge) => return self.too_large(),
            Some(BrokenBody::Incomplete) => return Problem::bad_request("the body is not complete"),
            None => {}
        }
        // it may also close a connection just when it is used again
        tracing::debug!(%error, "a request was not passed on");
        unavailable("the engine has closed the connection without an answer")
    }

    fn too_large(&self) -> Problem {
        Problem::too_large(format!(
            "the body has more than {} bytes; send less, or raise follow.body_bytes_max",
            self.body_bytes_max
        ))
    }
}

/// What is wrong with a caller's body.
#[derive(Debug, Clone, Copy)]
enum BrokenBody {
    TooLarge,
    Incomplete,
}

/// An answer on its way to the caller. Dropping it ends the request in the engine.
struct Answer {
    /// Free again before the pass is.
    _permit: Option<OwnedSemaphorePermit>,
    proxy: Arc<Proxy>,
    pass: Pass,
    connection: Connection,
    body: Incoming,
}

impl Answer {
    /// The body, piece by piece.
    fn stream(self) -> Body {
        Body::from_stream(futures::stream::unfold(Some(self), async |answer| answer?.next().await))
    }

    async fn next(mut self) -> Option<(io::Result<Bytes>, Option<Self>)> {
        let frame = self.body.frame().await;
        if !self.pass.proven().await {
            metrics::counter!("springtide_follow_answers_cut_total").increment(1);
            let error = io::Error::other("the engine failed its probe after an update");
            return Some((Err(error), None));
        }
        match frame {
            None => {
                self.end();
                None
            }
            Some(Ok(frame)) => {
                // trailers have no data
                let data = frame.into_data().unwrap_or_default();
                if self.body.is_end_stream() {
                    self.end();
                    return Some((Ok(data), None));
                }
                Some((Ok(data), Some(self)))
            }
            Some(Err(error)) => Some((Err(io::Error::other(error)), None)),
        }
    }

    fn end(self) {
        self.proxy.connections.put_back(self.connection);
    }
}

fn copy(from: &HeaderMap, to: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        if let Some(value) = from.get(name) {
            to.insert(name, value.clone());
        }
    }
}

fn unavailable(detail: &str) -> Problem {
    Problem::unavailable(format!("{detail}; try again, or another engine"), RETRY_AFTER)
}

#[cfg(test)]
mod tests;
