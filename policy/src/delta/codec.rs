//! How one tensor's change is coded. Pure functions on bytes: values are unsigned little-endian integers of the dtype's
//! width, so every bit pattern survives.
//!
//! Sparse payload: four LEB128 integers (number of changed weights; length of the gaps before compression; length of the
//! gaps' zstd frame; length of the values before compression), the gaps' zstd frame, the values' zstd frame to the end.
//! A gap is the LEB128 count of unchanged weights since the previous changed one (or the start); a value is the LEB128
//! zigzag of `new − old` in the width's wrapping arithmetic: a bf16 weight that moved by one ulp is a single byte.
//!
//! Xor payload: one zstd frame of `new ^ old`, split into byte planes: all first bytes of the weights, all second bytes, ….

use std::io::Read;

use safetensors::Dtype;

use super::Error;

/// The streams hold entropy, not repetition: measured on bf16 steps, higher levels gain nothing and cost time.
const ZSTD_LEVEL: i32 = 1;
/// Weights compared at once before looking at single ones.
const BLOCK_BYTES: usize = 64;
/// Taken in advance when the size before compression is only claimed.
const RESERVE_BYTES_MAX: usize = 16 << 20;

pub(super) struct Sparse {
    pub changed: u64,
    pub payload: Vec<u8>,
}

/// Bytes of one weight; 1 for dtypes narrower than a byte, whose bytes are then compared.
pub(super) fn width(dtype: Dtype) -> usize {
    (dtype.bitsize() / 8).max(1)
}

/// Codes the changed weights; none when there are more than `changed_max` of them. Both slices have the same length, a
/// multiple of `width`.
pub(super) fn sparse_encode(old: &[u8], new: &[u8], width: usize, changed_max: u64) -> Result<Option<Sparse>, Error> {
    match width {
        1 => sparse_encode_width::<1>(old, new, changed_max),
        2 => sparse_encode_width::<2>(old, new, changed_max),
        4 => sparse_encode_width::<4>(old, new, changed_max),
        _ => sparse_encode_width::<8>(old, new, changed_max),
    }
}

fn sparse_encode_width<const W: usize>(old: &[u8], new: &[u8], changed_max: u64) -> Result<Option<Sparse>, Error> {
    let (mut gaps, mut values) = (vec![], vec![]);
    let (mut changed, mut next) = (0u64, 0u64);
    let mut too_many = false;
    each_difference::<W>(old, new, |index, old, new| {
        push_varint(&mut gaps, index - next);
        push_varint(&mut values, zigzag::<W>(new.wrapping_sub(old)));
        next = index + 1;
        changed += 1;
        too_many = changed > changed_max;
        !too_many
    });
    if too_many {
        return Ok(None);
    }
    let packed_gaps = compress(&gaps).map_err(Error::Compress)?;
    let packed_values = compress(&values).map_err(Error::Compress)?;
    let mut payload = vec![];
    push_varint(&mut payload, changed);
    push_varint(&mut payload, gaps.len() as u64);
    push_varint(&mut payload, packed_gaps.len() as u64);
    push_varint(&mut payload, values.len() as u64);
    payload.extend(packed_gaps);
    payload.extend(packed_values);
    Ok(Some(Sparse { changed, payload }))
}

/// The new bytes of a tensor from its old ones and a sparse payload.
pub(super) fn sparse_apply(old: &[u8], payload: &[u8], width: usize) -> Result<Vec<u8>, Error> {
    match width {
        1 => sparse_apply_width::<1>(old, payload),
        2 => sparse_apply_width::<2>(old, payload),
        4 => sparse_apply_width::<4>(old, payload),
        _ => sparse_apply_width::<8>(old, payload),
    }
}

