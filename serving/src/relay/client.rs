//! A policy store that is read through a relay.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, ensure};
use async_trait::async_trait;
use bytes::BytesMut;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, RANGE};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use std::sync::Arc;
use store::Store;

use super::server::ObjectList;

const NAME: &str = "relay";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait between two reads of a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// A relay lists at most [`LISTED_MAX`](super::server::LISTED_MAX) entries, which are shorter.
const LIST_BYTES_MAX: usize = 32 << 20;

/// A read-only store behind the relay at `url` (`https://host:port` or `http://host:port`).
/// `api_key`: sent to the relay.
pub fn open(url: &str, api_key: Option<&str>) -> anyhow::Result<Store> {
    let http = url.starts_with("http://") || url.starts_with("https://");
    ensure!(
        http,
        "{url:?} is not the URL of a relay; give https://host:port or http://host:port"
    );
    let client = edge::tls::client()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .build()
        .context("make an HTTP client")?;
    Ok(Store::over(Arc::new(Relay {
        url: url.trim_end_matches('/').to_owned(),
        api_key: api_key.map(str::to_owned),
        client,
    })))
}

#[derive(Clone)]
struct Relay {
    url: String,
    api_key: Option<String>,
    client: reqwest::Client,
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("url", &self.url).finish_non_exhaustive()
    }
}

impl fmt::Display for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl Relay {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", self.url));
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn send(&self, request: RequestBuilder, location: &Path) -> Result<Response> {
        let response = request.send().await.map_err(generic)?;
        let path = location.to_string();
        let status = response.status();
        let source = format!("{} answered {status}", self.url).into();
        match status {
            status if status.is_success() => Ok(response),
            StatusCode::NOT_FOUND => Err(Error::NotFound { path, source }),
            StatusCode::UNAUTHORIZED => Err(Error::Unauthenticated { path, source }),
            StatusCode::FORBIDDEN => Err(Error::PermissionDenied { path, source }),
            _ => Err(Error::Generic { store: NAME, source }),
        }
    }

    async fn entries(&self, prefix: &Path) -> Result<Vec<ObjectMeta>> {
        let request = self
            .request(Method::GET, "/v1/store")
            .query(&[("prefix", prefix.as_ref())]);
        let mut response = self.send(request, prefix).await?;
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(generic)? {
            if body.len() + chunk.len() > LIST_BYTES_MAX {
                return Err(generic(format!(
                    "the relay's list of {prefix} has more than {LIST_BYTES_MAX} bytes"
                )));
            }
            body.extend_from_slice(&chunk);
        }
        let list: ObjectList = serde_json::from_slice(&body).map_err(generic)?;
        let objects = list.objects.into_iter();
        objects
            .map(|entry| Ok(meta(Path::parse(entry.key)?, entry.size_bytes)))
            .collect()
    }
}

#[async_trait]
impl ObjectStore for Relay {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let method = if options.head { Method::HEAD } else { Method::GET };
        let mut request = self.request(method, &format!("/v1/store/{location}"));
        if let Some(range) = options.range.as_ref().filter(|_| !options.head) {
            let range = match range {
                GetRange::Bounded(range) => format!("bytes={}-{}", range.start, range.end.saturating_sub(1)),
                GetRange::Offset(from) => format!("bytes={from}-"),
                GetRange::Suffix(last) => format!("bytes=-{last}"),
            };
            request = request.header(RANGE, range);
        }
        let response = self.send(request, location).await?;
        let headers = response.headers();
        let length =
            number(headers, CONTENT_LENGTH.as_str()).ok_or_else(|| generic("the relay sent no content-length"))?;
        let (range, size) = content_range(headers).unwrap_or((0..length, length));
        Ok(GetResult {
            payload: GetResultPayload::Stream(response.bytes_stream().map_err(generic).boxed()),
            meta: meta(location.clone(), size),
            range,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (relay, prefix) = (self.clone(), prefix.cloned().unwrap_or_default());
        let entries = async move {
            relay
                .entries(&prefix)
                .await
                .map(|entries| stream::iter(entries).map(Ok))
        };
        stream::once(entries).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(read_only())
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(read_only())
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(read_only())
    }

    fn delete_stream(&self, _: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        stream::once(async { Err(read_only()) }).boxed()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(read_only())
    }
}

fn meta(location: Path, size: u64) -> ObjectMeta {
    ObjectMeta {
        location,
        // the relay does not send it, and no caller needs it
        last_modified: Default::default(),
        size,
        e_tag: None,
        version: None,
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

/// `bytes a-b/size`.
fn content_range(headers: &HeaderMap) -> Option<(std::ops::Range<u64>, u64)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, size) = text.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let end = last.parse::<u64>().ok()?.checked_add(1)?;
    Some((first.parse().ok()?..end, size.parse().ok()?))
}

fn generic(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic {
        store: NAME,
        source: source.into(),
    }
}

fn read_only() -> Error {
    Error::NotSupported {
        source: "a store behind a relay is read-only".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use bytes::Bytes;
    use std::convert::Infallible;

    /// The list that a relay gives that answers every request with `chunks`.
    async fn list(
        chunks: impl Fn() -> BoxStream<'static, Bytes> + Clone + Send + Sync + 'static,
    ) -> Result<Vec<ObjectMeta>> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = move || {
            let body = Body::from_stream(chunks().map(Ok::<_, Infallible>));
            async move { body }
        };
        let router = axum::Router::new().fallback(answer);
        tokio::spawn(async move { axum::serve(listener, router).await });
        let store = open(&url, None).unwrap();
        let prefix = Path::from("policy/demo/fold");
        store.backend().list(Some(&prefix)).try_collect().await
    }

    #[tokio::test]
    async fn a_list_without_an_end_is_refused() {
        let sound = [
            r#"{"objects": [{"key": "#,
            r#""policy/demo/fold/a", "size_bytes": 7}]}"#,
        ];
        let listed = list(move || stream::iter(sound.map(Bytes::from)).boxed())
            .await
            .unwrap();
        assert_eq!((listed.len(), listed[0].size), (1, 7));
        let spaces = Bytes::from(vec![b' '; 64 << 10]);
        let error = list(move || stream::repeat(spaces.clone()).boxed()).await.unwrap_err();
        assert!(error.to_string().contains("has more than 33554432 bytes"), "{error}");
    }
}
