//! What users wrote instead of an answer, the feedback `demonstration`, as samples: to learn from, or to
//! measure a version by.
//!
//! The prompt is the logged one. The text becomes ids by the tokenizer of the version that is trained or
//! measured, and ends with its first id that ends a generation. Texts are users': they are never logged, and one
//! that a tokenizer would read a special token in is refused.

use super::Failed;
use super::pages::{Read, SIZED_AT_ONCE, generations_of};
use crate::typed::Encoder;
use anyhow::Context;
use runs::dataset::store::CLOSED_FOR;
use runs::dataset::{Dataset, Member};
use runs::sample::ModelLimits;
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use time::OffsetDateTime;
use uuid::Uuid;

/// Reads demonstrations that were stored before the dataset was made, by the margin that its trajectories
/// have. So the same dataset gives the same ones, except those that were taken back meanwhile.
pub(super) struct Demonstrations {
    pool: PgPool,
    stored_before: OffsetDateTime,
    encoder: Encoder,
}

impl Demonstrations {
    /// For the version that demands `limits`.
    pub(super) fn new(pool: &PgPool, limits: &ModelLimits, dataset: &Dataset) -> Result<Self, Failed> {
        Ok(Demonstrations {
            pool: pool.clone(),
            stored_before: dataset.created_at - CLOSED_FOR,
            encoder: Encoder::new(limits).map_err(Failed)?,
        })
    }

    /// Those of the trajectories that have a demonstration about one of their generations.
    pub(super) async fn with_any(&self, members: &[Member]) -> anyhow::Result<Vec<Member>> {
        let mut found = BTreeSet::new();
        for slice in generations_of(members).chunks(SIZED_AT_ONCE) {
            found.extend(self.read(slice, false).await?.into_keys());
        }
        let has = |member: &&Member| member.generations.iter().any(|id| found.contains(id));
        Ok(members.iter().filter(has).cloned().collect())
    }

    /// A page of samples with what users wrote instead of what was sampled. Generations without it are
    /// refused.
    pub(super) async fn instead(&self, page: Read) -> anyhow::Result<Read> {
        let ids: Vec<Uuid> = page.samples.iter().map(|sample| sample.generation).collect();
        let texts = self.read(&ids, true).await?;
        let mut read = Read {
            samples: Vec::with_capacity(page.samples.len()),
            ..page
        };
        for sample in page.samples {
            let id = sample.generation;
            match self.encoder.instead(sample, texts.get(&id).map(String::as_str)) {
                Ok(sample) => read.samples.push(sample),
                Err(code) => read.refused.entry(code.to_owned()).or_default().push(id),
            }
        }
        Ok(read)
    }

    /// By generation. Empty texts if they are not asked for.
    async fn read(&self, ids: &[Uuid], with_texts: bool) -> anyhow::Result<BTreeMap<Uuid, String>> {
        let rows = sqlx::query!(
            r#"select id as "id!", demonstration from demonstrations($1, $2, $3)"#,
            ids,
            self.stored_before,
            with_texts
        )
        .fetch_all(&self.pool)
        .await
        .context("read demonstrations")?;
        let rows = rows.into_iter();
        Ok(rows
            .map(|row| (row.id, row.demonstration.unwrap_or_default()))
            .collect())
    }
}
