//! Garbage collection keeps live versions restorable, even if it is killed at any step or runs
//! beside publishers.

use super::*;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions, PutResult,
    RenameOptions, UploadPart,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

/// A store whose process dies after some operations. Later operations have no effect.
#[derive(Debug)]
struct Dying {
    inner: Arc<dyn ObjectStore>,
    left: Arc<AtomicI64>,
    moves: Moves,
    /// What a publisher writes as soon as the last of these places was found to be empty.
    publishes: Mutex<Vec<(Path, Bytes)>>,
}

/// An upload to it. Each part and the completion count as operations.
#[derive(Debug)]
struct DyingUpload {
    inner: Box<dyn MultipartUpload>,
    left: Arc<AtomicI64>,
}

fn alive(left: &AtomicI64) -> object_store::Result<()> {
    match left.fetch_sub(1, Ordering::Relaxed) {
        1.. => Ok(()),
        // An error that is not retried.
        _ => Err(object_store::Error::NotSupported {
            source: "killed".into(),
        }),
    }
}

#[async_trait::async_trait]
impl MultipartUpload for DyingUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        match alive(&self.left) {
            Ok(()) => self.inner.put_part(data),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        alive(&self.left)?;
        self.inner.complete().await
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        alive(&self.left)?;
        self.inner.abort().await
    }
}

/// How a store moves an object.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moves {
    /// In one operation, as a file system does.
    AtOnce,
    /// By copying and deleting, as object stores do. The process may die in between.
    ByCopy,
    /// By copying, but only small objects, as S3 does.
    SmallByCopy,
}

impl Dying {
    fn alive(&self) -> object_store::Result<()> {
        alive(&self.left)
    }
}

