//! Attacks by someone who controls the store, on real folders: what a follower must refuse and what
//! it must still accept. Grouped like TUF's attacks. Over 500 lines, because all cases attack the same
//! store.

use super::*;
use artifact::assignment::Target;
use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, Parent};
use artifact::sign::{Envelope, Role, SigningKey};
use artifact::tensor::TensorData;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use time::format_description::well_known::Rfc3339;

/// The expected reaction of the follower.
enum Then {
    /// An error that contains this text.
    Refuses(&'static str),
    /// No new assignment.
    Waits,
    Serves(i64),
}
use Then::{Refuses, Serves, Waits};

#[derive(Clone, Copy)]
enum FollowerState {
    /// Assignment 3 is in force.
    Running,
    /// Accepted assignment 3, then restarted.
    Restarted,
    /// Has no trust state yet.
    New,
}
use FollowerState::{New, Restarted, Running};

type Case = (&'static str, FollowerState, fn(&Scene), Then);

/// Four versions. The first three were assigned one after the other; the fourth comes next.
struct Scene {
    folder: tempfile::TempDir,
    trainer: SigningKey,
    release: SigningKey,
    stolen: SigningKey,
    /// Not in the folder unless [`Scene::with_root`] was called.
    root: SigningKey,
    stranger: SigningKey,
    manifests: Vec<Manifest>,
}

impl Scene {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys");
        let key = |name: &str| SigningKey::load_or_create(&keys, name).unwrap();
        let mut scene = Scene {
            trainer: key("trainer"),
            release: key("release"),
            stolen: SigningKey::create(&keys, "stolen", Role::Release).unwrap(),
            root: SigningKey::create(&folder.path().join("offline"), "root", Role::Root).unwrap(),
            stranger: SigningKey::from_seed(&[9; 32]),
            manifests: vec![],
            folder,
        };
        let store = scene.store();
        let mut last: Option<Checkpoint> = None;
        for version in 1..=4i64 {
            let checkpoint = weights(version);
            let parent = scene.manifests.last().map(|parent| Parent {
                version: parent.version,
                root: parent.root,
            });
            let mut manifest = Manifest {
                policy: "demo".into(),
                version,
                root: checkpoint.root(),
                parent,
                line: "realtime".into(),
                branch: 0,
                checkpoint: None,
                delta: None,
                tensor_bytes: checkpoint.tensor_bytes(),
                run: None,
                fence: 0,
                created_at: OffsetDateTime::now_utc(),
                quantized: vec![],
                delta_shards: vec![],
                reference: None,
                adapts: None,
            };
            if let Some(base) = &last {
                let bytes = delta::encode(base, &checkpoint, &artifact::threads::Threads::ONE).unwrap();
                manifest.delta = Some(store.put_object("demo", &bytes.into()).await.unwrap());
            }
            if version < 4 {
                let bytes = checkpoint.to_bytes().unwrap();
                manifest.checkpoint = Some(store.put_object("demo", &bytes).await.unwrap());
            }
            store.put_manifest(&manifest, &scene.trainer).await.unwrap();
            scene.manifests.push(manifest);
            last = Some(checkpoint);
        }
        for epoch in 1..=3 {
            scene.assign(epoch, epoch, &scene.release);
        }
        scene.timestamp(3, 20, &scene.release);
        scene
    }

    fn store(&self) -> Store {
        Store::open(&format!("file://{}", self.folder.path().join("store").display())).unwrap()
    }

    fn trust(&self) -> anyhow::Result<Trust> {
        let folder = self.folder.path();
        Trust::new(self.store(), "demo", &folder.join("keys"), &folder.join("state"))
    }

    fn path(&self, place: &str) -> PathBuf {
        self.folder.path().join("store/policy/demo").join(place)
    }

    fn write(&self, place: &str, bytes: impl AsRef<[u8]>) {
        fs::create_dir_all(self.path(place).parent().unwrap()).unwrap();
        fs::write(self.path(place), bytes).unwrap();
    }

    fn delete(&self, place: &str) {
        fs::remove_file(self.path(place)).unwrap();
    }

    fn copy(&self, from: &str, to: &str) {
        self.write(to, fs::read(self.path(from)).unwrap());
    }

    /// Gives the follower the public key of the root.
    fn with_root(&self) -> &Self {
        let public = self.folder.path().join("offline/root.pub");
        fs::copy(public, self.key_file("root.pub")).unwrap();
        self
    }

    fn key_file(&self, name: &str) -> PathBuf {
        self.folder.path().join("keys").join(name)
    }

    /// Writes a signed document of any content.
    fn sign(&self, place: &str, kind: &str, document: &Value, key: &SigningKey) {
        let payload = serde_json::to_vec(document).unwrap();
        self.write(place, Envelope::sign(kind, &payload, key).to_bytes().unwrap());
    }

    fn root(&self, version: i64) -> Digest {
        self.manifests[version as usize - 1].root
    }

    fn assignment(&self, epoch: i64, version: i64, root: Digest) -> Value {
        let aliases = BTreeMap::from([("champion", Target { version, root })]);
        json!({
            "policy": "demo", "epoch": epoch, "aliases": aliases, "arms": [],
            "created_at": "2026-11-21T06:00:00Z",
        })
    }

    fn assign(&self, epoch: i64, version: i64, key: &SigningKey) {
        let document = self.assignment(epoch, version, self.root(version));
        self.sign(&assignment(epoch), "assignment", &document, key);
    }

    /// Writes a timestamp that was made `ago` seconds ago.
    fn timestamp(&self, epoch: i64, ago: i64, key: &SigningKey) {
        self.timestamp_revoking(epoch, ago, key, &[]);
    }

    fn timestamp_revoking(&self, epoch: i64, ago: i64, key: &SigningKey, revoked: &[&str]) {
        let at = OffsetDateTime::now_utc() - time::Duration::seconds(ago);
        let document = json!({
            "policy": "demo", "epoch": epoch, "revoked": revoked, "created_at": at.format(&Rfc3339).unwrap(),
        });
        self.sign("statement.json", "statement", &document, key);
    }

    /// The regular next step: version 4 is assigned.
    fn next(&self) {
        self.assign(4, 4, &self.release);
        self.timestamp(4, 0, &self.release);
    }

    /// Version 4 is assigned with a changed manifest.
    fn next_with(&self, change: impl FnOnce(&mut Value)) {
        let mut document = serde_json::to_value(&self.manifests[3]).unwrap();
        change(&mut document);
        self.sign(&version(4), "manifest", &document, &self.trainer);
        self.next();
    }

    fn revoke(&self, key: &SigningKey, by: &SigningKey) {
        let document = json!({
            "policy": "demo", "key": key.key_id(), "reason": "lost", "created_at": "2026-11-21T06:00:00Z",
        });
        self.sign(
            &format!("revocation/{}.json", key.key_id()),
            "revocation",
            &document,
            by,
        );
    }

    /// Path of the delta or checkpoint of a version.
    fn object(&self, version: i64, checkpoint: bool) -> String {
        let manifest = &self.manifests[version as usize - 1];
        let object = if checkpoint {
            manifest.checkpoint
        } else {
            manifest.delta
        };
        format!("object/{}", object.unwrap().digest)
    }

    /// Changes the bytes of a file.
    fn edit(&self, place: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(place)).unwrap();
        change(&mut bytes);
        self.write(place, bytes);
    }
}

