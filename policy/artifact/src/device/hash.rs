//! XXH3-128 of frames where they are: of eight threads each, and all frames at once.

#![expect(
    unsafe_code,
    reason = "frames are named by their addresses, which are asked for here"
)]

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
    /// Too short for the kernel: a few bytes, which are read. With their places among all.
    short: Vec<(usize, Arc<Memory>, Range<usize>)>,
}

#[derive(Debug)]
struct Long {
    /// Their places among all.
    places: Vec<usize>,
    /// Addresses and lengths.
    frames: Memory,
    lanes: Memory,
    digests: Memory,
    /// Kept for as long as their addresses are used.
    #[expect(dead_code, reason = "held, not read")]
    tensors: Vec<Arc<Memory>>,
}

impl Hashes {
    pub fn of<'a>(driver: &Arc<dyn Driver>, parts: impl Iterator<Item = Part<'a>>) -> Result<Self, Error> {
        let (mut frames, mut places, mut tensors, mut short) = (vec![], vec![], vec![], vec![]);
        let mut count = 0;
        for (place, (tensor, at)) in parts.enumerate() {
            count = place + 1;
            if at.len() < HASHED_BYTES_MIN {
                short.push((place, tensor.clone(), at));
                continue;
            }
            for number in [tensor.address(at.clone())?, at.len() as u64] {
                frames.extend(number.to_le_bytes());
            }
            places.push(place);
            tensors.push(tensor.clone());
        }
        let long = if places.is_empty() {
            None
        } else {
            Some(Long {
                frames: Memory::of(driver, &frames)?,
                lanes: Memory::new(driver, places.len() * 64)?,
                digests: Memory::new(driver, places.len() * 16)?,
                places,
                tensors,
            })
        };
        Ok(Hashes { count, long, short })
    }

    /// Of the parts as they are now, in their order.
    pub fn digests(&self) -> Result<Vec<u128>, Error> {
        let mut all = vec![0; self.count];
        if let Some(Long {
            places,
            frames,
            lanes,
            digests,
            ..
        }) = &self.long
        {
            // SAFETY: the addresses were asked for with their lengths, none of them short, and the tensors are held.
            unsafe { kernels::hash(frames, places.len(), lanes, digests)? };
            let bytes = digests.read(0..places.len() * 16)?;
            for (&place, &digest) in places.iter().zip(bytes.as_chunks::<16>().0) {
                all[place] = u128::from_le_bytes(digest);
            }
        }
        for (place, tensor, at) in &self.short {
            all[*place] = digest(&tensor.read(at.clone())?);
        }
        Ok(all)
    }
}

/// The frames that a patch touches, and what they are in base and result.
#[derive(Debug)]
pub(super) struct Frames {
    hashes: Hashes,
    ends: Vec<[u128; 2]>,
}

impl Frames {
    pub fn of(driver: &Arc<dyn Driver>, touched: &[(&Arc<Memory>, &Piece)]) -> Result<Self, Error> {
        let parts = touched.iter().map(|&(tensor, piece)| (tensor, piece.at.clone()));
        let ends = touched.iter().map(|(_, piece)| [piece.frame.base, piece.frame.result]);
        Ok(Frames {
            hashes: Hashes::of(driver, parts)?,
            ends: ends.collect(),
        })
    }

    pub fn state(&self) -> Result<PatchState, Error> {
        let digests = self.hashes.digests()?;
        let is = |end: usize| {
            digests
                .iter()
                .zip(&self.ends)
                .all(|(digest, ends)| *digest == ends[end])
        };
        Ok(match (is(0), is(1)) {
            (true, _) => PatchState::Base,
            (_, true) => PatchState::Result,
            _ => PatchState::Between,
        })
    }
}
