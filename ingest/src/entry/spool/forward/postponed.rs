//! Events that the upstream seems to refuse for what they are, although it gives no final answer: a
//! proxy in between refuses them, or they take too long to send. They are set aside, so that others
//! do not wait behind them, and tried again for as long as it takes.
//!
//! Each is the only record of a segment in the folder `postponed`, so an event that is accepted is
//! removed by itself.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::super::folder::{Contents, Folder, Storage};
use super::super::segment::{HEADER_BYTES, SegmentHeader};

pub(super) struct Postponed {
    pub(super) folder: Arc<Folder>,
    state: Mutex<State>,
    added: Notify,
}

#[derive(Default)]
struct State {
    events: BTreeMap<u64, Waiting>,
    next_number: u64,
}

#[derive(Clone, Copy)]
struct Waiting {
    /// Of its file, bytes.
    length: u64,
    /// When the event was spooled. `None`: an earlier process set it aside, and it was not read yet.
    spooled_at_us: Option<i64>,
}

impl Postponed {
    /// `contents` is what earlier processes left in `folder`.
    pub(super) fn new(folder: Arc<Folder>, contents: &Contents) -> Self {
        let found = contents.segments.iter().map(|found| {
            let waiting = Waiting {
                length: found.length,
                spooled_at_us: None,
            };
            (found.number, waiting)
        });
        let state = State {
            events: found.collect(),
            next_number: contents.next_number,
        };
        Self {
            folder,
            state: Mutex::new(state),
            added: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there are, and when the oldest of them was spooled.
    pub(super) fn level(&self) -> (usize, Option<i64>) {
        let state = self.state();
        let times = state.events.values().filter_map(|waiting| waiting.spooled_at_us);
        (state.events.len(), times.min())
    }

    /// Returns at the next [`Postponed::add`], or at once if there was one since the last call.
    pub(super) async fn added(&self) {
        self.added.notified().await;
    }

    /// The number of the first event after `number`.
    pub(super) fn after(&self, number: u64) -> Option<u64> {
        let state = self.state();
        state
            .events
            .range(number.saturating_add(1)..)
            .next()
            .map(|(next, _)| *next)
    }

    /// Writes and flushes an event. Returns the length of its file. Blocks.
    pub(super) fn add(&self, spooled_at_us: i64, payload: &[u8]) -> io::Result<u64> {
        let number = {
            let mut state = self.state();
            let number = state.next_number;
            // Also if it fails, because its file may still exist.
            state.next_number += 1;
            number
        };
        let (header, mut tail) = Storage::create(&mut self.folder.clone(), number)?;
        let mut record = Vec::new();
        header.append_record(&mut record, HEADER_BYTES as u64, spooled_at_us, payload);
        if let Err(error) = tail.append(&record).and_then(|()| tail.sync()) {
            let _ = self.folder.remove(number);
            return Err(error);
        }
        let length = (HEADER_BYTES + record.len()) as u64;
        let waiting = Waiting {
            length,
            spooled_at_us: Some(spooled_at_us),
        };
        self.state().events.insert(number, waiting);
        self.added.notify_one();
        Ok(length)
    }

    /// The bytes of an event's file. Blocks.
    pub(super) fn read(&self, number: u64) -> io::Result<Vec<u8>> {
        let length = self.state().events.get(&number).map_or(0, |waiting| waiting.length);
        self.folder.read(number, 0, length)
    }

    /// The payload in the bytes of an event's file. `None`: they are damaged.
    pub(super) fn payload<'a>(&self, number: u64, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let header = SegmentHeader::decode(bytes, number)?;
        let records = bytes.get(HEADER_BYTES..)?;
        let scan = header.scan(HEADER_BYTES as u64, records);
        let record = scan.records.into_iter().next()?;
        if let Some(waiting) = self.state().events.get_mut(&number) {
            waiting.spooled_at_us = Some(record.spooled_at_us);
        }
        records.get(record.payload)
    }

    /// Forgets an event whose file was removed. Returns the length of the file.
    pub(super) fn forget(&self, number: u64) -> u64 {
        let waiting = self.state().events.remove(&number);
        waiting.map_or(0, |waiting| waiting.length)
    }
}
