//! The client's record of every event it sent and every answer it got. The tables are compared with
//! it afterwards.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use event_log::event::{Body, Event};
use uuid::Uuid;

/// Shorter pauses between acknowledgements are not recorded.
const GAP_MIN: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Generation,
    Feedback,
    Retraction,
    EpisodeEnd,
}

impl Kind {
    pub fn of(event: &Event) -> Self {
        match event.body {
            Body::Generation(_) => Self::Generation,
            Body::Feedback(_) => Self::Feedback,
            Body::Retraction(_) => Self::Retraction,
            Body::EpisodeEnd(_) => Self::EpisodeEnd,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Generation => "generation",
            Self::Feedback => "feedback",
            Self::Retraction => "retraction",
            Self::EpisodeEnd => "episode_end",
        }
    }
}

/// One body with one id. Two bodies with the same id are two entries.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Also the event's id.
    pub id: Uuid,
    pub kind: Kind,
    /// The first bytes, which are enough to distinguish bodies.
    pub digest: [u8; 8],
    /// Number of sends.
    pub sent: u32,
    pub acked: u32,
    /// 409.
    pub conflicts: u32,
    /// The status of another final refusal.
    pub refused: u16,
}

pub fn short(digest: &[u8]) -> [u8; 8] {
    digest.first_chunk().copied().unwrap_or_default()
}

/// The index of an entry.
pub type EntryIndex = usize;

#[derive(Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: Vec<Entry>,
    acks: u64,
    /// Number of resends by reason.
    retries: BTreeMap<String, u64>,
    last_ack: Option<Instant>,
    gaps: Vec<(Instant, Duration)>,
}

impl Ledger {
    pub fn note(&self, event: &Event) -> EntryIndex {
        let entry = Entry {
            id: event.id.parse().unwrap(),
            kind: Kind::of(event),
            digest: short(&event.digest()),
            sent: 0,
            acked: 0,
            conflicts: 0,
            refused: 0,
        };
        let mut inner = self.inner.lock().unwrap();
        inner.entries.push(entry);
        inner.entries.len() - 1
    }

    pub fn sent(&self, index: EntryIndex) {
        self.inner.lock().unwrap().entries[index].sent += 1;
    }

    /// Records the final answer to a send.
    pub fn answered(&self, index: EntryIndex, status: u16) {
        let mut inner = self.inner.lock().unwrap();
        let entry = &mut inner.entries[index];
        match status {
            200 => entry.acked += 1,
            409 => entry.conflicts += 1,
            other => entry.refused = other,
        }
        if status != 200 {
            return;
        }
        inner.acks += 1;
        let now = Instant::now();
        if let Some(last) = inner.last_ack.replace(now)
            && now - last >= GAP_MIN
        {
            inner.gaps.push((last, now - last));
        }
    }

    pub fn retried(&self, why: &str, sends: usize) {
        let mut inner = self.inner.lock().unwrap();
        *inner.retries.entry(why.to_owned()).or_default() += sends as u64;
    }

    pub fn acks(&self) -> u64 {
        self.inner.lock().unwrap().acks
    }

    pub fn retries(&self) -> BTreeMap<String, u64> {
        self.inner.lock().unwrap().retries.clone()
    }

    pub fn entries(&self) -> Vec<Entry> {
        self.inner.lock().unwrap().entries.clone()
    }

    /// The longest time without an acknowledgement that overlaps the time from `moment` to `moment
    /// + reach`.
    pub fn longest_gap(&self, moment: Instant, reach: Duration) -> Duration {
        let inner = self.inner.lock().unwrap();
        let touched = inner
            .gaps
            .iter()
            .filter(|(start, length)| *start <= moment + reach && *start + *length >= moment);
        touched.map(|(_, length)| *length).max().unwrap_or_default()
    }
}
