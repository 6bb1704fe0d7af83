//! Weights of the quantized dtypes as f32 bits.

/// One weight in little-endian bytes.
pub(super) trait Weight: Copy + PartialEq {
    const BYTES: usize;

    /// The bits of the same number as an f32.
    fn bits(bytes: &[u8]) -> u32;
}

#[derive(Clone, Copy, PartialEq)]
pub(super) struct Bf16;

#[derive(Clone, Copy, PartialEq)]
pub(super) struct F32;

impl Weight for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    fn bits(bytes: &[u8]) -> u32 {
        u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16
    }
}

impl Weight for F32 {
    const BYTES: usize = 4;

    #[inline]
    fn bits(bytes: &[u8]) -> u32 {
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

const MAGNITUDE: u32 = 0x7fff_ffff;
/// From here on, bits are infinities and NaNs.
const INFINITE: u32 = 0x7f80_0000;
/// 2^-100. Smaller magnitudes count as 0 when a scale is chosen. So no relevant scale or quotient
/// is subnormal, which processors may flush to 0.
const SMALLEST: u32 = (127 - 100) << 23;

/// A weight that is infinite or not a number.
#[derive(Debug)]
pub(super) struct NotFinite;

/// The largest magnitude of some weights, as bits; 0 if there are none. Bits of magnitudes order
/// like the numbers.
#[inline]
pub(super) fn largest<W: Weight>(weights: &[u8]) -> u32 {
    let magnitudes = weights.chunks_exact(W::BYTES).map(|weight| W::bits(weight) & MAGNITUDE);
    // signed, because every instruction set has that maximum
    magnitudes.fold(0i32, |most, bits| most.max(bits as i32)) as u32
}

/// The scale that maps the largest magnitude to `most`. 1 if all weights count as 0.
#[inline]
pub(super) fn scale(largest: u32, most: f32) -> Result<f32, NotFinite> {
    match largest {
        INFINITE.. => Err(NotFinite),
        ..SMALLEST => Ok(1.0),
        bits => Ok(f32::from_bits(bits) / most),
    }
}
