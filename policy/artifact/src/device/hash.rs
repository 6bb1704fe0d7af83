//! XXH3-128 of frames on the device: all frames in one launch, with eight threads per frame.

#![expect(unsafe_code, reason = "the kernel gets addresses of frames, which are checked here")]

use std::ops::Range;
use std::sync::Arc;

use super::Error;
use super::driver::Driver;
use super::kernels::{self, HASHED_BYTES_MIN};
use super::memory::Memory;
use crate::delta::{PatchState, Piece, digest};

/// A part of a tensor that begins at a multiple of 16 bytes.
pub(super) type Part<'a> = (&'a Arc<Memory>, Range<usize>);

/// Parts of tensors, to be hashed any number of times.
#[derive(Debug)]
pub(super) struct Hashes {
    count: usize,
    long: Option<Long>,
    /// Parts that are too short for the kernel, with their positions. The CPU hashes them.
    short: Vec<(usize, Arc<Memory>, Range<usize>)>,
}

#[derive(Debug)]
struct Long {
    /// Their positions among all parts.
    positions: Vec<usize>,
    /// Addresses and lengths.
    frames: Memory,
    accumulators: Memory,
    digests: Memory,
    /// Keeps the memory allocated while its addresses are used.
    #[expect(dead_code, reason = "held, not read")]
    tensors: Vec<Arc<Memory>>,
}

impl Hashes {
    pub fn new<'a>(driver: &Arc<dyn Driver>, parts: impl Iterator<Item = Part<'a>>) -> Result<Self, Error> {
        let (mut frames, mut positions, mut tensors, mut short) = (vec![], vec![], vec![], vec![]);
        let mut count = 0;
        for (position, (tensor, range)) in parts.enumerate() {
            count = position + 1;
            if range.len() < HASHED_BYTES_MIN {
                short.push((position, tensor.clone(), range));
                continue;
            }
            for number in [tensor.address(range.clone())?, range.len() as u64] {
                frames.extend(number.to_le_bytes());
            }
            positions.push(position);
            tensors.push(tensor.clone());
        }
        let long = if positions.is_empty() {
            None
        } else {
            Some(Long {
                frames: Memory::upload(driver, &frames)?,
                accumulators: Memory::new(driver, positions.len() * 64)?,
                digests: Memory::new(driver, positions.len() * 16)?,
                positions,
                tensors,
            })
        };
        Ok(Hashes { count, long, short })
    }

    /// The digests of the parts as they are now, in order.
    pub fn digests(&self) -> Result<Vec<u128>, Error> {
        let mut result = vec![0; self.count];
        if let Some(Long {
            positions,
            frames,
            accumulators,
            digests,
            ..
        }) = &self.long
        {
            // SAFETY: addresses and lengths were checked, no part is too short, and `tensors` keeps
            // the memory.
            unsafe { kernels::hash(frames, positions.len(), accumulators, digests)? };
            let bytes = digests.read(0..positions.len() * 16)?;
            for (&position, &digest) in positions.iter().zip(bytes.as_chunks::<16>().0) {
                result[position] = u128::from_le_bytes(digest);
            }
        }
        for (position, tensor, range) in &self.short {
            result[*position] = digest(&tensor.read(range.clone())?);
        }
        Ok(result)
    }
}

/// The frames that a patch changes, with their digests in base and result.
#[derive(Debug)]
pub(super) struct PatchFrames {
    hashes: Hashes,
    /// Digests in the base and in the result.
    expected: Vec<[u128; 2]>,
}

impl PatchFrames {
    pub fn new(driver: &Arc<dyn Driver>, touched: &[(&Arc<Memory>, &Piece)]) -> Result<Self, Error> {
        let parts = touched
            .iter()
            .map(|&(tensor, piece)| (tensor, piece.byte_range.clone()));
        let expected = touched.iter().map(|(_, piece)| [piece.frame.base, piece.frame.result]);
        Ok(PatchFrames {
            hashes: Hashes::new(driver, parts)?,
            expected: expected.collect(),
        })
    }

    pub fn state(&self) -> Result<PatchState, Error> {
        let digests = self.hashes.digests()?;
        let matches = |version: usize| {
            digests
                .iter()
                .zip(&self.expected)
                .all(|(digest, expected)| *digest == expected[version])
        };
        Ok(match (matches(0), matches(1)) {
            (true, _) => PatchState::Base,
            (_, true) => PatchState::Result,
            _ => PatchState::Neither,
        })
    }
}