fn version(serial: i64) -> String {
    format!("version/{serial:010}.json")
}

fn assignment(epoch: i64) -> String {
    format!("assignment/{epoch:010}.json")
}

fn weights(version: i64) -> Checkpoint {
    let mut bytes: Vec<u8> = (0..4_000u32).map(|i| ((i / 7 + i * 31) % 251) as u8).collect();
    bytes[version as usize * 100] ^= 1;
    let dtype = serde_json::from_value(json!("BF16")).unwrap();
    let tensor = TensorData::new(dtype, vec![40, 50], bytes).unwrap();
    Checkpoint {
        tensors: [("w".to_owned(), tensor)].into(),
        files: [("config.json".to_owned(), "{}".into())].into(),
    }
}

/// Accepts the newest assignment and loads the version that it names, as a follower does; returns
/// that version.
async fn newest_version(trust: &mut Trust, in_force: i64) -> anyhow::Result<Option<i64>> {
    let Some((assignment, keys)) = trust.newest(in_force).await? else {
        return Ok(None);
    };
    let target = assignment.aliases["champion"];
    let manifest = trust.store.get_manifest("demo", target.version, &keys).await?;
    anyhow::ensure!(
        manifest.root == target.root,
        "the manifest has the content hash {}",
        manifest.root
    );
    let materialized = trust.store.materialize("demo", target.version, &keys, &[]).await?;
    assert_eq!(
        materialized.checkpoint.root(),
        target.root,
        "the loaded version has the content hash that the assignment names"
    );
    assert_eq!(
        *materialized.checkpoint,
        weights(target.version),
        "the loaded version has the published weights"
    );
    Ok(Some(target.version))
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    // no attack
    ("a new version", Running, |s| s.next(), Serves(4)),
    ("a new version after a restart", Restarted, |s| s.next(), Serves(4)),
    ("a new version for a new follower", New, |s| s.next(), Serves(4)),
    ("nothing new", Running, |_| {}, Waits),
    ("a restart", Restarted, |_| {}, Serves(3)),
    ("a rollback is a new epoch", Running, |s| { s.assign(4, 1, &s.release); s.timestamp(4, 0, &s.release); }, Serves(1)),
    ("a stranger's timestamp, a restart", Restarted, |s| s.timestamp(3, 0, &s.stranger), Refuses("no trusted key")),
    // rollback
    ("the newest assignment is deleted", Restarted, |s| s.delete(&assignment(3)), Refuses("at or above epoch 3")),
    ("all assignments are deleted", Restarted, |s| (1..=3).for_each(|e| s.delete(&assignment(e))), Refuses("at or above epoch 3")),
    ("an older assignment in the place of the newest", Restarted, |s| s.copy(&assignment(2), &assignment(3)), Refuses("another place")),
    ("an older assignment as the next", Running, |s| { s.copy(&assignment(2), &assignment(4)); s.timestamp(4, 0, &s.release); }, Refuses("another place")),
    ("another document for the same epoch", Restarted, |s| { s.assign(3, 1, &s.release); s.timestamp(3, 0, &s.release); }, Refuses("signed two")),
    ("another document by another key", Restarted, |s| { s.assign(3, 2, &s.stolen); s.timestamp(3, 0, &s.release); }, Refuses("signed two")),
    ("another content hash for the version that serves", Running, |s| { s.sign(&assignment(4), "assignment", &s.assignment(4, 3, s.root(1)), &s.release); s.timestamp(4, 0, &s.release); }, Refuses("the content hash")),
    ("an older manifest in the place of a newer", Running, |s| { s.next(); s.copy(&version(3), &version(4)); }, Refuses("another place")),
    ("an older timestamp again", Running, |s| { s.next(); s.timestamp(4, 40, &s.release); }, Refuses("a later one was seen")),
    // freeze
    ("the timestamp is withheld", Running, |s| { s.next(); s.delete("statement.json"); }, Refuses("withholds")),
    ("the timestamp is withheld, a restart", Restarted, |s| { s.next(); s.delete("statement.json"); }, Refuses("withholds")),
    ("an old copy of the store for a new follower", New, |s| s.timestamp(3, 61, &s.release), Refuses("old")),
    ("an old copy of the store, days old", New, |s| { s.next(); s.timestamp(4, 200_000, &s.release); }, Refuses("old")),
    ("a timestamp from the future", Running, |s| { s.next(); s.timestamp(4, -90, &s.release); }, Refuses("in the future")),
    ("a new follower without a timestamp", New, |s| s.delete("statement.json"), Refuses("no timestamp")),
    ("an old copy of the store without a timestamp", New, |s| { s.delete(&assignment(3)); s.delete("statement.json"); }, Refuses("no timestamp")),
    // roles
    ("an assignment by the trainer's key", Running, |s| { s.assign(4, 4, &s.trainer); s.timestamp(4, 0, &s.release); }, Refuses("the role `trainer`")),
    ("a timestamp by the trainer's key", Running, |s| { s.next(); s.timestamp(4, 0, &s.trainer); }, Refuses("the role `trainer`")),
    ("a manifest by the release key", Running, |s| { s.sign(&version(4), "manifest", &serde_json::to_value(&s.manifests[3]).unwrap(), &s.release); s.next(); }, Refuses("the role `release`")),
    ("an assignment by the root key", Running, |s| { s.with_root().assign(4, 4, &s.root); s.timestamp(4, 0, &s.release); }, Refuses("the role `root`")),
    ("a revocation by the release key", Running, |s| { s.with_root().next(); s.revoke(&s.trainer, &s.release); }, Serves(4)),
    ("a revocation by the root key", Running, |s| { s.with_root().next(); s.revoke(&s.trainer, &s.root); }, Refuses("revoked")),
    ("a revocation by a revoked key", Running, |s| { s.next(); s.revoke(&s.stolen, &s.release); s.revoke(&s.trainer, &s.stolen); }, Serves(4)),
    ("a revocation by a revoked key, a new follower", New, |s| { s.next(); s.revoke(&s.stolen, &s.release); s.revoke(&s.trainer, &s.stolen); }, Serves(4)),
    // mix-and-match
    ("the timestamp knows a later epoch", Running, |s| { s.next(); s.timestamp(5, 0, &s.release); }, Refuses("says that 5")),
    ("the newest is hidden from a new follower", New, |s| s.delete(&assignment(3)), Refuses("says that 3")),
    ("an assignment of another policy", Running, |s| { let mut d = s.assignment(4, 3, s.root(3)); d["policy"] = "other".into(); s.sign(&assignment(4), "assignment", &d, &s.release); s.timestamp(4, 0, &s.release); }, Refuses("another place")),
    ("an assignment of another epoch", Running, |s| { s.sign(&assignment(4), "assignment", &s.assignment(5, 3, s.root(3)), &s.release); s.timestamp(4, 0, &s.release); }, Refuses("another place")),
    ("a manifest of another policy", Running, |s| s.next_with(|m| m["policy"] = "other".into()), Refuses("another place")),
    ("a manifest of another version", Running, |s| s.next_with(|m| m["version"] = 5.into()), Refuses("another place")),
    ("a manifest with another content hash", Running, |s| s.next_with(|m| m["root"] = m["parent"]["root"].clone()), Refuses("the manifest has the content hash")),
    ("a manifest signed as an assignment", Running, |s| { s.sign(&version(4), "assignment", &serde_json::to_value(&s.manifests[3]).unwrap(), &s.trainer); s.next(); }, Refuses("holds")),
    ("an assignment signed as a manifest", Running, |s| { s.sign(&assignment(4), "manifest", &s.assignment(4, 4, s.root(4)), &s.release); s.timestamp(4, 0, &s.release); }, Refuses("holds")),
    ("a timestamp of another policy", Running, |s| { s.next(); let at = OffsetDateTime::now_utc().format(&Rfc3339).unwrap(); s.sign("statement.json", "statement", &json!({"policy": "other", "epoch": 4, "revoked": [], "created_at": at}), &s.release); }, Refuses("another place")),
    ("an assignment in the timestamp's place", Running, |s| { s.next(); s.copy(&assignment(4), "statement.json"); }, Refuses("holds")),
    ("the parent's bytes under the child's name", Running, |s| { s.next(); let at = s.object(4, false); s.copy(&s.object(3, false), &at); }, Refuses("cannot be put together")),
    ("a checkpoint in a delta's place", Running, |s| s.next_with(|m| { m["delta"] = m["image"].clone(); m["image"] = json!({"digest": m["root"], "size_bytes": 1}); }), Refuses("cannot be put together")),
    ("a delta to another version", Running, |s| { let other = serde_json::to_value(s.manifests[2].delta).unwrap(); s.next_with(|m| m["delta"] = other); }, Refuses("cannot be put together")),
    ("a parent with another content hash", Running, |s| { let other = s.root(1).to_string(); s.next_with(|m| m["parent"]["root"] = other.into()); }, Refuses("cannot be put together")),
    ("a size that the weights do not have", Running, |s| s.next_with(|m| m["tensor_bytes"] = 7.into()), Refuses("cannot be put together")),
    ("a revocation that only the timestamp names", Running, |s| { s.next(); s.timestamp_revoking(4, 0, &s.release, &[s.trainer.key_id()]); }, Refuses("revoked")),
    // fast-forward
    ("a stranger's last epoch", New, |s| s.assign(9_999_999_999, 1, &s.stranger), Serves(3)),
    ("a stolen key's last epoch", New, |s| s.assign(9_999_999_999, 1, &s.stolen), Serves(3)),
    ("a stolen key's last epoch and timestamp", Running, |s| { s.assign(9_999_999_999, 1, &s.stolen); s.timestamp(9_999_999_999, 0, &s.stolen); }, Refuses("jumps")),
    ("a stolen key's epochs, the next one after a gap", Running, |s| { s.assign(4, 1, &s.stolen); s.assign(90, 1, &s.stolen); s.revoke(&s.stolen, &s.release); s.assign(91, 4, &s.release); s.timestamp(91, 0, &s.release); }, Serves(4)),
    ("a stolen key's last epoch while serving", Running, |s| s.assign(9_999_999_999, 1, &s.stolen), Waits),
    ("a stolen key's last epoch, the key revoked", New, |s| { s.assign(9_999_999_999, 1, &s.stolen); s.revoke(&s.stolen, &s.release); }, Serves(3)),
    ("a stolen key's next epoch, the key revoked", Running, |s| { s.assign(4, 1, &s.stolen); s.revoke(&s.stolen, &s.release); s.assign(5, 4, &s.release); s.timestamp(5, 0, &s.release); }, Serves(4)),
    ("an epoch of eleven digits", New, |s| s.copy(&assignment(3), "assignment/99999999999.json"), Serves(3)),
    ("an epoch below one", New, |s| s.copy(&assignment(3), "assignment/-000000001.json"), Serves(3)),
    // signatures
    ("an unsigned assignment", Running, |s| { s.next(); s.edit(&assignment(4), |b| { let mut e: Value = serde_json::from_slice(b).unwrap(); e["signatures"] = json!([]); *b = e.to_string().into_bytes(); }); }, Refuses("no trusted key")),
    ("a stranger's assignment", Running, |s| { s.assign(4, 4, &s.stranger); s.timestamp(4, 0, &s.release); }, Refuses("no trusted key")),
    ("a stranger's assignment under our key's name", Running, |s| { s.assign(4, 4, &s.stranger); s.edit(&assignment(4), |b| *b = String::from_utf8(b.clone()).unwrap().replace(s.stranger.key_id(), s.release.key_id()).into_bytes()); s.timestamp(4, 0, &s.release); }, Refuses("no trusted key")),
    ("another payload under a good signature", Running, |s| { s.next(); s.edit(&assignment(4), |b| { let other: Value = serde_json::from_slice(&fs::read(s.path(&assignment(3))).unwrap()).unwrap(); let mut e: Value = serde_json::from_slice(b).unwrap(); e["payload"] = other["payload"].clone(); *b = e.to_string().into_bytes(); }); }, Refuses("no trusted key")),
    ("a flipped bit of a signature", Running, |s| { s.next(); s.edit(&assignment(4), |b| { let at = b.len() - 12; b[at] = if b[at] == b'A' { b'B' } else { b'A' }; }); }, Refuses("no trusted key")),
    ("an assignment that is no JSON", Running, |s| { s.next(); s.write(&assignment(4), "garbage"); }, Refuses("malformed")),
    ("an assignment cut off", Running, |s| { s.next(); s.edit(&assignment(4), |b| b.truncate(100)); }, Refuses("malformed")),
    ("an assignment of five megabytes", Running, |s| { s.next(); s.write(&assignment(4), vec![b' '; 5 << 20]); }, Refuses("bytes; at most")),
    ("an unsigned manifest", Running, |s| { s.next(); s.edit(&version(4), |b| { let mut e: Value = serde_json::from_slice(b).unwrap(); e["signatures"] = json!([]); *b = e.to_string().into_bytes(); }); }, Refuses("no trusted key")),
    ("a stranger's manifest", Running, |s| { s.sign(&version(4), "manifest", &serde_json::to_value(&s.manifests[3]).unwrap(), &s.stranger); s.next(); }, Refuses("no trusted key")),
    ("a manifest cut off", Running, |s| { s.next(); s.edit(&version(4), |b| b.truncate(100)); }, Refuses("malformed")),
    ("a manifest of five megabytes", Running, |s| { s.next(); s.write(&version(4), vec![b' '; 5 << 20]); }, Refuses("bytes; at most")),
    ("no manifest", Running, |s| { s.next(); s.delete(&version(4)); }, Refuses("not there")),
    ("a stranger's timestamp", Running, |s| { s.next(); s.timestamp(4, 0, &s.stranger); }, Refuses("no trusted key")),
    // contradictions, signed
    ("an arm without an alias", Running, |s| { let mut d = s.assignment(4, 4, s.root(4)); d["arms"] = json!([{"alias": "ghost", "weight": 1.0}]); s.sign(&assignment(4), "assignment", &d, &s.release); s.timestamp(4, 0, &s.release); }, Refuses("names no alias")),
    ("an alias of version 0", Running, |s| { s.sign(&assignment(4), "assignment", &s.assignment(4, 0, s.root(4)), &s.release); s.timestamp(4, 0, &s.release); }, Refuses("not positive")),
    ("a version that is its own parent", Running, |s| s.next_with(|m| m["parent"]["version"] = 4.into()), Refuses("a parent is older")),
    ("a manifest without objects", Running, |s| s.next_with(|m| m["delta"] = Value::Null), Refuses("nor a delta")),
    // revoked keys
    ("a key revoked here", Running, |s| { s.next(); fs::copy(s.key_file("trainer.pub"), s.key_file("trainer.revoked")).unwrap(); }, Refuses("revoked")),
    ("a key revoked in the store", Running, |s| { s.next(); s.revoke(&s.trainer, &s.release); }, Refuses("revoked")),
    ("a key revoked by itself", Running, |s| { s.next(); s.revoke(&s.trainer, &s.trainer); }, Refuses("revoked")),
    ("a key revoked by a stranger", Running, |s| { s.next(); s.revoke(&s.trainer, &s.stranger); }, Serves(4)),
    ("a revocation under another key's name", Running, |s| { s.next(); s.revoke(&s.stolen, &s.release); s.copy(&format!("revocation/{}.json", s.stolen.key_id()), &format!("revocation/{}.json", s.trainer.key_id())); }, Serves(4)),
    ("the key of the releases revoked", Running, |s| { s.next(); s.revoke(&s.release, &s.trainer); }, Waits),
    ("the key of the releases revoked, a new follower", New, |s| { s.next(); s.revoke(&s.release, &s.trainer); }, Waits),
    ("every key revoked", Running, |s| { s.next(); s.revoke(&s.trainer, &s.stolen); s.revoke(&s.release, &s.stolen); s.revoke(&s.stolen, &s.release); }, Waits),
    ("no keys", Running, |s| { s.next(); fs::remove_dir_all(s.key_file("")).unwrap(); fs::create_dir(s.key_file("")).unwrap(); }, Refuses("no trusted key")),
    // objects
    ("a delta cut off", Running, |s| { s.next(); s.edit(&s.object(4, false), |b| b.truncate(b.len() - 1)); }, Refuses("cannot be put together")),
    ("a delta with a byte too many", Running, |s| { s.next(); s.edit(&s.object(4, false), |b| b.push(0)); }, Refuses("cannot be put together")),
    ("a flipped bit of a delta", Running, |s| { s.next(); s.edit(&s.object(4, false), |b| { let at = b.len() / 2; b[at] ^= 4; }); }, Refuses("cannot be put together")),
    ("no delta", Running, |s| { s.next(); s.delete(&s.object(4, false)); }, Refuses("cannot be put together")),
    ("flipped bits of all checkpoints", Running, |s| { s.next(); for v in 1..=3 { s.edit(&s.object(v, true), |b| { let at = b.len() - 9; b[at] ^= 4; }); } }, Refuses("cannot be put together")),
    ("a flipped bit of the nearest checkpoint", Running, |s| { s.next(); s.edit(&s.object(3, true), |b| { let at = b.len() - 9; b[at] ^= 4; }); }, Serves(4)),
];

