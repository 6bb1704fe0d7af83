//! Causal attention of new positions over themselves and all earlier positions.
//!
//! Keys are stored in panels of 32 positions and values in panels of 32 columns, so both products
//! are tiles ([`super::tile`]). A score is one sum over the head's width, an output one sum over
//! the positions in order. A block may compute scores beyond a position's reach; they get weight 0,
//! so a result depends only on the positions within reach.

use super::matrix::ZEROS;
use super::tile::{ROWS_MAX, Tile, side_by_side};
use super::{Compute, Isa, PANEL, Terms, bf16, softmax};

/// The keys and values of one key-value head of one sequence.
#[derive(Debug, Clone)]
pub struct KvHead {
    panels: Panels,
    shape: Shape,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    key_width: usize,
    value_width: usize,
    /// In positions, a multiple of 32.
    capacity: usize,
}

#[derive(Debug, Clone)]
enum Panels {
    F32(KeysAndValues<f32>),
    /// Pairs of bf16: two columns of a key, or two positions of a value column.
    Pairs(KeysAndValues<u32>),
}

#[derive(Debug, Clone)]
struct KeysAndValues<T> {
    /// `[⌈capacity/32⌉][key_width][32]`. With pairs, half as many columns.
    k: Vec<T>,
    /// `[⌈value_width/32⌉][capacity][32]`. With pairs, half as many positions.
    v: Vec<T>,
}

impl<T: Terms> KeysAndValues<T> {
    fn new(shape: Shape) -> Self {
        KeysAndValues {
            k: vec![T::default(); shape.capacity * shape.key_width.div_ceil(T::TERMS)],
            v: vec![T::default(); shape.capacity / T::TERMS * shape.value_width.next_multiple_of(PANEL)],
        }
    }

    fn copy_from(&mut self, shape: Shape, other: &Self, other_capacity: usize, positions: usize) {
        let kv = positions.next_multiple_of(PANEL) * shape.key_width.div_ceil(T::TERMS);
        self.k[..kv].copy_from_slice(&other.k[..kv]);
        let values = positions.div_ceil(T::TERMS) * PANEL;
        for panel in 0..shape.value_width.div_ceil(PANEL) {
            let start = |capacity: usize| panel * (capacity / T::TERMS) * PANEL;
            self.v[start(shape.capacity)..][..values].copy_from_slice(&other.v[start(other_capacity)..][..values]);
        }
    }
}

impl KvHead {
    /// Zeroed room for `positions`, rounded up to a multiple of 32.
    pub fn new(positions: usize, key_width: usize, value_width: usize, compute: Compute) -> Self {
        let shape = Shape {
            key_width,
            value_width,
            capacity: positions.next_multiple_of(PANEL),
        };
        KvHead {
            panels: match compute {
                Compute::F32 => Panels::F32(KeysAndValues::new(shape)),
                Compute::Bf16 => Panels::Pairs(KeysAndValues::new(shape)),
            },
            shape,
        }
    }

    pub fn capacity(&self) -> usize {
        self.shape.capacity
    }

    /// What [`KvHead::new`] allocates for these sizes, in bytes.
    pub fn bytes_for(positions: usize, key_width: usize, value_width: usize, compute: Compute) -> u64 {
        let capacity = positions.next_multiple_of(PANEL) as u64;
        // A pair of bf16 is as wide as an f32. It holds two columns of a key, or two positions of a
        // value's column.
        let (key_columns, value_positions) = match compute {
            Compute::F32 => (key_width, capacity),
            Compute::Bf16 => (key_width.div_ceil(2), capacity / 2),
        };
        let keys = capacity.saturating_mul(key_columns as u64);
        let values = value_positions.saturating_mul(value_width.next_multiple_of(PANEL) as u64);
        keys.saturating_add(values).saturating_mul(4)
    }

    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(both) => (both.k.len() + both.v.len()) * 4,
            Panels::Pairs(both) => (both.k.len() + both.v.len()) * 4,
        }
    }

    /// Writes one position. `key` and `value` have the head's widths, `position` is below the
    /// capacity, and all earlier positions have been written.
    pub fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let Shape {
            key_width, capacity, ..
        } = self.shape;
        let (panel, column) = (position / PANEL, position % PANEL);
        match &mut self.panels {
            Panels::F32(both) => {
                let at = panel * PANEL * key_width + column;
                for (into, &x) in both.k[at..].iter_mut().step_by(PANEL).zip(key) {
                    *into = x;
                }
                for (panel, values) in value.chunks(PANEL).enumerate() {
                    both.v[(panel * capacity + position) * PANEL..][..values.len()].copy_from_slice(values);
                }
            }
            Panels::Pairs(both) => {
                let at = panel * PANEL * key_width.div_ceil(2) + column;
                for (into, x) in both.k[at..].iter_mut().step_by(PANEL).zip(key.chunks(2)) {
                    *into = bf16(x[0]) | x.get(1).map_or(0, |&x| bf16(x) << 16);
                }
                for (panel, values) in value.chunks(PANEL).enumerate() {
                    let at = (panel * capacity + position) / 2 * PANEL;
                    for (into, &x) in both.v[at..].iter_mut().zip(values) {
                        // An even position zeroes the next one, which an earlier sequence may have
                        // written.
                        *into = match position % 2 {
                            0 => bf16(x),
                            _ => *into & 0xffff | bf16(x) << 16,
                        };
                    }
                }
            }
        }
    }

    /// Copies the first `positions` of another head of the same widths and precision. Capacities
    /// may differ.
    pub fn copy_from(&mut self, other: &KvHead, positions: usize) {
        let (shape, capacity) = (self.shape, other.shape.capacity);
        match (&mut self.panels, &other.panels) {
            (Panels::F32(both), Panels::F32(others)) => both.copy_from(shape, others, capacity, positions),
            (Panels::Pairs(both), Panels::Pairs(others)) => both.copy_from(shape, others, capacity, positions),
            _ => {}
        }
    }
}

