//! The innermost loops of a matrix product: a few rows times a few panels of outputs.
//!
//! Every output is one chain of fused multiply-adds over k. A macro writes the same loop for each
//! instruction set; only the number of outputs per register differs. Pairs of bf16 add two terms at
//! once, as `VDPBF16PS` does. Machines without that instruction do the same in several. Over 500
//! lines, because all instruction sets and weights share the macros.

#![expect(
    unsafe_code,
    reason = "vector instructions on raw pointers, whose bounds `Tile::run` checks"
)]

use super::{InstructionSet, Isa, PANEL};

/// The most rows of one call. AVX-512 has registers for this many accumulators.
pub(super) const ROWS_MAX: usize = 12;

/// How many of the remaining panels to compute at once. One or two rows times one panel are too few
/// independent sums to hide the latency of a multiply-add.
pub(super) fn side_by_side(rows: usize, panels_left: usize) -> usize {
    match (rows, panels_left) {
        (1, 4..) => 4,
        (1 | 2, 2..) => 2,
        _ => 1,
    }
}

/// One block of a product: `y[r][j] = start[r][j] + Σ_k x[r][k] · w[k][j]`.
pub(super) struct Tile<'a, W: Weight> {
    /// 1 to [`ROWS_MAX`].
    pub rows: usize,
    /// Panels computed at once, as [`side_by_side`] says.
    pub panels: usize,
    /// Elements of a row of x. With pairs, each is two terms.
    pub k: usize,
    pub x: &'a [W::Input],
    /// Distance between rows of x, in elements. [`Columns`] ignore it.
    pub x_stride: usize,
    /// `[panels][k][32]`.
    pub w: &'a [W],
    /// Distance between panels of w, in elements.
    pub w_stride: usize,
    /// The start of every row's sums, `[panels][32]`. `None`: the values in y.
    pub start: Option<&'a [f32]>,
    pub y: &'a mut [f32],
    /// Distance between rows of y, in elements.
    pub y_stride: usize,
}

impl<W: Weight> Tile<'_, W> {
    /// Computes the block.
    ///
    /// # Panics
    /// If a slice is shorter than the counts and strides need, or rows and panels do not fit.
    pub fn run(self, isa: Isa) {
        assert!((1..=ROWS_MAX).contains(&self.rows));
        assert!(matches!((self.rows, self.panels), (1, 4) | (1 | 2, 2) | (_, 1)));
        assert!(self.x.len() >= W::inputs_needed(self.rows, self.x_stride, self.k));
        assert!(self.w.len() >= (self.panels - 1) * self.w_stride + self.k * PANEL);
        assert!(self.y.len() >= (self.rows - 1) * self.y_stride + self.panels * PANEL);
        assert!(self.start.is_none_or(|start| start.len() >= self.panels * PANEL));
        let (start, start_stride) = match self.start {
            Some(start) => (start.as_ptr(), 0),
            None => (self.y.as_ptr(), self.y_stride),
        };
        let tile = Pointers {
            rows: self.rows,
            panels: self.panels,
            k: self.k,
            x: self.x.as_ptr(),
            x_stride: self.x_stride,
            w: self.w.as_ptr(),
            w_stride: self.w_stride,
            start,
            start_stride,
            y: self.y.as_mut_ptr(),
            y_stride: self.y_stride,
        };
        // SAFETY: the assertions above prove that every access is inside its slice, and the slices are
        // borrowed until the call returns. `start` may alias `y`; each element is read before it is
        // written. An `Isa` proves that the CPU has those instructions.
        unsafe { W::run(isa, &tile) }
    }
}

/// A [`Tile`] whose bounds have been checked.
pub(super) struct Pointers<W: Weight> {
    rows: usize,
    panels: usize,
    k: usize,
    x: *const W::Input,
    x_stride: usize,
    w: *const W,
    w_stride: usize,
    start: *const f32,
    start_stride: usize,
    y: *mut f32,
    y_stride: usize,
}