#[tokio::test]
async fn a_hostile_store_is_refused_and_a_correct_one_is_followed() {
    let mut refused = 0;
    for (name, follower, attack, then) in CASES {
        let scene = Scene::new().await;
        let mut trust = scene.trust().unwrap();
        if !matches!(follower, New) {
            assert_eq!(newest_version(&mut trust, 0).await.unwrap(), Some(3), "{name}");
        }
        if matches!(follower, Restarted) {
            trust = scene.trust().unwrap();
        }
        attack(&scene);
        trust.checked = None; // five seconds later
        let in_force = if matches!(follower, Running) { 3 } else { 0 };
        let seen = newest_version(&mut trust, in_force)
            .await
            .map_err(|error| format!("{error:#}"));
        match (then, &seen) {
            (Refuses(why), Err(error)) if error.contains(why) => refused += 1,
            (Waits, Ok(None)) => refused += usize::from(*name != "nothing new"),
            (Serves(version), Ok(Some(served))) if version == served => {}
            _ => panic!("{name}: {seen:?}"),
        }
    }
    println!("{} cases, {refused} refused", CASES.len());
    assert!(refused >= 49, "{refused}");
}

#[tokio::test]
async fn a_revocation_is_remembered_after_the_store_loses_it() {
    let scene = Scene::new().await;
    let mut trust = scene.trust().unwrap();
    assert_eq!(newest_version(&mut trust, 0).await.unwrap(), Some(3));
    scene.revoke(&scene.trainer, &scene.release);
    trust.checked = None;
    assert_eq!(newest_version(&mut trust, 3).await.unwrap(), None);
    fs::remove_dir_all(scene.path("revocation")).unwrap();
    scene.next();
    for mut trust in [trust, scene.trust().unwrap()] {
        let error = newest_version(&mut trust, 3).await.unwrap_err();
        assert!(format!("{error:#}").contains("revoked"), "{error:#}");
    }
    // it loads after a trusted key signed it again
    let next = SigningKey::load_or_create(&scene.key_file(""), "trainer-2").unwrap();
    let keys = TrustedKeys::load(&scene.key_file("")).unwrap();
    assert_eq!(scene.store().resign("demo", &keys, &next).await.unwrap(), 4);
    assert_eq!(scene.store().resign("demo", &keys, &next).await.unwrap(), 0);
    assert_eq!(newest_version(&mut scene.trust().unwrap(), 3).await.unwrap(), Some(4));
}

