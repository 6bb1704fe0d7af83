//! The store in a local folder: put-if-absent, verification of everything read, chains and their
//! repair.

mod faults;
mod files;
mod fsck;
mod gc;
mod parts;
mod reverse;
mod revocations;
mod s3;
mod shards;
mod squash;
mod transient;

use super::keys::object_key;
use super::*;
use artifact::assignment::{Arm, Assignment, Target};
use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::manifest::{Manifest, ObjectRef, Parent};
use artifact::sign::{SigningKey, TrustedKeys};
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use safetensors::Dtype;

const POLICY: &str = "demo";

/// The content hash, computed from the bytes alone.
fn rehashed(checkpoint: &Checkpoint) -> Digest {
    let mut checkpoint = checkpoint.clone();
    for tensor in checkpoint.tensors.values_mut() {
        tensor.bytes = Bytes::clone(&tensor.bytes).into();
    }
    checkpoint.root()
}

fn sample_assignment() -> Assignment {
    let target = |version| Target {
        version,
        root: Digest::of(&[version as u8]),
    };
    let arm = |alias: &str, weight| Arm {
        alias: alias.into(),
        weight,
        explore: 0.0,
        temperature_max: None,
        probability_min: None,
    };
    Assignment {
        policy: POLICY.into(),
        epoch: 3,
        aliases: [("champion".into(), target(8)), ("base".into(), target(1))].into(),
        arms: vec![arm("champion", 0.6), arm("base", 0.4)],
        cluster_arms: Default::default(),
        shadow: 0.0,
        salt: String::new(),
        created_at: time::macros::datetime!(2026-11-21 06:00 UTC),
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    store: Store,
    key: SigningKey,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("file://{}/new/store", folder.path().display())).unwrap();
    Fixture {
        folder,
        store,
        key: SigningKey::from_seed(&[1; 32]),
    }
}

impl Fixture {
    fn trusted(&self) -> TrustedKeys {
        self.key.trusted()
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.path().join("new/store").join(key)
    }

    fn object_path(&self, object: &ObjectRef) -> PathBuf {
        self.path(&format!("policy/{POLICY}/object/{}", object.digest))
    }

    /// Publishes versions 1..=count: the first and every `checkpoint_every`th with a checkpoint,
    /// all but the first with a delta.
    async fn chain(&self, count: i64, checkpoint_every: i64) -> Vec<(Manifest, Arc<Checkpoint>)> {
        let mut versions: Vec<(Manifest, Arc<Checkpoint>)> = vec![];
        for version in 1..=count {
            let checkpoint = Arc::new(weights(version));
            let last = versions.last();
            let mut manifest = Manifest {
                policy: POLICY.into(),
                version,
                root: checkpoint.root(),
                parent: last.map(|(m, _)| Parent {
                    version: m.version,
                    root: m.root,
                }),
                branch: 0,
                checkpoint: None,
                delta: None,
                tensor_bytes: checkpoint.tensor_bytes(),
                run: None,
                fence: 1,
                line: "realtime".into(),
                created_at: time::OffsetDateTime::now_utc() - time::Duration::days(2),
                quantized: vec![],
                delta_shards: vec![],
                reference: None,
                adapts: None,
            };
            if let Some((_, base)) = last {
                let delta = delta::encode(base, &checkpoint, &Threads::ONE).unwrap();
                manifest.delta = Some(self.store.put_object(POLICY, &delta.into()).await.unwrap());
            }
            if version == 1 || version % checkpoint_every == 0 {
                let object = checkpoint.to_bytes().unwrap();
                manifest.checkpoint = Some(self.store.put_object(POLICY, &object).await.unwrap());
            }
            let outcome = self.store.put_manifest(&manifest, &self.key).await.unwrap();
            assert_eq!(outcome, PutOutcome::Created);
            versions.push((manifest, checkpoint));
        }
        versions
    }

