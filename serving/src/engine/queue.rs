//! Decides who gets the next free slot: production before background, then the caller's priority,
//! then arrival.
//!
//! The queue is bounded. When it is full, a production request displaces the last background
//! request. Pure data: no clock, no threads.

use super::TrafficClass;
use std::collections::BTreeMap;

/// Smaller comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: TrafficClass,
    priority: i32,
    arrival: u64,
}

/// A bounded queue of `T`.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: BTreeMap<Rank, T>,
    arrivals: u64,
    capacity: usize,
}

impl<T> Queue<T> {
    pub fn new(capacity: usize) -> Self {
        Queue {
            waiting: BTreeMap::new(),
            arrivals: 0,
            capacity,
        }
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many items of `class` the queue would accept now.
    pub fn room(&self, class: TrafficClass) -> usize {
        let lower = self.waiting.keys().rev().take_while(|rank| rank.class > class).count();
        self.capacity.saturating_sub(self.waiting.len()) + lower
    }

    /// Queues `item`; returns the item that it displaced, if any. `Err`: the queue is full, and
    /// only a lower class can be displaced.
    pub fn push(&mut self, class: TrafficClass, priority: i32, item: T) -> Result<Option<T>, T> {
        let mut displaced = None;
        if self.waiting.len() >= self.capacity {
            match self.waiting.last_entry() {
                Some(last) if last.key().class > class => displaced = Some(last.remove()),
                _ => return Err(item),
            }
        }
        let rank = Rank {
            class,
            priority,
            arrival: self.arrivals,
        };
        self.arrivals += 1;
        self.waiting.insert(rank, item);
        Ok(displaced)
    }

    /// Takes the first item that `admissible` accepts, so that a version without a free slot blocks
    /// no other version.
    pub fn take(&mut self, mut admissible: impl FnMut(&T) -> bool) -> Option<T> {
        let rank = self
            .waiting
            .iter()
            .find(|(_, item)| admissible(item))
            .map(|(rank, _)| *rank)?;
        self.waiting.remove(&rank)
    }

    /// Takes everything, in order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        std::mem::take(&mut self.waiting).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TrafficClass::{Background, Production};

    fn order(queue: &mut Queue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.take(|_| true)).collect()
    }

    #[test]
    fn production_goes_first_then_priority_then_arrival() {
        let mut queue = Queue::new(9);
        queue.push(Background, -5, "rollout urgent").unwrap();
        queue.push(Background, 0, "rollout").unwrap();
        queue.push(Production, 7, "user late").unwrap();
        queue.push(Production, 0, "user a").unwrap();
        queue.push(Production, 0, "user b").unwrap();
        assert_eq!(
            order(&mut queue),
            ["user a", "user b", "user late", "rollout urgent", "rollout"]
        );
    }

    #[test]
    fn a_full_queue_refuses_requests_of_the_same_or_a_lower_class() {
        let mut queue = Queue::new(1);
        assert_eq!(queue.push(Production, 0, "a"), Ok(None));
        assert_eq!(queue.push(Production, -9, "b"), Err("b"));
        assert_eq!(queue.push(Background, -9, "c"), Err("c"));
        assert_eq!(queue.len(), 1);
    }

    #[test]
    fn production_displaces_the_last_rollout_of_a_full_queue() {
        let mut queue = Queue::new(2);
        queue.push(Background, 1, "second").unwrap();
        queue.push(Background, 0, "first").unwrap();
        assert_eq!((queue.room(Production), queue.room(Background)), (2, 0));
        assert_eq!(queue.push(Production, 0, "user"), Ok(Some("second")));
        assert_eq!(queue.room(Production), 1);
        assert_eq!(order(&mut queue), ["user", "first"]);
    }

    #[test]
    fn a_request_that_cannot_start_does_not_block_the_others() {
        let mut queue = Queue::new(4);
        queue.push(Production, 0, "busy version").unwrap();
        queue.push(Background, 0, "free version").unwrap();
        assert_eq!(queue.take(|item| *item != "busy version"), Some("free version"));
        assert_eq!(queue.take(|item| *item != "busy version"), None);
        assert_eq!(queue.drain().collect::<Vec<_>>(), ["busy version"]);
        assert_eq!(queue.len(), 0);
    }
}
