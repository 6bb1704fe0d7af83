//! `versions`, `inspect`, `verify`: what is in the store. They change nothing.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use artifact::manifest::{Manifest, ObjectRef};
use control::times::rfc3339;
use serde_json::{Value, json};
use store::{Catalog, Costs, Step, VersionPath};
use time::macros::format_description;

use super::trained;
use super::{StoreArgs, quantized};
use crate::cli::output::{Output, bytes, cell, rows, table};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Versions {
    #[command(flatten)]
    at: StoreArgs,
    /// Only of this line.
    #[arg(long)]
    line: Option<String>,
    /// Number of newest versions to show; 0 shows all.
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    limit: usize,
    #[command(flatten)]
    output: Output,
}

impl Versions {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let catalog = place.store.catalog(&place.policy, &place.keys).await?;
        let costs = catalog.costs(&BTreeSet::new());
        let on_line = |manifest: &&Manifest| self.line.as_ref().is_none_or(|line| *line == manifest.line);
        let manifests = catalog.manifests().filter(on_line);
        let mut rows: Vec<Value> = manifests.map(|manifest| row(&catalog, &costs, manifest)).collect();
        let count = rows.len();
        if self.limit > 0 {
            rows.drain(..count.saturating_sub(self.limit));
        }
        rows.reverse();
        self.output.print(&rows, || {
            let header = [
                ">version",
                "line",
                ">branch",
                ">parent",
                "content hash",
                ">checkpoint",
                ">delta",
                ">to read",
                "made",
                "used by",
            ];
            let mut page = table(header, rows.iter().map(cells));
            if rows.len() < count {
                page += &format!("{} older ones: --limit 0 shows all\n", count - rows.len());
            }
            for (serial, manifest) in &catalog.versions {
                if let Err(reason) = manifest {
                    page += &format!("version {serial} is not trusted: {reason}\n");
                }
            }
            page
        })
    }
}

fn row(catalog: &Catalog, costs: &Costs, manifest: &Manifest) -> Value {
    let stored = |object: ObjectRef| catalog.has(&object).then_some(object.size_bytes);
    let aliases = catalog.aliases_of(manifest.version);
    let arms = catalog.assignment().map(|assignment| assignment.arms.as_slice());
    let arms = arms.unwrap_or_default().iter();
    let total: f64 = arms.clone().map(|arm| arm.weight).sum();
    let share: f64 = arms
        .filter(|arm| aliases.contains(&arm.alias.as_str()))
        .map(|arm| arm.weight)
        .sum();
    let has_delta = manifest.delta_objects().all(|object| catalog.has(&object));
    json!({
        "version": manifest.version,
        "line": manifest.line,
        "branch": manifest.branch,
        "parent": manifest.parent.map(|parent| parent.version),
        "root": manifest.root,
        // Bytes of stored objects; null: none was written, or it was deleted.
        "image_bytes": manifest.checkpoint.and_then(stored),
        "delta_bytes": manifest.delta_bytes().filter(|_| has_delta),
        // Bytes that a replica which has nothing must read; null: the version cannot be rebuilt.
        "path_bytes": costs.of(manifest.version),
        "created_at": rfc3339(manifest.created_at),
        "aliases": aliases,
        // Share of the users that the aliases serve.
        "share": if total > 0.0 { share / total } else { 0.0 },
        "pinned": catalog.pins.contains_key(&manifest.version),
    })
}

fn cells(row: &Value) -> [String; 10] {
    let text = |field: &str| cell(&row[field]);
    let size = |field: &str| row[field].as_u64().map_or("–".to_owned(), bytes);
    let mut used: Vec<String> = rows(&row["aliases"]).map(cell).collect();
    let share = row["share"].as_f64().unwrap_or_default();
    if let (Some(last), true) = (used.last_mut(), share > 0.0) {
        *last += &format!(" ({:.0}% of users)", share * 100.0);
    }
    if row["pinned"] == true {
        used.push("kept".to_owned());
    }
    if row["path_bytes"].is_null() {
        let needed = !used.is_empty();
        used.push(
            if needed {
                "GONE: see `springtide policy fsck`"
            } else {
                "gone"
            }
            .to_owned(),
        );
    }
    let parent = if row["parent"].is_null() {
        "–".to_owned()
    } else {
        text("parent")
    };
    [
        text("version"),
        text("line"),
        text("branch"),
        parent,
        text("root").chars().take(12).collect(),
        size("image_bytes"),
        size("delta_bytes"),
        size("path_bytes"),
        text("created_at")
            .chars()
            .take(16)
            .collect::<String>()
            .replace('T', " "),
        used.join(", "),
    ]
}

#[derive(Debug, Clone, clap::Args)]
pub struct Inspect {
    /// Number of the version, or an alias such as champion.
    version: String,
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    output: Output,
}

