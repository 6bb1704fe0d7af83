//! The gradients of one block, in four phases: MLP by rows, attention by heads, projections by rows,
//! and after each phase the sums of its weights.

use super::Sum;
use super::workspace::{Product, Workspace, blocks};
use crate::config::ModelConfig;
use crate::exact::{ExactModel, Kept, Parameter, Pass, Rows, vector};
use crate::kernel::{self, Attention, ColumnsOf, HeadGradient, Matrix};
use crate::transformer::{Layer, Linear, Mlp, Part, Projection};
use artifact::isa::Isa;
use artifact::threads::Threads;
use std::borrow::Cow;

/// What all layers of a pass share.
pub(super) struct LayerPass<'a> {
    config: &'a ModelConfig,
    threads: &'a Threads,
    isa: Isa,
    model: &'a ExactModel,
    pass: &'a Pass,
    sequences: Vec<Sequence>,
    /// cos and −sin of every row, `[n, pairs]`: the gradient turns back.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// What a layer computed, and the gradients of its attention.
struct Block<'a> {
    input: &'a Rows,
    kept: &'a Kept,
    heads: &'a [HeadGradient],
    last: bool,
}

struct Sequence {
    /// Its first row, and its first among the rows whose logits were computed.
    row: usize,
    logit_row: usize,
    length: usize,
    /// Its positions whose logits were computed.
    logit_positions: Vec<usize>,
}

impl<'a> LayerPass<'a> {
    pub fn new(config: &'a ModelConfig, threads: &'a Threads, model: &'a ExactModel, pass: &'a Pass) -> Self {
        let (cos, mut sin) = model.rotations_of(pass);
        sin.iter_mut().for_each(|sin| *sin = -*sin);
        let (mut row, mut logit_row) = (0, 0);
        let sequences = pass.lengths.iter().map(|&length| {
            let of_it = pass.logit_rows[logit_row..].iter().take_while(|&&r| r < row + length);
            let logit_positions: Vec<usize> = of_it.map(|r| r - row).collect();
            let sequence = Sequence {
                row,
                logit_row,
                length,
                logit_positions,
            };
            row += length;
            logit_row += sequence.logit_positions.len();
            sequence
        });
        LayerPass {
            config,
            threads,
            isa: model.isa(),
            model,
            pass,
            sequences: sequences.collect(),
            cos,
            sin,
        }
    }

    /// Turns the gradient of a layer's output in the workspace into that of its input, and adds the
    /// gradients of its parameters.
    pub fn add(
        &self,
        layer: usize,
        weights: &Layer<Parameter>,
        places: &Layer<usize>,
        sums: &mut [Sum],
        workspace: &mut Workspace,
    ) {
        let kept = match &self.pass.layers[layer].parts {
            Some(parts) => Cow::Borrowed(parts),
            None => Cow::Owned(self.model.parts_again(self.threads, self.pass, layer)),
        };
        self.add_mlp(&kept, weights, places, sums, workspace);
        let heads = self.attention(layer, &kept, workspace);
        let block = Block {
            input: &self.pass.layers[layer].input,
            kept: &kept,
            heads: &heads,
            last: layer + 1 == self.pass.layers.len(),
        };
        self.add_projections(&block, weights, places, sums, workspace);
    }

