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

for_each_isa! {
    /// Σ x · y.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 {
        let mut sums = [0f32; PARTIALS];
        let (mut xs, mut ys) = (x.chunks_exact(PARTIALS), y.chunks_exact(PARTIALS));
        for (x, y) in (&mut xs).zip(&mut ys) {
            for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
                *sum = x.mul_add(y, *sum);
            }
        }
        for ((sum, &x), &y) in sums.iter_mut().zip(xs.remainder()).zip(ys.remainder()) {
            *sum = x.mul_add(y, *sum);
        }
        sum_tree(sums)
    }
}

for_each_isa! {
    /// The gradient of [`rms_norm`]: replaces dy by dx, and adds to dw. With s = 1 / √(mean(x²) + eps)
    /// and x̂ = s · x: dw += dy · x̂ and dx = s · (dy · w − x̂ · mean(dy · w · x̂)).
    pub fn rms_norm_gradient(x: &[f32], w: &[f32], eps: f32, dy: &mut [f32], dw: &mut [f32]) {
        let width = w.len();
        for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
            let (mut squares, mut products) = ([0f32; PARTIALS], [0f32; PARTIALS]);
            let whole = width / PARTIALS * PARTIALS;
            for at in (0..whole).step_by(PARTIALS) {
                let (x, w, dy) = (&x[at..][..PARTIALS], &w[at..][..PARTIALS], &dy[at..][..PARTIALS]);
                for i in 0..PARTIALS {
                    squares[i] = x[i].mul_add(x[i], squares[i]);
                    products[i] = (dy[i] * w[i]).mul_add(x[i], products[i]);
                }
            }
            for (i, at) in (whole..width).enumerate() {
                squares[i] = x[at].mul_add(x[at], squares[i]);
                products[i] = (dy[at] * w[at]).mul_add(x[at], products[i]);
            }
            let scale = 1.0 / (sum_tree(squares) / width as f32 + eps).sqrt();
            let mean = sum_tree(products) / width as f32 * scale * scale;
            for (((dy, dw), &x), &w) in dy.iter_mut().zip(dw.iter_mut()).zip(x).zip(w) {
                *dw = (*dy * scale).mul_add(x, *dw);
                *dy = scale * (*dy * w - x * mean);
            }
        }
    }
}

for_each_isa! {
    /// The gradient of [`swiglu`]: replaces `gate` and `up` by their gradients and `gated`, which is the
    /// gradient of the result, by the result.
    pub fn swiglu_gradient(gate: &mut [f32], up: &mut [f32], gated: &mut [f32]) {
        for ((gate, up), gated) in gate.iter_mut().zip(up).zip(gated) {
            let sigmoid = 1.0 / (1.0 + exp(-*gate));
            let silu = *gate * sigmoid;
            let (g, u, dy) = (*gate, *up, *gated);
            *gated = silu * u;
            *up = dy * silu;
            *gate = dy * u * sigmoid * (1.0 + g * (1.0 - sigmoid));
        }
    }
}

for_each_isa! {
    /// The gradient of a softmax over scores. `p` holds what [`softmax`] left, and `sum` what it
    /// returned; `dp` the gradient by the probabilities, whose mean under them is `mean`. Replaces p by
    /// the probabilities and dp by the gradient by the scores.
    pub fn softmax_gradient(p: &mut [f32], dp: &mut [f32], sum: f32, mean: f32) {
        let inverse = 1.0 / sum;
        for (p, dp) in p.iter_mut().zip(dp) {
            *p *= inverse;
            *dp = *p * (*dp - mean);
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
