//! What the writer and the forwarder know together: which segments there are, how far each is on the disk, how much room
//! all of it takes, and since when the oldest event waits.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::folder::Contents;

/// Shared by the writer, which adds at the end, and the forwarder, which takes from the beginning.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    segments: BTreeMap<u64, Segment>,
    used: u64,
    /// When the oldest event that was not forwarded was spooled, microseconds since 1970; `None`: none waits, or nobody
    /// has looked yet.
    oldest_us: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Bytes that are on the disk for good.
    pub length: u64,
    /// Nothing will be appended.
    pub sealed: bool,
}

/// The gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    pub bytes: u64,
    pub segments: usize,
    pub oldest_us: Option<i64>,
}

impl Queue {
    /// What an earlier process left is not appended to.
    pub(super) fn new(contents: &Contents) -> Self {
        let segments = contents.segments.iter().map(|found| {
            let segment = Segment {
                length: found.length,
                sealed: true,
            };
            (found.number, segment)
        });
        let state = State {
            segments: segments.collect(),
            used: contents.used,
            oldest_us: None,
        };
        Self {
            state: Mutex::new(state),
            changed: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves after the next change, or at once if there was one since the last time.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn used(&self) -> u64 {
        self.state().used
    }

    pub(super) fn level(&self) -> Level {
        let state = self.state();
        Level {
            bytes: state.used,
            segments: state.segments.len(),
            oldest_us: state.oldest_us,
        }
    }

    pub(super) fn first(&self) -> Option<(u64, Segment)> {
        let state = self.state();
        state
            .segments
            .first_key_value()
            .map(|(number, segment)| (*number, *segment))
    }

    /// A new segment of so many bytes.
    pub(super) fn begin(&self, number: u64, length: u64) {
        let mut state = self.state();
        let sealed = false;
        state.segments.insert(number, Segment { length, sealed });
        state.used += length;
    }

    /// The segment is `length` bytes long now, `added` of them new.
    pub(super) fn publish(&self, number: u64, length: u64, added: u64, spooled_at_us: i64) {
        let mut state = self.state();
        state.used += added;
        state.oldest_us.get_or_insert(spooled_at_us);
        if let Some(segment) = state.segments.get_mut(&number) {
            segment.length = length;
        }
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn seal(&self, number: u64) {
        if let Some(segment) = self.state().segments.get_mut(&number) {
            segment.sealed = true;
        }
        self.changed.notify_one();
    }

    /// Files beside the segments became larger.
    pub(super) fn grow(&self, bytes: u64) {
        self.state().used += bytes;
    }

    /// The segment is gone.
    pub(super) fn remove(&self, number: u64) {
        let mut state = self.state();
        if let Some(segment) = state.segments.remove(&number) {
            state.used = state.used.saturating_sub(segment.length);
        }
    }

    /// The oldest event that waits was spooled then.
    pub(super) fn oldest(&self, spooled_at_us: i64) {
        self.state().oldest_us = Some(spooled_at_us);
    }

    /// Everything up to `position` of the segment was forwarded: if it is the last and was not appended to since, nothing
    /// waits.
    pub(super) fn forwarded(&self, number: u64, position: u64) {
        let mut state = self.state();
        let last = state.segments.last_key_value();
        if last.is_some_and(|(last, segment)| *last == number && segment.length <= position) {
            state.oldest_us = None;
        }
    }
}
