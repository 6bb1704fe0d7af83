//! The codec of steps: few weights change, most of them to a neighbouring value, and how often one does depends on its
//! exponent, which the receiver knows. So positions are coded among the weights of like exponent, where the gaps between
//! changed ones are geometric, and values as steps on the scale of all values in their order.
//!
//! A payload is one stream of bits (see `bits`):
//!
//! ```text
//! classes − 1: 4 bits; then for each class but the first, Golomb 0: its first key − that of the class before (0) − 1
//! each class:
//!     changed weights n: count; the rest only where n > 0
//!     parameter of the gaps: 6 bits
//!     sizes: 2 bits    0 all are 1    1 mostly 1    2 any
//!     mostly: larger ones x: count; parameter of the runs: 6 bits; parameter of the larger sizes: 6 bits
//!     any: parameter of the sizes: 6 bits
//!     n gaps, Golomb: weights of the class that lie between the changed one before (the start) and this one
//!     mostly: x times a run, Golomb, of sizes 1, then the larger size − 2, Golomb; the sizes left over are 1
//!     any: n sizes − 1, Golomb
//!     n bits: 0 up, 1 down
//! ```
//! From the result alone a receiver knows the base's class of all weights but of those that went from one class to another.
//! The way back has these, in a stream of its own that is empty where there are none:
//!
//! ```text
//! weights that crossed x: count; parameter of the gaps: 6 bits; then x times
//!     weights of the frame that lie between the one before (the start) and this one, Golomb
//!     how many classes away the base's class is − 1, Golomb 0; 1 bit: 0 above the result's, 1 below
//! ```
//! A weight's place on the scale is its value with all bits but the highest flipped where the highest is set: the order of
//! floating-point numbers as that of signed integers, −0.0 one below 0.0, NaNs at the ends.

use super::Error;
use super::bits::{Golomb, Reader, Writer};
use super::lanes::{self, CLASSES_MAX, Classes, Moved, Place};
use crate::kernel::Isa;

/// Every so many weights one is looked at, to tell how many there are of each key.
const SAMPLE: usize = 128;
/// What a class costs beside its numbers, bits.
const CLASS_BITS: f64 = 30.0;

/// Changed weights by class, as a payload has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Steps {
    classes: Classes,
    /// Ranks in their class, the classes one after another.
    ranks: Vec<u32>,
    /// Where each class begins in `ranks`.
    first: [usize; CLASSES_MAX + 1],
    /// By how much the place on the scale changes, modulo 2^(8W).
    steps: Vec<u64>,
    /// Weights whose result is in another class: index, and the base's class less the result's.
    crossed: Vec<(u32, i8)>,
}

/// A weight's place on the scale, modulo 2^(8W), and the value of a place: its own inverse.
#[inline(always)]
pub(super) fn scale<const W: usize>(value: u64) -> u64 {
    let top = 8 * W as u32 - 1;
    let negative = (value >> top & 1).wrapping_neg();
    value ^ (negative & ((1 << top) - 1))
}

/// How far the weight moves on the scale: the absolute value, and whether down.
#[inline(always)]
fn size<const W: usize>(step: u64) -> (u64, bool) {
    let unused = 64 - 8 * W as u32;
    let signed = (step << unused) as i64 >> unused;
    (signed.unsigned_abs(), signed < 0)
}

/// A changed weight.
#[derive(Clone, Copy)]
struct Changed {
    /// How far it moves.
    step: u64,
    /// Of the base, and of the result.
    keys: [u8; 2],
}

/// The changed weights at `indices`.
pub(super) fn steps<const W: usize>(isa: Isa, old: &[u8], new: &[u8], indices: &[u32]) -> Steps {
    let (olds, news) = (old.as_chunks::<W>().0, new.as_chunks::<W>().0);
    let changed = indices.iter().map(|&index| {
        let (old, new) = (&olds[index as usize], &news[index as usize]);
        Changed {
            step: scale::<W>(lanes::value(new)).wrapping_sub(scale::<W>(lanes::value(old))),
            keys: [lanes::key(old), lanes::key(new)],
        }
    });
    let changed: Vec<Changed> = changed.collect();
    let classes = choose::<W>(olds, &changed);
    let mut places = Vec::with_capacity(indices.len());
    lanes::ranks::<W>(isa, old, &classes, indices, &mut places);
    let mut first = [0; CLASSES_MAX + 1];
    for place in &places {
        first[usize::from(place.class) + 1] += 1;
    }
    for c in 0..CLASSES_MAX {
        first[c + 1] += first[c];
    }
    let mut next = first;
    let (mut ranks, mut steps) = (vec![0; places.len()], vec![0; places.len()]);
    let mut crossed = vec![];
    let class_of = classes.of_keys();
    for (Place { index, class, rank }, changed) in places.into_iter().zip(changed) {
        let result = class_of[usize::from(changed.keys[1])];
        if result != class {
            crossed.push((index, class as i8 - result as i8));
        }
        let slot = &mut next[usize::from(class)];
        ranks[*slot] = rank;
        steps[*slot] = changed.step;
        *slot += 1;
    }
    Steps {
        classes,
        ranks,
        first,
        steps,
        crossed,
    }
}

