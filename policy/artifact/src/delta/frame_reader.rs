//! Applies single frames of a delta in place, for a reader that holds only some frames of a tensor.

use std::ops::Range;

use safetensors::Dtype;

use super::frame::{self, Change, Direction, Frame, WEIGHTS};
use super::index::{self, Index, Tensor};
use super::{Error, Header, in_entry, simd};
use crate::digest::Digest;
use crate::merkle::{self, ChunkHash};
use crate::tensor::weight_bytes;

/// Weights per frame. A part of a tensor starts at a multiple of it, and ends at one or at the
/// tensor's end.
pub const FRAME_WEIGHTS: usize = WEIGHTS;

/// A delta with a verified index, to be applied frame by frame.
#[derive(Debug)]
pub struct FrameReader<'a> {
    header: Header,
    index: Index,
    head_bytes: usize,
    /// Empty if only the head is at hand.
    payloads: &'a [u8],
}

impl<'a> FrameReader<'a> {
    /// Verifies header and index of a whole delta.
    pub fn open(delta: &'a [u8]) -> Result<Self, Error> {
        let opened = index::open(delta)?;
        Ok(FrameReader {
            header: opened.header,
            index: opened.index,
            head_bytes: opened.head_bytes,
            payloads: opened.payloads,
        })
    }

    /// Reads header and index alone; the payloads are elsewhere.
    pub fn from_head(head: &[u8]) -> Result<FrameReader<'static>, Error> {
        let head = index::open_head(head)?;
        Ok(FrameReader {
            header: head.header,
            index: head.index,
            head_bytes: head.bytes,
            payloads: &[],
        })
    }

    /// Roots of the delta's versions.
    pub fn header(&self) -> Header {
        self.header
    }

    /// Offset of the first payload in the delta, bytes.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// Byte range of the frames' payloads, counted from the first payload of the delta. None if the
    /// tensor does not change, is removed, or is new.
    pub fn payload(&self, name: &str, frames: Range<usize>) -> Option<Range<u64>> {
        let (before, tensor) = self.find(name)?;
        let bytes = |frames: &[Frame]| frames.iter().map(|frame| u64::from(frame.payload_bytes)).sum::<u64>();
        let start = before + bytes(tensor.frames.get(..frames.start)?);
        Some(start..start + bytes(tensor.frames.get(frames)?))
    }

    /// Applies the delta to `bytes`, which start at `first_frame` of the tensor. Each frame is
    /// checked before and after. On an error the failing frame is unchanged, and those before it
    /// are done.
    pub fn apply(&self, name: &str, first_frame: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let Some((_, tensor)) = self.find(name) else {
            return Ok(());
        };
        let frames = bytes.len().div_ceil(WEIGHTS * weight_bytes(tensor.dtype));
        let at = self.payload(name, first_frame..first_frame.saturating_add(frames));
        let payload = at.and_then(|at| self.payloads.get(at.start as usize..at.end as usize));
        let payload = payload.ok_or_else(|| fewer(name))?;
        self.apply_fetched(name, first_frame, payload, bytes)
    }

    /// [`apply`](Self::apply) with fetched payloads: the bytes in the range
    /// [`payload`](Self::payload).
    pub fn apply_fetched(&self, name: &str, first_frame: usize, payload: &[u8], bytes: &mut [u8]) -> Result<(), Error> {
        self.each(name, first_frame, payload, bytes, |width, frame, payload, bytes| {
            frame::apply(simd::best(), width, frame, payload, bytes, Direction::Forward)
        })
    }

    /// [`apply_fetched`](Self::apply_fetched) that also returns each frame's change, for other
    /// holders of its weights.
    pub fn changes(
        &self,
        name: &str,
        first_frame: usize,
        payload: &[u8],
        bytes: &mut [u8],
    ) -> Result<Vec<Change>, Error> {
        let mut changes = vec![];
        self.each(name, first_frame, payload, bytes, |width, frame, payload, bytes| {
            let new = frame::decode(simd::best(), width, frame, payload, bytes, Direction::Forward)?;
            let old = new.inverse(width, bytes);
            new.write(width, bytes);
            frame::check(frame, bytes, Direction::Forward).inspect_err(|_| old.write(width, bytes))?;
            changes.push(new);
            Ok(())
        })?;
        Ok(changes)
    }

    /// A tensor's digest in the result. None if it does not change or is removed.
    pub fn result(&self, name: &str) -> Option<Digest> {
        let entry = self.index.tensors.iter().find(|entry| entry.name == name)?;
        entry.change.as_ref().map(|tensor| tensor.result)
    }

    fn each(
        &self,
        name: &str,
        first_frame: usize,
        mut payload: &[u8],
        bytes: &mut [u8],
        mut one: impl FnMut(usize, &Frame, &[u8], &mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some((_, tensor)) = self.find(name) else {
            return Ok(());
        };
        let width = weight_bytes(tensor.dtype);
        let frames = tensor.frames.get(first_frame..).ok_or_else(|| fewer(name))?;
        let count = bytes.len().div_ceil(WEIGHTS * width);
        let frames = frames.get(..count).ok_or_else(|| fewer(name))?;
        for (frame, bytes) in frames.iter().zip(bytes.chunks_mut(WEIGHTS * width)) {
            let own = payload.split_off(..frame.payload_bytes as usize);
            let own = own.ok_or_else(|| fewer(name))?;
            one(width, frame, own, bytes).map_err(|error| in_entry(name, error))?;
        }
        Ok(())
    }

    /// Payload bytes before the tensor's, and its entry in the index.
    fn find(&self, name: &str) -> Option<(u64, &Tensor)> {
        let mut before = 0;
        for entry in &self.index.tensors {
            let Some(tensor) = &entry.change else { continue };
            if entry.name == name {
                return tensor.base.map(|_| (before, tensor));
            }
            before += tensor
                .frames
                .iter()
                .map(|frame| u64::from(frame.payload_bytes))
                .sum::<u64>();
        }
        None
    }
}

