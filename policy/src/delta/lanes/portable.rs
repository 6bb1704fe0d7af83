//! The loops of `lanes` without naming any instruction.

use super::{BLOCK, CLASSES_MAX, Sixteen, Table, Word};

#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Word for Portable {
    type Lanes = Sixteen;

    #[inline(always)]
    fn nonzero(self, bytes: &[u8; BLOCK]) -> u64 {
        let mut word = 0;
        for (i, eight) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let mut byte = 0;
            for (j, &value) in eight.iter().enumerate() {
                byte |= u64::from(value != 0) << j;
            }
            word |= byte << (8 * i);
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
    fn masks(self, keys: &[u8; BLOCK], classes: &Table) -> Sixteen {
        let mut masks = [0; CLASSES_MAX];
        for (i, &key) in keys.iter().enumerate() {
            masks[usize::from(classes.class[usize::from(key)]) % CLASSES_MAX] |= 1 << i;
        }
        masks
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
    fn ones(self, lanes: Sixteen) -> Sixteen {
        let mut ones = [0; CLASSES_MAX];
        for c in 0..CLASSES_MAX {
            ones[c] = lanes[c].count_ones().into();
        }
        ones
    }

    #[inline(always)]
    fn add(self, a: Sixteen, b: Sixteen) -> Sixteen {
        let mut sum = [0; CLASSES_MAX];
        for c in 0..CLASSES_MAX {
            sum[c] = a[c] + b[c];
        }
        sum
    }

    #[inline(always)]
    fn less(self, a: Sixteen, b: Sixteen) -> u32 {
        let mut less = 0;
        for c in 0..CLASSES_MAX {
            less |= u32::from(a[c] < b[c]) << c;
        }
        less
    }
}
