//! The instructions that the loops of `lanes` name: AVX2, or AVX-512 with its bytes, permutations and counts of bits.

#![expect(
    unsafe_code,
    reason = "calls functions compiled for instructions that the machine was asked for"
)]

use super::{BLOCK, CLASSES_MAX, Sixteen, Table, Word};
use std::arch::x86_64::*;

/// Its methods may only be reached where AVX2, BMI1 and BMI2 are.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Its methods may only be reached where AVX-512 F, BW, VL, VBMI and VPOPCNTDQ, BMI1 and BMI2 are.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    pub fn asked_for() -> Self {
        Avx2(())
    }
}

impl Avx512 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vpopcntdq,avx512vbmi,bmi1,bmi2")]
    pub fn asked_for() -> Self {
        Avx512(())
    }
}

/// Forwards a method to a function that is compiled for instructions: it can only be called with `self` at hand, which was
/// made where the machine has them.
macro_rules! methods {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $to:ident;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $type),*) $(-> $result)? {
                // SAFETY: `self` is only made in a function that is compiled for these instructions.
                unsafe { $to($($arg),*) }
            }
        )*
    };
}

impl Word for Avx2 {
    type Lanes = Sixteen;

    methods! {
        fn nonzero(bytes: &[u8; BLOCK]) -> u64 = nonzero_256;
        fn select(word: u64, rank: u64) -> u32 = select;
        fn masks(keys: &[u8; BLOCK], classes: &Table) -> Sixteen = masks_256;
        fn ones(lanes: Sixteen) -> Sixteen = ones_256;
        fn less(a: Sixteen, b: Sixteen) -> u32 = less_256;
    }

    #[inline(always)]
    fn lanes(self, numbers: &Sixteen) -> Sixteen {
        *numbers
    }

    #[inline(always)]
    fn numbers(self, lanes: Sixteen) -> Sixteen {
        lanes
    }

    #[inline(always)]
    fn store(self, lanes: Sixteen, numbers: &mut Sixteen) {
        *numbers = lanes;
    }

    #[inline(always)]
    fn with(self, mut lanes: Sixteen, class: usize, number: u64) -> Sixteen {
        lanes[class % CLASSES_MAX] = number;
        lanes
    }

    #[inline(always)]
    fn add(self, a: Sixteen, b: Sixteen) -> Sixteen {
        let mut sum = [0; CLASSES_MAX];
        for c in 0..CLASSES_MAX {
            sum[c] = a[c] + b[c];
        }
        sum
    }
}

impl Word for Avx512 {
    type Lanes = [__m512i; 2];

