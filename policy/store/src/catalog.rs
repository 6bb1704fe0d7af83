//! Everything that a policy's part of the store holds, read once: for the commands that look at the whole of it. Documents
//! are verified; objects are known by name, size and time alone.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _};
use time::OffsetDateTime;

use super::objects::modified;
use super::{Error, Store, backend, key};
use crate::Pin;
use artifact::assignment::Assignment;
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef};
use artifact::sign::TrustedKeys;
use artifact::squash::SquashedDelta;

/// Documents read at once.
const READ_AT_ONCE: usize = 32;

/// What the store says of an object without reading it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stored {
    pub size_bytes: u64,
    pub modified_at: OffsetDateTime,
}

impl Stored {
    pub(super) fn under(&self, digest: Digest) -> ObjectRef {
        ObjectRef {
            digest,
            size_bytes: self.size_bytes,
        }
    }
}

/// One look at everything. Objects were listed before the documents were read, so an object of a publication that went on
/// meanwhile is missing from `objects` rather than from the documents.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    /// By serial; those that do not verify with their reason.
    pub versions: BTreeMap<i64, Result<Manifest, String>>,
    /// By (to, from).
    pub folds: BTreeMap<(i64, i64), Result<SquashedDelta, String>>,
    pub assignments: BTreeMap<i64, Result<Assignment, String>>,
    pub pins: BTreeMap<i64, Option<Pin>>,
    pub objects: BTreeMap<Digest, Stored>,
    /// Objects that a collection was about to delete when it ended.
    pub trash: BTreeMap<Digest, Stored>,
    /// Names that no writer of this format gives.
    pub foreign: BTreeSet<String>,
}

/// The cheapest way from nothing to each version that can be put together, as far as sizes tell.
#[derive(Debug, Clone, Default)]
pub struct Costs(BTreeMap<i64, (u64, Last)>);

/// How the cheapest way to a version ends.
#[derive(Debug, Clone, Copy)]
enum Last {
    Checkpoint(ObjectRef),
    /// From the version named.
    Delta(i64, ObjectRef),
    SquashedDelta(i64, ObjectRef),
}

impl Store {
    /// Reads all of a policy: every document, and the list of the objects.
    pub async fn catalog(&self, policy: &str, keys: &TrustedKeys) -> Result<Catalog, Error> {
        let mut foreign = BTreeSet::new();
        // the order matters to a collection: what is put back is known by documents read after the trash was listed
        let trash = self.stored(policy, "trash", &mut foreign).await?;
        let objects = self.stored(policy, "object", &mut foreign).await?;
        let serials = self.numbers(policy, "version").await?;
        let versions = futures::stream::iter(serials)
            .map(|serial| async move { (serial, self.get_manifest(policy, serial, keys).await) })
            .buffer_unordered(READ_AT_ONCE);
        let folds: Vec<(i64, i64)> = self
            .fold_names(policy)
            .await?
            .into_iter()
            .flat_map(|(to, from)| from.into_iter().map(move |from| (to, from)))
            .collect();
        let folds = futures::stream::iter(folds)
            .map(|(to, from)| async move { ((to, from), self.get_fold(policy, from, to, keys).await) })
            .buffer_unordered(READ_AT_ONCE);
        let epochs = self.numbers(policy, "assignment").await?;
        let assignments = futures::stream::iter(epochs)
            .map(|epoch| async move { (epoch, self.get_assignment(policy, epoch, keys).await) })
            .buffer_unordered(READ_AT_ONCE);
        Ok(Catalog {
            versions: believed(versions).await?,
            folds: believed(folds).await?,
            assignments: believed(assignments).await?,
            pins: self.pins(policy).await?,
            objects,
            trash,
            foreign,
        })
    }

    async fn stored(
        &self,
        policy: &str,
        folder: &str,
        foreign: &mut BTreeSet<String>,
    ) -> Result<BTreeMap<Digest, Stored>, Error> {
        let folder = key(policy, folder)?;
        let mut found = BTreeMap::new();
        let mut entries = self.backend.list(Some(&folder));
        while let Some(entry) = entries.try_next().await.map_err(backend("list", &folder))? {
            let digest = entry.location.filename().and_then(|name| name.parse::<Digest>().ok());
            let stored = Stored {
                size_bytes: entry.size,
                modified_at: modified(&entry),
            };
            match digest {
                Some(digest) => drop(found.insert(digest, stored)),
                None => drop(foreign.insert(entry.location.to_string())),
            }
        }
        Ok(found)
    }
}

