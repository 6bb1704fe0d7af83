//! Putting a version together: from a held version or an image, through deltas and folds, along the path that costs the
//! fewest bytes (`path`). Every object, every delta and every root on the way is verified.
//!
//! A broken or missing object is not an error while another way leads to the version.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::path::{Path, Step};
use super::{Error, Store, blocking};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef, Shard};
use artifact::sign::TrustedKeys;
use artifact::threads::Threads;
use artifact::{delta, merkle};

/// What the files beside the tensors may occupy in a result, in bytes.
const FILES_BYTES_MAX: u64 = 1 << 30;

/// A version, verified, and what it took.
#[derive(Debug, Clone)]
pub struct Materialised {
    pub image: Arc<Checkpoint>,
    /// Waiting for objects.
    pub fetch: Duration,
    /// Hashing and decoding.
    pub verify: Duration,
    /// Bytes of the objects read, broken ones included.
    pub bytes_fetched: u64,
    /// The versions that were put together in turn: first the one that was held or read as an image, last the one asked
    /// for.
    pub path: Vec<i64>,
}

impl Store {
    /// Puts version `serial` together. `have` are versions at hand, by serial; they are used where they save bytes, and
    /// only when their root is the one that the manifest names.
    pub async fn materialise(
        &self,
        policy: &str,
        serial: i64,
        keys: &TrustedKeys,
        have: &[(i64, Arc<Checkpoint>)],
    ) -> Result<Materialised, Error> {
        let mut walk = Walk::new(self, policy, serial, keys, have);
        loop {
            let plan = walk.plan().await?;
            let mut path = vec![plan.start];
            path.extend(plan.steps.iter().map(|step| step.to));
            // what fails is marked, so every round has fewer ways than the one before
            if let Some(image) = walk.follow(&plan).await? {
                return Ok(Materialised {
                    image,
                    fetch: walk.fetch,
                    verify: walk.verify,
                    bytes_fetched: walk.bytes_fetched,
                    path,
                });
            }
        }
    }
}