    fn add_mlp(
        &self,
        kept: &Kept,
        weights: &Layer<Parameter>,
        places: &Layer<usize>,
        sums: &mut [Sum],
        w: &mut Workspace,
    ) {
        let (Mlp::Dense(mlp), Mlp::Dense(mlp_places), Some(norm)) =
            (&weights.mlp, &places.mlp, vector(&weights.post_norm))
        else {
            return;
        };
        let (isa, eps) = (self.isa, self.config.rms_norm_eps as f32);
        let (middle, gate, up) = (kept.part(Part::Middle), kept.part(Part::Gate), kept.part(Part::Up));
        let (rows, d, inner) = (middle.len(), middle.width(), gate.width());
        let attended_width = kept.part(Part::Attended).width();
        let stream = &w.stream;
        let jobs = blocks(
            rows,
            [
                (&mut w.gated, inner),
                (&mut w.gate, inner),
                (&mut w.up, inner),
                (&mut w.normed, d),
                (&mut w.middle, d),
                (&mut w.attended, attended_width),
            ],
        );
        let norms = self
            .threads
            .map(jobs, |(row, [d_gated, d_gate, d_up, normed, d_middle, d_attended])| {
                let count = d_middle.len() / d;
                let d_y = &stream[row * d..][..count * d];
                let x = rows_of(middle, row, count);
                multiply(isa, &mlp.down, d_y, d_gated);
                d_gate.copy_from_slice(rows_of(gate, row, count));
                d_up.copy_from_slice(rows_of(up, row, count));
                kernel::swiglu_gradient(isa, d_gate, d_up, d_gated);
                multiply(isa, &mlp.gate, d_gate, d_middle);
                add_product(isa, &mlp.up, d_up, d_middle);
                normed.copy_from_slice(x);
                kernel::rms_norm(isa, normed, norm.values(), eps);
                let mut d_norm = vec![0.0; d];
                kernel::rms_norm_gradient(isa, x, norm.values(), eps, d_middle, &mut d_norm);
                kernel::add(isa, d_middle, d_y);
                multiply(isa, &weights.output, d_middle, d_attended);
                d_norm
            });
        add_all(isa, &mut sums[places.post_norm], norms.iter().map(Vec::as_slice));
        let attended = kept.part(Part::Attended).values();
        self.add_linears(
            rows,
            [
                (&mlp_places.down, &w.stream, &w.gated),
                (&mlp_places.gate, &w.gate, &w.normed),
                (&mlp_places.up, &w.up, &w.normed),
                (&places.output, &w.middle, attended),
            ],
            sums,
            w,
        );
    }

    /// The gradients of every key-value head of every sequence, sequence by sequence.
    fn attention(&self, layer: usize, kept: &Kept, workspace: &Workspace) -> Vec<HeadGradient> {
        let c = self.config;
        let (width, kv_heads) = (c.head_dim as usize, c.num_key_value_heads as usize);
        let heads = c.num_attention_heads as usize / kv_heads;
        let part = |part| -> &Rows { kept.part(part) };
        let (q, k, v, out) = (
            part(Part::Query),
            part(Part::Key),
            part(Part::Value),
            part(Part::Attended),
        );
        let last = layer + 1 == self.pass.layers.len();
        let all: Vec<usize> = (0..self.pass.lengths.iter().copied().max().unwrap_or(0)).collect();
        let jobs = self
            .sequences
            .iter()
            .flat_map(|s| (0..kv_heads).map(move |head| (s, head)));
        self.threads.map(jobs.collect(), |(s, head): (&Sequence, usize)| {
            let (queries, out_row) = match last {
                true => (s.logit_positions.as_slice(), s.logit_row),
                false => (&all[..s.length], s.row),
            };
            let out_at = out_row * out.width() + head * heads * width;
            let kv_at = s.row * k.width() + head * width;
            let attention = Attention {
                heads,
                width,
                length: s.length,
                window: c.window(layer as i64).map(|window| window as usize),
                scale: c.attention_scale() as f32,
                queries,
                q: &q.values()[s.row * q.width() + head * heads * width..],
                q_stride: q.width(),
                k: &k.values()[kv_at..],
                v: &v.values()[kv_at..],
                kv_stride: k.width(),
                out: out.values().get(out_at..).unwrap_or_default(),
                d_out: workspace.attended.get(out_at..).unwrap_or_default(),
                out_stride: out.width(),
            };
            workspace
                .rooms
                .lend(|room| kernel::attention_gradient(self.isa, room, &attention))
        })
    }

