//! Garbage collection deletes objects that no live version needs.
//!
//! For every live version it keeps:
//! - the version's own objects;
//! - two restore paths that start at different checkpoints, so one corrupt checkpoint is not fatal;
//! - every object younger than the grace period, because publishers upload objects before the
//!   manifest that names them.
//!
//! A version is live if a recent assignment names it, if it is pinned, if it is the newest of its
//! line, if it is younger than the grace period, or if the caller lists it. An assignment that only
//! a revoked key signed counts too, because it can only keep more. Manifests are never deleted:
//! they are small, and serials are not reused.
//!
//! Nothing is deleted while a manifest or another assignment does not verify, however old it is.
//!
//! Deletion has three phases: move to trash, read all documents again and restore what they need,
//! then empty the trash. Publishers call [`Store::reupload_missing`] after writing a manifest, and
//! readers also look in the trash, so no lock is needed. A garbage collection that is killed leaves
//! trash. The next one handles that trash first.

use std::collections::{BTreeMap, BTreeSet};

use time::{Duration, OffsetDateTime};

use super::catalog::{Catalog, StoredObject};
use super::keys::{object_key, parts_key, squashed_delta_key, trash_key};
use super::objects::modified;
use super::{Error, Store};
use artifact::digest::Digest;
use artifact::manifest::ObjectRef;
use artifact::parts::Parts;
use artifact::sign::TrustedKeys;

/// Which versions and objects to keep.
#[derive(Debug, Clone)]
pub struct Retention {
    /// Keeps everything younger. Must exceed the duration of any publication plus clock skew.
    pub grace: Duration,
    /// How many of the latest assignments count: aliases may go back to their versions.
    pub assignments: usize,
    /// Versions that are needed for reasons the store does not know.
    pub versions: BTreeSet<i64>,
}

/// What a garbage collection did, or would do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GcReport {
    pub live: BTreeSet<i64>,
    /// Versions that can no longer be restored.
    pub unreachable: BTreeSet<i64>,
    pub deleted: BTreeMap<Digest, u64>,
    /// Squashed deltas whose documents were deleted, as (from, to).
    pub squashed_deltas: BTreeSet<(i64, i64)>,
    /// Objects that turned out to be needed.
    pub restored: BTreeSet<Digest>,
    /// Needed objects whose lists of parts were missing and were made again.
    pub rebuilt_parts: BTreeSet<Digest>,
    pub kept_objects: usize,
    pub kept_bytes: u64,
}

impl GcReport {
    pub fn deleted_bytes(&self) -> u64 {
        self.deleted.values().sum()
    }

    /// Counts the objects of `catalog` that were not deleted.
    fn set_kept(&mut self, catalog: &Catalog) {
        let objects = catalog.objects.iter();
        let kept = objects.filter(|(digest, _)| !self.deleted.contains_key(digest));
        let sizes: Vec<u64> = kept.map(|(_, stored)| stored.size_bytes).collect();
        (self.kept_objects, self.kept_bytes) = (sizes.len(), sizes.iter().sum());
    }
}

struct Plan {
    live: BTreeSet<i64>,
    needed: BTreeSet<Digest>,
    garbage: BTreeMap<Digest, StoredObject>,
    squashed_deltas: BTreeSet<(i64, i64)>,
}

