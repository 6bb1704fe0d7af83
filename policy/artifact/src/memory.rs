//! Memory for weights: huge pages, reuse between versions, and files for what exceeds a budget.
//!
//! The first touch of a 4 KiB page took 2 µs on the virtual machine of docs/delta.md, long enough
//! to verify 9 KB of a model. So large buffers ask for 2 MiB pages. A process that serves one
//! version after another can also keep the memory of dropped versions for the next: a [`Spare`].
//!
//! A process that stores, checks and sends weights and does not compute with them can set a
//! [`budget`]. What [`Buffer::at_rest`] has beyond it lies in files without a name, mapped into
//! memory: the kernel writes their pages to disk when it needs the memory.

#![expect(unsafe_code, reason = "advises the kernel about page sizes, and maps files")]

use bytemuck::Pod;
use bytes::Bytes;
use memmap2::{Mmap, MmapRaw};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smaller memory is not worth huge pages.
const LARGE_BYTES: usize = 8 << 20;
const PAGE_BYTES: usize = 4096;
/// Smaller buffers are left to the allocator.
const KEPT_BYTES_MIN: usize = 256 << 10;
/// Files of weights are mapped in parts of this size, or of a larger weight: Linux allows a process 65,530 mappings,
/// and a model of experts has more tensors.
const SHARED_BYTES: usize = 1 << 30;
/// The largest page of any machine that this runs on: advice about a part of a page would be about its neighbor too.
const RANGE_BYTES: usize = 64 << 10;

/// Values whose memory may be kept for reuse when they are dropped.
pub struct Buffer<T> {
    words: Words,
    count: usize,
    /// Bytes that it takes of the budget.
    budgeted: usize,
    of: PhantomData<T>,
}

enum Words {
    Memory(Vec<u64>),
    File(InFile),
}

/// How much memory weights at rest may take.
struct Budget {
    bytes: usize,
    taken: usize,
    /// Where files are for what does not fit.
    folder: PathBuf,
}

static BUDGET: Mutex<Option<Budget>> = Mutex::new(None);

fn lock_budget() -> MutexGuard<'static, Option<Budget>> {
    BUDGET.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets how many bytes of memory the weights at rest of this process may take. What does not fit
/// lies in files in `folder`, which have no name and go with the process. Default: no limit.
pub fn budget(bytes: u64, folder: &Path) {
    let mut budget = lock_budget();
    *budget = Some(Budget {
        bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
        taken: budget.as_ref().map_or(0, |budget| budget.taken),
        folder: folder.to_owned(),
    });
}

/// Bytes of a file, at rest.
pub fn read_file(path: &Path) -> io::Result<Bytes> {
    let mut file = File::open(path)?;
    let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut bytes = Buffer::at_rest(length);
    file.read_exact(&mut bytes)?;
    match file.read(&mut [0])? {
        0 => Ok(Bytes::from_owner(bytes)),
        _ => Err(io::Error::other("it grew while it was read")),
    }
}

/// Bytes of a file, mapped: processes share its pages. While they are used, nobody may change or shorten the file; to
/// replace it, rename another one over it.
pub fn map_file(path: &Path) -> io::Result<Bytes> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new()); // cannot be mapped
    }
    // SAFETY: the mapping is read-only, and `Bytes` keeps it for as long as it is used. That nobody changes the file
    // is said above: what writes model folders (`atomic`) writes new files and renames them.
    let mapped = unsafe { Mmap::map(&file)? };
    Ok(Bytes::from_owner(mapped))
}

/// Fills the first bytes of `rest` with `part`, and takes them off. What has no place is left out.
pub fn put_next(rest: &mut &mut [u8], part: &[u8]) {
    if let Some(next) = rest.split_off_mut(..part.len()) {
        next.copy_from_slice(part);
    }
}

/// A range of a mapped file without a name, which nobody else has.
struct InFile {
    file: Arc<MmapRaw>,
    /// In whole pages of any machine.
    range: Range<usize>,
}

/// The mapped file that has room for more ranges.
struct Shared {
    folder: PathBuf,
    file: File,
    mapped: Arc<MmapRaw>,
    used: usize,
}

static SHARED: Mutex<Option<Shared>> = Mutex::new(None);

