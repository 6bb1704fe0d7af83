//! A store that does not answer for a moment. The cheapest path is not left because of it.

use super::*;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, PutMultipartOptions, PutResult, RenameOptions,
};
use std::sync::Mutex;

/// Fails some requests for entries whose names contain a text.
#[derive(Debug)]
struct Flaky {
    inner: Arc<dyn ObjectStore>,
    name: String,
    failures_left: Mutex<u32>,
}

impl std::fmt::Display for Flaky {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a store that does not always answer")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Flaky {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
        self.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        if at.as_ref().contains(&self.name) {
            let mut left = self.failures_left.lock().unwrap();
            if *left > 0 {
                *left -= 1;
                return Err(object_store::Error::Generic {
                    store: "test",
                    source: "connection reset by peer".into(),
                });
            }
        }
        self.inner.get_opts(at, options).await
    }

    fn delete_stream(
        &self,
        places: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.inner.delete_stream(places)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> object_store::Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}

impl Fixture {
    fn flaky(&self, name: impl Into<String>, failures: u32) -> Store {
        Store::over(Arc::new(Flaky {
            inner: self.store.backend.clone(),
            name: name.into(),
            failures_left: Mutex::new(failures),
        }))
    }
}

#[tokio::test]
async fn a_dropped_connection_does_not_turn_a_delta_into_a_checkpoint() {
    let f = fixture();
    // Version 4 has a checkpoint beside its delta.
    let versions = f.chain(4, 4).await;
    let held = [(3, versions[2].1.clone())];
    let delta = versions[3].0.delta.unwrap();
    for failures in [0, 1, 2] {
        let store = f.flaky(delta.digest.to_string(), failures);
        let made = store.materialize(POLICY, 4, &f.trusted(), &held).await.unwrap();
        assert_eq!(made.bytes_fetched, delta.size_bytes, "{failures} failures");
    }
    // An object that the store never gives is avoided.
    let store = f.flaky(delta.digest.to_string(), u32::MAX);
    let made = store.materialize(POLICY, 4, &f.trusted(), &held).await.unwrap();
    let checkpoint = versions[3].0.checkpoint.unwrap();
    assert_eq!(made.bytes_fetched, checkpoint.size_bytes);
    // A document too: the caller asks again a moment later.
    let store = f.flaky("version/0000000003", 1);
    let error = store.materialize(POLICY, 4, &f.trusted(), &held).await.unwrap_err();
    assert!(matches!(error, Error::Backend { .. }), "{error}");
    let made = store.materialize(POLICY, 4, &f.trusted(), &held).await.unwrap();
    assert_eq!(made.bytes_fetched, delta.size_bytes);
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_an_error_and_no_object_is_given_up() {
    let f = fixture();
    let versions = f.chain(4, 4).await;
    let held = [(3, versions[2].1.clone())];
    let store = f.flaky("object/", u32::MAX);
    let error = store.materialize(POLICY, 4, &f.trusted(), &held).await.unwrap_err();
    assert!(matches!(error, Error::Backend { .. }), "{error}");
}
