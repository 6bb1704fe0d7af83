//! One poll of the realtime run: which trajectories join the cohort next.
//!
//! An episode joins as a whole and once: all of its turns that may be trained on, in the order of
//! the session. What is wrong with one turn drops that turn ([`OF_EPISODES`] are the exceptions). If
//! a turn cannot be read yet, the whole episode waits. No transaction waits for the object store.

use super::context::Assembled;
use super::{Checks, Coded, Criteria, DECIDED_AT_ONCE_MAX, drop_generations, first_id_of_the_last, row};
use crate::claim::{self, Claim};
use crate::sample::{Sample, Turn};
use event_log::payload::Store as Payloads;
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use uuid::Uuid;

/// Trajectories that one statement looks for.
const CANDIDATES_MAX: i64 = 1_000;
/// Generations checked by one statement, unless one episode has more.
const CHECKED_AT_ONCE_MAX: usize = 1_000;
/// Tokens, with their contexts, that one poll selects, unless one episode has more. The cohort fills
/// over several polls. Each turn of an episode has its whole context in memory: 4 bytes a token.
const TOKENS_AT_ONCE_MAX: u64 = 1 << 22;
/// Codes that drop a whole episode if one of its turns has them.
const OF_EPISODES: [&str; 7] = [
    "tenant_without_consent",
    "quarantined_surface",
    "reward_not_finite",
    "quarantined_reward",
    "capped_user",
    "capped_tenant",
    "capped_surface",
];

/// The code of episodes with more tokens than [`Criteria::trajectory_tokens_max`].
pub const TOO_LARGE: &str = "too_large";

/// The result of one poll.
#[derive(Debug, Default)]
pub struct Selection {
    /// Trajectories that join the cohort now, the oldest first: the generations of each that are
    /// trained on. At least one each.
    pub ready: Vec<Vec<Sample>>,
    /// Generations that this poll excluded: code → count.
    pub set_aside: BTreeMap<String, u64>,
    /// The largest of the episodes that are [`TOO_LARGE`]: its last turn, and its tokens.
    pub too_large: Option<(Uuid, u64)>,
}

/// Excludes generations that will never be trained on, and selects the trajectories that join the
/// cohort next, in fenced snapshots: a new one after payloads were read. `since`: how far back to
/// look for generations to exclude; `None`: at everything.
pub async fn next(
    pool: &PgPool,
    payloads: &Payloads,
    claim: &Claim,
    criteria: &Criteria<'_>,
    since: Option<Duration>,
) -> Result<Selection, claim::Error> {
    let mut transaction = snapshot(pool, claim).await?;
    let mut selection = Selection::default();
    selection.set_aside(&mut transaction, claim, criteria, since).await?;
    // trajectories that wait take no place in the cohort: ask for more behind them
    let mut passed_over = criteria.joined.to_vec();
    let mut answering = Some(payloads);
    while selection.has_room(criteria) {
        let candidates = sqlx::query_file!(
            "src/select/candidates.sql",
            criteria.policy,
            criteria.arms,
            criteria.versions,
            CANDIDATES_MAX,
            &passed_over,
            &criteria.answer_times.surfaces,
            &criteria.answer_times.seconds
        )
        .fetch_all(&mut *transaction)
        .await?;
        let full = candidates.len() as i64 == CANDIDATES_MAX;
        passed_over.extend(candidates.iter().map(|row| row.id));
        let mut candidates: VecDeque<Candidate> = candidates
            .into_iter()
            .map(|row| Candidate {
                last: row.id,
                episode_turns: row.episode_turns,
            })
            .collect();
        while !candidates.is_empty() && selection.has_room(criteria) {
            let some = take(&mut candidates, CHECKED_AT_ONCE_MAX, Candidate::generations);
            let mut sound = selection.check(&mut transaction, claim, criteria, some).await?;
            while !sound.is_empty() && selection.has_room(criteria) {
                let room = criteria.room - selection.ready.len();
                let mut chosen = take(&mut sound, TOKENS_AT_ONCE_MAX, Queued::tokens);
                for later in chosen.drain(room.min(chosen.len())..).rev() {
                    sound.push_front(later);
                }
                let ids: Vec<Uuid> = chosen.iter().flat_map(|one| one.generations.iter().copied()).collect();
                let stored = row::read(&mut transaction, &ids).await?;
                let read;
                if stored.needs_payloads() && answering.is_some() {
                    transaction.commit().await?;
                    read = stored.assemble(answering, criteria.model_limits).await?;
                    transaction = snapshot(pool, claim).await?;
                } else {
                    read = stored.assemble(answering, criteria.model_limits).await?;
                }
                // each question to a store that is down may last minutes: ask once in a poll
                if read.unavailable.is_some() {
                    answering = None;
                }
                let (whole, broken) = assemble(chosen, read, criteria.versions);
                selection.refuse(&mut transaction, claim.run, &broken).await?;
                selection.ready.extend(whole);
            }
        }
        if !full {
            break;
        }
    }
    transaction.commit().await?;
    Ok(selection)
}

