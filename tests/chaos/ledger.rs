//! What the client knows: every event that it sent, and the answers that it got. The one witness that the tables are
//! compared with afterwards.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ingest::event::{Body, Event};
use uuid::Uuid;

/// Pauses between two acknowledgements that are worth remembering.
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

/// One body under one name. Two bodies under the same name are two of these.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Also the event's id.
    pub id: Uuid,
    pub kind: Kind,
    /// The first bytes are enough to tell bodies apart.
    pub digest: [u8; 8],
    /// Sends that were to be acknowledged.
    pub sent: u32,
    pub acked: u32,
    /// 409.
    pub conflicts: u32,
    /// Any other refusal for good, by status.
    pub refused: u16,
}

pub fn short(digest: &[u8]) -> [u8; 8] {
    digest.first_chunk().copied().unwrap_or_default()
}

/// An entry's number.
pub type Nth = usize;

#[derive(Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: Vec<Entry>,
    acks: u64,
    /// Sends whose answer never came, by what came instead; each was tried again.
    retries: BTreeMap<String, u64>,
    last_ack: Option<Instant>,
    gaps: Vec<(Instant, Duration)>,
}

impl Ledger {
    pub fn note(&self, event: &Event) -> Nth {
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

    pub fn sent(&self, nth: Nth) {
        self.inner.lock().unwrap().entries[nth].sent += 1;
    }

    /// A final answer to one send.
    pub fn answered(&self, nth: Nth, status: u16) {
        let mut inner = self.inner.lock().unwrap();
        let entry = &mut inner.entries[nth];
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

    /// The longest time without an acknowledgement that began or went on within `reach` after `moment`.
    pub fn longest_gap(&self, moment: Instant, reach: Duration) -> Duration {
        let inner = self.inner.lock().unwrap();
        let touched = inner
            .gaps
            .iter()
            .filter(|(start, length)| *start <= moment + reach && *start + *length >= moment);
        touched.map(|(_, length)| *length).max().unwrap_or_default()
    }
}
