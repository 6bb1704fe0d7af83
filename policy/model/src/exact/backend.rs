//! The transformer's operations, computed by the exact kernels.

use super::cache::KvCache;
use super::rows::{Kept, Rows};
use super::{ExactModel, Machine, Parameter};
use crate::config::{Experts, ModelConfig, Rotations, Scoring};
use crate::kernel::{self, KvHead, Queries, Vector};
use crate::router::{self, Disagreement, Mismatch, Routing};
use crate::transformer::{Backend, Linear, Part, Route};
use artifact::isa::Isa;
use artifact::threads::Threads;
use std::collections::BTreeMap;

/// Rows of a pass that are consecutive positions of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    slot: usize,
    /// The first row, counted over the whole pass.
    row: usize,
    /// The position of that row in the sequence.
    from: usize,
    count: usize,
}

impl Segment {
    /// The segment whose rows follow those of `before`.
    pub fn after(before: Option<&Segment>, slot: usize, from: usize, count: usize) -> Self {
        let row = before.map_or(0, |before| before.row + before.count);
        Segment { slot, row, from, count }
    }

    pub fn last_row(&self) -> usize {
        self.row + self.count - 1
    }
}

/// Where a pass stores keys and values.
#[derive(Debug)]
pub(super) enum KvStorage<'a> {
    Cache(&'a mut KvCache),
    /// Room for one layer of one sequence. The next sequence overwrites it.
    Scratch(Vec<KvHead>),
}

impl KvStorage<'_> {
    fn heads_mut(&mut self, segment: &Segment, layer: i64) -> &mut [KvHead] {
        match self {
            KvStorage::Cache(cache) => cache.layer_heads_mut(segment.slot, layer as usize),
            KvStorage::Scratch(heads) => heads,
        }
    }

    fn heads(&self, segment: &Segment, layer: i64) -> &[KvHead] {
        match self {
            KvStorage::Cache(cache) => cache.layer_heads(segment.slot, layer as usize),
            KvStorage::Scratch(heads) => heads,
        }
    }
}

/// The cost of an exponential, in multiply-adds.
const EXP_WORK: usize = 32;
/// The cost of a value of a norm, a rotation or a sum, in multiply-adds.
const VALUE_WORK: usize = 8;
/// Queries per job when threads share attention. Late queries cost more than early ones, so jobs
/// are small.
const QUERIES: usize = 32;

/// Attention of some queries to one key-value head, and the result's place in the output.
struct Job<'a> {
    kv: &'a KvHead,
    queries: Queries<'a>,
    row: usize,
    column: usize,
    values: Vec<f32>,
}

/// The state of one pass.
#[derive(Debug)]
pub(super) struct ExactBackend<'a> {
    config: &'a ModelConfig,
    rotations: &'a Rotations,
    /// cos and sin of every row, `[rows, pairs]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
    isa: Isa,
    threads: &'a Threads,
    store: KvStorage<'a>,
    segments: Vec<Segment>,
    /// The rows whose logits are needed.
    logit_rows: Vec<usize>,
    /// The experts to use instead of choosing.
    replay: Option<&'a Routing>,
    /// Layers of `replay` used so far.
    replayed: usize,
    routing: Routing,
    disagreements: BTreeMap<i64, Disagreement>,
    mismatch: Option<Mismatch>,
    /// What the present layer computed, if it is to be kept.
    kept: Option<Kept>,
}

impl<'a> ExactBackend<'a> {
    pub fn new(
        model: &'a ExactModel,
        machine: Machine<'a>,
        store: KvStorage<'a>,
        segments: Vec<Segment>,
        logit_rows: Vec<usize>,
        replay: Option<&'a Routing>,
    ) -> Self {
        let positions = segments.iter().flat_map(|s| s.from..s.from + s.count);
        let (cos, sin) = model.rotations.at(positions);
        ExactBackend {
            config: &model.config,
            rotations: &model.rotations,
            cos,
            sin,
            isa: machine.isa,
            threads: machine.threads,
            store,
            segments,
            logit_rows,
            replay,
            replayed: 0,
            routing: Routing::default(),
            disagreements: BTreeMap::new(),
            mismatch: None,
            kept: None,
        }
    }

    /// Keeps what the next layer computes.
    pub fn start_keeping(&mut self) {
        self.kept = Some(Kept::default());
    }

    /// What the last layer computed, if it was to be kept.
    pub fn take_kept(&mut self) -> Option<Kept> {
        self.kept.take()
    }

