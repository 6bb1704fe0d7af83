//! A delta decoded against its base before anything is written: index and new value of every
//! changed weight.
//!
//! Every frame is checked first, in the base and after the change, and so is the content hash of
//! the whole result. Values are absolute, so a write can be repeated or undone after an
//! interruption. The base is not copied; only the old values of changed weights are kept.

use std::ops::Range;

use super::frame::{self, Change, Direction, Frame};
use super::index;
use super::{Error, Header, in_entry, malformed, result_index, simd};
use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::merkle::{self, ChunkHash};
use crate::tensor::{TensorData, weight_bytes};
use crate::threads::Threads;

/// The changes that a delta makes to the weights of its base.
#[derive(Debug)]
pub struct Patch {
    header: Header,
    /// Ascending by name.
    tensors: Vec<(String, Vec<Piece>)>,
}

/// A frame that changes.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Where its bytes are in the tensor.
    pub byte_range: Range<usize>,
    /// Bytes of a weight.
    pub width: usize,
    pub frame: Frame,
    /// The change and its inverse. Both name the same weights.
    pub new: Change,
    pub old: Change,
}

/// Which of a patch's two versions some bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchState {
    Base,
    Result,
    /// A write was interrupted, or these are unrelated bytes.
    Neither,
}

impl Patch {
    /// Decodes and checks `delta`. `base_root` is the verified content hash of `base`. The delta
    /// must change weights only.
    pub fn decode(base: &Checkpoint, base_root: Digest, delta: &[u8], threads: &Threads) -> Result<Self, Error> {
        let opened = index::open(delta)?;
        if opened.header.base != base_root {
            return Err(Error::WrongBase {
                expected: opened.header.base,
                found: base_root,
            });
        }
        opened.index.check_reversible()?;
        // The index leads to the result's content hash. The frames are compared with the index below.
        result_index::check(&opened, &base.content_index(threads), false)?;
        let mut payloads = opened.payloads;
        let mut jobs = vec![];
        for (entry, named) in opened.index.tensors.iter().enumerate() {
            let malformed = |reason: &str| in_entry(&named.name, Error::Malformed(reason.into()));
            let Some(tensor) = &named.change else { continue };
            let held = base.tensors.get(&named.name);
            let held = held.filter(|held| held.dtype == tensor.dtype && held.shape == tensor.shape);
            let held = held.ok_or_else(|| malformed("the base has no such tensor"))?;
            for (frame, byte_range) in tensor.frames.iter().zip(super::frames(held)) {
                let payload = payloads.split_off(..frame.payload_bytes as usize);
                let payload = payload.ok_or_else(|| malformed("a payload is longer than the delta"))?;
                jobs.push((entry, held, frame, payload, byte_range));
            }
        }
        let pieces = threads.map(jobs, |(entry, held, frame, payload, byte_range)| {
            (entry, piece(held, frame, payload, byte_range))
        });
        let entries = &opened.index.tensors;
        let mut tensors: Vec<(String, Vec<Piece>)> = entries.iter().map(|entry| (entry.name.clone(), vec![])).collect();
        let mut hashes: Vec<Vec<ChunkHash>> = vec![vec![]; entries.len()];
        for (entry, piece) in pieces {
            let (name, pieces) = &mut tensors[entry];
            let (hash, piece) = piece.map_err(|error| in_entry(name, error))?;
            hashes[entry].push(hash);
            pieces.extend(piece);
        }
        for (named, hashes) in entries.iter().zip(hashes) {
            let Some(tensor) = &named.change else { continue };
            if merkle::merge(&hashes, tensor.frame_bytes(), tensor.bytes()?) != tensor.result {
                let reason = "its bytes have another digest than the delta says";
                return Err(in_entry(&named.name, malformed(reason)));
            }
        }
        Ok(Patch {
            header: opened.header,
            tensors,
        })
    }

    pub fn header(&self) -> Header {
        self.header
    }

    /// Names of the tensors that change.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(name, _)| name.as_str())
    }

    /// Number of weights that [`write`](Self::write) writes.
    pub fn weights(&self) -> u64 {
        let pieces = self.tensors.iter().flat_map(|(_, pieces)| pieces);
        let weights = pieces.map(|piece| match &piece.new {
            Change::Same => 0,
            Change::Some(values) => values.len(),
            Change::All(bytes) => bytes.len() / piece.width,
        });
        weights.map(|weights| weights as u64).sum()
    }

    /// Writes the result's values into the bytes of a tensor. Idempotent.
    pub fn write(&self, name: &str, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(name, bytes)?;
        for piece in self.pieces(name) {
            piece.new.write(piece.width, &mut bytes[piece.byte_range.clone()]);
        }
        Ok(())
    }

    /// Writes the base's values back.
    pub fn revert(&self, name: &str, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(name, bytes)?;
        for piece in self.pieces(name) {
            piece.old.write(piece.width, &mut bytes[piece.byte_range.clone()]);
        }
        Ok(())
    }

    /// Which version a tensor's bytes are, by the digests of the changed frames.
    pub fn state(&self, name: &str, bytes: &[u8]) -> Result<PatchState, Error> {
        self.check(name, bytes)?;
        let (mut base, mut result) = (true, true);
        for piece in self.pieces(name) {
            let digest = frame::digest(&bytes[piece.byte_range.clone()]);
            base &= digest == piece.frame.base;
            result &= digest == piece.frame.result;
        }
        Ok(match (base, result) {
            (true, _) => PatchState::Base,
            (_, true) => PatchState::Result,
            _ => PatchState::Neither,
        })
    }

    pub(crate) fn pieces(&self, name: &str) -> &[Piece] {
        let found = self.tensors.binary_search_by(|(other, _)| other.as_str().cmp(name));
        found.map_or(&[], |index| &self.tensors[index].1)
    }

    /// Returns an error if there are too few bytes.
    fn check(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        match self.pieces(name).last() {
            Some(piece) if piece.byte_range.end > bytes.len() => {
                Err(in_entry(name, Error::Malformed("the tensor has fewer bytes".into())))
            }
            _ => Ok(()),
        }
    }
}

/// The hash of the frame in the result, and its change; none if it does not change.
fn piece(
    held: &TensorData,
    frame: &Frame,
    payload: &[u8],
    byte_range: Range<usize>,
) -> Result<(ChunkHash, Option<Piece>), Error> {
    let (width, bytes) = (weight_bytes(held.dtype), &held.bytes[byte_range.clone()]);
    let hash = |bytes: &[u8]| merkle::chunk_hash(&[bytes], byte_range.start, held.bytes.len());
    if *frame == Frame::SAME {
        return Ok((hash(bytes), None));
    }
    let new = frame::decode(simd::best(), width, frame, payload, bytes, Direction::Forward)?;
    let mut after = bytes.to_vec();
    new.write(width, &mut after);
    frame::check(frame, &after, Direction::Forward)?;
    let old = new.inverse(width, bytes);
    let hash = hash(&after);
    let piece = Piece {
        byte_range,
        width,
        frame: *frame,
        new,
        old,
    };
    Ok((hash, Some(piece)))
}
