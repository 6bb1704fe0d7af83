//! Restores a version from a held version or a checkpoint, through deltas, along the path with the
//! smallest download (`path`). Every object and every content hash on the path is verified.
//!
//! A broken or missing object is an error only if no other path leads to the version. If the store
//! does not answer, the request is repeated. A path may be far more expensive than another, so it
//! is not left because of a dropped connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::path::{Path, Search, Step};
use super::{Error, Store, blocking};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef, Shard};
use artifact::sign::TrustedKeys;
use artifact::threads::Threads;
use artifact::{delta, merkle};

/// The maximum size of a checkpoint's files other than tensors.
const FILES_BYTES_MAX: u64 = 1 << 30;

/// How often an object is requested from a store that does not answer.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 200 });
/// After so many objects in a row without an answer, the store is unreachable.
const UNANSWERED_MAX: u32 = 2;

/// A verified version, and what restoring it took.
#[derive(Debug, Clone)]
pub struct Materialized {
    pub checkpoint: Arc<Checkpoint>,
    /// The content hash of `checkpoint`, as its manifest has it.
    pub root: Digest,
    /// Time spent waiting for documents and objects.
    pub fetch: Duration,
    /// Time spent hashing and decoding.
    pub verify: Duration,
    /// Bytes of the objects read, including broken ones.
    pub bytes_fetched: u64,
    /// The restored versions in order: first the held one or the checkpoint, last the requested
    /// one.
    pub path: Vec<i64>,
}

impl Store {
    /// Restores version `serial`. `held` are versions in memory, by serial. They are used where
    /// they save bytes, and only if their content hash is the one in their manifest.
    pub async fn materialize(
        &self,
        policy: &str,
        serial: i64,
        keys: &TrustedKeys,
        held: &[(i64, Arc<Checkpoint>)],
    ) -> Result<Materialized, Error> {
        let mut restore = Restore {
            search: Search::new(self, policy, serial, keys),
            held: held.iter().cloned().collect(),
            progress: None,
            fetch: Duration::ZERO,
            verify: Duration::ZERO,
            bytes_fetched: 0,
            unanswered: 0,
        };
        loop {
            let progress = restore.progress.iter().map(|(serial, _)| *serial);
            restore.search.held = restore.held.keys().copied().chain(progress).collect();
            let path = restore.search.find().await?;
            // A failure excludes an object or a held version, so the loop ends.
            if let Some(checkpoint) = restore.follow(&path).await? {
                let versions = path.steps.iter().map(|step| step.to);
                return Ok(Materialized {
                    checkpoint,
                    root: restore.search.manifest(serial).await?.root,
                    fetch: restore.fetch + restore.search.waited,
                    verify: restore.verify,
                    bytes_fetched: restore.bytes_fetched,
                    path: std::iter::once(path.start).chain(versions).collect(),
                });
            }
        }
    }
}

impl Store {
    /// The weights of a version: of one that adapts another, the base with its factors ([`artifact::adapter`]).
    /// `held`: as this returns them.
    pub async fn materialize_model(
        &self,
        policy: &str,
        serial: i64,
        keys: &TrustedKeys,
        held: &[(i64, Arc<Checkpoint>)],
    ) -> Result<Materialized, Error> {
        let (adapters, mut whole): (Vec<_>, Vec<_>) = held.iter().cloned().partition(|(_, one)| one.has_adapter());
        let Some(base) = self.get_manifest(policy, serial, keys).await?.adapts else {
            return self.materialize(policy, serial, keys, &whole).await;
        };
        let factors = adapters.iter().map(|(serial, one)| (*serial, Arc::new(one.adapter())));
        let factors: Vec<_> = factors.collect();
        let mut restored = self.materialize(policy, serial, keys, &factors).await?;
        let mut bases = adapters.iter().map(|(_, one)| one.base());
        let same = bases.find(|one| one.root() == base.root);
        whole.extend(same.map(|one| (base.version, Arc::new(one))));
        let weights = self.materialize(policy, base.version, keys, &whole).await?;
        if weights.root != base.root {
            return Err(Error::Corrupt {
                key: format!("version {serial}"),
                reason: format!(
                    "it adapts {}, and version {} is {}",
                    base.root, base.version, weights.root
                ),
            });
        }
        restored.checkpoint = Arc::new(weights.checkpoint.with_adapter(&restored.checkpoint));
        restored.fetch += weights.fetch;
        restored.verify += weights.verify;
        restored.bytes_fetched += weights.bytes_fetched;
        Ok(restored)
    }
}

