//! The two loops that touch every weight: which of them differ, and which rank each has in its class. 64 weights at a time,
//! plain Rust that is written once and compiled for each kind of instruction; only what one block takes (which weights
//! differ, which are in which class and how many, the n-th bit of a word) names instructions. All kinds give the same.
//!
//! A weight's *key* is the highest byte of twice its value, that is the eight bits below the top one: the exponent of bf16
//! and f32, the exponent and three bits of the mantissa of f16, all but the sign of one-byte dtypes.

#![expect(
    unsafe_code,
    reason = "calls functions compiled for instructions that the machine was asked for"
)]

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::kernel::Isa;
use portable::Portable;
use std::sync::OnceLock;

/// Weights of a block: as many as a word has bits.
pub(super) const BLOCK: usize = 64;
/// Classes that a frame may have.
pub(super) const CLASSES_MAX: usize = 16;

/// From which key on each class but the first begins; ascending. Unused ones are beyond every key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Classes {
    pub count: usize,
    pub starts: [u8; CLASSES_MAX - 1],
}

impl Classes {
    /// The class of every key.
    pub fn of_keys(&self) -> [u8; 256] {
        let mut class_of = [0; 256];
        for &start in &self.starts[..self.count - 1] {
            for class in &mut class_of[usize::from(start)..] {
                *class += 1;
            }
        }
        class_of
    }
}

/// A weight that is found: its index in the frame, its class, and its rank among the weights of the class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub index: u32,
    pub class: u8,
    pub rank: u32,
}

/// A weight that counts to another class than its bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moved {
    pub index: u32,
    pub class: u8,
}

/// Which instructions these loops use here. Asked for less (`SPRINGTIDE_ISA`), they use less.
pub(super) fn best() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    *BEST.get_or_init(|| {
        let available = available();
        let asked = Isa::best();
        let wanted = if asked == Isa::Avx512Bf16 { Isa::Avx512 } else { asked };
        let found = available.iter().rev().find(|&&isa| isa as u8 <= wanted as u8);
        found.copied().unwrap_or(Isa::Portable)
    })
}

/// Those that this machine can run, slowest first.
pub(super) fn available() -> Vec<Isa> {
    let mut available = vec![Isa::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        let bits = is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        if bits && is_x86_feature_detected!("avx2") {
            available.push(Isa::Avx2);
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vpopcntdq")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("gfni");
            if wide {
                available.push(Isa::Avx512);
            }
        }
    }
    available
}

/// For each class the bits of a block's weights that are in it.
type Masks = [u64; CLASSES_MAX];
/// For each class how many of a batch's weights are in it.
type Counts = [u16; CLASSES_MAX];

/// What the compiler does not find by itself.
trait Word: Copy {
    /// [`Masks`] where the machine computes with them.
    type Masks: Copy;
    /// [`Counts`] likewise.
    type Counts: Copy;

    /// Bit i is set where weight i is another one.
    fn differs<const W: usize>(self, old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64;
    /// The place of the bit of `word` that has `rank` set bits below it; it has more than that.
    fn select(self, word: u64, rank: u64) -> u32;
    fn masks<const W: usize>(self, block: &[[u8; W]; BLOCK], classes: &Table) -> Self::Masks;
    fn store(self, masks: Self::Masks, to: &mut Masks);
    fn load(self, masks: &Masks) -> Self::Masks;
    fn nothing(self) -> Self::Counts;
    /// With the weights of one more block.
    fn counted(self, counts: Self::Counts, masks: Self::Masks) -> Self::Counts;
    fn store_counts(self, counts: Self::Counts, to: &mut Counts);
}

/// [`Classes`] in the forms that the loops look them up in.
struct Table {
    count: usize,
    /// By key.
    class: [u8; 256],
    /// By key, the class's four bits and above them the same inverted.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "AVX-512 picks bits out of them")
    )]
    planes: [u8; 256],
    /// A key above the c-th of them is in a class above c; 255 where there is none.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "AVX2 compares with them"))]
    limits: [u8; CLASSES_MAX - 1],
}