impl Store {
    /// Deletes what no live version needs, or only reports it if `dry_run` is set. Calls
    /// `needed_versions` once objects are in the trash, for the current value of
    /// [`Retention::versions`].
    pub async fn collect_garbage<F>(
        &self,
        policy: &str,
        keys: &TrustedKeys,
        retention: &Retention,
        dry_run: bool,
        needed_versions: impl Fn() -> F,
    ) -> Result<GcReport, Error>
    where
        F: Future<Output = Result<BTreeSet<i64>, Error>>,
    {
        let mut restored = BTreeSet::new();
        let mut catalog = self.catalog(policy, keys).await?;
        refuse_unreadable(policy, &catalog)?;
        if !dry_run && !catalog.trash.is_empty() {
            // A garbage collection that was killed left it.
            restored.extend(self.empty_trash(policy, &catalog, retention).await?);
            catalog = self.catalog(policy, keys).await?;
            refuse_unreadable(policy, &catalog)?;
        }
        let plan = plan(&catalog, retention);
        let before = catalog.costs(&BTreeSet::new());
        let after = catalog.costs(&plan.garbage.keys().copied().collect());
        let is_lost = |serial: &i64| before.of(*serial).is_some() && after.of(*serial).is_none();
        let garbage = plan.garbage.iter();
        let mut report = GcReport {
            live: plan.live,
            unreachable: catalog.versions.keys().copied().filter(is_lost).collect(),
            deleted: garbage.map(|(digest, stored)| (*digest, stored.size_bytes)).collect(),
            squashed_deltas: plan.squashed_deltas,
            restored,
            rebuilt_parts: BTreeSet::new(),
            kept_objects: 0,
            kept_bytes: 0,
        };
        if dry_run {
            report.set_kept(&catalog);
            return Ok(report);
        }
        for (from, to) in &report.squashed_deltas {
            self.delete(&squashed_delta_key(policy, *from, *to)?).await?;
        }
        let mut moved = BTreeSet::new();
        for (digest, stored) in &plan.garbage {
            if self.move_to_trash(policy, digest, stored).await? {
                moved.insert(*digest);
            }
        }
        if !moved.is_empty() {
            // Read again: documents may have been written while objects were moved.
            let retention = Retention {
                versions: needed_versions().await?,
                ..retention.clone()
            };
            let catalog = self.catalog(policy, keys).await?;
            refuse_unreadable(policy, &catalog)?;
            report
                .restored
                .extend(self.empty_trash(policy, &catalog, &retention).await?);
        }
        let restored = &report.restored;
        report
            .deleted
            .retain(|digest, _| moved.contains(digest) && !restored.contains(digest));
        report.set_kept(&catalog);
        for digest in plan.needed {
            let Some(stored) = catalog.objects.get(&digest) else {
                continue;
            };
            let object = object_ref(&digest, stored);
            if !catalog.lacks_parts(&object) {
                continue;
            }
            if self.restore_parts(policy, &object).await? {
                report.rebuilt_parts.insert(digest);
            }
        }
        Ok(report)
    }

    /// Makes an object's list of parts again. False if the object is damaged or gone.
    async fn restore_parts(&self, policy: &str, object: &ObjectRef) -> Result<bool, Error> {
        match self.rebuild_parts(policy, object).await {
            Ok(()) => Ok(true),
            Err(error @ Error::Backend { .. }) => Err(error),
            Err(error) => {
                tracing::warn!(policy, %error, "a list of parts was not made again");
                Ok(false)
            }
        }
    }

    /// Moves an object to the trash. False if it was written again since it was listed.
    async fn move_to_trash(&self, policy: &str, digest: &Digest, listed: &StoredObject) -> Result<bool, Error> {
        let key = object_key(policy, digest)?;
        // Compares whole seconds: some servers list an object with a finer time than they return
        // for it alone.
        match self.head(&key).await? {
            Some(meta) if modified(&meta).unix_timestamp() == listed.modified_at.unix_timestamp() => {}
            _ => return Ok(false),
        }
        let trash = trash_key(policy, digest)?;
        self.move_object(&object_ref(digest, listed), &key, &trash).await
    }

    /// Restores needed objects and deletes the rest. The documents of `catalog` were read after its
    /// trash was listed. Publishers that wrote a document later check its objects themselves.
    async fn empty_trash(
        &self,
        policy: &str,
        catalog: &Catalog,
        retention: &Retention,
    ) -> Result<BTreeSet<Digest>, Error> {
        let mut with_trash = catalog.clone();
        with_trash.objects.extend(&catalog.trash);
        let needed = plan(&with_trash, retention).needed;
        let mut restored = BTreeSet::new();
        for (digest, stored) in &catalog.trash {
            let trash = trash_key(policy, digest)?;
            if needed.contains(digest) {
                let key = object_key(policy, digest)?;
                // False if another garbage collection was faster.
                if self.move_object(&object_ref(digest, stored), &trash, &key).await? {
                    restored.insert(*digest);
                }
            } else {
                // The list of parts goes first. If we are killed here, the next run still finds the
                // object. An object that was written again meanwhile keeps its list.
                let key = object_key(policy, digest)?;
                if self.head(&key).await?.is_none() {
                    self.delete(&parts_key(policy, digest)?).await?;
                    // Publishers write the list before the object: this one may have been deleted.
                    let object = object_ref(digest, stored);
                    if Parts::list_bytes(object.size_bytes) > 0 && self.head(&key).await?.is_some() {
                        self.restore_parts(policy, &object).await?;
                    }
                }
                self.delete(&trash).await?;
            }
        }
        Ok(restored)
    }
}