#[tokio::test]
async fn revocations_without_a_right_leave_no_trace_in_the_state() {
    let scene = Scene::new().await;
    scene.with_root();
    let mut trust = scene.trust().unwrap();
    assert_eq!(newest_version(&mut trust, 0).await.unwrap(), Some(3));
    let state = scene.folder.path().join("state/follow-demo.json");
    let before = fs::read(&state).unwrap();
    // Files by nobody, by a stranger, and by the thief of a release key, of keys that do not exist
    // and of the root key.
    for number in 0..100u8 {
        let id = Digest::of(&[number]).to_string();
        let place = format!("revocation/{id}.json");
        let document = json!({
            "policy": "demo", "key": id, "reason": "lost", "created_at": "2026-11-21T06:00:00Z",
        });
        match number % 3 {
            0 => scene.write(&place, "{}"),
            1 => scene.sign(&place, "revocation", &document, &scene.stranger),
            _ => scene.sign(&place, "revocation", &document, &scene.stolen),
        }
    }
    scene.revoke(&scene.root, &scene.stolen);
    trust.checked = None;
    assert_eq!(newest_version(&mut trust, 3).await.unwrap(), None, "nothing is new");
    assert!(trust.checked.is_some(), "the revocations were read");
    assert_eq!(fs::read(&state).unwrap(), before, "nothing was remembered");
    // The timestamp may name revoked keys that this folder has never had.
    scene.assign(4, 4, &scene.release);
    scene.timestamp_revoking(4, 0, &scene.release, &[&Digest::of(b"unknown").to_string()]);
    trust.checked = None;
    assert_eq!(newest_version(&mut trust, 3).await.unwrap(), Some(4));
    scene.revoke(&scene.stolen, &scene.root);
    trust.checked = None;
    assert_eq!(newest_version(&mut trust, 4).await.unwrap(), None);
    assert_eq!(trust.state.revocations().len(), 1, "one that counts is remembered");
}

