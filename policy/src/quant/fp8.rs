//! `fp8-e4m3-b128.1`: every 128 × 128 weights (fewer at the edges) have the scale s = m / 448 in f32, m their largest magnitude;
//! a code is w / s in f32, rounded to the nearest number of E4M3 (ties to even), with the sign of w. Codes are those of the
//! E4M3 without infinities of the OCP 8-bit floating-point specification (1.0, 2023), called `float8_e4m3fn`.

use super::Touched;
use super::weight::{self, NotFinite, Weight};

/// Weights of a block, both ways.
pub(super) const BLOCK: usize = 128;
pub(super) const SCALE_BYTES: usize = 4;
/// The largest number of E4M3.
const MOST: f32 = 448.0;

/// Codes for up to [`BLOCK`] rows: `scales` takes those of the blocks from left to right. With `before`, codes and scales are
/// those of these rows, and only what differs is done.
pub(super) fn band<W: Weight>(
    columns: usize,
    before: Option<&[u8]>,
    after: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<Touched, NotFinite> {
    let mut touched = Touched::default();
    let mut changed = vec![];
    for (at, held) in (0..columns).step_by(BLOCK).zip(scales.as_chunks_mut::<SCALE_BYTES>().0) {
        let block = Block {
            columns,
            at,
            width: BLOCK.min(columns - at),
        };
        touched.blocks += 1;
        let scale = match before {
            None => block.scale::<W>(after)?,
            Some(before) => {
                changed.clear();
                block.differing::<W>(before, after, &mut changed);
                if changed.is_empty() {
                    continue;
                }
                let scale = f32::from_le_bytes(*held);
                match may_rescale::<W>(scale, before, after, &changed)? {
                    true => block.scale::<W>(after)?,
                    false => scale,
                }
            }
        };
        touched.touched += 1;
        if before.is_some() && scale.to_le_bytes() == *held {
            for &at in &changed {
                codes[at] = e4m3(W::bits(&after[at * W::BYTES..]), scale);
            }
            touched.coded += changed.len() as u64;
            continue;
        }
        *held = scale.to_le_bytes();
        touched.rescaled += 1;
        for row in block.rows(after.len() / W::BYTES) {
            let weights = after[row.start * W::BYTES..row.end * W::BYTES].chunks_exact(W::BYTES);
            touched.coded += row.len() as u64;
            for (code, weight) in codes[row].iter_mut().zip(weights) {
                *code = e4m3(W::bits(weight), scale);
            }
        }
    }
    Ok(touched)
}

/// Where a block lies in its band, in weights.
struct Block {
    columns: usize,
    at: usize,
    width: usize,
}

impl Block {
    /// The weights of each row.
    fn rows(&self, weights: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let (at, width) = (self.at, self.width);
        (0..weights)
            .step_by(self.columns)
            .map(move |row| row + at..row + at + width)
    }

    /// Which weights of the band have other bits.
    fn differing<W: Weight>(&self, before: &[u8], after: &[u8], changed: &mut Vec<usize>) {
        // compared eight bytes at a time, because most are equal
        const STEP: usize = 8;
        for row in self.rows(after.len() / W::BYTES) {
            let bytes = row.start * W::BYTES..row.end * W::BYTES;
            let (old, new) = (&before[bytes.clone()], &after[bytes]);
            for (step, (old, new)) in old.chunks(STEP).zip(new.chunks(STEP)).enumerate() {
                if old == new {
                    continue;
                }
                let first = row.start + step * STEP / W::BYTES;
                let weights = old.chunks_exact(W::BYTES).zip(new.chunks_exact(W::BYTES));
                changed.extend(
                    (first..)
                        .zip(weights)
                        .filter(|(_, (old, new))| old != new)
                        .map(|(at, _)| at),
                );
            }
        }
    }

    fn scale<W: Weight>(&self, weights: &[u8]) -> Result<f32, NotFinite> {
        let rows = self.rows(weights.len() / W::BYTES);
        let largest = rows.map(|row| weight::largest::<W>(&weights[row.start * W::BYTES..row.end * W::BYTES]));
        weight::scale(largest.max().unwrap_or(0), MOST)
    }
}

/// Whether the block's largest magnitude may have become another: one of the changed weights was it, or is larger. Whatever gave
/// the scale and did not change still gives it, because division by a constant keeps the order.
fn may_rescale<W: Weight>(scale: f32, before: &[u8], after: &[u8], changed: &[usize]) -> Result<bool, NotFinite> {
    let mut may = false;
    for &at in changed {
        let bytes = at * W::BYTES..(at + 1) * W::BYTES;
        let was = weight::scale(weight::largest::<W>(&before[bytes.clone()]), MOST);
        let is = weight::scale(weight::largest::<W>(&after[bytes]), MOST)?;
        may |= was.is_ok_and(|was| was == scale) || is > scale;
    }
    Ok(may)
}

/// The code of the number with these bits, over a scale that makes its magnitude at most 448 and a little.
#[inline]
pub(super) fn e4m3(bits: u32, scale: f32) -> u8 {
    // 2^-6, below which numbers are multiples of 2^-9
    const NORMAL: f32 = 0.015625;
    // 2^14, whose neighbours are 2^-9 away: adding it rounds to such multiples
    const ROUNDER: f32 = 16384.0;
    let sign = (bits >> 24) as u8 & 0x80;
    let quotient = f32::from_bits(bits & 0x7fff_ffff) / scale;
    let small = (quotient + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    // the lowest 20 bits of the fraction are rounded away; exponents count from 7 instead of 127
    let even = quotient.to_bits() >> 20 & 1;
    let rounded = quotient.to_bits().wrapping_add(0x7_ffff + even) >> 20;
    let large = rounded.wrapping_sub((127 - 7) << 3).min(0x7e);
    sign | if quotient < NORMAL { small } else { large } as u8
}
