//! The operations of `simd` in plain Rust.

use super::{BLOCK, BUCKETS_MAX, BucketTable, Counts, Masks, Simd, key};

#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Simd for Portable {
    type Masks = Masks;
    type Counts = Counts;

    #[inline(always)]
    fn differs<const W: usize>(self, old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64 {
        let mut word = 0;
        for i in 0..BLOCK {
            word |= u64::from(old[i] != new[i]) << i;
        }
        word
    }

    #[inline(always)]
    fn select(self, mut word: u64, rank: u64) -> u32 {
        for _ in 0..rank {
            word &= word.wrapping_sub(1);
        }
        word.trailing_zeros()
    }

    #[inline(always)]
    fn masks<const W: usize>(self, block: &[[u8; W]; BLOCK], table: &BucketTable) -> Masks {
        let mut masks = [0; BUCKETS_MAX];
        for (i, weight) in block.iter().enumerate() {
            masks[usize::from(table.bucket_of[usize::from(key(weight))]) % BUCKETS_MAX] |= 1 << i;
        }
        masks
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
    fn add_counts(self, mut counts: Counts, masks: Masks) -> Counts {
        for bucket in 0..BUCKETS_MAX {
            counts[bucket] += masks[bucket].count_ones() as u16;
        }
        counts
    }

    #[inline(always)]
    fn store_counts(self, counts: Counts, to: &mut Counts) {
        *to = counts;
    }
}
