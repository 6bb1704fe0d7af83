//! Weight matrices, packed so that a product reads them once and in order.

use bytemuck::Pod;

use super::tile::{ROWS_MAX, Tile, Weight, side_by_side};
use super::{Compute, Isa, PANEL, Terms, Threads};
use artifact::memory::Buffer;

/// Terms that are added before the next rows. A panel of this depth stays in the L1 cache.
const DEPTH: usize = 384;
/// Rows that are multiplied with a panel of that depth before the next panel is read.
const ROWS: usize = 8 * ROWS_MAX;

/// Weights `[outputs, inputs]` in panels of 32 outputs: `[⌈outputs/32⌉][inputs][32]`, padded with
/// zeros.
#[derive(Debug, Clone)]
pub struct Matrix {
    outputs: usize,
    inputs: usize,
    packed: Packed,
}

#[derive(Debug, Clone)]
enum Packed {
    F32(Buffer<f32>),
    /// The bits of bf16.
    Bf16(Buffer<u16>),
    /// Pairs for bf16 products, `[⌈outputs/32⌉][⌈inputs/2⌉][32]`. The even input is in the lower
    /// half.
    Pairs(Buffer<u32>),
}

/// What the sums of a product start at.
#[derive(Clone, Copy)]
enum Start<'a> {
    /// Zero, or a bias.
    Bias(Option<&'a [f32]>),
    /// The values in y.
    Y,
}

/// One value per output, padded to whole panels.
#[derive(Debug, Clone)]
pub struct Vector {
    padded: Vec<f32>,
    len: usize,
}

impl Vector {
    pub fn new(values: &[f32]) -> Self {
        let mut padded = values.to_vec();
        padded.resize(values.len().next_multiple_of(PANEL), 0.0);
        Vector {
            padded,
            len: values.len(),
        }
    }

    pub fn values(&self) -> &[f32] {
        &self.padded[..self.len]
    }
}

