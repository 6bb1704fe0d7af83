//! `versions`, `inspect`, `verify`: what there is. They change nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{Context, bail};
use policy::manifest::{Manifest, ObjectRef};
use policy::store::{Catalog, Costs};
use serde::Serialize;
use serde_json::json;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

use super::{At, print_json, quantised, size};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Versions {
    #[command(flatten)]
    at: At,
    /// Only of this line.
    #[arg(long)]
    line: Option<String>,
    /// How many of the newest; 0: all.
    #[arg(long, default_value_t = 50)]
    limit: usize,
    /// For programs.
    #[arg(long)]
    json: bool,
}

/// A row of the table.
#[derive(Debug, Serialize)]
struct Row {
    version: i64,
    line: String,
    branch: i32,
    parent: Option<i64>,
    root: String,
    /// Bytes of the objects that are there; null: none was written, or it is gone.
    image_bytes: Option<u64>,
    delta_bytes: Option<u64>,
    /// Bytes that somebody who has nothing reads; null: it cannot be put together.
    path_bytes: Option<u64>,
    created_at: String,
    aliases: Vec<String>,
    /// Share of the users of those aliases that are arms.
    share: f64,
    pinned: bool,
}

impl Versions {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let catalog = place.store.catalog(&place.policy, &place.keys).await?;
        let costs = catalog.costs(&BTreeSet::new());
        let wanted = catalog
            .manifests()
            .filter(|manifest| self.line.as_ref().is_none_or(|line| *line == manifest.line));
        let mut rows: Vec<Row> = wanted.map(|manifest| row(&catalog, &costs, manifest)).collect();
        let all = rows.len();
        if self.limit > 0 {
            rows.drain(..all.saturating_sub(self.limit));
        }
        rows.reverse();
        if self.json {
            return print_json(&rows);
        }
        print!("{}", table(&rows));
        if rows.len() < all {
            println!("{} older ones: --limit 0 shows all", all - rows.len());
        }
        for (serial, manifest) in &catalog.versions {
            if let Err(reason) = manifest {
                println!("version {serial} cannot be believed: {reason}");
            }
        }
        Ok(())
    }
}

fn row(catalog: &Catalog, costs: &Costs, manifest: &Manifest) -> Row {
    let there = |object: Option<ObjectRef>| {
        object
            .filter(|object| catalog.has(object))
            .map(|object| object.size_bytes)
    };
    let aliases = catalog.aliases_of(manifest.version);
    let arms = catalog
        .assignment()
        .map(|assignment| assignment.arms.as_slice())
        .unwrap_or_default();
    let total: f64 = arms.iter().map(|arm| arm.weight).sum();
    let share: f64 = arms
        .iter()
        .filter(|arm| aliases.contains(&arm.alias.as_str()))
        .map(|arm| arm.weight)
        .sum();
    Row {
        version: manifest.version,
        line: manifest.line.clone(),
        branch: manifest.branch,
        parent: manifest.parent.map(|parent| parent.version),
        root: manifest.root.to_string(),
        image_bytes: there(manifest.image),
        delta_bytes: match manifest.delta_objects().all(|object| catalog.has(&object)) {
            true => manifest.delta_bytes(),
            false => None,
        },
        path_bytes: costs.of(manifest.version),
        created_at: manifest.created_at.format(&Rfc3339).unwrap_or_default(),
        share: if total > 0.0 { share / total } else { 0.0 },
        aliases: aliases.into_iter().map(str::to_owned).collect(),
        pinned: catalog.pins.contains_key(&manifest.version),
    }
}

fn table(rows: &[Row]) -> String {
    let mut page = format!(
        "{:>8}  {:<14} {:>6} {:>8}  {:<12} {:>8} {:>8} {:>8}  {:<16}  {}\n",
        "version", "line", "branch", "parent", "root", "image", "delta", "to read", "made", "named by"
    );
    for row in rows {
        let bytes = |count: Option<u64>| count.map_or("–".to_owned(), size::bytes);
        let mut named = row.aliases.join(", ");
        if row.share > 0.0 {
            let _ = write!(named, " ({:.0}% of users)", row.share * 100.0);
        }
        if row.pinned {
            named.push_str(if named.is_empty() { "pinned" } else { ", pinned" });
        }
        if row.path_bytes.is_none() {
            named.push_str(if named.is_empty() {
                "gone"
            } else {
                ", GONE: springtide policy fsck"
            });
        }
        let _ = writeln!(
            page,
            "{:>8}  {:<14} {:>6} {:>8}  {:<12} {:>8} {:>8} {:>8}  {:<16}  {named}",
            row.version,
            row.line,
            row.branch,
            row.parent.map_or("–".to_owned(), |parent| parent.to_string()),
            &row.root[..row.root.len().min(12)],
            bytes(row.image_bytes),
            bytes(row.delta_bytes),
            bytes(row.path_bytes),
            row.created_at.get(..16).unwrap_or_default().replace('T', " "),
        );
    }
    page
}

