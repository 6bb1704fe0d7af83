//! `--control`: users whose answers say nothing. Each answer is another shown suggestion's, so that accepts and rejects are
//! as many as they would be and belong to nothing in particular. Whoever "learns" from these has a fault somewhere.

use std::sync::Mutex;

use super::{draw::Draws, tally::Verdict};

/// Answers that wait for a suggestion to belong to.
const POOL: usize = 64;

/// Permutes answers among the suggestions that are shown.
#[derive(Debug)]
pub struct Permutation(Mutex<(Draws, Vec<Verdict>)>);

impl Permutation {
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new((
            Draws::new("springtide demo control 1", &[seed]),
            Vec::with_capacity(POOL + 1),
        )))
    }

    /// Takes in what a developer thinks of a suggestion and gives out what one thought of an earlier suggestion. Every
    /// verdict that goes in comes out once, but for the last ones; while the pool fills, copies come out, and the very first
    /// is its own.
    pub fn swap(&self, verdict: Verdict) -> Verdict {
        let mut state = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (draws, pool) = &mut *state;
        if pool.is_empty() {
            pool.push(verdict);
            return verdict;
        }
        let at = draws.below(pool.len());
        if pool.len() < POOL {
            pool.push(verdict);
            pool[at]
        } else {
            std::mem::replace(&mut pool[at], verdict)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_keep_their_frequency_and_lose_their_meaning() {
        let permutation = Permutation::new(1);
        let n = 6000;
        let (mut accepted, mut agree) = (0, 0);
        for i in 0..n {
            let verdict = if i % 3 == 0 { Verdict::Right } else { Verdict::Wrong };
            let told = permutation.swap(verdict);
            accepted += usize::from(told == Verdict::Right);
            agree += usize::from(told == verdict);
        }
        assert!(accepted.abs_diff(n / 3) <= POOL, "{accepted}");
        // Of independent answers 1/9 + 4/9 agree.
        assert!(agree.abs_diff(n * 5 / 9) < 150, "{agree}");
    }
}
