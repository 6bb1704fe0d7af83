//! Arithmetic with one order of summation: what a row's result is depends on that row and the weights alone, to the bit.
//!
//! A matrix product adds its terms one after another, `acc = fma(x[k], w[k], acc)` for k = 0, 1, …, starting at the bias;
//! vectors run across the outputs. So the number of rows, how they are cut into blocks, the number of threads and the width
//! of the machine's vectors change nothing. Sums along a row (norm, softmax) go through sixteen partial sums whatever the
//! vector width, `partial[i mod 16]`, added in a fixed tree. `exp` is ours: a polynomial in fused multiply-adds.
//!
//! What runs is chosen once, at run time: AVX-512, AVX2 with FMA, or portable Rust. Knows slices only: no tensors, no names.

mod attention;
mod lanes;
mod matrix;
mod tile;

pub use attention::{Keys, attend};
pub use lanes::{add, add_scaled, exp, rms_norm, rotate, softmax, swiglu};
pub use matrix::{Element, Matrix, Vector};

use std::sync::OnceLock;

/// Outputs that are computed side by side: the width of a panel of packed weights.
pub(crate) const PANEL: usize = 32;

/// Which instructions compute. All of them give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    Portable,
    Avx2,
    Avx512,
}

impl Isa {
    /// The fastest that this machine has. `SPRINGTIDE_ISA` (`portable`, `avx2`, `avx512`) asks for less, to compare.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let available = Self::available();
            let best = available.last().copied().unwrap_or(Isa::Portable);
            let Ok(asked) = std::env::var("SPRINGTIDE_ISA") else {
                return best;
            };
            let named = |isa: &Isa| format!("{isa:?}").eq_ignore_ascii_case(&asked);
            available.iter().copied().find(named).unwrap_or_else(|| {
                tracing::warn!(
                    asked,
                    ?available,
                    "SPRINGTIDE_ISA names none of what this machine has, and is ignored"
                );
                best
            })
        })
    }

    /// Those that this machine can run, slowest first.
    pub fn available() -> Vec<Self> {
        let mut available = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                available.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    available.push(Isa::Avx512);
                }
            }
        }
        available
    }
}

#[cfg(test)]
mod tests;
