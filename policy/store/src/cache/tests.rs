//! The cache in front of a store that counts reads, and damages or interrupts them on request.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};

use super::*;
use artifact::parts::PART_BYTES;

const POLICY: &str = "demo";
const PART: usize = PART_BYTES as usize;

#[derive(Debug)]
struct Faulty {
    inner: LocalFileSystem,
    /// Of objects, without lists of parts.
    bytes_read: AtomicU64,
    /// Reads fail once this many bytes of objects have been read.
    breaks_after: AtomicU64,
    damages: AtomicBool,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a faulty store")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn get_opts(&self, location: &object_store::path::Path, options: GetOptions) -> StoreResult<GetResult> {
        let found = self.inner.get_opts(location, options).await?;
        if location.as_ref().contains("/parts/") {
            return Ok(found);
        }
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let mut bytes = found.bytes().await?.to_vec();
        let read = self.bytes_read.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        if read + bytes.len() as u64 > self.breaks_after.load(Ordering::SeqCst) {
            return Err(object_store::Error::NotFound {
                path: location.to_string(),
                source: "it broke off".into(),
            });
        }
        if self.damages.load(Ordering::SeqCst)
            && let Some(byte) = bytes.last_mut()
        {
            *byte ^= 1;
        }
        let chunks = stream::once(async move { Ok(Bytes::from(bytes)) });
        Ok(GetResult {
            payload: GetResultPayload::Stream(chunks.boxed()),
            meta,
            range,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    async fn put_opts(
        &self,
        location: &object_store::path::Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &object_store::path::Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, StoreResult<object_store::path::Path>>,
    ) -> BoxStream<'static, StoreResult<object_store::path::Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&object_store::path::Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&object_store::path::Path>) -> StoreResult<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &object_store::path::Path,
        to: &object_store::path::Path,
        options: CopyOptions,
    ) -> StoreResult<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    faulty: Arc<Faulty>,
    store: Store,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("store")).unwrap();
        let faulty = Arc::new(Faulty {
            inner: LocalFileSystem::new_with_prefix(folder.path().join("store")).unwrap(),
            bytes_read: AtomicU64::new(0),
            breaks_after: AtomicU64::new(u64::MAX),
            damages: AtomicBool::new(false),
        });
        let store = Store::over(faulty.clone());
        Self { folder, faulty, store }
    }

    /// A separate cache on the same folder, as another process would have.
    fn cache(&self, bytes_max: u64) -> Cache {
        let limits = Limits { bytes_max, streams: 2 };
        Cache::open(&self.folder.path().join("cache"), limits).unwrap()
    }

    async fn put(&self, seed: u8, bytes: usize) -> (ObjectRef, Bytes) {
        let bytes: Vec<u8> = (0..bytes).map(|index| (index / 3) as u8 ^ seed).collect();
        let bytes = Bytes::from(bytes);
        (self.store.put_object(POLICY, &bytes).await.unwrap(), bytes)
    }

    fn read(&self) -> u64 {
        self.faulty.bytes_read.load(Ordering::SeqCst)
    }

    /// Waits until no file is partial: an object is readable before its file is renamed.
    async fn settled(&self) {
        while self.files().iter().any(|name| name.ends_with(PARTIAL)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.folder.path().join("cache")).unwrap();
        let mut names: Vec<String> = files
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_downloaded_once_for_all_readers() {
    let fixture = Fixture::new();
    let (object, bytes) = fixture.put(1, 3 * PART + 5).await;
    let before = fixture.read();
    let (one, other) = (fixture.cache(1 << 30), fixture.cache(1 << 30));
    let reads = [&one, &one, &other, &other].map(|cache| cache.read(&fixture.store, POLICY, &object));
    for got in futures::future::join_all(reads).await {
        assert_eq!(got.unwrap(), bytes);
    }
    assert_eq!(fixture.read() - before, object.size_bytes);
    // Also without the store.
    fixture.faulty.breaks_after.store(0, Ordering::SeqCst);
    let again = fixture.cache(1 << 30).read(&fixture.store, POLICY, &object).await;
    assert_eq!(again.unwrap(), bytes);
    assert_eq!(
        fixture.files(),
        [object.digest.to_string(), format!("{}.parts", object.digest)]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_download_continues_where_it_stopped() {
    let fixture = Fixture::new();
    let (object, bytes) = fixture.put(2, 4 * PART).await;
    let before = fixture.read();
    let broken = before + 3 * PART_BYTES;
    fixture.faulty.breaks_after.store(broken, Ordering::SeqCst);
    let error = fixture.cache(1 << 30).read(&fixture.store, POLICY, &object).await;
    assert!(matches!(error, Err(Error::Download { .. })), "{error:?}");
    assert!(fixture.files().contains(&format!("{}.arriving", object.digest)));
    fixture.faulty.breaks_after.store(u64::MAX, Ordering::SeqCst);
    let before = fixture.read();
    let got = fixture.cache(1 << 30).read(&fixture.store, POLICY, &object).await;
    assert_eq!(got.unwrap(), bytes);
    assert!(fixture.read() - before < object.size_bytes, "parts were kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_can_be_read_while_others_are_missing() {
    let fixture = Fixture::new();
    let (object, bytes) = fixture.put(3, 4 * PART).await;
    let streams_of_one = Limits {
        bytes_max: 1 << 30,
        streams: 1,
    };
    let cache = Cache::open(&fixture.folder.path().join("cache"), streams_of_one).unwrap();
    fixture
        .faulty
        .breaks_after
        .store(fixture.read() + PART_BYTES, Ordering::SeqCst);
    let arrival = cache.object(&fixture.store, POLICY, &object).await.unwrap();
    // The last part is never downloaded, and its readers get an error.
    let last = arrival.part(3).await;
    assert!(matches!(last, Err(Error::Download { .. })), "{last:?}");
    let state = arrival.state.borrow().present.clone();
    assert_eq!(state, [true, false, false, false]);
    assert_eq!(arrival.read(0).unwrap().unwrap(), bytes[..PART]);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_parts_are_never_returned() {
    let fixture = Fixture::new();
    let (object, bytes) = fixture.put(4, 2 * PART).await;
    fixture.faulty.damages.store(true, Ordering::SeqCst);
    let damaged = fixture.cache(1 << 30).read(&fixture.store, POLICY, &object).await;
    assert!(damaged.unwrap_err().to_string().contains("not the object's"));
    fixture.faulty.damages.store(false, Ordering::SeqCst);
    let cache = fixture.cache(1 << 30);
    assert_eq!(cache.read(&fixture.store, POLICY, &object).await.unwrap(), bytes);
    fixture.settled().await;
    let path = fixture.folder.path().join("cache").join(object.digest.to_string());
    let mut held = std::fs::read(&path).unwrap();
    held[PART + 7] ^= 1;
    std::fs::write(&path, held).unwrap();
    let damaged = fixture.cache(1 << 30).read(&fixture.store, POLICY, &object).await;
    assert!(damaged.unwrap_err().to_string().contains("on this machine's disk"));
    // It was deleted and is downloaded again.
    let healed = fixture.cache(1 << 30).read(&fixture.store, POLICY, &object).await;
    assert_eq!(healed.unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_folder_stays_within_its_limit_and_evicts_the_least_recently_used() {
    let fixture = Fixture::new();
    let bytes_max = 5 * PART_BYTES;
    let (first, _) = fixture.put(5, 2 * PART).await;
    let (second, _) = fixture.put(6, 2 * PART).await;
    let (third, bytes) = fixture.put(7, 2 * PART).await;
    let (large, _) = fixture.put(8, 6 * PART).await;
    let cache = fixture.cache(bytes_max);
    for object in [&first, &second, &first, &third] {
        cache.read(&fixture.store, POLICY, object).await.unwrap();
        fixture.settled().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let files = fixture.files();
    let holds = |object: &ObjectRef| files.contains(&object.digest.to_string());
    assert!(holds(&first) && holds(&third) && !holds(&second), "{files:?}");
    let refused = cache
        .read(&fixture.store, POLICY, &large)
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("the folder may hold"), "{refused}");
    assert_eq!(cache.read(&fixture.store, POLICY, &third).await.unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_arrive_at_once_stay_within_the_folders_limit() {
    let fixture = Fixture::new();
    let (first, bytes) = fixture.put(9, 3 * PART).await;
    let (second, _) = fixture.put(10, 3 * PART).await;
    // Two processes; the second asks while nothing of the first object has arrived.
    let (one, other) = (fixture.cache(5 * PART_BYTES), fixture.cache(5 * PART_BYTES));
    let parts = one.shared.parts(&fixture.store, POLICY, &first).await.unwrap();
    let (held, complete) = one.shared.open_file(parts).unwrap();
    assert!(!complete);
    for cache in [&one, &other] {
        let refused = cache.read(&fixture.store, POLICY, &second).await.unwrap_err();
        assert!(refused.to_string().contains("do not fit beside"), "{refused}");
    }
    drop(held);
    assert_eq!(other.read(&fixture.store, POLICY, &first).await.unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_opens_an_object_late_reads_it_and_deletes_nothing() {
    let fixture = Fixture::new();
    let (object, bytes) = fixture.put(11, 2 * PART).await;
    let (early, late) = (fixture.cache(1 << 30), fixture.cache(1 << 30));
    assert_eq!(early.read(&fixture.store, POLICY, &object).await.unwrap(), bytes);
    fixture.settled().await;
    // It had looked for the complete file just before that was there.
    let (path, name) = (fixture.folder.path().join("cache"), object.digest.to_string());
    std::fs::rename(path.join(&name), path.join("aside")).unwrap();
    let parts = late.shared.parts(&fixture.store, POLICY, &object).await.unwrap();
    let (opened, complete) = late.shared.open_file(parts).unwrap();
    assert!(!complete);
    std::fs::rename(path.join("aside"), path.join(&name)).unwrap();
    let (cached, _) = late.shared.register(opened);
    download(&fixture, &late, &cached).await;
    assert_eq!(cached.part(1).await.unwrap(), bytes[PART..]);
    assert_eq!(fixture.files(), [name.clone(), format!("{name}.parts")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partial_file_that_was_deleted_before_it_was_locked_is_made_again() {
    let fixture = Fixture::new();
    let (object, bytes) = fixture.put(12, 2 * PART).await;
    let cache = fixture.cache(1 << 30);
    let parts = cache.shared.parts(&fixture.store, POLICY, &object).await.unwrap();
    let (opened, _) = cache.shared.open_file(parts).unwrap();
    let name = object.digest.to_string();
    let path = fixture.folder.path().join("cache");
    std::fs::remove_file(path.join(format!("{name}{PARTIAL}"))).unwrap();
    let (cached, _) = cache.shared.register(opened);
    download(&fixture, &cache, &cached).await;
    assert_eq!(cached.part(1).await.unwrap(), bytes[PART..]);
    assert_eq!(std::fs::read(path.join(&name)).unwrap(), bytes);
}

async fn download(fixture: &Fixture, cache: &Cache, cached: &Arc<CachedObject>) {
    let download = Download {
        shared: cache.shared.clone(),
        store: fixture.store.clone(),
        policy: POLICY.to_owned(),
        cached: cached.clone(),
    };
    download.run().await;
}
