//! `fp8-e4m3-b128.1`: one f32 scale for each block of 128 × 128 weights (smaller at the edges).
//!
//! The scale is s = m / 448, where m is the block's largest magnitude. A code is w / s in f32,
//! rounded to the nearest E4M3 number (ties to even), with the sign of w. E4M3 is the format
//! without infinities of the OCP 8-bit floating-point specification (1.0, 2023), called
//! `float8_e4m3fn`.

use super::weight::{self, NotFinite, Weight};

/// Rows and columns of a block.
pub(super) const BLOCK: usize = 128;
/// The largest number of E4M3.
const MOST: f32 = 448.0;

/// Quantizes up to [`BLOCK`] rows. `scales` gets the blocks' scales from left to right.
pub(super) fn band<W: Weight>(
    columns: usize,
    weights: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), NotFinite> {
    for (first, slot) in (0..columns).step_by(BLOCK).zip(scales.as_chunks_mut::<4>().0) {
        let width = BLOCK.min(columns - first);
        let starts = (first..weights.len() / W::BYTES).step_by(columns);
        let row = |start: usize| &weights[start * W::BYTES..(start + width) * W::BYTES];
        let largest = starts.clone().map(|start| weight::largest::<W>(row(start)));
        let scale = weight::scale(largest.max().unwrap_or(0), MOST)?;
        *slot = scale.to_le_bytes();
        for start in starts {
            let weights = row(start).chunks_exact(W::BYTES);
            for (code, weight) in codes[start..start + width].iter_mut().zip(weights) {
                *code = e4m3(W::bits(weight), scale);
            }
        }
    }
    Ok(())
}

/// The number of a code.
pub(super) fn value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 0xf), f32::from(code & 7));
    let magnitude = match exponent {
        0 => fraction / 512.0,
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    magnitude.copysign(if code & 0x80 == 0 { 1.0 } else { -1.0 })
}

/// The code of an f32 with these bits. `scale` brings its magnitude to 448 at most, but for
/// rounding.
#[inline]
pub(super) fn e4m3(bits: u32, scale: f32) -> u8 {
    // 2^-6: below it, E4M3 numbers are multiples of 2^-9
    const NORMAL: f32 = 0.015625;
    // 2^14: its neighbors are 2^-9 away, so adding it rounds to multiples of 2^-9
    const ROUNDER: f32 = 16384.0;
    let sign = (bits >> 24) as u8 & 0x80;
    let quotient = f32::from_bits(bits & 0x7fff_ffff) / scale;
    let small = (quotient + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    // rounds away the lowest 20 bits of the fraction; the exponent bias changes from 127 to 7
    let even = quotient.to_bits() >> 20 & 1;
    let rounded = quotient.to_bits().wrapping_add(0x7_ffff + even) >> 20;
    let large = rounded.wrapping_sub((127 - 7) << 3).min(0x7e);
    sign | if quotient < NORMAL { small } else { large } as u8
}