struct Restore<'a> {
    search: Search<'a>,
    held: BTreeMap<i64, Arc<Checkpoint>>,
    /// The last version that was restored; earlier ones are dropped.
    progress: Option<(i64, Arc<Checkpoint>)>,
    fetch: Duration,
    verify: Duration,
    bytes_fetched: u64,
    /// Objects in a row that the store did not answer for.
    unanswered: u32,
}

impl Restore<'_> {
    /// Restores along a path. Returns none after excluding something broken from the search.
    async fn follow(&mut self, path: &Path) -> Result<Option<Arc<Checkpoint>>, Error> {
        let start = match path.checkpoint {
            Some(object) => self.read_checkpoint(path.start, object).await?,
            None => self.take_held(path).await?,
        };
        let Some(mut checkpoint) = start else {
            return Ok(None);
        };
        for step in &path.steps {
            match self.apply(step, &checkpoint).await? {
                Some(next) => checkpoint = next,
                None => return Ok(None),
            }
            self.progress = Some((step.to, checkpoint.clone()));
        }
        Ok(Some(checkpoint))
    }

    async fn take_held(&mut self, path: &Path) -> Result<Option<Arc<Checkpoint>>, Error> {
        let progress = self.progress.iter().find(|(serial, _)| *serial == path.start);
        let restored = progress.map(|(_, checkpoint)| checkpoint);
        let Some(checkpoint) = restored.or_else(|| self.held.get(&path.start)).cloned() else {
            return Ok(None);
        };
        // A delta verifies its base. Without one it is verified here.
        if path.steps.is_empty() {
            let expected = self.search.manifest(path.start).await?.root;
            let root = self.timed({
                let (checkpoint, threads) = (checkpoint.clone(), self.search.store.threads.clone());
                move || checkpoint.root_on(&threads)
            });
            let root = root.await?;
            if root != expected {
                self.held.remove(&path.start);
                self.progress = None;
                let reason = format!("the held version {} has content hash {root}", path.start);
                self.search.add_reason(reason);
                return Ok(None);
            }
        }
        Ok(Some(checkpoint))
    }

    async fn read_checkpoint(&mut self, serial: i64, object: ObjectRef) -> Result<Option<Arc<Checkpoint>>, Error> {
        let manifest = self.search.manifest(serial).await?;
        let Some(bytes) = self.fetch(&object).await? else {
            return Ok(None);
        };
        let threads = self.search.store.threads.clone();
        let decoded = self.timed(move || {
            verify_digest(&bytes, &object, &threads)?;
            let (checkpoint, root) = Checkpoint::from_bytes_on(&bytes, &threads).map_err(|error| error.to_string())?;
            check_result(checkpoint, root, &manifest)
        });
        match decoded.await? {
            Ok(checkpoint) => Ok(Some(checkpoint)),
            Err(reason) => {
                let reason = format!("the checkpoint of version {serial}: {reason}");
                self.search.exclude(&object, reason);
                Ok(None)
            }
        }
    }

    async fn apply(&mut self, step: &Step, base: &Arc<Checkpoint>) -> Result<Option<Arc<Checkpoint>>, Error> {
        let Step {
            from,
            to,
            delta,
            squashed,
            reverse,
            bytes: _,
        } = *step;
        let manifest = self.search.manifest(to).await?;
        let Some(head) = self.fetch(&delta).await? else {
            return Ok(None);
        };
        let mut shards = vec![];
        for shard in self.search.shards(step) {
            let Some(bytes) = self.fetch(&shard.object).await? else {
                let reason = format!("a shard of the delta of version {to} cannot be read");
                self.search.exclude(&delta, reason);
                return Ok(None);
            };
            shards.push((bytes, shard));
        }
        let (base, threads) = (base.clone(), self.search.store.threads.clone());
        let applied = self.timed(move || {
            verify_digest(&head, &delta, &threads)?;
            let bytes = concat(head, shards, &threads)?;
            let limit = manifest.tensor_bytes.saturating_add(FILES_BYTES_MAX);
            let applied = match reverse {
                false => delta::apply_within(&base, &bytes, limit, &threads),
                true => delta::apply_reverse_within(&base, &bytes, limit, &threads),
            };
            match applied {
                Ok((checkpoint, root)) => Ok(check_result(checkpoint, root, &manifest)?),
                Err(error @ delta::Error::WrongBase { .. }) => Err(Fault::Base(error.to_string())),
                Err(error @ delta::Error::NotReversible(_)) => Err(Fault::NotReversible(error.to_string())),
                Err(error) => Err(Fault::Object(error.to_string())),
            }
        });
        match applied.await? {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            // The held version does not match its manifest. The delta may be sound.
            Err(Fault::Base(reason)) if self.held.remove(&from).is_some() => {
                self.search.add_reason(format!("the held version {from}: {reason}"));
            }
            // The delta may be sound forwards.
            Err(Fault::NotReversible(reason)) => {
                let reason = format!("in reverse from version {from}: {reason}");
                self.search.exclude_reverse(&delta, reason);
            }
            Err(Fault::Base(reason) | Fault::Object(reason)) => {
                let kind = if squashed { "squashed delta" } else { "delta" };
                let reason = format!("the {kind} of version {to}: {reason}");
                self.search.exclude(&delta, reason);
            }
        }
        Ok(None)
    }

    /// None after excluding an object that is missing, broken, or alone without an answer.
    async fn fetch(&mut self, object: &ObjectRef) -> Result<Option<Bytes>, Error> {
        let began = Instant::now();
        let mut tries = 1;
        let read = loop {
            let read = self.search.store.fetch_object(self.search.policy, object).await;
            match &read {
                Err(error) if error.is_transient() && tries < TRIES => {
                    tracing::debug!(object = %object.digest.short(), %error, "requesting an object again");
                    tokio::time::sleep(PAUSE * tries).await;
                    tries += 1;
                }
                _ => break read,
            }
        };
        self.fetch += began.elapsed();
        let error = match read {
            Ok(bytes) => {
                self.unanswered = 0;
                self.bytes_fetched += bytes.len() as u64;
                return Ok(Some(bytes));
            }
            Err(error) => error,
        };
        match error.is_transient() {
            true => self.unanswered += 1,
            false => self.unanswered = 0,
        }
        if self.unanswered >= UNANSWERED_MAX {
            return Err(error);
        }
        self.search.exclude(object, error.to_string());
        Ok(None)
    }

    async fn timed<T: Send + 'static>(&mut self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let began = Instant::now();
        let result = blocking(work).await;
        self.verify += began.elapsed();
        result
    }
}

