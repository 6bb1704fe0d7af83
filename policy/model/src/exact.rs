//! The model that answers: exact values, to the bit.
//!
//! Weights as published (bf16 stays bf16), activations, logits and log-probabilities f32, every sum in one order
//! ([`crate::kernel`]). So a token's logits depend on the version and the tokens before it, and on nothing else: not on what
//! it is batched with, how long the others are, how a prompt is cut, whether it comes from the cache, or the threads. The
//! sampler ([`ExactModel::prefill`], [`ExactModel::decode`]) and the trainer ([`ExactModel::score`]) walk the same
//! [`crate::transformer`]. With [`Compute::Bf16`] what goes into a matrix product is rounded to bf16 first: other values, as
//! exact as long as both sides compute so. No libtorch, no I/O.

mod backend;
mod cache;
mod load;
mod proof;

pub use backend::Rows;
pub use cache::KvCache;
#[cfg(feature = "torch")]
pub(crate) use load::refuse_unexpected;
pub(crate) use load::{config_of, rounded, tensor, to_f32};

use crate::config::ModelConfig;
pub use crate::kernel::Compute;
use crate::kernel::{Matrix, Vector};
use crate::router::{Mismatch, Routing};
use crate::transformer::{Backend, Transformer};
use artifact::checkpoint::Checkpoint;
use artifact::isa::Isa;
pub use artifact::threads::Threads;
use backend::{Exact, Segment, Store};

/// Why an image cannot become a model, or a request cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Config(#[from] crate::config::Error),
    #[error("image: {0}")]
    Checkpoint(String),
    #[error("tensor `{name}`: {why}")]
    Tensor { name: String, why: String },
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
}

/// How a model computes. The precision decides the values, so sampler and trainer must have the same; the threads decide
/// nothing but the time.
#[derive(Debug, Clone, Default)]
pub struct Arithmetic {
    pub compute: Compute,
    pub threads: Threads,
}

impl Arithmetic {
    pub fn new(compute: Compute, threads: usize) -> Result<Self, Error> {
        Ok(Arithmetic {
            compute,
            threads: Threads::new(threads)?,
        })
    }
}

/// What computes a pass.
#[derive(Debug, Clone, Copy)]
struct Machine<'a> {
    isa: Isa,
    threads: &'a Threads,
}

/// A parameter as it is computed with.
#[derive(Debug, Clone)]
pub enum Parameter {
    Matrix(Matrix),
    Vector(Vector),
}

/// One set of weights, ready to answer.
#[derive(Debug)]
pub struct ExactModel {
    config: ModelConfig,
    transformer: Transformer<Parameter>,
    rotary: backend::Rotary,
    isa: Isa,
    arithmetic: Arithmetic,
    /// Multiply-adds of one row.
    work: usize,
}

/// What [`ExactModel::score`] computed.
#[derive(Debug)]
pub struct Pass {
    /// The sequences, one after the other, and how long each is.
    pub ids: Vec<u32>,
    pub lengths: Vec<usize>,
    /// Rows that were asked for.
    pub asked: Vec<usize>,
    /// What went into each layer, `[n, D]`: with it a layer's gradient can be computed by itself.
    pub inputs: Vec<Rows>,
    /// What came out of the last one, at the rows asked for, before the final norm.
    pub hidden: Rows,
    /// `[asked, V]`.
    pub logits: Rows,
    pub routing: Routing,
}

impl ExactModel {
    /// Packs an image's weights, to compute in f32 on the caller's thread.
    pub fn from_checkpoint(image: &Checkpoint) -> Result<Self, Error> {
        Self::with_arithmetic(image, &Arithmetic::default())
    }

    /// Packs an image's weights as `arithmetic` needs them, on its threads.
    pub fn with_arithmetic(image: &Checkpoint, arithmetic: &Arithmetic) -> Result<Self, Error> {
        Self::packed_on(image, arithmetic, &arithmetic.threads)
    }

    /// Packs an image's weights on other threads than those that will compute with them.
    pub fn packed_on(image: &Checkpoint, arithmetic: &Arithmetic, packing: &Threads) -> Result<Self, Error> {
        let config = load::config_of(image)?;
        let shapes = config.parameter_shapes();
        let weights: i64 = shapes.iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
        Ok(ExactModel {
            transformer: load::transformer(image, &config, arithmetic.compute, packing)?,
            rotary: backend::Rotary::new(&config),
            isa: Isa::best(),
            arithmetic: arithmetic.clone(),
            work: weights as usize,
            config,
        })
    }