impl InFile {
    fn new(bytes: usize, folder: &Path) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(RANGE_BYTES);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = |one: &Shared| one.folder == folder && bytes <= one.mapped.len() - one.used;
        let mut one = match shared.take() {
            Some(one) if has_room(&one) => one,
            _ => {
                std::fs::create_dir_all(folder)?;
                let file = tempfile::tempfile_in(folder)?;
                file.set_len(bytes.max(SHARED_BYTES) as u64)?;
                let mapped = Arc::new(MmapRaw::map_raw(&file)?);
                Shared {
                    folder: folder.to_owned(),
                    file,
                    mapped,
                    used: 0,
                }
            }
        };
        let range = one.used..one.used + bytes;
        // a full disk would end the process later
        let offset = |at: usize| i64::try_from(at).map_err(io::Error::other);
        nix::fcntl::posix_fallocate(&one.file, offset(range.start)?, offset(bytes)?)?;
        one.used = range.end;
        let file = Arc::clone(&one.mapped);
        *shared = Some(one);
        Ok(InFile { file, range })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the mapping, which lives as long as `file`. The file has no name, so no other
        // process changes or shortens it. No other `InFile` has a byte of the range, and `&mut` excludes others.
        unsafe { std::slice::from_raw_parts(self.file.as_ptr().add(self.range.start), self.range.len()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.file.as_mut_ptr().add(self.range.start), self.range.len()) }
    }
}

impl Drop for InFile {
    /// Gives the range's disk back at once. The file goes with its last range.
    fn drop(&mut self) {
        use nix::sys::mman::{MmapAdvise, madvise};
        if let Some(start) = std::ptr::NonNull::new(self.bytes_mut().as_mut_ptr().cast()) {
            // SAFETY: the range is of whole pages, so nobody else has a byte of them, and nobody reads them any more.
            let _ = unsafe { madvise(start, self.range.len(), MmapAdvise::MADV_REMOVE) };
        }
    }
}

/// Permission to keep a number of bytes of dropped weights, for new weights of the same sizes. All
/// `Spare`s of a process share one pool, whose limit is their sum. Default: 0 bytes.
#[derive(Debug, Default)]
pub struct Spare {
    bytes: usize,
}

/// Memory over the limit. Dropping it returns it to the kernel, which takes about 0.1 s per
/// gigabyte.
#[derive(Debug, Default)]
#[must_use = "dropping it blocks for a while"]
pub struct Released {
    _buffers: Vec<Vec<u64>>,
}

/// The pool.
struct Pool {
    /// By number of words.
    buffers: BTreeMap<usize, Vec<Vec<u64>>>,
    bytes: usize,
    /// Limit in bytes.
    room: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool::new());

/// Bytes in the pool.
pub fn kept_bytes() -> usize {
    pool().bytes
}

fn pool() -> MutexGuard<'static, Pool> {
    // only an allocation can panic while locked, and that is before anything is counted
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Spare {
    /// Bytes kept under this permission. An upper bound if the process has several `Spare`s.
    pub fn kept_bytes(&self) -> usize {
        kept_bytes().min(self.bytes)
    }

    /// Changes the limit.
    pub fn resize(&mut self, bytes: u64) -> Released {
        // small enough that no sum overflows
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).min(usize::MAX >> 16);
        let released = pool().resize(self.bytes, bytes);
        self.bytes = bytes;
        released
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        drop(self.resize(0));
    }
}

impl Pool {
    const fn new() -> Self {
        Pool {
            buffers: BTreeMap::new(),
            bytes: 0,
            room: 0,
        }
    }

    /// Changes one `Spare` from `from` to `to` bytes.
    fn resize(&mut self, from: usize, to: usize) -> Released {
        self.room = self.room - from + to;
        let mut released = vec![];
        while self.bytes > self.room {
            let Some(&words) = self.buffers.keys().next() else {
                break;
            };
            released.extend(self.take(words));
        }
        Released { _buffers: released }
    }

    fn take(&mut self, words: usize) -> Option<Vec<u64>> {
        let alike = self.buffers.get_mut(&words)?;
        let taken = alike.pop();
        if alike.is_empty() {
            self.buffers.remove(&words);
        }
        self.bytes -= taken.as_ref().map_or(0, |words| size_of_val(words.as_slice()));
        taken
    }

