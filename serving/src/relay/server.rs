//! The relay's HTTP API.

use std::ops::Range;

use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::parts::PART_BYTES;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use edge::auth::{Auth, Scope};
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use edge::routes::{Routes, get};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path as Key;
use object_store::{GetOptions, GetResultPayload, ObjectStore, ObjectStoreExt as _};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use store::{Cache, CachedObject, Store};

use super::flights::Flights;

/// A signed document has some kilobytes; followers refuse more than this.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Entries in a list. Their JSON has at most 28 MB.
pub(super) const LISTED_MAX: usize = 200_000;

#[derive(Clone)]
struct Relay {
    upstream: Store,
    cache: Cache,
    documents: Flights,
    lists: Flights,
    /// Sizes of the objects that the cache cannot hold: followers ask for them part by part.
    large: Arc<Mutex<HashMap<Digest, u64>>>,
}

pub(super) fn router(upstream: Store, cache: Cache, auth: &Auth) -> Router {
    let relay = Relay {
        upstream,
        cache,
        documents: Flights::default(),
        lists: Flights::default(),
        large: Arc::default(),
    };
    Routes::new()
        .route(Scope::Read, "/v1/store", "List objects under a prefix", get(list))
        .route(
            Scope::Read,
            "/v1/store/{*key}",
            "Read an object or a document",
            get(pass_on),
        )
        .open_route("/health", "Whether the process responds", get(async || "ok"))
        .with_state(relay)
        .protected_by(auth, "Springtide relay")
}

#[derive(Deserialize)]
struct ListQuery {
    prefix: String,
}

/// The objects under a prefix.
#[derive(Serialize, Deserialize)]
pub(super) struct ObjectList {
    pub objects: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Entry {
    pub key: String,
    pub size_bytes: u64,
}

async fn list(State(relay): State<Relay>, Query(query): Query<ListQuery>) -> Result<Response, Problem> {
    let prefix = public_key(&query.prefix)?;
    let (upstream, under) = (relay.upstream.backend().clone(), prefix.clone());
    let request = async move {
        let objects = list_up_to(upstream.as_ref(), &under, LISTED_MAX).await?;
        let list = serde_json::to_vec(&ObjectList { objects });
        list.map(Bytes::from).map_err(Problem::internal)
    };
    let list = relay.lists.join(&prefix, request).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], list).into_response())
}

/// The entries under a prefix, or a problem if there are more than `count_max`.
async fn list_up_to(upstream: &dyn ObjectStore, prefix: &Key, count_max: usize) -> Result<Vec<Entry>, Problem> {
    let entries = upstream.list(Some(prefix)).map_ok(|meta| Entry {
        key: meta.location.to_string(),
        size_bytes: meta.size,
    });
    let entries = entries.take(count_max + 1).try_collect::<Vec<_>>().await;
    let entries = entries.map_err(|error| upstream_problem(prefix, &error))?;
    if entries.len() > count_max {
        let detail = format!("there are more than {count_max} objects under {prefix}; give a longer prefix");
        return Err(Problem::bad_request(detail));
    }
    Ok(entries)
}

async fn pass_on(
    State(relay): State<Relay>,
    method: Method,
    Path(key): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let key = public_key(&key)?;
    let object = object_of(&key);
    if object.is_none() && method != Method::HEAD {
        return document(&relay, &key).await;
    }
    let large = || relay.large.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |(_, digest)| relay.cache.size_of(&digest).or_else(|| large().get(&digest).copied());
    let size_bytes = match object.and_then(known) {
        Some(size_bytes) => size_bytes,
        None => {
            let meta = relay.upstream.backend().head(&key).await;
            meta.map_err(|error| upstream_problem(&key, &error))?.size
        }
    };
    let Some((policy, digest)) = object.filter(|_| method != Method::HEAD) else {
        return Ok([(header::CONTENT_LENGTH, size_bytes)].into_response());
    };
    let range = requested_range(&headers, size_bytes)?;
    if size_bytes > relay.cache.bytes_max() {
        large().insert(digest, size_bytes);
        return pass_through(&relay, &key, digest, size_bytes, range).await;
    }
    let object = ObjectRef { digest, size_bytes };
    match relay.cache.object(&relay.upstream, policy, &object).await {
        Ok(arrival) => Ok(stream_response(arrival, size_bytes, range)),
        Err(error) => Err(object_problem(&key, &error)),
    }
}

