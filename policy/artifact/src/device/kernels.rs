//! The kernels of `kernels.cu` as functions. Each function checks the bounds of all memory that its
//! kernel uses, and returns an error if there is too little.

#![expect(unsafe_code, reason = "launches kernels with addresses, after checking their bounds")]

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
/// The start of a frame whose weights are not collected.
pub(super) const NOWHERE: u64 = u64::MAX;
/// Frames shorter than this are hashed in another way.
pub(super) const HASHED_BYTES_MIN: usize = 241;

/// Sets bit i of `bits` if weight i of `old` and `new` differs. Both ranges have the same length, a
/// multiple of `width`. The rest of `bits` becomes zero.
pub(super) fn compare(
    width: usize,
    old: &Memory,
    new: &Memory,
    byte_range: Range<usize>,
    bits: &Memory,
) -> Result<(), Error> {
    let name = by_width(width, ["compare_1", "compare_2", "compare_4", "compare_8"]);
    let (weights, groups) = (byte_range.len() / width, bits.len());
    check_len(bits, weights.div_ceil(8))?;
    let arguments = [
        old.address(byte_range.clone())?,
        new.address(byte_range)?,
        weights as u64,
        groups as u64,
        bits.address(0..groups)?,
    ];
    // SAFETY: the kernel reads `weights` weights of both and writes `groups` bytes.
    unsafe { launch(bits, name, groups, &arguments) }
}

/// Counts the bits of each chunk.
pub(super) fn count(bits: &Memory, chunks: usize, counts: &Memory) -> Result<(), Error> {
    let arguments = [
        bits.address(0..chunks * CHUNK / 8)?,
        chunks as u64,
        counts.address(0..chunks * 4)?,
    ];
    // SAFETY: for each of `chunks`, the kernel reads its bits and writes a number.
    unsafe { launch(counts, "count", chunks, &arguments) }
}

/// In runs of [`RUN`], replaces each of `count` numbers by the sum of those before it in its run.
/// The sum of each run goes to `sums`.
pub(super) fn sum(numbers: &Memory, count: usize, sums: &Memory) -> Result<(), Error> {
    let runs = count.div_ceil(RUN);
    let arguments = [numbers.address(0..count * 4)?, count as u64, sums.address(0..runs * 4)?];
    // SAFETY: the kernel reads and writes `count` numbers and writes one for each of `runs`.
    unsafe { launch(sums, "sum", runs, &arguments) }
}

/// Results of [`compare`], [`count`] and [`sum`], for [`collect`].
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub bits: &'a Memory,
    pub chunks: usize,
    /// Number of differing weights before each chunk in its group, and before each group in its
    /// frame.
    pub before_chunk: &'a Memory,
    pub before_group: &'a Memory,
    /// Where each frame begins in the output, as u64.
    pub starts: &'a Memory,
}

/// Writes index and new value of each weight that differs, except in frames that start at
/// [`NOWHERE`]. `most` is the largest number of them. The frames' outputs must not overlap.
pub(super) fn collect(
    width: usize,
    new: &Memory,
    byte_range: Range<usize>,
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
        new.address(byte_range)?,
        bits.address(0..chunks * CHUNK / 8)?,
        before_chunk.address(0..chunks * 4)?,
        before_group.address(0..groups * 4)?,
        starts.address(0..groups.div_ceil(RUN) * 8)?,
        chunks as u64,
        indices.address(0..most * 4)?,
        values.address(0..most * width)?,
    ];
    // SAFETY: bits are set only for weights in the byte range, and the starts leave room for all of
    // them.
    unsafe { launch(indices, name, chunks, &arguments) }
}

/// Writes `values` to their `indices`. A run is the address of its frame, its first entry, and its
/// number of entries.
///
/// # Safety
/// Each run's frame is memory of the same device with weights of `width` bytes, and has all weights
/// that the run's indices name. The runs' entries are within `indices`.
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
    // SAFETY: a block reads one run; the caller guarantees the memory that the run names.
    unsafe { launch(runs, name, count * BLOCK_THREADS as usize, &arguments) }
}

/// XXH3-128 of each frame, as low and high half. `frames` has addresses and lengths. `accumulators`
/// has 64 bytes per frame.
///
/// # Safety
/// The frames are memory of the same device and have at least [`HASHED_BYTES_MIN`] bytes.
pub(super) unsafe fn hash(frames: &Memory, count: usize, accumulators: &Memory, digests: &Memory) -> Result<(), Error> {
    let (frames_at, accumulators_at) = (frames.address(0..count * 16)?, accumulators.address(0..count * 64)?);
    let digests_at = digests.address(0..count * 16)?;
    let number = count as u64;
    // SAFETY: eight threads per frame write one accumulator each; the caller guarantees the frames.
    unsafe { launch(accumulators, "hash", count * 8, &[frames_at, number, accumulators_at])? };
    // SAFETY: the kernel reads lengths and accumulators of `count` frames and writes their digests.
    unsafe {
        launch(
            digests,
            "digest",
            count,
            &[frames_at, number, accumulators_at, digests_at],
        )
    }
}

fn by_width(width: usize, names: [&'static str; 4]) -> &'static str {
    names[width.trailing_zeros().min(3) as usize]
}

fn check_len(memory: &Memory, bytes: usize) -> Result<(), Error> {
    memory.address(0..bytes).map(drop)
}

/// Launches `threads` threads, rounded up to full blocks.
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
    // SAFETY: as promised by the caller.
    unsafe { on.driver().launch(kernel, blocks, arguments) }
}
