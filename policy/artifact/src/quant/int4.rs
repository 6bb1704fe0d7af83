//! `int4-sym-g32.1`: one bf16 scale for each group of 32 weights of a row.
//!
//! The scale is s = m / 7.5 in f32, rounded to bf16, where m is the group's largest magnitude. A
//! code is w / s in f32, rounded to the nearest integer (ties to even) within −8 to 7. It is stored
//! plus 8, eight codes in a little-endian I32, the first in the lowest bits.

use super::weight::{self, NotFinite, Weight};
use half::bf16;

/// Weights that share a scale.
pub(super) const GROUP: usize = 32;
const CODE_BYTES: usize = GROUP / 2;
/// Half the width of −8 to 7: what compressed-tensors divides by.
const MOST: f32 = 7.5;

/// Quantizes some rows of whole groups.
pub(super) fn band<W: Weight>(weights: &[u8], codes: &mut [u8], scales: &mut [u8]) -> Result<(), NotFinite> {
    let codes = codes.as_chunks_mut::<CODE_BYTES>().0.iter_mut();
    let scales = scales.as_chunks_mut::<2>().0.iter_mut();
    for ((group, codes), slot) in weights.chunks_exact(GROUP * W::BYTES).zip(codes).zip(scales) {
        let scale = bf16::from_f32(weight::scale(weight::largest::<W>(group), MOST)?);
        *slot = scale.to_le_bytes();
        let scale = scale.to_f32();
        for (code, pair) in codes.iter_mut().zip(group.chunks_exact(2 * W::BYTES)) {
            let (low, high) = pair.split_at(W::BYTES);
            *code = nibble(W::bits(low), scale) | nibble(W::bits(high), scale) << 4;
        }
    }
    Ok(())
}

/// The code of an f32 with these bits, 8 added.
#[inline]
pub(super) fn nibble(bits: u32, scale: f32) -> u8 {
    // 1.5 · 2^23: its neighbors are 1 away, so adding it rounds to integers
    const ROUNDER: f32 = 12_582_912.0;
    let rounded = f32::from_bits(bits) / scale + ROUNDER;
    let code = (rounded.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    (code.clamp(-8, 7) + 8) as u8
}