impl Inspect {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let serial = place.serial(&self.version).await?;
        let signers = place.store.signers(&place.policy, serial).await?;
        let catalog = place.store.catalog(&place.policy, &place.keys).await?;
        let manifest = match catalog.versions.get(&serial) {
            Some(Ok(manifest)) => manifest,
            Some(Err(reason)) => bail!("version {serial} is not trusted: {reason}; it is signed by {signers:?}"),
            None => bail!("the store has no version {serial}: `springtide policy versions` lists those there are"),
        };
        let path = place.store.path(&place.policy, serial, &place.keys).await.ok();
        let trained = trained::trained_on(config, manifest.run).await;
        let trusted = |signer: &String| place.keys.contains(signer);
        let signed_by = signers.iter().map(|key| json!({"key": key, "trusted": trusted(key)}));
        let object = |object: ObjectRef| {
            let stored = catalog.objects.get(&object.digest);
            json!({
                "digest": object.digest,
                "size_bytes": object.size_bytes,
                "there": catalog.has(&object),
                "written_at": stored.map(|stored| rfc3339(stored.modified_at)),
            })
        };
        let squashed: Vec<_> = catalog
            .squashed_deltas
            .values()
            .flatten()
            .filter(|squashed| squashed.to.version == serial || squashed.from.version == serial)
            .map(|squashed| {
                json!({
                    "from": squashed.from.version, "to": squashed.to.version, "steps": squashed.steps,
                    "size_bytes": squashed.delta.size_bytes, "there": catalog.has(&squashed.delta),
                })
            })
            .collect();
        let steps = |path: &VersionPath| {
            let step =
                |step: &Step| json!({"from": step.from, "to": step.to, "fold": step.squashed, "bytes": step.bytes});
            path.steps.iter().map(step).collect::<Vec<_>>()
        };
        let children = catalog
            .manifests()
            .filter(|child| child.parent.is_some_and(|parent| parent.version == serial))
            .map(|child| child.version);
        let facts = json!({
            "manifest": manifest,
            "signed_by": signed_by.collect::<Vec<_>>(),
            "image": manifest.checkpoint.map(object),
            "delta": manifest.delta.map(object),
            "delta_shards": manifest.delta_shards.iter().map(|shard| object(shard.object)).collect::<Vec<_>>(),
            "children": children.collect::<Vec<_>>(),
            "folds": squashed,
            "aliases": catalog.aliases_of(serial),
            "pin": catalog.pins.get(&serial),
            "path": path.map(|path| json!({"start": path.start, "bytes": path.bytes, "steps": steps(&path)})),
            "trained_on": trained.as_ref().and_then(|made| made.as_ref().ok()),
            // Why `trained_on` is null although a step made the version.
            "trained_on_unknown": trained.as_ref().and_then(|made| made.as_ref().err()),
        });
        self.output
            .print(&facts, || text(manifest, &facts, trained::lines(&trained)))
    }
}

