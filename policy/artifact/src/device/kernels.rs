//! The kernels of `kernels.cu` as functions: each asks for the addresses of all that it touches,
//! and so is refused where that is not there.

#![expect(
    unsafe_code,
    reason = "launches kernels with addresses; what they touch of each is asked for first"
)]

use std::ops::Range;

use super::Error;
use super::driver::BLOCK_THREADS;
use super::memory::Memory;

pub(super) const NAMES: [&str; 16] = [
    "compare_1",
    "compare_2",
    "compare_4",
    "compare_8",
    "count",
    "sum",
    "collect_1",
    "collect_2",
    "collect_4",
    "collect_8",
    "put_1",
    "put_2",
    "put_4",
    "put_8",
    "hash",
    "digest",
];

/// Weights that a thread counts and collects.
pub(super) const CHUNK: usize = 1024;
/// Numbers that a thread sums up: chunks of a group, groups of a frame.
pub(super) const RUN: usize = 32;
/// Where a frame's weights start that are not collected.
pub(super) const NOWHERE: u64 = u64::MAX;
/// Frames shorter than this are hashed in another way.
pub(super) const HASHED_BYTES_MIN: usize = 241;

/// Sets bit i of `bits` where weight i of `old` and `new` differ; both ranges have the same length,
/// a multiple of `width`. `bits` is filled with zeros to its end.
pub(super) fn compare(width: usize, old: &Memory, new: &Memory, at: Range<usize>, bits: &Memory) -> Result<(), Error> {
    let name = by_width(width, ["compare_1", "compare_2", "compare_4", "compare_8"]);
    let (weights, groups) = (at.len() / width, bits.len());
    need(bits, weights.div_ceil(8))?;
    let arguments = [
        old.address(at.clone())?,
        new.address(at)?,
        weights as u64,
        groups as u64,
        bits.address(0..groups)?,
    ];
    // SAFETY: it reads `weights` weights of both and writes `groups` bytes.
    unsafe { launch(bits, name, groups, &arguments) }
}

/// Counts the bits of each chunk.
pub(super) fn count(bits: &Memory, chunks: usize, counts: &Memory) -> Result<(), Error> {
    let arguments = [
        bits.address(0..chunks * CHUNK / 8)?,
        chunks as u64,
        counts.address(0..chunks * 4)?,
    ];
    // SAFETY: it reads a chunk's bits and writes a number for each of `chunks`.
    unsafe { launch(counts, "count", chunks, &arguments) }
}

/// In runs of [`RUN`], each of `count` numbers becomes the sum of those before it; the runs' sums
/// go to `sums`.
pub(super) fn sum(numbers: &Memory, count: usize, sums: &Memory) -> Result<(), Error> {
    let runs = count.div_ceil(RUN);
    let arguments = [numbers.address(0..count * 4)?, count as u64, sums.address(0..runs * 4)?];
    // SAFETY: it reads and writes `count` numbers and writes one for each of `runs`.
    unsafe { launch(sums, "sum", runs, &arguments) }
}

/// What [`compare`], [`count`] and [`sum`] found, for [`collect`].
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub bits: &'a Memory,
    pub chunks: usize,
    /// Weights that differ before each chunk in its group, before each group in its frame.
    pub before_chunk: &'a Memory,
    pub before_group: &'a Memory,
    /// Where each frame's begin in the output, as u64.
    pub starts: &'a Memory,
}

/// Writes index and new value of each weight that differs. `most` is how many there are at most, of
/// all frames that are not [`NOWHERE`]: their starts and counts leave room for each other.
pub(super) fn collect(
    width: usize,
    new: &Memory,
    at: Range<usize>,
    found: &Found<'_>,
    most: usize,
    indices: &Memory,
    values: &Memory,
) -> Result<(), Error> {
    let name = by_width(width, ["collect_1", "collect_2", "collect_4", "collect_8"]);
    let Found {
        bits,
        chunks,
        before_chunk,
        before_group,
        starts,
    } = *found;
    let groups = chunks.div_ceil(RUN);
    let arguments = [
        new.address(at)?,
        bits.address(0..chunks * CHUNK / 8)?,
        before_chunk.address(0..chunks * 4)?,
        before_group.address(0..groups * 4)?,
        starts.address(0..groups.div_ceil(RUN) * 8)?,
        chunks as u64,
        indices.address(0..most * 4)?,
        values.address(0..most * width)?,
    ];
    // SAFETY: bits are set for weights within `at` alone, and as many of them as the starts leave room for.
    unsafe { launch(indices, name, chunks, &arguments) }
}

/// Writes `values` to their `indices`. A run is the address of its frame, its first entry, and how
/// many it has.
///
/// # Safety
/// Each run's frame is memory of the same device, of weights of `width` bytes, and has all weights
/// that its indices name; the runs' entries are among those of `indices`.
pub(super) unsafe fn put(
    width: usize,
    runs: &Memory,
    count: usize,
    indices: &Memory,
    values: &Memory,
) -> Result<(), Error> {
    let name = by_width(width, ["put_1", "put_2", "put_4", "put_8"]);
    let arguments = [
        runs.address(0..count * 24)?,
        indices.address(0..indices.len())?,
        values.address(0..indices.len() / 4 * width)?,
    ];
    // SAFETY: a block reads one run; what the run leads to is the caller's to vouch for.
    unsafe { launch(runs, name, count * BLOCK_THREADS as usize, &arguments) }
}

/// XXH3-128 of each frame, whose addresses and lengths are in `frames`, as low and high halves;
/// `lanes` is room for 64 bytes a frame.
///
/// # Safety
/// The frames are memory of the same device and have [`HASHED_BYTES_MIN`] bytes or more.
pub(super) unsafe fn hash(frames: &Memory, count: usize, lanes: &Memory, digests: &Memory) -> Result<(), Error> {
    let (frames_at, lanes_at) = (frames.address(0..count * 16)?, lanes.address(0..count * 64)?);
    let digests_at = digests.address(0..count * 16)?;
    let number = count as u64;
    // SAFETY: eight threads a frame write a lane each; the frames are the caller's to vouch for.
    unsafe { launch(lanes, "hash", count * 8, &[frames_at, number, lanes_at])? };
    // SAFETY: it reads the lengths and lanes of `count` frames and writes their digests.
    unsafe { launch(digests, "digest", count, &[frames_at, number, lanes_at, digests_at]) }
}

fn by_width(width: usize, names: [&'static str; 4]) -> &'static str {
    names[width.trailing_zeros().min(3) as usize]
}

fn need(memory: &Memory, bytes: usize) -> Result<(), Error> {
    memory.address(0..bytes).map(drop)
}

/// On as many threads, and those that fill up the last block.
///
/// # Safety
/// As [`Driver::launch`](super::driver::Driver::launch).
unsafe fn launch(on: &Memory, kernel: &'static str, threads: usize, arguments: &[u64]) -> Result<(), Error> {
    let blocks = threads.div_ceil(BLOCK_THREADS as usize);
    if blocks == 0 {
        return Ok(());
    }
    let blocks = u32::try_from(blocks)
        .ok()
        .filter(|&blocks| blocks <= i32::MAX as u32)
        .ok_or(Error::TooMany { kernel })?;
    // SAFETY: the caller's.
    unsafe { on.driver().launch(kernel, blocks, arguments) }
}