/// The queries at positions `from..from + count` of `heads` heads that share a key-value head.
///
/// A query attends to its own and all earlier positions, at most `window` of them. Their keys and
/// values must have been written.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    pub heads: usize,
    pub from: usize,
    pub count: usize,
    pub window: Option<usize>,
    /// Factor of the scores before the softmax.
    pub scale: f32,
    /// Head h of query i is at `q[i · q_stride + h · key_width ..]`.
    pub q: &'a [f32],
    pub q_stride: usize,
}

/// Computes attention. The result of head h of query i goes to
/// `out[i · out_stride + h · value_width ..]`.
///
/// # Panics
/// If a position is not below the capacity, or a slice is too short.
pub fn attend(isa: Isa, kv: &KvHead, queries: &Queries<'_>, out: &mut [f32], out_stride: usize) {
    assert!(
        queries.from + queries.count <= kv.shape.capacity,
        "positions beyond the capacity"
    );
    match &kv.panels {
        Panels::F32(both) => attend_to(isa, both, kv.shape, queries, out, out_stride),
        Panels::Pairs(both) => attend_to(isa, both, kv.shape, queries, out, out_stride),
    }
}

fn attend_to<T: Terms>(
    isa: Isa,
    both: &KeysAndValues<T>,
    shape: Shape,
    queries: &Queries<'_>,
    out: &mut [f32],
    out_stride: usize,
) {
    let &Queries {
        heads,
        from,
        count,
        window,
        scale,
        q,
        q_stride,
    } = queries;
    let (key_width, value_width) = (shape.key_width, shape.value_width);
    let key_terms = key_width.div_ceil(T::TERMS);
    let mut scaled = vec![0f32; ROWS_MAX * key_width];
    let (mut scaled_room, mut scores_room) = (Vec::new(), Vec::new());
    let mut scores = Vec::new();
    let mut values = vec![0f32; ROWS_MAX * PANEL];
    // The rows of a block are consecutive (query, head) pairs.
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
        for (row, into) in scaled.chunks_exact_mut(key_width).take(rows).enumerate() {
            let (query, head) = place(row);
            for (into, x) in into
                .iter_mut()
                .zip(&q[query * q_stride + head * key_width..][..key_width])
            {
                *into = x * scale;
            }
        }
        let x = T::inputs(isa, &scaled[..rows * key_width], key_width, &mut scaled_room);
        scores.clear();
        scores.resize(rows * columns, 0f32);
        let mut panel = 0;
        while panel < columns / PANEL {
            let panels = side_by_side(rows, columns / PANEL - panel);
            let tile = Tile {
                rows,
                panels,
                k: key_terms,
                x,
                x_stride: key_terms,
                w: &both.k[(start + panel * PANEL) * key_terms..],
                w_stride: key_terms * PANEL,
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
        let x = T::inputs(isa, &scores, columns, &mut scores_room);
        let value_panels = value_width.div_ceil(PANEL);
        let mut panel = 0;
        while panel < value_panels {
            let panels = side_by_side(rows, value_panels - panel);
            let tile = Tile {
                rows,
                panels,
                k: (end - start).div_ceil(T::TERMS),
                x,
                x_stride: columns / T::TERMS,
                w: &both.v[(panel * shape.capacity + start) / T::TERMS * PANEL..],
                w_stride: shape.capacity / T::TERMS * PANEL,
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