/// Why a step failed.
enum Fault {
    /// The delta belongs to another base.
    Base(String),
    NotReversible(String),
    Object(String),
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Fault::Object(reason)
    }
}

fn verify_digest(bytes: &[u8], object: &ObjectRef, threads: &Threads) -> Result<(), String> {
    match merkle::digest(bytes, threads) {
        digest if digest == object.digest => Ok(()),
        digest => Err(format!("the object's digest is {digest}, not {}", object.digest)),
    }
}

/// The delta as one object.
fn concat(head: Bytes, shards: Vec<(Bytes, Shard)>, threads: &Threads) -> Result<Bytes, String> {
    if shards.is_empty() {
        return Ok(head);
    }
    for (bytes, shard) in &shards {
        verify_digest(bytes, &shard.object, threads)?;
    }
    let shards: Vec<_> = shards
        .into_iter()
        .map(|(bytes, shard)| (bytes, shard.reverse_bytes))
        .collect();
    let delta = delta::concat(&head, &shards).map_err(|error| error.to_string())?;
    Ok(delta.into())
}

fn check_result(checkpoint: Checkpoint, root: Digest, manifest: &Manifest) -> Result<Arc<Checkpoint>, String> {
    if root != manifest.root {
        return Err(format!("its content hash is {root}, not {}", manifest.root));
    }
    let bytes = checkpoint.tensor_bytes();
    if bytes != manifest.tensor_bytes {
        return Err(format!("its tensors take {bytes} bytes, not {}", manifest.tensor_bytes));
    }
    Ok(Arc::new(checkpoint))
}
