//! Remembers the events that this process acknowledged last, so that most repetitions and
//! contradictions are found without asking the tables.
//!
//! It knows less than the tables: nothing of other processes, of the time before a restart, or of
//! events that were pushed out by later ones. The sink compares every event with the tables again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use event_log::event::{Event, time_of};

/// Events of each of the two generations. Both take about 13 MiB when they are full.
const EVENTS_MAX: usize = 100_000;
/// An event whose id was made so recently, or lies so little ahead, is not looked up in the tables.
const NEW: Duration = Duration::MINUTE;

pub(super) type Digest = [u8; 32];

/// An event's tenant, source, id and kind, hashed with a secret of this process, so that nobody can make
/// an event that is taken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Name(pub [u8; 16]);

pub(super) struct RecentEvents {
    secret: [u8; 32],
    memory: Mutex<Memory>,
}

/// The digests of acknowledged events. `None`: two with different bodies were acknowledged at the
/// same time, and only the sink knows which of them is stored.
#[derive(Default)]
struct Memory {
    newer: HashMap<Name, Option<Digest>>,
    older: HashMap<Name, Option<Digest>>,
}

impl RecentEvents {
    pub(super) fn new() -> Self {
        Self {
            secret: rand::random(),
            memory: Mutex::default(),
        }
    }

    pub(super) fn name(&self, event: &Event) -> Name {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        for part in [&event.tenant, &event.source, &event.id, event.body.kind()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let mut name = [0; 16];
        hasher.finalize_xof().fill(&mut name);
        Name(name)
    }

    /// The digest with which each of these was acknowledged, if it is remembered.
    pub(super) fn digests(&self, names: impl Iterator<Item = Name>) -> Vec<Option<Digest>> {
        let memory = self.memory();
        names.map(|name| memory.get(name)).collect()
    }

    /// Remembers events that the log has acknowledged.
    pub(super) fn remember(&self, acknowledged: impl Iterator<Item = (Name, Digest)>) {
        let mut memory = self.memory();
        acknowledged.for_each(|(name, digest)| memory.insert(name, digest));
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn get(&self, name: Name) -> Option<Digest> {
        *self.newer.get(&name).or_else(|| self.older.get(&name))?
    }

    fn insert(&mut self, name: Name, digest: Digest) {
        if self.newer.len() >= EVENTS_MAX {
            std::mem::swap(&mut self.newer, &mut self.older);
            self.newer.clear();
        }
        let older = self.older.get(&name).copied();
        match self.newer.entry(name) {
            Entry::Occupied(mut known) if *known.get() != Some(digest) => {
                known.insert(None);
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(vacant) => {
                let is_same = older.is_none_or(|older| older == Some(digest));
                vacant.insert(is_same.then_some(digest));
            }
        }
    }
}

/// Whether an event with this id was most likely never sent before, or by this process a moment ago:
/// the id is a UUIDv7 of about now.
pub(super) fn is_new(id: &str, now: OffsetDateTime) -> bool {
    let made_at = Uuid::try_parse(id).ok().and_then(time_of);
    made_at.is_some_and(|made_at| (now - made_at).abs() <= NEW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use event_log::event::{self, EpisodeEnd, Feedback, Target, Value};

    fn name(number: usize) -> Name {
        let mut name = [0; 16];
        name[..8].copy_from_slice(&number.to_le_bytes());
        Name(name)
    }

    fn remember(recent: &RecentEvents, events: impl IntoIterator<Item = (usize, u8)>) {
        let events = events.into_iter().map(|(number, digest)| (name(number), [digest; 32]));
        recent.remember(events);
    }

    /// The first byte of its digest.
    fn digest(recent: &RecentEvents, number: usize) -> Option<u8> {
        recent.digests(std::iter::once(name(number)))[0].map(|digest| digest[0])
    }

    #[test]
    fn the_latest_events_are_remembered_in_bounded_memory() {
        let recent = RecentEvents::new();
        remember(&recent, (0..5 * EVENTS_MAX).map(|number| (number, 1)));
        for number in [5 * EVENTS_MAX - 1, 4 * EVENTS_MAX] {
            assert_eq!(digest(&recent, number), Some(1), "{number}");
        }
        assert_eq!(digest(&recent, 0), None);
        let memory = recent.memory();
        assert!(memory.newer.len() + memory.older.len() <= 2 * EVENTS_MAX);
        // No table has grown beyond its first allocation for as many events.
        let capacity = HashMap::<Name, Option<Digest>>::with_capacity(EVENTS_MAX).capacity();
        assert!(memory.newer.capacity() <= capacity && memory.older.capacity() <= capacity);
    }

    #[test]
    fn of_two_bodies_that_were_acknowledged_at_once_neither_is_remembered() {
        let recent = RecentEvents::new();
        remember(&recent, [(1, 1), (1, 1)]);
        assert_eq!(digest(&recent, 1), Some(1));
        remember(&recent, [(1, 2), (1, 1)]);
        assert_eq!(digest(&recent, 1), None);
        // The first has moved on to the older events.
        remember(&recent, [(2, 1)]);
        remember(&recent, (10..10 + EVENTS_MAX).map(|number| (number, 1)));
        assert_eq!(digest(&recent, 2), Some(1));
        remember(&recent, [(2, 2)]);
        assert_eq!(digest(&recent, 2), None);
    }

    #[test]
    fn a_name_tells_tenants_sources_and_ids_apart() {
        let recent = RecentEvents::new();
        let end = EpisodeEnd {
            episode_id: Uuid::nil(),
        };
        let name = |recent: &RecentEvents, tenant: &str, source: &str, id: &str| {
            recent.name(&Event {
                id: id.to_owned(),
                ..end.into_event(tenant, source, event::now())
            })
        };
        let first = name(&recent, "a", "b", "c");
        assert_eq!(first, name(&recent, "a", "b", "c"));
        for (tenant, source, id) in [("a", "c", "b"), ("ab", "", "c"), ("a", "bc", ""), ("b", "a", "c")] {
            assert_ne!(first, name(&recent, tenant, source, id));
        }
        // An episode of one completion has its id.
        let end = end.into_event("a", "b", event::now());
        let feedback = Feedback {
            id: Uuid::nil(),
            target: Target::Episode(Uuid::nil()),
            metric_name: "accept".to_owned(),
            value: Value::Bool(true),
            tags: Default::default(),
        };
        let feedback = feedback.into_event("a", "b", event::now());
        assert_eq!(end.id, feedback.id);
        assert_ne!(recent.name(&end), recent.name(&feedback));
        // Nobody can search for collisions: each process hashes otherwise.
        assert_ne!(first, name(&RecentEvents::new(), "a", "b", "c"));
    }

    #[test]
    fn only_a_uuidv7_of_about_now_is_new() {
        let id = Uuid::now_v7();
        let made_at = time_of(id).unwrap();
        let is_new = |seconds: i64| is_new(&id.to_string(), made_at + Duration::seconds(seconds));
        assert!(is_new(0) && is_new(60) && is_new(-60));
        assert!(!is_new(61) && !is_new(-61));
        for other in ["", "name-1", &Uuid::nil().to_string(), &Uuid::from_u128(7).to_string()] {
            assert!(!super::is_new(other, made_at), "{other}");
        }
    }
}