    /// The experts that rows used, and how often the routers would have chosen others than were replayed. An error if
    /// the recording did not fit or has layers left over.
    pub fn finish(self) -> Result<(Routing, BTreeMap<i64, Disagreement>), Mismatch> {
        let left = self.replay.and_then(|replay| replay.layers().get(self.replayed));
        match (self.mismatch, left) {
            (Some(mismatch), _) => Err(mismatch),
            (None, Some((layer, experts))) => Err(Mismatch {
                layer: self.config.num_hidden_layers,
                wanted: 0,
                recorded: format!("layer {layer} with {} choices", experts.len()),
            }),
            (None, None) => Ok((self.routing, self.disagreements)),
        }
    }

    pub fn product(&self, x: &Rows, weight: &Parameter, bias: Option<&Vector>) -> Rows {
        let Parameter::Matrix(matrix) = weight else {
            return Rows::zeros(0, 0);
        };
        let mut y = Rows::zeros(x.len(), matrix.outputs());
        matrix.multiply(self.isa, self.threads, &x.values, bias, y.values_mut());
        y
    }

    /// Runs `each` on blocks of rows, with the first row of each block. `work`: of a value, in
    /// multiply-adds.
    fn on_blocks(&self, x: &mut Rows, work: usize, each: impl Fn(usize, &mut [f32]) + Send + Sync) {
        let parts = self.threads.parts(x.values.len() * work);
        if parts == 1 {
            each(0, x.values_mut());
            return;
        }
        let (rows, width) = (x.len().div_ceil(parts).max(1), x.width);
        let jobs = x.values_mut().chunks_mut(rows * width).enumerate();
        let jobs = jobs.map(|(n, values)| (n * rows, values)).collect();
        self.threads
            .each(jobs, |(row, values): (usize, &mut [f32])| each(row, values));
    }

    fn write(&mut self, layer: i64, segment: &Segment, k: &Rows, v: &Rows) {
        let (key_width, value_width) = (self.config.head_dim as usize, self.config.value_dim() as usize);
        for (head, kv) in self.store.heads_mut(segment, layer).iter_mut().enumerate() {
            for i in 0..segment.count {
                let key = &k.row(segment.row + i)[head * key_width..][..key_width];
                let value = &v.row(segment.row + i)[head * value_width..][..value_width];
                kv.write(segment.from + i, key, value);
            }
        }
    }

    /// Attention of the segments' queries. Their keys and values must have been written.
    fn attend_segments(&self, layer: i64, segments: &[Segment], q: &Rows, out: &mut Rows) {
        let c = self.config;
        let (key_width, value_width) = (c.head_dim as usize, c.value_dim() as usize);
        let shared = (c.num_attention_heads / c.cached_heads()) as usize;
        let queries = |segment: &Segment, head: usize, first: usize, count: usize| Queries {
            heads: shared,
            from: segment.from + first,
            count,
            window: c.window(layer).map(|window| window as usize),
            scale: c.attention_scale() as f32,
            q: &q.values[(segment.row + first) * q.width + head * shared * key_width..],
            q_stride: q.width,
        };
        let scores = |s: &Segment| s.count * (s.from + s.count);
        let heads = c.num_attention_heads as usize;
        let work = segments.iter().map(scores).sum::<usize>() * heads * (key_width + value_width);
        if self.threads.parts(work) == 1 {
            for segment in segments {
                for (head, kv) in self.store.heads(segment, layer).iter().enumerate() {
                    let width = out.width;
                    let into = &mut out.values_mut()[segment.row * width + head * shared * value_width..];
                    kernel::attend(self.isa, kv, &queries(segment, head, 0, segment.count), into, width);
                }
            }
            return;
        }
        let width = shared * value_width;
        let mut jobs = Vec::new();
        for segment in segments {
            for (head, kv) in self.store.heads(segment, layer).iter().enumerate() {
                for first in (0..segment.count).step_by(QUERIES) {
                    let count = QUERIES.min(segment.count - first);
                    jobs.push(Job {
                        kv,
                        queries: queries(segment, head, first, count),
                        row: segment.row + first,
                        column: head * width,
                        values: vec![0.0; count * width],
                    });
                }
            }
        }
        self.threads.each(jobs.iter_mut().collect(), |job: &mut Job<'_>| {
            kernel::attend(self.isa, job.kv, &job.queries, &mut job.values, width);
        });
        let (out_width, out) = (out.width, out.values_mut());
        for job in &jobs {
            for (i, values) in job.values.chunks_exact(width).enumerate() {
                out[(job.row + i) * out_width + job.column..][..width].copy_from_slice(values);
            }
        }
    }
}

