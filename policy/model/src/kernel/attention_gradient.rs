//! The gradient of [`super::attend`] in f32.
//!
//! Scores are computed again from queries and keys, so that memory does not grow with the square of
//! a sequence (Dao et al. 2022). With P = softmax(S), S = scale · Q Kᵀ and O = P V:
//! dV = Pᵀ dO, dP = dO Vᵀ, dS = P · (dP − rowsum(dO · O)), dQ = scale · dS K, dK = scale · dSᵀ Q.
//! Every sum has one order: over a head's width, over positions, or over queries, as they come.

use super::columns::{ColumnsOf, Room, add_products_of_columns};
use super::matrix::ZEROS;
use super::tile::{ROWS_MAX, Tile, side_by_side};
use super::{Isa, PANEL, dot, softmax, softmax_gradient};

/// Rows, that is queries times heads, whose probabilities are in memory at once.
const ROWS: usize = 4 * ROWS_MAX;

/// What one key-value head of one sequence computed. Slices begin at its first value, and strides
/// are distances between rows.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Query heads that share it.
    pub heads: usize,
    pub width: usize,
    /// The sequence's length.
    pub length: usize,
    pub window: Option<usize>,
    pub scale: f32,
    /// Positions with a gradient, ascending.
    pub queries: &'a [usize],
    /// `[length][heads · width]`.
    pub q: &'a [f32],
    pub q_stride: usize,
    /// `[length][width]`.
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub kv_stride: usize,
    /// The result and its gradient, `[queries][heads · width]`.
    pub out: &'a [f32],
    pub d_out: &'a [f32],
    pub out_stride: usize,
}

