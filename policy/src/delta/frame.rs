//! One frame: 2^20 weights of a tensor, or what is left of it at its end, coded alone. Its digests are checked where its bytes
//! are touched: the base's before anything is decoded, the result's before anything is used.

use twox_hash::XxHash3_128;

use super::class::{self, Steps};
use super::{Error, lanes, planes};
use crate::kernel::Isa;

/// Weights of a frame.
pub(super) const WEIGHTS: usize = 1 << 20;

/// How a frame is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    /// As in the base; there is no payload.
    Same,
    /// See `planes`.
    Planes,
    /// The same as one zstd frame.
    Packed,
    /// See `class`.
    Steps,
}

/// What the index says of a frame that is not as in the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub codec: Codec,
    pub payload_bytes: u32,
    /// Of what the way back needs beside the payload.
    pub back_bytes: u32,
    /// XXH3-128 of the frame's bytes in the base; zero where it is the same in the result.
    pub base: u128,
    /// The same of its bytes in the result.
    pub result: u128,
}

impl Frame {
    pub const SAME: Frame = Frame {
        codec: Codec::Same,
        payload_bytes: 0,
        back_bytes: 0,
        base: 0,
        result: 0,
    };

    /// The digests of where the way begins and where it ends.
    fn ends(&self, way: Way<'_>) -> (u128, u128) {
        match way {
            Way::Forward => (self.base, self.result),
            Way::Back(_) => (self.result, self.base),
        }
    }
}

/// A frame and its bytes.
#[derive(Debug, Clone)]
pub(super) struct Coded {
    pub frame: Frame,
    pub payload: Vec<u8>,
    pub back: Vec<u8>,
}

impl Default for Coded {
    fn default() -> Self {
        Coded {
            frame: Frame::SAME,
            payload: vec![],
            back: vec![],
        }
    }
}

/// Which way a delta is followed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way<'a> {
    Forward,
    /// From the result to the base, with what the frame has for that.
    Back(&'a [u8]),
}

/// What becomes of a frame's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Same,
    /// Index in the frame and new value of each weight that changes. Whoever makes a delta of them gives them by ascending index;
    /// those that were read from one come in any order.
    Some(Vec<(u32, u64)>),
    /// Every weight: the frame's new bytes.
    All(Vec<u8>),
}

