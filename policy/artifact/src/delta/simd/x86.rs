//! The operations of `simd` with AVX2, or with AVX-512 (bytes, permutations, popcounts, GFNI).

#![expect(unsafe_code, reason = "calls functions compiled for instructions that were detected")]

use super::{BLOCK, BUCKETS_MAX, BucketTable, Counts, Masks, Simd, keys, value};
use std::arch::x86_64::*;

/// Proof that AVX2, BMI1, BMI2 and POPCNT are available.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Proof that AVX-512 F, BW, VL, VBMI and VPOPCNTDQ, GFNI, BMI1 and BMI2 are available.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    pub fn enabled() -> Self {
        Avx2(())
    }
}

impl Avx512 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vpopcntdq,avx512vbmi,gfni,bmi1,bmi2")]
    pub fn enabled() -> Self {
        Avx512(())
    }
}

/// Forwards a method to a function compiled for these instructions. `self` proves that the machine
/// has them.
macro_rules! methods {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $to:ident;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $type),*) $(-> $result)? {
                // SAFETY: `self` is only made in a function that is compiled for these
                // instructions.
                unsafe { $to($($arg),*) }
            }
        )*
    };
}

impl Simd for Avx2 {
    type Masks = Masks;
    type Counts = Counts;

    methods! {
        fn select(word: u64, rank: u64) -> u32 = select;
        fn add_counts(counts: Counts, masks: Masks) -> Counts = add_counts_256;
    }

    #[inline(always)]
    fn store(self, masks: Masks, to: &mut Masks) {
        *to = masks;
    }

    #[inline(always)]
    fn load(self, masks: &Masks) -> Masks {
        *masks
    }

    #[inline(always)]
    fn no_counts(self) -> Counts {
        [0; BUCKETS_MAX]
    }

    #[inline(always)]
    fn store_counts(self, counts: Counts, to: &mut Counts) {
        *to = counts;
    }

    #[inline(always)]
    fn differs<const W: usize>(self, old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64 {
        // SAFETY: `self` is only made in a function that is compiled for these instructions.
        unsafe { differs_256(old, new) }
    }

    #[inline(always)]
    fn masks<const W: usize>(self, block: &[[u8; W]; BLOCK], table: &BucketTable) -> Masks {
        // SAFETY: `self` is only made in a function that is compiled for these instructions.
        unsafe { masks_256(block, table) }
    }
}

impl Simd for Avx512 {
    type Masks = [__m512i; 2];
    type Counts = __m256i;

    methods! {
        fn select(word: u64, rank: u64) -> u32 = select;
        fn store(masks: [__m512i; 2], to: &mut Masks) = store_512;
        fn load(masks: &Masks) -> [__m512i; 2] = load_512;
        fn no_counts() -> __m256i = no_counts_512;
        fn add_counts(counts: __m256i, masks: [__m512i; 2]) -> __m256i = add_counts_512;
        fn store_counts(counts: __m256i, to: &mut Counts) = store_counts_512;
    }

