//! The first version of a line: a folder of weights.

use super::{Error, Publisher, record};
use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::manifest::Manifest;
use std::path::Path;
use std::sync::Arc;
use store::Pieces;

/// Imports the checkpoint in `dir` as the head of `line`, unless the line has a head. Returns the
/// head. If two processes import at once, one makes the version and the other an orphan manifest
/// that nobody follows.
pub async fn import(publisher: &Publisher, dir: &Path, line: &str) -> anyhow::Result<i64> {
    if let Some(head) = head(publisher, line).await? {
        return Ok(head);
    }
    let path = dir.to_path_buf();
    let checkpoint = tokio::task::spawn_blocking(move || Checkpoint::read_dir(&path))
        .await?
        .with_context(|| format!("read the base policy in {}", dir.display()))?;
    Ok(import_checkpoint(publisher, Arc::new(checkpoint), line).await?)
}

/// [`import`] of a checkpoint in memory.
pub async fn import_checkpoint(publisher: &Publisher, checkpoint: Arc<Checkpoint>, line: &str) -> Result<i64, Error> {
    if let Some(head) = head(publisher, line).await? {
        return Ok(head);
    }
    let (root, pieces, tensor_bytes) = {
        let (checkpoint, threads) = (Arc::clone(&checkpoint), publisher.store.threads().clone());
        tokio::task::spawn_blocking(move || {
            let root = checkpoint.root_on(&threads);
            (root, checkpoint.to_pieces().map(Pieces::new), checkpoint.tensor_bytes())
        })
        .await?
    };
    let pieces = pieces?;
    let quantized = publisher.quantized.for_manifest(Arc::clone(&checkpoint)).await?;
    let reference = publisher.reference(checkpoint, None).await?;
    let object = publisher.store.put_pieces(&publisher.policy, &pieces).await?;
    let mut manifest = Manifest {
        checkpoint: Some(object),
        quantized,
        reference,
        ..publisher.manifest(root, None, line.to_string(), 0, tensor_bytes)
    };
    let reserved = publisher.reserve(None).await?;
    publisher.put_manifest(&mut manifest, reserved, None).await?;
    publisher.store.reupload_missing(&publisher.policy, &[&pieces]).await?;
    let mut transaction = edge::database::begin(&publisher.pool).await?;
    record::insert_version(&mut transaction, &manifest).await?;
    let inserted = record::begin_line(&mut *transaction, &publisher.policy, line, manifest.version).await?;
    if inserted.rows_affected() == 0 {
        transaction.rollback().await?;
        return head(publisher, line)
            .await?
            .ok_or(Error::NoSuchVersion(manifest.version));
    }
    transaction.commit().await?;
    publisher.announce(manifest.version).await;
    Ok(manifest.version)
}

async fn head(publisher: &Publisher, line: &str) -> Result<Option<i64>, sqlx::Error> {
    let line = record::line(&publisher.pool, &publisher.policy, line).await?;
    Ok(line.map(|(head, _)| head))
}
