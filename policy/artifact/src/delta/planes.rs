//! The codec of dense changes, for any bytes.
//!
//! Every weight's step on the scale (see `bucket`) is written in zigzag form (0, −1, 1, −2, … as 0,
//! 1, 2, 3, …): all lowest bytes first, then all second bytes, and so on.

use std::io::Read;

use super::bucket::scale;
use super::simd::value;
use super::{Error, malformed};

/// Small steps leave the upper planes almost empty, so higher levels gain little.
const ZSTD_LEVEL: i32 = 1;
/// Most memory that is reserved for an unpacked size before it is verified.
const RESERVE_BYTES_MAX: usize = 16 << 20;

pub(super) fn encode<const W: usize>(old: &[u8], new: &[u8]) -> Vec<u8> {
    let weights = new.len() / W;
    let mut planes = vec![0; new.len()];
    let (old, new) = (old.as_chunks::<W>().0, new.as_chunks::<W>().0);
    for (i, (old, new)) in old.iter().zip(new).enumerate() {
        let step = scale::<W>(value(new)).wrapping_sub(scale::<W>(value(old)));
        let coded = zigzag::<W>(step).to_le_bytes();
        for (byte, &coded) in coded[..W].iter().enumerate() {
            planes[byte * weights + i] = coded;
        }
    }
    planes
}

/// Applies `planes` to `weights`, which have the same length. `reverse`: undoes them.
pub(super) fn apply<const W: usize>(weights: &mut [u8], planes: &[u8], reverse: bool) {
    let count = weights.len() / W;
    for (i, weight) in weights.as_chunks_mut::<W>().0.iter_mut().enumerate() {
        let mut coded = [0; 8];
        for (byte, coded) in coded[..W].iter_mut().enumerate() {
            *coded = planes[byte * count + i];
        }
        let step = unzigzag(u64::from_le_bytes(coded));
        let step = if reverse { step.wrapping_neg() } else { step };
        let new = add_step::<W>(value(weight), step);
        weight.copy_from_slice(&new.to_le_bytes()[..W]);
    }
}

/// The value at distance `step` from `value` on the scale.
#[inline(always)]
pub(super) fn add_step<const W: usize>(value: u64, step: u64) -> u64 {
    let mask = u64::MAX >> (64 - 8 * W as u32);
    scale::<W>(scale::<W>(value).wrapping_add(step) & mask)
}

/// One zstd frame of `bytes`.
pub(super) fn pack(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    zstd::bulk::compress(bytes, ZSTD_LEVEL).map_err(Error::Compress)
}

/// Unpacks one zstd frame. Returns an error if it does not have exactly `size` bytes; memory grows
/// only with the bytes that are unpacked.
pub(super) fn unpack(packed: &[u8], size: usize) -> Result<Vec<u8>, Error> {
    let refuse = |error: std::io::Error| Error::Malformed(format!("decompress: {error}"));
    let mut out = Vec::with_capacity(size.min(RESERVE_BYTES_MAX));
    zstd::stream::read::Decoder::with_buffer(packed)
        .map_err(refuse)?
        .take((size as u64).saturating_add(1))
        .read_to_end(&mut out)
        .map_err(refuse)?;
    if out.len() != size {
        return Err(malformed("a part has another size than it claims"));
    }
    Ok(out)
}

/// Zigzag form of a difference, a signed integer of W bytes.
fn zigzag<const W: usize>(difference: u64) -> u64 {
    let unused = 64 - 8 * W as u32;
    let signed = (difference << unused) as i64 >> unused;
    (signed << 1 ^ signed >> 63) as u64
}

fn unzigzag(value: u64) -> u64 {
    (value >> 1) ^ (value & 1).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_the_order_of_the_values_and_its_own_inverse() {
        let ordered = [
            0xff80u16, 0xbf80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3f80, 0x7f80, 0x7fc1,
        ];
        let places: Vec<i16> = ordered.iter().map(|&v| scale::<2>(v.into()) as u16 as i16).collect();
        assert!(places.is_sorted(), "{places:?}");
        assert_eq!(places[4] - places[3], 1, "−0.0 is next to 0.0");
        for value in 0..=u16::MAX {
            assert_eq!(scale::<2>(scale::<2>(value.into())), u64::from(value));
        }
        assert_eq!(add_step::<2>(0x0000, 1u64.wrapping_neg()), 0x8000);
        assert_eq!(add_step::<8>(u64::MAX, 1), u64::MAX - 1);
        assert_eq!(zigzag::<2>(0xffff), 1);
        assert_eq!(zigzag::<8>(1 << 63), u64::MAX);
    }

    #[test]
    fn planes_are_applied_and_reversed_for_any_bits() {
        let bytes = |seed: u32| -> Vec<u8> { (0..96u32).map(|i| ((i * i * seed) >> 3) as u8).collect() };
        let (old, new) = (bytes(7), bytes(1001));
        fn both<const W: usize>(old: &[u8], new: &[u8]) {
            let planes = encode::<W>(old, new);
            let mut weights = old.to_vec();
            apply::<W>(&mut weights, &planes, false);
            assert_eq!(weights, new);
            apply::<W>(&mut weights, &planes, true);
            assert_eq!(weights, old);
        }
        both::<1>(&old, &new);
        both::<2>(&old, &new);
        both::<4>(&old, &new);
        both::<8>(&old, &new);
    }

    #[test]
    fn a_frame_that_holds_more_or_less_than_it_claims_is_refused() {
        let packed = pack(&[7; 1000]).unwrap();
        assert_eq!(unpack(&packed, 1000).unwrap(), [7; 1000]);
        assert!(unpack(&packed, 999).is_err());
        assert!(unpack(&packed, 1001).is_err());
        assert!(unpack(&packed[..packed.len() - 1], 1000).is_err());
    }
}
