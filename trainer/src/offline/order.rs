//! The order in which a run trains on what its dataset has.
//!
//! The order of a pass is by a hash of the seed, the pass and the id of a unit: a trajectory, or a pair
//! of them. Each step notes the unit that it ended with, and a restart goes on behind its hash. So every
//! unit that is still there has its turn once in a pass, whatever has expired meanwhile.

use crate::executor::Executor;
use anyhow::Context;
use runs::dataset::Member;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Where a run is in its dataset. A step has it in `notes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Position {
    /// From 0.
    pub pass: u64,
    /// The id of the unit that was trained on last. `None`: the pass begins.
    after: Option<Uuid>,
}

/// The name of the position in a step's notes.
pub(super) const POSITION: &str = "position";

/// Where the run's last step ended.
pub(super) async fn position(executor: &Executor<'_>) -> anyhow::Result<Position> {
    let noted = sqlx::query_scalar!(
        "select metrics -> 'notes' -> $3::text from step where run_id = $1 and step = $2",
        executor.claim.run,
        executor.steps_done,
        POSITION
    )
    .fetch_optional(&executor.trainer.pool)
    .await
    .context("read where the run's last step ended")?;
    let noted = noted.flatten().map(serde_json::from_value).transpose();
    Ok(noted
        .context("read where the run's last step ended")?
        .unwrap_or_default())
}

/// What a run trains on at once.
pub(super) trait Unit: Clone {
    /// By which it is known. Stays the same as long as it is there.
    fn id(&self) -> Uuid;
}

impl Unit for Member {
    /// Its last generation. Episodes are in a dataset as a whole, so it stays the same.
    fn id(&self) -> Uuid {
        self.generations.last().copied().unwrap_or_default()
    }
}

/// The units of a dataset in the order in which they are trained on.
pub(super) struct Order<U> {
    units: Vec<U>,
    seed: u64,
    /// The pass that `units` are in the order of.
    sorted_for: Option<u64>,
}

impl<U: Unit> Order<U> {
    pub(super) fn new(units: Vec<U>, seed: u64) -> Self {
        Order {
            units,
            seed,
            sorted_for: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    /// What the pass has after a position, which moves to the next pass where that is nothing.
    pub(super) fn rest(&mut self, position: &mut Position) -> &[U] {
        if self.after(position).is_empty() {
            *position = Position {
                pass: position.pass + 1,
                after: None,
            };
        }
        self.after(position)
    }

    /// The next units, `count` or what the pass still has. The position moves behind them.
    pub(super) fn take(&mut self, position: &mut Position, count: usize) -> Vec<U> {
        let rest = self.rest(position);
        let taken = rest[..count.max(1).min(rest.len())].to_vec();
        position.after = taken.last().map(Unit::id).or(position.after);
        taken
    }

    fn after(&mut self, position: &Position) -> &[U] {
        let key = |id| key(self.seed, position.pass, id);
        if self.sorted_for != Some(position.pass) {
            self.units.sort_by_cached_key(|unit| key(unit.id()));
            self.sorted_for = Some(position.pass);
        }
        let done = position.after.map(key);
        let begin = self.units.partition_point(|unit| Some(key(unit.id())) <= done);
        &self.units[begin..]
    }
}

/// Where a unit stands in a pass.
fn key(seed: u64, pass: u64, id: Uuid) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(&seed.to_le_bytes())
        .update(&pass.to_le_bytes())
        .update(id.as_bytes());
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn member(id: u128) -> Member {
        Member {
            episode: None,
            generations: vec![Uuid::from_u128(id)],
        }
    }

    fn members(count: u128) -> Vec<Member> {
        (0..count).map(member).collect()
    }

    fn numbers(members: &[Member]) -> Vec<u128> {
        members.iter().map(|member| member.id().as_u128()).collect()
    }

    #[test]
    fn each_pass_has_every_trajectory_once_in_another_order() {
        let mut order = Order::new(members(10), 7);
        assert_eq!(order.len(), 10);
        let mut position = Position::default();
        let mut sizes = Vec::new();
        let mut pass = |number: u64| -> Vec<u128> {
            let mut all = Vec::new();
            for _ in 0..3 {
                let batch = order.take(&mut position, 4);
                assert_eq!(position.pass, number);
                sizes.push(batch.len());
                all.extend(numbers(&batch));
            }
            all
        };
        let (first, second) = (pass(0), pass(1));
        for pass in [&first, &second] {
            let mut sorted = pass.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(first, second);
        assert_eq!(sizes, [4, 4, 2, 4, 4, 2]);
        let other_seed = Order::new(members(10), 8).take(&mut Position::default(), 4);
        assert_ne!(numbers(&other_seed), first[..4]);
    }

    #[test]
    fn a_restart_goes_on_behind_the_last_trajectory_although_others_have_expired() {
        let seed = 3;
        let mut whole = Order::new(members(40), seed);
        let all = numbers(&whole.take(&mut Position::default(), 40));
        // after two batches of 7, trajectories expire that were trained on, the last one among them, and
        // some that were not
        let mut order = Order::new(members(40), seed);
        let mut position = Position::default();
        let mut trained = numbers(&order.take(&mut position, 7));
        trained.extend(numbers(&order.take(&mut position, 7)));
        assert_eq!(trained, all[..14]);
        let expired: BTreeSet<u128> = [0, 3, 5, 9, 13, 16, 30].into_iter().map(|at: usize| all[at]).collect();
        let noted = serde_json::to_value(position).unwrap();
        let mut position: Position = serde_json::from_value(noted).unwrap();
        let left: Vec<Member> = members(40)
            .into_iter()
            .filter(|member| !expired.contains(&member.id().as_u128()))
            .collect();
        let mut order = Order::new(left, seed);
        while position.pass == 0 {
            let batch = order.take(&mut position, 7);
            if position.pass == 0 {
                trained.extend(numbers(&batch));
            }
        }
        let expected: Vec<u128> = all
            .iter()
            .enumerate()
            .filter(|(at, id)| *at < 14 || !expired.contains(id))
            .map(|(_, id)| *id)
            .collect();
        assert_eq!(trained, expected, "none is skipped, none comes twice");
    }

    #[test]
    fn an_empty_dataset_has_empty_batches() {
        let mut position = Position::default();
        assert_eq!(Order::<Member>::new(vec![], 1).take(&mut position, 4), []);
        assert_eq!(position, Position { pass: 1, after: None });
    }

    #[test]
    fn a_run_killed_after_any_step_trains_on_the_same_in_the_same_order() {
        let sizes = [5, 1, 7, 3, 9, 2, 40, 4];
        let steps = |killed_after: Option<usize>| {
            let (mut order, mut position) = (Order::new(members(23), 11), Position::default());
            let mut trained = Vec::new();
            for (step, size) in sizes.into_iter().enumerate() {
                trained.push(numbers(&order.take(&mut position, size)));
                if killed_after == Some(step) {
                    let noted = serde_json::to_string(&position).unwrap();
                    position = serde_json::from_str(&noted).unwrap();
                    let mut stored = members(23);
                    stored.reverse(); // a database promises no order
                    order = Order::new(stored, 11);
                }
            }
            trained
        };
        let whole = steps(None);
        assert!(
            whole.iter().map(Vec::len).sum::<usize>() > 2 * 23,
            "over the ends of passes"
        );
        for step in 0..sizes.len() {
            assert_eq!(steps(Some(step)), whole, "killed after step {step}");
        }
    }
}