    /// Keeps the memory if the limit allows. Otherwise returns it.
    fn put(&mut self, words: Vec<u64>) -> Option<Vec<u64>> {
        let bytes = size_of_val(words.as_slice());
        if bytes < KEPT_BYTES_MIN || bytes > self.room.saturating_sub(self.bytes) {
            return Some(words);
        }
        self.buffers.entry(words.len()).or_default().push(words);
        self.bytes += bytes;
        None
    }
}

impl<T: Pod> Buffer<T> {
    /// [`unset`](Self::unset) values that are to be kept and not computed with: see [`budget`].
    pub fn at_rest(count: usize) -> Self {
        let bytes = count * size_of::<T>();
        let folder = match &mut *lock_budget() {
            Some(budget) if bytes >= KEPT_BYTES_MIN => match budget.taken.checked_add(bytes) {
                Some(taken) if taken <= budget.bytes => {
                    budget.taken = taken;
                    None
                }
                _ => Some(budget.folder.clone()),
            },
            _ => return Self::unset(count),
        };
        let Some(folder) = folder else {
            let mut buffer = Self::unset(count);
            buffer.budgeted = bytes;
            return buffer;
        };
        match InFile::new(bytes, &folder) {
            Ok(mapped) => Buffer {
                words: Words::File(mapped),
                count,
                budgeted: 0,
                of: PhantomData,
            },
            Err(error) => {
                let folder = folder.display();
                tracing::warn!(bytes, %folder, %error, "no file for weights beyond the budget: they are kept in memory");
                Self::unset(count)
            }
        }
    }

    /// `count` values with unspecified content. The caller sets all of them.
    pub fn unset(count: usize) -> Self {
        let words = (count * size_of::<T>()).div_ceil(size_of::<u64>());
        let taken = pool().take(words);
        #[cfg_attr(
            not(test),
            expect(unused_mut, reason = "tests fill it, to find reads of unset values")
        )]
        let mut words = taken.unwrap_or_else(|| zeros(words));
        #[cfg(test)]
        words.fill(0xa5a5_a5a5_a5a5_a5a5);
        Buffer {
            words: Words::Memory(words),
            count,
            budgeted: 0,
            of: PhantomData,
        }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.budgeted > 0
            && let Some(budget) = &mut *lock_budget()
        {
            budget.taken = budget.taken.saturating_sub(self.budgeted);
        }
        if let Words::Memory(words) = &mut self.words {
            // memory that is not kept is returned to the kernel after the lock is released
            let _given_back = pool().put(std::mem::take(words));
        }
    }
}

impl Words {
    fn bytes(&self) -> &[u8] {
        match self {
            Words::Memory(words) => bytemuck::cast_slice(words),
            Words::File(mapped) => mapped.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Words::Memory(words) => bytemuck::cast_slice_mut(words),
            Words::File(mapped) => mapped.bytes_mut(),
        }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.words.bytes()[..self.count * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.words.bytes_mut()[..self.count * size_of::<T>()])
    }
}

impl<T: Pod> AsRef<[T]> for Buffer<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Pod> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        let mut clone = Buffer::unset(self.count);
        clone.copy_from_slice(self);
        clone
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} values", self.count)
    }
}

/// `count` zeros, which take no memory until they are written.
pub fn zeros<T: Copy + Default>(count: usize) -> Vec<T> {
    let mut zeros = vec![T::default(); count];
    in_huge_pages(&mut zeros);
    zeros
}

/// An empty vector with capacity for `count` values.
pub fn room<T: Copy>(count: usize) -> Vec<T> {
    let mut room = Vec::with_capacity(count);
    in_huge_pages(&mut room);
    room
}