/// Begins a transaction that sees one moment, and holds the claim.
async fn snapshot(pool: &PgPool, claim: &Claim) -> Result<Transaction<'static, Postgres>, claim::Error> {
    let mut transaction = edge::database::begin_with(pool, "begin isolation level repeatable read").await?;
    claim.lock(&mut transaction).await?;
    Ok(transaction)
}

/// A trajectory that candidates.sql found.
struct Candidate {
    /// Its last generation that may be trained on.
    last: Uuid,
    /// `None`: it is that generation.
    episode_turns: Option<i32>,
}

impl Candidate {
    fn generations(&self) -> usize {
        self.episode_turns
            .map_or(1, |turns| usize::try_from(turns).unwrap_or(0))
    }
}

/// A trajectory, and what is queued of it.
struct Queued {
    /// In the order of the session.
    generations: Vec<Uuid>,
    /// Of an episode.
    turns: BTreeMap<Uuid, QueuedTurn>,
}

struct QueuedTurn {
    /// Where it stands in its episode.
    turn: Turn,
    /// With its context.
    tokens: u64,
    /// What it is credited with.
    credited: f64,
}

/// Takes the first ones whose sizes together are at most `size_max`, but at least one.
fn take<T, N: Default + Copy + PartialOrd + std::ops::Add<Output = N>>(
    from: &mut VecDeque<T>,
    size_max: N,
    size: impl Fn(&T) -> N,
) -> Vec<T> {
    let mut sum = N::default();
    let fits = |one: &&T| {
        sum = sum + size(one);
        sum <= size_max
    };
    let count = from.iter().take_while(fits).count().max(1);
    from.drain(..count.min(from.len())).collect()
}

impl Selection {
    /// Whether this poll takes more.
    fn has_room(&self, criteria: &Criteria<'_>) -> bool {
        let samples = self.ready.iter().flatten();
        let tokens: usize = samples.map(|sample| sample.prompt.len() + sample.tokens.len()).sum();
        self.ready.len() < criteria.room && (tokens as u64) < TOKENS_AT_ONCE_MAX
    }

    async fn set_aside(
        &mut self,
        connection: &mut PgConnection,
        claim: &Claim,
        criteria: &Criteria<'_>,
        since: Option<Duration>,
    ) -> Result<(), sqlx::Error> {
        let oldest = since.map_or(Uuid::nil(), first_id_of_the_last);
        loop {
            let decided = sqlx::query_file!(
                "src/select/set_aside.sql",
                criteria.policy,
                criteria.arms,
                criteria.versions,
                claim.run,
                oldest,
                DECIDED_AT_ONCE_MAX
            )
            .fetch_all(&mut *connection)
            .await?;
            let full = decided.len() as i64 == DECIDED_AT_ONCE_MAX;
            for row in decided {
                *self.set_aside.entry(row.code).or_default() += 1;
            }
            if !full {
                return Ok(());
            }
        }
    }

    /// Finds the turns of candidates, and drops those that may not be trained on as far as tables
    /// tell. Returns the others, in the order of the candidates.
    async fn check(
        &mut self,
        connection: &mut PgConnection,
        claim: &Claim,
        criteria: &Criteria<'_>,
        candidates: Vec<Candidate>,
    ) -> Result<VecDeque<Queued>, sqlx::Error> {
        let mut queued = queued(connection, criteria, candidates).await?;
        let turns = queued.iter().flat_map(|one| &one.turns);
        let credited = turns.map(|(id, queued)| (*id, queued.credited)).collect();
        let ids: Vec<Uuid> = queued.iter().flat_map(|one| one.generations.iter().copied()).collect();
        let checks = Checks {
            versions: Some(criteria.versions),
            model_limits: criteria.model_limits,
            exhausted: criteria.exhausted,
            credited: criteria.credit.reads_turns().then_some(credited),
            answers: criteria.answers,
        };
        let faults = checks.faults(connection, &ids).await?;
        let mut coded = Coded::new();
        for one in &mut queued {
            one.drop_faulty(&faults, &mut coded);
            let (last, tokens) = (one.generations.last().copied(), one.tokens());
            if let Some(last) = last.filter(|_| tokens > criteria.trajectory_tokens_max) {
                let largest = self.too_large.filter(|(_, largest)| *largest >= tokens);
                self.too_large = largest.or(Some((last, tokens)));
                coded.entry(TOO_LARGE.into()).or_default().append(&mut one.generations);
            }
        }
        self.refuse(connection, claim.run, &coded).await?;
        queued.retain(|one| !one.generations.is_empty());
        Ok(queued.into())
    }