#[tokio::test]
async fn a_new_replica_starts_while_control_is_away_if_it_is_told_to() {
    let scene = Scene::new().await;
    scene.timestamp(3, 600, &scene.release);
    let refused = newest_version(&mut scene.trust().unwrap(), 0).await.unwrap_err();
    assert!(
        format!("{refused:#}").contains("is `springtide control` running?"),
        "{refused:#}"
    );
    let patient = || scene.trust().unwrap().with_first_age_max(Duration::from_secs(3600));
    let mut trust = patient();
    assert_eq!(newest_version(&mut trust, 0).await.unwrap(), Some(3));
    // what comes later needs a fresh one, also after a restart
    scene.assign(4, 4, &scene.release);
    for trust in [&mut trust, &mut patient()] {
        let refused = newest_version(trust, 3).await.unwrap_err();
        assert!(
            format!("{refused:#}").contains("newer assignments may be missing"),
            "{refused:#}"
        );
    }
}

/// What followers with and without a history serve, five seconds after the last change.
async fn served(scene: &Scene, running: &mut Trust, in_force: i64) -> [Result<Option<i64>, String>; 2] {
    running.checked = None;
    let folder = scene.folder.path();
    let state = tempfile::tempdir().unwrap();
    let mut fresh = Trust::new(scene.store(), "demo", &folder.join("keys"), state.path()).unwrap();
    let text = |error: anyhow::Error| format!("{error:#}");
    [
        newest_version(running, in_force).await.map_err(text),
        newest_version(&mut fresh, 0).await.map_err(text),
    ]
}