/// The gradients of a key-value head, and of the query heads that share it.
#[derive(Debug)]
pub struct HeadGradient {
    /// `[length][heads · width]`; 0 where no query was given.
    pub q: Vec<f32>,
    /// `[length][width]`.
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

/// Keys and values in panels, padded to whole ones.
struct Panels {
    /// `[positions/32][width][32]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[width/32][positions][32]`.
    key_columns: Vec<f32>,
    positions: usize,
}

impl Panels {
    fn new(a: &Attention<'_>) -> Self {
        let positions = a.length.next_multiple_of(PANEL);
        let columns = a.width.next_multiple_of(PANEL);
        let by_position = |x: &[f32]| {
            let mut panels = vec![0.0; positions * a.width];
            for position in 0..a.length {
                let at = position / PANEL * PANEL * a.width + position % PANEL;
                let row = &x[position * a.kv_stride..][..a.width];
                for (into, x) in panels[at..].iter_mut().step_by(PANEL).zip(row) {
                    *into = *x;
                }
            }
            panels
        };
        let mut key_columns = vec![0.0; positions * columns];
        for position in 0..a.length {
            let row = &a.k[position * a.kv_stride..][..a.width];
            for (panel, x) in row.chunks(PANEL).enumerate() {
                key_columns[(panel * positions + position) * PANEL..][..x.len()].copy_from_slice(x);
            }
        }
        Panels {
            keys: by_position(a.k),
            values: by_position(a.v),
            key_columns,
            positions,
        }
    }
}

/// Rows times panels `[panels][k][32]`. `x` and `y` have the distance between their rows.
fn products(
    isa: Isa,
    rows: usize,
    k: usize,
    (x, x_stride): (&[f32], usize),
    w: &[f32],
    (y, y_stride): (&mut [f32], usize),
) {
    let panels_all = w.len() / (k * PANEL);
    let mut panel = 0;
    while panel < panels_all {
        let panels = side_by_side(rows, panels_all - panel);
        let tile = Tile {
            rows,
            panels,
            k,
            x,
            x_stride,
            w: &w[panel * k * PANEL..],
            w_stride: k * PANEL,
            start: Some(&ZEROS),
            y: &mut y[panel * PANEL..],
            y_stride,
        };
        tile.run(isa);
        panel += panels;
    }
}

/// Computes the gradients of a key-value head.
///
/// # Panics
/// If a slice is too short, or a position is not below the length.
pub fn attention_gradient(isa: Isa, room: &mut Room, a: &Attention<'_>) -> HeadGradient {
    let (width, heads) = (a.width, a.heads);
    let panels = Panels::new(a);
    let mut gradient = HeadGradient {
        q: vec![0.0; a.length * heads * width],
        k: vec![0.0; a.length * width],
        v: vec![0.0; a.length * width],
    };
    let place = |row: usize| (row / heads, row % heads);
    let rows_all = a.queries.len() * heads;
    let reach = |position: usize| a.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let (mut q, mut d_out) = (vec![0.0; ROWS * width], vec![0.0; ROWS * width]);
    let (mut p, mut dp) = (Vec::new(), Vec::new());
    let d_columns = width.next_multiple_of(PANEL);
    let mut d_q = vec![0.0; ROWS_MAX * d_columns];
    for block in (0..rows_all).step_by(ROWS) {
        let rows = ROWS.min(rows_all - block);
        let start = reach(a.queries[place(block).0]) / PANEL * PANEL;
        let end = a.queries[place(block + rows - 1).0] + 1;
        let columns = end.next_multiple_of(PANEL) - start;
        for (row, (q, d_out)) in q
            .chunks_exact_mut(width)
            .zip(d_out.chunks_exact_mut(width))
            .take(rows)
            .enumerate()
        {
            let (query, head) = place(block + row);
            let from = &a.q[a.queries[query] * a.q_stride + head * width..][..width];
            for (into, x) in q.iter_mut().zip(from) {
                *into = x * a.scale;
            }
            d_out.copy_from_slice(&a.d_out[query * a.out_stride + head * width..][..width]);
        }
        p.clear();
        p.resize(rows * columns, 0.0);
        dp.clear();
        dp.resize(rows * columns, 0.0);
        for first in (0..rows).step_by(ROWS_MAX) {
            let count = ROWS_MAX.min(rows - first);
            let tile_end = a.queries[place(block + first + count - 1).0] + 1;
            let reached = tile_end.next_multiple_of(PANEL);
            let (p, dp) = (&mut p[first * columns..], &mut dp[first * columns..]);
            let range = start * width..reached * width;
            let (keys, values) = (&panels.keys[range.clone()], &panels.values[range]);
            products(isa, count, width, (&q[first * width..], width), keys, (p, columns));
            products(
                isa,
                count,
                width,
                (&d_out[first * width..], width),
                values,
                (dp, columns),
            );
            for row in 0..count {
                let (query, head) = place(block + first + row);
                let position = a.queries[query];
                let (low, high) = (reach(position) - start, position + 1 - start);
                let p = &mut p[row * columns..][..columns];
                let dp = &mut dp[row * columns..][..columns];
                p[..low].fill(f32::NEG_INFINITY);
                p[high..].fill(0.0);
                dp[high..].fill(0.0);
                let sum = softmax(isa, &mut p[..high]);
                let out = &a.out[query * a.out_stride + head * width..][..width];
                let mean = dot(isa, out, &d_out[(first + row) * width..][..width]);
                softmax_gradient(isa, &mut p[..high], &mut dp[..high], sum, mean);
            }
            for (panel, w) in panels.key_columns.chunks_exact(panels.positions * PANEL).enumerate() {
                let w = &w[start * PANEL..tile_end * PANEL];
                let into = (&mut d_q[panel * PANEL..], d_columns);
                products(isa, count, tile_end - start, (dp, columns), w, into);
            }
            for (row, d_q) in d_q.chunks_exact(d_columns).take(count).enumerate() {
                let (query, head) = place(block + first + row);
                let into = &mut gradient.q[(a.queries[query] * heads + head) * width..][..width];
                for (into, x) in into.iter_mut().zip(d_q) {
                    *into = x * a.scale;
                }
            }
        }
        let of = |values| ColumnsOf {
            values,
            stride: columns,
            first: 0,
            count: end - start,
        };
        let reached = start * width..end * width;
        let d_out = ColumnsOf::all(&d_out, width);
        add_products_of_columns(isa, room, 0..rows, of(&p), d_out, &mut gradient.v[reached.clone()]);
        add_products_of_columns(
            isa,
            room,
            0..rows,
            of(&dp),
            ColumnsOf::all(&q, width),
            &mut gradient.k[reached],
        );
    }
    gradient
}