    /// Shares its passes among other threads: the bits are the same.
    pub fn with_threads(mut self, threads: Threads) -> Self {
        self.arithmetic.threads = threads;
        self
    }

    /// Computes with other instructions, to compare: the bits are the same.
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

    /// Appends tokens to a slot of the cache: a prompt, whole or in chunks. Returns the logits after the last, `V` values.
    pub fn prefill(&self, cache: &mut KvCache, slot: usize, ids: &[u32]) -> Result<Vec<f32>, Error> {
        Ok(self.advance(cache, &[(slot, ids)], None)?.swap_remove(0))
    }

    /// Advances slots `0..tokens.len()` by one token each. Returns each slot's next logits, `V` values.
    pub fn decode(&self, cache: &mut KvCache, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let segments: Vec<(usize, &[u32])> = tokens.chunks(1).enumerate().collect();
        self.advance(cache, &segments, None)
    }

    /// Appends tokens to any slots in one pass: prompts, chunks and single tokens together. Returns each one's logits after
    /// its last token, and records the experts that were chosen, row by row in the order given.
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
        let mut last = 0;
        let asked: Vec<usize> = segments
            .iter()
            .map(|(_, ids)| {
                last += ids.len();
                last - 1
            })
            .collect();
        let mut parts: Vec<Segment> = Vec::with_capacity(segments.len());
        for &(slot, ids) in segments {
            parts.push(Segment::after(parts.last(), slot, cache.len(slot), ids.len()));
        }
        let (routing, logits) = self.arithmetic.threads.pass(ids.len() * self.work, |threads| {
            let machine = Machine { isa: self.isa, threads };
            let mut backend = Exact::new(self, machine, Store::Cache(&mut *cache), parts, asked, None);
            let hidden = self.walk(&mut backend, &ids, |_| ());
            Ok::<_, Error>((backend.finish()?, self.project(machine, &hidden)))
        })?;
        for &(slot, ids) in segments {
            cache.grow(slot, ids.len());
        }
        if let Some(record) = record {
            *record = routing;
        }
        Ok(logits.rows().map(<[f32]>::to_vec).collect())
    }

    /// Whole sequences, packed one after the other, with what a trainer needs: `asked` are rows of all of them together,
    /// counted through. `replay`: the experts to go to, instead of choosing.
    pub fn score(&self, sequences: &[&[u32]], asked: &[usize], replay: Option<&Routing>) -> Result<Pass, Error> {
        let rows: usize = sequences.iter().map(|ids| ids.len()).sum();
        self.arithmetic.threads.pass(rows * self.work, |threads| {
            let machine = Machine { isa: self.isa, threads };
            self.score_on(machine, sequences, asked, replay)
        })
    }

    fn score_on(
        &self,
        machine: Machine<'_>,
        sequences: &[&[u32]],
        asked: &[usize],
        replay: Option<&Routing>,
    ) -> Result<Pass, Error> {
        let context = self.config.max_position_embeddings as usize;
        let mut parts: Vec<Segment> = Vec::with_capacity(sequences.len());
        for &ids in sequences {
            self.check_ids(ids)?;
            if ids.len() > context {
                return Err(Error::ContextFull {
                    wanted: ids.len(),
                    context,
                });
            }
            parts.push(Segment::after(parts.last(), 0, 0, ids.len()));
        }
        let ids: Vec<u32> = sequences.concat();
        if asked.is_empty() || asked.iter().any(|&row| row >= ids.len()) {
            return Err(Error::Empty);
        }
        let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
        let store = Store::Scratch(cache::heads(&self.config, longest, self.compute()));
        let mut backend = Exact::new(self, machine, store, parts, asked.to_vec(), replay);
        let mut inputs = Vec::with_capacity(self.transformer.layers.len());
        let hidden = self.walk(&mut backend, &ids, |x: &Rows| inputs.push(x.clone()));
        let routing = backend.finish()?;
        Ok(Pass {
            lengths: sequences.iter().map(|ids| ids.len()).collect(),
            ids,
            asked: asked.to_vec(),
            inputs,
            logits: self.project(machine, &hidden),
            hidden,
            routing,
        })
    }

    /// From ids to the rows that are asked for; shows each layer's input to `see`.
    fn walk(&self, backend: &mut Exact<'_>, ids: &[u32], mut see: impl FnMut(&Rows)) -> Rows {
        let mut x = self.embed(ids);
        for (layer, block) in (0..).zip(&self.transformer.layers) {
            see(&x);
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
        let backend = Exact::new(self, machine, Store::Scratch(Vec::new()), Vec::new(), Vec::new(), None);
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

#[cfg(test)]
mod tests;