    fn add_projections(
        &self,
        block: &Block<'_>,
        weights: &Layer<Parameter>,
        places: &Layer<usize>,
        sums: &mut [Sum],
        w: &mut Workspace,
    ) {
        let &Block {
            input,
            kept,
            heads,
            last,
        } = block;
        let (Projection::Heads { q, k, v, norms }, Some(norm)) = (&weights.projection, vector(&weights.input_norm))
        else {
            return;
        };
        let Projection::Heads {
            q: q_place,
            k: k_place,
            v: v_place,
            norms: norm_places,
        } = &places.projection
        else {
            return;
        };
        let (isa, eps) = (self.isa, self.config.rms_norm_eps as f32);
        let (rows, d) = (input.len(), input.width());
        let (q_width, kv_width) = (kept.part(Part::Query).width(), kept.part(Part::Key).width());
        let head = self.config.head_dim as usize;
        let middle = &w.middle;
        let jobs = blocks(
            rows,
            [
                (&mut w.q, q_width),
                (&mut w.k, kv_width),
                (&mut w.v, kv_width),
                (&mut w.normed, d),
                (&mut w.stream, d),
            ],
        );
        let norm_parts = self.threads.map(jobs, |(row, [d_q, d_k, d_v, normed, d_x])| {
            let count = d_x.len() / d;
            let x = rows_of(input, row, count);
            self.gather(heads, row, [&mut *d_q, &mut *d_k, &mut *d_v]);
            let mut d_norms = [vec![0.0; d], vec![0.0; head], vec![0.0; head]];
            let sides = [
                (&mut *d_q, Part::QueryBeforeNorm, norms.as_ref().map(|norms| &norms.0)),
                (&mut *d_k, Part::KeyBeforeNorm, norms.as_ref().map(|norms| &norms.1)),
            ];
            for ((side, before, norm), d_norm) in sides.into_iter().zip(&mut d_norms[1..]) {
                self.turn_back(row, count, side);
                if let Some(norm) = norm.and_then(vector) {
                    let before = rows_of(kept.part(before), row, count);
                    kernel::rms_norm_gradient(isa, before, norm.values(), eps, side, d_norm);
                }
            }
            multiply(isa, q, d_q, d_x);
            add_product(isa, k, d_k, d_x);
            add_product(isa, v, d_v, d_x);
            normed.copy_from_slice(x);
            kernel::rms_norm(isa, normed, norm.values(), eps);
            kernel::rms_norm_gradient(isa, x, norm.values(), eps, d_x, &mut d_norms[0]);
            if !last {
                kernel::add(isa, d_x, &middle[row * d..][..count * d]);
            }
            d_norms
        });
        if last {
            for (&row, gradient) in self.pass.logit_rows.iter().zip(w.middle.chunks_exact(d)) {
                kernel::add(isa, &mut w.stream[row * d..][..d], gradient);
            }
        }
        let nth = |n: usize| norm_parts.iter().map(move |parts| parts[n].as_slice());
        add_all(isa, &mut sums[places.input_norm], nth(0));
        if let Some((q_norm, k_norm)) = norm_places {
            add_all(isa, &mut sums[*q_norm], nth(1));
            add_all(isa, &mut sums[*k_norm], nth(2));
        }
        self.add_linears(
            rows,
            [
                (q_place, &w.q, &w.normed),
                (k_place, &w.k, &w.normed),
                (v_place, &w.v, &w.normed),
            ],
            sums,
            w,
        );
    }

