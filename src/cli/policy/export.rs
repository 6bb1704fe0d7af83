//! `export` and `merge`: versions and adapters as folders that Hugging Face's libraries read.

use std::path::{Path, PathBuf};

use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::folder::SHARD_BYTES_MAX;
use artifact::quant::Spec;
use model::lora::{Adapter, merged};

use super::{StoreArgs, quantized};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Export {
    /// Number of the version, or an alias such as champion.
    version: String,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write only the adapter of a version that a run with `lora` made, as PEFT's folder. Without,
    /// it is merged into its base.
    #[arg(long, conflicts_with = "quantized")]
    adapter: bool,
    /// Write the manifest's quantized copy of this spec: fp8-e4m3-b128.1, int4-sym-g32.1 or
    /// nvfp4-e4m3-g16.1.
    #[arg(long, value_name = "SPEC")]
    quantized: Option<Spec>,
    /// Largest size of a shard of the weights, bytes.
    #[arg(long, value_name = "BYTES", default_value_t = SHARD_BYTES_MAX, value_parser = clap::value_parser!(u64).range(1..))]
    shard_bytes: u64,
    #[command(flatten)]
    at: StoreArgs,
}

impl Export {
    pub async fn run(self, config: &Config) -> anyhow::Result<()> {
        let place = self.at.open(config).await?;
        let version = place.serial(&self.version).await?;
        let out = &self.out;
        let manifest = place.manifest(version).await?;
        let (store, policy, keys) = (&place.store, &place.policy, &place.keys);
        let rebuilding = || format!("rebuild version {version}");
        if self.adapter {
            let base = manifest.adapts.with_context(|| {
                format!("version {version} has all weights and no adapter: export it without --adapter")
            })?;
            let rebuilt = store
                .materialize(policy, version, keys, &[])
                .await
                .with_context(rebuilding)?;
            let adapter = Adapter::of_version(&rebuilt.checkpoint)?.context("the version has no adapter")?;
            adapter.write_dir(out)?;
            println!(
                "the adapter of version {version} is in {}; it adapts version {}",
                out.display(),
                base.version
            );
            return Ok(());
        }
        let rebuilt = store
            .materialize_model(policy, version, keys, &[])
            .await
            .with_context(rebuilding)?;
        let Some(spec) = self.quantized else {
            write(merged(&rebuilt.checkpoint)?.as_ref(), out, self.shard_bytes)?;
            println!("version {version} is in {}", out.display());
            return Ok(());
        };
        let copy = quantized::copy(&manifest, rebuilt.checkpoint, spec).await?;
        write(&copy, out, self.shard_bytes)?;
        println!("version {version}, quantized by {spec}, is in {}", out.display());
        Ok(())
    }
}

#[derive(Debug, Clone, clap::Args)]
pub struct Merge {
    /// Hugging Face folder of the model.
    model: PathBuf,
    /// PEFT folder of the adapter.
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Merge {
    pub fn run(self) -> anyhow::Result<()> {
        let base = Checkpoint::read_dir(&self.model);
        let base = base.with_context(|| format!("read the model in {}", self.model.display()))?;
        let adapter = Adapter::read_dir(&self.adapter).context("read the adapter")?;
        write(&adapter.merge(&base)?, &self.out, SHARD_BYTES_MAX)?;
        println!("merged {} matrices into {}", adapter.pairs.len(), self.out.display());
        Ok(())
    }
}

fn write(checkpoint: &Checkpoint, out: &Path, shard_bytes: u64) -> anyhow::Result<()> {
    checkpoint
        .write_shards(out, shard_bytes)
        .with_context(|| format!("write the model to {}", out.display()))
}
