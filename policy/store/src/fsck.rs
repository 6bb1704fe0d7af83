//! Is the store whole? Looks at everything in it and says what is wrong, without changing anything. Bytes are read only where
//! that is asked for.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::catalog::Catalog;
use super::gc::{Keep, live};
use super::{Error, Store};
use artifact::digest::Digest;
use artifact::manifest::{Manifest, ObjectRef};
use artifact::quant::Spec;
use artifact::sign::TrustedKeys;
use time::OffsetDateTime;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be, and good to know.
    Note,
    /// Nobody is hurt, something takes room or has lost a spare.
    Warning,
    /// A version that is needed cannot be put together, or something is not what it says.
    Error,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// What kind, for programs: `manifest`, `root`, `no-path`, `spare`, `object`, `digest`, `fold`, `assignment`, `pin`,
    /// `fence`, `quantised`, `orphans`, `trash`, `gone`, `name`.
    pub kind: &'static str,
    /// Where: a version, a fold, an epoch, an object.
    pub at: String,
    pub message: String,
}

/// What an inspection of the whole store says.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    pub versions: usize,
    pub folds: usize,
    pub assignments: usize,
    pub objects: usize,
    pub object_bytes: u64,
    /// Newest version of each line.
    pub heads: BTreeMap<String, i64>,
    /// Objects whose bytes were read.
    pub objects_read: usize,
    /// The worst first.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Nothing that is needed is broken.
    pub fn is_whole(&self) -> bool {
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
}

