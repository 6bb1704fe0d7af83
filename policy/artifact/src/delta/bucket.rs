//! The codec of steps, for frames in which few weights change.
//!
//! Most changed weights move to a neighboring value, and how often one changes depends on its
//! exponent, which the receiver knows. So weights are grouped into buckets of similar exponent.
//! Within a bucket, the gaps between changed weights are geometrically distributed. Values are
//! coded as steps on the scale of all values in their order.
//!
//! A payload is one bit stream (see `bits`):
//!
//! ```text
//! buckets − 1: 4 bits; then for each bucket but the first, Golomb 0: its first key − that of the bucket before (0) − 1
//! each bucket:
//!     changed weights n: count; the rest only if n > 0
//!     parameter of the gaps: 6 bits
//!     sizes: 2 bits    0 all are 1    1 mostly 1    2 any
//!     mostly: larger ones x: count; parameter of the runs: 6 bits; parameter of the larger sizes: 6 bits
//!     any: parameter of the sizes: 6 bits
//!     n gaps, Golomb: weights of the bucket between the previous changed one (or the start) and this one
//!     mostly: x times a run, Golomb, of sizes 1, then the larger size − 2, Golomb; the remaining sizes are 1
//!     any: n sizes − 1, Golomb
//!     n bits: 0 up, 1 down
//! ```
//! From the result, a receiver knows the base's bucket of every weight except those that moved to
//! another bucket. The reverse data lists these, in a bit stream that is empty if there are none:
//!
//! ```text
//! weights that crossed x: count; parameter of the gaps: 6 bits; then x times
//!     weights of the frame between the previous one (or the start) and this one, Golomb
//!     distance to the base's bucket − 1, Golomb 0; 1 bit: 0 above the result's, 1 below
//! ```
//! A weight's position on the scale is its value, with all bits but the highest flipped if the
//! highest is set. This orders floating-point numbers like signed integers: −0.0 is one below 0.0,
//! and NaNs are at the ends.

use super::bits::{Golomb, Reader, Writer};
use super::simd::{self, BUCKETS_MAX, Buckets, Isa, Override, Ranked};
use super::{Error, malformed};

/// One of this many weights is sampled to estimate how many have each key.
const SAMPLE: usize = 128;
/// Fixed cost of a bucket in bits.
const BUCKET_BITS: f64 = 30.0;

/// Changed weights by bucket, in payload order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Steps {
    buckets: Buckets,
    /// Ranks within their bucket, bucket after bucket.
    ranks: Vec<u32>,
    /// Where each bucket begins in `ranks`.
    first: [usize; BUCKETS_MAX + 1],
    /// Change of the position on the scale, modulo 2^(8W).
    steps: Vec<u64>,
    /// Weights whose result is in another bucket: index, and the base's bucket minus the result's.
    crossed: Vec<(u32, i8)>,
}

/// A weight's position on the scale, modulo 2^(8W). Its own inverse.
#[inline(always)]
pub(super) fn scale<const W: usize>(value: u64) -> u64 {
    let top = 8 * W as u32 - 1;
    let negative = (value >> top & 1).wrapping_neg();
    value ^ (negative & ((1 << top) - 1))
}

/// Absolute size of a step, and whether it goes down.
#[inline(always)]
fn size<const W: usize>(step: u64) -> (u64, bool) {
    let unused = 64 - 8 * W as u32;
    let signed = (step << unused) as i64 >> unused;
    (signed.unsigned_abs(), signed < 0)
}

/// A changed weight.
#[derive(Clone, Copy)]
struct Changed {
    /// Its step on the scale.
    step: u64,
    /// Keys in the base and in the result.
    keys: [u8; 2],
}

