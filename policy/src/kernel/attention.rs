//! Causal attention of a few new positions over everything before them.
//!
//! Keys lie in panels of 32 positions and values in panels of 32 columns, so that both products are the ones of
//! [`super::tile`]: a score is one chain over the head's width, an output one chain over the positions in their order. A
//! position's result depends on what it may look at and on nothing else: what a block computes beyond that is weighted 0.

use super::matrix::ZEROS;
use super::tile::{ROWS_MAX, Tile, side_by_side};
use super::{Isa, PANEL, softmax};

/// Keys and values of one key-value head of one sequence, f32.
#[derive(Debug, Clone)]
pub struct Keys {
    /// `[⌈capacity/32⌉][key_width][32]`.
    k: Vec<f32>,
    /// `[⌈value_width/32⌉][capacity][32]`.
    v: Vec<f32>,
    key_width: usize,
    value_width: usize,
    /// In positions, a multiple of 32.
    capacity: usize,
}

impl Keys {
    /// Room for `positions`, zeroed.
    pub fn new(positions: usize, key_width: usize, value_width: usize) -> Self {
        let capacity = positions.next_multiple_of(PANEL);
        Keys {
            k: vec![0.0; capacity * key_width],
            v: vec![0.0; capacity * value_width.next_multiple_of(PANEL)],
            key_width,
            value_width,
            capacity,
        }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * 4
    }

    /// Writes one position. Both slices have their widths; `position` is below the capacity.
    pub fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let at = position / PANEL * PANEL * self.key_width + position % PANEL;
        for (into, &x) in self.k[at..].iter_mut().step_by(PANEL).zip(key) {
            *into = x;
        }
        for (panel, values) in value.chunks(PANEL).enumerate() {
            self.v[(panel * self.capacity + position) * PANEL..][..values.len()].copy_from_slice(values);
        }
    }

    /// Takes over the first `positions` of another of the same shape.
    pub fn copy_from(&mut self, other: &Keys, positions: usize) {
        let keys = positions.next_multiple_of(PANEL) * self.key_width;
        self.k[..keys].copy_from_slice(&other.k[..keys]);
        for panel in 0..self.value_width.div_ceil(PANEL) {
            let (into, from) = (panel * self.capacity * PANEL, panel * other.capacity * PANEL);
            self.v[into..][..positions * PANEL].copy_from_slice(&other.v[from..][..positions * PANEL]);
        }
    }
}

/// Queries `from..from + count` of `heads` heads that share these keys, each looking at itself and what is before it, at most
/// `window` positions. Their keys and values have been written.
///
/// Head h of query i is at `q[i · q_stride + h · key_width ..]`, its result goes to `out[i · out_stride + h · value_width ..]`.
/// Scores are multiplied by `scale` before the softmax.
#[expect(
    clippy::too_many_arguments,
    reason = "two strided arrays and a range; a struct would be used once"
)]
pub fn attend(
    isa: Isa,
    keys: &Keys,
    heads: usize,
    from: usize,
    count: usize,
    window: Option<usize>,
    scale: f32,
    q: &[f32],
    q_stride: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    assert!(from + count <= keys.capacity, "positions beyond the room for keys");
    let (key_width, value_width) = (keys.key_width, keys.value_width);
    let mut queries = vec![0f32; ROWS_MAX * key_width];
    let mut scores = Vec::new();
    let mut values = vec![0f32; ROWS_MAX * PANEL];
    // rows of a block: consecutive (query, head) pairs
    let rows_all = count * heads;
    let mut block = 0;
    while block < rows_all {
        let rows = ROWS_MAX.min(rows_all - block);
        let place = |row: usize| ((block + row) / heads, (block + row) % heads);
        let first = from + place(0).0;
        let end = from + place(rows - 1).0 + 1;
        let reach = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
        let start = reach(first) / PANEL * PANEL;
        let columns = end.next_multiple_of(PANEL) - start;
        for (row, into) in queries.chunks_exact_mut(key_width).take(rows).enumerate() {
            let (query, head) = place(row);
            for (into, x) in into
                .iter_mut()
                .zip(&q[query * q_stride + head * key_width..][..key_width])
            {
                *into = x * scale;
            }
        }
        scores.clear();
        scores.resize(rows * columns, 0f32);
        let mut panel = 0;
        while panel < columns / PANEL {
            let panels = side_by_side(rows, columns / PANEL - panel);
            let tile = Tile {
                rows,
                panels,
                k: key_width,
                x: &queries,
                x_stride: key_width,
                w: &keys.k[(start + panel * PANEL) * key_width..],
                w_stride: key_width * PANEL,
                start: Some(&ZEROS),
                y: &mut scores[panel * PANEL..],
                y_stride: columns,
            };
            tile.run(isa);
            panel += panels;
        }
        let mut sums = [0f32; ROWS_MAX];
        for (row, scores) in scores.chunks_exact_mut(columns).enumerate() {
            let position = from + place(row).0;
            let (low, high) = (reach(position) - start, position + 1 - start);
            scores[..low].fill(f32::NEG_INFINITY);
            scores[high..].fill(0.0);
            sums[row] = softmax(isa, &mut scores[..high]);
        }
        let value_panels = value_width.div_ceil(PANEL);
        let mut panel = 0;
        while panel < value_panels {
            let panels = side_by_side(rows, value_panels - panel);
            let tile = Tile {
                rows,
                panels,
                k: end - start,
                x: &scores,
                x_stride: columns,
                w: &keys.v[(panel * keys.capacity + start) * PANEL..],
                w_stride: keys.capacity * PANEL,
                start: Some(&ZEROS),
                y: &mut values,
                y_stride: panels * PANEL,
            };
            tile.run(isa);
            let width = (panels * PANEL).min(value_width - panel * PANEL);
            for (row, values) in values.chunks_exact(panels * PANEL).take(rows).enumerate() {
                let (query, head) = place(row);
                let into = &mut out[query * out_stride + head * value_width + panel * PANEL..][..width];
                for (into, value) in into.iter_mut().zip(values) {
                    *into = value / sums[row];
                }
            }
            panel += panels;
        }
        block += rows;
    }
}
