//! The search for the cheapest way to a version, in bytes: backwards from it, over the deltas of its ancestors and the folds
//! between them, to what is at hand or to an image. Where a descendant is at hand, also over the deltas that lead back from it.
//!
//! Only ancestors are walked, of the version and of the newest one at hand. Documents are read as the search comes to them, many at once where a chain is long; folds are
//! listed only when more than a few steps lie ahead, for a follower that keeps up needs none.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Instant;

use futures::StreamExt as _;

use super::materialise::Walk;
use super::{Error, Store};
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef, Shard};
use artifact::sign::TrustedKeys;
use artifact::squash::SquashedDelta;

/// Longer ways are not searched: a store that needs them has lost its images.
const VERSIONS_MAX: usize = 100_000;
/// Steps that are walked before folds are looked for.
const STEPS_WITHOUT_FOLDS: usize = 8;
/// Steps back that are looked at: a rollback goes some versions back, and an image is nearer than what is further.
const STEPS_BACK_MAX: usize = 256;
/// Manifests that are read at once on a long chain.
const READ_AHEAD: i64 = 32;

/// A way to a version.
#[derive(Debug, Clone, PartialEq)]
pub struct Path {
    /// The version that is at hand or has an image.
    pub start: i64,
    /// None: the start is at hand.
    pub image: Option<ObjectRef>,
    /// From the start to the version asked for.
    pub steps: Vec<Step>,
    /// Bytes of all objects on it.
    pub bytes: u64,
}

/// One delta of a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub from: i64,
    pub to: i64,
    pub delta: ObjectRef,
    /// Of the delta, in however many objects.
    pub bytes: u64,
    /// It leads over several steps at once.
    pub fold: bool,
    /// The delta is followed from its result to its base.
    pub back: bool,
}

impl Store {
    /// The cheapest way to a version for who holds none, as far as documents tell: no object is read or looked for.
    pub async fn path(&self, policy: &str, serial: i64, keys: &TrustedKeys) -> Result<Path, Error> {
        Walk::new(self, policy, serial, keys, &[]).plan().await
    }
}

impl Store {
    /// [`path`](Self::path) over objects that are there: whether a version can still be put together, without reading it.
    pub async fn reachable(&self, policy: &str, serial: i64, keys: &TrustedKeys) -> Result<Path, Error> {
        let mut walk = Walk::new(self, policy, serial, keys, &[]);
        loop {
            let path = walk.plan().await?;
            // of a delta in several objects, each for the delta that it belongs to
            let mut objects: Vec<_> = path.image.map(|image| (image, image)).into_iter().collect();
            for step in &path.steps {
                objects.push((step.delta, step.delta));
                let shards = walk.shards(step).into_iter();
                objects.extend(shards.map(|shard| (shard.object, step.delta)));
            }
            let mut whole = true;
            for (object, of) in objects {
                if self.size_of(policy, &object.digest).await? != Some(object.size_bytes) {
                    walk.give_up_object(&object, &of);
                    whole = false;
                }
            }
            if whole {
                return Ok(path);
            }
        }
    }
}

/// What the search knows of a version that it has come to.
struct Reached {
    cost: u64,
    /// The step that leads from here on to the version asked for.
    onward: Option<Step>,
}

