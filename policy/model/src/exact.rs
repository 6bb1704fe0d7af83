//! The model that samples and scores, with bitwise identical results.
//!
//! Weights keep the dtype they were published in. Activations, logits and log-probabilities are
//! f32, and every sum has one order ([`crate::kernel`]). A token's logits therefore depend only on
//! the version and the tokens before it. Batch composition, prompt chunks, the KV cache and the
//! number of threads do not change them. The sampler ([`ExactModel::prefill`],
//! [`ExactModel::decode`]) and the trainer ([`ExactModel::score`]) run the same forward pass.
//!
//! With [`Compute::Bf16`] both factors of a matrix product are rounded to bf16 first. The values
//! differ from f32, but they are still identical if sampler and trainer use the same setting. This
//! module uses no libtorch and does no I/O.

mod backend;
mod cache;
mod load;
mod rows;
mod self_check;

pub(crate) use backend::vector;
pub use cache::KvCache;
pub(crate) use load::pack_transformer;
pub use load::{EMBEDDING, HEAD, config_of, refuse_unexpected, tensor, to_dtype, to_dtype_of, to_f32};
pub use rows::{Kept, Rows};

use crate::config::{ModelConfig, Rotations};
use crate::gradient::Gradient;
pub use crate::kernel::Compute;
use crate::kernel::{Element, Matrix, Vector};
use crate::lora;
use crate::router::{Disagreement, Mismatch, Routing};
use crate::transformer::{Backend, Transformer};
use artifact::checkpoint::Checkpoint;
use artifact::isa::Isa;
use artifact::quant::{self, Spec};
pub use artifact::threads::Threads;
use backend::{ExactBackend, KvStorage, Segment};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Why a checkpoint cannot be loaded, or a request cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Config(#[from] crate::config::Error),
    #[error("checkpoint: {0}")]
    Checkpoint(String),
    #[error("tensor `{name}`: {why}")]
    Tensor { name: String, why: String },
    #[error("{0}")]
    Adapter(String),
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenId { id: u32, vocab: i64 },
    #[error("{wanted} tokens do not fit the context of {context}; shorten the prompt or max_tokens")]
    ContextFull { wanted: usize, context: usize },
    #[error("no tokens were given")]
    Empty,
    #[error("{0}")]
    Routing(#[from] Mismatch),
    #[error("{0}")]
    Threads(#[from] artifact::threads::NotStarted),
    #[error("the values of its quantized copy: {0}")]
    Quantized(#[from] quant::Error),
}

/// How a model computes. The precision and the copy change the values, so sampler and trainer must use
/// the same. The number of threads does not change them.
#[derive(Debug, Clone, Default)]
pub struct Arithmetic {
    pub compute: Compute,
    pub threads: Threads,
    /// With the values of this quantized copy in place of the version's own.
    pub quantized: Option<Spec>,
}

impl Arithmetic {
    pub fn new(compute: Compute, threads: usize) -> Result<Self, Error> {
        Ok(Arithmetic {
            compute,
            threads: Threads::new(threads)?,
            quantized: None,
        })
    }

    /// The values that are computed with, made on `threads`.
    pub fn values<'a>(&self, checkpoint: &'a Checkpoint, threads: &Threads) -> Result<Cow<'a, Checkpoint>, Error> {
        Ok(match self.quantized {
            None => Cow::Borrowed(checkpoint),
            Some(spec) => Cow::Owned(quant::dequantized(checkpoint, spec, threads)?),
        })
    }
}

/// The instruction set and the threads of one pass.
#[derive(Debug, Clone, Copy)]
struct Machine<'a> {
    isa: Isa,
    threads: &'a Threads,
}

/// A parameter, packed for the kernels.
#[derive(Debug, Clone)]
pub enum Parameter {
    Matrix(Matrix),
    Vector(Vector),
}

/// One version's weights, packed for the kernels.
#[derive(Debug)]
pub struct ExactModel {
    config: ModelConfig,
    transformer: Transformer<Parameter>,
    rotations: Rotations,
    isa: Isa,
    arithmetic: Arithmetic,
    /// Multiply-adds of one row, about the number of weights.
    work: usize,
}

/// A layer's part of a pass.
#[derive(Debug, Clone)]
pub struct KeptLayer {
    /// `[n, D]`.
    pub input: Rows,
    /// `None`: the layer must be computed again from its input.
    pub parts: Option<Kept>,
}

