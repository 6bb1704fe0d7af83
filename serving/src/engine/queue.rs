//! Who gets the next free slot: production before rollouts, then the caller's priority, then first come. Bounded; a full
//! queue of rollouts makes room for production. Pure data, no clock, no threads.

use super::Class;
use std::collections::BTreeMap;

/// Smaller comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: Class,
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

/// What became of a push.
#[derive(Debug, PartialEq, Eq)]
pub enum Pushed<T> {
    Queued,
    /// Queued, and this one lost its place.
    Displaced(T),
    /// Refused: nothing in the queue is of a lower class.
    Full(T),
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

    /// How many items of `class` would be taken now.
    pub fn room(&self, class: Class) -> usize {
        let lower = self.waiting.keys().rev().take_while(|rank| rank.class > class).count();
        self.capacity.saturating_sub(self.waiting.len()) + lower
    }

    /// Puts `item` in its place. Only a lower class is displaced, never a lower priority of the same class.
    pub fn push(&mut self, class: Class, priority: i32, item: T) -> Pushed<T> {
        let displaced = if self.waiting.len() >= self.capacity {
            match self.waiting.last_entry() {
                Some(last) if last.key().class > class => Some(last.remove()),
                _ => return Pushed::Full(item),
            }
        } else {
            None
        };
        let rank = Rank {
            class,
            priority,
            arrival: self.arrivals,
        };
        self.arrivals += 1;
        self.waiting.insert(rank, item);
        match displaced {
            Some(item) => Pushed::Displaced(item),
            None => Pushed::Queued,
        }
    }

    /// Takes the first item that `admissible` accepts: one version without a free slot does not hold up another's.
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
    use Class::{Background, Production};

    fn order(queue: &mut Queue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.take(|_| true)).collect()
    }

    #[test]
    fn production_goes_first_then_priority_then_arrival() {
        let mut queue = Queue::new(9);
        queue.push(Background, -5, "rollout urgent");
        queue.push(Background, 0, "rollout");
        queue.push(Production, 7, "user late");
        queue.push(Production, 0, "user a");
        queue.push(Production, 0, "user b");
        assert_eq!(
            order(&mut queue),
            ["user a", "user b", "user late", "rollout urgent", "rollout"]
        );
    }

    #[test]
    fn a_full_queue_refuses_its_equals() {
        let mut queue = Queue::new(1);
        assert_eq!(queue.push(Production, 0, "a"), Pushed::Queued);
        assert_eq!(queue.push(Production, -9, "b"), Pushed::Full("b"));
        assert_eq!(queue.push(Background, -9, "c"), Pushed::Full("c"));
        assert_eq!(queue.len(), 1);
    }

    #[test]
    fn production_displaces_the_last_rollout_of_a_full_queue() {
        let mut queue = Queue::new(2);
        queue.push(Background, 1, "second");
        queue.push(Background, 0, "first");
        assert_eq!((queue.room(Production), queue.room(Background)), (2, 0));
        assert_eq!(queue.push(Production, 0, "user"), Pushed::Displaced("second"));
        assert_eq!(queue.room(Production), 1);
        assert_eq!(order(&mut queue), ["user", "first"]);
    }

    #[test]
    fn what_cannot_start_yet_does_not_hold_up_the_rest() {
        let mut queue = Queue::new(4);
        queue.push(Production, 0, "busy version");
        queue.push(Background, 0, "free version");
        assert_eq!(queue.take(|item| *item != "busy version"), Some("free version"));
        assert_eq!(queue.take(|item| *item != "busy version"), None);
        assert_eq!(queue.drain().collect::<Vec<_>>(), ["busy version"]);
        assert_eq!(queue.len(), 0);
    }
}
