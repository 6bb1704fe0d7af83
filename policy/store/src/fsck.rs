//! Checks the whole store and reports problems, without changing anything. Object bytes are read
//! only on request.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use time::OffsetDateTime;

use super::catalog::Catalog;
use super::gc::{Retention, live_versions};
use super::{Error, Store};
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef, Parent};
use artifact::quant::Spec;
use artifact::sign::TrustedKeys;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// For information.
    Note,
    /// Nothing needed is affected, but space is wasted or redundancy is lost.
    Warning,
    /// A needed version cannot be restored, or an entry does not verify.
    Error,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// For programs: `manifest`, `root`, `no-path`, `spare`, `object`, `parts`, `digest`, `fold`,
    /// `assignment`, `pin`, `fence`, `quantised`, `orphans`, `trash`, `gone`, `name`, `database`.
    pub kind: &'static str,
    /// The version, squashed delta, epoch or object.
    pub at: String,
    pub message: String,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    pub versions: usize,
    #[serde(rename = "folds")]
    pub squashed_deltas: usize,
    pub assignments: usize,
    pub objects: usize,
    pub object_bytes: u64,
    /// The newest version of each line.
    pub heads: BTreeMap<String, i64>,
    /// How many objects were read and hashed.
    pub objects_read: usize,
    /// The most severe first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether there are no errors.
    pub fn is_healthy(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity < Severity::Error)
    }

    fn add(&mut self, severity: Severity, kind: &'static str, at: impl Into<String>, message: impl Into<String>) {
        self.findings.push(Finding {
            severity,
            kind,
            at: at.into(),
            message: message.into(),
        });
    }

    fn error(&mut self, kind: &'static str, at: impl Into<String>, message: impl Into<String>) {
        self.add(Severity::Error, kind, at, message);
    }

    fn warning(&mut self, kind: &'static str, at: impl Into<String>, message: impl Into<String>) {
        self.add(Severity::Warning, kind, at, message);
    }

    fn note(&mut self, kind: &'static str, at: impl Into<String>, message: impl Into<String>) {
        self.add(Severity::Note, kind, at, message);
    }
}

