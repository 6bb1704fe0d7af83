//! `publish` and `pull`: how a team that trains elsewhere gets its weights into the store, and a team that serves elsewhere
//! gets them out.
//!
//! A pulled folder appears whole: it is written beside its place and takes it when it is complete. `.springtide.json` in it
//! says which version it is; the next pull into the same folder fetches what has changed since.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use policy::digest::Digest;
use policy::folder;
use policy::image::Image;
use policy::manifest::Manifest;
use policy::quant::{self, Spec};
use policy::store::Materialised;
use serde::{Deserialize, Serialize};
use serde_json::json;
use trainer::publish::{External, publish_external};

use super::{At, keep, print_json, quantised, share, size};
use crate::config::Config;

/// What a pulled folder says of itself.
const MARKER: &str = ".springtide.json";

#[derive(Debug, Clone, clap::Args)]
pub struct Publish {
    /// Hugging Face folder: safetensors, whole or in shards with their index.
    folder: PathBuf,
    /// Line to publish on; it begins with this version if it is not there. No run may be writing it.
    #[arg(long)]
    line: String,
    /// Serial or alias of the version that the weights were trained from: the line's head.
    #[arg(long, value_name = "VERSION")]
    parent: String,
    /// Write the whole image beside the delta, even if none is due.
    #[arg(long, conflicts_with = "shares")]
    image: bool,
    /// The name under which `springtide policy share` put the shares of the delta: no weights are read then.
    #[arg(long, value_name = "NAME", requires_all = ["of", "base"])]
    shares: Option<String>,
    /// How many shares there are.
    #[arg(long, value_name = "COUNT", requires = "shares", value_parser = clap::value_parser!(u32).range(1..))]
    of: Option<u32>,
    /// With shares, the parent's folder, as `springtide policy pull` wrote it.
    #[arg(long, value_name = "DIR", requires = "shares")]
    base: Option<PathBuf>,
    #[command(flatten)]
    at: At,
    /// For programs.
    #[arg(long)]
    json: bool,
}

impl Publish {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let started = Instant::now();
        let publisher = keep::publisher(config, &self.at).await?;
        let parent = self.at.open(config).await?.serial(&self.parent).await?;
        if let Some(((name, of), base)) = self.shares.zip(self.of).zip(self.base) {
            let at = share::Publication {
                name,
                of: of as usize,
                line: self.line,
                parent,
                base,
                folder: self.folder,
            };
            return share::publish(&publisher, at, self.json).await;
        }
        let folder = self.folder.clone();
        let image = tokio::task::spawn_blocking(move || Image::read_dir(&folder))
            .await?
            .with_context(|| format!("read the weights in {}", self.folder.display()))?;
        let read_seconds = started.elapsed().as_secs_f64();
        let external = External {
            line: self.line,
            parent,
            image,
            whole: self.image,
        };
        let done = publish_external(&publisher, external).await.context("publish")?;
        let manifest = &done.manifest;
        let (changed, total) = (done.stats.changed_weights, done.stats.total_weights);
        let seconds = json!({
            "read": read_seconds,
            "parent": done.parent_seconds,
            "encode": done.timings.encode,
            "upload": done.timings.upload,
            "commit": done.timings.commit,
        });
        if self.json {
            return print_json(&json!({
                "version": manifest.version,
                "root": manifest.root,
                "line": manifest.line,
                "branch": manifest.branch,
                "parent": parent,
                "delta_bytes": manifest.delta_bytes(),
                "image_bytes": manifest.image.map(|image| image.size_bytes),
                "tensor_bytes": manifest.tensor_bytes,
                "changed_weights": changed,
                "total_weights": total,
                "inherited": done.inherited,
                "seconds": seconds,
            }));
        }
        println!("version {} is the head of line {}", manifest.version, manifest.line);
        println!("root     {}", manifest.root);
        println!(
            "weights  {changed} of {total} differ from version {parent} ({:.3}%)",
            100.0 * changed as f64 / total.max(1) as f64
        );
        if let Some(delta) = manifest.delta_bytes() {
            println!(
                "delta    {}, 1/{:.0} of {}",
                size::bytes(delta),
                manifest.tensor_bytes as f64 / delta.max(1) as f64,
                size::bytes(manifest.tensor_bytes)
            );
        }
        match manifest.image {
            Some(image) => println!("image    {}", size::bytes(image.size_bytes)),
            None => println!("image    none was due"),
        }
        if !done.inherited.is_empty() {
            println!("files    {} as in version {parent}", done.inherited.join(", "));
        }
        println!(
            "seconds  read {:.2}, parent {:.2}, encode {:.2}, upload {:.2}, commit {:.3}",
            read_seconds, done.parent_seconds, done.timings.encode, done.timings.upload, done.timings.commit
        );
        println!(
            "serve    springtide release promote --alias champion --version {} --reason '…'",
            manifest.version
        );
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Pull {
    /// Serial, or an alias such as `champion`.
    version: String,
    /// Folder to make, or one that was pulled before: then only what has changed is fetched.
    folder: PathBuf,
    /// A folder pulled before, elsewhere, to start from.
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// The quantised copy that the manifest names by this spec, fp8-e4m3-b128.1 or int4-sym-g32.1, made from the version here. Of
    /// such a folder nothing can be fetched on; --base can name one that was pulled without.
    #[arg(long, value_name = "SPEC")]
    quantised: Option<Spec>,
    /// Cut the weights into shards of at most so many bytes.
    #[arg(long, value_name = "BYTES", default_value_t = folder::SHARD_BYTES_MAX, value_parser = clap::value_parser!(u64).range(1..))]
    shard_bytes: u64,
    #[command(flatten)]
    at: At,
    /// For programs.
    #[arg(long)]
    json: bool,
}

/// [`MARKER`]'s content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Pulled {
    policy: String,
    version: i64,
    /// Of what is in the folder.
    root: Digest,
    /// The spec, where that is a quantised copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quantised: Option<String>,
}