impl Steps {
    pub fn to_bytes<const W: usize>(&self) -> Vec<u8> {
        let mut out = Writer::default();
        let unary = Golomb::new(0);
        out.bits(self.classes.count as u64 - 1, 4);
        let mut before = 0;
        for &start in &self.classes.starts[..self.classes.count - 1] {
            out.golomb(unary, u64::from(start - before) - 1);
            before = start;
        }
        for class in 0..self.classes.count {
            let part = self.first[class]..self.first[class + 1];
            class_to_bytes::<W>(&mut out, &self.ranks[part.clone()], &self.steps[part]);
        }
        out.finish()
    }

    /// Reads the steps of a frame of so many weights.
    pub fn from_bytes<const W: usize>(payload: &[u8], weights: usize) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        let unary = Golomb::new(0);
        let mut classes = Classes {
            count: reader.bits(4) as usize + 1,
            starts: [0; CLASSES_MAX - 1],
        };
        let mut before = 0u64;
        for start in &mut classes.starts[..classes.count - 1] {
            before = reader.golomb(unary)?.saturating_add(before + 1);
            *start = u8::try_from(before).map_err(|_| bad("a class begins beyond the last key"))?;
        }
        let mut steps = Steps {
            classes,
            ranks: vec![],
            first: [0; CLASSES_MAX + 1],
            steps: vec![],
            crossed: vec![],
        };
        for class in 0..classes.count {
            let changed = reader.count() as usize;
            // a changed weight takes two bits or more: memory follows from the bytes that are there
            if changed > reader.bits_left() / 2 || changed > weights - steps.ranks.len() {
                return Err(bad("there are more changes than weights, or than bits"));
            }
            if changed > 0 {
                class_from_bytes::<W>(&mut reader, changed, &mut steps)?;
            }
            steps.first[class + 1] = steps.ranks.len();
        }
        steps.first[classes.count..].fill(steps.ranks.len());
        reader.finish()?;
        Ok(steps)
    }

    /// Reads what the way back needs.
    pub fn with_back(mut self, back: &[u8], weights: usize) -> Result<Self, Error> {
        if !back.is_empty() {
            let mut reader = Reader::new(back);
            self.crossed = crossed_from_bytes(&mut reader, self.ranks.len(), weights)?;
            reader.finish()?;
        }
        Ok(self)
    }

    /// What the way back needs beside the payload; empty where it needs nothing.
    pub fn back_to_bytes(&self) -> Vec<u8> {
        let (count, unary) = (self.crossed.len() as u64, Golomb::new(0));
        let Some(&(last, _)) = self.crossed.last() else {
            return vec![];
        };
        let mut out = Writer::default();
        out.count(count as u32);
        let gaps = Golomb::fit(u64::from(last) + 1 - count, count);
        out.bits(gaps.parameter.into(), Golomb::PARAMETER_BITS);
        let mut next = 0;
        for &(index, classes) in &self.crossed {
            out.golomb(gaps, (index - next).into());
            out.golomb(unary, u64::from(classes.unsigned_abs()) - 1);
            out.bits((classes < 0).into(), 1);
            next = index + 1;
        }
        out.finish()
    }

    /// Of every changed weight its index and the place of its [`step`](Self::step), in the base; `back`: in the result.
    pub fn locate<const W: usize>(&self, isa: Isa, weights: &[u8], back: bool) -> Result<Vec<(u32, u32)>, Error> {
        let moved = if back { self.moved::<W>(weights)? } else { vec![] };
        let mut found = Vec::with_capacity(self.ranks.len());
        let Steps {
            classes, ranks, first, ..
        } = self;
        lanes::locate::<W>(isa, weights, classes, &moved, ranks, first, &mut found);
        if found.len() != self.ranks.len() {
            return Err(bad("a position lies beyond the last weight of its class"));
        }
        Ok(found)
    }

    /// How far a weight moves from the base to the result.
    #[inline]
    pub fn step(&self, place: u32) -> u64 {
        self.steps[place as usize]
    }

    /// The base's classes of those weights of the result that are in another one.
    fn moved<const W: usize>(&self, result: &[u8]) -> Result<Vec<Moved>, Error> {
        let class_of = self.classes.of_keys();
        let moved = self.crossed.iter().map(|&(index, classes)| {
            let key = lanes::key::<W>(lanes::at(result, index));
            let class = class_of[usize::from(key)].checked_add_signed(classes);
            let class = class.filter(|&class| usize::from(class) < self.classes.count);
            let class = class.ok_or_else(|| bad("the way back leads to a class that there is not"))?;
            Ok(Moved { index, class })
        });
        moved.collect()
    }
}