    /// Makes all entries two days old.
    fn age(&self) {
        let old = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 86_400);
        for folder in ["object", "version", "fold", "assignment", "pin"] {
            for entry in std::fs::read_dir(self.path(&format!("policy/{POLICY}/{folder}")))
                .into_iter()
                .flatten()
            {
                let file = std::fs::File::options()
                    .write(true)
                    .open(entry.unwrap().path())
                    .unwrap();
                file.set_modified(old).unwrap();
            }
        }
    }

    async fn materialize(&self, serial: i64, have: &[(i64, Arc<Checkpoint>)]) -> Result<Materialized, Error> {
        self.store.materialize(POLICY, serial, &self.trusted(), have).await
    }
}

/// A network of 5,000 weights, a few of which differ from the version before.
fn weights(version: i64) -> Checkpoint {
    let mut bits: Vec<u16> = (0..5_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as u16)
        .collect();
    for step in 1..version as usize {
        for i in (step * 13 % 97..5_000).step_by(97) {
            bits[i] = bits[i].wrapping_add(1);
        }
    }
    let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    Checkpoint {
        tensors: [(
            "w".to_string(),
            TensorData::new(Dtype::BF16, vec![50, 100], bytes).unwrap(),
        )]
        .into(),
        files: [("config.json".to_string(), Bytes::from_static(b"{}"))].into(),
    }
}

#[tokio::test]
async fn an_object_is_stored_once_under_its_digest_and_read_back() {
    an_object_is_written_once(fixture()).await;
}

async fn an_object_is_written_once(f: Fixture) {
    let bytes = Bytes::from_static(b"some bytes");
    let object = f.store.put_object(POLICY, &bytes).await.unwrap();
    assert_eq!(object, ObjectRef::of(b"some bytes"));
    assert_eq!(f.store.put_object(POLICY, &bytes).await.unwrap(), object);
    assert_eq!(f.store.get_object(POLICY, &object).await.unwrap(), bytes);
    assert_eq!(std::fs::read(f.object_path(&object)).unwrap(), b"some bytes");
    let missing = f.store.get_object(POLICY, &ObjectRef::of(b"other")).await;
    assert!(matches!(missing, Err(Error::NotFound(_))));
}

#[tokio::test]
async fn a_damaged_object_is_refused_and_putting_it_again_repairs_it() {
    let f = fixture();
    let bytes = Bytes::from_static(b"some bytes");
    let object = f.store.put_object(POLICY, &bytes).await.unwrap();
    for damage in [b"some byte".as_slice(), b"some bytez"] {
        std::fs::write(f.object_path(&object), damage).unwrap();
        let read = f.store.get_object(POLICY, &object).await;
        assert!(matches!(read, Err(Error::Corrupt { .. })));
        f.store.put_object(POLICY, &bytes).await.unwrap();
        assert_eq!(f.store.get_object(POLICY, &object).await.unwrap(), bytes);
    }
}

#[tokio::test]
async fn putting_an_existing_object_again_renews_its_time() {
    let f = fixture();
    let bytes = Bytes::from_static(b"some bytes");
    let object = f.store.put_object(POLICY, &bytes).await.unwrap();
    f.age();
    let modified = || std::fs::metadata(f.object_path(&object)).unwrap().modified().unwrap();
    let old = modified();
    f.store.put_object(POLICY, &bytes).await.unwrap();
    assert!(modified() > old);
    assert_eq!(f.store.get_object(POLICY, &object).await.unwrap(), bytes);
}

#[tokio::test]
async fn a_large_object_is_uploaded_in_parts() {
    uploads_in_parts(fixture()).await;
}