    /// Drops generations and counts them by code.
    async fn refuse(
        &mut self,
        connection: &mut PgConnection,
        run: Uuid,
        ids_by_code: &Coded,
    ) -> Result<(), sqlx::Error> {
        for (code, ids) in ids_by_code {
            let count = drop_generations(connection, run, ids, code).await?;
            *self.set_aside.entry(code.to_string()).or_default() += count;
        }
        Ok(())
    }
}

impl Queued {
    /// About as many as its samples have. 0 for a single generation.
    fn tokens(&self) -> u64 {
        let turns = self.generations.iter().filter_map(|id| self.turns.get(id));
        turns.map(|queued| queued.tokens).sum()
    }

    /// Moves generations with faults, or all of them, to `coded`.
    fn drop_faulty(&mut self, faults: &BTreeMap<Uuid, String>, coded: &mut Coded) {
        let mut codes = self.generations.iter().filter_map(|id| faults.get(id));
        let of_all = codes.find(|code| OF_EPISODES.contains(&code.as_str()));
        self.generations.retain(|id| match faults.get(id).or(of_all) {
            Some(code) => {
                coded.entry(Cow::Owned(code.clone())).or_default().push(*id);
                false
            }
            None => true,
        });
    }
}

/// What is queued of each of these trajectories, in their order.
async fn queued(
    connection: &mut PgConnection,
    criteria: &Criteria<'_>,
    candidates: Vec<Candidate>,
) -> Result<Vec<Queued>, sqlx::Error> {
    let mut queued: Vec<Queued> = Vec::new();
    let (mut episodes, mut places) = (Vec::new(), Vec::new());
    for candidate in candidates {
        let mut generations = vec![candidate.last];
        if candidate.episode_turns.is_some() {
            places.push(queued.len());
            episodes.append(&mut generations);
        }
        queued.push(Queued {
            generations,
            turns: BTreeMap::new(),
        });
    }
    if episodes.is_empty() {
        return Ok(queued);
    }
    let rows = sqlx::query_file!("src/select/turns.sql", &episodes, criteria.policy, criteria.arms)
        .fetch_all(connection)
        .await?;
    for rows in rows.chunk_by(|a, b| a.nth == b.nth) {
        // Retention deletes the oldest turns first.
        let turns_max = rows
            .iter()
            .map(|row| usize::try_from(row.episode_turns).unwrap_or(0))
            .max();
        let deleted = turns_max.unwrap_or(0).saturating_sub(rows.len());
        let mut rewards = vec![None; deleted];
        rewards.extend(rows.iter().map(|row| row.turn_reward));
        let rewards: std::sync::Arc<[Option<f64>]> = rewards.into();
        let place = rows.first().and_then(|row| usize::try_from(row.nth - 1).ok());
        let place = place.and_then(|nth| places.get(nth));
        let Some(episode) = place.and_then(|place| queued.get_mut(*place)) else {
            continue;
        };
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.is_queued) {
            let turn = Turn {
                episode: row.episode_id,
                index: deleted + index,
                rewards: rewards.clone(),
            };
            let credited = criteria.credit.of(criteria.discount, "", row.reward, Some(&turn)).value;
            let queued = QueuedTurn {
                turn,
                tokens: row.tokens.unsigned_abs(),
                credited,
            };
            episode.generations.push(row.id);
            episode.turns.insert(row.id, queued);
        }
    }
    Ok(queued)
}