impl Pull {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        let folder = &self.folder;
        recover(folder)?;
        refuse_others(folder)?;
        let (store, policy) = (&place.store, &place.policy);
        let manifest = store
            .get_manifest(policy, version, &place.keys)
            .await
            .with_context(|| format!("read the manifest of version {version}"))?;
        let wanted = match self.quantised {
            None => manifest.root,
            Some(spec) => quant::named(&manifest, spec)?,
        };
        let Bases { held, mut copy } = self.bases(policy).await?;
        if let (Some((known, image)), Some(spec)) = (&copy, self.quantised)
            && known.root == wanted
            && quantised::root(image.clone()).await? == wanted
        {
            match self.json {
                true => print_json(&self.report(&manifest, wanted, None))?,
                false => println!("version {version}, quantised by {spec}, is in {}", folder.display()),
            }
            return Ok(());
        }
        // the roots of what is held are checked when it is used
        let made = store
            .materialise(policy, version, &place.keys, &held)
            .await
            .with_context(|| format!("put version {version} together"))?;
        let there = made.bytes_fetched == 0 && marker(folder)?.is_some_and(|known| known.root == wanted);
        if !there {
            let image = match self.quantised {
                None => made.image.clone(),
                Some(spec) => {
                    let copy = copy
                        .take()
                        .filter(|(known, _)| known.quantised.as_deref() == Some(spec.name()));
                    let from = copy.and_then(|(known, copy)| {
                        let of = held.iter().find(|(version, _)| *version == known.version)?;
                        Some((copy, of.1.clone()))
                    });
                    Arc::new(quantised::copy(&manifest, made.image.clone(), spec, from).await?)
                }
            };
            drop(held);
            let pulled = Pulled {
                policy: policy.clone(),
                version,
                root: wanted,
                quantised: self.quantised.map(|spec| spec.name().into()),
            };
            let (folder, shard_bytes) = (folder.clone(), self.shard_bytes);
            tokio::task::spawn_blocking(move || write(&image, &folder, shard_bytes, &pulled)).await??;
        }
        if self.json {
            return print_json(&self.report(&manifest, wanted, Some(&made)));
        }
        println!(
            "version {version} is in {}: root {}, {} fetched, from version {} over {} deltas",
            folder.display(),
            wanted,
            size::bytes(made.bytes_fetched),
            made.path.first().copied().unwrap_or(version),
            made.path.len().saturating_sub(1)
        );
        Ok(())
    }

    /// What the folders that there are hold.
    async fn bases(&self, policy: &str) -> anyhow::Result<Bases> {
        let mut bases = Bases::default();
        for base in [Some(&self.folder), self.base.as_ref()].into_iter().flatten() {
            let given = self.base.as_ref() == Some(base);
            let Some(known) = marker(base)?.filter(|known| known.policy == policy) else {
                ensure!(
                    !given,
                    "{} was not pulled from {policy}: it has no {MARKER} that says which version it is",
                    base.display()
                );
                continue;
            };
            ensure!(
                !given || known.quantised.is_none(),
                "{} is a quantised copy, which no delta goes on from: name a folder that was pulled without --quantised",
                base.display()
            );
            let path = base.clone();
            let read = tokio::task::spawn_blocking(move || Image::read_dir(&path)).await?;
            match (read, &known.quantised) {
                (Ok(image), None) => bases.held.push((known.version, Arc::new(image))),
                (Ok(image), Some(_)) => bases.copy = Some((known, Arc::new(image))),
                (Err(error), _) => eprintln!("{} is of no use as a base: {error}", base.display()),
            }
        }
        Ok(bases)
    }

    /// For programs. `made`: none where nothing had to be put together.
    fn report(&self, manifest: &Manifest, root: Digest, made: Option<&Materialised>) -> serde_json::Value {
        let seconds = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64();
        json!({
            "version": manifest.version,
            "root": manifest.root,
            "quantised": self.quantised.map(|spec| json!({"spec": spec, "root": root})),
            "path": made.map_or(&[][..], |made| &made.path),
            "fetched_bytes": made.map_or(0, |made| made.bytes_fetched),
            "seconds": {"fetch": seconds(made.map(|made| made.fetch)), "verify": seconds(made.map(|made| made.verify))},
        })
    }
}