impl std::fmt::Display for Dying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a store that dies")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Dying {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
        self.alive()?;
        self.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.alive()?;
        Ok(Box::new(DyingUpload {
            inner: self.inner.put_multipart_opts(at, options).await?,
            left: self.left.clone(),
        }))
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.alive()?;
        let found = self.inner.get_opts(at, options).await;
        let is_last = |writes: &[(Path, Bytes)]| writes.last().is_some_and(|(last, _)| last == at);
        let writes = Some(self.publishes.lock().unwrap()).filter(|writes| found.is_err() && is_last(writes));
        for (place, bytes) in writes
            .map(|mut writes| std::mem::take(&mut *writes))
            .unwrap_or_default()
        {
            self.inner.put(&place, bytes.into()).await?;
        }
        found
    }

    fn delete_stream(
        &self,
        places: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        match self.alive() {
            Ok(()) => self.inner.delete_stream(places),
            Err(error) => Box::pin(futures::stream::iter([Err(error)])),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        match self.alive() {
            Ok(()) => self.inner.list(prefix),
            Err(error) => Box::pin(futures::stream::iter([Err(error)])),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.alive()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.alive()?;
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> object_store::Result<()> {
        self.alive()?;
        match self.moves {
            Moves::AtOnce => self.inner.rename_opts(from, to, options).await,
            Moves::SmallByCopy if self.inner.head(from).await?.size > objects::COPY_BYTES_MAX => {
                Err(object_store::Error::Generic {
                    store: "test",
                    source: "the copy source is larger than the maximum allowable size".into(),
                })
            }
            Moves::ByCopy | Moves::SmallByCopy => {
                self.inner.copy_opts(from, to, CopyOptions::default()).await?;
                self.alive()?;
                self.inner.delete(from).await
            }
        }
    }
}

impl Fixture {
    /// The same store in a process that dies after `operations`.
    fn dying(&self, operations: i64, moves: Moves) -> Store {
        Store::over(Arc::new(Dying {
            inner: self.store.backend.clone(),
            left: Arc::new(AtomicI64::new(operations)),
            moves,
            publishes: Mutex::default(),
        }))
    }

    pub(super) async fn assign(&self, epoch: i64, aliases: &[(&str, &Manifest)]) {
        let aliases = aliases.iter().map(|(alias, manifest)| {
            let target = Target {
                version: manifest.version,
                root: manifest.root,
            };
            (alias.to_string(), target)
        });
        let assignment = Assignment {
            policy: POLICY.into(),
            epoch,
            aliases: aliases.collect(),
            arms: vec![],
            cluster_arms: Default::default(),
            shadow: 0.0,
            salt: String::new(),
            created_at: time::OffsetDateTime::now_utc() - time::Duration::days(2),
        };
        self.store.put_assignment(&assignment, &self.key).await.unwrap();
    }

    pub(super) async fn collect(&self, store: &Store, dry_run: bool) -> Result<GcReport, Error> {
        let retention = retention(1);
        let versions = || async { Ok(BTreeSet::new()) };
        store
            .collect_garbage(POLICY, &self.trusted(), &retention, dry_run, versions)
            .await
    }

    async fn assert_restorable(
        &self,
        versions: &[(Manifest, Arc<Checkpoint>)],
        serials: impl IntoIterator<Item = i64>,
    ) {
        for serial in serials {
            let rebuilt = self.materialize(serial, &[]).await;
            let rebuilt = rebuilt.unwrap_or_else(|error| panic!("version {serial}: {error}"));
            assert_eq!(rebuilt.checkpoint, versions[serial as usize - 1].1, "{serial}");
        }
    }

    fn objects(&self) -> usize {
        std::fs::read_dir(self.path(&format!("policy/{POLICY}/object")))
            .unwrap()
            .count()
    }

    fn trash(&self) -> usize {
        let trash = std::fs::read_dir(self.path(&format!("policy/{POLICY}/trash")));
        let names = trash.into_iter().flatten().map(|entry| entry.unwrap().file_name());
        // Copying a hard link onto itself leaves a second name, which is not an object.
        names.filter(|name| !name.to_string_lossy().contains('#')).count()
    }
}

pub(super) fn retention(assignments: usize) -> Retention {
    Retention {
        grace: time::Duration::hours(1),
        assignments,
        versions: BTreeSet::new(),
    }
}

/// Thirty versions with a checkpoint at every eighth. 30 and 13 are assigned, 9 was before; 4 is
/// pinned.
async fn scene() -> (Fixture, Vec<(Manifest, Arc<Checkpoint>)>) {
    scene_in(fixture()).await
}

async fn scene_in(f: Fixture) -> (Fixture, Vec<(Manifest, Arc<Checkpoint>)>) {
    let versions = f.chain(30, 8).await;
    let manifest = |serial: usize| &versions[serial - 1].0;
    f.assign(1, &[("champion", manifest(9))]).await;
    f.assign(2, &[("champion", manifest(30)), ("base", manifest(13))]).await;
    let pin = Pin {
        version: 4,
        reason: "the paper".into(),
        created_at: time::OffsetDateTime::now_utc(),
    };
    assert!(f.store.pin(POLICY, &pin).await.unwrap());
    assert!(!f.store.pin(POLICY, &pin).await.unwrap());
    for (from, to) in [(1, 9), (22, 30)] {
        let (from, to) = (manifest(from), manifest(to));
        let squashed = f
            .store
            .squash(POLICY, (from, to), 8, u64::MAX, &f.key, &f.trusted())
            .await;
        assert!(matches!(squashed, Ok(SquashOutcome::Created(_))));
    }
    f.store
        .put_object(POLICY, &Bytes::from_static(b"of a publication that was cut off"))
        .await
        .unwrap();
    f.age();
    // The squashed deltas stay young: their documents have the current time.
    (f, versions)
}

#[tokio::test]
async fn live_versions_stay_restorable_and_garbage_is_deleted() {
    gc_keeps_live_versions(fixture()).await;
}

pub(super) async fn gc_keeps_live_versions(f: Fixture) {
    let (f, versions) = scene_in(f).await;
    f.store
        .put_object(POLICY, &Bytes::from_static(b"of one that goes on"))
        .await
        .unwrap();
    let before = f.objects();
    let preview = f.collect(&f.store, true).await.unwrap();
    assert_eq!(f.objects(), before, "a dry run deletes nothing");
    let done = f.collect(&f.store, false).await.unwrap();
    assert_eq!((done.deleted.len(), &done.live), (preview.deleted.len(), &preview.live));
    assert_eq!(done.live, [4, 13, 30].into());
    assert!(done.deleted.len() >= 8 && done.unreachable.len() >= 6, "{done:?}");
    assert_eq!((f.objects(), f.trash()), (before - done.deleted.len(), 0));
    assert!(f.objects() == done.kept_objects);
    f.assert_restorable(&versions, [4, 13, 30]).await;
    for &serial in &done.unreachable {
        let error = f.materialize(serial, &[]).await.unwrap_err();
        assert!(matches!(error, Error::NoPath { .. }), "{serial}: {error}");
    }
    // One checkpoint may be damaged.
    let checkpoint = |serial: usize| f.object_path(&versions[serial - 1].0.checkpoint.unwrap());
    let sound = std::fs::read(checkpoint(24)).unwrap();
    std::fs::write(checkpoint(24), "damaged").unwrap();
    f.assert_restorable(&versions, [30]).await;
    std::fs::write(checkpoint(24), sound).unwrap();
    let again = f.collect(&f.store, false).await.unwrap();
    assert!(again.deleted.is_empty(), "the second finds nothing to do: {again:?}");

    assert!(f.store.unpin(POLICY, 4).await.unwrap());
    assert!(!f.store.unpin(POLICY, 4).await.unwrap());
    assert_eq!(f.collect(&f.store, false).await.unwrap().live, [13, 30].into());
}

#[tokio::test]
async fn the_base_of_an_adapter_stays_and_both_are_restored_together() {
    let f = fixture();
    let versions = f.chain(3, 1).await;
    let base = &versions[1].1;
    let adapter = |number: u8| {
        let factor = artifact::tensor::TensorData::new(safetensors::Dtype::U8, vec![2], vec![number, 1]).unwrap();
        let mut files = base.files.clone();
        files.insert(artifact::adapter::CONFIG.into(), Bytes::from_static(b"{}"));
        Arc::new(Checkpoint {
            tensors: [(format!("{}a.lora_A.weight", artifact::adapter::PREFIX), factor)].into(),
            files,
        })
    };
    let factors = adapter(7);
    let object = f.store.put_object(POLICY, &factors.to_bytes().unwrap()).await.unwrap();
    let manifest = Manifest {
        version: 4,
        root: factors.root(),
        line: "tuned".into(),
        tensor_bytes: factors.tensor_bytes(),
        delta: None,
        checkpoint: Some(object),
        adapts: versions[2].0.parent,
        ..versions[2].0.clone()
    };
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    f.age();
    let retention = Retention {
        versions: BTreeSet::from([4]),
        ..retention(1)
    };
    let none = || async { Ok(BTreeSet::from([4])) };
    let report = f
        .store
        .collect_garbage(POLICY, &f.trusted(), &retention, false, none)
        .await
        .unwrap();
    assert!(
        report.live.contains(&2) && !report.live.contains(&1),
        "{:?}",
        report.live
    );
    let restored = f.store.materialize_model(POLICY, 4, &f.trusted(), &[]).await.unwrap();
    assert_eq!(*restored.checkpoint, base.with_adapter(&factors));
    assert_eq!(restored.root, factors.root());
    // what a replica holds saves the base
    let held = [(4, restored.checkpoint.clone())];
    let again = f.store.materialize_model(POLICY, 4, &f.trusted(), &held).await.unwrap();
    assert_eq!((again.bytes_fetched, &again.checkpoint), (0, &restored.checkpoint));
}

#[tokio::test]
async fn versions_of_the_retained_assignments_stay_live() {
    let (f, versions) = scene().await;
    let versions_named = || async { Ok(BTreeSet::from([21])) };
    let retention = Retention {
        versions: BTreeSet::from([21]),
        ..retention(2)
    };
    let done = f
        .store
        .collect_garbage(POLICY, &f.trusted(), &retention, false, versions_named)
        .await
        .unwrap();
    assert_eq!(done.live, [4, 9, 13, 21, 30].into());
    f.assert_restorable(&versions, [4, 9, 13, 21, 30]).await;
}

#[tokio::test]
async fn nothing_is_deleted_while_a_document_cannot_be_read() {
    let (f, _) = scene().await;
    let before = f.objects();
    let stranger = SigningKey::from_seed(&[9; 32]).trusted();
    let versions = || async { Ok(BTreeSet::new()) };
    let error = f
        .store
        .collect_garbage(POLICY, &stranger, &retention(1), false, versions)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("nothing is deleted"), "{error}");
    assert_eq!(f.objects(), before);
}

#[tokio::test]
async fn nothing_is_deleted_while_an_older_assignment_cannot_be_read() {
    let (f, _) = scene().await;
    let before = f.objects();
    let place = f.path(&format!("policy/{POLICY}/assignment/{:010}.json", 1));
    std::fs::write(place, "garbage").unwrap();
    let error = f.collect(&f.store, false).await.unwrap_err().to_string();
    assert!(
        error.contains("assignment 1") && error.contains("nothing is deleted"),
        "{error}"
    );
    assert_eq!(f.objects(), before);
}

#[tokio::test]
async fn assignments_of_a_revoked_key_keep_their_versions_and_do_not_stop_gc() {
    let (f, versions) = scene().await;
    // The thief of a release key assigns version 21, then the key is revoked.
    let stolen = SigningKey::from_seed(&[7; 32]);
    let thief = Fixture {
        folder: tempfile::tempdir().unwrap(),
        store: f.store.clone(),
        key: stolen,
    };
    thief.assign(3, &[("champion", &versions[20].0)]).await;
    let mut keys = f.trusted();
    keys.insert(&thief.key, artifact::sign::Role::Release);
    keys.revoke(thief.key.key_id());
    let versions_named = || async { Ok(BTreeSet::new()) };
    let done = f
        .store
        .collect_garbage(POLICY, &keys, &retention(1), false, versions_named)
        .await
        .unwrap();
    assert_eq!(done.live, [4, 13, 21, 30].into());
    assert!(!done.deleted.is_empty());
    f.assert_restorable(&versions, [4, 13, 21, 30]).await;
    let report = f.store.fsck(POLICY, &keys, &retention(1), false).await.unwrap();
    assert!(report.is_healthy(), "{report:?}");
}

/// Every eighth step, or as `SPRINGTIDE_GC_EVERY` says.
#[tokio::test]
async fn gc_killed_at_any_step_loses_nothing_and_the_next_run_finishes() {
    let every: usize = std::env::var("SPRINGTIDE_GC_EVERY").map_or(8, |every| every.parse().unwrap());
    let mut killed = 0;
    for (skip, moves) in [(0, Moves::AtOnce), (1, Moves::ByCopy), (2, Moves::SmallByCopy)] {
        // The scene is created once and copied for every kill.
        let (original, versions) = scene().await;
        let from = original.folder.path().join("new/store");
        for operations in (1..).skip(skip % every).step_by(every) {
            let f = fixture();
            copy(&from, &f.folder.path().join("new/store"));
            let outcome = f.collect(&f.dying(operations, moves), false).await;
            f.assert_restorable(&versions, [4, 13, 30]).await;
            let done = f.collect(&f.store, false).await.unwrap();
            assert!(
                done.restored.is_empty(),
                "nothing that is needed was ever taken: {done:?}"
            );
            f.assert_restorable(&versions, [4, 13, 30]).await;
            assert_eq!(f.trash(), 0);
            let report = f.store.fsck(POLICY, &f.trusted(), &retention(1), true).await.unwrap();
            let notes = report.findings.iter().all(|found| found.severity == Severity::Note);
            assert!(report.is_healthy() && notes, "{report:?}");
            if outcome.is_ok() {
                break;
            }
            killed += 1;
        }
    }
    println!("killed after each of {killed} operations");
    assert!(killed * every > 100, "{killed}");
}

/// Copies a store with the times of its files.
fn copy(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (entry, to) = (entry.unwrap(), to.join(""));
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), &to).unwrap();
            let time = entry.metadata().unwrap().modified().unwrap();
            std::fs::File::options()
                .write(true)
                .open(&to)
                .unwrap()
                .set_modified(time)
                .unwrap();
        }
    }
}