impl Table {
    fn of(classes: &Classes) -> Self {
        let mut limits = [255; CLASSES_MAX - 1];
        for (limit, start) in limits.iter_mut().zip(&classes.starts[..classes.count - 1]) {
            *limit = start - 1;
        }
        let class = classes.of_keys();
        Table {
            count: classes.count,
            class,
            planes: class.map(|class| class | (class ^ 15) << 4),
            limits,
        }
    }
}

/// Compiles a loop over `Word` for each kind of instruction, and chooses between them.
macro_rules! for_each_isa {
    ($(#[$doc:meta])* pub fn $name:ident<const W: usize>($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident) => {
        $(#[$doc])*
        pub(super) fn $name<const W: usize>(isa: Isa, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vpopcntdq,avx512vbmi,gfni,bmi1,bmi2,lzcnt,popcnt")]
            fn avx512<const W: usize>($($arg: $type),*) $(-> $result)? { $body::<W, _>(x86::Avx512::asked_for(), $($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2<const W: usize>($($arg: $type),*) $(-> $result)? { $body::<W, _>(x86::Avx2::asked_for(), $($arg),*) }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `available` names AVX-512 only where the machine has all that is enabled above.
                Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512::<W>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `available` names AVX2 only where the machine has all that is enabled above.
                Isa::Avx2 => unsafe { avx2::<W>($($arg),*) },
                _ => $body::<W, _>(Portable, $($arg),*),
            }
        }
    };
}

for_each_isa! {
    /// Appends the indices of the weights of W bytes that differ. Both slices have the same length, a multiple of W.
    pub fn differing<const W: usize>(old: &[u8], new: &[u8], out: &mut Vec<u32>) = differing_body
}

for_each_isa! {
    /// The places of the weights at `indices`, which ascend, appended in that order.
    pub fn ranks<const W: usize>(weights: &[u8], classes: &Classes, indices: &[u32], out: &mut Vec<Place>) = ranks_body
}

for_each_isa! {
    /// The inverse of [`ranks`]: appends the index of each weight that `wanted` names, with its place in `wanted`; batch
    /// by batch of blocks, in one class after the other. `wanted` has the ranks of each class one after another, ascending, where `first[c]` to
    /// `first[c + 1]` are those of class c. The weights in `moved`, ascending, count to the class named there. Ranks beyond the
    /// class's last weight are passed over.
    pub fn locate<const W: usize>(
        weights: &[u8],
        classes: &Classes,
        moved: &[Moved],
        wanted: &[u32],
        first: &[usize; CLASSES_MAX + 1],
        out: &mut Vec<(u32, u32)>,
    ) = locate_body
}

/// Changed weights of a block that are written down in one go.
const AT_ONCE: usize = 4;
/// Blocks that are counted before any of them is looked into: what happens in one is hard to foresee, in many less so.
const BATCH: usize = 32;

#[repr(align(64))]
#[derive(Default)]
struct Batch {
    /// By block, by class: which weights are in it.
    masks: [Masks; BATCH],
    /// How many were, in the batch's blocks before.
    before: [Counts; BATCH],
    /// In all of them.
    all: Counts,
}

#[inline(always)]
fn differing_body<const W: usize, X: Word>(word: X, old: &[u8], new: &[u8], out: &mut Vec<u32>) {
    let (old, new) = (old.as_chunks::<W>().0, new.as_chunks::<W>().0);
    let ((old, old_rest), (new, new_rest)) = (old.as_chunks::<BLOCK>(), new.as_chunks::<BLOCK>());
    let mut first = 0u32;
    let mut filled = out.len();
    for (old, new) in old.iter().zip(new) {
        let mut changed = word.differs(old, new);
        if filled + BLOCK > out.len() {
            out.resize(2 * out.len() + 16 * BLOCK, 0);
        }
        let slots = &mut out[filled..filled + BLOCK];
        filled += changed.count_ones() as usize;
        // as many as nearly every block has, whether they are there or not: no turn that must be guessed
        for slot in &mut slots[..AT_ONCE] {
            *slot = first + changed.trailing_zeros();
            changed &= changed.wrapping_sub(1);
        }
        for slot in &mut slots[AT_ONCE..] {
            if changed == 0 {
                break;
            }
            *slot = first + changed.trailing_zeros();
            changed &= changed - 1;
        }
        first += BLOCK as u32;
    }
    out.truncate(filled);
    for (i, (old, new)) in old_rest.iter().zip(new_rest).enumerate() {
        if old != new {
            out.push(first + i as u32);
        }
    }
}

#[inline(always)]
fn ranks_body<const W: usize, X: Word>(
    word: X,
    weights: &[u8],
    classes: &Classes,
    mut indices: &[u32],
    out: &mut Vec<Place>,
) {
    let table = Table::of(classes);
    let blocks = Blocks::<W>::of(weights);
    let mut batch = Batch::default();
    // of the frame, before the batch
    let mut seen = [0; CLASSES_MAX];
    for begin in (0..blocks.count).step_by(BATCH) {
        let mut counts = word.nothing();
        for n in begin..blocks.count.min(begin + BATCH) {
            let masks = word.masks(blocks.at(n).0, &table);
            word.store(masks, &mut batch.masks[n - begin]);
            word.store_counts(counts, &mut batch.before[n - begin]);
            counts = word.counted(counts, masks);
        }
        let end = ((begin + BATCH) * BLOCK) as u32;
        while let Some((&index, rest)) = indices.split_first()
            && index < end
        {
            let (n, bit) = (index as usize / BLOCK - begin, index % BLOCK as u32);
            let class = table.class[usize::from(key(at::<W>(weights, index)))];
            let c = usize::from(class) % CLASSES_MAX;
            let below = (batch.masks[n % BATCH][c] & ((1u64 << bit) - 1)).count_ones();
            out.push(Place {
                index,
                class,
                rank: seen[c] + u32::from(batch.before[n % BATCH][c]) + below,
            });
            indices = rest;
        }
        word.store_counts(counts, &mut batch.all);
        for (seen, &all) in seen.iter_mut().zip(&batch.all) {
            *seen += u32::from(all);
        }
    }
}

#[inline(always)]
fn locate_body<const W: usize, X: Word>(
    word: X,
    weights: &[u8],
    classes: &Classes,
    mut moved: &[Moved],
    wanted: &[u32],
    first: &[usize; CLASSES_MAX + 1],
    out: &mut Vec<(u32, u32)>,
) {
    let table = Table::of(classes);
    let mut cursors = *first;
    let blocks = Blocks::<W>::of(weights);
    let mut batch = Batch::default();
    // of the frame, before the batch
    let mut seen = [0u32; CLASSES_MAX];
    for begin in (0..blocks.count).step_by(BATCH) {
        let end = blocks.count.min(begin + BATCH);
        let mut counts = word.nothing();
        for n in begin..end {
            let (block, valid) = blocks.at(n);
            let mut masks = word.masks(block, &table);
            let start = (n * BLOCK) as u32;
            if valid != u64::MAX || moved.first().is_some_and(|moved| moved.index < start + BLOCK as u32) {
                let mut numbers = [0; CLASSES_MAX];
                word.store(masks, &mut numbers);
                recount(&mut numbers, &mut moved, start, valid);
                masks = word.load(&numbers);
            }
            word.store(masks, &mut batch.masks[n - begin]);
            word.store_counts(counts, &mut batch.before[n - begin]);
            counts = word.counted(counts, masks);
        }
        for before in &mut batch.before[end - begin..] {
            *before = [u16::MAX; CLASSES_MAX];
        }
        word.store_counts(counts, &mut batch.all);
        for c in 0..CLASSES_MAX {
            let until = seen[c] + u32::from(batch.all[c]);
            let ranks = wanted.get(cursors[c]..first[c + 1]).unwrap_or_default();
            let mut found = 0;
            for &rank in ranks {
                if rank >= until {
                    break;
                }
                // the last block that begins at or before the rank: halves of what is left, with no turn that must be guessed
                let rank = (rank - seen[c]) as u16;
                let mut n = 0;
                for step in [16, 8, 4, 2, 1] {
                    n += step * usize::from(batch.before[(n + step) % BATCH][c] <= rank);
                }
                let n = n % BATCH;
                let bit = word.select(batch.masks[n][c], u64::from(rank - batch.before[n][c]));
                out.push((((begin + n) * BLOCK) as u32 + bit, (cursors[c] + found) as u32));
                found += 1;
            }
            cursors[c] += found;
            seen[c] = until;
        }
    }
}

const _: () = assert!(BATCH == 32, "blocks are looked for in five steps");

/// Counts those of a block's weights that have `moved` to their other classes, and only `valid` ones.
#[inline(always)]
fn recount(masks: &mut Masks, moved: &mut &[Moved], start: u32, valid: u64) {
    while let Some((&Moved { index, class }, rest)) = moved.split_first()
        && index < start + BLOCK as u32
    {
        let bit = 1 << (index - start);
        for mask in masks.iter_mut() {
            *mask &= !bit;
        }
        masks[usize::from(class) % CLASSES_MAX] |= bit;
        *moved = rest;
    }
    for mask in masks {
        *mask &= valid;
    }
}

/// The weights of a frame in blocks; what fills the last one up means nothing.
struct Blocks<'a, const W: usize> {
    whole: &'a [[[u8; W]; BLOCK]],
    last: [[u8; W]; BLOCK],
    /// Weights in the last one; 0: it is none.
    rest: usize,
    count: usize,
}

impl<'a, const W: usize> Blocks<'a, W> {
    fn of(weights: &'a [u8]) -> Self {
        let (whole, rest) = weights.as_chunks::<W>().0.as_chunks::<BLOCK>();
        let mut last = [[0; W]; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        Blocks {
            whole,
            last,
            rest: rest.len(),
            count: whole.len() + usize::from(!rest.is_empty()),
        }
    }

    /// The n-th, and the bits of those that are weights.
    #[inline(always)]
    fn at(&self, n: usize) -> (&[[u8; W]; BLOCK], u64) {
        match self.whole.get(n) {
            Some(block) => (block, u64::MAX),
            None => (&self.last, (1 << self.rest) - 1),
        }
    }
}

/// The keys of a block, each put where `place` says.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn keys<const W: usize>(block: &[[u8; W]; BLOCK], place: impl Fn(usize) -> usize) -> [u8; BLOCK] {
    let mut keys = [0; BLOCK];
    for i in 0..BLOCK {
        keys[place(i)] = key(&block[i]);
    }
    keys
}

/// A weight's bits as an unsigned integer.
#[inline(always)]
pub(super) fn value<const W: usize>(weight: &[u8; W]) -> u64 {
    match W {
        1 => weight[0].into(),
        2 => u16::from_le_bytes([weight[0], weight[1]]).into(),
        4 => u32::from_le_bytes([weight[0], weight[1], weight[2], weight[3]]).into(),
        _ => {
            let mut value = [0; 8];
            value[..W].copy_from_slice(weight);
            u64::from_le_bytes(value)
        }
    }
}

#[inline(always)]
pub(super) fn key<const W: usize>(weight: &[u8; W]) -> u8 {
    match W {
        1 => weight[0] << 1,
        2 => (u16::from_le_bytes([weight[0], weight[1]]) << 1 >> 8) as u8,
        _ => (value(weight) << 1 >> (8 * W - 8)) as u8,
    }
}

/// The weight at `index` of a frame's bytes.
#[inline(always)]
pub(super) fn at<const W: usize>(bytes: &[u8], index: u32) -> &[u8; W] {
    &bytes.as_chunks::<W>().0[index as usize]
}
