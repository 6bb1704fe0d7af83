//! Products over rows: `y[o][i] += Σ_r a[r][o] · b[r][i]`, as gradients of weights are.
//!
//! Every output is one chain of fused multiply-adds over the rows in their order. Threads and
//! blocks divide outputs, so they change no bit, and neither does cutting the rows between calls.

use super::tile::{Columns, ROWS_MAX, Tile};
use super::{Isa, PANEL};

/// Rows whose terms are added before the next outputs. So many rows of a panel stay in a cache.
const DEPTH: usize = 512;

/// Some columns of row-major values.
#[derive(Debug, Clone, Copy)]
pub struct ColumnsOf<'a> {
    pub values: &'a [f32],
    /// Distance between rows.
    pub stride: usize,
    /// The first column, and how many.
    pub first: usize,
    pub count: usize,
}

impl<'a> ColumnsOf<'a> {
    /// All columns of rows of `width` values.
    pub fn all(values: &'a [f32], width: usize) -> Self {
        ColumnsOf {
            values,
            stride: width,
            first: 0,
            count: width,
        }
    }

    /// Columns `first..first + count` of these.
    pub fn part(self, first: usize, count: usize) -> Self {
        ColumnsOf {
            first: self.first + first,
            count,
            ..self
        }
    }

    /// `count` values of a row, from one of these columns on.
    fn of(&self, row: usize, column: usize, count: usize) -> &'a [f32] {
        &self.values[row * self.stride + self.first + column..][..count]
    }
}

/// Room for packed factors, to be used again.
#[derive(Debug, Default)]
pub struct Room {
    a: Vec<f32>,
    b: Vec<Columns>,
}

/// Adds `Σ_r a[r][o] · b[r][i]` over `rows` to `y[o][i]`, `[a.count, b.count]`.
///
/// # Panics
/// If a slice is too short.
pub fn add_products_of_columns(
    isa: Isa,
    room: &mut Room,
    rows: std::ops::Range<usize>,
    a: ColumnsOf<'_>,
    b: ColumnsOf<'_>,
    y: &mut [f32],
) {
    assert_eq!(y.len(), a.count * b.count, "one output for each pair of columns");
    let mut edge = [0f32; ROWS_MAX * PANEL];
    let mut from = rows.start;
    while from < rows.end {
        let depth = DEPTH.min(rows.end - from);
        room.pack(from, depth, a, b);
        for (panel, w) in room.b.chunks_exact(depth * PANEL).enumerate() {
            let column = panel * PANEL;
            let width = PANEL.min(b.count - column);
            for (block, x) in room.a.chunks_exact(depth * ROWS_MAX).enumerate() {
                let output = block * ROWS_MAX;
                let count = ROWS_MAX.min(a.count - output);
                let at = output * b.count + column;
                let tile = |y, y_stride| Tile {
                    rows: count,
                    panels: 1,
                    k: depth,
                    x,
                    x_stride: 0,
                    w,
                    w_stride: 0,
                    start: None,
                    y,
                    y_stride,
                };
                if width == PANEL {
                    tile(&mut y[at..], b.count).run(isa);
                    continue;
                }
                for r in 0..count {
                    edge[r * PANEL..][..width].copy_from_slice(&y[at + r * b.count..][..width]);
                }
                tile(&mut edge, PANEL).run(isa);
                for r in 0..count {
                    y[at + r * b.count..][..width].copy_from_slice(&edge[r * PANEL..][..width]);
                }
            }
        }
        from += depth;
    }
}

impl Room {
    /// a as `[⌈count/12⌉][depth][12]` and b as `[⌈count/32⌉][depth][32]`, padded with zeros.
    fn pack(&mut self, from: usize, depth: usize, a: ColumnsOf<'_>, b: ColumnsOf<'_>) {
        pack::<ROWS_MAX, f32>(&mut self.a, from, depth, a, |x| x);
        pack::<PANEL, Columns>(&mut self.b, from, depth, b, Columns);
    }
}

fn pack<const WIDTH: usize, T: Copy + Default>(
    into: &mut Vec<T>,
    from: usize,
    depth: usize,
    columns: ColumnsOf<'_>,
    packed: impl Fn(f32) -> T,
) {
    into.resize(columns.count.div_ceil(WIDTH) * depth * WIDTH, T::default());
    for (panel, into) in into.chunks_exact_mut(depth * WIDTH).enumerate() {
        let first = panel * WIDTH;
        let count = WIDTH.min(columns.count - first);
        for (row, into) in into.chunks_exact_mut(WIDTH).enumerate() {
            let values = columns.of(from + row, first, count);
            match <&[f32; WIDTH]>::try_from(values) {
                Ok(values) => {
                    for (into, &x) in into.iter_mut().zip(values) {
                        *into = packed(x);
                    }
                }
                Err(_) => {
                    into.fill(T::default());
                    for (into, &x) in into.iter_mut().zip(values) {
                        *into = packed(x);
                    }
                }
            }
        }
    }
}