/// An object that no cache can hold, as the upstream has it. The follower verifies it.
async fn pass_through(
    relay: &Relay,
    key: &Key,
    digest: Digest,
    size_bytes: u64,
    range: Option<Range<u64>>,
) -> Result<Response, Problem> {
    let options = GetOptions::new().with_range(range.clone());
    let found = relay.upstream.backend().get_opts(key, options).await;
    let found = found.map_err(|error| upstream_problem(key, &error))?;
    let chunks = found.into_stream().inspect_ok(count_passed);
    Ok(response_of(Body::from_stream(chunks), digest, size_bytes, range))
}

fn count_passed(bytes: &Bytes) {
    metrics::counter!("springtide_relay_bytes_total").increment(bytes.len() as u64);
}

/// What is no object, as the upstream has it. The follower verifies it.
async fn document(relay: &Relay, key: &Key) -> Result<Response, Problem> {
    metrics::counter!("springtide_relay_documents_total").increment(1);
    let (upstream, place) = (relay.upstream.backend().clone(), key.clone());
    if key.as_ref().ends_with(".json") {
        let request = async move { read_document(upstream.as_ref(), &place).await };
        return Ok(relay.documents.join(key, request).await?.into_response());
    }
    let found = upstream.get(key).await;
    let found = found.map_err(|error| upstream_problem(key, &error))?;
    let length = found.meta.size;
    let body = match found.payload {
        GetResultPayload::Stream(chunks) => Body::from_stream(chunks),
        GetResultPayload::File(..) => Body::from_stream(found.into_stream()),
    };
    Ok((StatusCode::OK, [(header::CONTENT_LENGTH, length)], body).into_response())
}

async fn read_document(upstream: &dyn ObjectStore, key: &Key) -> Result<Bytes, Problem> {
    let found = upstream.get(key).await;
    let found = found.map_err(|error| upstream_problem(key, &error))?;
    if found.meta.size > DOCUMENT_BYTES_MAX {
        let detail = format!(
            "{key} has {} bytes; a document has at most {DOCUMENT_BYTES_MAX}",
            found.meta.size
        );
        return Err(Problem::bad_request(detail));
    }
    found.bytes().await.map_err(|error| upstream_problem(key, &error))
}

/// The bytes of a range (default: all), part by part as they arrive. If a part fails, the
/// connection breaks; the bytes sent until then are correct, and the caller requests the rest
/// again.
fn stream_response(arrival: Arc<CachedObject>, size_bytes: u64, range: Option<Range<u64>>) -> Response {
    let wanted = range.clone().unwrap_or(0..size_bytes);
    let first = wanted.start / PART_BYTES;
    let last = wanted.end.div_ceil(PART_BYTES).max(first);
    let digest = arrival.object().digest;
    let chunks = stream::iter(first..last).then(move |index| {
        let (arrival, wanted) = (arrival.clone(), wanted.clone());
        async move {
            let bytes = arrival.part(index).await.inspect_err(|error| {
                tracing::warn!(%error, "passing an object on broke off");
            })?;
            let begins = index * PART_BYTES;
            // within a part, so both fit in usize
            let from = wanted.start.saturating_sub(begins) as usize;
            let until = (wanted.end - begins).min(bytes.len() as u64) as usize;
            Ok::<_, store::Error>(bytes.slice(from..until))
        }
    });
    response_of(
        Body::from_stream(chunks.inspect_ok(count_passed)),
        digest,
        size_bytes,
        range,
    )
}

fn response_of(body: Body, digest: Digest, size_bytes: u64, range: Option<Range<u64>>) -> Response {
    let length = range.as_ref().map_or(size_bytes, |range| range.end - range.start);
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, length.into());
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    if let Ok(tag) = HeaderValue::try_from(format!("\"{digest}\"")) {
        headers.insert(header::ETAG, tag);
    }
    if let Some(range) = range {
        let text = format!("bytes {}-{}/{size_bytes}", range.start, range.end.saturating_sub(1));
        if let Ok(text) = HeaderValue::try_from(text) {
            headers.insert(header::CONTENT_RANGE, text);
        }
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    response
}

/// One range of the form `bytes=a-b`, `bytes=a-` or `bytes=-n`; `None`: the whole object.
fn requested_range(headers: &HeaderMap, size_bytes: u64) -> Result<Option<Range<u64>>, Problem> {
    let Some(text) = headers.get(header::RANGE) else {
        return Ok(None);
    };
    let range = text.to_str().ok().and_then(|text| parse_range(text, size_bytes));
    range.map(Some).ok_or_else(|| {
        let detail = format!("give one range of the object's {size_bytes} bytes, as in bytes=0-99");
        Problem::new(
            StatusCode::RANGE_NOT_SATISFIABLE,
            "range-not-satisfiable",
            "There is no such range",
        )
        .detail(detail)
    })
}