impl Backend for ExactBackend<'_> {
    type Parameter = Parameter;
    type Rows = Rows;

    fn linear(&self, x: &Rows, linear: &Linear<Parameter>) -> Rows {
        self.product(x, &linear.weight, linear.bias.as_ref().and_then(vector))
    }

    fn router_logits(&self, x: &Rows, router: &Linear<Parameter>) -> Rows {
        self.linear(x, router) // its weights were packed for f32
    }

    fn rms_norm(&self, x: &Rows, w: &Parameter, eps: f64) -> Rows {
        let mut y = Rows::zeros(x.len(), x.width);
        if let Some(w) = vector(w) {
            self.on_blocks(&mut y, VALUE_WORK, |row, values| {
                values.copy_from_slice(&x.values[row * x.width..][..values.len()]);
                kernel::rms_norm(self.isa, values, w.values(), eps as f32);
            });
        }
        y
    }

    fn rotate(&self, mut x: Rows, head: i64, from: i64) -> Rows {
        let (pairs, from, width) = (self.rotations.pairs(), from as usize, x.width);
        self.on_blocks(&mut x, VALUE_WORK, |first, values| {
            let mut apart = vec![0.0; 2 * pairs];
            for (row, values) in (first..).zip(values.chunks_exact_mut(width)) {
                let (cos, sin) = (&self.cos[row * pairs..][..pairs], &self.sin[row * pairs..][..pairs]);
                for head in values.chunks_exact_mut(head as usize) {
                    let rotary = &mut head[from..from + 2 * pairs];
                    if self.config.rope.interleaved {
                        for (i, pair) in rotary.chunks_exact(2).enumerate() {
                            (apart[i], apart[pairs + i]) = (pair[0], pair[1]);
                        }
                        rotary.copy_from_slice(&apart);
                    }
                    kernel::rotate(self.isa, rotary, cos, sin);
                }
            }
        });
        x
    }

    fn attend(&mut self, layer: i64, q: &Rows, k: &Rows, v: &Rows) -> Rows {
        let mut out = Rows::zeros(
            q.len(),
            self.config.num_attention_heads as usize * self.config.value_dim() as usize,
        );
        let segments = std::mem::take(&mut self.segments);
        // The cache has room for all segments at once, the scratch space for one.
        let together = match self.store {
            KvStorage::Cache(_) => segments.len().max(1),
            KvStorage::Scratch(_) => 1,
        };
        for segments in segments.chunks(together) {
            for segment in segments {
                self.write(layer, segment, k, v);
            }
            self.attend_segments(layer, segments, q, &mut out);
        }
        self.segments = segments;
        out
    }

    fn swiglu(&self, mut gate: Rows, up: &Rows) -> Rows {
        self.on_blocks(&mut gate, EXP_WORK, |row, values| {
            kernel::swiglu(self.isa, values, &up.values[row * up.width..][..values.len()]);
        });
        gate
    }

    fn add(&self, mut x: Rows, y: &Rows) -> Rows {
        self.on_blocks(&mut x, VALUE_WORK, |row, values| {
            kernel::add(self.isa, values, &y.values[row * y.width..][..values.len()]);
        });
        x
    }

    fn split(&self, x: &Rows, groups: i64, width: i64) -> (Rows, Rows) {
        let (part, width) = (x.width / groups as usize, width as usize);
        let mut first = Vec::with_capacity(x.len() * width * groups as usize);
        let mut second = Vec::with_capacity(x.values.len() - first.capacity());
        for part in x.values.chunks_exact(part) {
            first.extend_from_slice(&part[..width]);
            second.extend_from_slice(&part[width..]);
        }
        (
            Rows::from_values(width * groups as usize, first),
            Rows::from_values((part - width) * groups as usize, second),
        )
    }

    fn join(&self, x: &Rows, groups: i64, shared: &Rows) -> Rows {
        let part = x.width / groups as usize;
        let width = x.width + shared.width * groups as usize;
        let mut values = Vec::with_capacity(x.len() * width);
        for (x, shared) in x.rows().zip(shared.rows()) {
            for part in x.chunks_exact(part) {
                values.extend_from_slice(part);
                values.extend_from_slice(shared);
            }
        }
        Rows::from_values(width, values)
    }

    fn select_logit_rows(&self, x: Rows) -> Rows {
        if self.logit_rows.len() == x.len() && self.logit_rows.iter().enumerate().all(|(i, &row)| i == row) {
            return x;
        }
        x.pick(self.logit_rows.iter().copied())
    }

    fn route(&mut self, layer: i64, logits: &Rows, experts: &Experts, bias: Option<&Parameter>) -> Route<Rows> {
        let per_token = experts.per_token as usize;
        let mut scores = logits.clone();
        for row in scores.rows_mut() {
            match experts.scoring {
                Scoring::Softmax => {
                    let sum = kernel::softmax(self.isa, row);
                    row.iter_mut().for_each(|score| *score /= sum);
                }
                Scoring::Sigmoid { .. } => row
                    .iter_mut()
                    .for_each(|score| *score = 1.0 / (1.0 + kernel::exp(-*score))),
            }
        }
        let rows = self.segments.iter().map(|segment| segment.count).sum();
        let last = layer + 1 == self.config.num_hidden_layers;
        let choose = |(logits, scores): (&[f32], &[f32])| match bias.and_then(vector) {
            Some(bias) => {
                let biased = scores.iter().zip(bias.values()).map(|(score, bias)| score + bias);
                router::choose(&biased.collect::<Vec<_>>(), experts)
            }
            None => router::choose(logits, experts),
        };
        let own = || logits.rows().zip(scores.rows()).flat_map(choose).collect::<Vec<u32>>();
        let chosen = match self.replay {
            Some(replay) => match replay.replay(&mut self.replayed, layer, rows * per_token, experts.count) {
                Ok(all) if last => router::pick(&all, per_token, &self.logit_rows),
                Ok(all) => all,
                Err(mismatch) => {
                    self.mismatch.get_or_insert(mismatch);
                    vec![0; logits.len() * per_token]
                }
            },
            None => own(),
        };
        if self.replay.is_some() {
            // of the same rows in every layer
            let counted = |all: &[u32]| match last {
                true => all.to_vec(),
                false => router::pick(all, per_token, &self.logit_rows),
            };
            let disagreement = Disagreement::of(&counted(&chosen), &counted(&own()), per_token);
            self.disagreements.insert(layer, disagreement);
        }
        let mut weights = Rows::zeros(logits.len(), per_token);
        for ((weights, chosen), scores) in weights
            .rows_mut()
            .zip(chosen.chunks_exact(per_token))
            .zip(scores.rows())
        {
            for (weight, &expert) in weights.iter_mut().zip(chosen) {
                *weight = scores.get(expert as usize).copied().unwrap_or(0.0);
            }
            if experts.normalize {
                let sum: f32 = weights.iter().sum();
                weights.iter_mut().for_each(|weight| *weight /= sum);
            }
            if let Scoring::Sigmoid { scale, .. } = experts.scoring {
                weights.iter_mut().for_each(|weight| *weight *= scale as f32);
            }
        }
        let recorded = match last {
            true => router::spread(&chosen, per_token, &self.logit_rows, rows),
            false => chosen.clone(),
        };
        self.routing.record(layer, recorded);
        Route {
            experts: chosen,
            per_token,
            weights,
        }
    }

    fn zeros_like(&self, x: &Rows) -> Rows {
        Rows::zeros(x.len(), x.width)
    }

    fn dispatch(&self, x: &Rows, route: &Route<Rows>, expert: u32) -> Option<Rows> {
        let rows = route.rows_of(expert);
        (!rows.is_empty()).then(|| x.pick(rows.into_iter().map(|(row, _)| row)))
    }

    fn combine(&self, mut sum: Rows, y: &Rows, route: &Route<Rows>, expert: u32) -> Rows {
        for ((row, place), y) in route.rows_of(expert).into_iter().zip(y.rows()) {
            let weight = route.weights.row(row)[place];
            let width = sum.width;
            kernel::add_scaled(self.isa, &mut sum.values_mut()[row * width..][..width], y, weight);
        }
        sum
    }

    fn keep(&mut self, part: Part, rows: &Rows) {
        if let Some(Kept(parts)) = &mut self.kept {
            parts[part as usize] = rows.clone();
        }
    }
}

pub(crate) fn vector(parameter: &Parameter) -> Option<&Vector> {
    match parameter {
        Parameter::Vector(vector) => Some(vector),
        Parameter::Matrix(_) => None,
    }
}