/// The steps of the changed weights at `indices`.
pub(super) fn steps<const W: usize>(isa: Isa, old: &[u8], new: &[u8], indices: &[u32]) -> Steps {
    let (olds, news) = (old.as_chunks::<W>().0, new.as_chunks::<W>().0);
    let changed = indices.iter().map(|&index| {
        let (old, new) = (&olds[index as usize], &news[index as usize]);
        Changed {
            step: scale::<W>(simd::value(new)).wrapping_sub(scale::<W>(simd::value(old))),
            keys: [simd::key(old), simd::key(new)],
        }
    });
    let changed: Vec<Changed> = changed.collect();
    let buckets = choose::<W>(olds, &changed);
    let mut places = Vec::with_capacity(indices.len());
    simd::ranks::<W>(isa, old, &buckets, indices, &mut places);
    let mut first = [0; BUCKETS_MAX + 1];
    for place in &places {
        first[usize::from(place.bucket) + 1] += 1;
    }
    for bucket in 0..BUCKETS_MAX {
        first[bucket + 1] += first[bucket];
    }
    let mut next = first;
    let (mut ranks, mut steps) = (vec![0; places.len()], vec![0; places.len()]);
    let mut crossed = vec![];
    let bucket_of = buckets.of_keys();
    for (Ranked { index, bucket, rank }, changed) in places.into_iter().zip(changed) {
        let result = bucket_of[usize::from(changed.keys[1])];
        if result != bucket {
            crossed.push((index, bucket as i8 - result as i8));
        }
        let slot = &mut next[usize::from(bucket)];
        ranks[*slot] = rank;
        steps[*slot] = changed.step;
        *slot += 1;
    }
    Steps {
        buckets,
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
        out.bits(self.buckets.count as u64 - 1, 4);
        let mut before = 0;
        for &start in &self.buckets.starts[..self.buckets.count - 1] {
            out.golomb(unary, u64::from(start - before) - 1);
            before = start;
        }
        for bucket in 0..self.buckets.count {
            let part = self.first[bucket]..self.first[bucket + 1];
            bucket_to_bytes::<W>(&mut out, &self.ranks[part.clone()], &self.steps[part]);
        }
        out.finish()
    }

    /// Reads the steps of a frame of `weights` weights.
    pub fn from_bytes<const W: usize>(payload: &[u8], weights: usize) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        let unary = Golomb::new(0);
        let mut buckets = Buckets {
            count: reader.bits(4) as usize + 1,
            starts: [0; BUCKETS_MAX - 1],
        };
        let mut before = 0u64;
        for start in &mut buckets.starts[..buckets.count - 1] {
            before = reader.golomb(unary)?.saturating_add(before + 1);
            *start = u8::try_from(before).map_err(|_| malformed("a bucket begins beyond the last key"))?;
        }
        let mut steps = Steps {
            buckets,
            ranks: vec![],
            first: [0; BUCKETS_MAX + 1],
            steps: vec![],
            crossed: vec![],
        };
        for bucket in 0..buckets.count {
            let changed = reader.count() as usize;
            // a changed weight takes at least two bits, so memory is bounded by the payload
            if changed > reader.bits_left() / 2 || changed > weights - steps.ranks.len() {
                return Err(malformed("there are more changes than weights, or than bits"));
            }
            if changed > 0 {
                bucket_from_bytes::<W>(&mut reader, changed, &mut steps)?;
            }
            steps.first[bucket + 1] = steps.ranks.len();
        }
        steps.first[buckets.count..].fill(steps.ranks.len());
        reader.finish()?;
        Ok(steps)
    }

    /// Adds the reverse data.
    pub fn with_reverse(mut self, reverse: &[u8], weights: usize) -> Result<Self, Error> {
        if !reverse.is_empty() {
            let mut reader = Reader::new(reverse);
            self.crossed = crossed_from_bytes(&mut reader, self.ranks.len(), weights)?;
            reader.finish()?;
        }
        Ok(self)
    }

    /// The reverse data. Empty if no weight crossed buckets.
    pub fn reverse_to_bytes(&self) -> Vec<u8> {
        let (count, unary) = (self.crossed.len() as u64, Golomb::new(0));
        let Some(&(last, _)) = self.crossed.last() else {
            return vec![];
        };
        let mut out = Writer::default();
        out.count(count as u32);
        let gaps = Golomb::fit(u64::from(last) + 1 - count, count);
        out.bits(gaps.parameter.into(), Golomb::PARAMETER_BITS);
        let mut next = 0;
        for &(index, buckets) in &self.crossed {
            out.golomb(gaps, (index - next).into());
            out.golomb(unary, u64::from(buckets.unsigned_abs()) - 1);
            out.bits((buckets < 0).into(), 1);
            next = index + 1;
        }
        out.finish()
    }

    /// Index of every changed weight, and the position of its [`step`](Self::step). `weights` are
    /// the base's; `reverse`: the result's.
    pub fn locate<const W: usize>(&self, isa: Isa, weights: &[u8], reverse: bool) -> Result<Vec<(u32, u32)>, Error> {
        let overrides = if reverse { self.overrides::<W>(weights)? } else { vec![] };
        let mut found = Vec::with_capacity(self.ranks.len());
        let Steps {
            buckets, ranks, first, ..
        } = self;
        simd::locate::<W>(isa, weights, buckets, &overrides, ranks, first, &mut found);
        if found.len() != self.ranks.len() {
            return Err(malformed("a position lies beyond the last weight of its bucket"));
        }
        Ok(found)
    }

    /// The step from base to result at a position.
    #[inline]
    pub fn step(&self, place: u32) -> u64 {
        self.steps[place as usize]
    }

    /// The base's bucket of every weight that crossed.
    fn overrides<const W: usize>(&self, result: &[u8]) -> Result<Vec<Override>, Error> {
        let bucket_of = self.buckets.of_keys();
        let overrides = self.crossed.iter().map(|&(index, buckets)| {
            let key = simd::key::<W>(simd::at(result, index));
            let bucket = bucket_of[usize::from(key)].checked_add_signed(buckets);
            let bucket = bucket.filter(|&bucket| usize::from(bucket) < self.buckets.count);
            let bucket = bucket.ok_or_else(|| malformed("the reverse data names an unknown bucket"))?;
            Ok(Override { index, bucket })
        });
        overrides.collect()
    }
}