fn sparse_apply_width<const W: usize>(old: &[u8], mut payload: &[u8]) -> Result<Vec<u8>, Error> {
    let weights = (old.len() / W) as u64;
    let changed = varint(&mut payload)?;
    let gaps_length = varint(&mut payload)?;
    let packed_gaps_length = varint(&mut payload)?;
    let values_length = varint(&mut payload)?;
    // a varint takes at most ten bytes: longer claims cannot be true, and bound what is decompressed
    let most = changed.saturating_mul(10);
    if changed > weights || gaps_length > most || values_length > most {
        return Err(bad("more changes than weights"));
    }
    let (packed_gaps, packed_values) = usize::try_from(packed_gaps_length)
        .ok()
        .and_then(|length| payload.split_at_checked(length))
        .ok_or_else(|| bad("the gaps are longer than the payload"))?;
    let gaps = decompress(packed_gaps, gaps_length as usize)?;
    let values = decompress(packed_values, values_length as usize)?;

    let (mut gaps, mut values) = (&gaps[..], &values[..]);
    let mut new = old.to_vec();
    let mut index = 0u64;
    for _ in 0..changed {
        index = index
            .checked_add(varint(&mut gaps)?)
            .filter(|&index| index < weights)
            .ok_or_else(|| bad("a position lies beyond the tensor"))?;
        let start = index as usize * W;
        let slot = new
            .get_mut(start..start + W)
            .ok_or_else(|| bad("a position lies beyond the tensor"))?;
        let value = read::<W>(slot).wrapping_add(unzigzag(varint(&mut values)?));
        slot.copy_from_slice(&value.to_le_bytes()[..W]);
        index += 1;
    }
    if !gaps.is_empty() || !values.is_empty() {
        return Err(bad("there are more positions or values than changes"));
    }
    Ok(new)
}

/// Codes the bits that differ, dense.
pub(super) fn xor_encode(old: &[u8], new: &[u8], width: usize) -> std::io::Result<Vec<u8>> {
    let weights = new.len() / width;
    let mut planes = vec![0; new.len()];
    if weights > 0 {
        for (byte, plane) in planes.chunks_exact_mut(weights).enumerate() {
            for (i, out) in plane.iter_mut().enumerate() {
                let at = i * width + byte;
                *out = old[at] ^ new[at];
            }
        }
    }
    compress(&planes)
}

/// The new bytes of a tensor from its old ones and an xor payload.
pub(super) fn xor_apply(old: &[u8], payload: &[u8], width: usize) -> Result<Vec<u8>, Error> {
    let planes = decompress(payload, old.len())?;
    let weights = old.len() / width;
    let mut new = old.to_vec();
    if weights > 0 {
        for (byte, plane) in planes.chunks_exact(weights).enumerate() {
            for (i, flip) in plane.iter().enumerate() {
                new[i * width + byte] ^= flip;
            }
        }
    }
    Ok(new)
}

/// Weights whose bit patterns differ. Both slices have the same length, a multiple of `width`.
pub(super) fn count(old: &[u8], new: &[u8], width: usize) -> u64 {
    let mut changed = 0;
    let visit = |_, _, _| {
        changed += 1;
        true
    };
    match width {
        1 => each_difference::<1>(old, new, visit),
        2 => each_difference::<2>(old, new, visit),
        4 => each_difference::<4>(old, new, visit),
        _ => each_difference::<8>(old, new, visit),
    }
    changed
}

/// Calls `visit` with index, old and new bit pattern of every weight that differs, until it says no.
fn each_difference<const W: usize>(old: &[u8], new: &[u8], mut visit: impl FnMut(u64, u64, u64) -> bool) {
    let blocks = old.chunks(BLOCK_BYTES).zip(new.chunks(BLOCK_BYTES));
    for (block, (old, new)) in blocks.enumerate() {
        if old == new {
            continue;
        }
        let first = (block * BLOCK_BYTES / W) as u64;
        let weights = old.chunks_exact(W).zip(new.chunks_exact(W));
        for (i, (old, new)) in weights.enumerate() {
            let (old, new) = (read::<W>(old), read::<W>(new));
            if old != new && !visit(first + i as u64, old, new) {
                return;
            }
        }
    }
}

/// One zstd frame of `bytes`.
pub(super) fn compress(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    zstd::bulk::compress(bytes, ZSTD_LEVEL)
}

/// The `size` bytes of a zstd frame; any other number is refused, and memory grows only with what really comes out.
pub(super) fn decompress(packed: &[u8], size: usize) -> Result<Vec<u8>, Error> {
    let refuse = |error: std::io::Error| Error::Malformed(format!("decompress: {error}"));
    let mut out = Vec::with_capacity(size.min(RESERVE_BYTES_MAX));
    zstd::stream::read::Decoder::with_buffer(packed)
        .map_err(refuse)?
        .take((size as u64).saturating_add(1))
        .read_to_end(&mut out)
        .map_err(refuse)?;
    if out.len() != size {
        return Err(bad("a part has another size than it claims"));
    }
    Ok(out)
}