pub(crate) fn digest(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// Appends the indices of the weights that differ.
pub(super) fn differing(width: usize, old: &[u8], new: &[u8], out: &mut Vec<u32>) {
    let isa = lanes::best();
    match width {
        1 => lanes::differing::<1>(isa, old, new, out),
        2 => lanes::differing::<2>(isa, old, new, out),
        4 => lanes::differing::<4>(isa, old, new, out),
        _ => lanes::differing::<8>(isa, old, new, out),
    }
}

/// Codes `new` in the smallest way that is worth trying. Both slices have the same length, a multiple of `width`; without `old`
/// all of its bytes are taken for zero. `known` is what makes `new` of `old`, where that is known: then they are not compared again,
/// unless most of it differs.
pub(super) fn encode(
    isa: Isa,
    width: usize,
    old: Option<&[u8]>,
    new: &[u8],
    known: Option<&Change>,
) -> Result<Coded, Error> {
    match width {
        1 => encode_width::<1>(isa, old, new, known),
        2 => encode_width::<2>(isa, old, new, known),
        4 => encode_width::<4>(isa, old, new, known),
        _ => encode_width::<8>(isa, old, new, known),
    }
}

/// Whether steps are tried: where most weights change, positions say nothing.
pub(crate) fn few(changed: usize, weights: usize) -> bool {
    changed <= weights / 2 + 1
}

fn encode_width<const W: usize>(
    isa: Isa,
    old: Option<&[u8]>,
    new: &[u8],
    known: Option<&Change>,
) -> Result<Coded, Error> {
    let weights = new.len() / W;
    let zeros;
    let mut changed = vec![];
    let old = match old {
        Some(old) => {
            match known {
                Some(Change::Same) => {}
                Some(Change::Some(values)) => {
                    let indices = values.iter().map(|&(index, _)| index);
                    changed.extend(indices.filter(|&index| lanes::at::<W>(old, index) != lanes::at::<W>(new, index)));
                }
                Some(Change::All(_)) | None => {
                    changed.reserve(weights / 64);
                    lanes::differing::<W>(isa, old, new, &mut changed);
                }
            }
            if changed.is_empty() {
                return Ok(Coded::default());
            }
            old
        }
        None => {
            zeros = vec![0; new.len()];
            &zeros
        }
    };
    let mut best: Option<(Codec, Vec<u8>, Vec<u8>)> = None;
    if !changed.is_empty() && few(changed.len(), weights) {
        let steps = class::steps::<W>(isa, old, new, &changed);
        best = Some((Codec::Steps, steps.to_bytes::<W>(), steps.back_to_bytes()));
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
    let (codec, payload, back) = best.unwrap_or((Codec::Same, vec![], vec![]));
    let frame = Frame {
        codec,
        payload_bytes: payload.len() as u32,
        back_bytes: back.len() as u32,
        base: digest(old),
        result: digest(new),
    };
    Ok(Coded { frame, payload, back })
}

/// Whether what was coded decodes to `new`, weight for weight. They are counted once more, by a loop that has nothing of the one
/// that found them.
pub(super) fn arrives(isa: Isa, width: usize, coded: &Coded, old: Option<&[u8]>, new: &[u8]) -> Result<bool, Error> {
    match width {
        1 => arrives_width::<1>(isa, coded, old, new),
        2 => arrives_width::<2>(isa, coded, old, new),
        4 => arrives_width::<4>(isa, coded, old, new),
        _ => arrives_width::<8>(isa, coded, old, new),
    }
}

fn arrives_width<const W: usize>(isa: Isa, coded: &Coded, old: Option<&[u8]>, new: &[u8]) -> Result<bool, Error> {
    let (codec, payload) = (coded.frame.codec, &coded.payload);
    if let (Codec::Steps, Some(old)) = (codec, old) {
        let found = Found::of::<W>(isa, payload, old, Way::Forward)?;
        // each of them another weight that differs, and as many as differ: so these are all
        let each = found.each().all(|(index, step)| {
            let value = |bytes| lanes::value::<W>(lanes::at(bytes, index));
            let (before, after) = (value(old), value(new));
            before != after && planes::moved::<W>(before, step) == after
        });
        let pairs = old.as_chunks::<W>().0.iter().zip(new.as_chunks::<W>().0);
        let differ = pairs
            .filter(|(old, new)| lanes::value(old) != lanes::value(new))
            .count();
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
    Ok(match decode_width::<W>(isa, codec, payload, old, Way::Forward)? {
        Change::Same => old == new,
        Change::All(made) => made == new,
        // steps have been looked at above
        Change::Some(_) => false,
    })
}

/// Follows a frame in its own bytes: those of the base, or on the way back of the result. Both ends are checked; where one does
/// not hold, it is an error and the bytes are as they were.
pub(super) fn follow(
    isa: Isa,
    width: usize,
    frame: &Frame,
    payload: &[u8],
    bytes: &mut [u8],
    way: Way<'_>,
) -> Result<(), Error> {
    if frame.codec == Codec::Same {
        return Ok(());
    }
    if digest(bytes) != frame.ends(way).0 {
        return Err(Error::Malformed("a frame was made from other bytes".into()));
    }
    match width {
        1 => follow_width::<1>(isa, frame, payload, bytes, way),
        2 => follow_width::<2>(isa, frame, payload, bytes, way),
        4 => follow_width::<4>(isa, frame, payload, bytes, way),
        _ => follow_width::<8>(isa, frame, payload, bytes, way),
    }
}

fn follow_width<const W: usize>(
    isa: Isa,
    frame: &Frame,
    payload: &[u8],
    bytes: &mut [u8],
    way: Way<'_>,
) -> Result<(), Error> {
    if frame.codec != Codec::Steps {
        let change = decode_width::<W>(isa, frame.codec, payload, bytes, way)?;
        if let Change::All(new) = &change {
            check(frame, new, way)?;
        }
        change.write(W, bytes);
        return Ok(());
    }
    let found = Found::of::<W>(isa, payload, bytes, way)?;
    found.write::<W>(bytes);
    check(frame, bytes, way).inspect_err(|_| found.undo::<W>(bytes))
}

/// The weights that change, where they are in the frame.
struct Found {
    steps: Steps,
    /// Index in the frame, and place among the steps.
    places: Vec<(u32, u32)>,
    back: bool,
}

impl Found {
    fn of<const W: usize>(isa: Isa, payload: &[u8], from: &[u8], way: Way<'_>) -> Result<Self, Error> {
        let weights = from.len() / W;
        let mut steps = Steps::from_bytes::<W>(payload, weights)?;
        let back = match way {
            Way::Forward => false,
            Way::Back(back) => {
                steps = steps.with_back(back, weights)?;
                true
            }
        };
        let places = steps.locate::<W>(isa, from, back)?;
        Ok(Found { steps, places, back })
    }

    /// Index and step of each, the way that is followed.
    fn each(&self) -> impl ExactSizeIterator<Item = (u32, u64)> {
        self.places.iter().map(|&(index, place)| {
            let step = self.steps.step(place);
            (index, if self.back { step.wrapping_neg() } else { step })
        })
    }

    fn write<const W: usize>(&self, bytes: &mut [u8]) {
        let weights = bytes.as_chunks_mut::<W>().0;
        for (index, step) in self.each() {
            move_by::<W>(&mut weights[index as usize], step);
        }
    }

    /// Takes back what [`write`](Self::write) did.
    fn undo<const W: usize>(&self, bytes: &mut [u8]) {
        let weights = bytes.as_chunks_mut::<W>().0;
        for (index, step) in self.each() {
            move_by::<W>(&mut weights[index as usize], step.wrapping_neg());
        }
    }
}

#[inline(always)]
fn move_by<const W: usize>(weight: &mut [u8; W], step: u64) {
    let new = planes::moved::<W>(lanes::value(weight), step);
    weight.copy_from_slice(&new.to_le_bytes()[..W]);
}

/// Decodes what happens to `from`: the frame's bytes in the base, or on the way back in the result. Their digest must be the
/// frame's.
pub(super) fn decode(
    isa: Isa,
    width: usize,
    frame: &Frame,
    payload: &[u8],
    from: &[u8],
    way: Way<'_>,
) -> Result<Change, Error> {
    if frame.codec == Codec::Same {
        return Ok(Change::Same);
    }
    if digest(from) != frame.ends(way).0 {
        return Err(Error::Malformed("a frame was made from other bytes".into()));
    }
    match width {
        1 => decode_width::<1>(isa, frame.codec, payload, from, way),
        2 => decode_width::<2>(isa, frame.codec, payload, from, way),
        4 => decode_width::<4>(isa, frame.codec, payload, from, way),
        _ => decode_width::<8>(isa, frame.codec, payload, from, way),
    }
}

fn decode_width<const W: usize>(
    isa: Isa,
    codec: Codec,
    payload: &[u8],
    from: &[u8],
    way: Way<'_>,
) -> Result<Change, Error> {
    let unpacked;
    let planes = match codec {
        Codec::Same => return Ok(Change::Same),
        Codec::Steps => return decode_steps::<W>(isa, payload, from, way).map(Change::Some),
        Codec::Packed => {
            unpacked = planes::unpack(payload, from.len())?;
            &unpacked
        }
        Codec::Planes => payload,
    };
    if planes.len() != from.len() {
        return Err(Error::Malformed("the planes have another size than the frame".into()));
    }
    let mut new = from.to_vec();
    planes::apply::<W>(&mut new, planes, matches!(way, Way::Back(_)));
    Ok(Change::All(new))
}

fn decode_steps<const W: usize>(isa: Isa, payload: &[u8], from: &[u8], way: Way<'_>) -> Result<Vec<(u32, u64)>, Error> {
    let found = Found::of::<W>(isa, payload, from, way)?;
    let values = found.each().map(|(index, step)| {
        let value = lanes::value::<W>(lanes::at(from, index));
        (index, planes::moved::<W>(value, step))
    });
    Ok(values.collect())
}

impl Change {
    /// Refuses what is not about a frame of so many bytes.
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
            return Err(Error::Malformed(
                "a frame's changes do not ascend, or go beyond its end".into(),
            ));
        }
        Ok(())
    }

    /// What brings the frame back, whose bytes are still those of before.
    pub(super) fn undone(&self, width: usize, frame: &[u8]) -> Change {
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

    /// Does it to the frame that it was decoded from; once more, it changes nothing.
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

/// Refuses a frame whose bytes are not the result, or `back` not the base.
pub(super) fn check(frame: &Frame, bytes: &[u8], way: Way<'_>) -> Result<(), Error> {
    if frame.codec != Codec::Same && digest(bytes) != frame.ends(way).1 {
        return Err(Error::Malformed("a frame makes other bytes than it says".into()));
    }
    Ok(())
}
