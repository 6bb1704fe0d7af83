//! A list of everything that a policy has in the store, for commands that need all of it.
//! Documents are verified. Objects are listed with their size and time, but not read.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _};
use time::OffsetDateTime;

use super::keys::policy_key;
use super::objects::modified;
use super::{Error, Pin, Store, backend};
use artifact::assignment::Assignment;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef};
use artifact::parts::Parts;
use artifact::sign::TrustedKeys;
use artifact::squash::SquashedDelta;

/// Documents read at once.
const READ_AT_ONCE: usize = 32;

/// An object as the store lists it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredObject {
    pub size_bytes: u64,
    pub modified_at: OffsetDateTime,
}

impl StoredObject {
    pub(super) fn of(entry: &object_store::ObjectMeta) -> Self {
        StoredObject {
            size_bytes: entry.size,
            modified_at: modified(entry),
        }
    }
}

/// A list of everything in the store. Objects are listed before documents are read: if a version is
/// published meanwhile, `objects` may lack its objects, but no document is missing.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    /// By serial, or the reason why a manifest does not verify.
    pub versions: BTreeMap<i64, Result<Manifest, String>>,
    /// By (to, from).
    pub squashed_deltas: BTreeMap<(i64, i64), Result<SquashedDelta, String>>,
    pub assignments: BTreeMap<i64, Result<Assignment, String>>,
    /// Those that only a revoked key signed. Nobody follows them any longer.
    pub revoked_assignments: BTreeMap<i64, Assignment>,
    pub pins: BTreeMap<i64, Option<Pin>>,
    pub objects: BTreeMap<Digest, StoredObject>,
    /// Objects with a list of parts.
    pub parts: BTreeSet<Digest>,
    /// Objects that an interrupted garbage collection left in the trash.
    pub trash: BTreeMap<Digest, StoredObject>,
    /// Entries among the objects whose names are not digests.
    pub foreign: BTreeSet<String>,
}

/// For each version that can be restored: the download size of its cheapest path, and that path's
/// last object.
#[derive(Debug, Clone, Default)]
pub struct Costs(BTreeMap<i64, (u64, LastObject)>);

#[derive(Debug, Clone, Copy)]
struct LastObject {
    object: ObjectRef,
    /// The version that this delta is applied to; none for a checkpoint.
    base: Option<i64>,
}

impl Store {
    /// Reads all documents of a policy and lists its objects.
    pub async fn catalog(&self, policy: &str, keys: &TrustedKeys) -> Result<Catalog, Error> {
        let mut foreign = BTreeSet::new();
        // Garbage collection relies on this order: documents decide what to restore from the listed
        // trash.
        let trash = self.list_objects(policy, "trash", &mut foreign).await?;
        let objects = self.list_objects(policy, "object", &mut foreign).await?;
        let serials = self.list_numbers(policy, "version").await?;
        let versions = read_all(serials, |serial| self.get_manifest(policy, serial, keys)).await?;
        let squashed = self.list_squashed_deltas(policy).await?.into_iter();
        let squashed = squashed.flat_map(|(to, starts)| starts.into_iter().map(move |from| (to, from)));
        let squashed_deltas = read_all(squashed, |(to, from)| self.get_squashed_delta(policy, from, to, keys)).await?;
        let epochs = self.list_numbers(policy, "assignment").await?;
        let assignments = read_all(epochs, |epoch| self.get_assignment(policy, epoch, keys)).await?;
        let unreadable = assignments.iter().filter(|(_, assignment)| assignment.is_err());
        let before = keys.without_revocations();
        let unreadable: Vec<i64> = unreadable.map(|(epoch, _)| *epoch).collect();
        let revoked = read_all(unreadable, |epoch| self.get_assignment(policy, epoch, &before)).await?;
        let revoked = revoked
            .into_iter()
            .filter_map(|(epoch, read)| Some((epoch, read.ok()?)));
        // After the objects: a list of parts is written before its object.
        let parts = self.list_objects(policy, "parts", &mut foreign).await?;
        Ok(Catalog {
            versions,
            squashed_deltas,
            assignments,
            revoked_assignments: revoked.collect(),
            pins: self.pins(policy).await?,
            objects,
            parts: parts.into_keys().collect(),
            trash,
            foreign,
        })
    }

    async fn list_objects(
        &self,
        policy: &str,
        folder: &str,
        foreign: &mut BTreeSet<String>,
    ) -> Result<BTreeMap<Digest, StoredObject>, Error> {
        let folder = policy_key(policy, folder)?;
        let mut found = BTreeMap::new();
        let mut entries = self.backend.list(Some(&folder));
        while let Some(entry) = entries.try_next().await.map_err(backend("list", &folder))? {
            let digest = entry.location.filename().and_then(|name| name.parse::<Digest>().ok());
            let stored = StoredObject::of(&entry);
            match digest {
                Some(digest) => drop(found.insert(digest, stored)),
                None => drop(foreign.insert(entry.location.to_string())),
            }
        }
        Ok(found)
    }
}