#[derive(Debug, Clone, clap::Args)]
pub struct Inspect {
    /// Serial, or an alias.
    version: String,
    #[command(flatten)]
    at: At,
    /// For programs.
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let serial = place.serial(&self.version).await?;
        let signers = place.store.signers(&place.policy, serial).await?;
        let catalog = place.store.catalog(&place.policy, &place.keys).await?;
        let manifest = match catalog.versions.get(&serial) {
            Some(Ok(manifest)) => manifest,
            Some(Err(reason)) => bail!("version {serial} cannot be believed: {reason}; it is signed by {signers:?}"),
            None => bail!("the store has no version {serial}: `springtide policy versions` lists those there are"),
        };
        let object = |object: Option<ObjectRef>| {
            object.map(|object| {
                let stored = catalog.objects.get(&object.digest);
                json!({
                    "digest": object.digest,
                    "size_bytes": object.size_bytes,
                    "there": catalog.has(&object),
                    "written_at": stored.and_then(|stored| stored.modified_at.format(&Rfc3339).ok()),
                })
            })
        };
        let fold = |fold: &policy::fold::Fold| {
            json!({
                "from": fold.from.version, "to": fold.to.version, "steps": fold.steps,
                "size_bytes": fold.delta.size_bytes, "there": catalog.has(&fold.delta),
            })
        };
        let children = catalog
            .manifests()
            .filter(|child| child.parent.is_some_and(|parent| parent.version == serial))
            .map(|child| child.version);
        let path = place.store.path(&place.policy, serial, &place.keys).await.ok();
        let known = json!({
            "manifest": manifest,
            "signed_by": signers.iter().map(|signer| json!({
                "key": signer, "trusted": place.keys.contains(signer)
            })).collect::<Vec<_>>(),
            "image": object(manifest.image),
            "delta": object(manifest.delta),
            "delta_shards": manifest.delta_shards.iter().map(|shard| object(Some(shard.object))).collect::<Vec<_>>(),
            "children": children.collect::<Vec<_>>(),
            "folds": catalog.folds.values().flatten()
                .filter(|fold| fold.to.version == serial || fold.from.version == serial)
                .map(fold).collect::<Vec<_>>(),
            "aliases": catalog.aliases_of(serial),
            "pin": catalog.pins.get(&serial),
            "path": path.map(|path| json!({
                "start": path.start, "bytes": path.bytes,
                "steps": path.steps.iter().map(|step| json!({
                    "from": step.from, "to": step.to, "fold": step.fold, "bytes": step.bytes
                })).collect::<Vec<_>>(),
            })),
        });
        if self.json {
            return print_json(&known);
        }
        print!("{}", told(manifest, &known));
        Ok(())
    }
}

