//! `--control`: the answers that developers give are permuted among their suggestions. There are as
//! many accepts and rejects as before, but they carry no information, so a correct learner finds no
//! difference.

use std::sync::{Mutex, PoisonError};

use crate::{random::Draws, stats::Reaction};

/// Answers that wait for a suggestion.
const POOL: usize = 64;

/// Permutes answers among the suggestions that are answered.
#[derive(Debug)]
pub struct Shuffle(Mutex<(Draws, Vec<Reaction>)>);

impl Shuffle {
    pub fn new(seed: u64) -> Self {
        let draws = Draws::new("springtide demo control 1", &[seed]);
        Self(Mutex::new((draws, Vec::with_capacity(POOL))))
    }

    /// Takes a developer's reaction and returns the reaction of an earlier suggestion. Each one
    /// comes out once, except the last ones. While the pool fills, copies come out.
    pub fn swap(&self, reaction: Reaction) -> Reaction {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (draws, pool) = &mut *state;
        if pool.is_empty() {
            pool.push(reaction);
            return reaction;
        }
        let at = draws.below(pool.len());
        if pool.len() < POOL {
            pool.push(reaction);
            pool[at]
        } else {
            std::mem::replace(&mut pool[at], reaction)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_keep_their_frequency_and_lose_their_meaning() {
        let shuffle = Shuffle::new(1);
        let n = 6000;
        let (mut accepted, mut agree) = (0, 0);
        for i in 0..n {
            let reaction = if i % 3 == 0 { Reaction::Right } else { Reaction::Wrong };
            let answer = shuffle.swap(reaction);
            accepted += usize::from(answer == Reaction::Right);
            agree += usize::from(answer == reaction);
        }
        assert!(accepted.abs_diff(n / 3) <= POOL, "{accepted}");
        // Of independent answers 1/9 + 4/9 agree.
        assert!(agree.abs_diff(n * 5 / 9) < 150, "{agree}");
    }
}
