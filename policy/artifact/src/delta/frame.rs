//! One frame: 2^20 weights of a tensor (fewer at its end), coded on their own.
//!
//! The digest of the base's bytes is checked before decoding, that of the result before any use.

use twox_hash::XxHash3_128;

use super::bucket::{self, Steps};
use super::simd::{self, Isa};
use super::{Error, malformed, planes};

/// Weights per frame.
pub const WEIGHTS: usize = 1 << 20;

/// How a frame is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    /// As in the base; no payload.
    Same,
    /// See `planes`.
    Planes,
    /// Planes in one zstd frame.
    Packed,
    /// See `bucket`.
    Steps,
}

/// What the index says about a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub codec: Codec,
    pub payload_bytes: u32,
    /// Bytes that the reverse direction needs beside the payload.
    pub reverse_bytes: u32,
    /// XXH3-128 of the frame's bytes in the base. Zero if the frame does not change.
    pub base: u128,
    /// XXH3-128 of its bytes in the result.
    pub result: u128,
}

impl Frame {
    pub const SAME: Frame = Frame {
        codec: Codec::Same,
        payload_bytes: 0,
        reverse_bytes: 0,
        base: 0,
        result: 0,
    };

    /// The digests before and after.
    fn ends(&self, direction: Direction<'_>) -> (u128, u128) {
        match direction {
            Direction::Forward => (self.base, self.result),
            Direction::Reverse(_) => (self.result, self.base),
        }
    }
}

/// A frame and its payload.
#[derive(Debug, Clone)]
pub(super) struct CodedFrame {
    pub frame: Frame,
    pub payload: Vec<u8>,
    pub reverse: Vec<u8>,
}

impl Default for CodedFrame {
    fn default() -> Self {
        CodedFrame {
            frame: Frame::SAME,
            payload: vec![],
            reverse: vec![],
        }
    }
}

/// The direction in which a delta is applied.
#[derive(Debug, Clone, Copy)]
pub(super) enum Direction<'a> {
    Forward,
    /// From the result to the base, with the frame's reverse data.
    Reverse(&'a [u8]),
}

/// How a frame's weights change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Same,
    /// Index in the frame and new value of each changed weight. Ascending by index when given to an
    /// encoder; in any order when read from a delta.
    Some(Vec<(u32, u64)>),
    /// Every weight: the frame's new bytes.
    All(Vec<u8>),
}

