//! The search for the path to a version with the smallest download.
//!
//! It walks backwards from the version, over the deltas of its ancestors and squashed deltas, to a
//! held version or a checkpoint. If a newer version is held, it also considers the reverse sections
//! of the deltas in between. Only ancestors are searched, of the version and of the newest held
//! one.
//!
//! Documents are read when the search reaches them, many at once on a long chain. Squashed deltas
//! are listed only if the path is longer than a few steps.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use futures::StreamExt as _;

use super::{Error, Store};
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef, Shard};
use artifact::sign::TrustedKeys;
use artifact::squash::SquashedDelta;

/// Longer paths are not searched: a store that needs them has lost its checkpoints.
const VERSIONS_MAX: usize = 100_000;
/// Steps that are searched before squashed deltas are listed.
const STEPS_WITHOUT_SQUASHED: usize = 8;
/// Reverse steps that are considered: beyond a few versions, a checkpoint is cheaper.
const REVERSE_STEPS_MAX: usize = 256;
/// Manifests that are read at once on a long chain.
const READ_AHEAD: i64 = 32;

/// How to restore a version.
#[derive(Debug, Clone, PartialEq)]
pub struct Path {
    /// A version that is held or has a checkpoint.
    pub start: i64,
    /// The checkpoint to read; none if the start is held.
    pub checkpoint: Option<ObjectRef>,
    /// From the start to the requested version.
    pub steps: Vec<Step>,
    /// Total size of the objects.
    pub bytes: u64,
}

/// One delta of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub from: i64,
    pub to: i64,
    pub delta: ObjectRef,
    /// Total size of the delta's objects.
    pub bytes: u64,
    /// A squashed delta.
    pub squashed: bool,
    /// The delta is applied in reverse, from its result to its base.
    pub reverse: bool,
}

impl Step {
    /// The step over a version's own delta, with its parent's content hash.
    fn of_manifest(manifest: &Manifest) -> Option<(Self, Digest)> {
        let (parent, delta) = manifest.parent.zip(manifest.delta)?;
        let step = Step {
            from: parent.version,
            to: manifest.version,
            delta,
            bytes: manifest.delta_bytes().unwrap_or(delta.size_bytes),
            squashed: false,
            reverse: false,
        };
        Some((step, parent.root))
    }
}

impl Store {
    /// The cheapest path to a version for a reader that holds none. It reads documents but no
    /// objects.
    pub async fn path(&self, policy: &str, serial: i64, keys: &TrustedKeys) -> Result<Path, Error> {
        Search::new(self, policy, serial, keys).find().await
    }

    /// [`path`](Self::path) over objects that exist: whether a version can still be restored.
    pub async fn reachable(&self, policy: &str, serial: i64, keys: &TrustedKeys) -> Result<Path, Error> {
        let mut search = Search::new(self, policy, serial, keys);
        loop {
            let path = search.find().await?;
            // Each object with the one that the search excludes if it is missing: a shard excludes
            // its delta.
            let mut objects: Vec<_> = path.checkpoint.iter().map(|object| (*object, *object)).collect();
            for step in &path.steps {
                objects.push((step.delta, step.delta));
                let shards = search.shards(step).into_iter();
                objects.extend(shards.map(|shard| (shard.object, step.delta)));
            }
            let mut complete = true;
            for (object, delta) in objects {
                if self.object_size(policy, &object.digest).await? != Some(object.size_bytes) {
                    search.exclude(&delta, format!("object {} is not there", object.digest));
                    complete = false;
                }
            }
            if complete {
                return Ok(path);
            }
        }
    }
}

/// The search for paths to one version. It remembers what it has read and which objects are broken.
pub(super) struct Search<'a> {
    pub(super) store: &'a Store,
    pub(super) policy: &'a str,
    pub(super) serial: i64,
    keys: &'a TrustedKeys,
    /// Versions that need no download.
    pub(super) held: BTreeSet<i64>,
    manifests: BTreeMap<i64, Manifest>,
    /// Start versions of squashed deltas by end version; none if not listed yet.
    squashed: Option<BTreeMap<i64, Vec<i64>>>,
    /// Reverse steps from the newest held version, by the version they lead to; none if not read
    /// yet.
    reverse: Option<BTreeMap<i64, Vec<Step>>>,
    /// Objects that are missing or did not verify.
    broken: BTreeSet<Digest>,
    /// Deltas without a reverse section.
    irreversible: BTreeSet<Digest>,
    /// Why paths were excluded, for the error if none is left.
    reasons: Vec<String>,
    /// Time spent waiting for documents.
    pub(super) waited: Duration,
}