/// The samples of those that could be read as a whole, and what is broken of them.
fn assemble(chosen: Vec<Queued>, read: Assembled, versions: &[i64]) -> (Vec<Vec<Sample>>, Coded) {
    let samples = read.samples.into_iter().map(|sample| (sample.generation, sample));
    let mut samples: BTreeMap<Uuid, Sample> = samples.collect();
    let broken = read.broken.into_iter();
    let broken = broken.flat_map(|(code, ids)| ids.into_iter().map(move |id| (id, code.clone())));
    let mut broken: BTreeMap<Uuid, Cow<'static, str>> = broken.collect();
    let (mut whole, mut coded) = (Vec::new(), Coded::new());
    for mut one in chosen {
        let is_read = |id: &Uuid| samples.contains_key(id) || broken.contains_key(id);
        if !one.generations.iter().all(is_read) {
            continue;
        }
        let mut turns = Vec::new();
        for id in &one.generations {
            if let Some(mut sample) = samples.remove(id) {
                sample.turn = one.turns.remove(id).map(|queued| queued.turn);
                let steps = versions.iter().position(|version| *version == sample.version);
                sample.staleness = steps.unwrap_or(versions.len());
                turns.push(sample);
            } else if let Some(code) = broken.remove(id) {
                coded.entry(code).or_default().push(*id);
            }
        }
        if !turns.is_empty() {
            whole.push(turns);
        }
    }
    (whole, coded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    fn episode(ids: &[u128]) -> Queued {
        let turn = |(index, n): (usize, &u128)| {
            let turn = Turn {
                episode: id(100),
                index,
                rewards: vec![None; ids.len()].into(),
            };
            let queued = QueuedTurn {
                turn,
                tokens: 10,
                credited: 0.0,
            };
            (id(*n), queued)
        };
        Queued {
            generations: ids.iter().map(|n| id(*n)).collect(),
            turns: ids.iter().enumerate().map(turn).collect(),
        }
    }

    fn sample(n: u128, version: i64) -> Sample {
        Sample {
            generation: id(n),
            version,
            ..Sample::example()
        }
    }

    #[test]
    fn a_faulty_turn_is_dropped_alone_and_a_fault_of_the_episode_drops_the_others_too() {
        let mut coded = Coded::new();
        let mut one = episode(&[1, 2, 3]);
        one.drop_faulty(&BTreeMap::from([(id(2), "greedy".into())]), &mut coded);
        assert_eq!(one.generations, [id(1), id(3)]);
        let mut two = episode(&[4, 5, 6]);
        let faults = [(id(4), "bad_signature".into()), (id(5), "quarantined_reward".into())];
        two.drop_faulty(&faults.into(), &mut coded);
        assert!(two.generations.is_empty());
        let want = [
            ("bad_signature", vec![id(4)]),
            ("greedy", vec![id(2)]),
            ("quarantined_reward", vec![id(5), id(6)]),
        ];
        assert_eq!(coded, want.map(|(code, ids)| (Cow::from(code), ids)).into());
    }

    #[test]
    fn an_episode_waits_as_a_whole_and_keeps_the_order_of_the_session() {
        let read = Assembled {
            samples: vec![sample(1, 7), sample(2, 5), sample(3, 7), sample(9, 7)],
            broken: Coded::from([("parent_missing".into(), vec![id(4), id(8)])]),
            unavailable: None,
            orphans: 0,
        };
        // turn 7 of the last one cannot be read yet
        let chosen = vec![episode(&[3, 4, 2]), episode(&[1]), episode(&[9, 8, 7])];
        let (whole, broken) = assemble(chosen, read, &[7, 6, 5]);
        let ids: Vec<Vec<Uuid>> = whole
            .iter()
            .map(|turns| turns.iter().map(|turn| turn.generation).collect())
            .collect();
        assert_eq!(ids, [vec![id(3), id(2)], vec![id(1)]]);
        assert_eq!(broken, [("parent_missing".into(), vec![id(4)])].into());
        let places = whole[0].iter().map(|sample| sample.turn.as_ref().unwrap().index);
        assert_eq!(places.collect::<Vec<_>>(), [0, 2]);
        let staleness = whole[0].iter().map(|sample| sample.staleness);
        assert_eq!(staleness.collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn as_many_are_taken_as_fit_but_at_least_one() {
        let mut sizes = VecDeque::from([4_u64, 1, 9, 2]);
        let mut next = || take(&mut sizes, 5, |size| *size);
        assert_eq!([next(), next(), next(), next()], [vec![4, 1], vec![9], vec![2], vec![]]);
    }
}
