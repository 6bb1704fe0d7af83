//! `export` and `merge`: versions and adapters as folders that Hugging Face's libraries read.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use artifact::checkpoint::Checkpoint;
use artifact::folder::SHARD_BYTES_MAX;
use artifact::quant::Spec;
use model::lora::Adapter;
use runs::publish::run_state::{self, RunState};

use super::{OpenStore, StoreArgs, quantized};
use crate::config::Config;

#[derive(Debug, Clone, clap::Args)]
pub struct Export {
    /// Number of the version, or an alias such as champion.
    version: String,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write only the adapter of a version that a run with `lora` made. Runs keep their latest
    /// adapters only.
    #[arg(long, conflicts_with = "quantized")]
    adapter: bool,
    /// Write the manifest's quantized copy of this spec: fp8-e4m3-b128.1 or int4-sym-g32.1.
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
        if self.adapter {
            let (adapter, base) = adapter_of(&place, version).await?;
            adapter.write_dir(out)?;
            println!(
                "the adapter of version {version} is in {}; it adapts version {base}",
                out.display()
            );
            return Ok(());
        }
        let rebuilt = place
            .store
            .materialize(&place.policy, version, &place.keys, &[])
            .await
            .with_context(|| format!("rebuild version {version}"))?;
        let Some(spec) = self.quantized else {
            write(&rebuilt.checkpoint, out, self.shard_bytes)?;
            println!("version {version} is in {}", out.display());
            return Ok(());
        };
        let copy = quantized::copy(&place.manifest(version).await?, rebuilt.checkpoint, spec).await?;
        write(&copy, out, self.shard_bytes)?;
        println!("version {version}, quantized by {spec}, is in {}", out.display());
        Ok(())
    }
}

/// The adapter that made a version, and the version that it adapts.
async fn adapter_of(place: &OpenStore, version: i64) -> anyhow::Result<(Adapter, i64)> {
    let Some(run_step) = place.manifest(version).await?.run else {
        bail!("version {version} was imported, so it has no adapter: export it without --adapter");
    };
    let key = run_state::key(run_step.run, run_step.step, version);
    let bytes = match place.store.get_private(&key).await {
        Err(store::Error::NotFound(_)) => bail!(
            "the adapter of version {version} was deleted: a run keeps the latest trainer.checkpoints_kept; \
             export the version without --adapter"
        ),
        read => read.context("read the run state")?,
    };
    let state = RunState::from_bytes(&bytes, None)?;
    let base = state.lora.as_ref().map(|lora| lora.base);
    state.adapter()?.zip(base).with_context(|| {
        format!("all weights of version {version} were trained, so it has no adapter: export it without --adapter")
    })
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