/// The values of a matrix, row-major.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Element<'a> {
    F32(&'a [f32]),
    /// The little-endian bytes of bf16.
    Bf16(&'a [[u8; 2]]),
}

impl Matrix {
    /// Packs row-major `[outputs, inputs]`. With [`Compute::F32`] values keep their dtype, with
    /// [`Compute::Bf16`] they are rounded to bf16.
    ///
    /// # Panics
    /// If the number of values is not `outputs · inputs`. Loading a checkpoint checks that first.
    pub fn pack(values: Element<'_>, outputs: usize, inputs: usize, compute: Compute, threads: &Threads) -> Self {
        let size = (outputs, inputs);
        let pair = |low: u32, high: Option<u32>| low | high.unwrap_or(0) << 16;
        let bits = |&[low, high]: &[u8; 2]| u16::from_le_bytes([low, high]);
        let flushed = |value: &[u8; 2]| super::bf16(widen(bits(value))); // subnormals become 0
        let packed = match (compute, values) {
            (Compute::F32, Element::F32(w)) => Packed::F32(panels::<_, _, 1>(threads, w, size, |w| w[0])),
            (Compute::F32, Element::Bf16(w)) => Packed::Bf16(panels::<_, _, 1>(threads, w, size, |w| bits(&w[0]))),
            (Compute::Bf16, Element::F32(w)) => Packed::Pairs(panels::<_, _, 2>(threads, w, size, |w| {
                pair(super::bf16(w[0]), w.get(1).map(|&high| super::bf16(high)))
            })),
            (Compute::Bf16, Element::Bf16(w)) => Packed::Pairs(panels::<_, _, 2>(threads, w, size, |w| {
                pair(flushed(&w[0]), w.get(1).map(flushed))
            })),
        };
        Matrix {
            outputs,
            inputs,
            packed,
        }
    }

    /// Packs the transpose of row-major `[outputs, inputs]`, for products with the gradient of outputs.
    /// Values keep their dtype.
    ///
    /// # Panics
    /// As [`Matrix::pack`].
    pub fn pack_transposed(values: Element<'_>, outputs: usize, inputs: usize, threads: &Threads) -> Self {
        let size = (outputs, inputs);
        Matrix {
            outputs: inputs,
            inputs: outputs,
            packed: match values {
                Element::F32(w) => Packed::F32(transposed_panels(threads, w, size, |w| *w)),
                Element::Bf16(w) => Packed::Bf16(transposed_panels(threads, w, size, |&w| u16::from_le_bytes(w))),
            },
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Copies the weights of one output, `[inputs]`, as an embedding does. `output < outputs`.
    pub fn row(&self, output: usize, into: &mut [f32]) {
        let from = |inputs: usize| (output / PANEL) * PANEL * inputs + output % PANEL;
        fn copy<T: Copy>(into: &mut [f32], values: &[T], widened: impl Fn(T) -> f32) {
            for (into, value) in into.iter_mut().zip(values.iter().step_by(PANEL)) {
                *into = widened(*value);
            }
        }
        match &self.packed {
            Packed::F32(values) => copy(into, &values[from(self.inputs)..], |value| value),
            Packed::Bf16(values) => copy(into, &values[from(self.inputs)..], widen),
            Packed::Pairs(values) => {
                let pairs = values[from(self.inputs.div_ceil(2))..].iter().step_by(PANEL);
                for (into, pair) in into.chunks_mut(2).zip(pairs) {
                    for (into, bits) in into.iter_mut().zip([pair << 16, pair & 0xffff_0000]) {
                        *into = f32::from_bits(bits);
                    }
                }
            }
        }
    }

    /// `y[r] = bias + W x[r]` for every row: x `[rows, inputs]`, y `[rows, outputs]`. Without a
    /// bias sums start at 0.
    ///
    /// # Panics
    /// If the lengths of `x`, `y` and `bias` do not fit the matrix.
    pub fn multiply(&self, isa: Isa, threads: &Threads, x: &[f32], bias: Option<&Vector>, y: &mut [f32]) {
        let rows = x.len() / self.inputs.max(1);
        assert_eq!(x.len(), rows * self.inputs, "x is whole rows of {} inputs", self.inputs);
        assert_eq!(
            y.len(),
            rows * self.outputs,
            "y has {} outputs for each of {rows} rows",
            self.outputs
        );
        assert!(bias.is_none_or(|bias| bias.len == self.outputs), "one bias per output");
        let bias = bias.map(|bias| bias.padded.as_slice());
        match &self.packed {
            Packed::F32(w) => self.multiply_packed(isa, threads, w, bias, x, y),
            Packed::Bf16(w) => self.multiply_packed(isa, threads, w, bias, x, y),
            Packed::Pairs(w) => self.multiply_packed(isa, threads, w, bias, x, y),
        }
    }

    /// `y[r] += W x[r]` for every row, on the caller's thread. Not for bf16 products.
    ///
    /// # Panics
    /// If the lengths of `x` and `y` do not fit the matrix.
    pub fn add_product(&self, isa: Isa, x: &[f32], y: &mut [f32]) {
        assert_eq!(
            x.len() * self.outputs,
            y.len() * self.inputs,
            "x and y have the same rows"
        );
        match &self.packed {
            Packed::F32(w) => product(isa, w, Start::Y, self.inputs, x, y, self.outputs),
            Packed::Bf16(w) => product(isa, w, Start::Y, self.inputs, x, y, self.outputs),
            Packed::Pairs(_) => unreachable!("gradients are not computed with bf16 products"),
        }
    }

    /// Threads share many rows by rows, and few rows by panels.
    fn multiply_packed<W: Terms>(
        &self,
        isa: Isa,
        threads: &Threads,
        w: &[W],
        bias: Option<&[f32]>,
        x: &[f32],
        y: &mut [f32],
    ) {
        let (outputs, inputs) = (self.outputs, self.inputs.div_ceil(W::TERMS));
        let mut rounded = Vec::new();
        let x = W::inputs(isa, x, self.inputs, &mut rounded);
        let rows = y.len() / outputs.max(1);
        let panels = outputs.div_ceil(PANEL);
        let parts = threads.parts(rows * inputs * outputs);
        if parts == 1 || rows * panels <= 1 {
            product(isa, w, Start::Bias(bias), inputs, x, y, outputs);
            return;
        }
        if rows >= threads.count() * ROWS {
            // As many blocks for each thread, so that none waits for another's last one.
            let per_thread = (rows / threads.count() / ROWS).clamp(1, parts.div_ceil(threads.count()));
            let share = rows.div_ceil(per_thread * threads.count());
            let jobs = x.chunks(share * inputs).zip(y.chunks_mut(share * outputs)).collect();
            threads.each(jobs, |(x, y): (&[W::Input], &mut [f32])| {
                product(isa, w, Start::Bias(bias), inputs, x, y, outputs);
            });
            return;
        }
        let share = panels.div_ceil(parts);
        let of_panels = |part: usize, y: &mut [f32]| {
            let first = part * share * PANEL;
            let bias = bias.map(|bias| &bias[first..]);
            product(
                isa,
                &w[first * inputs..],
                Start::Bias(bias),
                inputs,
                x,
                y,
                y.len() / rows,
            );
        };
        if rows == 1 {
            let jobs = y.chunks_mut(share * PANEL).enumerate().collect();
            threads.each(jobs, |(part, y): (usize, &mut [f32])| of_panels(part, y));
            return;
        }
        // A share's outputs are not contiguous in y, so it gets a buffer of its own.
        let width = |part: usize| (share * PANEL).min(outputs - part * share * PANEL);
        let mut results: Vec<Vec<f32>> = (0..panels.div_ceil(share))
            .map(|part| vec![0.0; rows * width(part)])
            .collect();
        let jobs = results.iter_mut().enumerate().collect();
        threads.each(jobs, |(part, y): (usize, &mut Vec<f32>)| of_panels(part, y));
        for (part, result) in results.iter().enumerate() {
            for (y, result) in y.chunks_exact_mut(outputs).zip(result.chunks_exact(width(part))) {
                y[part * share * PANEL..][..result.len()].copy_from_slice(result);
            }
        }
    }
}

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Packed elements of a row before the next row. A panel's block of this size stays in the L1
/// cache.
const PACKED_AT_ONCE: usize = 128;
/// Panels in one packing job.
const PANELS_AT_ONCE: usize = 8;

/// Packs panels. `packed` converts each TERMS values of a row; a row's last call may get fewer.
fn panels<S: Sync, T: Pod + Default + Send, const TERMS: usize>(
    threads: &Threads,
    values: &[S],
    (outputs, inputs): (usize, usize),
    packed: impl Fn(&[S]) -> T + Sync,
) -> Buffer<T> {
    assert_eq!(
        values.len(),
        outputs * inputs,
        "values of a matrix [{outputs}, {inputs}]"
    );
    let depth = inputs.div_ceil(TERMS);
    let mut out = Buffer::unset(outputs.next_multiple_of(PANEL) * depth);
    let panel_values = (PANEL * depth).max(1);
    let pack_panel = |panel: usize, out: &mut [T]| {
        let from = panel * PANEL;
        let rows = PANEL.min(outputs - from);
        if rows < PANEL {
            out.fill(T::default());
        }
        for (n, block) in out.chunks_mut(PACKED_AT_ONCE * PANEL).enumerate() {
            for j in 0..rows {
                let row = &values[(from + j) * inputs..][..inputs];
                let terms = row[n * PACKED_AT_ONCE * TERMS..].chunks(TERMS);
                for (into, terms) in block[j..].iter_mut().step_by(PANEL).zip(terms) {
                    *into = packed(terms);
                }
            }
        }
    };
    let jobs = out.chunks_mut(PANELS_AT_ONCE * panel_values).enumerate().collect();
    threads.each(jobs, |(n, some): (usize, &mut [T])| {
        for (panel, out) in some.chunks_exact_mut(panel_values).enumerate() {
            pack_panel(n * PANELS_AT_ONCE + panel, out);
        }
    });
    out
}

/// Packs panels of the transpose: a panel's row is 32 neighbors of a row of `values`.
fn transposed_panels<S: Sync, T: Pod + Default + Send>(
    threads: &Threads,
    values: &[S],
    (outputs, inputs): (usize, usize),
    packed: impl Fn(&S) -> T + Sync,
) -> Buffer<T> {
    assert_eq!(
        values.len(),
        outputs * inputs,
        "values of a matrix [{outputs}, {inputs}]"
    );
    let mut out = Buffer::unset(inputs.next_multiple_of(PANEL) * outputs);
    let jobs = out.chunks_mut((PANEL * outputs).max(1)).enumerate().collect();
    threads.each(jobs, |(panel, out): (usize, &mut [T])| {
        let from = panel * PANEL;
        let width = PANEL.min(inputs - from);
        for (into, row) in out.chunks_exact_mut(PANEL).zip(values.chunks_exact(inputs)) {
            for (into, value) in into.iter_mut().zip(&row[from..][..width]) {
                *into = packed(value);
            }
            into[width..].fill(T::default());
        }
    });
    out
}

/// Loops over blocks of the depth, then of rows, then over panels, so that repeated reads hit a
/// cache. Between blocks of the depth the sums are stored in y and loaded again, which changes no
/// bit.
fn product<W: Weight>(
    isa: Isa,
    w: &[W],
    start: Start<'_>,
    inputs: usize,
    x: &[W::Input],
    y: &mut [f32],
    outputs: usize,
) {
    let rows = y.len() / outputs.max(1);
    // Few rows read the weights once and keep their sums in registers.
    let depth_max = match rows <= ROWS_MAX {
        true => inputs.max(1),
        false => DEPTH / W::TERMS,
    };
    let full_panels = outputs / PANEL;
    let mut last = [0f32; ROWS_MAX * PANEL];
    let mut from = 0;
    loop {
        let depth = (inputs - from).min(depth_max);
        for block in (0..rows).step_by(ROWS) {
            let block_rows = ROWS.min(rows - block);
            // Tiles of equal size: 16 rows are 8 + 8, not 12 + 4.
            let shares = block_rows.div_ceil(ROWS_MAX);
            let mut panel = 0;
            while panel * PANEL < outputs {
                let mut row = block;
                let at_once = side_by_side(block_rows, full_panels.saturating_sub(panel));
                for share in 0..shares {
                    let count = (block_rows - (row - block)) / (shares - share);
                    let at = row * outputs + panel * PANEL;
                    let width = outputs - panel * PANEL;
                    let partial = width < PANEL;
                    let start = match start {
                        Start::Bias(bias) if from == 0 => {
                            Some(bias.map_or(ZEROS.as_slice(), |bias| &bias[panel * PANEL..]))
                        }
                        _ => None,
                    };
                    if partial && start.is_none() {
                        for r in 0..count {
                            last[r * PANEL..][..width].copy_from_slice(&y[at + r * outputs..][..width]);
                        }
                    }
                    let tile = Tile {
                        rows: count,
                        panels: at_once,
                        k: depth,
                        x: &x[row * inputs + from..],
                        x_stride: inputs,
                        w: &w[(panel * inputs + from) * PANEL..],
                        w_stride: inputs * PANEL,
                        start,
                        y: if partial { &mut last } else { &mut y[at..] },
                        y_stride: if partial { PANEL } else { outputs },
                    };
                    tile.run(isa);
                    if partial {
                        for r in 0..count {
                            y[at + r * outputs..][..width].copy_from_slice(&last[r * PANEL..][..width]);
                        }
                    }
                    row += count;
                }
                panel += at_once;
            }
        }
        from += depth;
        if from >= inputs {
            return;
        }
    }
}

/// The start of the sums of up to four panels without a bias.
pub(super) const ZEROS: [f32; 4 * PANEL] = [0.0; 4 * PANEL];
