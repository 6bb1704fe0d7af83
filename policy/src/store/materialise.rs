//! Putting a version together: from a held version or an image, through deltas, along the path that costs the fewest
//! bytes. Every object, every delta and every root on the way is verified.
//!
//! A broken or missing object is not an error while another way leads to the version. Only parents are walked: a path
//! never goes through a version that is not an ancestor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Error, Store, blocking};
use crate::delta;
use crate::digest::Digest;
use crate::image::Image;
use crate::manifest::{Manifest, ObjectRef};
use crate::sign::TrustedKeys;

/// Longer chains are not walked: a store that needs them has lost its images.
const DELTAS_MAX: usize = 10_000;
/// What the files beside the tensors may occupy in a result, in bytes.
const FILES_BYTES_MAX: u64 = 1 << 30;

/// A version, verified, and what it took.
#[derive(Debug, Clone)]
pub struct Materialised {
    pub image: Arc<Image>,
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
        have: &[(i64, Arc<Image>)],
    ) -> Result<Materialised, Error> {
        let mut walk = Walk {
            store: self,
            policy,
            serial,
            keys,
            held: have.iter().cloned().collect(),
            progress: None,
            manifests: BTreeMap::new(),
            broken: BTreeSet::new(),
            reasons: vec![],
            fetch: Duration::ZERO,
            verify: Duration::ZERO,
            bytes_fetched: 0,
        };
        loop {
            let plan = walk.plan().await?;
            let mut path = vec![plan.start];
            path.extend(plan.deltas.iter().rev());
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

struct Walk<'a> {
    store: &'a Store,
    policy: &'a str,
    serial: i64,
    keys: &'a TrustedKeys,
    held: BTreeMap<i64, Arc<Image>>,
    /// The furthest version that this walk put together; earlier ones are let go.
    progress: Option<(i64, Arc<Image>)>,
    manifests: BTreeMap<i64, Manifest>,
    /// Objects that were missing or did not verify.
    broken: BTreeSet<Digest>,
    /// Why ways were given up, for the error when none is left.
    reasons: Vec<String>,
    fetch: Duration,
    verify: Duration,
    bytes_fetched: u64,
}

struct Plan {
    start: i64,
    /// None: the start is held.
    image: Option<ObjectRef>,
    /// Versions whose deltas to apply, from the one asked for back to the start's child.
    deltas: Vec<i64>,
}

impl Walk<'_> {
    /// The cheapest way in bytes that no broken object blocks.
    async fn plan(&mut self) -> Result<Plan, Error> {
        let mut best: Option<(u64, Plan)> = None;
        let mut deltas = vec![];
        let mut cost = 0u64;
        let mut at = (self.serial, None);
        while best.as_ref().is_none_or(|(best, _)| cost < *best) && deltas.len() <= DELTAS_MAX {
            let (serial, root) = at;
            let manifest = match self.manifest(serial, root).await {
                Ok(manifest) => manifest,
                Err(error) if serial == self.serial => return Err(error),
                Err(error) => {
                    self.give_up(error.to_string());
                    break;
                }
            };
            let plan = |image| Plan {
                start: serial,
                image,
                deltas: deltas.clone(),
            };
            if self.at_hand(serial).is_some() {
                best = Some((cost, plan(None)));
                break;
            }
            if let Some(image) = self.usable(manifest.image) {
                let total = cost.saturating_add(image.size_bytes);
                if best.as_ref().is_none_or(|(best, _)| total < *best) {
                    best = Some((total, plan(Some(image))));
                }
            }
            let (Some(parent), Some(delta)) = (manifest.parent, self.usable(manifest.delta)) else {
                break;
            };
            cost = cost.saturating_add(delta.size_bytes);
            deltas.push(serial);
            at = (parent.version, Some(parent.root));
        }
        best.map(|(_, plan)| plan).ok_or_else(|| Error::NoPath {
            policy: self.policy.into(),
            version: self.serial,
            reason: match self.reasons.is_empty() {
                true => "no image and no held version leads to it".into(),
                false => self.reasons.join("; "),
            },
        })
    }

    /// Carries a plan out; none when something on the way was broken and is now marked.
    async fn follow(&mut self, plan: &Plan) -> Result<Option<Arc<Image>>, Error> {
        let Some(mut image) = self.start(plan).await? else {
            return Ok(None);
        };
        for &serial in plan.deltas.iter().rev() {
            match self.step(serial, &image).await? {
                Some(next) => image = next,
                None => return Ok(None),
            }
            self.progress = Some((serial, image.clone()));
        }
        Ok(Some(image))
    }

    async fn start(&mut self, plan: &Plan) -> Result<Option<Arc<Image>>, Error> {
        let manifest = self.manifest(plan.start, None).await?;
        let Some(object) = plan.image else {
            let Some(image) = self.at_hand(plan.start) else {
                return Ok(None);
            };
            if plan.deltas.is_empty() {
                // a delta checks its base; without one it is done here
                let root = self.timed({
                    let image = image.clone();
                    move || image.root()
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
        let made = self.timed(move || {
            verified(&bytes, &object)?;
            let (image, root) = Image::from_bytes_rooted(&bytes).map_err(|error| error.to_string())?;
            as_described(image, root, &manifest)
        });
        let made = made.await?;
        Ok(self.note(made, plan.start, &object, "image"))
    }

    async fn step(&mut self, serial: i64, base: &Arc<Image>) -> Result<Option<Arc<Image>>, Error> {
        let manifest = self.manifest(serial, None).await?;
        let Some(object) = manifest.delta else {
            return Ok(None);
        };
        let Some(bytes) = self.fetch(&object).await else {
            return Ok(None);
        };
        let parent = manifest.parent.map(|parent| parent.version);
        let base = base.clone();
        let made = self.timed(move || {
            verified(&bytes, &object)?;
            let limit = manifest.tensor_bytes.saturating_add(FILES_BYTES_MAX);
            match delta::apply_rooted(&base, &bytes, limit) {
                Ok((image, root)) => as_described(image, root, &manifest).map_err(Fault::Object),
                Err(error @ delta::Error::WrongBase { .. }) => Err(Fault::Base(error.to_string())),
                Err(error) => Err(Fault::Object(error.to_string())),
            }
        });
        match made.await? {
            // the held version is not what it is said to be; the delta may be sound
            Err(Fault::Base(reason)) if parent.is_some_and(|p| self.held.remove(&p).is_some()) => {
                self.give_up(format!("the held parent of version {serial}: {reason}"));
                Ok(None)
            }
            Err(Fault::Base(reason) | Fault::Object(reason)) => Ok(self.note(Err(reason), serial, &object, "delta")),
            Ok(image) => Ok(Some(image)),
        }
    }

    /// Marks an object that did not make its version.
    fn note(
        &mut self,
        made: Result<Arc<Image>, String>,
        serial: i64,
        object: &ObjectRef,
        what: &str,
    ) -> Option<Arc<Image>> {
        match made {
            Ok(image) => Some(image),
            Err(reason) => {
                self.broken.insert(object.digest);
                self.give_up(format!("the {what} of version {serial}: {reason}"));
                None
            }
        }
    }

    async fn manifest(&mut self, serial: i64, root: Option<Digest>) -> Result<Manifest, Error> {
        let manifest = match self.manifests.get(&serial) {
            Some(manifest) => manifest.clone(),
            None => {
                let began = Instant::now();
                let read = self.store.get_manifest(self.policy, serial, self.keys).await;
                self.fetch += began.elapsed();
                let manifest = read?;
                self.manifests.insert(serial, manifest.clone());
                manifest
            }
        };
        match root {
            Some(root) if root != manifest.root => Err(Error::Document {
                key: format!("version {serial}"),
                reason: format!("its root is {}, its child's parent has {root}", manifest.root),
            }),
            _ => Ok(manifest),
        }
    }

    async fn fetch(&mut self, object: &ObjectRef) -> Option<bytes::Bytes> {
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

    fn at_hand(&self, serial: i64) -> Option<Arc<Image>> {
        let progress = self.progress.iter().find(|(at, _)| *at == serial);
        progress
            .map(|(_, image)| image.clone())
            .or_else(|| self.held.get(&serial).cloned())
    }

    fn usable(&self, object: Option<ObjectRef>) -> Option<ObjectRef> {
        object.filter(|object| !self.broken.contains(&object.digest))
    }

    async fn timed<T: Send + 'static>(&mut self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let began = Instant::now();
        let result = blocking(work).await;
        self.verify += began.elapsed();
        result
    }

    fn give_up(&mut self, reason: String) {
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
    Object(String),
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Fault::Object(reason)
    }
}

fn verified(bytes: &[u8], object: &ObjectRef) -> Result<(), String> {
    match Digest::of(bytes) {
        digest if digest == object.digest => Ok(()),
        digest => Err(format!("the object's digest is {digest}, not {}", object.digest)),
    }
}

fn as_described(image: Image, root: Digest, manifest: &Manifest) -> Result<Arc<Image>, String> {
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
