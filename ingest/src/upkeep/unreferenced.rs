//! Deletes payloads that were uploaded for an event that never arrived.
//!
//! Lists the object store itself, because producers may also write to it directly.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Context;
use event_log::payload::{self, Key, Object};
use futures::TryStreamExt;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::rows::offset::{self, EventLog};

/// Between two sweeps of all processes together.
const INTERVAL: Duration = Duration::from_secs(6 * 3600);
/// Between two attempts to claim the sweep.
const CLAIM_INTERVAL: Duration = Duration::from_secs(600);
/// While the tables' progress is unknown, as when the service has just started.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Objects per query.
const BATCH_MAX: usize = 1_000;

pub(crate) struct UnreferencedSweep {
    pub pool: PgPool,
    pub payloads: payload::Store,
    pub log: EventLog,
    /// How long a payload waits for an event that refers to it.
    pub ttl: time::Duration,
    pub shutdown: CancellationToken,
}

impl UnreferencedSweep {
    pub(crate) async fn run(self) {
        loop {
            let Some(swept) = self.shutdown.run_until_cancelled(self.sweep()).await else {
                return;
            };
            let pause = match swept {
                Ok(true) => CLAIM_INTERVAL,
                Ok(false) => PROGRESS_INTERVAL,
                Err(error) => {
                    tracing::warn!(error = %format!("{error:#}"), "cannot delete unreferenced payloads, will retry");
                    CLAIM_INTERVAL
                }
            };
            self.shutdown.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }

    /// Returns false if the tables' progress is unknown.
    async fn sweep(&self) -> anyhow::Result<bool> {
        // Relative to the tables' progress, because later events of the log may refer to any
        // payload.
        let known = offset::caught_up_to(&self.pool, &self.log).await;
        let Some(known) = known.context("read progress")? else {
            return Ok(false);
        };
        if !self.try_claim_sweep().await.context("claim the sweep")? {
            return Ok(true);
        }
        let written_before = known - self.ttl;
        let mut deleted = 0;
        // Nothing refers to an export.
        for store in [self.payloads.clone(), self.payloads.exports()] {
            deleted += self.sweep_folder(&store, written_before).await?;
        }
        metrics::counter!("springtide_ingest_payloads_unnamed_total").increment(deleted);
        if deleted > 0 {
            tracing::info!(deleted, "unreferenced payloads deleted");
        }
        Ok(true)
    }

    /// Returns how many it deleted.
    async fn sweep_folder(&self, store: &payload::Store, written_before: OffsetDateTime) -> anyhow::Result<u64> {
        let objects = store.objects();
        let expired = objects.try_filter(|object| std::future::ready(object.written_at < written_before));
        let mut chunks = std::pin::pin!(expired.try_chunks(BATCH_MAX));
        let mut deleted = 0;
        while let Some(objects) = chunks.try_next().await.context("list the object store")? {
            for object in self.unreferenced(&objects).await.context("find references")? {
                // Producers upload a payload again before they refer to it, which renews its age.
                let written_at = store.written_at(&object.key).await?;
                if written_at.is_some_and(|at| at < written_before) {
                    store.delete(&object.key).await?;
                    deleted += 1;
                }
            }
        }
        Ok(deleted)
    }

    /// At most one process succeeds per [`INTERVAL`].
    async fn try_claim_sweep(&self) -> sqlx::Result<bool> {
        let claimed = sqlx::query!(
            "insert into payload_sweep (begun_at) values (now()) on conflict (one) do update set begun_at = now() \
             where payload_sweep.begun_at < now() - make_interval(secs => $1)",
            INTERVAL.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(claimed.rows_affected() == 1)
    }

    async fn unreferenced<'a>(&self, objects: &'a [Object]) -> sqlx::Result<Vec<&'a Object>> {
        let digests: Vec<Vec<u8>> = objects.iter().map(|object| object.key.digest.to_vec()).collect();
        let rows = sqlx::query!(
            "select distinct tenant_id, digest from payload_reference where digest = any($1)",
            &digests
        )
        .fetch_all(&self.pool)
        .await?;
        let referenced: HashSet<Key> = rows
            .into_iter()
            .filter_map(|row| Some(Key::new(&row.tenant_id, row.digest.try_into().ok()?)))
            .collect();
        let unreferenced = objects.iter().filter(|object| !referenced.contains(&object.key));
        Ok(unreferenced.collect())
    }
}