/// A version that the search has reached.
struct Reached {
    cost: u64,
    /// The next step towards the requested version.
    next: Option<Step>,
}

impl<'a> Search<'a> {
    pub(super) fn new(store: &'a Store, policy: &'a str, serial: i64, keys: &'a TrustedKeys) -> Self {
        Search {
            store,
            policy,
            serial,
            keys,
            held: BTreeSet::new(),
            manifests: BTreeMap::new(),
            squashed: None,
            reverse: None,
            broken: BTreeSet::new(),
            irreversible: BTreeSet::new(),
            reasons: vec![],
            waited: Duration::ZERO,
        }
    }

    /// The cheapest path over objects that are not excluded.
    pub(super) async fn find(&mut self) -> Result<Path, Error> {
        let mut found = self.try_find().await?;
        if found.is_none() && self.squashed.is_none() {
            // The path is long or blocked: search again with squashed deltas.
            self.squashed = Some(self.store.list_squashed_deltas(self.policy).await?);
            found = self.try_find().await?;
        }
        found.ok_or_else(|| Error::NoPath {
            policy: self.policy.into(),
            version: self.serial,
            reason: match self.reasons.is_empty() {
                true => "no checkpoint and no held version leads to it".into(),
                false => self.reasons.join("; "),
            },
        })
    }

