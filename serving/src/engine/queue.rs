//! Decides who gets the next free slot: production before background, then the caller's priority,
//! then the tenant that has the fewest slots (of several, the one whose last turn is longest ago),
//! then its key by the same rule, then arrival.
//!
//! The queue is bounded, and no caller can fill it. When it is full, a production request takes the
//! place of a background request. Otherwise a caller takes the place of the one that holds most
//! places, if that one has at least two more. So a single caller may use the whole queue, and all who
//! want more than there is end up with equal shares. (This is the rule "longest queue drop" of
//! shared-memory switches.) Pure data: no clock, no threads.

use super::TrafficClass;
use super::caller::{Caller, Tally, Turns};
use std::collections::BTreeMap;

/// Leaves room for what comes back.
const FIRST_ARRIVAL: u64 = u64::MAX / 2;

/// Smaller comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: TrafficClass,
    priority: i32,
    arrival: u64,
}

#[derive(Debug)]
struct Waiting<T> {
    caller: Caller,
    item: T,
}

/// A bounded queue of `T`.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: BTreeMap<Rank, Waiting<T>>,
    /// How many places each caller holds.
    held: BTreeMap<TrafficClass, Tally>,
    /// At least of the callers that wait.
    turns: Turns,
    arrivals: u64,
    /// Items that came back, before all arrivals.
    returns: u64,
    capacity: usize,
}

/// What a caller has already. Whoever has least comes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Had {
    slots_of_tenant: usize,
    turn_of_tenant: u64,
    slots: usize,
    turn: u64,
}

/// There is no room, and nobody has to make some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

impl<T> Queue<T> {
    pub fn new(capacity: usize) -> Self {
        Queue {
            waiting: BTreeMap::new(),
            held: BTreeMap::new(),
            turns: Turns::default(),
            arrivals: FIRST_ARRIVAL,
            returns: 0,
            capacity,
        }
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many items of a class wait.
    pub fn waiting(&self, class: TrafficClass) -> usize {
        self.held.get(&class).map_or(0, Tally::all)
    }

    /// Puts an item that was taken before everything that its caller has waiting. Nobody makes room: it
    /// had a place before.
    pub fn put_back(&mut self, class: TrafficClass, priority: i32, caller: &Caller, item: T) {
        self.returns += 1;
        let rank = Rank {
            class,
            priority,
            arrival: FIRST_ARRIVAL - self.returns,
        };
        let caller = caller.clone();
        self.insert(rank, Waiting { caller, item });
    }

    /// What waits, in order of class, priority and arrival.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.values().map(|waiting| &waiting.item)
    }

    /// Queues all `items` of a caller and returns the items that lost their places to them, or
    /// changes nothing.
    pub fn push(&mut self, class: TrafficClass, priority: i32, caller: &Caller, items: Vec<T>) -> Result<Vec<T>, Full> {
        let mut added = Vec::with_capacity(items.len());
        let mut displaced = Vec::new();
        for item in items {
            if self.waiting.len() >= self.capacity {
                let Some((rank, loser)) = self.loser(class, caller).and_then(|rank| self.remove(rank)) else {
                    for rank in added {
                        self.remove(rank);
                    }
                    for (rank, loser) in displaced {
                        self.insert(rank, loser);
                    }
                    return Err(Full);
                };
                displaced.push((rank, loser));
            }
            let rank = Rank {
                class,
                priority,
                arrival: self.arrivals,
            };
            self.arrivals += 1;
            let caller = caller.clone();
            self.insert(rank, Waiting { caller, item });
            added.push(rank);
        }
        Ok(displaced.into_iter().map(|(_, loser)| loser.item).collect())
    }

