//! Arithmetic with one order of summation: what a row's result is depends on that row and the weights alone, to the bit.
//!
//! A matrix product adds its terms one after another, `acc = fma(x[k], w[k], acc)` for k = 0, 1, …, starting at the bias;
//! vectors run across the outputs. So the number of rows, how they are cut into blocks, the number of threads and the width
//! of the machine's vectors change nothing. Sums along a row (norm, softmax) go through sixteen partial sums whatever the
//! vector width, `partial[i mod 16]`, added in a fixed tree. `exp` is ours: a polynomial in fused multiply-adds.
//!
//! With [`Compute::Bf16`] both factors of a term are bf16, and the chain adds the odd k of a pair before the even one: the
//! order of the machine's own instruction, which computes twice as many terms.
//!
//! What runs is chosen once, at run time: AVX-512 (with or without that instruction), AVX2 with FMA, or portable Rust. Knows
//! slices only: no tensors, no names.

mod attention;
mod lanes;
mod matrix;
mod tile;

pub use attention::{Keys, Queries, attend};
pub use lanes::{add, add_scaled, bf16, exp, rms_norm, rotate, round_pairs, softmax, swiglu};
pub use matrix::{Element, Matrix, Vector};

use artifact::isa::Isa;
use artifact::threads::Threads;
use serde::{Deserialize, Serialize};
use tile::Weight;

/// Outputs that are computed side by side: the width of a panel of packed weights.
pub(crate) const PANEL: usize = 32;

/// In which precision the factors of a matrix product are; sums are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    #[default]
    F32,
    /// Both rounded to bf16 where they are not.
    Bf16,
}

/// Weights, and the rows of f32 that they are multiplied with.
trait Terms: Weight {
    /// Rows of `width` values as the inputs of a product; `room` holds them where they have to be rounded.
    fn inputs<'a>(isa: Isa, x: &'a [f32], width: usize, room: &'a mut Vec<Self::Input>) -> &'a [Self::Input];
}

macro_rules! as_they_are {
    ($weight:ty) => {
        impl Terms for $weight {
            fn inputs<'a>(_: Isa, x: &'a [f32], _: usize, _: &'a mut Vec<f32>) -> &'a [f32] {
                x
            }
        }
    };
}

as_they_are!(f32);
as_they_are!(u16);

impl Terms for u32 {
    fn inputs<'a>(isa: Isa, x: &'a [f32], width: usize, room: &'a mut Vec<u32>) -> &'a [u32] {
        room.resize(x.len() / width.max(1) * width.div_ceil(2), 0);
        round_pairs(isa, x, width.max(1), room);
        room
    }
}

#[cfg(test)]
mod tests;