fn crossed_from_bytes(reader: &mut Reader<'_>, changed: usize, weights: usize) -> Result<Vec<(u32, i8)>, Error> {
    let unary = Golomb::new(0);
    let count = reader.count() as usize;
    if count == 0 || count > changed || count > reader.bits_left() / 3 {
        return Err(malformed("more weights cross buckets than change, or none"));
    }
    let gaps = Golomb::new(reader.bits(Golomb::PARAMETER_BITS) as u8);
    let mut next = 0u64;
    let crossed = (0..count).map(|_| {
        let index = reader.golomb(gaps)?.saturating_add(next);
        next = index.saturating_add(1);
        let buckets = reader.golomb(unary)?.saturating_add(1);
        let lower = reader.bits(1) == 1;
        if index >= weights as u64 || buckets >= BUCKETS_MAX as u64 {
            return Err(malformed("the reverse data goes beyond the frame"));
        }
        let buckets = buckets as i8;
        Ok((index as u32, if lower { -buckets } else { buckets }))
    });
    crossed.collect()
}

fn bucket_to_bytes<const W: usize>(out: &mut Writer, ranks: &[u32], steps: &[u64]) {
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
    // with a third of them larger, runs of 1 no longer help
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

fn bucket_from_bytes<const W: usize>(reader: &mut Reader<'_>, changed: usize, out: &mut Steps) -> Result<(), Error> {
    let parameter = |reader: &mut Reader<'_>| Golomb::new(reader.bits(Golomb::PARAMETER_BITS) as u8);
    let gaps = parameter(reader);
    let kind = reader.bits(2);
    let larger = if kind == 1 { reader.count() as usize } else { 0 };
    if larger > changed {
        return Err(malformed("there are more large steps than steps"));
    }
    let (runs, extra) = match kind {
        0 => (gaps, gaps),
        1 => (parameter(reader), parameter(reader)),
        2 => {
            let any = parameter(reader);
            (any, any)
        }
        _ => return Err(malformed("a kind of sizes is not known")),
    };
    out.ranks.reserve(changed);
    let mut next = 0u32;
    for _ in 0..changed {
        let gap = u32::try_from(reader.golomb(gaps)?).ok();
        let rank = gap
            .and_then(|gap| next.checked_add(gap))
            .filter(|&rank| rank < u32::MAX);
        let rank = rank.ok_or_else(|| malformed("a position lies beyond the frame"))?;
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
                    .ok_or_else(|| malformed("a run goes beyond the last step"))?;
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

/// Statistics of some keys, used to choose buckets.
#[derive(Clone, Copy, Default)]
struct Sum {
    /// Estimated number of weights.
    weights: u64,
    changed: u64,
    /// Sum of (size − 1) of the steps.
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

    /// Bits of positions and sizes by their entropy, if both are geometric.
    fn bits(self) -> f64 {
        let x_log_x = |x: f64| if x > 0.0 { x * libm::log2(x) } else { 0.0 };
        let (weights, changed) = (self.weights.max(self.changed) as f64, self.changed as f64);
        let positions = x_log_x(weights) - x_log_x(changed) - x_log_x(weights - changed);
        let sizes = x_log_x(changed + self.extra) - x_log_x(changed) - x_log_x(self.extra);
        positions + sizes + BUCKET_BITS
    }
}

/// Buckets of neighboring keys, merged while that saves bits and until there are few enough. Every
/// machine computes sums and logarithms alike, so all choose the same.
fn choose<const W: usize>(old: &[[u8; W]], changed: &[Changed]) -> Buckets {
    let mut keys = [Sum::default(); 256];
    for weight in old.iter().step_by(SAMPLE) {
        keys[usize::from(simd::key(weight))].weights += SAMPLE as u64;
    }
    for weight in changed {
        let sum = &mut keys[usize::from(weight.keys[0])];
        sum.changed += 1;
        sum.extra += (size::<W>(weight.step).0 - 1) as f64;
    }
    // (first key, sum, its bits, bits added by merging it with the one before)
    let mut buckets: Vec<(u8, Sum, f64, f64)> = vec![];
    let added = |a: &(u8, Sum, f64, f64), b: &(u8, Sum, f64, f64)| a.1.and(b.1).bits() - a.2 - b.2;
    for (key, &sum) in (0..=255).zip(&keys) {
        if sum.weights > 0 || sum.changed > 0 {
            let mut bucket = (key, sum, sum.bits(), f64::INFINITY);
            if let Some(before) = buckets.last() {
                bucket.3 = added(before, &bucket);
            }
            buckets.push(bucket);
        }
    }
    loop {
        let cheapest = (1..buckets.len()).min_by(|&a, &b| buckets[a].3.total_cmp(&buckets[b].3));
        let Some(at) = cheapest.filter(|&at| buckets[at].3 < 0.0 || buckets.len() > BUCKETS_MAX) else {
            break;
        };
        let joined = buckets.remove(at);
        let before = &mut buckets[at - 1];
        before.1 = before.1.and(joined.1);
        before.2 = before.1.bits();
        if at > 1 {
            buckets[at - 1].3 = added(&buckets[at - 2], &buckets[at - 1]);
        }
        if at < buckets.len() {
            buckets[at].3 = added(&buckets[at - 1], &buckets[at]);
        }
    }
    let mut starts = [0; BUCKETS_MAX - 1];
    for (slot, bucket) in starts.iter_mut().zip(buckets.iter().skip(1)) {
        *slot = bucket.0;
    }
    Buckets {
        count: buckets.len().max(1),
        starts,
    }
}