    /// Takes the next item that `admissible` accepts, so that a version without a free slot blocks no
    /// other version. `running`: the slots that each caller has.
    pub fn take(&mut self, running: &Tally, mut admissible: impl FnMut(&T) -> bool) -> Option<T> {
        let mut best: Option<(Rank, Had)> = None;
        // the callers of neighbors are often the same
        let mut last: Option<(&Caller, Had)> = None;
        for (rank, waiting) in &self.waiting {
            if let Some((best, least)) = best {
                let comes_later = (rank.class, rank.priority) != (best.class, best.priority);
                if comes_later || least == Had::default() {
                    break;
                }
            }
            let had = match last {
                Some((caller, had)) if *caller == waiting.caller => had,
                _ => self.had(running, &waiting.caller),
            };
            last = Some((&waiting.caller, had));
            if best.is_none_or(|(_, least)| had < least) && admissible(&waiting.item) {
                best = Some((*rank, had));
            }
        }
        let (_, taken) = self.remove(best?.0)?;
        if self.turns.remembered() > self.capacity {
            let held = &self.held;
            self.turns
                .keep_only(|caller| held.values().any(|held| held.of(caller).1 > 0));
        }
        self.turns.note(&taken.caller);
        Some(taken.item)
    }

    /// Takes all items that `gone` accepts.
    pub fn remove_if(&mut self, mut gone: impl FnMut(&T) -> bool) -> Vec<T> {
        let of_item = |(rank, waiting): (&Rank, &Waiting<T>)| gone(&waiting.item).then_some(*rank);
        let ranks: Vec<Rank> = self.waiting.iter().filter_map(of_item).collect();
        let removed = ranks.into_iter().filter_map(|rank| self.remove(rank));
        removed.map(|(_, waiting)| waiting.item).collect()
    }