/// The results of [`ExactModel::score`]. n is the number of tokens of all sequences together.
#[derive(Debug)]
pub struct Pass {
    /// The tokens of all sequences, one sequence after the other, `[n]`.
    pub ids: Vec<u32>,
    /// The length of each sequence, in tokens.
    pub lengths: Vec<usize>,
    /// The rows among the n whose logits were requested.
    pub logit_rows: Vec<usize>,
    /// What gradients need of each layer. Empty unless asked for.
    pub layers: Vec<KeptLayer>,
    /// The last layer's output before the final norm, `[logit_rows, D]`.
    pub hidden: Rows,
    /// `[logit_rows, V]`.
    pub logits: Rows,
    /// The experts that each row used.
    pub routing: Routing,
    /// By layer, if experts were replayed.
    pub disagreements: BTreeMap<i64, Disagreement>,
}

impl ExactModel {
    /// Packs a checkpoint's weights, to compute in f32 on the caller's thread. An adapter is merged into its base.
    ///
    /// # Errors
    /// If `config.json` is missing or unsupported, or a tensor is missing, unexpected or has the
    /// wrong shape or dtype.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, Error> {
        Self::with_arithmetic(checkpoint, &Arithmetic::default())
    }

    /// Packs a checkpoint's weights as `arithmetic` needs them, on its threads.
    pub fn with_arithmetic(checkpoint: &Checkpoint, arithmetic: &Arithmetic) -> Result<Self, Error> {
        Self::packed_on(checkpoint, arithmetic, &arithmetic.threads)
    }

    /// Packs a checkpoint's weights on the threads `packing`. Passes run on those of `arithmetic`.
    pub fn packed_on(checkpoint: &Checkpoint, arithmetic: &Arithmetic, packing: &Threads) -> Result<Self, Error> {
        let merged = lora::computed(checkpoint).map_err(|error| Error::Adapter(error.to_string()))?;
        let checkpoint = &*arithmetic.values(&merged, packing)?;
        let config = load::config_of(checkpoint)?;
        let shapes = config.parameter_shapes();
        let weights: i64 = shapes.iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
        let pack =
            |values: Element<'_>, outputs, inputs, compute| Matrix::pack(values, outputs, inputs, compute, packing);
        Ok(ExactModel {
            transformer: load::pack_transformer(checkpoint, &config, &pack, arithmetic.compute)?,
            rotations: config.rope.rotations(config.rotary_dim()),
            isa: Isa::best(),
            arithmetic: arithmetic.clone(),
            work: weights as usize,
            config,
        })
    }

    /// Computes with another instruction set, for tests. The bits are the same.
    pub fn with_isa(mut self, isa: Isa) -> Self {
        self.isa = isa;
        self
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn compute(&self) -> Compute {
        self.arithmetic.compute
    }

    /// The copy whose values it computes with.
    pub fn quantized(&self) -> Option<Spec> {
        self.arithmetic.quantized
    }

    /// Appends a prompt or a part of it to a slot of the cache. Returns the logits after the last
    /// token, `[V]`.
    pub fn prefill(&self, cache: &mut KvCache, slot: usize, ids: &[u32]) -> Result<Vec<f32>, Error> {
        Ok(self.advance(cache, &[(slot, ids)], None)?.swap_remove(0))
    }

    /// Appends one token to each of the slots `0..tokens.len()`. Returns each slot's next logits,
    /// `[V]`.
    pub fn decode(&self, cache: &mut KvCache, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let segments: Vec<(usize, &[u32])> = tokens.chunks(1).enumerate().collect();
        self.advance(cache, &segments, None)
    }

    /// Appends tokens to several slots in one pass: prompts, chunks and single tokens together.
    ///
    /// Returns the logits after the last token of each segment, `[V]`. Writes the chosen experts to
    /// `record`, row by row in the order of the segments.
    ///
    /// # Errors
    /// If a segment is empty, a token id is outside the vocabulary, or a slot has no room. Then the
    /// cache is unchanged.
    pub fn advance(
        &self,
        cache: &mut KvCache,
        segments: &[(usize, &[u32])],
        record: Option<&mut Routing>,
    ) -> Result<Vec<Vec<f32>>, Error> {
        if segments.is_empty() || segments.iter().any(|(_, ids)| ids.is_empty()) {
            return Err(Error::Empty);
        }
        for &(slot, ids) in segments {
            self.check_ids(ids)?;
            cache.check_room(cache.len(slot), ids.len())?;
        }
        let ids: Vec<u32> = segments.iter().flat_map(|(_, ids)| ids.iter().copied()).collect();
        let mut parts: Vec<Segment> = Vec::with_capacity(segments.len());
        for &(slot, ids) in segments {
            parts.push(Segment::after(parts.last(), slot, cache.len(slot), ids.len()));
        }
        let logit_rows = parts.iter().map(Segment::last_row).collect();
        let (routing, logits) = self.arithmetic.threads.pass(ids.len() * self.work, |threads| {
            let machine = Machine { isa: self.isa, threads };
            let mut backend = ExactBackend::new(self, machine, KvStorage::Cache(&mut *cache), parts, logit_rows, None);
            let hidden = self.forward(&mut backend, &ids);
            Ok::<_, Error>((backend.finish()?.0, self.project(machine, &hidden)))
        })?;
        for &(slot, ids) in segments {
            cache.grow(slot, ids.len());
        }
        if let Some(record) = record {
            *record = routing;
        }
        Ok(logits.rows().map(<[f32]>::to_vec).collect())
    }

    /// Computes whole sequences, packed one after the other.
    ///
    /// `logit_rows` are indexes into the tokens of all sequences together. With `replay`, rows use
    /// the recorded experts instead of choosing.
    ///
    /// # Errors
    /// If there are no rows or one is out of range, a token id is outside the vocabulary, a
    /// sequence is longer than the context, or the recording does not fit the sequences.
    pub fn score(&self, sequences: &[&[u32]], logit_rows: &[usize], replay: Option<&Routing>) -> Result<Pass, Error> {
        self.pass(sequences, logit_rows, replay, None)
    }

    /// Like [`score`](Self::score), with what a gradient needs: every layer's input, and of the last
    /// layers as much of the rest as fits into `bytes_max`.
    pub fn score_for_gradient(
        &self,
        sequences: &[&[u32]],
        logit_rows: &[usize],
        replay: Option<&Routing>,
        bytes_max: u64,
    ) -> Result<Pass, Error> {
        self.pass(sequences, logit_rows, replay, Some(bytes_max))
    }

    fn pass(
        &self,
        sequences: &[&[u32]],
        logit_rows: &[usize],
        replay: Option<&Routing>,
        kept_bytes_max: Option<u64>,
    ) -> Result<Pass, Error> {
        let rows: usize = sequences.iter().map(|ids| ids.len()).sum();
        self.arithmetic.threads.pass(rows * self.work, |threads| {
            let machine = Machine { isa: self.isa, threads };
            self.pass_on(machine, sequences, logit_rows, replay, kept_bytes_max)
        })
    }

    fn pass_on(
        &self,
        machine: Machine<'_>,
        sequences: &[&[u32]],
        logit_rows: &[usize],
        replay: Option<&Routing>,
        kept_bytes_max: Option<u64>,
    ) -> Result<Pass, Error> {
        let context = self.config.context() as usize;
        for &ids in sequences {
            self.check_ids(ids)?;
            if ids.len() > context {
                return Err(Error::ContextFull {
                    wanted: ids.len(),
                    context,
                });
            }
        }
        let ids: Vec<u32> = sequences.concat();
        if logit_rows.is_empty() || logit_rows.iter().any(|&row| row >= ids.len()) {
            return Err(Error::Empty);
        }
        let lengths: Vec<usize> = sequences.iter().map(|ids| ids.len()).collect();
        let mut backend = self.backend_of(machine, &lengths, logit_rows, replay);
        let mut layers = Vec::new();
        let kept_from = kept_bytes_max.map(|bytes| self.first_kept_layer(ids.len(), bytes));
        let mut x = self.embed(&ids);
        for (layer, block) in self.transformer.layers.iter().enumerate() {
            let input = kept_from.map(|_| x.clone());
            if kept_from.is_some_and(|first| layer >= first) {
                backend.start_keeping();
            }
            x = block.forward(&mut backend, &self.config, layer as i64, x);
            layers.extend(input.map(|input| KeptLayer {
                input,
                parts: backend.take_kept(),
            }));
        }
        let (routing, disagreements) = backend.finish()?;
        Ok(Pass {
            lengths,
            ids,
            logit_rows: logit_rows.to_vec(),
            layers,
            logits: self.project(machine, &x),
            hidden: x,
            routing,
            disagreements,
        })
    }

    /// A backend for whole sequences of these lengths.
    fn backend_of<'a>(
        &'a self,
        machine: Machine<'a>,
        lengths: &[usize],
        logit_rows: &[usize],
        replay: Option<&'a Routing>,
    ) -> ExactBackend<'a> {
        let mut parts: Vec<Segment> = Vec::with_capacity(lengths.len());
        for &length in lengths {
            parts.push(Segment::after(parts.last(), 0, 0, length));
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let store = KvStorage::Scratch(cache::empty_heads(&self.config, longest, self.compute()));
        ExactBackend::new(self, machine, store, parts, logit_rows.to_vec(), replay)
    }

    /// The first layer whose parts are kept, so that all from there on fit into `bytes_max`.
    fn first_kept_layer(&self, rows: usize, bytes_max: u64) -> usize {
        let layers = self.transformer.layers.len();
        if !Gradient::supports(&self.config, self.compute()) {
            return layers;
        }
        let bytes = kept_bytes(&self.config, rows as u64).max(1);
        layers.saturating_sub(usize::try_from(bytes_max / bytes).unwrap_or(usize::MAX))
    }

    /// What a layer of a pass computed, again from its input, to the bit.
    pub(crate) fn parts_again(&self, threads: &Threads, pass: &Pass, layer: usize) -> Kept {
        let machine = Machine { isa: self.isa, threads };
        let mut backend = self.backend_of(machine, &pass.lengths, &pass.logit_rows, None);
        backend.start_keeping();
        let input = pass.layers[layer].input.clone();
        let _ = self.transformer.layers[layer].forward(&mut backend, &self.config, layer as i64, input);
        backend.take_kept().unwrap_or_default()
    }

    /// cos and sin of every row of a pass, `[n, pairs]` each.
    pub(crate) fn rotations_of(&self, pass: &Pass) -> (Vec<f32>, Vec<f32>) {
        self.rotations.at(pass.lengths.iter().flat_map(|&length| 0..length))
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) fn threads(&self) -> &Threads {
        &self.arithmetic.threads
    }

    /// Multiply-adds of a row.
    pub(crate) fn work(&self) -> usize {
        self.work
    }

    /// The hidden rows whose logits were requested.
    fn forward(&self, backend: &mut ExactBackend<'_>, ids: &[u32]) -> Rows {
        let mut x = self.embed(ids);
        for (layer, block) in (0..).zip(&self.transformer.layers) {
            x = block.forward(backend, &self.config, layer, x);
        }
        x
    }

    fn embed(&self, ids: &[u32]) -> Rows {
        let mut x = Rows::zeros(ids.len(), self.config.hidden_size as usize);
        if let Parameter::Matrix(table) = &self.transformer.embedding {
            for (row, &id) in x.rows_mut().zip(ids) {
                table.row(id as usize, row);
            }
        }
        x
    }

    /// The final norm and the output projection.
    fn project(&self, machine: Machine<'_>, hidden: &Rows) -> Rows {
        let backend = ExactBackend::new(
            self,
            machine,
            KvStorage::Scratch(Vec::new()),
            Vec::new(),
            Vec::new(),
            None,
        );
        let normed = backend.rms_norm(hidden, &self.transformer.norm, self.config.rms_norm_eps);
        backend.product(&normed, self.transformer.projection(), None)
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        let vocab = self.config.vocab_size;
        match ids.iter().find(|&&id| i64::from(id) >= vocab) {
            Some(&id) => Err(Error::TokenId { id, vocab }),
            None => Ok(()),
        }
    }
}

/// Bytes that a gradient needs of a dense layer besides its input, for this many rows.
pub fn kept_bytes(config: &ModelConfig, rows: u64) -> u64 {
    let (q, kv) = (config.num_attention_heads, config.num_key_value_heads);
    let before_norms = if config.qk_norm { q + kv } else { 0 };
    let heads = before_norms + q + 2 * kv + q; // the last of them attended
    let values = config.hidden_size + 2 * config.intermediate_size + config.head_dim * heads;
    rows.saturating_mul(4 * values.unsigned_abs())
}

#[cfg(test)]
mod tests;
