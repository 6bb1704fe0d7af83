//! `springtide policy …`: versions and adapters as folders that Hugging Face's libraries read. Reads the policy store itself,
//! so no role needs to run.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use policy::image::Image;
use policy::lora::Adapter;
use policy::sign::TrustedKeys;
use policy::store::{self, Store};
use trainer::checkpoint::{self, Checkpoint};

use crate::config::Config;

/// Versions and adapters as folders.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    /// Write a version as a Hugging Face folder, or the adapter that made it as a PEFT folder.
    Export {
        version: i64,
        /// Folder to write.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// The adapter alone, of a version that a run with `lora` made. Only a run's latest checkpoints have theirs.
        #[arg(long)]
        adapter: bool,
    },
    /// Merge a PEFT adapter into a model's weights. What is written can be `policy.base`.
    Merge {
        /// Hugging Face folder.
        model: PathBuf,
        /// PEFT folder.
        #[arg(long, value_name = "DIR")]
        adapter: PathBuf,
        /// Folder to write.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

pub async fn run(command: Command, config: &Config) -> anyhow::Result<()> {
    match command {
        Command::Export { version, out, adapter } => export(config, version, &out, adapter).await,
        Command::Merge { model, adapter, out } => merge(&model, &adapter, &out),
    }
}

async fn export(config: &Config, version: i64, out: &Path, adapter: bool) -> anyhow::Result<()> {
    let url = config.store_url();
    let store = Store::open(&url).with_context(|| format!("open the policy store {url}"))?;
    let keys = TrustedKeys::load(&config.keys_dir()).context("load the trusted keys")?;
    let name = &config.policy.name;
    if adapter {
        let (adapter, base) = adapter_of(&store, &keys, name, version).await?;
        adapter.write_dir(out)?;
        println!(
            "the adapter of version {version} is in {}; it is of version {base}",
            out.display()
        );
        return Ok(());
    }
    let materialised = store
        .materialise(name, version, &keys, &[])
        .await
        .with_context(|| format!("put version {version} together"))?;
    write(&materialised.image, out)?;
    println!("version {version} is in {}", out.display());
    Ok(())
}

/// The adapter that made a version, and the version that it is of.
async fn adapter_of(store: &Store, keys: &TrustedKeys, name: &str, version: i64) -> anyhow::Result<(Adapter, i64)> {
    let manifest = store
        .get_manifest(name, version, keys)
        .await
        .with_context(|| format!("read the manifest of version {version}"))?;
    let Some(made) = manifest.run else {
        bail!("version {version} was imported, no run made it");
    };
    let key = checkpoint::key(made.run, made.step, version);
    let bytes = match store.get_private(&key).await {
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

fn merge(model: &Path, adapter: &Path, out: &Path) -> anyhow::Result<()> {
    let base = Image::read_dir(model).with_context(|| format!("read the model in {}", model.display()))?;
    let adapter = Adapter::read_dir(adapter).context("read the adapter")?;
    write(&adapter.merge(&base)?, out)?;
    println!("{} matrices merged, written to {}", adapter.pairs.len(), out.display());
    Ok(())
}

fn write(image: &Image, out: &Path) -> anyhow::Result<()> {
    image
        .write_dir(out)
        .with_context(|| format!("write the model to {}", out.display()))
}