fn crossed_from_bytes(reader: &mut Reader<'_>, changed: usize, weights: usize) -> Result<Vec<(u32, i8)>, Error> {
    let unary = Golomb::new(0);
    let count = reader.count() as usize;
    if count == 0 || count > changed || count > reader.bits_left() / 3 {
        return Err(bad("more weights cross classes than change, or none"));
    }
    let gaps = Golomb::new(reader.bits(Golomb::PARAMETER_BITS) as u8);
    let mut next = 0u64;
    let crossed = (0..count).map(|_| {
        let index = reader.golomb(gaps)?.saturating_add(next);
        next = index.saturating_add(1);
        let classes = reader.golomb(unary)?.saturating_add(1);
        let lower = reader.bits(1) == 1;
        if index >= weights as u64 || classes >= CLASSES_MAX as u64 {
            return Err(bad("the way back leads beyond the frame"));
        }
        let classes = classes as i8;
        Ok((index as u32, if lower { -classes } else { classes }))
    });
    crossed.collect()
}

fn class_to_bytes<const W: usize>(out: &mut Writer, ranks: &[u32], steps: &[u64]) {
    let count = ranks.len() as u64;
    out.count(ranks.len() as u32);
    let Some(&last) = ranks.last() else { return };
    let gaps = Golomb::fit(u64::from(last) + 1 - count, count);
    out.bits(gaps.parameter.into(), Golomb::PARAMETER_BITS);

    let (mut larger, mut larger_sum, mut sum) = (0u64, 0u64, 0u64);
    for &step in steps {
        let (size, _) = size::<W>(step);
        sum = sum.saturating_add(size - 1);
        larger += u64::from(size > 1);
        larger_sum = larger_sum.saturating_add(size.saturating_sub(2));
    }
    // half of them larger: runs of 1 no longer help
    let mostly = larger * 3 < count;
    let any = Golomb::fit(sum, count);
    let (runs, extra) = (Golomb::fit(count - larger, larger), Golomb::fit(larger_sum, larger));
    match (larger, mostly) {
        (0, _) => out.bits(0, 2),
        (_, true) => {
            out.bits(1, 2);
            out.count(larger as u32);
            out.bits(runs.parameter.into(), Golomb::PARAMETER_BITS);
            out.bits(extra.parameter.into(), Golomb::PARAMETER_BITS);
        }
        (_, false) => {
            out.bits(2, 2);
            out.bits(any.parameter.into(), Golomb::PARAMETER_BITS);
        }
    }
    let mut next = 0;
    for &rank in ranks {
        out.golomb(gaps, (rank - next).into());
        next = rank + 1;
    }
    if larger > 0 && mostly {
        let mut run = 0;
        for &step in steps {
            match size::<W>(step).0 {
                1 => run += 1,
                size => {
                    out.golomb(runs, run);
                    out.golomb(extra, size - 2);
                    run = 0;
                }
            }
        }
    } else if larger > 0 {
        for &step in steps {
            out.golomb(any, size::<W>(step).0 - 1);
        }
    }
    for part in steps.chunks(32) {
        let mut down = 0;
        for (i, &step) in part.iter().enumerate() {
            down |= u64::from(size::<W>(step).1) << i;
        }
        out.bits(down, part.len() as u32);
    }
}