fn object_ref(digest: &Digest, stored: &StoredObject) -> ObjectRef {
    ObjectRef {
        digest: *digest,
        size_bytes: stored.size_bytes,
    }
}

/// An unreadable document may name objects that are needed.
fn refuse_unreadable(policy: &str, catalog: &Catalog) -> Result<(), Error> {
    let mut versions = catalog.versions.iter();
    let version = versions.find_map(|(serial, manifest)| Some((format!("version {serial}"), manifest.as_ref().err()?)));
    let mut assignments = catalog.assignments.iter();
    let assignment = assignments.find_map(|(epoch, assignment)| {
        let reason = assignment.as_ref().err()?;
        let revoked = catalog.revoked_assignments.contains_key(epoch);
        (!revoked).then(|| (format!("assignment {epoch}"), reason))
    });
    match version.or(assignment) {
        None => Ok(()),
        Some((document, reason)) => Err(Error::Document {
            key: format!("{document} of {policy}"),
            reason: format!(
                "{reason}; nothing is deleted while a document cannot be read: trust its key, sign it again, or repair it"
            ),
        }),
    }
}

fn plan(catalog: &Catalog, retention: &Retention) -> Plan {
    let oldest_young = OffsetDateTime::now_utc() - retention.grace;
    let live = live_versions(catalog, retention);
    let mut needed: BTreeSet<Digest> = BTreeSet::new();
    let mut need = |objects: &mut dyn Iterator<Item = ObjectRef>| needed.extend(objects.map(|object| object.digest));
    // Two paths to each version, from different checkpoints.
    let costs = catalog.costs(&BTreeSet::new());
    let mut by_checkpoint: BTreeMap<Digest, Vec<i64>> = BTreeMap::new();
    for &serial in &live {
        let path = costs.objects(serial);
        if let Some(checkpoint) = path.last() {
            by_checkpoint.entry(checkpoint.digest).or_default().push(serial);
        }
        need(&mut path.into_iter());
        if let Some(manifest) = catalog.manifest(serial) {
            need(&mut manifest.checkpoint.into_iter().chain(manifest.delta_objects()));
        }
    }
    for (checkpoint, serials) in by_checkpoint {
        let without = catalog.costs(&BTreeSet::from([checkpoint]));
        for serial in serials {
            need(&mut without.objects(serial).into_iter());
        }
    }
    // A delta in several objects is usable only with all of them.
    for manifest in catalog.manifests() {
        if manifest.delta.is_some_and(|delta| needed.contains(&delta.digest)) {
            needed.extend(manifest.delta_objects().map(|object| object.digest));
        }
    }
    // A squashed delta between two live versions helps replicas that hold the first.
    let mut squashed_deltas = BTreeSet::new();
    for ((to, from), squashed) in &catalog.squashed_deltas {
        // Keeps documents that do not verify: their key may be trusted again.
        let Ok(squashed) = squashed else { continue };
        let both_live = live.contains(to) && live.contains(from);
        if both_live || squashed.created_at >= oldest_young || needed.contains(&squashed.delta.digest) {
            needed.insert(squashed.delta.digest);
        } else {
            squashed_deltas.insert((*from, *to));
        }
    }
    let objects = catalog.objects.iter();
    let garbage = objects.filter(|(digest, stored)| stored.modified_at < oldest_young && !needed.contains(digest));
    Plan {
        live,
        garbage: garbage.map(|(digest, stored)| (*digest, *stored)).collect(),
        needed,
        squashed_deltas,
    }
}

pub(super) fn live_versions(catalog: &Catalog, retention: &Retention) -> BTreeSet<i64> {
    let oldest_young = OffsetDateTime::now_utc() - retention.grace;
    let mut live = retention.versions.clone();
    let assignments = catalog.assignments.values().rev().flatten().enumerate();
    let revoked = catalog.revoked_assignments.values().rev().enumerate();
    for (nth, assignment) in assignments.chain(revoked) {
        if nth < retention.assignments.max(1) || assignment.created_at >= oldest_young {
            live.extend(assignment.aliases.values().map(|target| target.version));
        }
    }
    live.extend(catalog.pins.keys());
    live.extend(catalog.heads().values());
    let young = catalog
        .manifests()
        .filter(|manifest| manifest.created_at >= oldest_young);
    live.extend(young.map(|manifest| manifest.version));
    let bases = |serial: &i64| Some(catalog.manifest(*serial)?.adapts?.version);
    // the base of an adapter has all weights
    live.extend(live.iter().filter_map(bases).collect::<Vec<_>>());
    live
}