fn parse_range(text: &str, size_bytes: u64) -> Option<Range<u64>> {
    let (from, until) = text.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (from, until) {
        ("", last) => size_bytes.checked_sub(last.parse::<u64>().ok()?.min(size_bytes))?..size_bytes,
        (from, "") => from.parse().ok()?..size_bytes,
        (from, until) => from.parse().ok()?..until.parse::<u64>().ok()?.checked_add(1)?.min(size_bytes),
    };
    (range.start < range.end).then_some(range)
}

/// A key that every follower may read.
fn public_key(text: &str) -> Result<Key, Problem> {
    let key = Key::parse(text).map_err(Problem::bad_request)?;
    let inside = key.parts().next().is_some_and(|first| first.as_ref() == "policy");
    inside
        .then_some(key)
        .ok_or_else(|| Problem::not_found("a relay only passes on keys under policy/"))
}

/// Policy and digest of an object; `None` for other keys.
fn object_of(key: &Key) -> Option<(&str, Digest)> {
    let mut parts = key.as_ref().split('/').skip(1);
    let (policy, kind, name) = (parts.next()?, parts.next()?, parts.next()?);
    (kind == "object" && parts.next().is_none())
        .then(|| Some((policy, name.parse().ok()?)))
        .flatten()
}

fn upstream_problem(key: &Key, error: &object_store::Error) -> Problem {
    match error {
        object_store::Error::NotFound { .. } => Problem::not_found(format!("{key} does not exist")),
        error => {
            tracing::warn!(%key, %error, "the upstream does not answer");
            Problem::unavailable("the upstream does not answer; try again", 1)
        }
    }
}

