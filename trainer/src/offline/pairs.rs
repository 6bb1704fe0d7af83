//! Which trajectories of a dataset are compared with each other.
//!
//! Of the trajectories of one prompt, or of one group, the best is paired with the worst, the second
//! best with the second worst, and so on while their rewards differ enough. So each trajectory is in one
//! pair at most, and the same dataset gives the same pairs.

use super::order::Unit;
use runs::dataset::Member;
use serde::Serialize;
use std::collections::BTreeMap;
use uuid::Uuid;

/// A trajectory and one that is worse.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pair {
    pub chosen: Member,
    pub rejected: Member,
}

impl Unit for Pair {
    fn id(&self) -> Uuid {
        self.chosen.id()
    }
}

/// Trajectories that are in no pair, by the reason.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub(super) struct Unpaired {
    /// No other one is left with the same prompt, or in the same group.
    pub no_partner: usize,
    /// Their rewards differ by less than the margin.
    pub margin: usize,
    /// The texts are the same: one cannot be preferred.
    pub same_text: usize,
    /// Not sampled in a group.
    pub no_group: usize,
    /// Their first turn may not be used, by code.
    pub refused: BTreeMap<String, usize>,
    /// Their first turn is gone meanwhile, or has a parent that is not stored yet.
    pub missing: usize,
}

/// Trajectories by what makes them comparable.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    by_key: BTreeMap<Vec<u8>, Vec<Candidate>>,
    pub unpaired: Unpaired,
}

#[derive(Debug)]
pub(super) struct Candidate {
    pub reward: f64,
    pub member: Member,
    /// The sampled ids of its first turn.
    pub tokens: Vec<u32>,
}

impl Candidate {
    fn has_the_text_of(&self, other: &Candidate) -> bool {
        let is_one_turn = |one: &Candidate| one.member.generations.len() == 1;
        is_one_turn(self) && is_one_turn(other) && self.tokens == other.tokens
    }
}

impl Candidates {
    /// `key`: the same for trajectories that may be a pair.
    pub(super) fn add(&mut self, key: Vec<u8>, candidate: Candidate) {
        self.by_key.entry(key).or_default().push(candidate);
    }

    /// All pairs whose rewards differ, and by at least `margin`.
    pub(super) fn pair(self, margin: f64) -> (Vec<Pair>, Unpaired) {
        let mut pairs = Vec::new();
        let mut unpaired = self.unpaired;
        for mut same in self.by_key.into_values() {
            same.sort_by(|a, b| {
                let by_reward = a.reward.total_cmp(&b.reward);
                by_reward.then_with(|| a.member.id().cmp(&b.member.id()))
            });
            let mut rest = same.as_slice();
            while let [low, between @ .., high] = rest {
                if high.reward - low.reward < margin || high.reward <= low.reward {
                    break;
                }
                match high.has_the_text_of(low) {
                    true => unpaired.same_text += 2,
                    false => pairs.push(Pair {
                        chosen: high.member.clone(),
                        rejected: low.member.clone(),
                    }),
                }
                rest = between;
            }
            match rest.len() {
                1 => unpaired.no_partner += 1,
                left => unpaired.margin += left,
            }
        }
        (pairs, unpaired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: u128) -> Member {
        Member {
            episode: None,
            generations: vec![Uuid::from_u128(id)],
        }
    }

    fn candidate(id: u128, reward: f64) -> Candidate {
        Candidate {
            reward,
            member: member(id),
            tokens: vec![id as u32],
        }
    }

    #[test]
    fn the_same_text_twice_is_no_pair() {
        let mut candidates = Candidates::default();
        for (id, reward) in [(1, 0.0), (2, 1.0)] {
            let tokens = vec![7, 8];
            candidates.add(
                vec![1],
                Candidate {
                    tokens,
                    ..candidate(id, reward)
                },
            );
        }
        let (pairs, unpaired) = candidates.pair(0.0);
        assert!(pairs.is_empty());
        assert_eq!(unpaired.same_text, 2);
    }

    fn paired(rewards: &[f64], margin: f64) -> (Vec<(u128, u128)>, Unpaired) {
        let mut candidates = Candidates::default();
        for (id, reward) in rewards.iter().enumerate() {
            candidates.add(vec![1], candidate(id as u128, *reward));
        }
        let (pairs, unpaired) = candidates.pair(margin);
        let ids = |pair: &Pair| (pair.chosen.id().as_u128(), pair.rejected.id().as_u128());
        (pairs.iter().map(ids).collect(), unpaired)
    }

    #[test]
    fn the_best_is_paired_with_the_worst_and_each_once() {
        let (pairs, unpaired) = paired(&[0.5, 1.0, 0.0, 0.75], 0.0);
        assert_eq!(pairs, [(1, 2), (3, 0)]);
        assert_eq!(unpaired, Unpaired::default());
    }

    #[test]
    fn what_is_in_no_pair_is_counted_by_its_reason() {
        let (pairs, unpaired) = paired(&[1.0, 0.0, 0.5], 0.0);
        assert_eq!((pairs.len(), unpaired.no_partner, unpaired.margin), (1, 1, 0));
        let (pairs, unpaired) = paired(&[1.0, 0.4, 0.5, 0.0], 0.2);
        assert_eq!((pairs.len(), unpaired.no_partner, unpaired.margin), (1, 0, 2));
        let (pairs, unpaired) = paired(&[0.5, 0.5], 0.0);
        assert_eq!((pairs.len(), unpaired.margin), (0, 2), "equal rewards say nothing");
        let (pairs, _) = paired(&[0.5, 0.7], 0.2 - 1e-12);
        assert_eq!(pairs.len(), 1);
    }

    #[test]
    fn trajectories_of_other_prompts_are_no_pair() {
        let mut candidates = Candidates::default();
        candidates.add(vec![1], candidate(1, 1.0));
        candidates.add(vec![2], candidate(2, 0.0));
        let (pairs, unpaired) = candidates.pair(0.0);
        assert_eq!((pairs.len(), unpaired.no_partner), (0, 2));
    }
}