impl Store {
    /// Checks everything. `retention` says which versions are needed, as in garbage collection.
    /// `deep` reads and hashes every object that a document names.
    pub async fn fsck(
        &self,
        policy: &str,
        keys: &TrustedKeys,
        retention: &Retention,
        deep: bool,
    ) -> Result<Report, Error> {
        // What is published from now on is not looked at: its objects may not be listed. First the assignments, because
        // the versions that they name are older.
        let newest_epoch = self.list_numbers(policy, "assignment").await?.into_iter().max();
        let newest_version = self.list_numbers(policy, "version").await?.into_iter().max();
        let mut catalog = self.catalog(policy, keys).await?;
        catalog.assignments.retain(|&epoch, _| Some(epoch) <= newest_epoch);
        catalog.versions.retain(|&serial, _| Some(serial) <= newest_version);
        catalog.squashed_deltas.retain(|&(to, _), _| Some(to) <= newest_version);
        catalog.pins.retain(|&serial, _| Some(serial) <= newest_version);
        let heads = catalog.heads().into_iter();
        let mut report = Report {
            versions: catalog.versions.len(),
            squashed_deltas: catalog.squashed_deltas.len(),
            assignments: catalog.assignments.len(),
            objects: catalog.objects.len(),
            object_bytes: catalog.objects.values().map(|stored| stored.size_bytes).sum(),
            heads: heads.map(|(line, head)| (line.to_owned(), head)).collect(),
            ..Report::default()
        };
        let mut damaged = BTreeSet::new();
        let named = if deep { named_objects(&catalog) } else { BTreeMap::new() };
        for (object, name) in named.into_iter().filter(|(object, _)| catalog.has(object)) {
            report.objects_read += 1;
            // `check_parts` reports a list that is missing.
            if !catalog.lacks_parts(&object) {
                match self.get_parts(policy, &object).await {
                    Ok(_) | Err(Error::NotFound(_)) => {}
                    Err(error @ Error::Corrupt { .. }) => {
                        let message = format!("{error}: delete it, and `springtide policy gc` makes it again");
                        report.error("parts", name.clone(), message);
                    }
                    Err(error) => return Err(error),
                }
            }
            match self.check_object(policy, &object).await {
                Ok(()) => {}
                Err(error @ (Error::Corrupt { .. } | Error::NotFound(_))) => {
                    damaged.insert(object.digest);
                    report.error("digest", name, error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        check_manifests(&mut report, &catalog);
        check_quantized(&mut report, &catalog);
        check_squashed_deltas(&mut report, &catalog);
        check_parts(&mut report, &catalog, retention);
        check_paths(&mut report, &catalog, retention, &damaged);
        check_assignments(&mut report, &catalog);
        check_pins(&mut report, &catalog);
        check_leftovers(&mut report, &catalog, retention);
        report
            .findings
            .sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(report)
    }
}

/// Every object that a verified document names, with a description.
fn named_objects(catalog: &Catalog) -> BTreeMap<ObjectRef, String> {
    let mut named = BTreeMap::new();
    for manifest in catalog.manifests() {
        let version = manifest.version;
        let checkpoint = manifest.checkpoint.into_iter();
        named.extend(checkpoint.map(|object| (object, format!("checkpoint of version {version}"))));
        let deltas = manifest.delta_objects();
        named.extend(deltas.map(|object| (object, format!("delta of version {version}"))));
    }
    for squashed in catalog.squashed_deltas.values().flatten() {
        let name = format!("squashed delta {} → {}", squashed.from.version, squashed.to.version);
        named.entry(squashed.delta).or_insert(name);
    }
    named
}

fn check_manifests(report: &mut Report, catalog: &Catalog) {
    for (serial, manifest) in &catalog.versions {
        let at = format!("version {serial}");
        let manifest = match manifest {
            Ok(manifest) => manifest,
            Err(reason) => {
                report.error("manifest", at, reason);
                continue;
            }
        };
        let mut check = |named: Parent, name: &str, relation: &str| match catalog.versions.get(&named.version) {
            None => {
                let message = format!("the manifest of its {name} {} is not there", named.version);
                report.warning("manifest", at.clone(), message);
                None
            }
            Some(Ok(known)) if known.root != named.root => {
                let message = format!(
                    "it {relation} content hash {} of version {}, whose content hash is {}",
                    named.root, named.version, known.root
                );
                report.error("root", at.clone(), message);
                None
            }
            Some(known) => known.as_ref().ok(),
        };
        if let Some(base) = manifest.adapts {
            check(base, "base", "adapts");
        }
        let parent = manifest
            .parent
            .and_then(|parent| check(parent, "parent", "was made from"));
        if let Some(parent) = parent {
            check_fence(report, parent, manifest);
        }
    }
}

/// Within a run, fences never decrease. A lower one belongs to an executor that had been replaced.
fn check_fence(report: &mut Report, parent: &Manifest, manifest: &Manifest) {
    let (Some(before), Some(after)) = (parent.run, manifest.run) else {
        return;
    };
    if before.run == after.run && manifest.fence < parent.fence {
        let message = format!(
            "executor {} of run {} published it after executor {} published its parent: a replaced executor continued",
            manifest.fence, after.run, parent.fence
        );
        report.error("fence", format!("version {}", manifest.version), message);
    }
}

/// Reports quantized copies that this program cannot make and therefore cannot check.
fn check_quantized(report: &mut Report, catalog: &Catalog) {
    let mut unknown: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for manifest in catalog.manifests() {
        for copy in &manifest.quantized {
            if copy.spec.parse::<Spec>().is_err() {
                unknown.entry(&copy.spec).or_default().push(manifest.version);
            }
        }
    }
    for (spec, versions) in unknown {
        let newest = versions.last().copied().unwrap_or_default();
        let message = format!(
            "{} versions up to version {newest} name such a copy, which this program cannot make",
            versions.len()
        );
        report.note("quantised", format!("copies by {spec}"), message);
    }
}

fn check_squashed_deltas(report: &mut Report, catalog: &Catalog) {
    let usable: BTreeSet<_> = catalog
        .usable_squashed_deltas()
        .map(|squashed| (squashed.to.version, squashed.from.version))
        .collect();
    for ((to, from), squashed) in &catalog.squashed_deltas {
        let at = format!("squashed delta {from} → {to}");
        match squashed {
            Err(reason) => report.warning("fold", at, reason),
            Ok(_) if !usable.contains(&(*to, *from)) => {
                let message = "its content hashes are not those of its versions' manifests; readers ignore it";
                report.warning("fold", at, message);
            }
            Ok(squashed) if !catalog.has(&squashed.delta) => {
                report.warning("fold", at, "its object is not there; readers ignore it");
            }
            Ok(_) => {}
        }
    }
}

/// Without its list of parts, a large object reaches no replica through a relay.
fn check_parts(report: &mut Report, catalog: &Catalog, retention: &Retention) {
    let live = live_versions(catalog, retention);
    for manifest in catalog.manifests().filter(|manifest| live.contains(&manifest.version)) {
        let objects = manifest.checkpoint.into_iter().chain(manifest.delta_objects());
        for object in objects.filter(|object| catalog.has(object) && catalog.lacks_parts(object)) {
            let message = format!(
                "the list of parts of its object {} is not there, and relays answer 404: `springtide policy gc` makes it again",
                object.digest
            );
            report.error("parts", format!("version {}", manifest.version), message);
        }
    }
}

fn check_paths(report: &mut Report, catalog: &Catalog, retention: &Retention, damaged: &BTreeSet<Digest>) {
    let live = live_versions(catalog, retention);
    let costs = catalog.costs(damaged);
    // The oldest checkpoint never had a spare.
    let oldest = catalog.manifests().find_map(|manifest| manifest.checkpoint);
    let oldest = oldest.map(|checkpoint| checkpoint.digest);
    // The costs without a checkpoint.
    let mut costs_without = BTreeMap::new();
    let mut lost = vec![];
    for manifest in catalog.manifests() {
        let serial = manifest.version;
        let at = format!("version {serial}");
        let needed = live.contains(&serial);
        if costs.of(serial).is_none() {
            match needed {
                true => report.error(
                    "no-path",
                    at,
                    "it is needed and cannot be put together: no checkpoint with intact deltas leads to it; \
                     publish a checkpoint of it again",
                ),
                false => lost.push(serial),
            }
            continue;
        }
        if !needed {
            continue;
        }
        let checkpoint = manifest.checkpoint.into_iter().map(|object| (object, "checkpoint"));
        let deltas = manifest.delta_objects().map(|object| (object, "delta"));
        for (object, kind) in checkpoint.chain(deltas).filter(|(object, _)| !catalog.has(object)) {
            let message = format!(
                "its {kind} {} is not there, or has another size; another path leads to it",
                object.digest
            );
            report.warning("object", at.clone(), message);
        }
        let Some(checkpoint) = costs.objects(serial).last().map(|object| object.digest) else {
            continue;
        };
        let without = costs_without.entry(checkpoint).or_insert_with(|| {
            let mut avoided = damaged.clone();
            avoided.insert(checkpoint);
            catalog.costs(&avoided)
        });
        if Some(checkpoint) != oldest && without.of(serial).is_none() {
            let message = format!("all paths to it start at one checkpoint, {}", checkpoint.short());
            report.note("spare", at, message);
        }
    }
    for serial in live.iter().filter(|serial| !catalog.versions.contains_key(serial)) {
        let message = "it is needed, and its manifest is not there";
        report.error("manifest", format!("version {serial}"), message);
    }
    if let (Some(first), Some(last)) = (lost.first(), lost.last()) {
        let message = format!(
            "{} of them are not needed and cannot be restored any longer",
            lost.len()
        );
        report.note("gone", format!("versions {first}–{last}"), message);
    }
}

fn check_assignments(report: &mut Report, catalog: &Catalog) {
    let revoked = &catalog.revoked_assignments;
    let newest = catalog.assignments.keys().rfind(|epoch| !revoked.contains_key(*epoch));
    for (epoch, assignment) in &catalog.assignments {
        let at = format!("assignment {epoch}");
        let in_force = Some(epoch) == newest;
        let assignment = match assignment {
            Ok(assignment) => assignment,
            Err(_) if revoked.contains_key(epoch) => {
                report.note("assignment", at, "only a revoked key signed it, so nobody follows it");
                continue;
            }
            Err(reason) => {
                let severity = if in_force { Severity::Error } else { Severity::Warning };
                report.add(severity, "assignment", at, reason);
                continue;
            }
        };
        for (alias, target) in &assignment.aliases {
            let version = target.version;
            let message = match catalog.manifest(version) {
                Some(manifest) if manifest.root == target.root => continue,
                Some(manifest) => format!(
                    "{alias} names content hash {} of version {version}, whose content hash is {}",
                    target.root, manifest.root
                ),
                None if in_force => format!("{alias} names version {version}, which has no manifest"),
                None => continue,
            };
            report.error("assignment", at.clone(), message);
        }
    }
}

fn check_pins(report: &mut Report, catalog: &Catalog) {
    for (serial, pin) in &catalog.pins {
        let at = format!("pin {serial}");
        if catalog.manifest(*serial).is_none() {
            report.warning("pin", at, "it keeps a version that has no manifest");
        } else if pin.is_none() {
            report.note(
                "pin",
                at,
                "its reason cannot be read; it keeps its version all the same",
            );
        }
    }
}

fn check_leftovers(report: &mut Report, catalog: &Catalog, retention: &Retention) {
    let oldest_young = OffsetDateTime::now_utc() - retention.grace;
    let named: BTreeSet<Digest> = named_objects(catalog).into_keys().map(|object| object.digest).collect();
    let unnamed = catalog
        .objects
        .iter()
        .filter(|(digest, stored)| stored.modified_at < oldest_young && !named.contains(digest));
    let (count, bytes) = unnamed.fold((0, 0u64), |(n, bytes), (_, stored)| (n + 1, bytes + stored.size_bytes));
    if count > 0 {
        let message = format!("no document names {count} of them ({bytes} bytes): `springtide policy gc` deletes them");
        report.warning("orphans", "objects", message);
    }
    if !catalog.trash.is_empty() {
        let message = format!(
            "an interrupted garbage collection left {} objects: `springtide policy gc` restores those that are \
             needed and deletes the rest",
            catalog.trash.len()
        );
        report.warning("trash", "trash", message);
    }
    for name in &catalog.foreign {
        report.warning("name", name, "it is not the name of an object");
    }
}
