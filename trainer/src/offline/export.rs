//! Exports: a dataset as a file, in parts, in the store of payloads but in a folder of their own. The
//! role that answers people reads that folder and no contexts.
//!
//! A file is deleted when one of its generations has expired, when a tenant that it has rows of has
//! withdrawn its consent, and, as nothing refers to it, after `ingest.payload_unnamed_hours`, a week by
//! default.

use super::Failed;
use super::execution::Execution;
use super::pages::{Pages, StoreWait, generations_of};
use crate::trainer::Trainer;
use anyhow::Context;
use bytes::Bytes;
use event_log::payload::PayloadRef;
use runs::api::offline::{ExportFor, Exported};
use runs::dataset::file::Writer;
use runs::dataset::rows;
use runs::run;
use runs::uses::Purpose;
use std::collections::BTreeSet;
use tokio::task::spawn_blocking;
use uuid::Uuid;

/// Largest part that is written. What the writer returns may be larger: a long row, a row group.
const PART_BYTES_MAX: usize = 16 << 20;
/// Files that one sweep deletes.
const DELETED_AT_ONCE_MAX: i64 = 100;

/// An export that is being written.
struct Export<'a> {
    run: &'a Execution<'a>,
    config: ExportFor,
    /// What of it is in the store.
    parts: Vec<PayloadRef>,
}

pub(super) async fn write(run: &Execution<'_>) -> anyhow::Result<()> {
    let config: ExportFor = run.config()?;
    let tenant = (!config.all_tenants).then_some(config.tenant.as_str());
    let (_, members) = run.dataset(&config.export.dataset, tenant).await?;
    let mut writer = Writer::new(config.export.format).map_err(|error| Failed(error.to_string()))?;
    let mut export = Export {
        run,
        config,
        parts: Vec::new(),
    };
    let (mut used, mut tenants, mut prompts_missing) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut pages = Pages::new(run, generations_of(&members));
    while let Some(page) = pages.next().await? {
        run.check().await?;
        let rows = export.read(&page).await?;
        for row in &rows {
            prompts_missing += i64::from(row.prompt_ids.is_none());
            used.insert(row.generation_id);
            tenants.insert(row.tenant.clone());
        }
        let add = move || writer.add(rows).map(|bytes| (writer, bytes));
        let bytes;
        (writer, bytes) = spawn_blocking(add).await??;
        export.put(bytes).await?;
    }
    let last = spawn_blocking(move || writer.finish()).await??;
    export.put(last).await?;
    let whole = members
        .iter()
        .filter(|one| one.generations.iter().all(|id| used.contains(id)));
    let exported = Exported {
        trajectories: i64::try_from(whole.count())?,
        generations: i64::try_from(used.len())?,
        bytes: export.parts.iter().map(|part| part.size_bytes).sum(),
        prompts_missing,
        tenants: tenants.into_iter().collect(),
        oldest: used.first().copied(),
        parts: export.parts,
    };
    let used: Vec<Uuid> = used.into_iter().collect();
    let reason = format!(
        "{} trajectories, {} generations, {} bytes",
        exported.trajectories, exported.generations, exported.bytes
    );
    let result = serde_json::to_value(&exported)?;
    run.finish(Purpose::Exported, &used, &result, &reason).await?;
    tracing::info!(run = %run.claim.run, generations = exported.generations, bytes = exported.bytes, "exported a dataset");
    Ok(())
}

impl Export<'_> {
    async fn read(&self, page: &[Uuid]) -> anyhow::Result<Vec<rows::Row>> {
        let trainer = self.run.trainer;
        let mut store = StoreWait::default();
        loop {
            let mut connection = trainer.pool.acquire().await?;
            let read = rows::read(&mut connection, &trainer.payloads, page).await;
            drop(connection);
            let read = read.context("read the generations of the dataset");
            if let Some(rows) = store.answer(self.run, read).await? {
                return Ok(rows);
            }
        }
    }

    /// Stores bytes of the file, in parts.
    async fn put(&mut self, bytes: Option<Bytes>) -> anyhow::Result<()> {
        let mut rest = bytes.unwrap_or_default();
        let exports = self.run.trainer.payloads.exports();
        let media_type = self.config.export.format.media_type();
        let mut store = StoreWait::default();
        while !rest.is_empty() {
            let part = rest.slice(..rest.len().min(PART_BYTES_MAX));
            let size = part.len();
            let written = exports.put(&self.config.tenant, part, media_type).await;
            let written = written.context("write a part of the export");
            if let Some(part) = store.answer(self.run, written).await? {
                self.parts.push(part);
                rest = rest.split_off(size);
            }
        }
        Ok(())
    }
}

/// Deletes files with rows that nobody may have any more. The run keeps what it has exported, without
/// the parts.
pub(super) async fn sweep(trainer: &Trainer) -> anyhow::Result<()> {
    let found = sqlx::query!(
        r#"
        select id, config ->> 'tenant' as "tenant!", result -> 'parts' as "parts!" from run
        where policy = $1 and kind = 'export' and status = 'succeeded' and jsonb_array_length(result -> 'parts') > 0
          and ((result ->> 'oldest')::uuid < (select until_id from generation_horizon)
               or exists (select from erasure e
                          where e.erased_at > run.created_at and result -> 'tenants' ? e.tenant_id)
               or exists (select from jsonb_array_elements_text(result -> 'tenants') as one (id)
                          where one.id <> all ((select dataset_tenants($1))::text[])))
        order by id
        limit $2
        "#,
        trainer.policy,
        DELETED_AT_ONCE_MAX
    )
    .fetch_all(&trainer.pool)
    .await?;
    let exports = trainer.payloads.exports();
    for export in found {
        let parts: Vec<PayloadRef> = match serde_json::from_value(export.parts) {
            Ok(parts) => parts,
            Err(error) => {
                tracing::error!(run = %export.id, %error, "the parts of an export cannot be read, so its files stay: delete them");
                continue;
            }
        };
        for part in &parts {
            let removed = exports.remove(&export.tenant, part).await;
            removed.context("delete a part of an export")?;
        }
        run::forget_parts(&trainer.pool, export.id).await?;
        tracing::info!(run = %export.id, parts = parts.len(), "deleted an export: a tenant has withdrawn, a user was erased, or a row has expired");
    }
    Ok(())
}