fn read<const W: usize>(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value[..W].copy_from_slice(&bytes[..W]);
    u64::from_le_bytes(value)
}

/// Zigzag of the difference as a signed integer of W bytes.
fn zigzag<const W: usize>(difference: u64) -> u64 {
    let unused = 64 - 8 * W as u32;
    let signed = (difference << unused) as i64 >> unused;
    (signed << 1 ^ signed >> 63) as u64
}

fn unzigzag(value: u64) -> u64 {
    (value >> 1) ^ (value & 1).wrapping_neg()
}

fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint(bytes: &mut &[u8]) -> Result<u64, Error> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or_else(|| bad("an integer ends early"))?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(bad("an integer does not fit 64 bits"))
}

fn bad(reason: &str) -> Error {
    Error::Malformed(reason.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_weight_that_moves_by_one_ulp_takes_one_byte_of_values() {
        assert_eq!(zigzag::<2>(1), 2);
        assert_eq!(zigzag::<2>(0xffff), 1);
        assert_eq!(zigzag::<2>(0u64.wrapping_sub(1)), 1);
        assert_eq!(zigzag::<8>(u64::MAX), 1);
        assert_eq!(zigzag::<8>(1 << 63), u64::MAX);
    }

    #[test]
    fn integers_are_leb128_and_overlong_ones_are_refused() {
        let mut out = vec![];
        push_varint(&mut out, 300);
        assert_eq!(out, [0xac, 0x02]);
        assert!(varint(&mut [0x80].as_slice()).is_err());
        assert!(varint(&mut [0xff; 10].as_slice()).is_err());
        assert!(varint(&mut [0x80; 11].as_slice()).is_err());
    }

    #[test]
    fn a_frame_that_holds_more_or_less_than_it_claims_is_refused() {
        let packed = compress(&[7; 1000]).unwrap();
        assert_eq!(decompress(&packed, 1000).unwrap(), [7; 1000]);
        assert!(decompress(&packed, 999).is_err());
        assert!(decompress(&packed, 1001).is_err());
        assert!(decompress(&packed[..packed.len() - 1], 1000).is_err());
        assert!(decompress(&packed, usize::MAX).is_err());
    }

    proptest! {
        #[test]
        fn varint_and_zigzag_are_inverted(value: u64) {
            let mut out = vec![];
            push_varint(&mut out, value);
            let mut rest = out.as_slice();
            prop_assert_eq!(varint(&mut rest).unwrap(), value);
            prop_assert!(rest.is_empty());
            prop_assert_eq!(unzigzag(zigzag::<8>(value)), value);
            prop_assert_eq!(unzigzag(zigzag::<2>(value)) as u16, value as u16);
        }

        #[test]
        fn both_codecs_are_lossless_for_any_bits_and_width(
            power in 0u32..4,
            pairs in prop::collection::vec((any::<u64>(), prop_oneof![3 => Just(0u64), 1 => any::<u64>()]), 0..200),
        ) {
            let width = 1usize << power;
            let pack = |values: Vec<u64>| -> Vec<u8> {
                values.iter().flat_map(|v| v.to_le_bytes()[..width].to_vec()).collect()
            };
            let old = pack(pairs.iter().map(|p| p.0).collect());
            let new = pack(pairs.iter().map(|p| p.0.wrapping_add(p.1)).collect());
            let sparse = sparse_encode(&old, &new, width, u64::MAX).unwrap().unwrap();
            prop_assert_eq!(&sparse_apply(&old, &sparse.payload, width).unwrap(), &new);
            prop_assert_eq!(sparse.changed, count(&old, &new, width));
            let xor = xor_encode(&old, &new, width).unwrap();
            prop_assert_eq!(&xor_apply(&old, &xor, width).unwrap(), &new);
        }

        #[test]
        fn any_payload_is_refused_or_applied_but_never_panics(
            payload in prop::collection::vec(any::<u8>(), 0..60),
            power in 0u32..4,
        ) {
            let old = vec![0; 64];
            let _ = sparse_apply(&old, &payload, 1 << power);
            let _ = xor_apply(&old, &payload, 1 << power);
        }
    }
}
