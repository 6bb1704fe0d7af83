//! Operations along a row: norm, softmax, rotation, SwiGLU, and the `exp` that they use.
//!
//! This is plain Rust with sixteen partial sums, compiled once for each instruction set. The
//! compiler does not reorder float sums or fuse separate operations, so every version gives the
//! same bits.

#![expect(
    unsafe_code,
    reason = "calls functions compiled for instructions that this machine was tested for"
)]

use super::{InstructionSet, Isa};

/// Partial sums of a row.
const PARTIALS: usize = 16;

/// Compiles a function for three instruction sets, and dispatches on an [`Isa`] of this machine.
macro_rules! for_each_isa {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name(isa: Isa, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            fn avx512($($arg: $type),*) $(-> $result)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $result)? { body($($arg),*) }
            match isa.set() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of these proves that the CPU has AVX-512F.
                InstructionSet::Avx512 | InstructionSet::Avx512Bf16 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of AVX2 proves that the CPU has AVX2 and FMA.
                InstructionSet::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}

/// eˣ in f32, within 2 units in the last place. 0 below −87.3, and constant above 88.3.
///
/// x = n ln 2 + r with |r| ≤ ln 2 / 2. eʳ is a Taylor polynomial of degree 7, whose remainder is
/// below f32's rounding.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    /// Adding it rounds to the nearest integer, which ends up in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let bounded = x.clamp(-87.3, 88.3);
    let rounded = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, bounded));
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, c);
    }
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits()) << 23;
    let value = f32::from_bits(p.to_bits().wrapping_add(power));
    if x < -87.3 { 0.0 } else { value }
}

/// Adds the partial sums in a fixed tree: the upper half onto the lower, four times.
#[inline(always)]
fn sum_tree(mut sums: [f32; PARTIALS]) -> f32 {
    let mut half = PARTIALS / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

for_each_isa! {
    /// x / √(mean(x²) + eps) · w over groups of `w.len()` values, in place (Zhang & Sennrich 2019).
    pub fn rms_norm(x: &mut [f32], w: &[f32], eps: f32) {
        for row in x.chunks_exact_mut(w.len()) {
            let mut sums = [0f32; PARTIALS];
            let mut chunks = row.chunks_exact(PARTIALS);
            for chunk in &mut chunks {
                for (sum, &x) in sums.iter_mut().zip(chunk) {
                    *sum = x.mul_add(x, *sum);
                }
            }
            for (sum, &x) in sums.iter_mut().zip(chunks.remainder()) {
                *sum = x.mul_add(x, *sum);
            }
            let scale = 1.0 / (sum_tree(sums) / w.len() as f32 + eps).sqrt();
            for (x, w) in row.iter_mut().zip(w) {
                *x = *x * scale * w;
            }
        }
    }
}

for_each_isa! {
    /// Replaces x by `exp(x − max)` and returns the sum; −∞ becomes 0. If `x` is part of a longer
    /// row, it must start at a multiple of 16, so that the partial sums are the same.
    pub fn softmax(x: &mut [f32]) -> f32 {
        let mut tops = [f32::NEG_INFINITY; PARTIALS];
        for chunk in x.chunks(PARTIALS) {
            for (top, &x) in tops.iter_mut().zip(chunk) {
                *top = if x > *top { x } else { *top };
            }
        }
        let max = tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sums = [0f32; PARTIALS];
        let mut chunks = x.chunks_exact_mut(PARTIALS);
        for chunk in &mut chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *x = exp(*x - max);
                *sum += *x;
            }
        }
        for (sum, x) in sums.iter_mut().zip(chunks.into_remainder()) {
            *x = exp(*x - max);
            *sum += *x;
        }
        sum_tree(sums)
    }
}

for_each_isa! {
    /// gate = silu(gate) · up, where silu(x) = x / (1 + e⁻ˣ) (Shazeer 2020).
    pub fn swiglu(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

for_each_isa! {
    /// x += y.
    pub fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

for_each_isa! {
    /// x = fma(y, scale, x).
    pub fn add_scaled(x: &mut [f32], y: &[f32], scale: f32) {
        for (x, &y) in x.iter_mut().zip(y) {
            *x = y.mul_add(scale, *x);
        }
    }
}

for_each_isa! {
    /// Rotates the pairs (x[i], x[i + half]) of one head in place by the angles of `cos` and `sin`
    /// (Su et al. 2021, in the half-split layout of Hugging Face checkpoints).
    pub fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (low, high) = x.split_at_mut(cos.len());
        for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// The bits of the nearest bf16, ties to even. Subnormals become 0, as in products of pairs.
#[inline(always)]
pub fn bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        0x7fc0
    } else if magnitude < 0x0080_0000 {
        bits >> 16 & 0x8000
    } else {
        rounded
    }
}

for_each_isa! {
    /// Rounds rows of `width` values to pairs of bf16. A row of odd width ends with a 0. `pairs`
    /// must have ⌈width/2⌉ elements per row.
    pub fn round_pairs(x: &[f32], width: usize, pairs: &mut [u32]) {
        for (x, pairs) in x.chunks_exact(width).zip(pairs.chunks_exact_mut(width.div_ceil(2))) {
            let mut two = x.chunks_exact(2);
            for (pair, x) in pairs.iter_mut().zip(&mut two) {
                *pair = bf16(x[0]) | bf16(x[1]) << 16;
            }
            if let ([x], Some(last)) = (two.remainder(), pairs.last_mut()) {
                *last = bf16(*x);
            }
        }
    }
}