    #[inline(always)]
    fn differs<const W: usize>(self, old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64 {
        // SAFETY: `self` is only made in a function that is compiled for these instructions.
        unsafe { differs_512(old, new) }
    }

    #[inline(always)]
    fn masks<const W: usize>(self, block: &[[u8; W]; BLOCK], table: &BucketTable) -> [__m512i; 2] {
        // SAFETY: `self` is only made in a function that is compiled for these instructions.
        unsafe { masks_512(block, table) }
    }
}

#[inline]
#[target_feature(enable = "bmi1,bmi2")]
fn select(word: u64, rank: u64) -> u32 {
    _pdep_u64(1 << (rank & 63), word).trailing_zeros()
}

#[inline]
#[target_feature(enable = "avx2")]
fn halves(bytes: &[u8; BLOCK]) -> [__m256i; 2] {
    // SAFETY: both loads end at the 64th byte or before, and need no alignment.
    unsafe {
        let first = bytes.as_ptr();
        [
            _mm256_loadu_si256(first.cast()),
            _mm256_loadu_si256(first.add(32).cast()),
        ]
    }
}

/// The highest bit of each byte.
#[inline]
#[target_feature(enable = "avx2")]
fn top_bits([low, high]: [__m256i; 2]) -> u64 {
    u64::from(_mm256_movemask_epi8(low) as u32) | u64::from(_mm256_movemask_epi8(high) as u32) << 32
}

#[inline]
#[target_feature(enable = "avx2")]
fn differs_256<const W: usize>(old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64 {
    let mut same = [0; BLOCK];
    for i in 0..BLOCK {
        same[i] = u8::from(value(&old[i]) == value(&new[i])) << 7;
    }
    !top_bits(halves(&same))
}

#[inline]
#[target_feature(enable = "avx2")]
fn masks_256<const W: usize>(block: &[[u8; W]; BLOCK], table: &BucketTable) -> Masks {
    let [low, high] = halves(&keys(block, |i| i));
    let mut masks = [0; BUCKETS_MAX];
    let mut above = u64::MAX;
    for (bucket, mask) in masks.iter_mut().enumerate().take(table.count) {
        let limit = table.limits.get(bucket).copied().unwrap_or(u8::MAX);
        let limit = _mm256_set1_epi8(limit as i8);
        // the maximum of both is the limit if the key is not above it
        let low = _mm256_cmpeq_epi8(_mm256_max_epu8(low, limit), limit);
        let high = _mm256_cmpeq_epi8(_mm256_max_epu8(high, limit), limit);
        let within = top_bits([low, high]);
        *mask = above & within;
        above = !within;
    }
    masks
}

#[inline]
#[target_feature(enable = "popcnt")]
fn add_counts_256(mut counts: Counts, masks: Masks) -> Counts {
    for bucket in 0..BUCKETS_MAX {
        counts[bucket] += masks[bucket].count_ones() as u16;
    }
    counts
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; BLOCK]) -> __m512i {
    // SAFETY: `bytes` has 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn differs_512<const W: usize>(old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64 {
    let (old, new) = (old.as_flattened().as_chunks().0, new.as_flattened().as_chunks().0);
    let mut word = 0;
    for i in 0..W {
        let (old, new) = (load(&old[i]), load(&new[i]));
        let differs = match W {
            1 => _mm512_cmpneq_epi8_mask(old, new),
            2 => _mm512_cmpneq_epi16_mask(old, new).into(),
            4 => _mm512_cmpneq_epi32_mask(old, new).into(),
            _ => _mm512_cmpneq_epi64_mask(old, new).into(),
        };
        word |= differs << (i * BLOCK / W);
    }
    word
}

/// The keys of a block, every eight in reverse order: GFNI's bit matrices have their first row on
/// top.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn keys_512<const W: usize>(block: &[[u8; W]; BLOCK]) -> __m512i {
    const HIGHER: [u8; BLOCK] = {
        let mut place = [0; BLOCK];
        let mut i = 0;
        while i < BLOCK {
            place[i] = (i as u8 ^ 7) * 2 + 1;
            i += 1;
        }
        place
    };
    match block.as_flattened().as_chunks().0 {
        [first, second] => {
            let doubled = |words| _mm512_slli_epi16::<1>(load(words));
            _mm512_permutex2var_epi8(doubled(first), load(&HIGHER), doubled(second))
        }
        _ => load(&keys(block, |i| i ^ 7)),
    }
}

/// For each of eight buckets: which bytes of the eight matrices hold a bit of the bucket number, or
/// its inverse. A weight is in the bucket if all of them are set.
const PICKS: [[u8; BLOCK]; 3] = {
    let mut picks = [[0; BLOCK]; 3];
    let mut at = 0;
    while at < 3 * BLOCK {
        let (bit, bucket, byte) = (at / BLOCK, at % BLOCK / 8, at % 8);
        let inverted = bucket >> bit & 1 == 0;
        picks[bit][at % BLOCK] = (byte * 8 + bit + if inverted { 4 } else { 0 }) as u8;
        at += 1;
    }
    picks
};
/// The same for the bit that separates the first eight buckets from the last eight.
const HIGH: [u8; BLOCK] = {
    let mut pick = [0; BLOCK];
    let mut at = 0;
    while at < BLOCK {
        pick[at] = (at % 8 * 8 + 3) as u8;
        at += 1;
    }
    pick
};

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn masks_512<const W: usize>(block: &[[u8; W]; BLOCK], table: &BucketTable) -> [__m512i; 2] {
    let keys = keys_512(block);
    let (quarters, _) = table.planes.as_chunks::<BLOCK>();
    // each lookup uses the lowest seven bits of the key, in two quarters of the table
    let low = _mm512_permutex2var_epi8(load(&quarters[0]), keys, load(&quarters[1]));
    let high = _mm512_permutex2var_epi8(load(&quarters[2]), keys, load(&quarters[3]));
    let planes = _mm512_mask_blend_epi8(_mm512_movepi8_mask(keys), low, high);
    // byte b of eight: bit b of each of the eight weights
    let unit = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
    let planes = _mm512_gf2p8affine_epi64_epi8::<0>(unit, planes);
    let pick = |places| _mm512_permutexvar_epi8(load(places), planes);
    let two_bits = _mm512_and_si512(pick(&PICKS[0]), pick(&PICKS[1]));
    let (three_bits, high) = (_mm512_and_si512(two_bits, pick(&PICKS[2])), pick(&HIGH));
    [
        _mm512_andnot_si512(high, three_bits),
        _mm512_and_si512(high, three_bits),
    ]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_512(masks: &Masks) -> [__m512i; 2] {
    // SAFETY: both loads end at the sixteenth word or before, and need no alignment.
    unsafe {
        let first = masks.as_ptr();
        [
            _mm512_loadu_si512(first.cast()),
            _mm512_loadu_si512(first.add(8).cast()),
        ]
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_512([low, high]: [__m512i; 2], to: &mut Masks) {
    // SAFETY: both stores end at the sixteenth word or before, and need no alignment.
    unsafe {
        let first = to.as_mut_ptr();
        _mm512_storeu_si512(first.cast(), low);
        _mm512_storeu_si512(first.add(8).cast(), high);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn no_counts_512() -> __m256i {
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vpopcntdq")]
fn add_counts_512(counts: __m256i, [low, high]: [__m512i; 2]) -> __m256i {
    // the lowest 16 bits of each 64-bit word of the first, then of the second
    let lowest = _mm512_set_epi16(
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0,
    );
    let both = _mm512_permutex2var_epi16(_mm512_popcnt_epi64(low), lowest, _mm512_popcnt_epi64(high));
    _mm256_add_epi16(counts, _mm512_castsi512_si256(both))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_counts_512(counts: __m256i, to: &mut Counts) {
    // SAFETY: the store ends with the sixteenth number, and needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), counts) }
}
