//! Payloads that were put into the object store for an event that never came. The store itself is looked through for them: it
//! has also those that producers wrote without asking anybody.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::Context;
use futures::TryStreamExt;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::payload::{self, Object};
use crate::sink;

/// Between two looks through the store, of all processes together.
const INTERVAL: Duration = Duration::from_secs(6 * 3600);
/// Between two looks at whose turn it is.
const TURN_INTERVAL: Duration = Duration::from_secs(600);
/// Objects that the tables are asked about at once.
const ASKED_AT_ONCE: usize = 1_000;

pub(crate) struct Unnamed {
    pub pool: PgPool,
    pub payloads: payload::Store,
    pub cluster_id: String,
    /// The event topics.
    pub topics: Vec<String>,
    /// How long a payload waits for an event that names it.
    pub keep: time::Duration,
    pub shutdown: CancellationToken,
}

impl Unnamed {
    pub(crate) async fn run(self) {
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                swept = self.sweep() => if let Err(error) = swept {
                    tracing::warn!(error = %format!("{error:#}"), "unnamed payloads not deleted, will be tried again");
                }
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(TURN_INTERVAL) => {}
            }
        }
    }

    async fn sweep(&self) -> anyhow::Result<()> {
        // Counted back from how far the tables are: an event that the log has taken since may name any payload.
        let known = sink::caught_up_to(&self.pool, &self.cluster_id, &self.topics).await;
        let Some(known) = known.context("read progress")? else {
            return Ok(());
        };
        if !self.is_our_turn().await.context("take the turn")? {
            return Ok(());
        }
        let written_before = known - self.keep;
        let old = self.payloads.objects();
        let old = old.try_filter(|object| std::future::ready(object.written_at < written_before));
        let mut chunks = std::pin::pin!(old.try_chunks(ASKED_AT_ONCE));
        let mut deleted = 0;
        while let Some(objects) = chunks.try_next().await.context("look through the store")? {
            for object in self.unnamed(&objects).await.context("ask who names them")? {
                // Whoever wants to name it after all puts it again first.
                if self.payloads.is_older(object, written_before).await? {
                    self.payloads.remove(object).await?;
                    deleted += 1;
                }
            }
        }
        metrics::counter!("springtide_ingest_payloads_unnamed_total").increment(deleted);
        if deleted > 0 {
            tracing::info!(deleted, "payloads that no event named are gone");
        }
        Ok(())
    }

    async fn is_our_turn(&self) -> sqlx::Result<bool> {
        let taken = sqlx::query!(
            "insert into payload_sweep (begun_at) values (now()) on conflict (one) do update set begun_at = now() \
             where payload_sweep.begun_at < now() - make_interval(secs => $1)",
            INTERVAL.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(taken.rows_affected() == 1)
    }

    async fn unnamed<'a>(&self, objects: &'a [Object]) -> sqlx::Result<Vec<&'a Object>> {
        let digests: Vec<Vec<u8>> = objects.iter().map(|object| object.digest.to_vec()).collect();
        let rows = sqlx::query!(
            "select distinct tenant_id, digest from payload_reference where digest = any($1)",
            &digests
        )
        .fetch_all(&self.pool)
        .await?;
        let named: HashSet<([u8; 32], &[u8])> = rows
            .iter()
            .map(|row| (payload::tenant_hash(&row.tenant_id), row.digest.as_slice()))
            .collect();
        let unnamed = objects
            .iter()
            .filter(|object| !named.contains(&(object.tenant, &object.digest[..])));
        Ok(unnamed.collect())
    }
}