/// The same for people.
fn told(manifest: &Manifest, known: &serde_json::Value) -> String {
    let mut page = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(page, "{name:<10} {value}");
    };
    let made = manifest
        .created_at
        .format(format_description!("[year]-[month]-[day] [hour]:[minute]:[second] UTC"));
    line("version", format!("{} of {}", manifest.version, manifest.policy));
    line("root", manifest.root.to_string());
    line("line", format!("{}, branch {}", manifest.line, manifest.branch));
    line("made", made.unwrap_or_default());
    match manifest.parent {
        Some(parent) => line("parent", format!("{}, root {}", parent.version, parent.root)),
        None => line("parent", "none: it was imported".into()),
    }
    match manifest.run {
        Some(run) => line(
            "made by",
            format!("step {} of run {}, executor {}", run.step, run.run, manifest.fence),
        ),
        None => line("made by", "somebody outside, no run".into()),
    }
    line("tensors", size::bytes(manifest.tensor_bytes));
    for name in ["image", "delta"] {
        let object = &known[name];
        let text = match object["there"].as_bool() {
            None => "none was written".to_owned(),
            Some(there) => format!(
                "{} ({}){}",
                object["digest"].as_str().unwrap_or_default(),
                size::bytes(object["size_bytes"].as_u64().unwrap_or_default()),
                if there { "" } else { ": NOT THERE" }
            ),
        };
        line(name, text);
    }
    for (n, shard) in known["delta_shards"].as_array().into_iter().flatten().enumerate() {
        let text = format!(
            "{} of {}: {} ({}){}",
            n + 1,
            manifest.delta_shards.len(),
            shard["digest"].as_str().unwrap_or_default(),
            size::bytes(shard["size_bytes"].as_u64().unwrap_or_default()),
            if shard["there"] == true { "" } else { ": NOT THERE" }
        );
        line("shard", text);
    }
    for copy in &manifest.quantised {
        line("copy", format!("by {}, root {}", copy.spec, copy.root));
    }
    for signer in known["signed_by"].as_array().into_iter().flatten() {
        let trusted = signer["trusted"].as_bool().unwrap_or_default();
        let key = signer["key"].as_str().unwrap_or_default();
        line(
            "signed by",
            format!("{key}{}", if trusted { "" } else { ": NOT TRUSTED" }),
        );
    }
    for fold in known["folds"].as_array().into_iter().flatten() {
        let bytes = size::bytes(fold["size_bytes"].as_u64().unwrap_or_default());
        line(
            "fold",
            format!(
                "{} → {} over {} steps, {bytes}",
                fold["from"], fold["to"], fold["steps"]
            ),
        );
    }
    let list = |value: &serde_json::Value| {
        let items = value.as_array().into_iter().flatten();
        items
            .map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned))
            .collect::<Vec<_>>()
            .join(", ")
    };
    line("children", list(&known["children"]));
    line("named by", list(&known["aliases"]));
    if let Some(pin) = known["pin"].as_object() {
        line(
            "pinned",
            pin.get("reason")
                .and_then(|reason| reason.as_str())
                .unwrap_or_default()
                .into(),
        );
    }
    match known["path"].as_object() {
        Some(_) => {
            let path = &known["path"];
            let steps = path["steps"].as_array().map_or(0, Vec::len);
            let bytes = size::bytes(path["bytes"].as_u64().unwrap_or_default());
            line(
                "to read",
                format!("{bytes}: the image of version {}, then {steps} deltas", path["start"]),
            );
        }
        None => line("to read", "NO WAY LEADS TO IT: see `springtide policy fsck`".into()),
    }
    page
}

#[derive(Debug, Clone, clap::Args)]
pub struct Verify {
    /// Serial, or an alias.
    version: String,
    #[command(flatten)]
    at: At,
    /// Also read and hash every object that any way to the version could use.
    #[arg(long)]
    deep: bool,
    /// Also make every quantised copy that its manifest names, and compare the roots.
    #[arg(long)]
    quantised: bool,
}

impl Verify {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let serial = place.serial(&self.version).await?;
        let (policy, keys) = (&place.policy, &place.keys);
        let made = place
            .store
            .materialise(policy, serial, keys, &[])
            .await
            .with_context(|| format!("put version {serial} together"))?;
        let manifest = place.store.get_manifest(policy, serial, keys).await?;
        println!(
            "version {serial} is whole: root {}, put together from version {} over {} deltas ({}), every digest checked",
            manifest.root,
            made.path.first().copied().unwrap_or(serial),
            made.path.len().saturating_sub(1),
            size::bytes(made.bytes_fetched)
        );
        if self.quantised {
            quantised::check(&manifest, &made.image).await?;
        }
        if !self.deep {
            return Ok(());
        }
        let mut objects: BTreeMap<ObjectRef, String> = BTreeMap::new();
        let folds = place.store.fold_names(policy).await?;
        for manifest in place.store.ancestry(policy, serial, usize::MAX, keys).await? {
            let whose = |what: &str| format!("{what} of version {}", manifest.version);
            objects.extend(manifest.image.map(|image| (image, whose("image"))));
            objects.extend(manifest.delta_objects().map(|delta| (delta, whose("delta"))));
            for from in folds.get(&manifest.version).into_iter().flatten() {
                if let Ok(fold) = place.store.get_fold(policy, *from, manifest.version, keys).await {
                    objects.insert(fold.delta, format!("fold {from} → {}", manifest.version));
                }
            }
        }
        let (mut gone, mut broken) = (0, vec![]);
        for (object, whose) in &objects {
            match place.store.check_object(policy, object).await {
                Ok(()) => {}
                Err(policy::store::Error::NotFound(_)) => gone += 1,
                Err(error @ policy::store::Error::Corrupt { .. }) => broken.push(format!("{whose}: {error}")),
                Err(error) => return Err(error.into()),
            }
        }
        println!(
            "{} objects behind it were read, {gone} are not there any longer",
            objects.len() - gone
        );
        match broken.is_empty() {
            true => Ok(()),
            false => bail!("damaged: {}", broken.join("; ")),
        }
    }
}