/// What was pulled before.
#[derive(Default)]
struct Bases {
    /// Versions, to go on from.
    held: Vec<(i64, Arc<Image>)>,
    /// A quantised copy in the folder itself.
    copy: Option<(Pulled, Arc<Image>)>,
}

fn beside(folder: &Path, suffix: &str) -> anyhow::Result<PathBuf> {
    let name = folder
        .file_name()
        .with_context(|| format!("{} names no folder", folder.display()))?;
    Ok(folder.with_file_name(format!("{}.{suffix}", name.to_string_lossy())))
}

/// A pull that was cut off between its two last moves left the folder under its other name.
fn recover(folder: &Path) -> anyhow::Result<()> {
    let old = beside(folder, "old")?;
    if !folder.exists() && old.exists() {
        fs::rename(&old, folder).with_context(|| format!("put {} back", folder.display()))?;
    }
    Ok(())
}

/// A folder is replaced as a whole, so there may be nothing in it that a pull did not write.
fn refuse_others(folder: &Path) -> anyhow::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("read {}", folder.display()))?,
    };
    let mut others = vec![];
    for entry in entries {
        let name = entry
            .context("read the folder")?
            .file_name()
            .to_string_lossy()
            .into_owned();
        if name != MARKER && !folder::is_read(&name) {
            others.push(name);
        }
    }
    ensure!(
        others.is_empty(),
        "{} has {} in it, which no pull wrote and a pull would delete: name an empty folder, or one that was pulled",
        folder.display(),
        others.join(", ")
    );
    ensure!(
        marker(folder)?.is_some() || fs::read_dir(folder)?.next().is_none(),
        "{} has a model in it that was not pulled: name an empty folder, or one that was pulled",
        folder.display()
    );
    Ok(())
}

fn marker(folder: &Path) -> anyhow::Result<Option<Pulled>> {
    let path = folder.join(MARKER);
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .with_context(|| format!("read {}: delete the folder and pull again", path.display()))
            .map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

/// Writes the folder beside its place, then lets it take it.
fn write(image: &Image, folder: &Path, shard_bytes: u64, pulled: &Pulled) -> anyhow::Result<()> {
    let (fresh, old) = (beside(folder, "partial")?, beside(folder, "old")?);
    for left in [&fresh, &old] {
        match fs::remove_dir_all(left) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("clear {}", left.display()));
            }
            _ => {}
        }
    }
    image
        .write_shards(&fresh, shard_bytes)
        .with_context(|| format!("write the model to {}", fresh.display()))?;
    let text = serde_json::to_vec_pretty(pulled).context("write the marker")?;
    fs::write(fresh.join(MARKER), text).with_context(|| format!("write {}", fresh.join(MARKER).display()))?;
    let take = || -> std::io::Result<()> {
        if folder.exists() {
            fs::rename(folder, &old)?;
        }
        fs::rename(&fresh, folder)
    };
    take().with_context(|| format!("put the new {} in its place", folder.display()))?;
    if old.exists() {
        fs::remove_dir_all(&old).with_context(|| format!("delete {}", old.display()))?;
    }
    Ok(())
}
