//! The samples of a cohort as Parquet files: the columns of an exported dataset, and what training adds.

use crate::context::{self, ExpertPayloads};
use crate::dataset::parquet::Writer;
use crate::dataset::rows::{self, Row, Training};
use crate::sample::Sample;
use event_log::event::PayloadRef;
use event_log::payload::Store as Payloads;
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// A file ends with about so many bytes of tokens and experts, so that nobody needs much memory for one.
const PART_BYTES: usize = 16 << 20;
const MEDIA_TYPE: &str = "application/vnd.apache.parquet";

/// One file.
#[derive(Debug, Clone)]
pub struct Part {
    pub generations: Vec<Uuid>,
    pub trajectories: i32,
    /// Sampled ones.
    pub tokens: i64,
    pub payload: PayloadRef,
}

/// Why no file was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the samples of a cohort: {0}")]
    Rows(#[from] context::Error),
    #[error("read the samples of a cohort from the database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("write the samples of a cohort: {0}")]
    Parquet(#[from] parquet::errors::ParquetError),
    #[error("store the samples of a cohort: {0}")]
    Store(#[from] event_log::payload::Error),
}

/// The folder of a cohort's files among the exports.
pub fn owner(cohort: Uuid) -> String {
    format!("cohort-{cohort}")
}

/// Writes samples with their advantages. `bundles` counts what belongs together: the rollouts of a task, or
/// a trajectory. Each has one number, and is in one file.
pub async fn write(
    pool: &PgPool,
    payloads: &Payloads,
    cohort: Uuid,
    samples: &[(&Sample, f64)],
    bundles: &mut i64,
) -> Result<Vec<Part>, Error> {
    let mut parts = Vec::new();
    let mut rest = bundled(samples);
    let ids: Vec<Uuid> = samples.iter().map(|(sample, _)| sample.generation).collect();
    let mut connection = pool.acquire().await?;
    let experts = ExpertPayloads::read(&mut connection, &ids).await?;
    drop(connection);
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |bundle: &&Vec<&(&Sample, f64)>| {
            let before = bytes;
            bytes += bundle
                .iter()
                .map(|(sample, _)| {
                    4 * (sample.prompt.len() + 2 * sample.tokens.len()) + experts.size(sample.generation)
                })
                .sum::<usize>();
            before == 0 || bytes <= PART_BYTES
        };
        let count = rest.iter().take_while(fits).count();
        let chosen: Vec<_> = rest.drain(..count).collect();
        let mut training = BTreeMap::new();
        let mut trajectories = BTreeSet::new();
        for bundle in &chosen {
            for (sample, advantage) in bundle {
                trajectories.insert(sample.trajectory());
                let one = Training {
                    advantage: *advantage,
                    weight: sample.weight,
                    bundle: *bundles,
                    experts: experts.bytes(payloads, sample.generation).await?,
                };
                training.insert(sample.generation, one);
            }
            *bundles += 1;
        }
        let ids: Vec<Uuid> = chosen.iter().flatten().map(|(sample, _)| sample.generation).collect();
        let mut connection = pool.acquire().await?;
        let mut rows = rows::read(&mut connection, payloads, &ids).await?;
        drop(connection);
        for row in &mut rows {
            row.user = pseudonym(cohort, row);
            row.training = training.remove(&row.generation_id);
        }
        let tokens = rows.iter().map(|row| row.token_ids.len() as i64).sum();
        let written = tokio::task::spawn_blocking(move || {
            let mut writer = Writer::of_cohort()?;
            let mut bytes = std::mem::take(writer.add(rows)?);
            bytes.extend(writer.finish()?);
            Ok::<_, parquet::errors::ParquetError>(bytes)
        });
        let bytes = written
            .await
            .map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))??;
        let payload = payloads.exports().put(&owner(cohort), bytes.into(), MEDIA_TYPE).await?;
        parts.push(Part {
            generations: ids,
            trajectories: i32::try_from(trajectories.len()).unwrap_or(i32::MAX),
            tokens,
            payload,
        });
    }
    Ok(parts)
}

/// What belongs together, in the order given.
fn bundled<'a>(samples: &'a [(&'a Sample, f64)]) -> Vec<Vec<&'a (&'a Sample, f64)>> {
    let mut bundles: Vec<Vec<&(&Sample, f64)>> = Vec::new();
    let mut places = BTreeMap::new();
    for one in samples {
        let (sample, _) = one;
        let key = (
            sample.group.clone(),
            sample.group.is_none().then(|| sample.trajectory()),
        );
        let place = *places.entry(key).or_insert(bundles.len());
        match bundles.get_mut(place) {
            Some(bundle) => bundle.push(one),
            None => bundles.push(vec![one]),
        }
    }
    bundles
}

/// A user within one cohort: the key is not in it, and whoever knows tenant and key can compute it.
fn pseudonym(cohort: Uuid, row: &Row) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("springtide 2026-11 user of a cohort");
    hasher.update(cohort.as_bytes());
    hasher.update(&(row.tenant.len() as u64).to_le_bytes());
    hasher.update(row.tenant.as_bytes());
    hasher.update(row.user.as_bytes());
    hasher.finalize().to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_or_a_trajectory_is_a_bundle() {
        let of = |group: Option<&str>| Sample {
            generation: Uuid::now_v7(),
            group: group.map(str::to_owned),
            ..Sample::example()
        };
        let samples = [of(Some("a")), of(None), of(Some("b")), of(Some("a")), of(None)];
        let scored: Vec<(&Sample, f64)> = samples.iter().map(|sample| (sample, 0.5)).collect();
        let sizes: Vec<usize> = bundled(&scored).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 1, 1, 1]);
        let turns = [0, 1].map(|index| Sample::example_of(7, index, &[None, None]));
        let scored: Vec<(&Sample, f64)> = turns.iter().map(|sample| (sample, 0.5)).collect();
        assert_eq!(bundled(&scored).len(), 1);
    }

    #[test]
    fn a_pseudonym_is_of_one_user_of_one_cohort() {
        let row = |tenant: &str, user: &str| Row {
            tenant: tenant.into(),
            user: user.into(),
            ..Row::example()
        };
        let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let known = pseudonym(a, &row("t", "ada"));
        assert_eq!(known, pseudonym(a, &row("t", "ada")));
        assert!(!known.contains("ada") && known.len() == 16);
        for (cohort, other) in [(b, row("t", "ada")), (a, row("t", "bob")), (a, row("ta", "da"))] {
            assert_ne!(known, pseudonym(cohort, &other));
        }
    }
}