impl Walk<'_> {
    /// The cheapest way in bytes that no broken object blocks.
    pub(super) async fn plan(&mut self) -> Result<Path, Error> {
        loop {
            if let Some(plan) = self.search().await? {
                return plan.ok_or_else(|| Error::NoPath {
                    policy: self.policy.into(),
                    version: self.serial,
                    reason: match self.reasons.is_empty() {
                        true => "no image and no held version leads to it".into(),
                        false => self.reasons.join("; "),
                    },
                });
            }
            // a long way: once more, with the folds
            self.folds = Some(self.store.fold_names(self.policy).await?);
        }
    }

    /// None: the way is long or blocked, and folds have not been looked for.
    async fn search(&mut self) -> Result<Option<Option<Path>>, Error> {
        let mut reached = BTreeMap::from([(self.serial, Reached { cost: 0, onward: None })]);
        let mut frontier = BinaryHeap::from([Reverse((0u64, self.serial))]);
        let mut settled = BTreeSet::new();
        let mut best: Option<(u64, i64, Option<ObjectRef>)> = None;
        while let Some(Reverse((cost, at))) = frontier.pop() {
            if best.is_some_and(|(best, ..)| best <= cost) || settled.len() >= VERSIONS_MAX {
                break;
            }
            if !settled.insert(at) {
                continue;
            }
            if self.folds.is_none() && settled.len() > STEPS_WITHOUT_FOLDS {
                return Ok(None);
            }
            let manifest = match self.manifest(at).await {
                Ok(manifest) => manifest,
                Err(error) if at == self.serial => return Err(error),
                Err(error) => {
                    self.give_up(error.to_string());
                    continue;
                }
            };
            if self.at_hand(at).is_some() {
                best = Some((cost, at, None));
                break;
            }
            if let Some(image) = self.usable(manifest.image) {
                let total = cost.saturating_add(image.size_bytes);
                if best.is_none_or(|(best, ..)| total < best) {
                    best = Some((total, at, Some(image)));
                }
            }
            let back = self.leading_back_to(&manifest).await;
            for (step, root) in self.leading_to(&manifest).await?.into_iter().chain(back) {
                // read before it is counted on: an ancestor is who has the root that its descendant remembers
                if !self.is_version(step.from, root).await {
                    continue;
                }
                let cost = cost.saturating_add(step.bytes);
                let cheaper = reached.get(&step.from).is_none_or(|known| cost < known.cost);
                if cheaper && !settled.contains(&step.from) {
                    reached.insert(
                        step.from,
                        Reached {
                            cost,
                            onward: Some(step),
                        },
                    );
                    frontier.push(Reverse((cost, step.from)));
                }
            }
        }
        // a short way is blocked: a fold may lead around
        if best.is_none() && self.folds.is_none() {
            return Ok(None);
        }
        let path = best.map(|(bytes, start, image)| {
            let mut steps = vec![];
            let mut at = start;
            while let Some(step) = reached.get(&at).and_then(|reached| reached.onward) {
                steps.push(step);
                at = step.to;
            }
            Path {
                start,
                image,
                steps,
                bytes,
            }
        });
        Ok(Some(path))
    }

    /// What each shard made of a step's delta, where several did.
    pub(super) fn shards(&self, step: &Step) -> Vec<Shard> {
        let child = if step.back { step.from } else { step.to };
        let manifest = self.manifests.get(&child).filter(|_| !step.fold);
        manifest
            .map(|manifest| manifest.delta_shards.clone())
            .unwrap_or_default()
    }

    /// The steps that end at a version, each with the root of the version that it begins at.
    async fn leading_to(&mut self, manifest: &Manifest) -> Result<Vec<(Step, Digest)>, Error> {
        let mut steps = vec![];
        if let (Some(parent), Some(delta)) = (manifest.parent, self.usable(manifest.delta)) {
            let step = Step {
                from: parent.version,
                to: manifest.version,
                delta,
                bytes: manifest.delta_bytes().unwrap_or(delta.size_bytes),
                fold: false,
                back: false,
            };
            steps.push((step, parent.root));
        }
        let begins = self.folds.as_ref().and_then(|folds| folds.get(&manifest.version));
        for from in begins.cloned().unwrap_or_default() {
            let Some(fold) = self.fold(from, manifest).await? else {
                continue;
            };
            if let Some(delta) = self.usable(Some(fold.delta)) {
                let step = Step {
                    from,
                    to: manifest.version,
                    delta,
                    bytes: delta.size_bytes,
                    fold: true,
                    back: false,
                };
                steps.push((step, fold.from.root));
            }
        }
        Ok(steps)
    }

    /// The steps that lead back to a version from the newest one at hand, each with the root of the version that it begins at.
    async fn leading_back_to(&mut self, manifest: &Manifest) -> Vec<(Step, Digest)> {
        if self.backward.is_none() {
            let steps = self.steps_back().await;
            self.backward = Some(steps);
        }
        let steps = self.backward.iter().filter_map(|steps| steps.get(&manifest.version));
        let mut back = vec![];
        for step in steps.flatten() {
            let sound = self.usable(Some(step.delta)).is_some() && !self.one_way.contains(&step.delta.digest);
            let Some(from) = self.manifests.get(&step.from).filter(|_| sound) else {
                continue;
            };
            // what a descendant remembers of its ancestor is what its delta leads back to
            let remembered = from.parent.filter(|parent| parent.version == manifest.version);
            if remembered.is_some_and(|parent| parent.root == manifest.root) {
                back.push((*step, from.root));
            }
        }
        back
    }

    /// From the newest version at hand along its parents to the version asked for, or past it to an older one that both may
    /// come from.
    async fn steps_back(&mut self) -> BTreeMap<i64, Vec<Step>> {
        let mut steps: BTreeMap<i64, Vec<Step>> = BTreeMap::new();
        let mut at = self.newest_at_hand().filter(|&newest| newest > self.serial);
        for _ in 0..STEPS_BACK_MAX {
            let Some(from) = at else { break };
            let Ok(manifest) = self.manifest(from).await else {
                break;
            };
            let Some((parent, delta)) = manifest.parent.zip(manifest.delta) else {
                break;
            };
            let step = Step {
                from,
                to: parent.version,
                delta,
                bytes: manifest.delta_bytes().unwrap_or(delta.size_bytes),
                fold: false,
                back: true,
            };
            steps.entry(parent.version).or_default().push(step);
            at = Some(parent.version).filter(|&parent| parent > self.serial);
        }
        steps
    }

    /// The fold from `from` to a version; none where it is of no use.
    async fn fold(&mut self, from: i64, to: &Manifest) -> Result<Option<SquashedDelta>, Error> {
        let began = Instant::now();
        let read = self.store.get_fold(self.policy, from, to.version, self.keys).await;
        self.fetch += began.elapsed();
        match read {
            Ok(fold) if fold.to.root == to.root => Ok(Some(fold)),
            Ok(_) => {
                self.give_up(format!("the fold {from} → {} leads to another root", to.version));
                Ok(None)
            }
            // taken away since it was listed
            Err(Error::NotFound(_)) => Ok(None),
            Err(error @ Error::Backend { .. }) => Err(error),
            Err(error) => {
                self.give_up(error.to_string());
                Ok(None)
            }
        }
    }

    /// Whether a version has the root that a descendant or a fold remembers.
    async fn is_version(&mut self, serial: i64, root: Digest) -> bool {
        let reason = match self.manifest(serial).await {
            Ok(manifest) if manifest.root == root => return true,
            Ok(manifest) => format!(
                "version {serial}: its root is {}, its descendant remembers {root}",
                manifest.root
            ),
            Err(error) => error.to_string(),
        };
        self.give_up(reason);
        false
    }

    /// The manifest of a version, verified; read once.
    pub(super) async fn manifest(&mut self, serial: i64) -> Result<Manifest, Error> {
        if let Some(manifest) = self.manifests.get(&serial) {
            return Ok(manifest.clone());
        }
        let began = Instant::now();
        if self.manifests.len() > STEPS_WITHOUT_FOLDS {
            self.read_ahead(serial).await;
        }
        let read = match self.manifests.get(&serial) {
            Some(manifest) => Ok(manifest.clone()),
            None => self.store.get_manifest(self.policy, serial, self.keys).await,
        };
        self.fetch += began.elapsed();
        let manifest = read?;
        self.manifests.insert(serial, manifest.clone());
        Ok(manifest)
    }

    /// On a long chain parents are mostly the serials before: reads them side by side. What is not there, or of another
    /// line, costs a look.
    async fn read_ahead(&mut self, serial: i64) {
        let serials = (serial.saturating_sub(READ_AHEAD - 1).max(1)..=serial)
            .filter(|serial| !self.manifests.contains_key(serial))
            .collect::<Vec<_>>();
        let (store, policy, keys) = (self.store, self.policy, self.keys);
        let read: Vec<_> = futures::stream::iter(serials)
            .map(|serial| store.get_manifest(policy, serial, keys))
            .buffer_unordered(READ_AHEAD as usize)
            .collect()
            .await;
        let manifests = read.into_iter().flatten().map(|manifest| (manifest.version, manifest));
        self.manifests.extend(manifests);
    }
}