/// Reads documents. Keeps the reason of one that does not verify, and skips one that was deleted
/// since it was listed. It is an error if the store does not answer.
async fn read_all<K: Ord + Copy, T, F: Future<Output = Result<T, Error>>>(
    keys: impl IntoIterator<Item = K>,
    read: impl Fn(K) -> F,
) -> Result<BTreeMap<K, Result<T, String>>, Error> {
    let reads = keys.into_iter().map(|key| {
        let document = read(key);
        async move { (key, document.await) }
    });
    let mut reads = std::pin::pin!(futures::stream::iter(reads).buffer_unordered(READ_AT_ONCE));
    let mut documents = BTreeMap::new();
    while let Some((key, document)) = reads.next().await {
        match document {
            Ok(document) => drop(documents.insert(key, Ok(document))),
            Err(Error::NotFound(_)) => {}
            Err(error @ Error::Backend { .. }) => return Err(error),
            Err(error) => drop(documents.insert(key, Err(error.to_string()))),
        }
    }
    Ok(documents)
}

impl Catalog {
    /// The manifest of a version, if it verifies.
    pub fn manifest(&self, serial: i64) -> Option<&Manifest> {
        self.versions.get(&serial).and_then(|manifest| manifest.as_ref().ok())
    }

    /// The manifests that verify, by serial.
    pub fn manifests(&self) -> impl Iterator<Item = &Manifest> {
        self.versions.values().flatten()
    }

    /// Whether an object exists with its size.
    pub fn has(&self, object: &ObjectRef) -> bool {
        let stored = self.objects.get(&object.digest);
        stored.is_some_and(|stored| stored.size_bytes == object.size_bytes)
    }

    /// Whether an object lacks the list of parts that its size asks for.
    pub fn lacks_parts(&self, object: &ObjectRef) -> bool {
        Parts::list_bytes(object.size_bytes) > 0 && !self.parts.contains(&object.digest)
    }

    /// The newest assignment that verifies.
    pub fn assignment(&self) -> Option<&Assignment> {
        self.assignments.values().rev().flatten().next()
    }

    /// The aliases that name a version in the newest assignment.
    pub fn aliases_of(&self, serial: i64) -> Vec<&str> {
        let aliases = self.assignment().into_iter().flat_map(|assignment| &assignment.aliases);
        aliases
            .filter(|(_, target)| target.version == serial)
            .map(|(alias, _)| alias.as_str())
            .collect()
    }

    /// The newest version of each line.
    pub fn heads(&self) -> BTreeMap<&str, i64> {
        self.manifests()
            .map(|manifest| (manifest.line.as_str(), manifest.version))
            .collect()
    }

    /// The squashed deltas that verify and match the content hashes of their versions.
    pub fn usable_squashed_deltas(&self) -> impl Iterator<Item = &SquashedDelta> {
        let is = |version, root| self.manifest(version).is_some_and(|manifest| manifest.root == root);
        self.squashed_deltas
            .values()
            .flatten()
            .filter(move |delta| is(delta.from.version, delta.from.root) && is(delta.to.version, delta.to.root))
    }

    /// The cheapest path to every version, over objects that exist and are not in `avoided`.
    pub fn costs(&self, avoided: &BTreeSet<Digest>) -> Costs {
        let usable = |object: &ObjectRef| self.has(object) && !avoided.contains(&object.digest);
        let mut squashed: BTreeMap<i64, Vec<&SquashedDelta>> = BTreeMap::new();
        for delta in self.usable_squashed_deltas().filter(|squashed| usable(&squashed.delta)) {
            squashed.entry(delta.to.version).or_default().push(delta);
        }
        let mut costs = Costs::default();
        // Bases have lower serials, so their costs are known already.
        for manifest in self.manifests() {
            let after = |base: i64, object: ObjectRef, bytes: u64| {
                let base_cost = costs.of(base)?;
                let last = LastObject {
                    object,
                    base: Some(base),
                };
                Some((base_cost.saturating_add(bytes), last))
            };
            let checkpoint = manifest.checkpoint.filter(usable);
            let checkpoint = checkpoint.map(|object| (object.size_bytes, LastObject { object, base: None }));
            let delta = manifest
                .delta
                .filter(|_| manifest.delta_objects().all(|object| usable(&object)))
                .zip(manifest.parent)
                .filter(|(_, parent)| {
                    self.manifest(parent.version)
                        .is_some_and(|known| known.root == parent.root)
                })
                .and_then(|(delta, parent)| after(parent.version, delta, manifest.delta_bytes()?));
            let squashed = squashed.get(&manifest.version).into_iter().flatten();
            let squashed = squashed.filter_map(|one| after(one.from.version, one.delta, one.delta.size_bytes));
            let candidates = checkpoint.into_iter().chain(delta).chain(squashed);
            if let Some(cheapest) = candidates.min_by_key(|(cost, _)| *cost) {
                costs.0.insert(manifest.version, cheapest);
            }
        }
        costs
    }
}

impl Costs {
    /// The download size of the cheapest path; none if the version cannot be restored.
    pub fn of(&self, serial: i64) -> Option<u64> {
        self.0.get(&serial).map(|(cost, _)| *cost)
    }

    /// The objects on the cheapest path from a version back to its checkpoint, which is the last
    /// one.
    pub(super) fn objects(&self, serial: i64) -> Vec<ObjectRef> {
        let mut objects = vec![];
        let mut at = Some(serial);
        while let Some((_, last)) = at.and_then(|serial| self.0.get(&serial)) {
            objects.push(last.object);
            at = last.base;
        }
        objects
    }
}