impl Store {
    /// Looks at everything. `keep` says which versions count as needed, as for a collection; `deep` reads and hashes every
    /// object that a document names.
    pub async fn fsck(&self, policy: &str, keys: &TrustedKeys, keep: &Keep, deep: bool) -> Result<Report, Error> {
        let catalog = self.catalog(policy, keys).await?;
        let mut report = Report {
            versions: catalog.versions.len(),
            folds: catalog.folds.len(),
            assignments: catalog.assignments.len(),
            objects: catalog.objects.len(),
            object_bytes: catalog.objects.values().map(|stored| stored.size_bytes).sum(),
            heads: catalog
                .heads()
                .into_iter()
                .map(|(line, head)| (line.to_owned(), head))
                .collect(),
            ..Report::default()
        };
        let mut damaged = BTreeSet::new();
        if deep {
            for (object, whose) in named(&catalog) {
                if !catalog.has(&object) {
                    continue;
                }
                report.objects_read += 1;
                match self.check_object(policy, &object).await {
                    Ok(()) => {}
                    Err(error @ (Error::Corrupt { .. } | Error::NotFound(_))) => {
                        damaged.insert(object.digest);
                        report.add(Severity::Error, "digest", whose, error.to_string());
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        manifests(&mut report, &catalog);
        copies(&mut report, &catalog);
        folds(&mut report, &catalog);
        paths(&mut report, &catalog, keep, &damaged);
        assignments(&mut report, &catalog);
        leftovers(&mut report, &catalog, keep);
        report
            .findings
            .sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(report)
    }
}

/// Every object that a sound document names, with whose it is.
fn named(catalog: &Catalog) -> BTreeMap<ObjectRef, String> {
    let mut named = BTreeMap::new();
    for manifest in catalog.manifests() {
        let serial = manifest.version;
        named.extend(
            manifest
                .image
                .map(|image| (image, format!("image of version {serial}"))),
        );
        let delta = |object| (object, format!("delta of version {serial}"));
        named.extend(manifest.delta_objects().map(delta));
    }
    for fold in catalog.folds.values().flatten() {
        let whose = format!("fold {} → {}", fold.from.version, fold.to.version);
        named.entry(fold.delta).or_insert(whose);
    }
    named
}

fn manifests(report: &mut Report, catalog: &Catalog) {
    for (serial, manifest) in &catalog.versions {
        let at = format!("version {serial}");
        let manifest = match manifest {
            Ok(manifest) => manifest,
            Err(reason) => {
                report.add(Severity::Error, "manifest", at, reason);
                continue;
            }
        };
        let Some(parent) = manifest.parent else { continue };
        match catalog.versions.get(&parent.version) {
            None => report.add(
                Severity::Warning,
                "manifest",
                at,
                format!("the manifest of its parent {} is not there", parent.version),
            ),
            Some(Ok(known)) if known.root != parent.root => report.add(
                Severity::Error,
                "root",
                at,
                format!(
                    "it was made from {} of version {}, whose root is {}",
                    parent.root, parent.version, known.root
                ),
            ),
            Some(Ok(known)) => fence(report, known, manifest),
            Some(Err(_)) => {}
        }
    }
}

/// Within a run an executor's number never falls: a lower one is an executor that had been replaced.
fn fence(report: &mut Report, parent: &Manifest, manifest: &Manifest) {
    let (Some(before), Some(after)) = (parent.run, manifest.run) else {
        return;
    };
    if before.run == after.run && manifest.fence < parent.fence {
        report.add(
            Severity::Error,
            "fence",
            format!("version {}", manifest.version),
            format!(
                "executor {} of run {} made it after executor {} had made its parent: a replaced executor went on",
                manifest.fence, after.run, parent.fence
            ),
        );
    }
}

/// Quantised copies that cannot be made here, so that nobody takes them for checked.
fn copies(report: &mut Report, catalog: &Catalog) {
    let mut unknown: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for manifest in catalog.manifests() {
        for named in &manifest.quantised {
            if named.spec.parse::<Spec>().is_err() {
                unknown.entry(&named.spec).or_default().push(manifest.version);
            }
        }
    }
    for (spec, versions) in unknown {
        let newest = versions.last().copied().unwrap_or_default();
        report.add(
            Severity::Note,
            "quantised",
            format!("copies by {spec}"),
            format!(
                "{} versions name one, version {newest} is the newest of them: this program does not know how to make it",
                versions.len()
            ),
        );
    }
}

fn folds(report: &mut Report, catalog: &Catalog) {
    let sound: BTreeSet<_> = catalog
        .sound_folds()
        .map(|fold| (fold.to.version, fold.from.version))
        .collect();
    for ((to, from), fold) in &catalog.folds {
        let at = format!("fold {from} → {to}");
        match fold {
            Err(reason) => report.add(Severity::Warning, "fold", at, reason),
            Ok(_) if !sound.contains(&(*to, *from)) => report.add(
                Severity::Warning,
                "fold",
                at,
                "it does not join the roots that its versions' manifests have; nobody takes it",
            ),
            Ok(fold) if !catalog.has(&fold.delta) => {
                report.add(
                    Severity::Warning,
                    "fold",
                    at,
                    "its object is not there; nobody takes it",
                );
            }
            Ok(_) => {}
        }
    }
}

fn paths(report: &mut Report, catalog: &Catalog, keep: &Keep, damaged: &BTreeSet<Digest>) {
    let live = live(catalog, keep, OffsetDateTime::now_utc() - keep.grace);
    let costs = catalog.costs(damaged);
    // below it there never was another
    let first = catalog.manifests().find_map(|manifest| manifest.image);
    let first = first.map(|image| image.digest);
    // by the image that the cheapest way starts at: what is left without it
    let mut without = BTreeMap::new();
    let mut gone = vec![];
    for manifest in catalog.manifests() {
        let serial = manifest.version;
        let at = format!("version {serial}");
        let needed = live.contains(&serial);
        if costs.of(serial).is_none() {
            match needed {
                true => report.add(
                    Severity::Error,
                    "no-path",
                    at,
                    "it is needed and cannot be put together: no image with unbroken deltas leads to it; publish an image of it again",
                ),
                false => gone.push(serial),
            }
            continue;
        }
        let image = manifest.image.map(|image| (image, "image"));
        let objects = image
            .into_iter()
            .chain(manifest.delta_objects().map(|object| (object, "delta")));
        for (object, what) in objects {
            if needed && !catalog.has(&object) {
                let message = format!(
                    "its {what} {} is not there, or has another size; another way leads to it",
                    object.digest
                );
                report.add(Severity::Warning, "object", at.clone(), message);
            }
        }
        let Some(image) = costs
            .objects(serial)
            .last()
            .map(|image| image.digest)
            .filter(|_| needed)
        else {
            continue;
        };
        let spare = without.entry(image).or_insert_with(|| {
            let mut avoided = damaged.clone();
            avoided.insert(image);
            catalog.costs(&avoided)
        });
        if Some(image) != first && spare.of(serial).is_none() {
            let message = format!("every way to it starts at one image, {}", image.short());
            report.add(Severity::Note, "spare", at, message);
        }
    }
    for serial in live.iter().filter(|serial| !catalog.versions.contains_key(serial)) {
        let message = "it is needed, and its manifest is not there";
        report.add(Severity::Error, "manifest", format!("version {serial}"), message);
    }
    if let (Some(first), Some(last)) = (gone.first(), gone.last()) {
        report.add(
            Severity::Note,
            "gone",
            format!("versions {first}–{last}"),
            format!(
                "{} of them are not needed and cannot be put together any longer",
                gone.len()
            ),
        );
    }
}

fn assignments(report: &mut Report, catalog: &Catalog) {
    let newest = catalog.assignments.keys().next_back();
    for (epoch, assignment) in &catalog.assignments {
        let at = format!("assignment {epoch}");
        let in_force = Some(epoch) == newest;
        let assignment = match assignment {
            Ok(assignment) => assignment,
            Err(reason) => {
                let severity = if in_force { Severity::Error } else { Severity::Warning };
                report.add(severity, "assignment", at, reason);
                continue;
            }
        };
        for (alias, target) in &assignment.aliases {
            match catalog.manifest(target.version) {
                Some(manifest) if manifest.root == target.root => {}
                Some(manifest) => {
                    let message = format!(
                        "{alias} names root {} of version {}, whose root is {}",
                        target.root, target.version, manifest.root
                    );
                    report.add(Severity::Error, "assignment", at.clone(), message);
                }
                None if in_force => {
                    let message = format!("{alias} names version {}, which has no manifest", target.version);
                    report.add(Severity::Error, "assignment", at.clone(), message);
                }
                None => {}
            }
        }
    }
    for (serial, pin) in &catalog.pins {
        let at = format!("pin {serial}");
        if catalog.manifest(*serial).is_none() {
            report.add(Severity::Warning, "pin", at, "it keeps a version that has no manifest");
        } else if pin.is_none() {
            report.add(
                Severity::Note,
                "pin",
                at,
                "its reason cannot be read; it keeps its version all the same",
            );
        }
    }
}

fn leftovers(report: &mut Report, catalog: &Catalog, keep: &Keep) {
    let young = OffsetDateTime::now_utc() - keep.grace;
    let named: BTreeSet<Digest> = named(catalog).into_keys().map(|object| object.digest).collect();
    let orphans = catalog
        .objects
        .iter()
        .filter(|(digest, stored)| stored.modified_at < young && !named.contains(digest));
    let (count, bytes) = orphans.fold((0, 0u64), |(n, bytes), (_, stored)| (n + 1, bytes + stored.size_bytes));
    if count > 0 {
        report.add(
            Severity::Warning,
            "orphans",
            "objects",
            format!("no document names {count} of them ({bytes} bytes): `springtide policy gc` frees the room"),
        );
    }
    if !catalog.trash.is_empty() {
        report.add(
            Severity::Warning,
            "trash",
            "trash",
            format!(
                "{} objects were left by a collection that was cut off: `springtide policy gc` puts back what is needed and deletes the rest",
                catalog.trash.len()
            ),
        );
    }
    for name in &catalog.foreign {
        report.add(Severity::Warning, "name", name, "it is not the name of an object");
    }
}
