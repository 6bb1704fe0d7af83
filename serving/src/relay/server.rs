//! The relay's HTTP API.

use std::ops::Range;

use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::parts::PART_BYTES;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use edge::auth::{Auth, Scope};
use edge::path::Path;
use edge::problem::Problem;
use edge::query::Query;
use edge::routes::{Routes, get};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path as Key;
use object_store::{GetResultPayload, ObjectStore, ObjectStoreExt as _};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use store::{Cache, CachedObject, Store};

/// Entries in a list. Their JSON has at most 28 MB.
pub(super) const LISTED_MAX: usize = 200_000;

#[derive(Clone)]
struct Relay {
    upstream: Store,
    cache: Cache,
}

pub(super) fn router(upstream: Store, cache: Cache, auth: &Auth) -> Router {
    let relay = Relay { upstream, cache };
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

async fn list(State(relay): State<Relay>, Query(query): Query<ListQuery>) -> Result<Json<ObjectList>, Problem> {
    let prefix = public_key(&query.prefix)?;
    let objects = list_up_to(relay.upstream.backend().as_ref(), &prefix, LISTED_MAX).await?;
    Ok(Json(ObjectList { objects }))
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

async fn pass_on(State(relay): State<Relay>, Path(key): Path<String>, headers: HeaderMap) -> Result<Response, Problem> {
    let key = public_key(&key)?;
    let Some((policy, digest)) = object_of(&key) else {
        return document(&relay, &key).await;
    };
    let size_bytes = match relay.cache.size_of(&digest) {
        Some(size_bytes) => size_bytes,
        None => {
            let meta = relay.upstream.backend().head(&key).await;
            meta.map_err(|error| upstream_problem(&key, &error))?.size
        }
    };
    let range = requested_range(&headers, size_bytes)?;
    let object = ObjectRef { digest, size_bytes };
    match relay.cache.object(&relay.upstream, policy, &object).await {
        Ok(arrival) => Ok(stream_response(arrival, size_bytes, range)),
        Err(error) => Err(object_problem(&key, &error)),
    }
}

/// A small signed document, as the upstream has it. The follower verifies it.
async fn document(relay: &Relay, key: &Key) -> Result<Response, Problem> {
    let found = relay.upstream.backend().get(key).await;
    let found = found.map_err(|error| upstream_problem(key, &error))?;
    let length = found.meta.size;
    let body = match found.payload {
        GetResultPayload::Stream(chunks) => Body::from_stream(chunks),
        GetResultPayload::File(..) => Body::from_stream(found.into_stream()),
    };
    metrics::counter!("springtide_relay_documents_total").increment(1);
    Ok((StatusCode::OK, [(header::CONTENT_LENGTH, length)], body).into_response())
}

/// The bytes of a range (default: all), part by part as they arrive. If a part fails, the
/// connection breaks; the bytes sent until then are correct, and the caller requests the rest
/// again.
fn stream_response(arrival: Arc<CachedObject>, size_bytes: u64, range: Option<Range<u64>>) -> Response {
    let wanted = range.clone().unwrap_or(0..size_bytes);
    let length = wanted.end - wanted.start;
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
            metrics::counter!("springtide_relay_bytes_total").increment((until - from) as u64);
            Ok::<_, store::Error>(bytes.slice(from..until))
        }
    });
    let mut response = Body::from_stream(chunks).into_response();
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