async fn uploads_in_parts(f: Fixture) {
    let piece = |seed: u8, len: usize| Bytes::from((0..len).map(|i| (i % 251) as u8 ^ seed).collect::<Vec<_>>());
    let pieces = vec![piece(1, 40 << 20), Bytes::new(), piece(2, 3), piece(3, 25 << 20)];
    let bytes: Vec<u8> = pieces.concat();
    let parts = Pieces::new(pieces);
    let object = f.store.put_pieces(POLICY, &parts).await.unwrap();
    assert_eq!(object, ObjectRef::of(&bytes));
    assert!(std::fs::read(f.object_path(&object)).unwrap() == bytes);
    f.store.check_object(POLICY, &object).await.unwrap();
    assert!(f.store.get_object(POLICY, &object).await.unwrap() == bytes);
    // Damaged, then put again.
    std::fs::write(f.object_path(&object), &bytes[1..]).unwrap();
    assert!(matches!(
        f.store.check_object(POLICY, &object).await,
        Err(Error::Corrupt { .. })
    ));
    assert_eq!(f.store.put_pieces(POLICY, &parts).await.unwrap(), object);
    f.store.check_object(POLICY, &object).await.unwrap();
    // Deleted after its manifest was written, then uploaded again.
    assert_eq!(f.store.reupload_missing(POLICY, &[&parts]).await.unwrap(), 0);
    std::fs::remove_file(f.object_path(&object)).unwrap();
    assert_eq!(f.store.reupload_missing(POLICY, &[&parts]).await.unwrap(), 1);
    f.store.check_object(POLICY, &object).await.unwrap();
}

#[tokio::test]
async fn a_manifest_is_written_once_and_the_second_writer_gets_the_first_one() {
    a_document_is_written_once(fixture()).await;
}

async fn a_document_is_written_once(f: Fixture) {
    let (manifest, _) = f.chain(1, 1).await.remove(0);
    let read = f.store.get_manifest(POLICY, 1, &f.trusted()).await.unwrap();
    assert_eq!(read, manifest);
    let mut zombie = manifest.clone();
    zombie.line = "run-00000000".into();
    let outcome = f.store.put_manifest(&zombie, &f.key).await.unwrap();
    assert_eq!(outcome, PutOutcome::Exists(manifest));
}

#[tokio::test]
async fn one_of_many_concurrent_writers_wins() {
    let f = fixture();
    let (manifest, _) = f.chain(1, 1).await.remove(0);
    let key = Arc::new(SigningKey::from_seed(&[1; 32]));
    let tasks: Vec<_> = (0..8i64)
        .map(|fence| {
            let (store, key) = (f.store.clone(), key.clone());
            let mut manifest = manifest.clone();
            manifest.version = 2;
            manifest.fence = fence;
            tokio::spawn(async move { store.put_manifest(&manifest, &key).await.unwrap() })
        })
        .collect();
    let outcomes = futures::future::join_all(tasks).await;
    let created = outcomes
        .iter()
        .filter(|o| *o.as_ref().unwrap() == PutOutcome::Created)
        .count();
    assert_eq!(created, 1);
}

#[tokio::test]
async fn unsigned_foreign_moved_and_missing_manifests_are_refused() {
    let f = fixture();
    f.chain(2, 1).await;
    let get = |serial| {
        let keys = f.trusted();
        let store = f.store.clone();
        async move { store.get_manifest(POLICY, serial, &keys).await }
    };
    assert!(matches!(get(3).await, Err(Error::NotFound(_))));
    let stranger = SigningKey::from_seed(&[9; 32]).trusted();
    let read = f.store.get_manifest(POLICY, 1, &stranger).await;
    assert!(matches!(read, Err(Error::Signature { .. })));
    // An older manifest served instead of a newer one.
    let place = |serial: i64| f.path(&format!("policy/{POLICY}/version/{serial:010}.json"));
    std::fs::copy(place(1), place(2)).unwrap();
    assert!(matches!(get(2).await, Err(Error::Document { .. })));
    std::fs::write(place(1), "{}").unwrap();
    assert!(matches!(get(1).await, Err(Error::Signature { .. })));
}

