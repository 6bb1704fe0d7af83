//! A weight matrix, packed for products that stream it once.

use super::tile::{ROWS_MAX, Tile, Weight, side_by_side};
use super::{Isa, PANEL};

/// Terms of a sum that are added before the next rows are taken up: a panel of so many weights stays in the first cache.
const DEPTH: usize = 384;
/// Rows that share a pass over the weights of that depth.
const ROWS: usize = 8 * ROWS_MAX;

/// Weights `[outputs, inputs]` in panels of 32 outputs, `[⌈outputs/32⌉][inputs][32]`, the last one padded with zeros; bf16
/// where every value is one (half the bytes to read), else f32.
#[derive(Debug, Clone)]
pub struct Matrix {
    outputs: usize,
    inputs: usize,
    elements: Element,
}

/// One value per output, padded for the last panel.
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

/// Values of a matrix, row-major or packed.
#[derive(Debug, Clone, PartialEq)]
pub enum Element {
    F32(Vec<f32>),
    /// The bits of bf16.
    Bf16(Vec<u16>),
}

impl Matrix {
    /// Packs row-major `[outputs, inputs]`.
    ///
    /// # Panics
    /// When the length does not fit: it is checked where an image is read.
    pub fn pack(values: &Element, outputs: usize, inputs: usize) -> Self {
        let elements = match values {
            Element::F32(values) => Element::F32(panels(values, outputs, inputs)),
            Element::Bf16(values) => Element::Bf16(panels(values, outputs, inputs)),
        };
        Matrix {
            outputs,
            inputs,
            elements,
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes that a product has to read.
    pub fn bytes(&self) -> usize {
        match &self.elements {
            Element::F32(values) => values.len() * 4,
            Element::Bf16(values) => values.len() * 2,
        }
    }

    /// The weights of one output, as an embedding reads them. `output < outputs`.
    pub fn row(&self, output: usize, into: &mut [f32]) {
        let from = (output / PANEL) * PANEL * self.inputs + output % PANEL;
        match &self.elements {
            Element::F32(values) => {
                for (into, value) in into.iter_mut().zip(values[from..].iter().step_by(PANEL)) {
                    *into = *value;
                }
            }
            Element::Bf16(values) => {
                for (into, value) in into.iter_mut().zip(values[from..].iter().step_by(PANEL)) {
                    *into = f32::from_bits(u32::from(*value) << 16);
                }
            }
        }
    }

    /// `y[r] = bias + W x[r]` for every row: x `[rows, inputs]`, y `[rows, outputs]`, both dense. Without a bias sums start
    /// at 0.
    pub fn multiply(&self, isa: Isa, x: &[f32], bias: Option<&Vector>, y: &mut [f32]) {
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
        match &self.elements {
            Element::F32(w) => product(isa, w, bias, self.inputs, x, y, self.outputs),
            Element::Bf16(w) => product(isa, w, bias, self.inputs, x, y, self.outputs),
        }
    }
}

fn panels<T: Copy + Default>(values: &[T], outputs: usize, inputs: usize) -> Vec<T> {
    assert_eq!(
        values.len(),
        outputs * inputs,
        "values of a matrix [{outputs}, {inputs}]"
    );
    let mut packed = vec![T::default(); outputs.next_multiple_of(PANEL) * inputs];
    for (panel, into) in packed.chunks_exact_mut((PANEL * inputs).max(1)).enumerate() {
        let from = panel * PANEL;
        for j in 0..PANEL.min(outputs - from) {
            let row = &values[(from + j) * inputs..][..inputs];
            for (into, &value) in into[j..].iter_mut().step_by(PANEL).zip(row) {
                *into = value;
            }
        }
    }
    packed
}

/// Blocks over the depth, then over rows, then over panels, so that what is read again is still in a cache. The depth is cut
/// where the sums are stored and taken up again, which changes no bit.
fn product<W: Weight>(
    isa: Isa,
    w: &[W],
    bias: Option<&[f32]>,
    inputs: usize,
    x: &[f32],
    y: &mut [f32],
    outputs: usize,
) {
    let rows = x.len() / inputs.max(1);
    // few rows read the weights once and keep their sums in registers
    let depth_max = if rows <= ROWS_MAX { inputs.max(1) } else { DEPTH };
    let whole = outputs / PANEL;
    let mut last = [0f32; ROWS_MAX * PANEL];
    let mut from = 0;
    loop {
        let depth = (inputs - from).min(depth_max);
        for block in (0..rows).step_by(ROWS) {
            let block_rows = ROWS.min(rows - block);
            // equal shares: 16 rows are 8 + 8, not 12 + 4
            let shares = block_rows.div_ceil(ROWS_MAX);
            let mut panel = 0;
            while panel * PANEL < outputs {
                let mut row = block;
                let at_once = side_by_side(block_rows, whole.saturating_sub(panel));
                for share in 0..shares {
                    let count = (block_rows - (row - block)) / (shares - share);
                    let at = row * outputs + panel * PANEL;
                    let width = outputs - panel * PANEL;
                    let partial = width < PANEL;
                    if partial && from > 0 {
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
                        start: (from == 0).then(|| bias.map_or(ZEROS.as_slice(), |bias| &bias[panel * PANEL..])),
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

/// What the sums of as many panels as lie side by side start at, without a bias.
pub(super) const ZEROS: [f32; 4 * PANEL] = [0.0; 4 * PANEL];
