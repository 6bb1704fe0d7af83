//! Rollouts of GRPO runs that have closed with a reward. They pass the same checks as all samples.

use super::{Answers, Coded, check_and_read};
use crate::sample::{ModelLimits, Sample, Turn};
use event_log::payload::Store as Payloads;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

/// How the last answer of an episode ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastAnswer {
    /// Sampled ones.
    pub tokens: u32,
    /// It ended because it was as long as it may be.
    pub is_cut_off: bool,
}

/// What arrived of some episodes.
#[derive(Debug, Default)]
pub struct Arrived {
    /// Turns that may be trained on and that nothing has decided about, each with its place.
    pub samples: Vec<Sample>,
    /// Of every episode with a turn here.
    pub last_answers: BTreeMap<Uuid, LastAnswer>,
    pub broken: Coded,
    /// Episodes of which a turn may still come, or cannot be read yet.
    pub missing: Vec<Uuid>,
    /// The store of payloads did not answer, so some of them wait for it.
    pub is_unavailable: bool,
}

/// The turns of a run's episodes that have closed.
pub async fn episodes(
    pool: &PgPool,
    payloads: &Payloads,
    run: Uuid,
    versions: &[i64],
    episodes: &[Uuid],
    limits: &ModelLimits,
) -> Result<Arrived, sqlx::Error> {
    let Some(oldest) = episodes.iter().min() else {
        return Ok(Arrived::default());
    };
    let oldest = an_hour_before(*oldest);
    let mut connection = pool.acquire().await?;
    let rows = sqlx::query_file!("src/select/episodes.sql", run, episodes, oldest)
        .fetch_all(&mut *connection)
        .await?;
    let mut turns: BTreeMap<Uuid, Turn> = BTreeMap::new();
    let mut last_answers = BTreeMap::new();
    let mut undecided = Vec::new();
    let mut waiting: Vec<Uuid> = episodes.to_vec();
    for rows in rows.chunk_by(|a, b| a.episode_id == b.episode_id) {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
            continue;
        };
        let last_answer = LastAnswer {
            tokens: last.tokens.unsigned_abs(),
            is_cut_off: last.is_cut_off,
        };
        last_answers.insert(first.episode_id, last_answer);
        if usize::try_from(first.episode_turns) == Ok(rows.len()) {
            waiting.retain(|episode| *episode != first.episode_id);
        }
        let rewards: Arc<[Option<f64>]> = rows.iter().map(|row| row.turn_reward).collect();
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.is_undecided) {
            let turn = Turn {
                episode: row.episode_id,
                index,
                rewards: rewards.clone(),
            };
            turns.insert(row.id, turn);
            undecided.push(row.id);
        }
    }
    let read = check_and_read(
        &mut connection,
        payloads,
        undecided,
        Some(versions),
        limits,
        Answers::Sampled,
    )
    .await?;
    let mut arrived = Arrived {
        last_answers,
        broken: read.broken,
        missing: waiting,
        is_unavailable: read.unavailable.is_some(),
        samples: Vec::new(),
    };
    for ids in arrived.broken.values() {
        turns.retain(|id, _| !ids.contains(id));
    }
    for mut sample in read.samples {
        sample.turn = turns.remove(&sample.generation);
        sample.staleness = staleness(sample.version, versions);
        arrived.samples.push(sample);
    }
    // those whose context may still come
    arrived.missing.extend(turns.into_values().map(|turn| turn.episode));
    arrived.missing.sort_unstable();
    arrived.missing.dedup();
    Ok(arrived)
}

/// How many steps a version is away from the head, the first of `versions`. The largest number: it is
/// not on the head's path, or further away than they go.
pub fn staleness(version: i64, versions: &[i64]) -> usize {
    let steps = versions.iter().position(|one| *one == version);
    steps.unwrap_or(usize::MAX)
}

/// The id of an hour before this one (UUIDv7): the clocks of hosts differ.
fn an_hour_before(id: Uuid) -> Uuid {
    let mut milliseconds = [0; 8];
    milliseconds[2..].copy_from_slice(&id.as_bytes()[..6]);
    let earlier = u64::from_be_bytes(milliseconds).saturating_sub(3_600_000);
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&earlier.to_be_bytes()[2..]);
    Uuid::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_is_not_on_the_path_is_older_than_any_bound() {
        assert_eq!((staleness(7, &[7, 5]), staleness(5, &[7, 5])), (0, 1));
        assert_eq!(staleness(6, &[7, 5]), usize::MAX);
    }

    #[test]
    fn turns_sampled_by_a_host_with_a_slow_clock_are_found() {
        let id = Uuid::now_v7();
        let before = an_hour_before(id);
        assert!(before < id);
        let seconds = |id: Uuid| id.get_timestamp().map_or(0, |at| at.to_unix().0);
        let before = Uuid::from_u128(before.as_u128() | 7 << 76);
        assert_eq!(seconds(id) - seconds(before), 3_600);
    }
}