#[tokio::test]
async fn a_stolen_trainer_key_is_taken_away_and_versions_and_releases_go_on() {
    let scene = Scene::new().await;
    scene.with_root();
    let mut running = scene.trust().unwrap();
    assert_eq!(newest_version(&mut running, 0).await.unwrap(), Some(3));
    // The owner signs the good versions with a new key. The thief publishes version 4, releases it
    // and revokes the other keys.
    let next = SigningKey::load_or_create(&scene.key_file(""), "trainer-2").unwrap();
    let keys = TrustedKeys::load(&scene.key_file("")).unwrap();
    scene.delete(&version(4));
    scene.store().resign("demo", &keys, &next).await.unwrap();
    let thief = &scene.trainer;
    scene.store().put_manifest(&scene.manifests[3], thief).await.unwrap();
    scene.assign(4, 4, thief);
    scene.revoke(&scene.release, thief);
    scene.revoke(&scene.root, thief);
    scene.revoke(thief, &scene.root);
    scene.assign(5, 3, &scene.release);
    scene.timestamp(5, 0, &scene.release);
    for served in served(&scene, &mut running, 3).await {
        assert_eq!(served, Ok(Some(3)), "the version that the new key signed serves on");
    }
    // The thief's version is refused even if somebody releases it.
    scene.assign(6, 4, &scene.release);
    scene.timestamp(6, 0, &scene.release);
    for served in served(&scene, &mut running, 5).await {
        assert!(served.as_ref().unwrap_err().contains("revoked"), "{served:?}");
    }
    // The place of version 4 is taken. The trainer goes on with the next serial.
    let mut manifest = scene.manifests[3].clone();
    let taken = scene.store().put_manifest(&manifest, &next).await.unwrap();
    assert_eq!(taken, store::PutOutcome::Taken);
    manifest.version = 5;
    scene.store().put_manifest(&manifest, &next).await.unwrap();
    let document = scene.assignment(7, 5, manifest.root);
    scene.sign(&assignment(7), "assignment", &document, &scene.release);
    scene.timestamp(7, 0, &scene.release);
    running.checked = None;
    let (released, keys) = running.newest(5).await.unwrap().unwrap();
    assert_eq!(released.aliases["champion"].version, 5);
    let made = scene.store().materialize("demo", 5, &keys, &[]).await.unwrap();
    assert_eq!(*made.checkpoint, weights(4));
}