pub(super) struct Walk<'a> {
    pub(super) store: &'a Store,
    pub(super) policy: &'a str,
    pub(super) serial: i64,
    pub(super) keys: &'a TrustedKeys,
    held: BTreeMap<i64, Arc<Checkpoint>>,
    /// The furthest version that this walk put together; earlier ones are let go.
    progress: Option<(i64, Arc<Checkpoint>)>,
    pub(super) manifests: BTreeMap<i64, Manifest>,
    /// The folds that there are, by the version that they lead to; none: not looked for yet.
    pub(super) folds: Option<BTreeMap<i64, Vec<i64>>>,
    /// Objects that were missing or did not verify.
    broken: BTreeSet<Digest>,
    /// Deltas that turned out to lead forward only.
    pub(super) one_way: BTreeSet<Digest>,
    /// Steps back from what is at hand, by the version that they lead to; none: not looked for yet.
    pub(super) backward: Option<BTreeMap<i64, Vec<Step>>>,
    /// Why ways were given up, for the error when none is left.
    pub(super) reasons: Vec<String>,
    pub(super) fetch: Duration,
    verify: Duration,
    bytes_fetched: u64,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        store: &'a Store,
        policy: &'a str,
        serial: i64,
        keys: &'a TrustedKeys,
        have: &[(i64, Arc<Checkpoint>)],
    ) -> Self {
        Walk {
            store,
            policy,
            serial,
            keys,
            held: have.iter().cloned().collect(),
            progress: None,
            manifests: BTreeMap::new(),
            folds: None,
            broken: BTreeSet::new(),
            one_way: BTreeSet::new(),
            backward: None,
            reasons: vec![],
            fetch: Duration::ZERO,
            verify: Duration::ZERO,
            bytes_fetched: 0,
        }
    }

    /// Carries a plan out; none when something on the way was broken and is now marked.
    async fn follow(&mut self, plan: &Path) -> Result<Option<Arc<Checkpoint>>, Error> {
        let Some(mut image) = self.start(plan).await? else {
            return Ok(None);
        };
        for step in &plan.steps {
            match self.step(step, &image).await? {
                Some(next) => image = next,
                None => return Ok(None),
            }
            self.progress = Some((step.to, image.clone()));
        }
        Ok(Some(image))
    }

    async fn start(&mut self, plan: &Path) -> Result<Option<Arc<Checkpoint>>, Error> {
        let manifest = self.manifest(plan.start).await?;
        let Some(object) = plan.image else {
            let Some(image) = self.at_hand(plan.start) else {
                return Ok(None);
            };
            if plan.steps.is_empty() {
                // a delta checks its base; without one it is done here
                let root = self.timed({
                    let (image, threads) = (image.clone(), self.store.threads.clone());
                    move || image.root_on(&threads)
                });
                let root = root.await?;
                if root != manifest.root {
                    self.held.remove(&plan.start);
                    self.progress = None;
                    self.give_up(format!("the held version {} has root {root}", plan.start));
                    return Ok(None);
                }
            }
            return Ok(Some(image));
        };
        let Some(bytes) = self.fetch(&object).await else {
            return Ok(None);
        };
        let threads = self.store.threads.clone();
        let made = self.timed(move || {
            verified(&bytes, &object, &threads)?;
            let (image, root) = Checkpoint::from_bytes_on(&bytes, &threads).map_err(|error| error.to_string())?;
            as_described(image, root, &manifest)
        });
        let made = made.await?;
        Ok(self.note(made, plan.start, &object, "image"))
    }

    async fn step(&mut self, step: &Step, base: &Arc<Checkpoint>) -> Result<Option<Arc<Checkpoint>>, Error> {
        let Step {
            from,
            to,
            delta,
            fold,
            back,
            bytes: _,
        } = *step;
        let manifest = self.manifest(to).await?;
        let Some(head) = self.fetch(&delta).await else {
            return Ok(None);
        };
        let mut shards = vec![];
        for shard in self.shards(step) {
            let Some(bytes) = self.fetch(&shard.object).await else {
                self.broken.insert(delta.digest);
                return Ok(None);
            };
            shards.push((bytes, shard));
        }
        let (base, threads) = (base.clone(), self.store.threads.clone());
        let made = self.timed(move || {
            verified(&head, &delta, &threads)?;
            let bytes = stitched(head, shards, &threads)?;
            let limit = manifest.tensor_bytes.saturating_add(FILES_BYTES_MAX);
            let made = match back {
                false => delta::apply_within(&base, &bytes, limit, &threads),
                true => delta::apply_reverse_within(&base, &bytes, limit, &threads),
            };
            match made {
                Ok((image, root)) => as_described(image, root, &manifest).map_err(Fault::Object),
                Err(error @ delta::Error::WrongBase { .. }) => Err(Fault::Base(error.to_string())),
                Err(error @ delta::Error::NotReversible(_)) => Err(Fault::OneWay(error.to_string())),
                Err(error) => Err(Fault::Object(error.to_string())),
            }
        });
        match made.await? {
            // the held version is not what it is said to be; the delta may be sound
            Err(Fault::Base(reason)) if self.held.remove(&from).is_some() => {
                self.give_up(format!("the held version {from}: {reason}"));
                Ok(None)
            }
            // forward it may be sound
            Err(Fault::OneWay(reason)) => {
                self.one_way.insert(delta.digest);
                self.give_up(format!("back from version {from}: {reason}"));
                Ok(None)
            }
            Err(Fault::Base(reason) | Fault::Object(reason)) => {
                Ok(self.note(Err(reason), to, &delta, if fold { "fold" } else { "delta" }))
            }
            Ok(image) => Ok(Some(image)),
        }
    }

    /// Marks an object that did not make its version.
    fn note(
        &mut self,
        made: Result<Arc<Checkpoint>, String>,
        serial: i64,
        object: &ObjectRef,
        what: &str,
    ) -> Option<Arc<Checkpoint>> {
        match made {
            Ok(image) => Some(image),
            Err(reason) => {
                self.broken.insert(object.digest);
                self.give_up(format!("the {what} of version {serial}: {reason}"));
                None
            }
        }
    }

    async fn fetch(&mut self, object: &ObjectRef) -> Option<Bytes> {
        let began = Instant::now();
        let read = self.store.fetch_object(self.policy, object).await;
        self.fetch += began.elapsed();
        match read {
            Ok(bytes) => {
                self.bytes_fetched += bytes.len() as u64;
                Some(bytes)
            }
            Err(error) => {
                self.broken.insert(object.digest);
                self.give_up(error.to_string());
                None
            }
        }
    }

    /// An object that is not there closes the ways over what it is a part of.
    pub(super) fn give_up_object(&mut self, object: &ObjectRef, of: &ObjectRef) {
        self.broken.insert(of.digest);
        self.give_up(format!("object {} is not there", object.digest));
    }

    pub(super) fn at_hand(&self, serial: i64) -> Option<Arc<Checkpoint>> {
        let progress = self.progress.iter().find(|(at, _)| *at == serial);
        progress
            .map(|(_, image)| image.clone())
            .or_else(|| self.held.get(&serial).cloned())
    }

    /// The newest version at hand.
    pub(super) fn newest_at_hand(&self) -> Option<i64> {
        let progress = self.progress.iter().map(|(at, _)| *at);
        progress.chain(self.held.keys().copied()).max()
    }

    pub(super) fn usable(&self, object: Option<ObjectRef>) -> Option<ObjectRef> {
        object.filter(|object| !self.broken.contains(&object.digest))
    }

    async fn timed<T: Send + 'static>(&mut self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let began = Instant::now();
        let result = blocking(work).await;
        self.verify += began.elapsed();
        result
    }

    pub(super) fn give_up(&mut self, reason: String) {
        if self.reasons.contains(&reason) {
            return;
        }
        tracing::warn!(
            policy = self.policy,
            version = self.serial,
            reason,
            "one way to a version is closed"
        );
        self.reasons.push(reason);
    }
}