/// Asks for huge pages, for every page that the memory touches: advising part of a mapping splits
/// it in two, and the number of mappings is limited. No effect if none are available.
#[cfg(target_os = "linux")]
fn in_huge_pages<T>(memory: &mut Vec<T>) {
    use nix::sys::mman::{MmapAdvise, madvise};
    let bytes = memory.capacity() * size_of::<T>();
    let first = memory.as_mut_ptr().cast::<u8>();
    let before = first.addr() % PAGE_BYTES;
    let start = std::ptr::NonNull::new(first.wrapping_sub(before).cast());
    if let Some(start) = start.filter(|_| bytes >= LARGE_BYTES) {
        let pages = (before + bytes).next_multiple_of(PAGE_BYTES);
        // SAFETY: the vector's memory lies in each of these pages, so all belong to this process. The
        // advice changes neither their content nor their access rights.
        let _ = unsafe { madvise(start, pages, MmapAdvise::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn in_huge_pages<T>(_: &mut Vec<T>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_zeros_and_room_is_empty() {
        for count in [0, 1, 1000, LARGE_BYTES / 2 + 1] {
            assert!(zeros::<u16>(count) == vec![0; count]);
            let room = room::<u32>(count);
            assert!(room.is_empty() && room.capacity() >= count);
        }
    }

    #[test]
    fn freed_memory_is_kept_up_to_the_limit() {
        let (words, more) = (KEPT_BYTES_MIN / 8, KEPT_BYTES_MIN / 8 + 1);
        let both_bytes = (words + more) * 8;
        let mut pool = Pool::new();
        assert!(pool.put(vec![1; words]).is_some(), "nobody gave room");
        assert!(pool.resize(0, both_bytes)._buffers.is_empty());
        assert!(pool.put(vec![1; words - 1]).is_some(), "not worth it");
        assert_eq!(pool.put(vec![1; words]), None);
        assert!(pool.put(vec![2; more + 1]).is_some(), "one word too many");
        assert_eq!(pool.put(vec![2; more]), None);
        assert_eq!(pool.bytes, both_bytes);
        assert_eq!(pool.take(more), Some(vec![2; more]));
        assert_eq!(pool.take(more), None, "each is kept once");
        assert_eq!(pool.take(words + 7), None, "of another size");
        assert_eq!(pool.put(vec![2; more]), None);
        // a second limit, after which the first is removed
        assert!(pool.resize(0, both_bytes)._buffers.is_empty());
        assert!(pool.resize(both_bytes, 0)._buffers.is_empty());
        // the lower limit has room for one of the two buffers
        assert_eq!(pool.resize(both_bytes, more * 8)._buffers, [vec![1; words]]);
        assert_eq!(pool.resize(more * 8, 0)._buffers, [vec![2; more]]);
        assert_eq!((pool.bytes, pool.room, pool.buffers.len()), (0, 0, 0));
    }

    #[test]
    fn what_exceeds_the_budget_lies_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        budget(3 * KEPT_BYTES_MIN as u64, folder.path());
        let count = KEPT_BYTES_MIN + 4;
        let mut kept: Vec<Buffer<u8>> = (0..4).map(|_| Buffer::at_rest(count)).collect();
        let in_files = kept.iter().filter(|buffer| matches!(buffer.words, Words::File(_)));
        assert!(in_files.count() >= 2, "other tests may take some of the budget, too");
        for (buffer, value) in kept.iter_mut().zip(0..) {
            buffer.fill(value);
        }
        // its pages become zeros, and those of its neighbors stay
        drop(kept.remove(2));
        for (buffer, value) in kept.iter().zip([0, 1, 3]) {
            assert!(buffer.len() == count && buffer.iter().all(|byte| *byte == value));
        }
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            0,
            "they have no names"
        );
        let path = folder.path().join("weights");
        std::fs::write(&path, &*kept[2]).unwrap();
        assert_eq!(read_file(&path).unwrap(), kept[2][..]);
        budget(u64::MAX, folder.path());
        assert!(Buffer::<u8>::at_rest(count).budgeted > 0);
    }

    #[test]
    fn a_buffer_has_the_values_that_were_set() {
        let mut spare = Spare::default();
        drop(spare.resize(u64::MAX));
        for count in [0, 1, 3, KEPT_BYTES_MIN / 2 + 5] {
            for _ in 0..2 {
                let mut buffer = Buffer::<u16>::unset(count);
                let expected: Vec<u16> = (0..count).map(|i| (i * 7) as u16).collect();
                buffer.copy_from_slice(&expected);
                assert!(*buffer == *expected && *buffer.clone() == *expected);
            }
        }
    }
}
