//! Garbage collection: deletes objects that nothing needs any more.
//!
//! Needed are, of every *live* version, its own objects and two ways to it that start at different images, so that one
//! broken image does not end it; and whatever is younger than the grace time, for a publication puts its objects before the
//! manifest that names them. Live are versions that
//! - one of the latest assignments names, or one that is younger than the grace time: aliases, and where they may go back to;
//! - are pinned, are the newest of their line, are younger than the grace time, or that the caller names (heads of lines and
//!   what runs stand on, which the database knows).
//!
//! Manifests stay: they are small, a serial is never given out twice, and they say what there once was.
//!
//! An object may be needed again at the very moment at which it is deleted: somebody publishes the same bytes once more, or an
//! alias goes back. Each object is therefore moved into the trash first; then all documents are read again, and what they
//! need by then is put back; only then is the trash emptied. Who publishes looks after the manifest is written whether its
//! objects are still there ([`Store::make_good`]): a manifest that was written too late to be seen here finds the gap itself.
//! Who reads an object looks into the trash as well.
//! A collection that was killed leaves trash, and the next one begins with it: what is needed goes back, the rest goes on.

use std::collections::{BTreeMap, BTreeSet};

use object_store::path::Path;
use time::{Duration, OffsetDateTime};

use super::catalog::{Catalog, Stored};
use super::objects::modified;
use super::{Error, Store, key, object_key, parts_key};
use artifact::digest::Digest;
use artifact::sign::TrustedKeys;

/// What a collection has to keep beside what the store itself says.
#[derive(Debug, Clone)]
pub struct Keep {
    /// Whatever is younger stays. Longer than any publication takes, and than clocks differ.
    pub grace: Duration,
    /// So many of the latest assignments count: versions that an alias may go back to.
    pub assignments: usize,
    /// Versions that somebody needs of whom the store does not know.
    pub versions: BTreeSet<i64>,
}

/// What a collection did, or would do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Collected {
    pub live: BTreeSet<i64>,
    /// Versions that could be put together before and cannot any longer.
    pub given_up: BTreeSet<i64>,
    pub deleted: BTreeMap<Digest, u64>,
    /// Folds whose documents went with their objects, as (from, to).
    pub folds: BTreeSet<(i64, i64)>,
    /// Objects that turned out to be needed and were put back.
    pub put_back: BTreeSet<Digest>,
    pub kept_objects: usize,
    pub kept_bytes: u64,
}

impl Collected {
    pub fn deleted_bytes(&self) -> u64 {
        self.deleted.values().sum()
    }
}

/// What goes and what stays.
struct Plan {
    live: BTreeSet<i64>,
    needed: BTreeSet<Digest>,
    garbage: BTreeMap<Digest, Stored>,
    folds: BTreeSet<(i64, i64)>,
}

impl Store {
    /// Deletes what nothing needs; with `dry_run` only says what that would be. `changed` is asked for the versions of
    /// [`Keep::versions`] again once objects are in the trash.
    pub async fn collect<F>(
        &self,
        policy: &str,
        keys: &TrustedKeys,
        keep: &Keep,
        dry_run: bool,
        changed: impl Fn() -> F,
    ) -> Result<Collected, Error>
    where
        F: Future<Output = Result<BTreeSet<i64>, Error>>,
    {
        let mut put_back = BTreeSet::new();
        let mut catalog = self.catalog(policy, keys).await?;
        refuse_unreadable(policy, &catalog)?;
        if !dry_run && !catalog.trash.is_empty() {
            // left by a collection that was killed
            put_back.extend(self.empty_trash(policy, &catalog, keep).await?);
            catalog = self.catalog(policy, keys).await?;
        }
        let plan = plan(&catalog, keep);
        let before = catalog.costs(&BTreeSet::new());
        let after = catalog.costs(&plan.garbage.keys().copied().collect());
        let mut collected = Collected {
            given_up: catalog
                .versions
                .keys()
                .copied()
                .filter(|&serial| before.of(serial).is_some() && after.of(serial).is_none())
                .collect(),
            deleted: plan
                .garbage
                .iter()
                .map(|(digest, stored)| (*digest, stored.size_bytes))
                .collect(),
            folds: plan.folds.clone(),
            kept_objects: catalog.objects.len() - plan.garbage.len(),
            ..Collected::default()
        };
        collected.live = plan.live;
        let bytes = |objects: &BTreeMap<Digest, Stored>| objects.values().map(|stored| stored.size_bytes).sum::<u64>();
        collected.kept_bytes = bytes(&catalog.objects) - bytes(&plan.garbage);
        if dry_run {
            return Ok(collected);
        }
        for (from, to) in &plan.folds {
            self.delete_fold(policy, *from, *to).await?;
        }
        let mut moved = BTreeSet::new();
        for (digest, stored) in &plan.garbage {
            if self.discard(policy, digest, stored).await? {
                moved.insert(*digest);
            }
        }
        collected.deleted.retain(|digest, _| moved.contains(digest));
        if !moved.is_empty() {
            // whoever began before the objects were moved has written what the documents now say
            let keep = Keep {
                versions: changed().await?,
                ..keep.clone()
            };
            let catalog = self.catalog(policy, keys).await?;
            put_back.extend(self.empty_trash(policy, &catalog, &keep).await?);
        }
        collected.deleted.retain(|digest, _| !put_back.contains(digest));
        collected.put_back = put_back;
        Ok(collected)
    }

