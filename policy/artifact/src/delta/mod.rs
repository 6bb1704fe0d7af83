//! A delta turns the bytes of one version into the bytes of another. It names both by content hash.
//! Most deltas also work in reverse.
//!
//! Lossless for any dtype: weights are bit patterns, so NaN payloads and −0.0 survive. A delta
//! holds only what differs. It knows no version numbers, lines or storage.
//!
//! ```text
//! offset  size
//!      0     8  "SPTDELTA"
//!      8     4  format version, 2
//!     12     4  zero
//!     16    32  content hash of the base
//!     48    32  content hash of the result
//!     80     8  length of the index
//!     88     8  length of the payloads
//!     96     8  length of the reverse section
//!    104    32  BLAKE3 of bytes 0 to 103 and the index
//!    136        the index (see `index`)
//!               payloads of the frames (`frame`, `bucket`, `planes`) and files, in index order, without gaps
//!               the reverse section: what each frame needs to be undone, in the same order
//! ```
//! Integers are little-endian. The reverse section may be cut off; readers that only go forward
//! skip it.
//!
//! A tensor is coded in frames of 2^20 weights. Each frame is coded, checked and decoded on its
//! own. So any number of threads produce the same bytes, and a part of a tensor needs only its own
//! frames.

mod apply;
mod bits;
mod bucket;
mod encode;
mod files;
mod frame;
mod index;
mod patch;
mod planes;
mod result_index;
mod shards;
mod simd;

use crate::checkpoint::Checkpoint;
use crate::content_index;
use crate::digest::Digest;
use crate::tensor::{TensorData, weight_bytes};
use crate::threads::Threads;
use crate::wire;
use apply::apply_delta;
use frame::WEIGHTS;

pub use encode::{Changes, encode, encode_changes};
pub use files::{DeltaHead, PREFIX_BYTES};
pub(crate) use frame::differing;
pub use frame::{Change, WEIGHTS as FRAME_WEIGHTS, encode_payload};
pub use patch::{Patch, PatchState};
pub use shards::{
    EncodedShard, FrameRange, FrameSpan, MergedDelta, ShardReport, concat, encode_shard, merge_shards, partition,
};
#[cfg(any(test, feature = "cuda"))]
pub(crate) use {frame::digest, frame::is_sparse, patch::Piece};
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use {frame::fuzz_frame, index::resealed};

/// Limit on a result's bytes if the caller gives none.
const RESULT_BYTES_MAX: u64 = 1 << 40;

/// Why a delta could not be made, or was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the delta does not start with its magic")]
    Magic,
    #[error("unknown delta format version {0}; this program reads version 2")]
    FormatVersion(u32),
    #[error("the delta ends early, or the checksum of its index does not match")]
    Checksum,
    #[error("the delta applies to the version with content hash {expected}, not to {found}")]
    WrongBase { expected: Digest, found: Digest },
    #[error("the delta is malformed: {0}")]
    Malformed(String),
    #[error("the result would take {needed} bytes, more than the {limit} allowed")]
    TooLarge { needed: u64, limit: u64 },
    #[error("the delta made a version with content hash {found}, not {expected}")]
    WrongResult { expected: Digest, found: Digest },
    #[error("the delta is not reversible ({0}): fetch the other version, or a delta to it")]
    NotReversible(&'static str),
    #[error("the checkpoint cannot be coded: {0}")]
    Checkpoint(content_index::Error),
    #[error("compress: {0}")]
    Compress(std::io::Error),
}

/// Content hashes of the two versions of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub base: Digest,
    pub result: Digest,
}

/// How much of a version a step changed. For dtypes narrower than a byte, each byte counts as a
/// weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub changed_weights: u64,
    pub total_weights: u64,
}

/// The version that `delta` makes of `base`. Unchanged tensors share `base`'s memory.
pub fn apply(base: &Checkpoint, delta: &[u8], threads: &Threads) -> Result<Checkpoint, Error> {
    Ok(apply_within(base, delta, RESULT_BYTES_MAX, threads)?.0)
}

/// [`apply`] with a limit on the result's bytes, tensors and files together. Also returns the
/// result's content hash. The limit is checked before memory is allocated.
pub fn apply_within(
    base: &Checkpoint,
    delta: &[u8],
    result_bytes_max: u64,
    threads: &Threads,
) -> Result<(Checkpoint, Digest), Error> {
    let opened = index::open(delta)?;
    let content = base.content_index(threads);
    let result = apply_delta(base, &content, &opened, result_bytes_max, false, threads)?;
    Ok((result, opened.header.result))
}

/// The version that `delta` was made from, rebuilt from its result. A delta that adds, removes or
/// reshapes a tensor, or changes a file, is not reversible.
pub fn apply_reverse(result: &Checkpoint, delta: &[u8], threads: &Threads) -> Result<Checkpoint, Error> {
    Ok(apply_reverse_within(result, delta, RESULT_BYTES_MAX, threads)?.0)
}

/// [`apply_reverse`] with a limit on the base's bytes. Also returns the base's content hash.
pub fn apply_reverse_within(
    result: &Checkpoint,
    delta: &[u8],
    base_bytes_max: u64,
    threads: &Threads,
) -> Result<(Checkpoint, Digest), Error> {
    let opened = index::open(delta)?;
    opened.index.check_reversible()?;
    if opened.reverse.is_none() {
        return Err(Error::NotReversible("its reverse section was not fetched"));
    }
    let content = result.content_index(threads);
    let base = apply_delta(result, &content, &opened, base_bytes_max, true, threads)?;
    Ok((base, opened.header.base))
}

/// Reads the header and verifies the checksum. Needs no base.
pub fn header(delta: &[u8]) -> Result<Header, Error> {
    Ok(index::open(delta)?.header)
}

/// Counts the weights whose bit patterns differ. In a new or reshaped tensor every weight counts as
/// changed.
pub fn stats(base: &Checkpoint, result: &Checkpoint) -> Stats {
    let mut stats = Stats::default();
    let mut differing = vec![];
    for (name, tensor) in &result.tensors {
        let width = weight_bytes(tensor.dtype);
        let weights = (tensor.bytes.len() / width) as u64;
        stats.total_weights += weights;
        match base.tensors.get(name).filter(|old| same_form(old, tensor)) {
            None => stats.changed_weights += weights,
            Some(old) => {
                for at in frames(tensor) {
                    differing.clear();
                    frame::differing(width, &old.bytes[at.clone()], &tensor.bytes[at], &mut differing);
                    stats.changed_weights += differing.len() as u64;
                }
            }
        }
    }
    stats
}

fn same_form(a: &TensorData, b: &TensorData) -> bool {
    a.dtype == b.dtype && a.shape == b.shape
}

/// The byte range of each frame of a tensor.
fn frames(tensor: &TensorData) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let (step, bytes) = (WEIGHTS * weight_bytes(tensor.dtype), tensor.bytes.len());
    (0..bytes)
        .step_by(step)
        .map(move |start| start..bytes.min(start + step))
}

impl From<wire::Error> for Error {
    fn from(error: wire::Error) -> Self {
        Error::Malformed(error.to_string())
    }
}

fn malformed(reason: &str) -> Error {
    Error::Malformed(reason.into())
}

/// Puts the name of the tensor or file into the error.
fn in_entry(name: &str, error: Error) -> Error {
    match error {
        Error::Malformed(reason) => Error::Malformed(format!("`{name}`: {reason}")),
        other => other,
    }
}

#[cfg(test)]
mod tests;