/// What was wrong with a step.
enum Fault {
    Base(String),
    /// The delta cannot be followed back.
    OneWay(String),
    Object(String),
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Fault::Object(reason)
    }
}

fn verified(bytes: &[u8], object: &ObjectRef, threads: &Threads) -> Result<(), String> {
    match merkle::digest(bytes, threads) {
        digest if digest == object.digest => Ok(()),
        digest => Err(format!("the object's digest is {digest}, not {}", object.digest)),
    }
}

/// The delta, of one object or of several.
fn stitched(head: Bytes, shards: Vec<(Bytes, Shard)>, threads: &Threads) -> Result<Bytes, String> {
    if shards.is_empty() {
        return Ok(head);
    }
    for (bytes, shard) in &shards {
        verified(bytes, &shard.object, threads)?;
    }
    let shards: Vec<_> = shards
        .into_iter()
        .map(|(bytes, shard)| (bytes, shard.reverse_bytes))
        .collect();
    let delta = delta::concat(&head, &shards).map_err(|error| error.to_string())?;
    Ok(delta.into())
}

fn as_described(image: Checkpoint, root: Digest, manifest: &Manifest) -> Result<Arc<Checkpoint>, String> {
    if root != manifest.root {
        return Err(format!("its root is {root}, not {}", manifest.root));
    }
    if image.tensor_bytes() != manifest.tensor_bytes {
        return Err(format!(
            "its tensors take {} bytes, not {}",
            image.tensor_bytes(),
            manifest.tensor_bytes
        ));
    }
    Ok(Arc::new(image))
}