#[tokio::test]
async fn a_stolen_release_key_is_taken_away_and_releases_go_on() {
    let scene = Scene::new().await;
    scene.with_root();
    let mut running = scene.trust().unwrap();
    assert_eq!(newest_version(&mut running, 0).await.unwrap(), Some(3));
    let thief = &scene.release;
    scene.assign(4, 1, thief);
    scene.assign(9_999_999_999, 1, thief);
    scene.timestamp_revoking(
        9_999_999_999,
        0,
        thief,
        &[scene.trainer.key_id(), scene.stolen.key_id()],
    );
    scene.revoke(&scene.trainer, thief);
    scene.revoke(&scene.root, thief);
    // A root key revokes it. The next release key goes on behind the thief's epochs, although none
    // of the old ones verifies any longer.
    scene.revoke(thief, &scene.root);
    for served in served(&scene, &mut running, 3).await {
        assert_eq!(served, Ok(None), "nothing new while there is no other release key");
    }
    let next = SigningKey::load_or_create(&scene.key_file(""), "release-2").unwrap();
    scene.assign(5, 4, &next);
    scene.timestamp_revoking(5, 0, &next, &[thief.key_id()]);
    for served in served(&scene, &mut running, 3).await {
        assert_eq!(served, Ok(Some(4)));
    }
    // What the thief signs later is refused.
    scene.assign(6, 1, thief);
    for (served, expected) in served(&scene, &mut running, 5).await.into_iter().zip([None, Some(4)]) {
        assert_eq!(served, Ok(expected));
    }
    scene.timestamp(6, 0, thief);
    let [_, fresh] = served(&scene, &mut running, 5).await;
    assert!(fresh.as_ref().unwrap_err().contains("revoked"), "{fresh:?}");
}