    /// Moves an object into the trash, unless it was written again since it was listed.
    async fn discard(&self, policy: &str, digest: &Digest, listed: &Stored) -> Result<bool, Error> {
        let place = object_key(policy, digest)?;
        // in whole seconds: some servers list an object with a finer time than they give for it alone
        match self.head(&place).await? {
            Some(meta) if modified(&meta).unix_timestamp() == listed.modified_at.unix_timestamp() => {}
            _ => return Ok(false),
        }
        let object = listed.under(*digest);
        self.relocate(&object, &place, &trash_key(policy, digest)?).await
    }

    /// Puts back what is needed and not there, and deletes the rest. The documents of `catalog` were read after its trash was
    /// listed: whoever wrote one since looks for its objects afterwards.
    async fn empty_trash(&self, policy: &str, catalog: &Catalog, keep: &Keep) -> Result<BTreeSet<Digest>, Error> {
        let mut whole = catalog.clone();
        whole
            .objects
            .extend(catalog.trash.iter().map(|(digest, stored)| (*digest, *stored)));
        let needed = plan(&whole, keep).needed;
        let mut put_back = BTreeSet::new();
        for (digest, stored) in &catalog.trash {
            let trash = trash_key(policy, digest)?;
            if needed.contains(digest) {
                let place = object_key(policy, digest)?;
                // else another collection was quicker
                if self.relocate(&stored.under(*digest), &trash, &place).await? {
                    put_back.insert(*digest);
                }
            } else {
                // The list of its parts first: what is left of a collection that was killed is in the trash.
                self.delete(&parts_key(policy, digest)?).await?;
                self.delete(&trash).await?;
            }
        }
        Ok(put_back)
    }
}

/// What cannot be read may be what somebody needs.
fn refuse_unreadable(policy: &str, catalog: &Catalog) -> Result<(), Error> {
    let version = catalog.versions.iter().find_map(|(serial, manifest)| {
        let reason = manifest.as_ref().err()?;
        Some((format!("version {serial}"), reason))
    });
    let assignment = catalog.assignments.iter().next_back().and_then(|(epoch, assignment)| {
        let reason = assignment.as_ref().err()?;
        Some((format!("assignment {epoch}"), reason))
    });
    match version.or(assignment) {
        None => Ok(()),
        Some((what, reason)) => Err(Error::Document {
            key: format!("{what} of {policy}"),
            reason: format!(
                "{reason}; nothing is deleted while it cannot be told what is needed: trust its key, sign it again, or put the document right"
            ),
        }),
    }
}

fn plan(catalog: &Catalog, keep: &Keep) -> Plan {
    let young = OffsetDateTime::now_utc() - keep.grace;
    let live = live(catalog, keep, young);
    let mut needed: BTreeSet<Digest> = BTreeSet::new();
    // two ways to each, from images that differ
    let costs = catalog.costs(&BTreeSet::new());
    let mut by_image: BTreeMap<Digest, Vec<i64>> = BTreeMap::new();
    for &serial in &live {
        let way = costs.objects(serial);
        if let Some(image) = way.last() {
            by_image.entry(image.digest).or_default().push(serial);
        }
        needed.extend(way.iter().map(|object| object.digest));
    }
    for (image, serials) in by_image {
        let without = catalog.costs(&BTreeSet::from([image]));
        for serial in serials {
            needed.extend(without.objects(serial).iter().map(|object| object.digest));
        }
    }
    for &serial in &live {
        if let Some(manifest) = catalog.manifest(serial) {
            let objects = manifest.image.into_iter().chain(manifest.delta_objects());
            needed.extend(objects.map(|object| object.digest));
        }
    }
    // a delta of several objects is a way while all of them are there
    for manifest in catalog.manifests() {
        if manifest.delta.is_some_and(|delta| needed.contains(&delta.digest)) {
            needed.extend(manifest.delta_objects().map(|object| object.digest));
        }
    }
    // a fold between two versions that stay in reach is a way for who holds the first
    let mut folds = BTreeSet::new();
    for ((to, from), fold) in &catalog.folds {
        match fold {
            Ok(fold) if live.contains(to) && live.contains(from) => drop(needed.insert(fold.delta.digest)),
            Ok(fold) if fold.created_at >= young || needed.contains(&fold.delta.digest) => {
                needed.insert(fold.delta.digest);
            }
            Ok(_) => drop(folds.insert((*from, *to))),
            // of a key that may be trusted again; without its object nobody takes it
            Err(_) => {}
        }
    }
    let garbage = catalog
        .objects
        .iter()
        .filter(|(digest, stored)| stored.modified_at < young && !needed.contains(digest))
        .map(|(digest, stored)| (*digest, *stored))
        .collect();
    Plan {
        live,
        needed,
        garbage,
        folds,
    }
}

pub(super) fn live(catalog: &Catalog, keep: &Keep, young: OffsetDateTime) -> BTreeSet<i64> {
    let mut live = keep.versions.clone();
    let assignments = catalog.assignments.values().rev().flatten();
    for (nth, assignment) in assignments.enumerate() {
        if nth < keep.assignments.max(1) || assignment.created_at >= young {
            live.extend(assignment.aliases.values().map(|target| target.version));
        }
    }
    live.extend(catalog.pins.keys());
    live.extend(catalog.heads().values());
    let recent = catalog.manifests().filter(|manifest| manifest.created_at >= young);
    live.extend(recent.map(|manifest| manifest.version));
    live
}

pub(super) fn trash_key(policy: &str, digest: &Digest) -> Result<Path, Error> {
    key(policy, &format!("trash/{digest}"))
}
