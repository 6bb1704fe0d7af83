//! The whole HTTP API, with events kept in memory: each endpoint with any body, arbitrary requests,
//! and bodies in any encoding. Every status must be one that the OpenAPI document names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, Method, Request, Uri};
use edge::auth::Auth;
use event_log::event::Event;
use serde_json::Value;
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

use super::accepted;
use crate::entry::api::Api;
use crate::entry::destination::Destination;
use crate::entry::spool;
use crate::options::Options;
use crate::validator::Validator;

pub(super) const JSON: &str = "application/json";
pub(super) const STRUCTURED: &str = "application/cloudevents+json";
pub(super) const BATCHED: &str = "application/cloudevents-batch+json";
/// Small, so that mutation exceeds it.
const REQUEST_BYTES_MAX: usize = 64 * 1024;

thread_local! {
    static HARNESS: Harness = Harness::new();
}

/// An API and the events that it accepted.
struct Harness {
    runtime: Runtime,
    api: Api,
    router: Router,
    accepted: Arc<Mutex<Vec<Event>>>,
    /// Documented statuses by path and method.
    documented: BTreeMap<(String, Method), BTreeSet<u16>>,
}

impl Harness {
    fn new() -> Self {
        let options = Options {
            request_bytes_max: REQUEST_BYTES_MAX,
            in_flight_bytes_max: 4 * REQUEST_BYTES_MAX,
            ..Options::default()
        };
        options.check().unwrap();
        let validator = Validator::new(options.metrics().unwrap(), time::Duration::minutes(5));
        let accepted = Arc::default();
        let destination = Destination::Memory(Arc::clone(&accepted));
        let api = Api::new(&options, None, destination, Arc::new(validator));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let mut harness = Self {
            runtime: runtime.unwrap(),
            router: edge::server::with_problems(api.clone().router(&Auth::fixed(None))),
            api,
            accepted,
            documented: BTreeMap::new(),
        };
        harness.documented = harness.document();
        harness
    }

    fn document(&self) -> BTreeMap<(String, Method), BTreeSet<u16>> {
        let (status, _, text) = self.send(Request::get("/openapi.json").body(Body::empty()).unwrap());
        assert_eq!(status, 200);
        let document: Value = serde_json::from_slice(&text).unwrap();
        let mut documented = BTreeMap::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let method: Method = method.to_uppercase().parse().unwrap();
                let statuses = operation["responses"].as_object().unwrap().keys();
                let statuses = statuses.map(|status| status.parse().unwrap()).collect();
                documented.insert((path.clone(), method), statuses);
            }
        }
        documented
    }

    fn send(&self, request: Request<Body>) -> (u16, Option<HeaderValue>, Bytes) {
        self.runtime.block_on(async {
            let response = self.router.clone().oneshot(request).await.unwrap();
            let status = response.status().as_u16();
            let content_type = response.headers().get("content-type").cloned();
            let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
            (status, content_type, body)
        })
    }

    /// The events that were accepted, or the status of the refusal.
    fn take(&self, request: Request<Body>) -> Result<Vec<Event>, u16> {
        let route = (request.uri().path().to_owned(), request.method().clone());
        let (status, content_type, body) = self.send(request);
        let accepted = std::mem::take(&mut *self.accepted.lock().unwrap());
        assert_eq!(self.api.held_bytes(), 0, "bytes are still held");
        match self.documented.get(&route) {
            Some(statuses) => assert!(statuses.contains(&status), "{route:?} does not document {status}"),
            // An unknown path or method, or HEAD, which axum answers like GET.
            None => assert!([200, 404, 405].contains(&status), "{route:?}: {status}"),
        }
        assert_ne!(status, 500, "{}", String::from_utf8_lossy(&body));
        if status < 400 {
            return Ok(accepted);
        }
        assert_eq!(accepted, [], "accepted with status {status}");
        assert_eq!(content_type.unwrap(), "application/problem+json");
        if route.1 != Method::HEAD {
            let problem: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(problem["status"], status);
        }
        Err(status)
    }

    /// Returns whether the request was accepted. Checks the accepted events.
    fn accepts(&self, request: Request<Body>, bytes: usize) -> bool {
        let Ok(events) = self.take(request) else { return false };
        for event in &events {
            accepted::check(event, bytes);
            self.forwarded(event);
        }
        !events.is_empty()
    }

    /// Checks that a collector's request for the event is read as the same event.
    fn forwarded(&self, event: &Event) {
        let body = spool::Request::of(event)
            .expect("an accepted event can be forwarded")
            .body;
        let body = body.to_string();
        // The collector's limits are the upstream's.
        if body.len() > REQUEST_BYTES_MAX || event.time > event_log::event::now() {
            return;
        }
        let events = self.take(post("/v1/events", STRUCTURED, body.clone().into()));
        let events = events.expect("a forwarded event is accepted");
        let [accepted] = &events[..] else {
            panic!("expected one event: {body}");
        };
        // The tenant is the key's.
        assert_eq!(
            (&accepted.source, &accepted.id, accepted.time),
            (&event.source, &event.id, event.time)
        );
        assert_eq!(accepted.digest(), event.digest(), "{body}");
    }
}

