//! The spool's folder: its lock, its segments and the files beside them. All functions block.
//!
//! ```text
//!  lock                                held by the process that uses the folder
//!  00000000000000000017.spool          a segment
//!  00000000000000000016-4711.damaged   damaged bytes of segment 16, starting at offset 4711
//!  refused.jsonl, refused.old.jsonl    events that the upstream refused permanently, the latest
//!  postponed/                          a folder like this one: events that were set aside
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use uuid::Uuid;

use super::segment::{HEADER_BYTES, SegmentHeader};

/// Events contain user text, so only the owner may read them.
pub(super) const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;
pub(super) const REFUSED: &str = "refused.jsonl";

/// The folder, locked until this is dropped.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    _lock: File,
}

/// A segment that an earlier process left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub number: u64,
    pub length: u64,
}

/// Everything that earlier processes left.
#[derive(Debug)]
pub(super) struct Contents {
    /// In order.
    pub segments: Vec<Found>,
    /// The number of the first new segment. Higher than any number in a file name here.
    pub next_number: u64,
    /// Bytes that count against the spool's limit: all but the refused events.
    pub used: u64,
}

impl Folder {
    /// Creates the folder if needed, and locks it.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let created = fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(path);
        created.with_context(|| format!("create the spool's folder {}", path.display()))?;
        let lock = path.join("lock");
        let lock = File::create(&lock).with_context(|| format!("create {}", lock.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another process uses the spool {}; give each collector its own folder",
                path.display()
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("lock the spool {}", path.display()));
            }
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// Lists the contents. Truncates a record that a crash left incomplete, which was not
    /// acknowledged.
    pub(super) fn recover(&self) -> anyhow::Result<Contents> {
        let mut contents = Contents {
            segments: Vec::new(),
            next_number: 1,
            used: 0,
        };
        let entries = fs::read_dir(&self.path).with_context(|| format!("read {}", self.path.display()))?;
        for entry in entries {
            let entry = entry.context("read the spool's folder")?;
            let name = entry.file_name();
            let Some((number, is_segment)) = name.to_str().and_then(parse) else {
                continue;
            };
            let length = entry.metadata().context("read a segment's length")?.len();
            contents.used += length;
            contents.next_number = contents.next_number.max(number.saturating_add(1));
            if is_segment {
                contents.segments.push(Found { number, length });
            }
        }
        contents.segments.sort_unstable_by_key(|found| found.number);
        if let Some(last) = contents.segments.last_mut() {
            let removed = self.truncate_torn(*last).context("truncate the last segment")?;
            last.length -= removed;
            contents.used -= removed;
            if last.length == 0 {
                contents.segments.pop();
            }
        }
        Ok(contents)
    }

    /// Returns the number of removed bytes. Removes a segment whose header was not written.
    fn truncate_torn(&self, last: Found) -> anyhow::Result<u64> {
        let bytes = self.read(last.number, 0, last.length)?;
        if bytes.len() < HEADER_BYTES || bytes.iter().all(|byte| *byte == 0) {
            self.remove(last.number)?;
            return Ok(last.length);
        }
        let Some(header) = SegmentHeader::decode(&bytes, last.number) else {
            return Ok(0); // the forwarder reports it as damaged
        };
        let scan = header.scan(HEADER_BYTES as u64, &bytes[HEADER_BYTES..]);
        let Some(torn) = scan.torn else { return Ok(0) };
        let torn = torn.len() as u64;
        let path = self.segment(last.number);
        let file = OpenOptions::new().write(true).open(&path);
        let file = file.with_context(|| format!("open {}", path.display()))?;
        file.set_len(last.length - torn).context("truncate")?;
        file.sync_all().context("flush")?;
        tracing::info!(
            segment = last.number,
            bytes = torn,
            "truncated an incomplete event after a crash; it was not acknowledged"
        );
        Ok(torn)
    }