/// Publishers write new versions and old objects again while garbage collections run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gc_beside_publishers_never_loses_live_versions() {
    let histories = std::env::var("SPRINGTIDE_GC_HISTORIES").map_or(12, |count| count.parse().unwrap());
    let (mut deleted, mut published, mut reuploaded) = (0, 0, 0);
    for seed in 0..histories {
        let (f, mut versions) = scene().await;
        let f = Arc::new(f);
        let mut random = StdRng::seed_from_u64(seed);
        // Without a grace period, an object may be missing for a moment. Only re-uploaded objects
        // count.
        let grace = if random.random_bool(0.7) { 0 } else { 3600 };
        let moves = [Moves::AtOnce, Moves::ByCopy, Moves::SmallByCopy][seed as usize % 3];
        let collector = || {
            let (f, store) = (f.clone(), f.dying(i64::MAX, moves));
            tokio::spawn(async move {
                let mut deleted = 0;
                for _ in 0..4 {
                    let retention = Retention {
                        grace: time::Duration::seconds(grace),
                        ..retention(1)
                    };
                    let versions = || async { Ok(BTreeSet::new()) };
                    let done = store
                        .collect_garbage(POLICY, &f.trusted(), &retention, false, versions)
                        .await;
                    deleted += done.unwrap().deleted.len();
                }
                deleted
            })
        };
        let collectors: Vec<_> = (0..1 + seed / 3 % 2).map(|_| collector()).collect();
        for _ in 0..12 {
            let version = versions.len() as i64 + 1;
            // The same bytes as an old version: its checkpoint or delta may be moving to the trash.
            let again = random.random_bool(0.5);
            let source = random.random_range(1..versions.len());
            let (checkpoint, base) = match again {
                true => (versions[source].1.clone(), source - 1),
                false => (Arc::new(weights(version)), versions.len() - 1),
            };
            let delta = Pieces::new(vec![
                delta::encode(&versions[base].1, &checkpoint, &Threads::ONE)
                    .unwrap()
                    .into(),
            ]);
            let full = Pieces::new(checkpoint.to_pieces().unwrap());
            for parts in [&delta, &full] {
                f.store.put_pieces(POLICY, parts).await.unwrap();
            }
            let manifest = Manifest {
                version,
                root: checkpoint.root(),
                parent: Some(Parent {
                    version: versions[base].0.version,
                    root: versions[base].0.root,
                }),
                checkpoint: Some(full.object()),
                delta: Some(delta.object()),
                created_at: time::OffsetDateTime::now_utc(),
                ..versions[0].0.clone()
            };
            f.store.put_manifest(&manifest, &f.key).await.unwrap();
            reuploaded += f.store.reupload_missing(POLICY, &[&delta, &full]).await.unwrap();
            published += 1;
            versions.push((manifest, checkpoint));
            if grace > 0 {
                f.assert_restorable(&versions, [version, 4, 13]).await;
            }
        }
        for collector in collectors {
            deleted += collector.await.unwrap();
        }
        f.assert_restorable(&versions, [4, 13, versions.len() as i64]).await;
        let retention = Retention {
            grace: time::Duration::seconds(grace),
            ..retention(1)
        };
        let named = || async { Ok(BTreeSet::new()) };
        let done = f
            .store
            .collect_garbage(POLICY, &f.trusted(), &retention, false, named)
            .await
            .unwrap();
        f.assert_restorable(&versions, done.live).await;
        assert_eq!(f.trash(), 0);
        let report = f.store.fsck(POLICY, &f.trusted(), &retention, false).await.unwrap();
        assert!(report.is_healthy(), "{report:?}");
    }
    println!(
        "{histories} histories: {published} versions published, {deleted} objects deleted, {reuploaded} uploaded again"
    );
    assert!(deleted > 0);
}

#[tokio::test]
async fn an_object_that_is_published_while_its_old_list_of_parts_is_deleted_has_a_list() {
    let (f, _) = scene().await;
    let bytes = Bytes::from(vec![7; artifact::parts::PART_BYTES as usize + 1]);
    let object = f.store.put_object(POLICY, &bytes).await.unwrap();
    f.age();
    let place = |folder: &str| Path::from(format!("policy/{POLICY}/{folder}/{}", object.digest));
    let list = f.store.get_parts(POLICY, &object).await.unwrap().to_bytes();
    let store = Store::over(Arc::new(Dying {
        inner: f.store.backend.clone(),
        left: Arc::new(AtomicI64::new(i64::MAX)),
        moves: Moves::AtOnce,
        publishes: Mutex::new(vec![(place("parts"), list.into()), (place("object"), bytes.clone())]),
    }));
    let report = f.collect(&store, false).await.unwrap();
    assert!(report.deleted.contains_key(&object.digest), "the old one was garbage");
    assert_eq!(
        f.store.get_object(POLICY, &object).await.unwrap(),
        bytes,
        "the new one is whole"
    );
    f.store.get_parts(POLICY, &object).await.unwrap();
}