    /// Copies the heads' gradients of the rows from `row` on: of queries, keys and values.
    fn gather(&self, heads: &[HeadGradient], row: usize, [d_q, d_k, d_v]: [&mut [f32]; 3]) {
        let kv_heads = self.config.num_key_value_heads as usize;
        let (q_width, width) = (
            self.config.num_attention_heads as usize / kv_heads * self.config.head_dim as usize,
            self.config.head_dim as usize,
        );
        let rows = d_q
            .chunks_exact_mut(kv_heads * q_width)
            .zip(d_k.chunks_exact_mut(kv_heads * width))
            .zip(d_v.chunks_exact_mut(kv_heads * width));
        let mut sequence = self.sequences.partition_point(|s| s.row + s.length <= row);
        for (row, ((d_q, d_k), d_v)) in (row..).zip(rows) {
            while row >= self.sequences[sequence].row + self.sequences[sequence].length {
                sequence += 1;
            }
            let position = row - self.sequences[sequence].row;
            for (head, gradient) in heads[sequence * kv_heads..][..kv_heads].iter().enumerate() {
                d_q[head * q_width..][..q_width].copy_from_slice(&gradient.q[position * q_width..][..q_width]);
                d_k[head * width..][..width].copy_from_slice(&gradient.k[position * width..][..width]);
                d_v[head * width..][..width].copy_from_slice(&gradient.v[position * width..][..width]);
            }
        }
    }

    /// Turns every head of `count` rows from `row` on back by the row's position.
    fn turn_back(&self, row: usize, count: usize, side: &mut [f32]) {
        let head = self.config.head_dim as usize;
        let pairs = self.cos.len() / self.pass.ids.len();
        let width = side.len() / count;
        for (row, values) in (row..).zip(side.chunks_exact_mut(width)) {
            let (cos, sin) = (&self.cos[row * pairs..][..pairs], &self.sin[row * pairs..][..pairs]);
            for values in values.chunks_exact_mut(head) {
                kernel::rotate(self.isa, &mut values[..2 * pairs], cos, sin);
            }
        }
    }

    /// Adds the gradients of linear maps, from the gradients of their outputs and their inputs.
    fn add_linears<const N: usize>(
        &self,
        rows: usize,
        linears: [(&Linear<usize>, &[f32], &[f32]); N],
        sums: &mut [Sum],
        workspace: &Workspace,
    ) {
        for (linear, d_y, _) in linears {
            if let Some(sums) = linear.bias.and_then(|bias| sums[bias].values_mut()) {
                for d_y in d_y.chunks_exact(sums.len()) {
                    kernel::add(self.isa, sums, d_y);
                }
            }
        }
        let Ok(weights) = sums.get_disjoint_mut(linears.map(|(linear, ..)| linear.weight)) else {
            return;
        };
        let products = weights.into_iter().zip(linears).filter_map(|(sum, (_, d_y, x))| {
            Some(Product {
                rows,
                a: ColumnsOf::all(d_y, d_y.len() / rows),
                b: ColumnsOf::all(x, x.len() / rows),
                sums: sum.values_mut()?,
            })
        });
        workspace.rooms.add(self.threads, self.isa, products.collect());
    }
}

fn rows_of(rows: &Rows, first: usize, count: usize) -> &[f32] {
    &rows.values()[first * rows.width()..][..count * rows.width()]
}

fn matrix(linear: &Linear<Parameter>) -> Option<&Matrix> {
    match &linear.weight {
        Parameter::Matrix(matrix) => Some(matrix),
        Parameter::Vector(_) => None,
    }
}

/// y = x W, where `linear` holds the transpose.
fn multiply(isa: Isa, linear: &Linear<Parameter>, x: &[f32], y: &mut [f32]) {
    if let Some(matrix) = matrix(linear) {
        matrix.multiply(isa, &Threads::ONE, x, None, y);
    }
}

fn add_product(isa: Isa, linear: &Linear<Parameter>, x: &[f32], y: &mut [f32]) {
    if let Some(matrix) = matrix(linear) {
        matrix.add_product(isa, x, y);
    }
}

/// Adds the parts of a sum in their order.
fn add_all<'a>(isa: Isa, sum: &mut Sum, parts: impl Iterator<Item = &'a [f32]>) {
    if let Some(sums) = sum.values_mut() {
        parts.for_each(|part| kernel::add(isa, sums, part));
    }
}