#[tokio::test]
async fn the_latest_assignment_is_found_from_any_epoch_and_across_a_gap() {
    let f = fixture();
    let latest = |after| {
        let keys = f.trusted();
        let store = f.store.clone();
        async move { store.latest_assignment(POLICY, after, &keys).await }
    };
    assert_eq!(latest(0).await.unwrap(), None);
    let mut assignment = sample_assignment();
    for epoch in [1, 2, 3, 5, 6] {
        assignment.epoch = epoch;
        assert!(f.store.put_assignment(&assignment, &f.key).await.unwrap());
    }
    for after in [0, 1, 3, 4, 5] {
        assert_eq!(latest(after).await.unwrap().unwrap().epoch, 6, "{after}");
    }
    assert_eq!(latest(6).await.unwrap(), None);
    assert!(!f.store.put_assignment(&assignment, &f.key).await.unwrap());
    let epochs = async |range| Vec::from_iter(f.store.assignment_epochs(POLICY, range).await.unwrap());
    assert_eq!(epochs(1..=i64::MAX).await, [1, 2, 3, 5, 6]);
    assert_eq!(epochs(4..=6).await, [5, 6]);
    assert_eq!(epochs(6..=6).await, [6]);
    assert_eq!(epochs(2..=4).await, [2, 3]);
    let last = async |range| f.store.last_assignment_epoch(POLICY, range).await.unwrap();
    assert_eq!(
        (last(1..=9).await, last(1..=4).await, last(7..=9).await),
        (Some(6), Some(3), None)
    );

    let place = |epoch: i64| f.path(&format!("policy/{POLICY}/assignment/{epoch:010}.json"));
    std::fs::write(place(5), "garbage").unwrap();
    assert_eq!(latest(3).await.unwrap().unwrap().epoch, 6, "a later one verifies");
    std::fs::copy(place(1), place(6)).unwrap();
    assert!(latest(3).await.is_err());
    assert!(latest(0).await.is_err());
}

#[tokio::test]
async fn private_files_are_replaced_read_and_deleted() {
    let f = fixture();
    let key = "run/0190/step-7";
    f.store.put_private(key, &Bytes::from_static(b"one")).await.unwrap();
    f.store.put_private(key, &Bytes::from_static(b"two")).await.unwrap();
    assert_eq!(f.store.get_private(key).await.unwrap(), "two");
    let listed = f.store.list_private("run").await.unwrap();
    assert_eq!(listed.keys().collect::<Vec<_>>(), [key]);
    assert_eq!(listed[key].size_bytes, 3);
    f.store.delete_private(key).await.unwrap();
    f.store.delete_private(key).await.unwrap();
    assert!(matches!(f.store.get_private(key).await, Err(Error::NotFound(_))));
}

#[tokio::test]
async fn names_that_leave_the_folder_or_start_with_a_dot_are_refused() {
    let f = fixture();
    let bytes = Bytes::new();
    for policy in ["", "..", ".x", "a/b", "A", "a b", &"a".repeat(65)] {
        assert!(matches!(
            f.store.put_object(policy, &bytes).await,
            Err(Error::Policy(_))
        ));
    }
    for key in ["", "/a", "a/", "../a", "a/../b", "a//b", "./a"] {
        assert!(f.store.put_private(key, &bytes).await.is_err(), "{key}");
    }
    for url in ["", "file://", "http://x", "/srv/x"] {
        assert!(matches!(Store::open(url), Err(Error::Url { .. })), "{url}");
    }
}

#[tokio::test]
async fn a_chain_is_followed_from_the_nearest_checkpoint() {
    let f = fixture();
    let versions = f.chain(7, 5).await;
    for (serial, path) in [
        (1, vec![1]),
        (3, vec![1, 2, 3]),
        (5, vec![1, 2, 3, 4, 5]),
        (7, vec![5, 6, 7]),
    ] {
        let rebuilt = f.materialize(serial, &[]).await.unwrap();
        let (manifest, checkpoint) = &versions[serial as usize - 1];
        assert_eq!(&*rebuilt.checkpoint, &**checkpoint);
        assert_eq!(rebuilt.checkpoint.root(), manifest.root);
        // 5 has a checkpoint. A path over deltas would also start with one and cost more.
        let expected = if serial == 5 { vec![5] } else { path };
        assert_eq!(rebuilt.path, expected);
        assert!(rebuilt.bytes_fetched > 0);
    }
}