fn object_problem(key: &Key, error: &store::Error) -> Problem {
    match error {
        store::Error::NotFound(key) => Problem::not_found(format!("{key} does not exist")),
        error => {
            tracing::warn!(%key, %error, "an object cannot be fetched");
            Problem::unavailable("the object cannot be fetched now; try again", 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tower::ServiceExt as _;

    #[test]
    fn ranges_follow_http() {
        for (text, range) in [
            ("bytes=0-9", Some(0..10)),
            ("bytes=90-", Some(90..100)),
            ("bytes=-10", Some(90..100)),
            ("bytes=-1000", Some(0..100)),
            ("bytes=90-1000", Some(90..100)),
            ("bytes=100-", None),
            ("bytes=9-8", None),
            ("bytes=-0", None),
            ("bytes=0-9,20-29", None),
            ("lines=0-9", None),
            ("bytes=0-18446744073709551615", None),
        ] {
            assert_eq!(parse_range(text, 100), range, "{text}");
        }
    }

    #[tokio::test]
    async fn a_list_that_is_too_long_is_refused() {
        let upstream = object_store::memory::InMemory::new();
        for name in ["a", "b", "c"] {
            let key = Key::from(format!("policy/demo/fold/{name}"));
            upstream.put(&key, "x".into()).await.unwrap();
        }
        let prefix = Key::from("policy/demo/fold");
        assert_eq!(list_up_to(&upstream, &prefix, 3).await.unwrap().len(), 3);
        let refused = list_up_to(&upstream, &prefix, 2).await.err().unwrap();
        assert!(refused.document().to_string().contains("more than 2 objects"));
    }

    /// A relay with an empty cache in `folder`.
    fn relay(upstream: Store, folder: &std::path::Path) -> Router {
        let limits = store::Limits {
            bytes_max: 1 << 20,
            streams: 1,
        };
        router(upstream, Cache::open(folder, limits).unwrap(), &Auth::fixed(None))
    }

    async fn ask(relay: &Router, method: &str, path: &str) -> (Response, Bytes) {
        let request = Request::builder().method(method).uri(format!("/v1/store{path}"));
        let request = request.body(Body::empty()).unwrap();
        let (parts, body) = relay.clone().oneshot(request).await.unwrap().into_parts();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        (Response::from_parts(parts, Body::empty()), bytes)
    }

    #[tokio::test]
    async fn asking_for_an_objects_size_downloads_nothing() {
        let upstream = Store::over(Arc::new(object_store::memory::InMemory::new()));
        let object = upstream
            .put_object("demo", &Bytes::from_static(b"weights"))
            .await
            .unwrap();
        let folder = tempfile::tempdir().unwrap();
        let relay = relay(upstream, folder.path());
        let path = format!("/policy/demo/object/{}", object.digest);
        let (head, body) = ask(&relay, "HEAD", &path).await;
        assert_eq!((head.status(), body.len()), (StatusCode::OK, 0));
        assert_eq!(head.headers()[header::CONTENT_LENGTH], "7");
        tokio::task::yield_now().await;
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(ask(&relay, "GET", &path).await.1, "weights");
        assert_eq!(
            ask(&relay, "HEAD", "/policy/demo/none.json").await.0.status(),
            StatusCode::NOT_FOUND
        );
    }

    #[tokio::test]
    async fn an_object_that_the_cache_cannot_hold_is_passed_through() {
        let upstream = Store::over(Arc::new(object_store::memory::InMemory::new()));
        let bytes: Bytes = (0..3 << 20).map(|at: u32| at as u8).collect();
        let object = upstream.put_object("demo", &bytes).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let relay = relay(upstream, folder.path());
        let path = format!("/policy/demo/object/{}", object.digest);
        let (whole, body) = ask(&relay, "GET", &path).await;
        assert_eq!((whole.status(), &body), (StatusCode::OK, &bytes));
        let request = Request::builder()
            .uri(format!("/v1/store{path}"))
            .header("range", "bytes=5-9");
        let answer = relay.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), StatusCode::PARTIAL_CONTENT);
        assert_eq!(
            answer.headers()[header::CONTENT_RANGE],
            format!("bytes 5-9/{}", bytes.len())
        );
        let part = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        assert_eq!(part, bytes.slice(5..10));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn equal_requests_at_once_are_one_request_of_the_upstream() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = asked.clone();
        let answer = move || {
            let nth = counter.fetch_add(1, Ordering::SeqCst);
            async move { format!(r#"{{"objects": [{{"key": "policy/demo/{nth}", "size_bytes": 7}}]}}"#) }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        let folder = tempfile::tempdir().unwrap();
        let relay = relay(super::super::open(&url, None).unwrap(), folder.path());
        for path in ["/policy/demo/statement.json", "?prefix=policy/demo/revocation"] {
            for round in [1, 2] {
                let before = asked.load(Ordering::SeqCst);
                let answers = futures::future::join_all((0..20).map(|_| ask(&relay, "GET", path))).await;
                assert_eq!(asked.load(Ordering::SeqCst) - before, 1, "{path}, round {round}");
                let new = format!("policy/demo/{before}");
                for (response, body) in answers {
                    assert_eq!(response.status(), StatusCode::OK);
                    assert!(String::from_utf8_lossy(&body).contains(&new), "each round asks anew");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_thousand_followers_cost_the_store_one_request_after_the_other() {
        const LATENCY: std::time::Duration = std::time::Duration::from_millis(50);
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = asked.clone();
        let answer = move || {
            counter.fetch_add(1, Ordering::SeqCst);
            async {
                tokio::time::sleep(LATENCY).await;
                "{}"
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        let folder = tempfile::tempdir().unwrap();
        let relay = relay(super::super::open(&url, None).unwrap(), folder.path());
        let started = std::time::Instant::now();
        let followers = (0..1000).map(async |number| {
            // as `poll_interval_ms`
            let interval = std::time::Duration::from_millis(250);
            tokio::time::sleep(interval * number / 1000).await;
            for _ in 0..8 {
                let (response, _) = ask(&relay, "GET", "/policy/demo/assignment/0000000002.json").await;
                assert_eq!(response.status(), StatusCode::OK);
                tokio::time::sleep(interval).await;
            }
        });
        futures::future::join_all(followers).await;
        let (asked, seconds) = (asked.load(Ordering::SeqCst), started.elapsed().as_secs_f64());
        println!("8000 polls in {seconds:.1} s: {asked} requests of the store");
        assert!(
            asked as f64 <= seconds / LATENCY.as_secs_f64() + 1.0,
            "{asked} in {seconds} s"
        );
    }

    #[test]
    fn only_keys_that_every_follower_may_read_are_accepted() {
        assert!(public_key("policy/demo/version/0000000001.json").is_ok());
        for refused in ["private/run/state", "policy/../private/run", "", "policyx/a"] {
            assert!(public_key(refused).is_err(), "{refused}");
        }
        let digest = Digest::of(b"a");
        let key = Key::from(format!("policy/demo/object/{digest}"));
        assert_eq!(object_of(&key), Some(("demo", digest)));
        for other in [
            format!("policy/demo/parts/{digest}"),
            "policy/demo/version/1.json".into(),
        ] {
            assert_eq!(object_of(&Key::from(other)), None);
        }
    }
}