    methods! {
        fn nonzero(bytes: &[u8; BLOCK]) -> u64 = nonzero_512;
        fn select(word: u64, rank: u64) -> u32 = select;
        fn masks(keys: &[u8; BLOCK], classes: &Table) -> [__m512i; 2] = masks_512;
        fn lanes(numbers: &Sixteen) -> [__m512i; 2] = lanes_512;
        fn numbers(lanes: [__m512i; 2]) -> Sixteen = numbers_512;
        fn store(lanes: [__m512i; 2], numbers: &mut Sixteen) = store_512;
        fn with(lanes: [__m512i; 2], class: usize, number: u64) -> [__m512i; 2] = with_512;
        fn ones(lanes: [__m512i; 2]) -> [__m512i; 2] = ones_512;
        fn add(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] = add_512;
        fn less(a: [__m512i; 2], b: [__m512i; 2]) -> u32 = less_512;
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
fn tops([low, high]: [__m256i; 2]) -> u64 {
    u64::from(_mm256_movemask_epi8(low) as u32) | u64::from(_mm256_movemask_epi8(high) as u32) << 32
}

#[inline]
#[target_feature(enable = "avx2")]
fn nonzero_256(bytes: &[u8; BLOCK]) -> u64 {
    let zero = _mm256_setzero_si256();
    let [low, high] = halves(bytes);
    !tops([_mm256_cmpeq_epi8(low, zero), _mm256_cmpeq_epi8(high, zero)])
}

#[inline]
#[target_feature(enable = "avx2")]
fn masks_256(keys: &[u8; BLOCK], classes: &Table) -> Sixteen {
    let [low, high] = halves(keys);
    let mut masks = [0; CLASSES_MAX];
    let mut above = u64::MAX;
    for (c, mask) in masks.iter_mut().enumerate().take(classes.count) {
        let limit = classes.limits.get(c).copied().unwrap_or(u8::MAX);
        let limit = _mm256_set1_epi8(limit as i8);
        // the larger of both is the limit where the key is not above it
        let low = _mm256_cmpeq_epi8(_mm256_max_epu8(low, limit), limit);
        let high = _mm256_cmpeq_epi8(_mm256_max_epu8(high, limit), limit);
        let within = tops([low, high]);
        *mask = above & within;
        above = !within;
    }
    masks
}

#[inline]
#[target_feature(enable = "popcnt")]
fn ones_256(lanes: Sixteen) -> Sixteen {
    let mut ones = [0; CLASSES_MAX];
    for c in 0..CLASSES_MAX {
        ones[c] = lanes[c].count_ones().into();
    }
    ones
}

#[inline]
#[target_feature(enable = "avx2")]
fn less_256(a: Sixteen, b: Sixteen) -> u32 {
    let mut less = 0;
    for c in 0..CLASSES_MAX {
        less |= u32::from(a[c] < b[c]) << c;
    }
    less
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; BLOCK]) -> __m512i {
    // SAFETY: `bytes` has 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nonzero_512(bytes: &[u8; BLOCK]) -> u64 {
    let bytes = load(bytes);
    _mm512_test_epi8_mask(bytes, bytes)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn masks_512(keys: &[u8; BLOCK], classes: &Table) -> [__m512i; 2] {
    let keys = load(keys);
    let (quarters, _) = classes.class.as_chunks::<BLOCK>();
    // each looks up by the lowest seven bits of the key, in two quarters of the table
    let low = _mm512_permutex2var_epi8(load(&quarters[0]), keys, load(&quarters[1]));
    let high = _mm512_permutex2var_epi8(load(&quarters[2]), keys, load(&quarters[3]));
    let class = _mm512_mask_blend_epi8(_mm512_movepi8_mask(keys), low, high);
    let plane = |bit: i8| _mm512_set1_epi64(_mm512_test_epi8_mask(class, _mm512_set1_epi8(bit)) as i64);
    let (p0, p1, p2, p3) = (plane(1), plane(2), plane(4), plane(8));
    // where a class has the bit of its plane, in the order of the lanes; the eighth bit parts the two vectors
    let h0 = _mm512_set_epi64(-1, 0, -1, 0, -1, 0, -1, 0);
    let h1 = _mm512_set_epi64(-1, -1, 0, 0, -1, -1, 0, 0);
    let h2 = _mm512_set_epi64(-1, -1, -1, -1, 0, 0, 0, 0);
    let differs = _mm512_or_si512(
        _mm512_or_si512(_mm512_xor_si512(p0, h0), _mm512_xor_si512(p1, h1)),
        _mm512_xor_si512(p2, h2),
    );
    let all = _mm512_set1_epi64(-1);
    [
        _mm512_xor_si512(_mm512_or_si512(differs, p3), all),
        _mm512_andnot_si512(differs, p3),
    ]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn lanes_512(numbers: &Sixteen) -> [__m512i; 2] {
    // SAFETY: both loads end at the sixteenth number or before, and need no alignment.
    unsafe {
        let first = numbers.as_ptr();
        [
            _mm512_loadu_si512(first.cast()),
            _mm512_loadu_si512(first.add(8).cast()),
        ]
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn numbers_512(lanes: [__m512i; 2]) -> Sixteen {
    let mut numbers = [0; CLASSES_MAX];
    store_512(lanes, &mut numbers);
    numbers
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_512([low, high]: [__m512i; 2], numbers: &mut Sixteen) {
    // SAFETY: both stores end at the sixteenth number or before, and need no alignment.
    unsafe {
        let first = numbers.as_mut_ptr();
        _mm512_storeu_si512(first.cast(), low);
        _mm512_storeu_si512(first.add(8).cast(), high);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn with_512([low, high]: [__m512i; 2], class: usize, number: u64) -> [__m512i; 2] {
    let [low_lane, high_lane] = (1u16 << (class % CLASSES_MAX)).to_le_bytes();
    [
        _mm512_mask_set1_epi64(low, low_lane, number as i64),
        _mm512_mask_set1_epi64(high, high_lane, number as i64),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512vpopcntdq")]
fn ones_512(lanes: [__m512i; 2]) -> [__m512i; 2] {
    [_mm512_popcnt_epi64(lanes[0]), _mm512_popcnt_epi64(lanes[1])]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_512(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
    [_mm512_add_epi64(a[0], b[0]), _mm512_add_epi64(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn less_512(a: [__m512i; 2], b: [__m512i; 2]) -> u32 {
    u32::from(_mm512_cmplt_epu64_mask(a[0], b[0])) | u32::from(_mm512_cmplt_epu64_mask(a[1], b[1])) << 8
}