    pub(super) fn read(&self, number: u64, from: u64, to: u64) -> io::Result<Vec<u8>> {
        let mut file = File::open(self.segment(number))?;
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(to.saturating_sub(from)).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn remove(&self, number: u64) -> io::Result<()> {
        fs::remove_file(self.segment(number))?;
        self.flush()
    }

    /// Saves damaged bytes for inspection. Returns `None` if an earlier call saved them.
    pub(super) fn keep_damaged(&self, number: u64, offset: u64, bytes: &[u8]) -> io::Result<Option<PathBuf>> {
        let path = self.path.join(format!("{number:020}-{offset}.damaged"));
        if fs::metadata(&path).is_ok_and(|saved| saved.len() == bytes.len() as u64) {
            return Ok(None);
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(FILE_MODE);
        let mut file = options.open(&path)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        self.flush()?;
        Ok(Some(path))
    }

    pub(super) fn postponed(&self) -> PathBuf {
        self.path.join("postponed")
    }

    pub(super) fn refused(&self) -> PathBuf {
        self.path.join(REFUSED)
    }

    fn segment(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:020}.spool"))
    }

    /// Makes the creation and removal of files durable.
    pub(super) fn flush(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

/// Creates segments. Tests replace it with a failing disk.
pub(super) trait Storage: Send {
    /// Creates a segment and flushes its header.
    fn create(&mut self, number: u64) -> io::Result<(SegmentHeader, Box<dyn Tail>)>;
}

/// A segment that is open for appending.
pub(super) trait Tail: Send {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Flushes, so that all appended bytes survive a power loss.
    fn sync(&mut self) -> io::Result<()>;
    /// Sets the segment's length.
    fn truncate(&mut self, length: u64) -> io::Result<()>;
}

impl Storage for std::sync::Arc<Folder> {
    fn create(&mut self, number: u64) -> io::Result<(SegmentHeader, Box<dyn Tail>)> {
        let header = SegmentHeader {
            number,
            salt: Uuid::now_v7().into_bytes(),
        };
        let path = self.segment(number);
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(FILE_MODE).open(&path)?;
        let written = file.write_all(&header.encode()).and_then(|()| file.sync_all());
        if let Err(error) = written.and_then(|()| self.flush()) {
            // An empty segment would be skipped, so a failed removal is harmless.
            let _ = fs::remove_file(&path);
            return Err(error);
        }
        Ok((header, Box::new(file)))
    }
}

impl Tail for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)?;
        self.sync_all()
    }
}

/// The number in the name of a segment (`true`) or a file of damaged bytes (`false`).
fn parse(name: &str) -> Option<(u64, bool)> {
    if let Some(text) = name.strip_suffix(".spool") {
        return Some((number(text)?, true));
    }
    let (text, _) = name.strip_suffix(".damaged")?.split_once('-')?;
    Some((number(text)?, false))
}

/// Accepts only the exact form of [`Folder::segment`], so that the file can be found again.
fn number(text: &str) -> Option<u64> {
    let number = text.parse().ok()?;
    (text == format!("{number:020}")).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_process_can_use_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let first = Folder::open(dir.path()).unwrap();
        let second = Folder::open(dir.path()).unwrap_err().to_string();
        assert!(second.contains("its own folder"), "{second}");
        drop(first);
        Folder::open(dir.path()).unwrap();
    }

    #[test]
    fn new_numbers_are_higher_than_those_of_all_files() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        assert_eq!(folder.recover().unwrap().next_number, 1);
        folder.keep_damaged(41, 40, b"xyz").unwrap().unwrap();
        assert_eq!(folder.keep_damaged(41, 40, b"xyz").unwrap(), None);
        let contents = folder.recover().unwrap();
        assert_eq!((contents.next_number, contents.used), (42, 3));
    }

    #[test]
    fn files_with_similar_names_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["5.spool", "+0000000000000000005.spool", "5-40.damaged"] {
            fs::write(dir.path().join(name), b"x").unwrap();
        }
        let contents = Folder::open(dir.path()).unwrap().recover().unwrap();
        assert_eq!((contents.segments, contents.next_number, contents.used), (vec![], 1, 0));
    }

    #[test]
    fn a_segment_without_a_complete_header_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        fs::write(dir.path().join("00000000000000000003.spool"), b"SPTSP").unwrap();
        let contents = folder.recover().unwrap();
        assert_eq!((contents.segments, contents.next_number), (vec![], 4));
        assert!(!dir.path().join("00000000000000000003.spool").exists());
    }
}
