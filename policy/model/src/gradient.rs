//! Gradients of dense transformers, computed by our kernels from what an exact pass kept.
//!
//! The forward pass is not computed a second time. Every sum has one order, and threads divide
//! outputs, rows, or heads, never a sum: the gradient of a pass has the same bits on any number of
//! threads. Sums over rows continue from pass to pass, so cutting sequences into passes changes
//! nothing but the sums of norms and biases, which are added by blocks of [`BLOCK`] rows.
//!
//! It does not compute experts, latent attention, or bf16 products; the crate `autograd` does, and has
//! the tests that compare both.

mod layer;
mod workspace;

use crate::config::ModelConfig;
use crate::exact::{self, Compute, Error, ExactModel, Parameter, Pass, vector};
use crate::kernel::{self, ColumnsOf, Element, Matrix};
use crate::transformer::Transformer;
use artifact::checkpoint::Checkpoint;
use artifact::threads::Threads;
use layer::LayerPass;
use workspace::{Product, Workspace};

/// Rows of one job. Fixed, because sums of norms are added by these blocks.
const BLOCK: usize = 48;

/// One version's weights, packed for gradients, and the sums of gradients so far.
#[derive(Debug)]
pub struct Gradient {
    config: ModelConfig,
    /// Matrices are transposed.
    weights: Transformer<Parameter>,
    sums: Vec<Sum>,
    /// Index of every parameter's sum.
    places: Transformer<usize>,
    workspace: Workspace,
}

/// The summed gradient of one parameter.
#[derive(Debug)]
struct Sum {
    name: String,
    shape: Vec<i64>,
    /// `None`: it is not wanted.
    values: Option<Vec<f32>>,
}

impl Sum {
    fn values_mut(&mut self) -> Option<&mut [f32]> {
        self.values.as_deref_mut()
    }
}

impl Gradient {
    /// Whether this module computes the gradients of such a model.
    pub fn supports(config: &ModelConfig, compute: Compute) -> bool {
        compute == Compute::F32 && config.latent.is_none() && config.experts.is_none() && !config.rope.interleaved
    }

    /// Packs a version's weights on `threads`. Gradients are summed for the parameters that are
    /// `wanted` by name; all sums are 0.
    ///
    /// # Errors
    /// As for [`ExactModel::from_checkpoint`].
    pub fn new(checkpoint: &Checkpoint, threads: &Threads, wanted: impl Fn(&str) -> bool) -> Result<Self, Error> {
        let config = exact::config_of(checkpoint)?;
        let mut sums = Vec::new();
        let places = Transformer::build::<Error>(&config, &mut |name: &str, shape: &[i64]| {
            let count: i64 = shape.iter().product();
            sums.push(Sum {
                name: name.to_string(),
                shape: shape.to_vec(),
                values: wanted(name).then(|| vec![0.0; count as usize]),
            });
            Ok(sums.len() - 1)
        })?;
        Ok(Gradient {
            weights: transposed(checkpoint, &config, threads)?,
            sums,
            places,
            workspace: Workspace::default(),
            config,
        })
    }

    /// Continues with another version's weights. The sums stay.
    pub fn load(&mut self, checkpoint: &Checkpoint, threads: &Threads) -> Result<(), Error> {
        self.weights = transposed(checkpoint, &self.config, threads)?;
        Ok(())
    }

    /// The name, the shape and the sum of every wanted parameter.
    pub fn sums(&self) -> impl Iterator<Item = (&str, &[i64], &[f32])> {
        let sums = self.sums.iter();
        sums.filter_map(|sum| Some((sum.name.as_str(), sum.shape.as_slice(), sum.values.as_deref()?)))
    }

    /// Sets all sums to 0.
    pub fn clear(&mut self) {
        for values in self.sums.iter_mut().filter_map(Sum::values_mut) {
            values.fill(0.0);
        }
    }

    /// Adds the gradients of a pass that `model` computed with the same weights by
    /// [`ExactModel::score_for_gradient`]. `logits` is the loss's gradient by [`Pass::logits`].
    ///
    /// # Panics
    /// If the pass kept nothing, `logits` has another shape than the pass's, or the pass's logit rows
    /// do not ascend.
    pub fn add(&mut self, model: &ExactModel, pass: &Pass, logits: &[f32]) {
        assert_eq!(logits.len(), pass.logits.values().len(), "one gradient per logit");
        assert_eq!(pass.layers.len(), self.weights.layers.len(), "the pass kept its layers");
        assert!(pass.logit_rows.is_sorted_by(|a, b| a < b), "logit rows ascend");
        let work = 2 * pass.ids.len() * model.work();
        model
            .threads()
            .pass(work, |threads| self.add_on(threads, model, pass, logits));
    }

    fn add_on(&mut self, threads: &Threads, model: &ExactModel, pass: &Pass, logits: &[f32]) {
        self.add_head(threads, model, pass, logits);
        let shared = LayerPass::new(&self.config, threads, model, pass);
        for layer in (0..pass.layers.len()).rev() {
            let (weights, places) = (&self.weights.layers[layer], &self.places.layers[layer]);
            shared.add(layer, weights, places, &mut self.sums, &mut self.workspace);
        }
        let Some(sums) = self.sums[self.places.embedding].values_mut() else {
            return;
        };
        let width = self.config.hidden_size as usize;
        for (&id, gradient) in pass.ids.iter().zip(self.workspace.stream.chunks_exact(width)) {
            kernel::add(model.isa(), &mut sums[id as usize * width..][..width], gradient);
        }
    }

    /// From logits to the last layer's output, whose gradient goes to the workspace.
    fn add_head(&mut self, threads: &Threads, model: &ExactModel, pass: &Pass, logits: &[f32]) {
        let (isa, hidden) = (model.isa(), &pass.hidden);
        let (Some(norm), Parameter::Matrix(head)) = (vector(&self.weights.norm), self.weights.projection()) else {
            return;
        };
        let Workspace { stream, rooms, .. } = &mut self.workspace;
        stream.resize(hidden.values().len(), 0.0);
        head.multiply(isa, threads, logits, None, stream);
        let eps = self.config.rms_norm_eps as f32;
        if let Some(sums) = self.sums[*self.places.projection()].values_mut() {
            let mut normed = hidden.values().to_vec();
            kernel::rms_norm(isa, &mut normed, norm.values(), eps);
            let product = Product {
                rows: hidden.len(),
                a: ColumnsOf::all(logits, self.config.vocab_size as usize),
                b: ColumnsOf::all(&normed, hidden.width()),
                sums,
            };
            rooms.add(threads, isa, vec![product]);
        }
        let mut d_norm = vec![0.0; hidden.width()];
        kernel::rms_norm_gradient(isa, hidden.values(), norm.values(), eps, stream, &mut d_norm);
        if let Some(sums) = self.sums[self.places.norm].values_mut() {
            kernel::add(isa, sums, &d_norm);
        }
    }
}

fn transposed(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    threads: &Threads,
) -> Result<Transformer<Parameter>, Error> {
    let pack = |values: Element<'_>, outputs, inputs, _| Matrix::pack_transposed(values, outputs, inputs, threads);
    exact::pack_transformer(checkpoint, config, &pack, Compute::F32)
}
