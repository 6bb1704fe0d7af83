//! Which offline runs this process works on, side by side, and which of them gives way.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use uuid::Uuid;

/// The runs that are worked on, with their priorities.
#[derive(Debug, Default)]
pub(crate) struct Working {
    /// `None`: it never gives way.
    priorities: Mutex<BTreeMap<Uuid, Option<i32>>>,
}

/// Keeps a run in [`Working`] until it is dropped.
#[derive(Debug)]
pub(crate) struct Begun<'a> {
    working: &'a Working,
    run: Uuid,
}

impl Working {
    /// Begins the first of these runs that is not worked on yet.
    pub fn begin<T>(&self, runs: Vec<(Uuid, Option<i32>, T)>) -> Option<(Begun<'_>, Uuid, T)> {
        let mut priorities = self.lock();
        let (run, priority, of_run) = runs.into_iter().find(|(run, ..)| !priorities.contains_key(run))?;
        priorities.insert(run, priority);
        Some((Begun { working: self, run }, run, of_run))
    }

    /// Whether `run` must give way: of the queued runs with a higher priority, more wait than get the
    /// places that are free or that runs of a lower priority than this one's give up first.
    pub fn gives_way(&self, run: Uuid, priority: i32, waiting: usize, places: usize) -> bool {
        let priorities = self.lock();
        // of equal priority, the younger one gives way first
        let give_way_first = priorities
            .iter()
            .filter_map(|(other, of_other)| Some((*other, (*of_other)?)))
            .filter(|(other, of_other)| *of_other < priority || *of_other == priority && *other > run)
            .count();
        waiting > places.saturating_sub(priorities.len()) + give_way_first
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Option<i32>>> {
        self.priorities.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.working.lock().remove(&self.run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    #[test]
    fn a_run_is_begun_once_at_a_time() {
        let working = Working::default();
        let runs = || vec![(run(1), Some(0), "a"), (run(2), Some(0), "b")];
        let (first, id, kind) = working.begin(runs()).unwrap();
        assert_eq!((id, kind), (run(1), "a"));
        let (second, id, _) = working.begin(runs()).unwrap();
        assert_eq!(id, run(2));
        assert!(working.begin(runs()).is_none());
        drop(first);
        assert_eq!(working.begin(runs()).unwrap().1, run(1));
        drop(second);
    }

    #[test]
    fn runs_of_the_lowest_priority_give_way_first_and_no_more_than_needed() {
        let working = Working::default();
        let _begun: Vec<_> = [(1, Some(0)), (2, Some(0)), (3, Some(5)), (4, None)]
            .map(|(n, priority)| working.begin(vec![(run(n), priority, ())]).unwrap())
            .into();
        let who = |waiting, places| -> Vec<u128> {
            let all = [(1, 0), (2, 0), (3, 5)];
            let giving = all
                .into_iter()
                .filter(|(n, priority)| working.gives_way(run(*n), *priority, waiting, places));
            giving.map(|(n, _)| n).collect()
        };
        assert!(who(1, 5).is_empty(), "a place is free");
        assert_eq!(who(1, 4), [2], "the younger one of the lowest priority");
        assert_eq!(who(2, 4), [1, 2]);
        assert_eq!(who(2, 5), [2]);
        assert_eq!(who(3, 4), [1, 2, 3], "an evaluation goes on");
        assert!(who(0, 1).is_empty(), "nobody waits");
    }
}
