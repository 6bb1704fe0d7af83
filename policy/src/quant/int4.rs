//! `int4-sym-g32.1`: every 32 weights of a row have the scale s = m / 7.5 in f32, rounded to bf16, m their largest magnitude; a
//! code is w / s in f32, rounded to the nearest integer (ties to even), −8 to 7. It is stored with 8 added, eight to a
//! little-endian I32, the first in its lowest bits.

use super::Touched;
use super::weight::{self, NotFinite, Weight};
use half::bf16;

/// Weights that share a scale.
pub(super) const GROUP: usize = 32;
pub(super) const SCALE_BYTES: usize = 2;
const CODE_BYTES: usize = GROUP / 2;
/// Half of the width of −8 to 7: what compressed-tensors divides by.
const MOST: f32 = 7.5;

/// Codes for some rows of whole groups. With `before`, codes and scales are those of these rows, and only groups that differ are
/// done.
pub(super) fn band<W: Weight>(
    before: Option<&[u8]>,
    after: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<Touched, NotFinite> {
    let mut touched = Touched::default();
    let group_bytes = GROUP * W::BYTES;
    let codes = codes.as_chunks_mut::<CODE_BYTES>().0.iter_mut();
    let scales = scales.as_chunks_mut::<SCALE_BYTES>().0.iter_mut();
    for (i, ((group, codes), held)) in after.chunks_exact(group_bytes).zip(codes).zip(scales).enumerate() {
        touched.blocks += 1;
        let at = i * group_bytes;
        if before.is_some_and(|before| before[at..at + group_bytes] == *group) {
            continue;
        }
        let scale = bf16::from_f32(weight::scale(weight::largest::<W>(group), MOST)?);
        touched.touched += 1;
        touched.rescaled += u64::from(before.is_none() || scale.to_le_bytes() != *held);
        touched.coded += GROUP as u64;
        *held = scale.to_le_bytes();
        let scale = scale.to_f32();
        for (code, pair) in codes.iter_mut().zip(group.chunks_exact(2 * W::BYTES)) {
            let (low, high) = pair.split_at(W::BYTES);
            *code = nibble(W::bits(low), scale) | nibble(W::bits(high), scale) << 4;
        }
    }
    Ok(touched)
}

#[inline]
pub(super) fn nibble(bits: u32, scale: f32) -> u8 {
    // 1.5 · 2^23, whose neighbours are 1 away: adding it rounds to integers
    const ROUNDER: f32 = 12_582_912.0;
    let rounded = f32::from_bits(bits) / scale + ROUNDER;
    let code = (rounded.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    (code.clamp(-8, 7) + 8) as u8
}
