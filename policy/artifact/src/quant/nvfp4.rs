//! `nvfp4-e4m3-g16.1`: one E4M3 scale for each group of 16 weights of a row, and one f32 scale for the matrices that
//! engines join.
//!
//! The common scale is g = 2688 / m in f32, where m is the largest magnitude of all joined matrices, 2688 = 448 · 6. A
//! group's scale is s = g · (a / 6) in f32, rounded to the nearest E4M3 number (ties to even); 0.125 if that is 0. a is the
//! group's largest magnitude. A code is w / (s / g) in f32, rounded to the nearest E2M1 number (ties to even), with the
//! sign of w. Two codes are in a byte, the first in the lower half. So compressed-tensors packs them
//! (`nvfp4-pack-quantized`).

use super::fp8;
use super::weight::{self, NotFinite, Weight};

/// Weights that share a scale.
pub(super) const GROUP: usize = 16;
const CODE_BYTES: usize = GROUP / 2;
/// The largest number of E2M1.
const MOST: f32 = 6.0;
/// The largest product of a group's scale and a code.
const MOST_OF_BOTH: f32 = 448.0 * MOST;
/// 0.125 as E4M3.
const SMALLEST_SCALE: u8 = 0x20;
/// Magnitudes above these round up to the next number of E2M1; those that equal them do if the second is true.
const HALFWAY: [(f32, bool); 7] = [
    (0.25, false),
    (0.75, true),
    (1.25, false),
    (1.75, true),
    (2.5, false),
    (3.5, true),
    (5.0, false),
];

/// The common scale of matrices whose largest magnitude has these bits.
pub(super) fn common_scale(largest: u32) -> Result<f32, NotFinite> {
    // 1 if all weights count as 0
    let scale = weight::scale(largest, MOST_OF_BOTH)?;
    Ok(if scale == 1.0 {
        1.0
    } else {
        MOST_OF_BOTH / f32::from_bits(largest)
    })
}

/// Quantizes some rows of whole groups.
pub(super) fn band<W: Weight>(
    common: f32,
    weights: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), NotFinite> {
    let codes = codes.as_chunks_mut::<CODE_BYTES>().0.iter_mut();
    for ((group, codes), slot) in weights.chunks_exact(GROUP * W::BYTES).zip(codes).zip(scales) {
        let largest = f32::from_bits(weight::largest::<W>(group));
        *slot = match fp8::e4m3((common * (largest / MOST)).to_bits(), 1.0) {
            0 => SMALLEST_SCALE,
            code => code,
        };
        let scale = fp8::value(*slot) / common;
        for (code, pair) in codes.iter_mut().zip(group.chunks_exact(2 * W::BYTES)) {
            let (low, high) = pair.split_at(W::BYTES);
            *code = e2m1(W::bits(low), scale) | e2m1(W::bits(high), scale) << 4;
        }
    }
    Ok(())
}

/// The number of a code.
pub(super) fn value(code: u8) -> f32 {
    let magnitude = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    magnitude.copysign(if code & 8 == 0 { 1.0 } else { -1.0 })
}

/// The code of an f32 with these bits. 0 has no sign; what is rounded to it keeps its own.
fn e2m1(bits: u32, scale: f32) -> u8 {
    if bits & 0x7fff_ffff == 0 {
        return 0;
    }
    let quotient = f32::from_bits(bits & 0x7fff_ffff) / scale;
    let sign = (bits >> 28) as u8 & 8;
    let above = |&(half, up): &(f32, bool)| quotient > half || up && quotient == half;
    sign | HALFWAY.iter().filter(|&half| above(half)).count() as u8
}
