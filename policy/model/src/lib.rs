//! What a policy computes: one transformer for all supported architectures.
//!
//! - [`config`] and [`transformer`]: what a model looks like, and one forward pass over a backend.
//! - [`exact`] on [`kernel`]: the backend that samples and scores, with bitwise identical results.
//! - [`gradient`]: gradients of dense models from what an exact pass kept, by the same kernels.
//! - [`size`]: how large a model is, before a weight is read.
//! - [`router`], [`sampling`], [`lora`]: choice of experts, choice of tokens, low-rank adapters.
//! - [`random_checkpoint`]: new models.
//!
//! The crate reads checkpoints (crate `artifact`). It knows no text, object store, network,
//! database or libtorch: the crate `autograd` is the backend on libtorch.
//!
//! CONTRIBUTING.md, "Add an architecture", lists the files to change. Tensor names, shapes and LoRA
//! targets follow from [`config::ModelConfig`].

pub mod config;
pub mod exact;
pub mod gradient;
pub mod kernel;
pub mod lora;
mod random;
pub mod reference;
pub mod router;
pub mod sampling;
pub mod size;
pub mod transformer;

pub use random::random_checkpoint;

#[cfg(test)]
mod golden;
