//! `pull`: a version as a Hugging Face folder, for engines elsewhere.
//!
//! A pulled folder appears whole: it is written beside its place and moved there when it is
//! complete. Its `.springtide.json` names the version; the next pull into the same folder fetches
//! only what has changed since.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::folder::{self, Marker};
use artifact::manifest::Manifest;
use artifact::quant::{self, Spec};
use serde_json::{Value, json};
use store::Materialized;

use super::{StoreArgs, quantized};
use crate::cli::output::{Output, bytes};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Pull {
    /// Number of the version, or an alias such as champion.
    version: String,
    /// Folder to create, or one that was pulled before; then only what has changed is fetched.
    folder: PathBuf,
    /// Another folder that was pulled before, to start from.
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Write the manifest's quantized copy of this spec (fp8-e4m3-b128.1, int4-sym-g32.1, nvfp4-e4m3-g16.1), made
    /// on this machine.
    ///
    /// Deltas do not apply to such a folder. For later pulls, name one without --quantized as
    /// --base.
    #[arg(long, value_name = "SPEC")]
    quantized: Option<Spec>,
    /// Largest size of a shard of the weights, bytes.
    #[arg(long, value_name = "BYTES", default_value_t = folder::SHARD_BYTES_MAX, value_parser = clap::value_parser!(u64).range(1..))]
    shard_bytes: u64,
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    output: Output,
}

impl Pull {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        let folder = &self.folder;
        restore_interrupted(folder)?;
        refuse_other_files(folder)?;
        let policy = &place.policy;
        let manifest = place.manifest(version).await?;
        ensure!(
            manifest.adapts.is_none(),
            "version {version} is an adapter: `springtide policy export {version}` writes it merged into its base, and \
             with --adapter as PEFT's folder"
        );
        let wanted = match self.quantized {
            None => manifest.root,
            Some(spec) => quant::named(&manifest, spec)?,
        };
        let Bases { versions, copy } = self.bases(policy).await?;
        if let (Some((marker, checkpoint)), Some(spec)) = (&copy, self.quantized)
            && marker.root == wanted
            && quantized::root(checkpoint.clone()).await? == wanted
        {
            return self.output.print(&self.document(&manifest, wanted, None), || {
                format!("version {version}, quantized by {spec}, is in {}", folder.display())
            });
        }
        // This checks the content hashes of the bases that it uses.
        let rebuilt = place
            .store
            .materialize(policy, version, &place.keys, &versions)
            .await
            .with_context(|| format!("rebuild version {version}"))?;
        let unchanged = rebuilt.bytes_fetched == 0 && marker(folder)?.is_some_and(|marker| marker.root == wanted);
        if !unchanged {
            let checkpoint = match self.quantized {
                None => rebuilt.checkpoint.clone(),
                Some(spec) => Arc::new(quantized::copy(&manifest, rebuilt.checkpoint.clone(), spec).await?),
            };
            drop(versions);
            let marker = Marker {
                policy: policy.clone(),
                version,
                root: wanted,
                quantized: self.quantized.map(|spec| spec.name().into()),
            };
            let (folder, shard_bytes) = (folder.clone(), self.shard_bytes);
            tokio::task::spawn_blocking(move || write(&checkpoint, &folder, shard_bytes, &marker)).await??;
        }
        self.output
            .print(&self.document(&manifest, wanted, Some(&rebuilt)), || {
                format!(
                    "version {version} is in {}: content hash {wanted}, {} fetched, from version {} over {} deltas",
                    folder.display(),
                    bytes(rebuilt.bytes_fetched),
                    rebuilt.path.first().copied().unwrap_or(version),
                    rebuilt.path.len().saturating_sub(1)
                )
            })
    }

    /// Reads the folders that were pulled before.
    async fn bases(&self, policy: &str) -> anyhow::Result<Bases> {
        let mut bases = Bases::default();
        for base in [Some(&self.folder), self.base.as_ref()].into_iter().flatten() {
            let given = self.base.as_ref() == Some(base);
            let Some(marker) = marker(base)?.filter(|marker| marker.policy == policy) else {
                ensure!(
                    !given,
                    "{} was not pulled from {policy}: it has no {} that names its version",
                    base.display(),
                    Marker::FILE
                );
                continue;
            };
            ensure!(
                !given || marker.quantized.is_none(),
                "{} is a quantized copy, and deltas do not apply to those: name a folder pulled without --quantized",
                base.display()
            );
            let path = base.clone();
            let read = tokio::task::spawn_blocking(move || Checkpoint::read_dir(&path)).await?;
            match (read, &marker.quantized) {
                (Ok(checkpoint), None) => bases.versions.push((marker.version, Arc::new(checkpoint))),
                (Ok(checkpoint), Some(_)) => bases.copy = Some((marker, Arc::new(checkpoint))),
                (Err(error), _) => eprintln!("{} cannot be used as a base: {error}", base.display()),
            }
        }
        Ok(bases)
    }

    /// `rebuilt`: none where the folder already had everything.
    fn document(&self, manifest: &Manifest, root: Digest, rebuilt: Option<&Materialized>) -> Value {
        let seconds = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64();
        let (fetch, verify) = (
            rebuilt.map(|rebuilt| rebuilt.fetch),
            rebuilt.map(|rebuilt| rebuilt.verify),
        );
        json!({
            "version": manifest.version,
            "root": manifest.root,
            "quantised": self.quantized.map(|spec| json!({"spec": spec, "root": root})),
            "path": rebuilt.map_or(&[][..], |rebuilt| &rebuilt.path),
            "fetched_bytes": rebuilt.map_or(0, |rebuilt| rebuilt.bytes_fetched),
            "seconds": {"fetch": seconds(fetch), "verify": seconds(verify)},
        })
    }
}