pub(crate) fn digest(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// Appends the indices of the weights that differ.
pub(crate) fn differing(width: usize, old: &[u8], new: &[u8], out: &mut Vec<u32>) {
    let isa = simd::best();
    match width {
        1 => simd::differing::<1>(isa, old, new, out),
        2 => simd::differing::<2>(isa, old, new, out),
        4 => simd::differing::<4>(isa, old, new, out),
        _ => simd::differing::<8>(isa, old, new, out),
    }
}

/// Codes `new` with the smallest codec worth trying. Both slices have the same length, a multiple
/// of `width`. Without `old`, its bytes count as zero. `known` is the change from `old` to `new` if
/// somebody has compared them already.
pub(super) fn encode(
    isa: Isa,
    width: usize,
    old: Option<&[u8]>,
    new: &[u8],
    known: Option<&Change>,
) -> Result<CodedFrame, Error> {
    match width {
        1 => encode_width::<1>(isa, old, new, known),
        2 => encode_width::<2>(isa, old, new, known),
        4 => encode_width::<4>(isa, old, new, known),
        _ => encode_width::<8>(isa, old, new, known),
    }
}

/// Whether to try steps: if most weights change, their positions carry no information.
pub(crate) fn is_sparse(changed: usize, weights: usize) -> bool {
    changed <= weights / 2 + 1
}

fn encode_width<const W: usize>(
    isa: Isa,
    old: Option<&[u8]>,
    new: &[u8],
    known: Option<&Change>,
) -> Result<CodedFrame, Error> {
    let weights = new.len() / W;
    let zeros;
    let mut changed = vec![];
    let old = match old {
        Some(old) => {
            match known {
                Some(Change::Same) => {}
                Some(Change::Some(values)) => {
                    let indices = values.iter().map(|&(index, _)| index);
                    changed.extend(indices.filter(|&index| simd::at::<W>(old, index) != simd::at::<W>(new, index)));
                }
                Some(Change::All(_)) | None => {
                    changed.reserve(weights / 64);
                    simd::differing::<W>(isa, old, new, &mut changed);
                }
            }
            if changed.is_empty() {
                return Ok(CodedFrame::default());
            }
            old
        }
        None => {
            zeros = vec![0; new.len()];
            &zeros
        }
    };
    let mut best: Option<(Codec, Vec<u8>, Vec<u8>)> = None;
    if !changed.is_empty() && is_sparse(changed.len(), weights) {
        let steps = bucket::steps::<W>(isa, old, new, &changed);
        best = Some((Codec::Steps, steps.to_bytes::<W>(), steps.reverse_to_bytes()));
    }
    let dense = best.as_ref().is_none_or(|(_, best, _)| best.len() > new.len() / 8);
    if dense {
        let raw = planes::encode::<W>(old, new);
        let packed = planes::pack(&raw)?;
        let (codec, payload) = if packed.len() < raw.len() {
            (Codec::Packed, packed)
        } else {
            (Codec::Planes, raw)
        };
        if best.as_ref().is_none_or(|(_, best, _)| payload.len() < best.len()) {
            best = Some((codec, payload, vec![]));
        }
    }
    let (codec, payload, reverse) = best.unwrap_or((Codec::Same, vec![], vec![]));
    let frame = Frame {
        codec,
        payload_bytes: payload.len() as u32,
        reverse_bytes: reverse.len() as u32,
        base: digest(old),
        result: digest(new),
    };
    Ok(CodedFrame {
        frame,
        payload,
        reverse,
    })
}

/// Whether the coded frame decodes to `new`, weight for weight. Counts the changed weights again,
/// with a loop that shares no code with the one that found them.
pub(super) fn decodes_to(
    isa: Isa,
    width: usize,
    coded: &CodedFrame,
    old: Option<&[u8]>,
    new: &[u8],
) -> Result<bool, Error> {
    match width {
        1 => decodes_to_width::<1>(isa, coded, old, new),
        2 => decodes_to_width::<2>(isa, coded, old, new),
        4 => decodes_to_width::<4>(isa, coded, old, new),
        _ => decodes_to_width::<8>(isa, coded, old, new),
    }
}

fn decodes_to_width<const W: usize>(
    isa: Isa,
    coded: &CodedFrame,
    old: Option<&[u8]>,
    new: &[u8],
) -> Result<bool, Error> {
    let (codec, payload) = (coded.frame.codec, &coded.payload);
    if let (Codec::Steps, Some(old)) = (codec, old) {
        let found = LocatedSteps::of::<W>(isa, payload, old, Direction::Forward)?;
        // each step hits another changed weight, and there are as many: so all are covered
        let each = found.each().all(|(index, step)| {
            let value = |bytes| simd::value::<W>(simd::at(bytes, index));
            let (before, after) = (value(old), value(new));
            before != after && planes::add_step::<W>(before, step) == after
        });
        let pairs = old.as_chunks::<W>().0.iter().zip(new.as_chunks::<W>().0);
        let differ = pairs.filter(|(old, new)| simd::value(old) != simd::value(new)).count();
        return Ok(each && found.each().len() == differ);
    }
    let zeros;
    let old = match old {
        Some(old) => old,
        None => {
            zeros = vec![0; new.len()];
            &zeros
        }
    };
    Ok(match decode_width::<W>(isa, codec, payload, old, Direction::Forward)? {
        Change::Same => old == new,
        Change::All(decoded) => decoded == new,
        // steps were checked above
        Change::Some(_) => false,
    })
}

/// Applies a frame in place to the bytes it starts from. Both digests are checked. On an error the
/// bytes are unchanged.
pub(super) fn apply(
    isa: Isa,
    width: usize,
    frame: &Frame,
    payload: &[u8],
    bytes: &mut [u8],
    direction: Direction<'_>,
) -> Result<(), Error> {
    if frame.codec == Codec::Same {
        return Ok(());
    }
    if digest(bytes) != frame.ends(direction).0 {
        return Err(malformed("a frame was made from other bytes"));
    }
    match width {
        1 => apply_width::<1>(isa, frame, payload, bytes, direction),
        2 => apply_width::<2>(isa, frame, payload, bytes, direction),
        4 => apply_width::<4>(isa, frame, payload, bytes, direction),
        _ => apply_width::<8>(isa, frame, payload, bytes, direction),
    }
}

fn apply_width<const W: usize>(
    isa: Isa,
    frame: &Frame,
    payload: &[u8],
    bytes: &mut [u8],
    direction: Direction<'_>,
) -> Result<(), Error> {
    if frame.codec != Codec::Steps {
        let change = decode_width::<W>(isa, frame.codec, payload, bytes, direction)?;
        if let Change::All(new) = &change {
            check(frame, new, direction)?;
        }
        change.write(W, bytes);
        return Ok(());
    }
    let found = LocatedSteps::of::<W>(isa, payload, bytes, direction)?;
    found.write::<W>(bytes);
    check(frame, bytes, direction).inspect_err(|_| found.undo::<W>(bytes))
}

/// Steps with the positions of their weights in the frame.
struct LocatedSteps {
    steps: Steps,
    /// Index in the frame, and position in `steps`.
    places: Vec<(u32, u32)>,
    reverse: bool,
}

impl LocatedSteps {
    fn of<const W: usize>(isa: Isa, payload: &[u8], from: &[u8], direction: Direction<'_>) -> Result<Self, Error> {
        let weights = from.len() / W;
        let mut steps = Steps::from_bytes::<W>(payload, weights)?;
        let reverse = match direction {
            Direction::Forward => false,
            Direction::Reverse(reverse) => {
                steps = steps.with_reverse(reverse, weights)?;
                true
            }
        };
        let places = steps.locate::<W>(isa, from, reverse)?;
        Ok(LocatedSteps { steps, places, reverse })
    }

    /// Index and step of each changed weight, in this direction.
    fn each(&self) -> impl ExactSizeIterator<Item = (u32, u64)> {
        self.places.iter().map(|&(index, place)| {
            let step = self.steps.step(place);
            (index, if self.reverse { step.wrapping_neg() } else { step })
        })
    }

    fn write<const W: usize>(&self, bytes: &mut [u8]) {
        let weights = bytes.as_chunks_mut::<W>().0;
        for (index, step) in self.each() {
            move_by::<W>(&mut weights[index as usize], step);
        }
    }

    /// Undoes [`write`](Self::write).
    fn undo<const W: usize>(&self, bytes: &mut [u8]) {
        let weights = bytes.as_chunks_mut::<W>().0;
        for (index, step) in self.each() {
            move_by::<W>(&mut weights[index as usize], step.wrapping_neg());
        }
    }
}

#[inline(always)]
fn move_by<const W: usize>(weight: &mut [u8; W], step: u64) {
    let new = planes::add_step::<W>(simd::value(weight), step);
    weight.copy_from_slice(&new.to_le_bytes()[..W]);
}

/// Decodes the change to `from`, the bytes that the frame starts from. Returns an error if their
/// digest is not the frame's.
pub(super) fn decode(
    isa: Isa,
    width: usize,
    frame: &Frame,
    payload: &[u8],
    from: &[u8],
    direction: Direction<'_>,
) -> Result<Change, Error> {
    if frame.codec == Codec::Same {
        return Ok(Change::Same);
    }
    if digest(from) != frame.ends(direction).0 {
        return Err(malformed("a frame was made from other bytes"));
    }
    match width {
        1 => decode_width::<1>(isa, frame.codec, payload, from, direction),
        2 => decode_width::<2>(isa, frame.codec, payload, from, direction),
        4 => decode_width::<4>(isa, frame.codec, payload, from, direction),
        _ => decode_width::<8>(isa, frame.codec, payload, from, direction),
    }
}

fn decode_width<const W: usize>(
    isa: Isa,
    codec: Codec,
    payload: &[u8],
    from: &[u8],
    direction: Direction<'_>,
) -> Result<Change, Error> {
    let unpacked;
    let planes = match codec {
        Codec::Same => return Ok(Change::Same),
        Codec::Steps => return decode_steps::<W>(isa, payload, from, direction).map(Change::Some),
        Codec::Packed => {
            unpacked = planes::unpack(payload, from.len())?;
            &unpacked
        }
        Codec::Planes => payload,
    };
    if planes.len() != from.len() {
        return Err(malformed("the planes have another size than the frame"));
    }
    let mut new = from.to_vec();
    planes::apply::<W>(&mut new, planes, matches!(direction, Direction::Reverse(_)));
    Ok(Change::All(new))
}

fn decode_steps<const W: usize>(
    isa: Isa,
    payload: &[u8],
    from: &[u8],
    direction: Direction<'_>,
) -> Result<Vec<(u32, u64)>, Error> {
    let found = LocatedSteps::of::<W>(isa, payload, from, direction)?;
    let values = found.each().map(|(index, step)| {
        let value = simd::value::<W>(simd::at(from, index));
        (index, planes::add_step::<W>(value, step))
    });
    Ok(values.collect())
}

impl Change {
    /// Returns an error if the change does not fit a frame of `frame_bytes`.
    pub(super) fn check(&self, width: usize, frame_bytes: usize) -> Result<(), Error> {
        let fits = match self {
            Change::Same => true,
            Change::All(new) => new.len() == frame_bytes,
            Change::Some(values) => {
                values.is_sorted_by(|a, b| a.0 < b.0)
                    && values.last().is_none_or(|last| (last.0 as usize) < frame_bytes / width)
            }
        };
        if !fits {
            return Err(malformed("a frame's changes do not ascend, or go beyond its end"));
        }
        Ok(())
    }

    /// The change that undoes this one. `frame` still has the bytes from before.
    pub(super) fn inverse(&self, width: usize, frame: &[u8]) -> Change {
        let value = |index: u32| {
            let mut value = [0; 8];
            let at = index as usize * width;
            value[..width].copy_from_slice(&frame[at..at + width]);
            u64::from_le_bytes(value)
        };
        match self {
            Change::Same => Change::Same,
            Change::All(_) => Change::All(frame.to_vec()),
            Change::Some(values) => Change::Some(values.iter().map(|&(index, _)| (index, value(index))).collect()),
        }
    }

    /// Writes the change into the frame it was decoded from. Idempotent.
    pub(super) fn write(&self, width: usize, frame: &mut [u8]) {
        match self {
            Change::Same => {}
            Change::All(new) => frame.copy_from_slice(new),
            Change::Some(values) => match width {
                1 => write_width::<1>(values, frame),
                2 => write_width::<2>(values, frame),
                4 => write_width::<4>(values, frame),
                _ => write_width::<8>(values, frame),
            },
        }
    }
}

fn write_width<const W: usize>(values: &[(u32, u64)], frame: &mut [u8]) {
    for &(index, value) in values {
        let at = index as usize * W;
        frame[at..at + W].copy_from_slice(&value.to_le_bytes()[..W]);
    }
}

/// Returns an error if `bytes` are not what the frame makes.
pub(super) fn check(frame: &Frame, bytes: &[u8], direction: Direction<'_>) -> Result<(), Error> {
    if frame.codec != Codec::Same && digest(bytes) != frame.ends(direction).1 {
        return Err(malformed("a frame makes other bytes than it says"));
    }
    Ok(())
}

/// The payload of one frame, without verification or BLAKE3. For benchmarks of the codec.
#[doc(hidden)]
pub fn encode_payload(width: usize, old: &[u8], new: &[u8]) -> Result<Vec<u8>, Error> {
    Ok(encode(simd::best(), width, Some(old), new, None)?.payload)
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
        codec: Codec::Steps,
        payload_bytes: payload.len() as u32,
        reverse_bytes: 0,
        base: digest(&base),
        result: 0,
    };
    let Ok(change) = decode(simd::best(), width, &frame, payload, &base, Direction::Forward) else {
        return false;
    };
    // the result's digest in `frame` is wrong: the bytes must not change
    let mut result = base.clone();
    let refused = apply(simd::best(), width, &frame, payload, &mut result, Direction::Forward);
    assert!(refused.is_err() && result == base, "a refused frame has changed bytes");
    change.write(width, &mut result);
    change.inverse(width, &base).write(width, &mut result);
    result == base
}
