//! A part of a tensor alone: for a reader that holds, or fetches, only some frames of it, and follows the delta in place.

use std::ops::Range;

use safetensors::Dtype;

use super::frame::{self, Change, Frame, WEIGHTS, Way};
use super::index::{self, Index, Tensor, width};
use super::tree::{self, Part};
use super::{Error, Header, in_entry, lanes};
use crate::digest::Digest;

/// Weights of a frame: a slice begins at a multiple of it, and ends at one or with its tensor.
pub const FRAME_WEIGHTS: usize = WEIGHTS;

/// A delta whose index is verified, to be followed slice by slice.
#[derive(Debug)]
pub struct Slices<'a> {
    header: Header,
    index: Index,
    head_bytes: usize,
    /// Empty where only the head is at hand.
    payloads: &'a [u8],
}

impl<'a> Slices<'a> {
    pub fn open(delta: &'a [u8]) -> Result<Self, Error> {
        let opened = index::open(delta)?;
        Ok(Slices {
            header: opened.header,
            index: opened.index,
            head_bytes: opened.head_bytes,
            payloads: opened.payloads,
        })
    }

    /// Of a delta whose payloads are elsewhere, header and index alone.
    pub fn of_head(head: &[u8]) -> Result<Slices<'static>, Error> {
        let head = index::open_head(head)?;
        Ok(Slices {
            header: head.header,
            index: head.index,
            head_bytes: head.bytes,
            payloads: &[],
        })
    }

    pub fn header(&self) -> Header {
        self.header
    }

    /// Where in the delta the payloads begin.
    pub fn head_bytes(&self) -> usize {
        self.head_bytes
    }

    /// Which bytes of the payloads the frames of a tensor take, counted from the first payload; none where the tensor stays as it
    /// is, is removed, or is new.
    pub fn payload(&self, name: &str, frames: Range<usize>) -> Option<Range<u64>> {
        let (before, tensor) = self.find(name)?;
        let bytes = |frames: &[Frame]| frames.iter().map(|frame| u64::from(frame.payload_bytes)).sum::<u64>();
        let start = before + bytes(tensor.frames.get(..frames.start)?);
        Some(start..start + bytes(tensor.frames.get(frames)?))
    }

    /// Follows the delta in `bytes`, those of the tensor from `first_frame` on. Each frame is checked before and after; the
    /// first that does not hold is left as it was, and the ones before it are the result's.
    pub fn apply(&self, name: &str, first_frame: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let Some((_, tensor)) = self.find(name) else {
            return Ok(());
        };
        let frames = bytes.len().div_ceil(WEIGHTS * width(tensor.dtype));
        let at = self.payload(name, first_frame..first_frame.saturating_add(frames));
        let payload = at.and_then(|at| self.payloads.get(at.start as usize..at.end as usize));
        let payload = payload.ok_or_else(|| fewer(name))?;
        self.apply_fetched(name, first_frame, payload, bytes)
    }

    /// [`apply`](Self::apply) with the frames' payloads, the bytes that [`payload`](Self::payload) names.
    pub fn apply_fetched(&self, name: &str, first_frame: usize, payload: &[u8], bytes: &mut [u8]) -> Result<(), Error> {
        self.each(name, first_frame, payload, bytes, |width, frame, payload, bytes| {
            frame::follow(lanes::best(), width, frame, payload, bytes, Way::Forward)
        })
    }

    /// [`apply_fetched`](Self::apply_fetched), and what became of each frame: for who holds weights of it somewhere else.
    pub fn changes(
        &self,
        name: &str,
        first_frame: usize,
        payload: &[u8],
        bytes: &mut [u8],
    ) -> Result<Vec<Change>, Error> {
        let mut changes = vec![];
        self.each(name, first_frame, payload, bytes, |width, frame, payload, bytes| {
            let new = frame::decode(lanes::best(), width, frame, payload, bytes, Way::Forward)?;
            let old = new.undone(width, bytes);
            new.write(width, bytes);
            frame::check(frame, bytes, Way::Forward).inspect_err(|_| old.write(width, bytes))?;
            changes.push(new);
            Ok(())
        })?;
        Ok(changes)
    }

    /// The digest that a tensor has in the result; none where it stays as it is, or is removed.
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
        let width = width(tensor.dtype);
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

    /// Payload bytes before the tensor's, and what the index says of it.
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

/// The BLAKE3 subtree of a frame that begins at `offset` of a tensor of `tensor_bytes`.
pub fn subtree(frame: &[u8], offset: usize, tensor_bytes: usize) -> Part {
    tree::part(frame, offset, tensor_bytes)
}

/// The BLAKE3 of a tensor from the subtrees of all its frames, in order.
pub fn tensor_digest(subtrees: &[Part], dtype: Dtype, tensor_bytes: usize) -> Digest {
    tree::join(subtrees, WEIGHTS * width(dtype), tensor_bytes)
}

fn fewer(name: &str) -> Error {
    let reason = "there are fewer frames, or their payloads end early";
    in_entry(name, Error::Malformed(reason.into()))
}

/// The payload of one frame of weights of `width` bytes, without trial and BLAKE3: what the codec alone costs.
#[doc(hidden)]
pub fn code(width: usize, old: &[u8], new: &[u8]) -> Result<Vec<u8>, Error> {
    Ok(frame::encode(lanes::best(), width, Some(old), new, None)?.payload)
}

/// Reads a payload of steps: one byte for the width of the weights, then the payload. It is refused, or names weights of the
/// frame alone and turns back.
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
        back_bytes: 0,
        base: frame::digest(&base),
        result: 0,
    };
    let Ok(change) = frame::decode(lanes::best(), width, &frame, payload, &base, Way::Forward) else {
        return false;
    };
    // what a payload makes is not what `frame` says: the bytes stay as they are
    let mut result = base.clone();
    let refused = frame::follow(lanes::best(), width, &frame, payload, &mut result, Way::Forward);
    assert!(
        refused.is_err() && result == base,
        "a frame that does not hold has changed bytes"
    );
    change.write(width, &mut result);
    change.undone(width, &base).write(width, &mut result);
    result == base
}
