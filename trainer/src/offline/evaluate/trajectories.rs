//! The trajectories of a dataset while their generations are scored.

use super::{Score, User};
use runs::dataset::Member;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use uuid::Uuid;

pub(super) struct Trajectories<'a> {
    members: &'a [Member],
    /// The index of each generation's trajectory.
    of: HashMap<Uuid, usize>,
    scores: Vec<Score>,
    users: Vec<User>,
    /// Trajectories with a generation that may not be used, by its code.
    refused: BTreeMap<String, BTreeSet<usize>>,
}

impl<'a> Trajectories<'a> {
    pub(super) fn new(members: &'a [Member]) -> Self {
        let of = members.iter().enumerate();
        let of = of.flat_map(|(at, member)| member.generations.iter().map(move |id| (*id, at)));
        Trajectories {
            members,
            of: of.collect(),
            scores: vec![Score::default(); members.len()],
            users: vec![User::default(); members.len()],
            refused: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, generation: Uuid, (tenant, user): (&str, &str), score: &Score) {
        let Some(&at) = self.of.get(&generation) else { return };
        self.scores[at].add(score);
        self.users[at] = (tenant.to_owned(), user.to_owned());
    }

    pub(super) fn refuse(&mut self, refused: BTreeMap<String, Vec<Uuid>>) {
        for (code, ids) in refused {
            let trajectories = ids.iter().filter_map(|id| self.of.get(id).copied());
            self.refused.entry(code).or_default().extend(trajectories);
        }
    }

    /// Those of which every generation was scored.
    pub(super) fn whole(&self) -> impl Iterator<Item = (&'a Member, &User, &Score)> {
        let scored = self.members.iter().zip(&self.users).zip(&self.scores);
        scored
            .map(|((member, user), score)| (member, user, score))
            .filter(|(member, _, score)| member.generations.len() == score.generations)
    }

    /// How many trajectories were refused, by code, and how many of the others are not whole.
    pub(super) fn left_out(&self) -> (BTreeMap<String, usize>, usize) {
        let any: BTreeSet<usize> = self.refused.values().flatten().copied().collect();
        let refused = self.refused.iter().map(|(code, of)| (code.clone(), of.len()));
        let missing = self.members.len() - any.len() - self.whole().count();
        (refused.collect(), missing)
    }
}
