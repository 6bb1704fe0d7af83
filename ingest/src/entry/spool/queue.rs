//! The state that the writer and the forwarder share: the segments and their flushed lengths, the
//! bytes in use, and the age of the oldest event.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::folder::Contents;

/// The writer adds at the end, the forwarder removes from the beginning.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    segments: BTreeMap<u64, Segment>,
    used: u64,
    /// When the oldest waiting event was spooled, microseconds since 1970. `None` if none waits, or
    /// before the first read.
    oldest_us: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Flushed bytes.
    pub length: u64,
    /// No more events will be appended.
    pub sealed: bool,
}

/// The values of the gauges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    pub bytes: u64,
    pub segments: usize,
    pub oldest_us: Option<i64>,
}

impl Queue {
    /// Segments of earlier processes are sealed.
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

    /// Returns after the next change, or at once if there was one since the last call.
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
        let first = state.segments.first_key_value();
        first.map(|(number, segment)| (*number, *segment))
    }

    /// Adds a segment of `length` bytes.
    pub(super) fn add(&self, number: u64, length: u64) {
        let mut state = self.state();
        state.segments.insert(number, Segment { length, sealed: false });
        state.used += length;
    }

    /// `bytes` more of the segment are flushed.
    pub(super) fn append(&self, number: u64, bytes: u64, spooled_at_us: i64) {
        let mut state = self.state();
        state.used += bytes;
        state.oldest_us.get_or_insert(spooled_at_us);
        if let Some(segment) = state.segments.get_mut(&number) {
            segment.length += bytes;
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

    /// Other files of the folder have grown.
    pub(super) fn grow(&self, bytes: u64) {
        self.state().used += bytes;
    }

    /// A file that [`Queue::grow`] counted was removed.
    pub(super) fn shrink(&self, bytes: u64) {
        let mut state = self.state();
        state.used = state.used.saturating_sub(bytes);
    }

    /// The segment was removed.
    pub(super) fn remove(&self, number: u64) {
        let mut state = self.state();
        if let Some(segment) = state.segments.remove(&number) {
            state.used = state.used.saturating_sub(segment.length);
        }
    }

    pub(super) fn set_oldest(&self, spooled_at_us: i64) {
        self.state().oldest_us = Some(spooled_at_us);
    }

    /// The segment was forwarded up to `position`. If that is the end of the last segment, no event
    /// is waiting.
    pub(super) fn forwarded(&self, number: u64, position: u64) {
        let mut state = self.state();
        let last = state.segments.last_key_value();
        if last.is_some_and(|(last, segment)| *last == number && segment.length <= position) {
            state.oldest_us = None;
        }
    }
}
