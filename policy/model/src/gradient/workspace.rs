//! Buffers that are used again for every layer, and products over rows that share threads.

use super::BLOCK;
use crate::kernel::{ColumnsOf, Room, add_products_of_columns};
use artifact::isa::Isa;
use artifact::threads::Threads;
use std::sync::{Mutex, PoisonError};

/// Outputs of a product that one job computes, if threads share them.
const OUTPUTS: usize = 192;

/// Rows of one layer's gradients. Each is resized before it is filled.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// The gradient of the residual stream: of a layer's output, then of its input.
    pub stream: Vec<f32>,
    /// The same after attention.
    pub middle: Vec<f32>,
    /// The result of a norm.
    pub normed: Vec<f32>,
    pub attended: Vec<f32>,
    /// silu(gate) · up, and the gradients of both.
    pub gated: Vec<f32>,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub rooms: Rooms,
}

/// Room for packed factors, lent to jobs.
#[derive(Debug, Default)]
pub(super) struct Rooms(Mutex<Vec<Room>>);

/// `sums[o][i] += Σ a[r][o] · b[r][i]`.
pub(super) struct Product<'a> {
    pub rows: usize,
    pub a: ColumnsOf<'a>,
    pub b: ColumnsOf<'a>,
    pub sums: &'a mut [f32],
}

impl Rooms {
    pub fn lend<T>(&self, work: impl FnOnce(&mut Room) -> T) -> T {
        let mut room = self.lock().pop().unwrap_or_default();
        let result = work(&mut room);
        self.lock().push(room);
        result
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Room>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds every product. Threads share outputs.
    pub fn add(&self, threads: &Threads, isa: Isa, products: Vec<Product<'_>>) {
        let mut jobs = Vec::new();
        for Product { rows, a, b, sums } in products {
            let outputs = match threads.count() {
                1 => a.count,
                _ => OUTPUTS,
            };
            for (part, sums) in sums.chunks_mut(outputs * b.count).enumerate() {
                let a = a.part(part * outputs, sums.len() / b.count);
                jobs.push(Product { rows, a, b, sums });
            }
        }
        threads.each(jobs, |Product { rows, a, b, sums }| {
            self.lend(|room| add_products_of_columns(isa, room, 0..rows, a, b, sums));
        });
    }
}

/// Resizes buffers to `rows` rows and cuts them into blocks of [`BLOCK`], each with its first row.
/// `buffers` have the width of a row.
pub(super) fn blocks<const N: usize>(
    rows: usize,
    buffers: [(&mut Vec<f32>, usize); N],
) -> Vec<(usize, [&mut [f32]; N])> {
    let mut chunks = buffers.map(|(values, width)| {
        values.resize(rows * width, 0.0);
        values.chunks_mut(BLOCK * width)
    });
    let block = |row| (row, chunks.each_mut().map(|chunks| chunks.next().unwrap_or_default()));
    (0..rows).step_by(BLOCK).map(block).collect()
}
