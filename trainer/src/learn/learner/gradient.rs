//! Sums of gradients of the published weights: by our own kernels where they know the architecture,
//! else by libtorch. In f32, dense models are ours; experts, latent attention and bf16 products are
//! libtorch's.

use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use autograd::{Parameters, TrainModel, require_grad_of};
use model::exact::{Arithmetic, ExactModel, Pass};
use model::gradient::Gradient;
use tch::Tensor;

#[derive(Debug)]
pub(super) enum Gradients {
    Ours(Box<Gradient>),
    /// Sums are in the leaves.
    Libtorch(Box<TrainModel>),
}

impl Gradients {
    /// For the weights of `loaded` that are `trained`, by name. All sums are 0. With a quantized copy's values
    /// the gradient is that at these values, as if rounding to them had the derivative 1.
    ///
    /// Our kernels' sums do not depend on the number of threads; libtorch's sums and products do. So
    /// beside our kernels libtorch gets one thread, and what is left to it has the same bits on any
    /// number of ours.
    pub fn new(
        checkpoint: &Checkpoint,
        arithmetic: &Arithmetic,
        loaded: &TrainModel,
        trained: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Self> {
        let checkpoint = &*arithmetic.values(checkpoint, &arithmetic.threads)?;
        if Gradient::supports(loaded.config(), arithmetic.compute) {
            autograd::set_threads(1);
            let gradient = Gradient::new(checkpoint, &arithmetic.threads, trained);
            return Ok(Gradients::Ours(Box::new(
                gradient.context("pack the weights for gradients")?,
            )));
        }
        autograd::set_threads(i32::try_from(arithmetic.threads.count()).unwrap_or(i32::MAX));
        let leaves = require_grad_of(loaded.parameters(), trained);
        let model = TrainModel::from_parameters(loaded.config().clone(), leaves)?;
        let mut model = model.with_compute(arithmetic.compute);
        if arithmetic.quantized.is_some() {
            model.load_values(checkpoint)?;
        }
        Ok(Gradients::Libtorch(Box::new(model)))
    }

    /// Continues with another version's weights. The sums stay.
    pub fn load(&mut self, checkpoint: &Checkpoint, arithmetic: &Arithmetic) -> anyhow::Result<()> {
        let checkpoint = &*arithmetic.values(checkpoint, &arithmetic.threads)?;
        match self {
            Gradients::Ours(gradient) => gradient.load(checkpoint, &arithmetic.threads)?,
            Gradients::Libtorch(model) => model.load_values(checkpoint)?,
        }
        Ok(())
    }

    /// Adds the gradients of a pass, from that of its logits.
    pub fn add(&mut self, model: &ExactModel, pass: &Pass, logits: &Tensor) {
        match self {
            Gradients::Ours(gradient) => gradient.add(model, pass, &super::to_vec(logits)),
            Gradients::Libtorch(model) => model.backward(pass, logits),
        }
    }

    /// Sets all sums to 0.
    pub fn clear(&mut self) {
        match self {
            Gradients::Ours(gradient) => gradient.clear(),
            Gradients::Libtorch(model) => model
                .parameters()
                .values()
                .for_each(|leaf| leaf.shallow_clone().zero_grad()),
        }
    }

    /// Takes the sums, divided by `denominator`.
    pub fn take(&mut self, denominator: f64) -> anyhow::Result<Parameters> {
        let _no_grad = tch::no_grad_guard();
        let mut taken = Parameters::new();
        match self {
            Gradients::Ours(gradient) => {
                for (name, shape, sum) in gradient.sums() {
                    let sum = Tensor::f_from_slice(sum)?.f_view(shape)?;
                    taken.insert(name.to_string(), sum / denominator);
                }
            }
            Gradients::Libtorch(model) => {
                for (name, leaf) in model.parameters().iter().filter(|(_, leaf)| leaf.requires_grad()) {
                    let sum = leaf.grad();
                    let sum = if sum.defined() {
                        sum / denominator
                    } else {
                        leaf.zeros_like()
                    };
                    taken.insert(name.clone(), sum);
                }
            }
        }
        self.clear();
        Ok(taken)
    }
}