impl<W: Weight> Pointers<W> {
    /// At most `rows_max` rows from `from` on. `from < rows`.
    ///
    /// # Safety
    /// As for [`Weight::run`].
    unsafe fn rows_from(&self, from: usize, rows_max: usize) -> Self {
        // SAFETY: `from < rows`, so the offsets stay inside the ranges that the caller promised.
        unsafe {
            Pointers {
                rows: rows_max.min(self.rows - from),
                x: self.x.add(from * self.x_stride),
                start: self.start.add(from * self.start_stride),
                y: self.y.add(from * self.y_stride),
                ..*self
            }
        }
    }
}

/// An f32 whose x has its rows beside each other, `[k][ROWS_MAX]`: a product over the rows of two
/// matrices, whose columns become the rows of x.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct Columns(pub f32);

/// An element of packed weights: f32, the bits of a bf16 (u16), or a pair of bf16 (u32) whose lower
/// half belongs to k and whose upper half to k + 1.
pub(super) trait Weight: Copy + Default + Send + Sync {
    /// The element of x that it is multiplied with.
    type Input: Copy + Default + Send + Sync;
    /// Terms of the sum per element.
    const TERMS: usize;

    /// Elements of x that a tile reads.
    fn inputs_needed(rows: usize, x_stride: usize, k: usize) -> usize {
        (rows - 1) * x_stride + k
    }

    /// # Safety
    /// The CPU must have `isa`. The pointers must be valid for all elements that the tile's counts
    /// and strides cover, and `rows` and `panels` must be a combination that [`Tile::run`] allows.
    unsafe fn run(isa: Isa, tile: &Pointers<Self>);
}

macro_rules! by_rows {
    ($function:ident, $tile:expr) => {
        match ($tile.rows, $tile.panels) {
            (1, 4) => $function::<1, 4>($tile),
            (1, 2) => $function::<1, 2>($tile),
            (1, _) => $function::<1, 1>($tile),
            (2, 2) => $function::<2, 2>($tile),
            (2, _) => $function::<2, 1>($tile),
            (3, _) => $function::<3, 1>($tile),
            (4, _) => $function::<4, 1>($tile),
            (5, _) => $function::<5, 1>($tile),
            (6, _) => $function::<6, 1>($tile),
            (7, _) => $function::<7, 1>($tile),
            (8, _) => $function::<8, 1>($tile),
            (9, _) => $function::<9, 1>($tile),
            (10, _) => $function::<10, 1>($tile),
            (11, _) => $function::<11, 1>($tile),
            _ => $function::<12, 1>($tile),
        }
    };
}

/// Without `VDPBF16PS` both halves of a weight need a register, so four rows are computed at a
/// time.
macro_rules! by_four_rows {
    ($function:ident, $tile:expr) => {
        for from in (0..$tile.rows).step_by(4) {
            let part = $tile.rows_from(from, 4);
            match (part.rows, part.panels) {
                (1, 4) => $function::<1, 4>(&part),
                (1, 2) => $function::<1, 2>(&part),
                (1, _) => $function::<1, 1>(&part),
                (2, 2) => $function::<2, 2>(&part),
                (2, _) => $function::<2, 1>(&part),
                (3, _) => $function::<3, 1>(&part),
                _ => $function::<4, 1>(&part),
            }
        }
    };
}

macro_rules! weight {
    ($type:ty, $input:ty, $terms:literal, $avx512_bf16:ident, $by:ident, $avx512:ident, $avx2:ident, $portable:ident
     $(, $needed:item)?) => {
        impl Weight for $type {
            type Input = $input;
            const TERMS: usize = $terms;

            $($needed)?

            unsafe fn run(isa: Isa, tile: &Pointers<Self>) {
                // SAFETY: the caller promised that the CPU has `isa` and that the pointers are
                // valid.
                unsafe {
                    match isa.set() {
                        #[cfg(target_arch = "x86_64")]
                        InstructionSet::Avx512Bf16 => by_rows!($avx512_bf16, tile),
                        #[cfg(target_arch = "x86_64")]
                        InstructionSet::Avx512 => $by!($avx512, tile),
                        #[cfg(target_arch = "x86_64")]
                        InstructionSet::Avx2 => $by!($avx2, tile),
                        _ => $portable(tile),
                    }
                }
            }
        }
    };
}

