//! A disk that fails on demand and counts its flushes.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::super::folder::{Folder, Storage, Tail};
use super::super::segment::SegmentHeader;

/// How the next operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Writes half of the bytes, then reports a full disk.
    Append,
    /// The flush fails.
    Sync,
    /// No file can be created.
    Create,
}

pub struct Disk {
    folder: Arc<Folder>,
    pub fault: Arc<Mutex<Fault>>,
    pub flushes: Arc<AtomicU32>,
}

struct End {
    inner: Box<dyn Tail>,
    fault: Arc<Mutex<Fault>>,
    flushes: Arc<AtomicU32>,
}

impl Disk {
    pub(in super::super) fn new(folder: Arc<Folder>) -> Self {
        Self {
            folder,
            fault: Arc::new(Mutex::new(Fault::None)),
            flushes: Arc::default(),
        }
    }
}

fn no_space() -> io::Error {
    io::Error::from(io::ErrorKind::StorageFull)
}

impl Storage for Disk {
    fn create(&mut self, number: u64) -> io::Result<(SegmentHeader, Box<dyn Tail>)> {
        if *self.fault.lock().unwrap() == Fault::Create {
            return Err(no_space());
        }
        let (header, inner) = self.folder.create(number)?;
        let (fault, flushes) = (self.fault.clone(), self.flushes.clone());
        Ok((header, Box::new(End { inner, fault, flushes })))
    }
}

impl Tail for End {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if *self.fault.lock().unwrap() == Fault::Append {
            self.inner.append(&bytes[..bytes.len() / 2])?;
            return Err(no_space());
        }
        self.inner.append(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        if *self.fault.lock().unwrap() == Fault::Sync {
            return Err(no_space());
        }
        self.inner.sync()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.inner.truncate(length)
    }
}