/// Collects documents. One that does not verify is kept with its reason, one that was taken away since it was listed is left
/// out, and a store that does not answer is an error.
async fn believed<K: Ord, T>(
    documents: impl futures::Stream<Item = (K, Result<T, Error>)>,
) -> Result<BTreeMap<K, Result<T, String>>, Error> {
    let mut read = BTreeMap::new();
    let mut documents = std::pin::pin!(documents);
    while let Some((place, document)) = documents.next().await {
        match document {
            Ok(document) => drop(read.insert(place, Ok(document))),
            Err(Error::NotFound(_)) => {}
            Err(error @ Error::Backend { .. }) => return Err(error),
            Err(error) => drop(read.insert(place, Err(error.to_string()))),
        }
    }
    Ok(read)
}

impl Catalog {
    /// A version whose manifest verifies.
    pub fn manifest(&self, serial: i64) -> Option<&Manifest> {
        self.versions.get(&serial).and_then(|manifest| manifest.as_ref().ok())
    }

    /// Manifests that verify, by rising serial.
    pub fn manifests(&self) -> impl Iterator<Item = &Manifest> {
        self.versions.values().flatten()
    }

    /// The object is there, with its size.
    pub fn has(&self, object: &ObjectRef) -> bool {
        self.objects
            .get(&object.digest)
            .is_some_and(|stored| stored.size_bytes == object.size_bytes)
    }

    /// The newest assignment that verifies.
    pub fn assignment(&self) -> Option<&Assignment> {
        self.assignments.values().rev().flatten().next()
    }

    /// Aliases that name a version now.
    pub fn aliases_of(&self, serial: i64) -> Vec<&str> {
        let aliases = self.assignment().map(|assignment| &assignment.aliases);
        let named = aliases
            .into_iter()
            .flatten()
            .filter(|(_, target)| target.version == serial);
        named.map(|(alias, _)| alias.as_str()).collect()
    }

    /// The newest version of each line.
    pub fn heads(&self) -> BTreeMap<&str, i64> {
        self.manifests()
            .map(|manifest| (manifest.line.as_str(), manifest.version))
            .collect()
    }

    /// Folds that verify and join versions as their manifests have them.
    pub fn sound_folds(&self) -> impl Iterator<Item = &SquashedDelta> {
        let is = |version, root| self.manifest(version).is_some_and(|manifest| manifest.root == root);
        self.folds
            .values()
            .flatten()
            .filter(move |fold| is(fold.from.version, fold.from.root) && is(fold.to.version, fold.to.root))
    }

    /// The cheapest way to every version, from objects that are there and not `avoided`.
    pub fn costs(&self, avoided: &BTreeSet<Digest>) -> Costs {
        let usable = |object: &ObjectRef| self.has(object) && !avoided.contains(&object.digest);
        let mut folds: BTreeMap<i64, Vec<&SquashedDelta>> = BTreeMap::new();
        for fold in self.sound_folds().filter(|fold| usable(&fold.delta)) {
            folds.entry(fold.to.version).or_default().push(fold);
        }
        let mut costs = Costs::default();
        // a parent and what a fold begins at are older: they have been decided before
        for manifest in self.manifests() {
            let from = |version: i64, object: ObjectRef, last: fn(i64, ObjectRef) -> Last| {
                let (before, _) = costs.0.get(&version)?;
                Some((before.saturating_add(object.size_bytes), last(version, object)))
            };
            let image = manifest.image.filter(usable);
            let image = image.map(|image| (image.size_bytes, Last::Checkpoint(image)));
            let delta = manifest
                .delta
                .filter(|_| manifest.delta_objects().all(|object| usable(&object)))
                .zip(manifest.parent)
                .and_then(|(delta, parent)| {
                    let known = self.manifest(parent.version)?.root == parent.root;
                    let shards = manifest.delta_bytes()? - delta.size_bytes;
                    let (cost, last) = known.then(|| from(parent.version, delta, Last::Delta))??;
                    Some((cost.saturating_add(shards), last))
                });
            let folds = folds.get(&manifest.version).into_iter().flatten();
            let folds = folds.filter_map(|fold| from(fold.from.version, fold.delta, Last::SquashedDelta));
            let cheapest = image
                .into_iter()
                .chain(delta)
                .chain(folds)
                .min_by_key(|(cost, _)| *cost);
            if let Some(cheapest) = cheapest {
                costs.0.insert(manifest.version, cheapest);
            }
        }
        costs
    }
}

impl Costs {
    /// Bytes of the cheapest way; none when the version cannot be put together.
    pub fn of(&self, serial: i64) -> Option<u64> {
        self.0.get(&serial).map(|(cost, _)| *cost)
    }

    /// Objects on the cheapest way to a version, from the version back; the last one is the image.
    pub(super) fn objects(&self, serial: i64) -> Vec<ObjectRef> {
        let mut objects = vec![];
        let mut at = Some(serial);
        while let Some((_, last)) = at.and_then(|serial| self.0.get(&serial)) {
            let (object, before) = match *last {
                Last::Checkpoint(object) => (object, None),
                Last::Delta(from, object) | Last::SquashedDelta(from, object) => (object, Some(from)),
            };
            objects.push(object);
            at = before;
        }
        objects
    }
}