fn post(path: &str, content_type: &str, body: Body) -> Request<Body> {
    let request = Request::post(path).header("content-type", content_type);
    request.body(body).unwrap()
}

/// The input is the body of a request to one endpoint.
pub(super) fn body(path: &str, content_type: &str, input: &[u8]) -> bool {
    HARNESS.with(|harness| harness.accepts(post(path, content_type, input.to_vec().into()), input.len()))
}

/// See [`Harness::forwarded`].
pub(super) fn forwarded(event: &Event) {
    HARNESS.with(|harness| {
        // Skips events that break other rules than those of the wire format.
        let validator = Validator::new(Options::default().metrics().unwrap(), time::Duration::ZERO);
        if validator.check(event, event_log::event::now()).is_ok() {
            harness.forwarded(event);
        }
    });
}

/// The input is a line with method and path, header lines, an empty line and the body.
pub(super) fn request(input: &[u8]) -> bool {
    let (lines, body) = split(input);
    let line = lines.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let method = words.next().and_then(|word| Method::from_bytes(word).ok());
    let target = words.next().and_then(|word| Uri::try_from(word).ok());
    let (Some(method), Some(target)) = (method, target.filter(|uri| uri.path().starts_with('/'))) else {
        return false;
    };
    let mut request = Request::new(Body::from(body.to_vec()));
    (*request.method_mut(), *request.uri_mut()) = (method, target);
    for (name, value) in headers(lines) {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            request.headers_mut().append(name, value);
        }
    }
    HARNESS.with(|harness| harness.accepts(request, input.len()))
}

/// The first byte selects the encoding, whether the length is declared, and the chunk size. The
/// rest is the body.
pub(super) fn compressed(input: &[u8]) -> bool {
    let Some((how, bytes)) = input.split_first() else {
        return false;
    };
    let piece_bytes = 1 << (how >> 4);
    let pieces: Vec<_> = bytes.chunks(piece_bytes).map(Bytes::copy_from_slice).collect();
    let pieces = futures::stream::iter(pieces.into_iter().map(Ok::<_, std::convert::Infallible>));
    let mut request = post("/v1/events:batch", JSON, Body::from_stream(pieces));
    let encoding = ["gzip", "zstd", "identity", "br"][usize::from(how & 3)];
    let headers = request.headers_mut();
    headers.insert("content-encoding", HeaderValue::from_static(encoding));
    if how & 4 != 0 {
        headers.insert("content-length", HeaderValue::from(bytes.len()));
    }
    HARNESS.with(|harness| harness.accepts(request, REQUEST_BYTES_MAX))
}

/// The input before and after the first empty line.
pub(super) fn split(input: &[u8]) -> (&[u8], &[u8]) {
    let end = input.windows(2).position(|pair| pair == b"\n\n");
    end.map_or((input, &[]), |end| (&input[..end], &input[end + 2..]))
}

/// `name: value` lines.
pub(super) fn headers(lines: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    lines.split(|byte| *byte == b'\n').filter_map(|line| {
        let colon = line.windows(2).position(|pair| pair == b": ")?;
        Some((&line[..colon], &line[colon + 2..]))
    })
}