    /// Takes everything, in order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.held.clear();
        std::mem::take(&mut self.waiting)
            .into_values()
            .map(|waiting| waiting.item)
    }

    /// Who makes room in a full queue: a lower class, or the caller that holds most places. It loses
    /// what would come last.
    fn loser(&self, class: TrafficClass, newcomer: &Caller) -> Option<Rank> {
        let (last, _) = self.waiting.last_key_value()?;
        let held = self.held.get(&last.class)?;
        let loser = match last.class > class {
            true => held.greediest()?,
            false => self.held.get(&class)?.gives_to(newcomer)?,
        };
        let lowest = last.class.max(class);
        let mut of_loser = self.waiting.iter().rev();
        of_loser
            .find(|(rank, waiting)| rank.class == lowest && waiting.caller == *loser)
            .map(|(rank, _)| *rank)
    }

    fn had(&self, running: &Tally, caller: &Caller) -> Had {
        let (slots_of_tenant, slots) = running.of(caller);
        let (turn_of_tenant, turn) = self.turns.of(caller);
        Had {
            slots_of_tenant,
            turn_of_tenant,
            slots,
            turn,
        }
    }

    fn insert(&mut self, rank: Rank, waiting: Waiting<T>) {
        self.held.entry(rank.class).or_default().add(&waiting.caller);
        self.waiting.insert(rank, waiting);
    }

    fn remove(&mut self, rank: Rank) -> Option<(Rank, Waiting<T>)> {
        let (rank, waiting) = self.waiting.remove_entry(&rank)?;
        if let Some(held) = self.held.get_mut(&rank.class) {
            held.remove(&waiting.caller);
        }
        Some((rank, waiting))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TrafficClass::{Background, Production};
    use proptest::prelude::*;
    use uuid::Uuid;

    fn caller(tenant: &str, key: u128) -> Caller {
        Caller::new(tenant, Some(Uuid::from_u128(key)))
    }

    /// One item of a caller that is alone.
    fn push(
        queue: &mut Queue<&'static str>,
        class: TrafficClass,
        priority: i32,
        item: &'static str,
    ) -> Result<Vec<&'static str>, Full> {
        queue.push(class, priority, &caller("a", 1), vec![item])
    }

    fn order(queue: &mut Queue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.take(&Tally::default(), |_| true)).collect()
    }

    /// The items that each caller has in the queue.
    fn shares(queue: &Queue<Caller>, callers: &[Caller]) -> Vec<usize> {
        let held = |caller: &Caller| {
            queue
                .waiting
                .values()
                .filter(|waiting| waiting.caller == *caller)
                .count()
        };
        callers.iter().map(held).collect()
    }

    #[test]
    fn production_goes_first_then_priority_then_arrival() {
        let mut queue = Queue::new(9);
        push(&mut queue, Background, -5, "rollout urgent").unwrap();
        push(&mut queue, Background, 0, "rollout").unwrap();
        push(&mut queue, Production, 7, "user late").unwrap();
        push(&mut queue, Production, 0, "user a").unwrap();
        push(&mut queue, Production, 0, "user b").unwrap();
        assert_eq!(
            order(&mut queue),
            ["user a", "user b", "user late", "rollout urgent", "rollout"]
        );
    }

    #[test]
    fn a_full_queue_refuses_requests_of_the_same_or_a_lower_class() {
        let mut queue = Queue::new(1);
        assert_eq!(push(&mut queue, Production, 0, "a"), Ok(vec![]));
        assert_eq!(push(&mut queue, Production, -9, "b"), Err(Full));
        assert_eq!(push(&mut queue, Background, -9, "c"), Err(Full));
        assert_eq!(queue.push(Background, -9, &caller("b", 1), vec!["d"]), Err(Full));
        assert_eq!(queue.len(), 1);
    }

    #[test]
    fn production_displaces_the_last_rollout_of_a_full_queue() {
        let mut queue = Queue::new(2);
        push(&mut queue, Background, 1, "second").unwrap();
        push(&mut queue, Background, 0, "first").unwrap();
        assert_eq!(push(&mut queue, Production, 0, "user"), Ok(vec!["second"]));
        assert_eq!(order(&mut queue), ["user", "first"]);
    }

    #[test]
    fn a_request_that_cannot_start_does_not_block_the_others() {
        let mut queue = Queue::new(4);
        push(&mut queue, Production, 0, "busy version").unwrap();
        push(&mut queue, Background, 0, "free version").unwrap();
        let none = Tally::default();
        assert_eq!(queue.take(&none, |item| *item != "busy version"), Some("free version"));
        assert_eq!(queue.take(&none, |item| *item != "busy version"), None);
        assert_eq!(queue.drain().collect::<Vec<_>>(), ["busy version"]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn items_that_are_removed_give_their_places_back() {
        let mut queue = Queue::new(2);
        push(&mut queue, Production, 0, "gone").unwrap();
        push(&mut queue, Background, 0, "stays").unwrap();
        assert_eq!(queue.remove_if(|item| *item == "gone"), ["gone"]);
        assert_eq!(push(&mut queue, Production, 0, "next"), Ok(vec![]));
        assert_eq!(order(&mut queue), ["next", "stays"]);
    }

    #[test]
    fn one_caller_may_fill_the_queue_until_another_comes() {
        let (flood, honest) = (caller("a", 1), caller("a", 2));
        let mut queue = Queue::new(256);
        for _ in 0..256 {
            assert_eq!(queue.push(Production, 0, &flood, vec![flood.clone()]), Ok(vec![]));
        }
        assert_eq!(queue.push(Production, 0, &flood, vec![flood.clone()]), Err(Full));
        for count in 1..=128 {
            let displaced = queue.push(Production, 0, &honest, vec![honest.clone()]);
            assert_eq!(displaced, Ok(vec![flood.clone()]));
            // what the flood sends now finds no room, so nothing goes back and forth
            assert_eq!(
                queue.push(Production, 0, &flood, vec![flood.clone()]),
                Err(Full),
                "{count}"
            );
        }
        assert_eq!(queue.push(Production, 0, &honest, vec![honest.clone()]), Err(Full));
        assert_eq!(shares(&queue, &[flood, honest]), [128, 128]);
    }

    #[test]
    fn a_tenant_gains_no_places_from_more_keys() {
        let honest = caller("b", 1);
        let keys: Vec<Caller> = (0..64).map(|key| caller("a", key)).collect();
        let mut queue = Queue::new(64);
        for key in &keys {
            queue.push(Production, 0, key, vec![key.clone()]).unwrap();
        }
        for _ in 0..32 {
            queue.push(Production, 0, &honest, vec![honest.clone()]).unwrap();
        }
        assert_eq!(queue.push(Production, 0, &honest, vec![honest.clone()]), Err(Full));
    }

    #[test]
    fn the_choices_of_a_request_find_room_together_or_not_at_all() {
        let (flood, honest) = (caller("a", 1), caller("b", 1));
        let mut queue = Queue::new(8);
        queue.push(Production, 0, &flood, vec![flood.clone(); 8]).unwrap();
        assert_eq!(queue.push(Production, 0, &honest, vec![honest.clone(); 5]), Err(Full));
        assert_eq!(shares(&queue, &[flood.clone(), honest.clone()]), [8, 0]);
        let displaced = queue.push(Production, 0, &honest, vec![honest.clone(); 4]).unwrap();
        assert_eq!(displaced.len(), 4);
        assert_eq!(queue.push(Production, 0, &honest, vec![honest.clone(); 9]), Err(Full));
        assert_eq!(shares(&queue, &[flood, honest]), [4, 4]);
    }

    #[test]
    fn a_free_slot_goes_to_the_tenant_and_key_that_have_the_fewest() {
        let (flood, sibling, honest) = (caller("a", 1), caller("a", 2), caller("b", 1));
        let mut queue = Queue::new(64);
        for who in [&flood, &flood, &flood, &sibling, &honest, &honest] {
            queue.push(Production, 0, who, vec![who.clone()]).unwrap();
        }
        let urgent = caller("a", 3);
        queue.push(Production, -1, &urgent, vec![urgent.clone()]).unwrap();
        let mut running = Tally::default();
        for who in [&flood, &flood, &urgent] {
            running.add(who);
        }
        let taken: Vec<Caller> = std::iter::from_fn(|| {
            let next = queue.take(&running, |_| true)?;
            running.add(&next);
            Some(next)
        })
        .collect();
        // priority comes before fairness
        assert_eq!(
            taken,
            [
                urgent,
                honest.clone(),
                honest,
                sibling,
                flood.clone(),
                flood.clone(),
                flood
            ]
        );
    }

    #[test]
    fn with_one_slot_callers_take_turns() {
        let (flood, honest, late) = (caller("a", 1), caller("a", 2), caller("b", 1));
        let mut queue = Queue::new(64);
        for who in [&flood, &flood, &flood, &flood, &honest, &honest, &late, &late] {
            queue.push(Production, 0, who, vec![who.clone()]).unwrap();
        }
        let taken: Vec<Caller> = std::iter::from_fn(|| queue.take(&Tally::default(), |_| true)).collect();
        let expected = [&flood, &late, &honest, &late, &flood, &honest, &flood, &flood];
        assert_eq!(taken.iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn callers_that_left_are_forgotten() {
        let mut queue = Queue::new(8);
        let waits = caller("a", 0);
        queue.push(Production, 9, &waits, vec![0; 2]).unwrap();
        queue.take(&Tally::default(), |_| true);
        for key in 1..1_000 {
            let one = caller(&format!("tenant-{key}"), key);
            queue.push(Production, 0, &one, vec![0]).unwrap();
            queue.take(&Tally::default(), |_| true);
        }
        assert!(queue.turns.remembered() <= 9);
        assert_eq!(queue.turns.of(&waits), (1, 1));
    }

    proptest! {
        /// Whoever stays below an equal share always finds room.
        #[test]
        fn a_caller_below_its_share_is_never_refused(
            pushes in prop::collection::vec((0_u8..3, 0_u128..3, 1_usize..4, any::<bool>()), 1..300),
        ) {
            let mut queue: Queue<Caller> = Queue::new(36);
            let honest = caller("honest", 1);
            for (tenant, key, items, takes) in pushes {
                let flood = caller(&format!("tenant-{tenant}"), key);
                let _ = queue.push(Production, 0, &flood, vec![flood.clone(); items]);
                prop_assert!(queue.len() <= 36);
                // three other tenants: 36 / 4 places, and one less for what does not divide
                if shares(&queue, std::slice::from_ref(&honest))[0] < 8 {
                    prop_assert!(queue.push(Production, 0, &honest, vec![honest.clone()]).is_ok());
                }
                if takes {
                    queue.take(&Tally::default(), |_| true);
                }
                let mut held = Tally::default();
                queue.waiting.values().for_each(|waiting| held.add(&waiting.caller));
                prop_assert_eq!(queue.held.get(&Production), Some(&held));
            }
        }
    }
}
