//! `publish`: weights that another trainer wrote become a version.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use artifact::adapter;
use artifact::checkpoint::Checkpoint;
use artifact::manifest::Manifest;
use artifact::reference::Reference;
use model::lora::Adapter;
use runs::publish::{External, Publisher, QuantizedCopies, ShardedVersion, Weights, publish_external, publish_shards};
use serde_json::{Value, json};

use super::shard::{check_name, open_folder};
use super::{OpenStore, StoreArgs};
use crate::cli::output::{Output, bytes};
use crate::config::Config;
use crate::database;

#[derive(Debug, Clone, clap::Args)]
pub struct Publish {
    /// Hugging Face folder: safetensors, whole or in shards with their index. Or PEFT's folder of an adapter of the
    /// parent, or of what the parent adapts.
    folder: PathBuf,
    /// Line to publish on, created if it does not exist. No run may be writing it.
    #[arg(long)]
    line: String,
    /// Number or alias of the version that the weights were trained from: the head of the line.
    #[arg(long, value_name = "VERSION")]
    parent: String,
    /// Write a full checkpoint beside the delta even if none is due.
    #[arg(long, conflicts_with = "shards")]
    checkpoint: bool,
    /// Use the delta shards that `springtide policy shard` uploaded under this name. No weights are
    /// read.
    #[arg(long, value_name = "NAME", requires_all = ["of", "base"])]
    shards: Option<String>,
    /// Number of shards.
    #[arg(long, value_name = "COUNT", requires = "shards", value_parser = clap::value_parser!(u32).range(1..))]
    of: Option<u32>,
    /// With --shards: the parent's folder, as `springtide policy pull` wrote it.
    #[arg(long, value_name = "DIR", requires = "shards")]
    base: Option<PathBuf>,
    /// JSON file of the reference log-probabilities that engines are compared with, as the wheel's
    /// `springtide.reference` makes them. Computed here if our model knows the architecture.
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    #[command(flatten)]
    at: StoreArgs,
    #[command(flatten)]
    output: Output,
}

impl Publish {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let started = Instant::now();
        let place = self.at.open(config).await?;
        let parent = place.serial(&self.parent).await?;
        let publisher = publisher(config, place).await?;
        if let Some(((name, of), base)) = self.shards.zip(self.of).zip(self.base) {
            check_name(&name)?;
            let folder = self.folder;
            let files = tokio::task::spawn_blocking(move || {
                anyhow::Ok((open_folder(&base)?.files, open_folder(&folder)?.files))
            });
            let (base, files) = files.await??;
            let version = ShardedVersion {
                name,
                of: of as usize,
                line: self.line,
                parent,
                base,
                files,
                reference: self.reference.as_deref().map(read_reference).transpose()?,
            };
            let (manifest, timings) = publish_shards(&publisher, version).await.context("publish")?;
            let mut document = document(&manifest, parent);
            document["delta_shards"] = json!(manifest.delta_shards);
            document["seconds"] = json!({ "upload": timings.upload, "commit": timings.commit });
            return self
                .output
                .print(&document, || text(&manifest) + &checkpoint_line(&manifest));
        }
        let folder = self.folder.clone();
        let weights = tokio::task::spawn_blocking(move || match folder.join(adapter::CONFIG).exists() {
            true => anyhow::Ok(Weights::Adapter(Adapter::read_dir(&folder)?)),
            false => Ok(Weights::All(Checkpoint::read_dir(&folder)?)),
        });
        let weights = weights
            .await?
            .with_context(|| format!("read the weights in {}", self.folder.display()))?;
        let read_seconds = started.elapsed().as_secs_f64();
        let external = External {
            line: self.line,
            parent,
            weights,
            with_checkpoint: self.checkpoint,
            reference: self.reference.as_deref().map(read_reference).transpose()?,
        };
        let done = publish_external(&publisher, external).await.context("publish")?;
        let manifest = &done.manifest;
        let (changed, total) = (done.stats.changed_weights, done.stats.total_weights);
        let mut document = document(manifest, parent);
        document["image_bytes"] = json!(manifest.checkpoint.map(|checkpoint| checkpoint.size_bytes));
        document["changed_weights"] = json!(changed);
        document["total_weights"] = json!(total);
        document["inherited"] = json!(done.inherited);
        document["seconds"] = json!({
            "read": read_seconds,
            "parent": done.parent_seconds,
            "encode": done.timings.encode,
            "upload": done.timings.upload,
            "commit": done.timings.commit,
        });
        self.output.print(&document, || {
            let mut text = text(manifest);
            let percent = 100.0 * changed as f64 / total.max(1) as f64;
            text += &format!("weights    {changed} of {total} differ from version {parent} ({percent:.3}%)\n");
            text += &checkpoint_line(manifest);
            if !done.inherited.is_empty() {
                text += &format!("files      {} as in version {parent}\n", done.inherited.join(", "));
            }
            text += &format!(
                "seconds    read {:.2}, parent {:.2}, encode {:.2}, upload {:.2}, commit {:.3}\n",
                read_seconds, done.parent_seconds, done.timings.encode, done.timings.upload, done.timings.commit
            );
            text + &format!(
                "serve it   springtide release promote {} --reason '…'",
                manifest.version
            )
        })
    }
}

fn checkpoint_line(manifest: &Manifest) -> String {
    match manifest.checkpoint {
        Some(checkpoint) => format!("checkpoint {}\n", bytes(checkpoint.size_bytes)),
        None => "checkpoint none was due\n".to_owned(),
    }
}

fn read_reference(file: &Path) -> anyhow::Result<Reference> {
    let read = || format!("read the reference log-probabilities in {}", file.display());
    let bytes = std::fs::read(file).with_context(read)?;
    serde_json::from_slice(&bytes).with_context(read)
}

fn document(manifest: &Manifest, parent: i64) -> Value {
    json!({
        "version": manifest.version,
        "root": manifest.root,
        "line": manifest.line,
        "branch": manifest.branch,
        "parent": parent,
        "delta_bytes": manifest.delta_bytes(),
        "tensor_bytes": manifest.tensor_bytes,
    })
}

fn text(manifest: &Manifest) -> String {
    let mut text = format!("version {} is the head of line {}\n", manifest.version, manifest.line);
    text += &format!("hash       {}\n", manifest.root);
    if let Some(delta) = manifest.delta_bytes() {
        let shards = match manifest.delta_shards.len() {
            0 => String::new(),
            count => format!(" in {count} shards"),
        };
        text += &format!(
            "delta      {}{shards}, 1/{:.0} of {}\n",
            bytes(delta),
            manifest.tensor_bytes as f64 / delta.max(1) as f64,
            bytes(manifest.tensor_bytes)
        );
    }
    text
}

async fn publisher(config: &Config, place: OpenStore) -> anyhow::Result<Publisher> {
    let pool = database::connect(config).await?;
    database::check_schema(&pool).await?;
    Ok(Publisher {
        pool,
        key: Arc::new(place.publisher_key()?),
        store: place.store,
        keys_dir: place.keys_dir,
        announce: None,
        policy: place.policy,
        checkpoint_every: config.trainer.checkpoint_every,
        run_states_kept: config.trainer.run_states_kept,
        quantized: QuantizedCopies::new(&config.policy.quantized, config.policy.serves),
    })
}
