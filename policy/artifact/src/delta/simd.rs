//! The two loops that touch every weight: which weights differ, and which rank each has in its
//! bucket.
//!
//! They work on 64 weights at a time. The loops are plain Rust, compiled once per instruction set.
//! Only the operations on one block (the trait `Simd`) name instructions. All instruction sets give
//! the same results.
//!
//! A weight's *key* is the eight bits below its top bit: the exponent of bf16 and f32, the exponent
//! and three bits of the mantissa of f16, all but the sign of one-byte dtypes.

#![expect(unsafe_code, reason = "calls functions compiled for instructions that were detected")]

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::isa::{self, InstructionSet};
use portable::Portable;
use std::sync::OnceLock;

/// Weights per block, one for each bit of a word.
pub(super) const BLOCK: usize = 64;
/// Most buckets in a frame.
pub(super) const BUCKETS_MAX: usize = 16;

/// Keys divided into buckets. `starts` has the first key of each bucket but the first, ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Buckets {
    pub count: usize,
    pub starts: [u8; BUCKETS_MAX - 1],
}

impl Buckets {
    /// The bucket of every key.
    pub fn of_keys(&self) -> [u8; 256] {
        let mut bucket_of = [0; 256];
        for &start in &self.starts[..self.count - 1] {
            for bucket in &mut bucket_of[usize::from(start)..] {
                *bucket += 1;
            }
        }
        bucket_of
    }
}

/// A weight: its index in the frame, its bucket, and its rank among the bucket's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ranked {
    pub index: u32,
    pub bucket: u8,
    pub rank: u32,
}

/// A weight that belongs to another bucket than the one that its bytes give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Override {
    pub index: u32,
    pub bucket: u8,
}

/// Proof that this machine has all instructions that a loop is compiled for. These are more than
/// [`isa::Isa`] proves. Only [`available`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Isa(InstructionSet);

/// The instruction set that these loops use: the best available, but no more than
/// [`isa::Isa::best`].
pub(super) fn best() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    *BEST.get_or_init(|| {
        let (available, limit) = (available(), isa::Isa::best().set());
        let found = available.iter().rev().find(|isa| isa.0 <= limit);
        found.copied().unwrap_or(Isa(InstructionSet::Portable))
    })
}

/// The instruction sets that this machine can run, slowest first.
pub(super) fn available() -> Vec<Isa> {
    let mut available = vec![Isa(InstructionSet::Portable)];
    #[cfg(target_arch = "x86_64")]
    {
        let bits = is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        if bits && is_x86_feature_detected!("avx2") {
            available.push(Isa(InstructionSet::Avx2));
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vpopcntdq")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("gfni");
            if wide {
                available.push(Isa(InstructionSet::Avx512));
            }
        }
    }
    available
}

/// For each bucket, the bits of a block's weights in it.
type Masks = [u64; BUCKETS_MAX];
/// For each bucket, how many of a batch's weights are in it.
type Counts = [u16; BUCKETS_MAX];

/// Operations on one block that the compiler does not vectorize well.
trait Simd: Copy {
    /// [`Masks`] in registers.
    type Masks: Copy;
    /// [`Counts`] in registers.
    type Counts: Copy;

    /// Bit i is set if weight i differs.
    fn differs<const W: usize>(self, old: &[[u8; W]; BLOCK], new: &[[u8; W]; BLOCK]) -> u64;
    /// Position of the set bit of `word` with `rank` set bits below it. `word` has more than
    /// `rank`.
    fn select(self, word: u64, rank: u64) -> u32;
    fn masks<const W: usize>(self, block: &[[u8; W]; BLOCK], table: &BucketTable) -> Self::Masks;
    fn store(self, masks: Self::Masks, to: &mut Masks);
    fn load(self, masks: &Masks) -> Self::Masks;
    fn no_counts(self) -> Self::Counts;
    /// Adds the weights of one block.
    fn add_counts(self, counts: Self::Counts, masks: Self::Masks) -> Self::Counts;
    fn store_counts(self, counts: Self::Counts, to: &mut Counts);
}

/// [`Buckets`] in the forms that the loops need.
struct BucketTable {
    count: usize,
    /// By key: its bucket.
    bucket_of: [u8; 256],
    /// By key: the bucket's four bits, and above them the same inverted.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "AVX-512 picks bits out of them")
    )]
    planes: [u8; 256],
    /// A key above the b-th limit is in a bucket above b. 255 if there is none.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "AVX2 compares with them"))]
    limits: [u8; BUCKETS_MAX - 1],
}

impl BucketTable {
    fn new(buckets: &Buckets) -> Self {
        let mut limits = [255; BUCKETS_MAX - 1];
        for (limit, start) in limits.iter_mut().zip(&buckets.starts[..buckets.count - 1]) {
            *limit = start - 1;
        }
        let bucket_of = buckets.of_keys();
        BucketTable {
            count: buckets.count,
            bucket_of,
            planes: bucket_of.map(|bucket| bucket | (bucket ^ 15) << 4),
            limits,
        }
    }
}

