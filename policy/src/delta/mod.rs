//! A delta: what turns the bytes of one version into the bytes of another, named by the roots of both, and mostly back again.
//!
//! Lossless for any dtype: weights are bit patterns, so NaN payloads and −0.0 survive. Only what differs is in it; a tensor of
//! the base that is not mentioned stays as it is. It says nothing of serials, lines or storage.
//!
//! ```text
//! offset  size
//!      0     8  "SPTDELTA"
//!      8     4  format version, 2
//!     12     4  zero
//!     16    32  root of the base
//!     48    32  root of the result
//!     80     8  length of the index
//!     88     8  length of the payloads
//!     96     8  length of what the way back needs
//!    104    32  BLAKE3 of the bytes 0 to 103 and the index
//!    136        the index (see `index`)
//!               the payloads of the frames (`frame`, `class`, `planes`) and of the files, in the index's order, without gaps
//!               what the way back needs, of each frame in the same order
//! ```
//! Integers are little-endian. The last part may be cut off: who only goes forward needs not fetch it.
//!
//! A tensor is coded in frames of 2^20 weights. Each is coded, checked and decoded alone, so any number of threads share the
//! work and make the same bytes, and a slice of a tensor needs its frames alone.

mod bits;
mod class;
mod cut;
mod encode;
mod follow;
mod frame;
mod index;
mod lanes;
mod patch;
mod planes;
mod roots;
mod shards;
mod slice;
mod tree;

use crate::digest::Digest;
use crate::image::{Image, TensorData};
use crate::kernel::Threads;
use crate::listing::{self, Listing};
use follow::follow;
use frame::WEIGHTS;

pub use cut::Cut;
pub use encode::{Changes, encode, encode_changes};
pub use frame::Change;
pub(crate) use index::width;
pub use patch::{Patch, State};
pub(crate) use roots::of as listing_of;
pub use shards::{Joined, Report, Run, Share, Stretch, join, run, share, stitch};
pub use slice::{FRAME_WEIGHTS, Slices, code, subtree, tensor_digest};
pub use tree::Part;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use {frame::digest, frame::few, patch::Piece};
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use {index::resealed, slice::fuzz_frame};

/// What a delta's result may occupy when the caller knows no better, in bytes.
const RESULT_BYTES_MAX: u64 = 1 << 40;

/// Why a delta could not be made or was refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the delta does not start with its magic")]
    Magic,
    #[error("delta format version {0} is not known here; 2 is")]
    FormatVersion(u32),
    #[error("the delta ends early, or the checksum of its index does not match")]
    Checksum,
    #[error("the delta applies to the version with root {expected}, not to {found}")]
    WrongBase { expected: Digest, found: Digest },
    #[error("the delta is malformed: {0}")]
    Malformed(String),
    #[error("the result would take {needed} bytes, more than the {limit} allowed")]
    TooLarge { needed: u64, limit: u64 },
    #[error("the delta made a version with root {found}, not {expected}")]
    WrongResult { expected: Digest, found: Digest },
    #[error("the delta goes one way only ({0}): fetch the other version, or a delta to it")]
    OneWay(&'static str),
    #[error("the image cannot be coded: {0}")]
    Image(listing::Error),
    #[error("compress: {0}")]
    Compress(std::io::Error),
}

/// What a delta says of itself before it is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub base: Digest,
    pub result: Digest,
}

/// How much of a version a step changed. Weights of dtypes narrower than a byte are counted in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub changed_weights: u64,
    pub total_weights: u64,
}

/// The version that `delta` makes of `base`. Tensors that did not change share `base`'s memory.
pub fn apply(base: &Image, delta: &[u8], threads: &Threads) -> Result<Image, Error> {
    apply_within(base, delta, RESULT_BYTES_MAX, threads)
}

/// [`apply`] with a limit on the bytes of the result (tensors and files together): memory is not taken before the limit,
/// and what the delta's own bytes can account for, are checked.
pub fn apply_within(base: &Image, delta: &[u8], result_bytes_max: u64, threads: &Threads) -> Result<Image, Error> {
    Ok(apply_rooted(base, delta, result_bytes_max, threads)?.0)
}

/// [`apply_within`], with the root of the result.
pub(crate) fn apply_rooted(
    base: &Image,
    delta: &[u8],
    result_bytes_max: u64,
    threads: &Threads,
) -> Result<(Image, Digest), Error> {
    let opened = index::open(delta)?;
    let (image, _) = follow(
        base,
        &roots::of(base, threads),
        &opened,
        result_bytes_max,
        false,
        threads,
    )?;
    Ok((image, opened.header.result))
}

/// The version that `delta` was made from, put together from its result. A delta that adds, removes or reshapes a tensor, or
/// changes a file, does not run this way.
pub fn apply_reverse(result: &Image, delta: &[u8], threads: &Threads) -> Result<Image, Error> {
    Ok(apply_reverse_rooted(result, delta, RESULT_BYTES_MAX, threads)?.0)
}

/// [`apply_reverse`] with a limit on the bytes of the base, and with the base's root.
pub(crate) fn apply_reverse_rooted(
    result: &Image,
    delta: &[u8],
    base_bytes_max: u64,
    threads: &Threads,
) -> Result<(Image, Digest), Error> {
    let opened = index::open(delta)?;
    if !opened.index.both_ways() {
        return Err(Error::OneWay(
            "it adds, removes or reshapes a tensor, or changes a file",
        ));
    }
    if opened.back.is_none() {
        return Err(Error::OneWay("its last part was not fetched"));
    }
    let listing = roots::of(result, threads);
    let (image, _) = follow(result, &listing, &opened, base_bytes_max, true, threads)?;
    Ok((image, opened.header.base))
}

/// Reads the header and verifies the checksum, without a base.
pub fn header(delta: &[u8]) -> Result<Header, Error> {
    Ok(index::open(delta)?.header)
}

/// [`Image::root`] with the tensors hashed on all threads.
pub fn root(image: &Image, threads: &Threads) -> Digest {
    roots::of(image, threads).root()
}

/// [`Listing::of`] with the tensors hashed on all threads.
pub(crate) fn listing(image: &Image, threads: &Threads) -> Listing {
    roots::of(image, threads)
}

/// BLAKE3 of `bytes`, on all threads.
pub(crate) fn digest_on(bytes: &[u8], threads: &Threads) -> Digest {
    tree::digest(bytes, threads)
}

/// Counts the weights whose bit patterns differ; every weight of a new or reshaped tensor counts as changed.
pub fn stats(base: &Image, result: &Image) -> Stats {
    let mut stats = Stats::default();
    let mut differing = vec![];
    for (name, tensor) in &result.tensors {
        let width = width(tensor.dtype);
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

/// The bytes of each frame of a tensor.
fn frames(tensor: &TensorData) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
    let (step, bytes) = (WEIGHTS * width(tensor.dtype), tensor.bytes.len());
    (0..bytes)
        .step_by(step)
        .map(move |start| start..bytes.min(start + step))
}

impl From<listing::Error> for Error {
    fn from(error: listing::Error) -> Self {
        Error::Malformed(error.to_string())
    }
}

fn in_entry(name: &str, error: Error) -> Error {
    match error {
        Error::Malformed(reason) => Error::Malformed(format!("`{name}`: {reason}")),
        other => other,
    }
}

#[cfg(test)]
mod tests;