#[tokio::test]
async fn a_stolen_root_key_is_taken_away_and_releases_go_on() {
    let scene = Scene::new().await;
    scene.with_root();
    let mut running = scene.trust().unwrap();
    assert_eq!(newest_version(&mut running, 0).await.unwrap(), Some(3));
    scene.revoke(&scene.trainer, &scene.root);
    scene.revoke(&scene.release, &scene.root);
    scene.next();
    for served in served(&scene, &mut running, 3).await {
        assert_eq!(served, Ok(None), "the thief can stop releases for now");
    }
    // The key revokes itself, so all that it revoked is trusted again.
    scene.revoke(&scene.root, &scene.root);
    scene.timestamp_revoking(4, 0, &scene.release, &[scene.root.key_id()]);
    for served in served(&scene, &mut running, 3).await {
        assert_eq!(served, Ok(Some(4)));
    }
    // A spare root key repeats the revocation of a key that was really stolen.
    let spare = SigningKey::create(&scene.key_file(""), "root-2", Role::Root).unwrap();
    scene.revoke(&scene.stolen, &spare);
    scene.assign(5, 1, &scene.stolen);
    for (served, expected) in served(&scene, &mut running, 4).await.into_iter().zip([None, Some(4)]) {
        assert_eq!(served, Ok(expected));
    }
}

#[tokio::test]
async fn a_running_follower_learns_of_a_revocation_within_seconds() {
    let scene = Scene::new().await;
    let mut trust = scene.trust().unwrap();
    assert_eq!(newest_version(&mut trust, 0).await.unwrap(), Some(3));
    // a version signed by the key arrives when the key is revoked: the check before it is never an
    // old one
    scene.revoke(&scene.trainer, &scene.release);
    scene.next();
    let error = newest_version(&mut trust, 3).await.unwrap_err();
    assert!(format!("{error:#}").contains("revoked"), "{error:#}");
    assert!(CHECK_INTERVAL + Duration::from_secs(55) <= Duration::from_secs(60));
}

#[test]
fn a_foreign_or_broken_trust_state_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("file://{}", folder.path().join("store").display())).unwrap();
    let state = |policy: &str, more: &str| {
        format!(
            r#"{{"policy":"{policy}","epoch":1,"signers":{{"k":1}},"assignment":null,"roots":{{}},"revocations":{{}},"stated_at":null{more}}}"#
        )
    };
    let (other, more) = (state("other", ""), state("demo", r#","more":2"#));
    for text in ["", "{}", &other, &more] {
        fs::write(folder.path().join("follow-demo.json"), text).unwrap();
        assert!(
            Trust::new(store.clone(), "demo", folder.path(), folder.path()).is_err(),
            "{text}"
        );
    }
}
