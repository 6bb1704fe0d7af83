//! `export` and `merge`: versions and adapters as folders that Hugging Face's libraries read.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use policy::image::Image;
use policy::lora::Adapter;
use policy::manifest::Manifest;
use policy::quant::Spec;
use policy::store;
use trainer::checkpoint::{self, Checkpoint};

use super::{At, Place, quantised};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Export {
    /// Serial, or an alias.
    version: String,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The adapter alone, of a version that a run with `lora` made. Only a run's latest checkpoints have theirs.
    #[arg(long, conflicts_with = "quantised")]
    adapter: bool,
    /// The quantised copy that the manifest names by this spec: fp8-e4m3-b128.1 or int4-sym-g32.1.
    #[arg(long, value_name = "SPEC")]
    quantised: Option<Spec>,
    /// Cut the weights into shards of at most so many bytes.
    #[arg(long, value_name = "BYTES", default_value_t = policy::folder::SHARD_BYTES_MAX, value_parser = clap::value_parser!(u64).range(1..))]
    shard_bytes: u64,
    #[command(flatten)]
    at: At,
}

impl Export {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        let out = &self.out;
        if self.adapter {
            let (adapter, base) = adapter_of(&place, version).await?;
            adapter.write_dir(out)?;
            println!(
                "the adapter of version {version} is in {}; it is of version {base}",
                out.display()
            );
            return Ok(());
        }
        let materialised = place
            .store
            .materialise(&place.policy, version, &place.keys, &[])
            .await
            .with_context(|| format!("put version {version} together"))?;
        let Some(spec) = self.quantised else {
            write(&materialised.image, out, self.shard_bytes)?;
            println!("version {version} is in {}", out.display());
            return Ok(());
        };
        let manifest = manifest(&place, version).await?;
        let copy = quantised::copy(&manifest, materialised.image, spec, None).await?;
        write(&copy, out, self.shard_bytes)?;
        println!("version {version}, quantised by {spec}, is in {}", out.display());
        Ok(())
    }
}

async fn manifest(place: &Place, version: i64) -> anyhow::Result<Manifest> {
    let read = place.store.get_manifest(&place.policy, version, &place.keys).await;
    read.with_context(|| format!("read the manifest of version {version}"))
}

/// The adapter that made a version, and the version that it is of.
async fn adapter_of(place: &Place, version: i64) -> anyhow::Result<(Adapter, i64)> {
    let manifest = manifest(place, version).await?;
    let Some(made) = manifest.run else {
        bail!("version {version} was imported, no run made it");
    };
    let key = checkpoint::key(made.run, made.step, version);
    let bytes = match place.store.get_private(&key).await {
        Err(store::Error::NotFound(_)) => bail!(
            "the checkpoint of version {version} is gone, a run keeps its latest trainer.checkpoints_kept: export it whole"
        ),
        read => read.context("read the checkpoint")?,
    };
    let checkpoint = Checkpoint::from_bytes(&bytes)?;
    let base = checkpoint.lora.as_ref().map(|lora| lora.base);
    checkpoint.adapter()?.zip(base).with_context(|| {
        format!("all weights of version {version} were trained, it has no adapter: export it without --adapter")
    })
}

#[derive(Debug, Clone, clap::Args)]
pub struct Merge {
    /// Hugging Face folder.
    model: PathBuf,
    /// PEFT folder.
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Merge {
    pub fn run(self) -> anyhow::Result<()> {
        let base =
            Image::read_dir(&self.model).with_context(|| format!("read the model in {}", self.model.display()))?;
        let adapter = Adapter::read_dir(&self.adapter).context("read the adapter")?;
        write(&adapter.merge(&base)?, &self.out, policy::folder::SHARD_BYTES_MAX)?;
        println!(
            "{} matrices merged, written to {}",
            adapter.pairs.len(),
            self.out.display()
        );
        Ok(())
    }
}

fn write(image: &Image, out: &Path, shard_bytes: u64) -> anyhow::Result<()> {
    image
        .write_shards(out, shard_bytes)
        .with_context(|| format!("write the model to {}", out.display()))
}
