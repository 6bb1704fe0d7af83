//! Arithmetic with a fixed order of summation. A row's result depends only on that row and the
//! weights, to the bit.
//!
//! - **Matrix products** add one term after another: `acc = fma(x[k], w[k], acc)` for k = 0, 1, …,
//!   starting at the bias. SIMD vectors hold different outputs. The number of rows, their blocks,
//!   the threads and the vector width therefore do not change a sum.
//! - **bf16 products** ([`Compute::Bf16`]) add the odd k of a pair before the even one. This is the
//!   order of `VDPBF16PS`, which computes two terms at once.
//! - **Sums along a row** (norm, softmax) use sixteen partial sums, `partial[i mod 16]`, on every
//!   machine. They are added in a fixed tree.
//! - **`exp`** is a polynomial in fused multiply-adds, not the C library's.
//!
//! The instruction set is chosen once at run time: AVX-512 with or without BF16, AVX2 with FMA, or
//! portable Rust. The module works on slices and knows no tensors or names.

mod attention;
mod attention_gradient;
mod columns;
mod matrix;
mod row_ops;
mod tile;

pub use attention::{KvHead, Queries, attend};
pub use attention_gradient::{Attention, HeadGradient, attention_gradient};
pub use columns::{ColumnsOf, Room, add_products_of_columns};
pub use matrix::{Element, Matrix, Vector};
pub use row_ops::{
    add, add_scaled, bf16, dot, exp, rms_norm, rms_norm_gradient, rotate, round_pairs, softmax, softmax_gradient,
    swiglu, swiglu_gradient,
};

use artifact::isa::{InstructionSet, Isa};
use artifact::threads::Threads;
use serde::{Deserialize, Serialize};
use tile::Weight;

/// Outputs that are computed together: the width of a panel of packed weights.
pub(crate) const PANEL: usize = 32;

/// The precision of the factors of a matrix product. Sums are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    #[default]
    F32,
    /// Both factors are rounded to bf16.
    Bf16,
}

/// Weights that f32 rows can be multiplied with.
trait Terms: Weight {
    /// Converts rows of `width` values to inputs of a product. `room` holds them if they are
    /// rounded.
    fn inputs<'a>(isa: Isa, x: &'a [f32], width: usize, room: &'a mut Vec<Self::Input>) -> &'a [Self::Input];
}

macro_rules! unconverted_inputs {
    ($weight:ty) => {
        impl Terms for $weight {
            fn inputs<'a>(_: Isa, x: &'a [f32], _: usize, _: &'a mut Vec<f32>) -> &'a [f32] {
                x
            }
        }
    };
}

unconverted_inputs!(f32);
unconverted_inputs!(u16);

impl Terms for u32 {
    fn inputs<'a>(isa: Isa, x: &'a [f32], width: usize, room: &'a mut Vec<u32>) -> &'a [u32] {
        room.resize(x.len() / width.max(1) * width.div_ceil(2), 0);
        round_pairs(isa, x, width.max(1), room);
        room
    }
}

#[cfg(test)]
mod tests;