#[tokio::test]
async fn a_held_version_saves_the_checkpoint_download() {
    let f = fixture();
    let versions = f.chain(6, 5).await;
    let held = |serial: i64| (serial, versions[serial as usize - 1].1.clone());
    let rebuilt = f.materialize(6, &[held(4), held(1)]).await.unwrap();
    assert_eq!(rebuilt.path, [4, 5, 6]);
    assert_eq!(rebuilt.checkpoint, versions[5].1);
    let sizes = |i: usize| versions[i].0.delta.unwrap().size_bytes;
    assert_eq!(rebuilt.bytes_fetched, sizes(4) + sizes(5));
    let rebuilt = f.materialize(6, &[held(6)]).await.unwrap();
    assert_eq!((rebuilt.path, rebuilt.bytes_fetched), (vec![6], 0));
}

#[tokio::test]
async fn a_held_version_with_another_content_hash_is_not_used() {
    let f = fixture();
    let versions = f.chain(3, 10).await;
    let wrong = versions[0].1.clone();
    for serial in [2, 3] {
        let rebuilt = f.materialize(3, &[(serial, wrong.clone())]).await.unwrap();
        assert_eq!(rebuilt.checkpoint, versions[2].1);
        assert_eq!(rebuilt.path, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_missing_or_damaged_delta_is_bypassed_through_a_checkpoint() {
    let f = fixture();
    let versions = f.chain(6, 4).await;
    let held = [(2, versions[1].1.clone())];
    assert_eq!(f.materialize(6, &held).await.unwrap().path, [2, 3, 4, 5, 6]);
    // Delta 3 is between the held version and the checkpoint of 4.
    let object = versions[2].0.delta.unwrap();
    let good = std::fs::read(f.object_path(&object)).unwrap();
    let mut damaged = good.clone();
    damaged[good.len() / 2] ^= 1;
    for damage in [None, Some(&damaged[..]), Some(&good[1..])] {
        match damage {
            None => std::fs::remove_file(f.object_path(&object)).unwrap(),
            Some(bytes) => std::fs::write(f.object_path(&object), bytes).unwrap(),
        }
        let rebuilt = f.materialize(6, &held).await.unwrap();
        assert_eq!(rebuilt.path, [4, 5, 6]);
        assert_eq!(rebuilt.checkpoint, versions[5].1);
    }
}

#[tokio::test]
async fn a_damaged_checkpoint_is_bypassed_through_an_older_one() {
    let f = fixture();
    let versions = f.chain(5, 4).await;
    let object = versions[3].0.checkpoint.unwrap();
    let mut damaged = std::fs::read(f.object_path(&object)).unwrap();
    damaged[5_000] ^= 1;
    std::fs::write(f.object_path(&object), damaged).unwrap();
    let rebuilt = f.materialize(5, &[]).await.unwrap();
    assert_eq!(rebuilt.path, [1, 2, 3, 4, 5]);
    assert_eq!(rebuilt.checkpoint, versions[4].1);
}

#[tokio::test]
async fn without_a_path_the_error_lists_what_was_wrong() {
    let f = fixture();
    let versions = f.chain(4, 10).await;
    std::fs::remove_file(f.object_path(&versions[2].0.delta.unwrap())).unwrap();
    let error = f.materialize(4, &[]).await.unwrap_err();
    assert!(matches!(error, Error::NoPath { version: 4, .. }), "{error}");
    assert!(error.to_string().contains("is not there"), "{error}");
    // A held version after the gap still leads there.
    let rebuilt = f.materialize(4, &[(3, versions[2].1.clone())]).await.unwrap();
    assert_eq!(rebuilt.path, [3, 4]);
}

#[tokio::test]
async fn a_valid_delta_under_a_manifest_with_another_content_hash_is_refused() {
    let f = fixture();
    let versions = f.chain(2, 10).await;
    let mut manifest = versions[1].0.clone();
    manifest.version = 3;
    manifest.root = Digest::of(b"another");
    f.store.put_manifest(&manifest, &f.key).await.unwrap();
    let error = f.materialize(3, &[]).await.unwrap_err();
    assert!(matches!(error, Error::NoPath { .. }), "{error}");
}