/// Compiles a loop once per instruction set, and selects one at run time.
macro_rules! for_each_isa {
    ($(#[$doc:meta])* pub fn $name:ident<const W: usize>($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident) => {
        $(#[$doc])*
        pub(super) fn $name<const W: usize>(isa: Isa, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vpopcntdq,avx512vbmi,gfni,bmi1,bmi2,lzcnt,popcnt")]
            fn avx512<const W: usize>($($arg: $type),*) $(-> $result)? { $body::<W, _>(x86::Avx512::enabled(), $($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2<const W: usize>($($arg: $type),*) $(-> $result)? { $body::<W, _>(x86::Avx2::enabled(), $($arg),*) }
            match isa.0 {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `available` names AVX-512 only if the machine has all that is enabled above.
                InstructionSet::Avx512 => unsafe { avx512::<W>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `available` names AVX2 only if the machine has all that is enabled above.
                InstructionSet::Avx2 => unsafe { avx2::<W>($($arg),*) },
                _ => $body::<W, _>(Portable, $($arg),*),
            }
        }
    };
}

for_each_isa! {
    /// Appends the indices of differing weights of W bytes. Both slices have the same length, a
    /// multiple of W.
    pub fn differing<const W: usize>(old: &[u8], new: &[u8], out: &mut Vec<u32>) = differing_body
}

for_each_isa! {
    /// Appends bucket and rank of the weights at `indices`, which ascend.
    pub fn ranks<const W: usize>(weights: &[u8], buckets: &Buckets, indices: &[u32], out: &mut Vec<Ranked>) = ranks_body
}

for_each_isa! {
    /// The inverse of [`ranks`]: finds weights by bucket and rank. Appends the index of each weight
    /// that `wanted` names, with its position in `wanted`. The order is by batch of blocks, then by
    /// bucket.
    ///
    /// `wanted[first[b]..first[b + 1]]` are the ranks of bucket b, ascending. Example: weights of
    /// the buckets 0, 1, 1, 0 and `wanted` = [1, 0] with one rank for each bucket. Rank 1 of bucket
    /// 0 is weight 3, rank 0 of bucket 1 is weight 1, so this appends (3, 0) and (1, 1).
    ///
    /// Weights in `overrides`, ascending by index, belong to the bucket given there. Ranks beyond a
    /// bucket's last weight are skipped.
    pub fn locate<const W: usize>(
        weights: &[u8],
        buckets: &Buckets,
        overrides: &[Override],
        wanted: &[u32],
        first: &[usize; BUCKETS_MAX + 1],
        out: &mut Vec<(u32, u32)>,
    ) = locate_body
}

/// Changed weights of a block that are written without a branch.
const AT_ONCE: usize = 4;
/// Blocks that are counted before any is searched. Branches are hard to predict for one block, less
/// so for many.
const BATCH: usize = 32;

#[repr(align(64))]
#[derive(Default)]
struct Batch {
    /// By block and bucket: which weights are in it.
    masks: [Masks; BATCH],
    /// By block and bucket: how many were in the batch's earlier blocks.
    before: [Counts; BATCH],
    /// By bucket: how many are in the batch.
    totals: Counts,
}

#[inline(always)]
fn differing_body<const W: usize, S: Simd>(simd: S, old: &[u8], new: &[u8], out: &mut Vec<u32>) {
    let (old, new) = (old.as_chunks::<W>().0, new.as_chunks::<W>().0);
    let ((old, old_rest), (new, new_rest)) = (old.as_chunks::<BLOCK>(), new.as_chunks::<BLOCK>());
    let mut first = 0u32;
    let mut filled = out.len();
    for (old, new) in old.iter().zip(new) {
        let mut changed = simd.differs(old, new);
        if filled + BLOCK > out.len() {
            out.resize(2 * out.len() + 16 * BLOCK, 0);
        }
        let slots = &mut out[filled..filled + BLOCK];
        filled += changed.count_ones() as usize;
        // branchless: nearly every block has at most this many changed weights
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
fn ranks_body<const W: usize, S: Simd>(
    simd: S,
    weights: &[u8],
    buckets: &Buckets,
    mut indices: &[u32],
    out: &mut Vec<Ranked>,
) {
    let table = BucketTable::new(buckets);
    let blocks = Blocks::<W>::of(weights);
    let mut batch = Batch::default();
    // counts of the frame before the batch
    let mut seen = [0; BUCKETS_MAX];
    for begin in (0..blocks.count).step_by(BATCH) {
        let mut counts = simd.no_counts();
        for block in begin..blocks.count.min(begin + BATCH) {
            let masks = simd.masks(blocks.at(block).0, &table);
            simd.store(masks, &mut batch.masks[block - begin]);
            simd.store_counts(counts, &mut batch.before[block - begin]);
            counts = simd.add_counts(counts, masks);
        }
        let end = ((begin + BATCH) * BLOCK) as u32;
        while let Some((&index, rest)) = indices.split_first()
            && index < end
        {
            let (block, bit) = (index as usize / BLOCK - begin, index % BLOCK as u32);
            let number = table.bucket_of[usize::from(key(at::<W>(weights, index)))];
            let bucket = usize::from(number) % BUCKETS_MAX;
            let below = (batch.masks[block % BATCH][bucket] & ((1u64 << bit) - 1)).count_ones();
            out.push(Ranked {
                index,
                bucket: number,
                rank: seen[bucket] + u32::from(batch.before[block % BATCH][bucket]) + below,
            });
            indices = rest;
        }
        simd.store_counts(counts, &mut batch.totals);
        for (seen, &total) in seen.iter_mut().zip(&batch.totals) {
            *seen += u32::from(total);
        }
    }
}

#[inline(always)]
fn locate_body<const W: usize, S: Simd>(
    simd: S,
    weights: &[u8],
    buckets: &Buckets,
    mut overrides: &[Override],
    wanted: &[u32],
    first: &[usize; BUCKETS_MAX + 1],
    out: &mut Vec<(u32, u32)>,
) {
    let table = BucketTable::new(buckets);
    let mut cursors = *first;
    let blocks = Blocks::<W>::of(weights);
    let mut batch = Batch::default();
    // counts of the frame before the batch
    let mut seen = [0u32; BUCKETS_MAX];
    for begin in (0..blocks.count).step_by(BATCH) {
        let end = blocks.count.min(begin + BATCH);
        let mut counts = simd.no_counts();
        for block in begin..end {
            let (weights, valid) = blocks.at(block);
            let mut masks = simd.masks(weights, &table);
            let start = (block * BLOCK) as u32;
            if valid != u64::MAX || overrides.first().is_some_and(|next| next.index < start + BLOCK as u32) {
                let mut words = [0; BUCKETS_MAX];
                simd.store(masks, &mut words);
                apply_overrides(&mut words, &mut overrides, start, valid);
                masks = simd.load(&words);
            }
            simd.store(masks, &mut batch.masks[block - begin]);
            simd.store_counts(counts, &mut batch.before[block - begin]);
            counts = simd.add_counts(counts, masks);
        }
        for before in &mut batch.before[end - begin..] {
            *before = [u16::MAX; BUCKETS_MAX];
        }
        simd.store_counts(counts, &mut batch.totals);
        for bucket in 0..BUCKETS_MAX {
            let end_rank = seen[bucket] + u32::from(batch.totals[bucket]);
            let ranks = wanted.get(cursors[bucket]..first[bucket + 1]).unwrap_or_default();
            let mut found = 0;
            for &rank in ranks {
                if rank >= end_rank {
                    break;
                }
                // branchless binary search for the last block that begins at or before the rank
                let rank = (rank - seen[bucket]) as u16;
                let mut block = 0;
                for step in [16, 8, 4, 2, 1] {
                    block += step * usize::from(batch.before[(block + step) % BATCH][bucket] <= rank);
                }
                let block = block % BATCH;
                let rank = u64::from(rank - batch.before[block][bucket]);
                let bit = simd.select(batch.masks[block][bucket], rank);
                let index = ((begin + block) * BLOCK) as u32 + bit;
                out.push((index, (cursors[bucket] + found) as u32));
                found += 1;
            }
            cursors[bucket] += found;
            seen[bucket] = end_rank;
        }
    }
}

const _: () = assert!(BATCH == 32, "the binary search takes five steps");

/// Applies overrides to a block's masks, and keeps only `valid` weights.
#[inline(always)]
fn apply_overrides(masks: &mut Masks, overrides: &mut &[Override], start: u32, valid: u64) {
    while let Some((&Override { index, bucket }, rest)) = overrides.split_first()
        && index < start + BLOCK as u32
    {
        let bit = 1 << (index - start);
        for mask in masks.iter_mut() {
            *mask &= !bit;
        }
        masks[usize::from(bucket) % BUCKETS_MAX] |= bit;
        *overrides = rest;
    }
    for mask in masks {
        *mask &= valid;
    }
}

/// The weights of a frame in blocks. The last one is padded.
struct Blocks<'a, const W: usize> {
    full: &'a [[[u8; W]; BLOCK]],
    last: [[u8; W]; BLOCK],
    /// Weights in the last block. 0: there is no partial block.
    last_weights: usize,
    count: usize,
}

impl<'a, const W: usize> Blocks<'a, W> {
    fn of(weights: &'a [u8]) -> Self {
        let (full, rest) = weights.as_chunks::<W>().0.as_chunks::<BLOCK>();
        let mut last = [[0; W]; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        Blocks {
            full,
            last,
            last_weights: rest.len(),
            count: full.len() + usize::from(!rest.is_empty()),
        }
    }

    /// Block `index`, and the bits of its actual weights.
    #[inline(always)]
    fn at(&self, index: usize) -> (&[[u8; W]; BLOCK], u64) {
        match self.full.get(index) {
            Some(block) => (block, u64::MAX),
            None => (&self.last, (1 << self.last_weights) - 1),
        }
    }
}

/// The keys of a block, each stored at `place(i)`.
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
