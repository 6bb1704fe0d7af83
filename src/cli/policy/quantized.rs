//! Quantized copies of versions: made here, and checked against the manifest before use.

use std::sync::Arc;

use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::manifest::Manifest;
use artifact::quant::{self, Spec};
use artifact::threads::Threads;

/// Quantizes a rebuilt version.
pub(super) async fn copy(manifest: &Manifest, checkpoint: Arc<Checkpoint>, spec: Spec) -> anyhow::Result<Checkpoint> {
    let manifest = manifest.clone();
    let version = manifest.version;
    let copy = tokio::task::spawn_blocking(move || -> anyhow::Result<Checkpoint> {
        Ok(quant::verified(&checkpoint, &manifest, spec, &threads()?)?)
    });
    copy.await?.with_context(|| format!("quantize version {version}"))
}

/// The content hash of a copy that was read from a folder.
pub(super) async fn root(copy: Arc<Checkpoint>) -> anyhow::Result<Digest> {
    tokio::task::spawn_blocking(move || Ok(copy.root_on(&threads()?))).await?
}

fn threads() -> anyhow::Result<Threads> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Threads::new(cores)?)
}