/// What folders that were pulled before hold.
#[derive(Default)]
struct Bases {
    /// Versions that deltas can apply to.
    versions: Vec<(i64, Arc<Checkpoint>)>,
    /// A quantized copy in the folder itself.
    copy: Option<(Marker, Arc<Checkpoint>)>,
}

fn beside(folder: &Path, suffix: &str) -> anyhow::Result<PathBuf> {
    let name = folder
        .file_name()
        .with_context(|| format!("{} is not the name of a folder", folder.display()))?;
    Ok(folder.with_file_name(format!("{}.{suffix}", name.to_string_lossy())))
}

/// Moves the old folder back where a pull was interrupted between its last two moves.
fn restore_interrupted(folder: &Path) -> anyhow::Result<()> {
    let previous = beside(folder, "old")?;
    if !folder.exists() && previous.exists() {
        fs::rename(&previous, folder).with_context(|| format!("restore {}", folder.display()))?;
    }
    Ok(())
}

/// A pull replaces the whole folder, so it refuses folders with files that no pull wrote.
fn refuse_other_files(folder: &Path) -> anyhow::Result<()> {
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
        if name != Marker::FILE && !folder::is_read(&name) {
            others.push(name);
        }
    }
    ensure!(
        others.is_empty(),
        "{} contains {}, which a pull would delete: name an empty folder, or one that was pulled before",
        folder.display(),
        others.join(", ")
    );
    ensure!(
        marker(folder)?.is_some() || fs::read_dir(folder)?.next().is_none(),
        "{} contains a model that was not pulled: name an empty folder, or one that was pulled before",
        folder.display()
    );
    Ok(())
}

fn marker(folder: &Path) -> anyhow::Result<Option<Marker>> {
    let path = folder.join(Marker::FILE);
    Marker::read(folder).with_context(|| format!("read {}: delete the folder and pull again", path.display()))
}

/// Writes the folder beside its place, then moves it there.
fn write(checkpoint: &Checkpoint, folder: &Path, shard_bytes: u64, marker: &Marker) -> anyhow::Result<()> {
    let (fresh, old) = (beside(folder, "partial")?, beside(folder, "old")?);
    clear(&old, &fresh)?;
    checkpoint
        .write_shards(&fresh, shard_bytes)
        .with_context(|| format!("write the model to {}", fresh.display()))?;
    marker
        .write(&fresh)
        .with_context(|| format!("write {}", fresh.join(Marker::FILE).display()))?;
    let replace = || -> std::io::Result<()> {
        if folder.exists() {
            fs::rename(folder, &old)?;
        }
        fs::rename(&fresh, folder)
    };
    replace().with_context(|| format!("move the new folder to {}", folder.display()))?;
    clear(&old, &fresh)
}

/// Deletes both folders. `old` first gets the name of `fresh`, which nothing restores: what a kill leaves of it is no
/// model.
fn clear(old: &Path, fresh: &Path) -> anyhow::Result<()> {
    let absent_or = |done: std::io::Result<()>| match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done.with_context(|| format!("clear {} and {}", fresh.display(), old.display())),
    };
    absent_or(fs::remove_dir_all(fresh))?;
    absent_or(fs::rename(old, fresh))?;
    absent_or(fs::remove_dir_all(fresh))
}