/// The same for people.
fn text(manifest: &Manifest, facts: &Value, trained: Vec<(&'static str, String)>) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second] UTC");
    let size = |value: &Value| bytes(value.as_u64().unwrap_or_default());
    let list = |value: &Value| rows(value).map(cell).collect::<Vec<_>>().join(", ");
    let object = |object: &Value| match object["there"].as_bool() {
        None => "none was written".to_owned(),
        Some(there) => format!(
            "{} ({}){}",
            cell(&object["digest"]),
            size(&object["size_bytes"]),
            if there { "" } else { ": MISSING" }
        ),
    };
    let mut lines = vec![
        ("version", format!("{} of {}", manifest.version, manifest.policy)),
        ("hash", manifest.root.to_string()),
        ("line", format!("{}, branch {}", manifest.line, manifest.branch)),
        ("made", manifest.created_at.format(format).unwrap_or_default()),
    ];
    let parent = manifest.parent.map_or("none: it was imported".to_owned(), |parent| {
        format!("{}, content hash {}", parent.version, parent.root)
    });
    lines.push(("parent", parent));
    if let Some(base) = manifest.adapts {
        lines.push(("adapts", format!("{}, content hash {}", base.version, base.root)));
    }
    let run = manifest.run.map_or("an external trainer, no run".to_owned(), |run| {
        format!("step {} of run {}, executor {}", run.step, run.run, manifest.fence)
    });
    lines.push(("made by", run));
    lines.extend(trained);
    lines.push(("tensors", bytes(manifest.tensor_bytes)));
    lines.push(("checkpoint", object(&facts["image"])));
    lines.push(("delta", object(&facts["delta"])));
    for (index, shard) in rows(&facts["delta_shards"]).enumerate() {
        let of = manifest.delta_shards.len();
        lines.push(("shard", format!("{} of {of}: {}", index + 1, object(shard))));
    }
    for copy in &manifest.quantized {
        lines.push(("quantized", format!("{}, content hash {}", copy.spec, copy.root)));
    }
    let reference = manifest.reference.as_ref().map(|reference| {
        let answers = reference.answers.iter().map(|answer| answer.logprobs.len());
        format!("{} log-probabilities", answers.sum::<usize>())
    });
    lines.push((
        "reference",
        reference.unwrap_or("none: engines cannot be proved".into()),
    ));
    for signer in rows(&facts["signed_by"]) {
        let trust = if signer["trusted"] == true { "" } else { ": NOT TRUSTED" };
        lines.push(("signed by", cell(&signer["key"]) + trust));
    }
    for squashed in rows(&facts["folds"]) {
        let (from, to, steps) = (&squashed["from"], &squashed["to"], &squashed["steps"]);
        let size = size(&squashed["size_bytes"]);
        lines.push(("squashed", format!("{from} → {to} over {steps} steps, {size}")));
    }
    lines.push(("children", list(&facts["children"])));
    lines.push(("used by", list(&facts["aliases"])));
    if let Some(reason) = facts["pin"]["reason"].as_str() {
        lines.push(("kept", reason.to_owned()));
    }
    let path = &facts["path"];
    lines.push(match path["start"].as_i64() {
        Some(start) => {
            let (size, deltas) = (size(&path["bytes"]), rows(&path["steps"]).count());
            (
                "to read",
                format!("{size}: the checkpoint of version {start}, then {deltas} deltas"),
            )
        }
        None => (
            "to read",
            "IT CANNOT BE REBUILT: see `springtide policy fsck`".to_owned(),
        ),
    });
    lines
        .iter()
        .map(|(name, value)| format!("{name:<10} {value}\n"))
        .collect()
}

#[derive(Debug, Clone, clap::Args)]
pub struct Verify {
    /// Number of the version, or an alias such as champion.
    version: String,
    #[command(flatten)]
    at: StoreArgs,
    /// Also read and hash every object that any path to the version could use.
    #[arg(long)]
    deep: bool,
    /// Also make every quantized copy that its manifest names, and compare the content hashes.
    #[arg(long)]
    quantized: bool,
    #[command(flatten)]
    output: Output,
}

impl Verify {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let serial = place.serial(&self.version).await?;
        let (policy, keys) = (&place.policy, &place.keys);
        let rebuilt = place
            .store
            .materialize_model(policy, serial, keys, &[])
            .await
            .with_context(|| format!("rebuild version {serial}"))?;
        let manifest = place.manifest(serial).await?;
        let mut text = format!(
            "version {serial} is whole: content hash {}, rebuilt from version {} over {} deltas ({}), \
             every digest checked\n",
            manifest.root,
            rebuilt.path.first().copied().unwrap_or(serial),
            rebuilt.path.len().saturating_sub(1),
            bytes(rebuilt.bytes_fetched)
        );
        let mut copies = Vec::new();
        if self.quantized && manifest.quantized.is_empty() {
            text += "its manifest names no quantized copies\n";
        }
        for named in manifest.quantized.iter().filter(|_| self.quantized) {
            // A spec of a newer program is unknown here.
            let spec = named.spec.parse().ok();
            match spec {
                Some(spec) => {
                    quantized::copy(&manifest, rebuilt.checkpoint.clone(), spec).await?;
                    text += &format!(
                        "its copy by {spec} has the content hash {} of the manifest\n",
                        named.root
                    );
                }
                None => text += &format!("its copy by {} was NOT checked: the spec is unknown here\n", named.spec),
            }
            copies.push(json!({"spec": named.spec, "root": named.root, "checked": spec.is_some()}));
        }
        let mut objects = None;
        if self.deep {
            let (read, missing) = self.read_all(&place, serial).await?;
            text += &format!("{read} objects of its history were read; {missing} are no longer stored\n");
            objects = Some(json!({"read": read, "missing": missing}));
        }
        let document = json!({
            "version": serial,
            "root": manifest.root,
            "path": rebuilt.path,
            "fetched_bytes": rebuilt.bytes_fetched,
            "quantised": copies,
            "objects": objects,
        });
        self.output.print(&document, || text)
    }

    /// Reads every object of the version's history. Returns how many were read and how many are
    /// missing.
    async fn read_all(&self, place: &super::OpenStore, serial: i64) -> anyhow::Result<(usize, usize)> {
        let (store, policy, keys) = (&place.store, &place.policy, &place.keys);
        let mut objects: BTreeMap<ObjectRef, String> = BTreeMap::new();
        let squashed = store.list_squashed_deltas(policy).await?;
        for manifest in store.ancestry(policy, serial, usize::MAX, keys).await? {
            let version = manifest.version;
            objects.extend(
                manifest
                    .checkpoint
                    .map(|object| (object, format!("checkpoint of version {version}"))),
            );
            let deltas = manifest.delta_objects();
            objects.extend(deltas.map(|delta| (delta, format!("delta of version {version}"))));
            for from in squashed.get(&version).into_iter().flatten() {
                if let Ok(squashed) = store.get_squashed_delta(policy, *from, version, keys).await {
                    objects.insert(squashed.delta, format!("squashed delta {from} → {version}"));
                }
            }
        }
        let (mut missing, mut broken) = (0, vec![]);
        for (object, name) in &objects {
            match store.check_object(policy, object).await {
                Ok(()) => {}
                Err(store::Error::NotFound(_)) => missing += 1,
                Err(error @ store::Error::Corrupt { .. }) => broken.push(format!("{name}: {error}")),
                Err(error) => return Err(error.into()),
            }
        }
        match broken.is_empty() {
            true => Ok((objects.len() - missing, missing)),
            false => bail!("damaged: {}", broken.join("; ")),
        }
    }
}
