//! Exports: a dataset as a file, in parts, in the store of payloads, which replicas cannot read.
//!
//! Nothing refers to the parts, so the store's own sweep deletes them after
//! `ingest.payload_unnamed_hours`, a week by default.

use super::{Failed, configuration, dataset_of, is_stopped, succeed};
use crate::api::offline::{ExportFor, Exported};
use crate::dataset::file::Writer;
use crate::dataset::{self, rows};
use crate::runs::claim::Claim;
use crate::runs::trainer::Trainer;
use crate::uses::Purpose;
use anyhow::Context;
use bytes::Bytes;
use ingest::payload::PayloadRef;
use std::collections::BTreeSet;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Generations read at a time.
const ROWS_AT_ONCE: usize = 64;
/// Largest payload that is written. What the writer returns may be larger: a long row, a row group.
const PART_BYTES_MAX: usize = 16 << 20;

pub(super) async fn execute(trainer: &Trainer, id: Uuid, shutdown: &CancellationToken) -> anyhow::Result<()> {
    let Some(claim) = Claim::take(&trainer.pool, id).await? else {
        return Ok(());
    };
    let (config, _): (ExportFor, _) = configuration(&trainer.pool, id).await?;
    let dataset = dataset_of(trainer, &config.export.dataset).await?;
    let tenant = (!config.all_tenants).then_some(config.tenant.as_str());
    let mut connection = trainer.pool.acquire().await?;
    let ids = dataset::available(&mut connection, &dataset, tenant).await?;
    let format = config.export.format;
    let mut writer = Writer::new(format).map_err(|error| Failed(error.to_string()))?;
    let mut exported = Exported {
        generations: 0,
        bytes: 0,
        prompts_missing: 0,
        tenants: Vec::new(),
        parts: Vec::new(),
    };
    let mut used: Vec<Uuid> = Vec::with_capacity(ids.len());
    let mut tenants = BTreeSet::new();
    for page in ids.chunks(ROWS_AT_ONCE) {
        if is_stopped(&trainer.pool, &claim, shutdown).await? {
            return Ok(());
        }
        let rows = rows::read(&mut connection, &trainer.payloads, page)
            .await
            .context("read the generations of the dataset")?;
        for row in &rows {
            exported.prompts_missing += i64::from(row.prompt_ids.is_none());
            used.push(row.generation_id);
            tenants.insert(row.tenant.clone());
        }
        let add = move || writer.add(rows).map(|bytes| (writer, bytes));
        let bytes;
        (writer, bytes) = spawn_blocking(add).await??;
        put(trainer, &config, bytes, &mut exported.parts).await?;
    }
    drop(connection);
    let last = spawn_blocking(move || writer.finish()).await??;
    put(trainer, &config, last, &mut exported.parts).await?;
    exported.generations = i64::try_from(used.len())?;
    exported.bytes = exported.parts.iter().map(|part| part.size_bytes).sum();
    exported.tenants = tenants.into_iter().collect();
    let reason = format!("{} generations, {} bytes", exported.generations, exported.bytes);
    let result = serde_json::to_value(&exported)?;
    succeed(trainer, &claim, Purpose::Exported, &used, &result, &reason).await?;
    tracing::info!(run = %id, generations = exported.generations, bytes = exported.bytes, "exported a dataset");
    Ok(())
}

/// Stores bytes of the file, in parts.
async fn put(
    trainer: &Trainer,
    config: &ExportFor,
    bytes: Option<Bytes>,
    parts: &mut Vec<PayloadRef>,
) -> anyhow::Result<()> {
    let mut rest = bytes.unwrap_or_default();
    while !rest.is_empty() {
        let part = rest.split_to(rest.len().min(PART_BYTES_MAX));
        let media_type = config.export.format.media_type();
        let written = trainer.payloads.put(&config.tenant, part, media_type).await;
        parts.push(written.context("write a part of the export")?);
    }
    Ok(())
}