/// BLAKE3 subtree of a frame that starts at byte `offset` of a tensor of `tensor_bytes`.
pub fn frame_hash(frame: &[u8], offset: usize, tensor_bytes: usize) -> ChunkHash {
    merkle::chunk_hash(&[frame], offset, tensor_bytes)
}

/// BLAKE3 of a tensor from the subtrees of all its frames, in order.
pub fn tensor_digest(subtrees: &[ChunkHash], dtype: Dtype, tensor_bytes: usize) -> Digest {
    merkle::merge(subtrees, WEIGHTS * weight_bytes(dtype), tensor_bytes)
}

fn fewer(name: &str) -> Error {
    let reason = "there are fewer frames, or their payloads end early";
    in_entry(name, Error::Malformed(reason.into()))
}

/// The payload of one frame, without verification or BLAKE3. For benchmarks of the codec.
#[doc(hidden)]
pub fn encode_payload(width: usize, old: &[u8], new: &[u8]) -> Result<Vec<u8>, Error> {
    Ok(frame::encode(simd::best(), width, Some(old), new, None)?.payload)
}

/// Reads one byte for the weights' width, then a payload of steps. Either it is refused, or it
/// changes weights of the frame only and can be undone.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn fuzz_frame(input: &[u8]) -> bool {
    let Some((&width, payload)) = input.split_first() else {
        return false;
    };
    let width = 1 << (width.trailing_zeros() % 4) as usize;
    let base: Vec<u8> = (0..64).collect();
    let frame = Frame {
        codec: frame::Codec::Steps,
        payload_bytes: payload.len() as u32,
        reverse_bytes: 0,
        base: frame::digest(&base),
        result: 0,
    };
    let Ok(change) = frame::decode(simd::best(), width, &frame, payload, &base, Direction::Forward) else {
        return false;
    };
    // the result's digest in `frame` is wrong: the bytes must not change
    let mut result = base.clone();
    let refused = frame::apply(simd::best(), width, &frame, payload, &mut result, Direction::Forward);
    assert!(refused.is_err() && result == base, "a refused frame has changed bytes");
    change.write(width, &mut result);
    change.inverse(width, &base).write(width, &mut result);
    result == base
}