    /// Dijkstra's algorithm, backwards from the requested version. Without a list of squashed
    /// deltas it gives up on long paths.
    async fn try_find(&mut self) -> Result<Option<Path>, Error> {
        let mut reached = BTreeMap::from([(self.serial, Reached { cost: 0, next: None })]);
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
            if self.squashed.is_none() && settled.len() > STEPS_WITHOUT_SQUASHED {
                return Ok(None);
            }
            let manifest = match self.manifest(at).await {
                Ok(manifest) => manifest,
                Err(error) if at == self.serial || error.is_transient() => return Err(error),
                Err(error) => {
                    self.add_reason(error.to_string());
                    continue;
                }
            };
            if self.held.contains(&at) {
                best = Some((cost, at, None));
                break;
            }
            if let Some(checkpoint) = manifest.checkpoint.filter(|object| self.is_usable(object)) {
                let total = cost.saturating_add(checkpoint.size_bytes);
                if best.is_none_or(|(best, ..)| total < best) {
                    best = Some((total, at, Some(checkpoint)));
                }
            }
            let mut steps = self.steps_to(&manifest).await?;
            steps.extend(self.reverse_steps_to(&manifest).await?);
            for (step, root) in steps {
                if !self.has_root(step.from, root).await? {
                    continue;
                }
                let cost = cost.saturating_add(step.bytes);
                let cheaper = reached.get(&step.from).is_none_or(|known| cost < known.cost);
                if cheaper && !settled.contains(&step.from) {
                    let next = Some(step);
                    reached.insert(step.from, Reached { cost, next });
                    frontier.push(Reverse((cost, step.from)));
                }
            }
        }
        Ok(best.map(|(bytes, start, checkpoint)| {
            let mut steps = vec![];
            let mut at = start;
            while let Some(step) = reached.get(&at).and_then(|reached| reached.next) {
                steps.push(step);
                at = step.to;
            }
            Path {
                start,
                checkpoint,
                steps,
                bytes,
            }
        }))
    }

    /// The shards of a step's delta, if it has several objects.
    pub(super) fn shards(&self, step: &Step) -> Vec<Shard> {
        let child = if step.reverse { step.from } else { step.to };
        let manifest = self.manifests.get(&child).filter(|_| !step.squashed);
        manifest
            .map(|manifest| manifest.delta_shards.clone())
            .unwrap_or_default()
    }

    /// The forward steps to a version, each with the content hash of the version it starts from.
    async fn steps_to(&mut self, manifest: &Manifest) -> Result<Vec<(Step, Digest)>, Error> {
        let mut steps: Vec<_> = Step::of_manifest(manifest).into_iter().collect();
        let starts = self.squashed.as_ref().and_then(|ends| ends.get(&manifest.version));
        for from in starts.cloned().unwrap_or_default() {
            if let Some(squashed) = self.squashed_delta(from, manifest).await? {
                let step = Step {
                    from,
                    to: manifest.version,
                    delta: squashed.delta,
                    bytes: squashed.delta.size_bytes,
                    squashed: true,
                    reverse: false,
                };
                steps.push((step, squashed.from.root));
            }
        }
        steps.retain(|(step, _)| self.is_usable(&step.delta));
        Ok(steps)
    }

    /// The reverse steps to a version, each with the content hash of the version it starts from.
    async fn reverse_steps_to(&mut self, manifest: &Manifest) -> Result<Vec<(Step, Digest)>, Error> {
        if self.reverse.is_none() {
            self.reverse = Some(self.read_reverse_steps().await?);
        }
        let steps = self.reverse.iter().filter_map(|steps| steps.get(&manifest.version));
        let usable = steps.flatten().filter_map(|step| {
            let from = self.manifests.get(&step.from)?;
            let parent = from.parent?;
            let leads_here = parent.version == manifest.version && parent.root == manifest.root;
            let reversible = self.is_usable(&step.delta) && !self.irreversible.contains(&step.delta.digest);
            (leads_here && reversible).then_some((*step, from.root))
        });
        Ok(usable.collect())
    }

    /// From the newest held version along its parents, to the requested version or just past it: an
    /// older version may be a common ancestor.
    async fn read_reverse_steps(&mut self) -> Result<BTreeMap<i64, Vec<Step>>, Error> {
        let mut steps: BTreeMap<i64, Vec<Step>> = BTreeMap::new();
        let mut at = self.held.last().copied().filter(|&newest| newest > self.serial);
        for _ in 0..REVERSE_STEPS_MAX {
            let Some(from) = at else { break };
            let manifest = match self.manifest(from).await {
                Ok(manifest) => manifest,
                Err(error) if error.is_transient() => return Err(error),
                Err(_) => break,
            };
            let Some((step, _)) = Step::of_manifest(&manifest) else {
                break;
            };
            let parent = step.from;
            let step = Step {
                from,
                to: parent,
                reverse: true,
                ..step
            };
            steps.entry(parent).or_default().push(step);
            at = Some(parent).filter(|&parent| parent > self.serial);
        }
        Ok(steps)
    }

    /// The squashed delta from `from` to a version, if it is usable.
    async fn squashed_delta(&mut self, from: i64, to: &Manifest) -> Result<Option<SquashedDelta>, Error> {
        let began = Instant::now();
        let read = self.store.get_squashed_delta(self.policy, from, to.version, self.keys);
        let read = read.await;
        self.waited += began.elapsed();
        match read {
            Ok(squashed) if squashed.to.root == to.root => return Ok(Some(squashed)),
            Ok(_) => self.add_reason(format!(
                "the squashed delta {from} → {} leads to another content hash",
                to.version
            )),
            // Deleted since it was listed.
            Err(Error::NotFound(_)) => {}
            Err(error @ Error::Backend { .. }) => return Err(error),
            Err(error) => self.add_reason(error.to_string()),
        }
        Ok(None)
    }

    /// Whether a version has the content hash that a later document names.
    async fn has_root(&mut self, serial: i64, root: Digest) -> Result<bool, Error> {
        let reason = match self.manifest(serial).await {
            Ok(manifest) if manifest.root == root => return Ok(true),
            Err(error) if error.is_transient() => return Err(error),
            Ok(manifest) => format!(
                "version {serial}: its content hash is {}, but its descendant names {root}",
                manifest.root
            ),
            Err(error) => error.to_string(),
        };
        self.add_reason(reason);
        Ok(false)
    }

    /// The verified manifest of a version; read once.
    pub(super) async fn manifest(&mut self, serial: i64) -> Result<Manifest, Error> {
        if let Some(manifest) = self.manifests.get(&serial) {
            return Ok(manifest.clone());
        }
        let began = Instant::now();
        if self.manifests.len() > STEPS_WITHOUT_SQUASHED {
            self.read_ahead(serial).await;
        }
        let read = match self.manifests.get(&serial) {
            Some(manifest) => Ok(manifest.clone()),
            None => self.store.get_manifest(self.policy, serial, self.keys).await,
        };
        self.waited += began.elapsed();
        let manifest = read?;
        self.manifests.insert(serial, manifest.clone());
        Ok(manifest)
    }

    /// Reads several manifests at once: on a long chain, parents mostly have the preceding serials.
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

    fn is_usable(&self, object: &ObjectRef) -> bool {
        !self.broken.contains(&object.digest)
    }

    /// Excludes an object that is missing or did not verify.
    pub(super) fn exclude(&mut self, object: &ObjectRef, reason: String) {
        self.broken.insert(object.digest);
        self.add_reason(reason);
    }

    /// Excludes a delta from reverse steps.
    pub(super) fn exclude_reverse(&mut self, delta: &ObjectRef, reason: String) {
        self.irreversible.insert(delta.digest);
        self.add_reason(reason);
    }

    pub(super) fn add_reason(&mut self, reason: String) {
        if self.reasons.contains(&reason) {
            return;
        }
        tracing::warn!(
            policy = self.policy,
            version = self.serial,
            reason,
            "cannot use one path to a version"
        );
        self.reasons.push(reason);
    }
}