fn class_from_bytes<const W: usize>(reader: &mut Reader<'_>, changed: usize, out: &mut Steps) -> Result<(), Error> {
    let parameter = |reader: &mut Reader<'_>| Golomb::new(reader.bits(Golomb::PARAMETER_BITS) as u8);
    let gaps = parameter(reader);
    let kind = reader.bits(2);
    let larger = if kind == 1 { reader.count() as usize } else { 0 };
    if larger > changed {
        return Err(bad("there are more large steps than steps"));
    }
    let (runs, extra) = match kind {
        0 => (gaps, gaps),
        1 => (parameter(reader), parameter(reader)),
        2 => {
            let any = parameter(reader);
            (any, any)
        }
        _ => return Err(bad("a kind of sizes is not known")),
    };
    out.ranks.reserve(changed);
    let mut next = 0u32;
    for _ in 0..changed {
        let gap = u32::try_from(reader.golomb(gaps)?).ok();
        let rank = gap
            .and_then(|gap| next.checked_add(gap))
            .filter(|&rank| rank < u32::MAX);
        let rank = rank.ok_or_else(|| bad("a position lies beyond the frame"))?;
        out.ranks.push(rank);
        next = rank + 1;
    }
    let begin = out.steps.len();
    out.steps.resize(begin + changed, 1);
    let steps = &mut out.steps[begin..];
    match kind {
        1 => {
            let mut at = 0usize;
            for _ in 0..larger {
                let run = usize::try_from(reader.golomb(runs)?).unwrap_or(usize::MAX);
                at = at.saturating_add(run);
                let slot = steps
                    .get_mut(at)
                    .ok_or_else(|| bad("a run goes beyond the last step"))?;
                *slot = reader.golomb(extra)?.wrapping_add(2);
                at += 1;
            }
        }
        2 => {
            for slot in steps.iter_mut() {
                *slot = reader.golomb(extra)?.wrapping_add(1);
            }
        }
        _ => {}
    }
    for part in steps.chunks_mut(32) {
        let down = reader.bits(part.len() as u32);
        for (i, step) in part.iter_mut().enumerate() {
            // 0 − step where down
            let negative = (down >> i & 1).wrapping_neg();
            *step = (*step ^ negative).wrapping_sub(negative);
        }
    }
    Ok(())
}

/// What is known of some keys together when classes are chosen.
#[derive(Clone, Copy, Default)]
struct Sum {
    /// Weights, estimated.
    weights: u64,
    changed: u64,
    /// Sizes − 1 of the steps, summed up.
    extra: f64,
}

impl Sum {
    fn and(self, other: Self) -> Self {
        Sum {
            weights: self.weights + other.weights,
            changed: self.changed + other.changed,
            extra: self.extra + other.extra,
        }
    }

    /// What positions and sizes take when they are geometric, bits: the entropy.
    fn bits(self) -> f64 {
        let x_log_x = |x: f64| if x > 0.0 { x * libm::log2(x) } else { 0.0 };
        let (weights, changed) = (self.weights.max(self.changed) as f64, self.changed as f64);
        let positions = x_log_x(weights) - x_log_x(changed) - x_log_x(weights - changed);
        let sizes = x_log_x(changed + self.extra) - x_log_x(changed) - x_log_x(self.extra);
        positions + sizes + CLASS_BITS
    }
}

/// Classes of neighbouring keys, joined while that costs less than the class, and until there are few enough. Sums and
/// logarithms are computed the same on every machine, so the choice is the same.
fn choose<const W: usize>(old: &[[u8; W]], changed: &[Changed]) -> Classes {
    let mut keys = [Sum::default(); 256];
    for weight in old.iter().step_by(SAMPLE) {
        keys[usize::from(lanes::key(weight))].weights += SAMPLE as u64;
    }
    for weight in changed {
        let sum = &mut keys[usize::from(weight.keys[0])];
        sum.changed += 1;
        sum.extra += (size::<W>(weight.step).0 - 1) as f64;
    }
    // (first key, sum, its bits, what joining it with the one before adds)
    let mut classes: Vec<(u8, Sum, f64, f64)> = vec![];
    let added = |a: &(u8, Sum, f64, f64), b: &(u8, Sum, f64, f64)| a.1.and(b.1).bits() - a.2 - b.2;
    for (key, &sum) in (0..=255).zip(&keys) {
        if sum.weights > 0 || sum.changed > 0 {
            let mut class = (key, sum, sum.bits(), f64::INFINITY);
            if let Some(before) = classes.last() {
                class.3 = added(before, &class);
            }
            classes.push(class);
        }
    }
    loop {
        let cheapest = (1..classes.len()).min_by(|&a, &b| classes[a].3.total_cmp(&classes[b].3));
        let Some(at) = cheapest.filter(|&at| classes[at].3 < 0.0 || classes.len() > CLASSES_MAX) else {
            break;
        };
        let joined = classes.remove(at);
        let before = &mut classes[at - 1];
        before.1 = before.1.and(joined.1);
        before.2 = before.1.bits();
        if at > 1 {
            classes[at - 1].3 = added(&classes[at - 2], &classes[at - 1]);
        }
        if at < classes.len() {
            classes[at].3 = added(&classes[at - 1], &classes[at]);
        }
    }
    let mut starts = [0; CLASSES_MAX - 1];
    for (slot, class) in starts.iter_mut().zip(classes.iter().skip(1)) {
        *slot = class.0;
    }
    Classes {
        count: classes.len().max(1),
        starts,
    }
}

fn bad(reason: &str) -> Error {
    Error::Malformed(reason.into())
}