weight!(f32, f32, 1, avx512_f32, by_rows, avx512_f32, avx2_f32, portable_f32);
weight!(u16, f32, 1, avx512_bf16, by_rows, avx512_bf16, avx2_bf16, portable_bf16);
weight!(
    u32,
    u32,
    2,
    avx512_pairs,
    by_four_rows,
    avx512_pairs_emulated,
    avx2_pairs,
    portable_pairs
);

weight!(
    Columns,
    f32,
    1,
    avx512_columns,
    by_rows,
    avx512_columns,
    avx2_columns,
    portable_columns,
    fn inputs_needed(_: usize, _: usize, k: usize) -> usize {
        k * ROWS_MAX
    }
);

/// Where row r of x has element k.
#[inline(always)]
fn by_row<W: Weight>(t: &Pointers<W>, r: usize, k: usize) -> usize {
    r * t.x_stride + k
}

#[inline(always)]
fn by_column(_: &Pointers<Columns>, r: usize, k: usize) -> usize {
    k * ROWS_MAX + r
}

/// Vectors of a panel computed at a time. With more, the sums would not stay in registers.
#[cfg(target_arch = "x86_64")]
const AT_ONCE: usize = 2;

/// A tile on vectors of `$width` floats.
#[cfg(target_arch = "x86_64")]
macro_rules! tile {
    ($name:ident, $feature:literal, $weight:ty, $width:literal, $at:ident,
     $load:ident, $set:ident, $fma:ident, $read:ident, $store:ident) => {
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name<const R: usize, const P: usize>(t: &Pointers<$weight>) {
            let mut part = 0;
            while part < PANEL {
                // SAFETY: part + AT_ONCE · $width ≤ PANEL, r < R = t.rows, p < P = t.panels and k < t.k, so
                // every access is inside the ranges that the caller promised.
                unsafe {
                    let mut sums = [[[$read(t.start); AT_ONCE]; P]; R];
                    for (r, row) in sums.iter_mut().enumerate() {
                        for (p, panel) in row.iter_mut().enumerate() {
                            for (i, sum) in panel.iter_mut().enumerate() {
                                *sum = $read(t.start.add(r * t.start_stride + p * PANEL + part + i * $width));
                            }
                        }
                    }
                    let mut w = t.w.add(part);
                    for k in 0..t.k {
                        let mut weights = [[$load(w); AT_ONCE]; P];
                        for (p, panel) in weights.iter_mut().enumerate() {
                            for (i, weight) in panel.iter_mut().enumerate() {
                                *weight = $load(w.add(p * t.w_stride + i * $width));
                            }
                        }
                        for (r, row) in sums.iter_mut().enumerate() {
                            let x = $set(*t.x.add($at(t, r, k)));
                            for (panel, weights) in row.iter_mut().zip(&weights) {
                                for (sum, weight) in panel.iter_mut().zip(weights) {
                                    *sum = $fma(x, *weight, *sum);
                                }
                            }
                        }
                        w = w.add(PANEL);
                    }
                    for (r, row) in sums.iter().enumerate() {
                        for (p, panel) in row.iter().enumerate() {
                            for (i, sum) in panel.iter().enumerate() {
                                $store(t.y.add(r * t.y_stride + p * PANEL + part + i * $width), *sum);
                            }
                        }
                    }
                }
                part += AT_ONCE * $width;
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
use x86::*;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{AT_ONCE, Columns, EXPONENT, HIGH, PANEL, Pointers, by_column, by_row};
    use std::arch::x86_64::*;
    use std::mem::transmute;

    macro_rules! tile_16 {
        ($name:ident, $feature:literal, $weight:ty, $at:ident, $load:ident, $set:ident, $fma:ident) => {
            tile!(
                $name,
                $feature,
                $weight,
                16,
                $at,
                $load,
                $set,
                $fma,
                _mm512_loadu_ps,
                _mm512_storeu_ps
            );
        };
    }

    macro_rules! tile_8 {
        ($name:ident, $feature:literal, $weight:ty, $at:ident, $load:ident, $set:ident, $fma:ident) => {
            tile!(
                $name,
                $feature,
                $weight,
                8,
                $at,
                $load,
                $set,
                $fma,
                _mm256_loadu_ps,
                _mm256_storeu_ps
            );
        };
    }

    tile_16!(
        avx512_f32,
        "avx512f",
        f32,
        by_row,
        _mm512_loadu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps
    );
    tile_16!(
        avx512_bf16,
        "avx512f",
        u16,
        by_row,
        widen_16,
        _mm512_set1_ps,
        _mm512_fmadd_ps
    );
    tile_16!(
        avx512_pairs,
        "avx512f,avx512bf16",
        u32,
        by_row,
        pairs_16,
        spread_16,
        add_pairs
    );
    tile_16!(
        avx512_pairs_emulated,
        "avx512f",
        u32,
        by_row,
        pairs_16,
        spread_16,
        add_pairs_16
    );
    tile_8!(
        avx2_f32,
        "avx2,fma",
        f32,
        by_row,
        _mm256_loadu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps
    );
    tile_8!(
        avx2_bf16,
        "avx2,fma",
        u16,
        by_row,
        widen_8,
        _mm256_set1_ps,
        _mm256_fmadd_ps
    );
    tile_8!(avx2_pairs, "avx2,fma", u32, by_row, pairs_8, spread_8, add_pairs_8);

    tile_16!(
        avx512_columns,
        "avx512f",
        Columns,
        by_column,
        columns_16,
        _mm512_set1_ps,
        _mm512_fmadd_ps
    );
    tile_8!(
        avx2_columns,
        "avx2,fma",
        Columns,
        by_column,
        columns_8,
        _mm256_set1_ps,
        _mm256_fmadd_ps
    );

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn columns_16(w: *const Columns) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 values, each an f32.
        unsafe { _mm512_loadu_ps(w.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn columns_8(w: *const Columns) -> __m256 {
        // SAFETY: the caller's pointer is valid for 8 values, each an f32.
        unsafe { _mm256_loadu_ps(w.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pairs_16(w: *const u32) -> __m512i {
        // SAFETY: the caller's pointer is valid for 16 pairs.
        unsafe { _mm512_loadu_si512(w.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn spread_16(x: u32) -> __m512i {
        _mm512_set1_epi32(x.cast_signed())
    }

    /// sum + x₁w₁ + x₀w₀ of sixteen pairs, as fused multiply-adds in this order. Each is rounded to
    /// nearest, and subnormal inputs and results count as 0.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn add_pairs(x: __m512i, w: __m512i, sum: __m512) -> __m512 {
        // SAFETY: both types have 64 bytes, and every bit pattern is valid.
        let (x, w) = unsafe { (transmute::<__m512i, __m512bh>(x), transmute::<__m512i, __m512bh>(w)) };
        _mm512_dpbf16_ps(sum, x, w)
    }

    /// [`add_pairs`] without `VDPBF16PS`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add_pairs_16(x: __m512i, w: __m512i, sum: __m512) -> __m512 {
        let high = |v: __m512i| _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(HIGH)));
        let low = |v: __m512i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v));
        flush_16(_mm512_fmadd_ps(
            low(x),
            low(w),
            flush_16(_mm512_fmadd_ps(high(x), high(w), sum)),
        ))
    }

    /// Replaces subnormals by 0 of the same sign.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn flush_16(x: __m512) -> __m512 {
        let bits = _mm512_castps_si512(x);
        let normal = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(EXPONENT));
        let sign = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
        _mm512_castsi512_ps(_mm512_mask_mov_epi32(sign, normal, bits))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn pairs_8(w: *const u32) -> __m256i {
        // SAFETY: the caller's pointer is valid for 8 pairs.
        unsafe { _mm256_loadu_si256(w.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn spread_8(x: u32) -> __m256i {
        _mm256_set1_epi32(x.cast_signed())
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn add_pairs_8(x: __m256i, w: __m256i, sum: __m256) -> __m256 {
        let high = |v: __m256i| _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(HIGH)));
        let low = |v: __m256i| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
        flush_8(_mm256_fmadd_ps(
            low(x),
            low(w),
            flush_8(_mm256_fmadd_ps(high(x), high(w), sum)),
        ))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn flush_8(x: __m256) -> __m256 {
        let bits = _mm256_castps_si256(x);
        let exponent = _mm256_and_si256(bits, _mm256_set1_epi32(EXPONENT));
        let tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
        let magnitude = _mm256_and_si256(tiny, _mm256_set1_epi32(i32::MAX));
        _mm256_castsi256_ps(_mm256_andnot_si256(magnitude, bits))
    }

    /// Sixteen bf16 as f32.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen_16(w: *const u16) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 values.
        let halves = unsafe { _mm256_loadu_si256(w.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }

    /// Eight bf16 as f32.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn widen_8(w: *const u16) -> __m256 {
        // SAFETY: the caller's pointer is valid for 8 values.
        let halves = unsafe { _mm_loadu_si128(w.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
    }
}

/// The bits of the upper half of a pair.
const HIGH: i32 = 0xffff_0000u32.cast_signed();
/// The exponent bits of an f32.
const EXPONENT: i32 = 0x7f80_0000;

macro_rules! portable {
    ($name:ident, $weight:ty, $at:ident, $add:expr) => {
        unsafe fn $name(t: &Pointers<$weight>) {
            for (r, p) in (0..t.rows).flat_map(|r| (0..t.panels).map(move |p| (r, p))) {
                // SAFETY: r < rows, p < panels, k < t.k and j < PANEL, so every access is inside the
                // ranges that the caller promised.
                unsafe {
                    let mut sums = [0f32; PANEL];
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = *t.start.add(r * t.start_stride + p * PANEL + j);
                    }
                    for k in 0..t.k {
                        let x = *t.x.add($at(t, r, k));
                        for (j, sum) in sums.iter_mut().enumerate() {
                            *sum = $add(x, *t.w.add(p * t.w_stride + k * PANEL + j), *sum);
                        }
                    }
                    for (j, sum) in sums.iter().enumerate() {
                        *t.y.add(r * t.y_stride + p * PANEL + j) = *sum;
                    }
                }
            }
        }
    };
}

portable!(portable_f32, f32, by_row, |x: f32, w: f32, sum| x.mul_add(w, sum));
portable!(portable_bf16, u16, by_row, |x: f32, w: u16, sum| x
    .mul_add(f32::from_bits(u32::from(w) << 16), sum));
portable!(portable_pairs, u32, by_row, |x: u32, w: u32, sum| {
    let high = |pair: u32| f32::from_bits(pair & HIGH.cast_unsigned());
    let low = |pair: u32| f32::from_bits(pair << 16);
    flush(low(x).mul_add(low(w), flush(high(x).mul_add(high(w), sum))))
});

portable!(portable_columns, Columns, by_column, |x: f32, w: Columns, sum| x
    .mul_add(w.0, sum));

/// Replaces a subnormal by 0 of the same sign.
fn flush(x: f32) -> f32 {
    match x.to_bits() & EXPONENT.cast_unsigned() {
        0 => f32::from_bits(x.to_bits() & (1 << 31)),
        _ => x,
    }
}
