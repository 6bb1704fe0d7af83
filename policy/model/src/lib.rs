//! What a policy computes: one transformer for all supported architectures.
//!
//! - [`config`] and [`transformer`]: what a model looks like, and one forward pass over a backend.
//! - [`exact`] on [`kernel`]: the backend that samples and scores, with bitwise identical results.
//! - [`autograd`] (feature `torch`): the backend that trains, on libtorch.
//! - [`router`], [`sampling`], [`lora`]: choice of experts, choice of tokens, low-rank adapters.
//!
//! The crate reads checkpoints (crate `artifact`). It knows no text, object store, network or
//! database.
//!
//! # Adding an architecture
//!
//! 1. `config/family.rs`: a variant of [`config::Family`] and its conventions. Most dense and
//!    mixture-of-experts models need nothing else: tensor names, shapes, LoRA targets and tests
//!    follow from [`config::ModelConfig`].
//! 2. Only for new mathematics: `transformer.rs` (parameters and forward pass) and the two
//!    backends, `exact/backend.rs` and `autograd/backend.rs`.
//! 3. A golden model (`scripts/golden/models.py`). The tests run every folder of `tests/golden`.

#[cfg(feature = "torch")]
pub mod autograd;
pub mod config;
pub mod exact;
pub mod kernel;
pub mod lora;
pub mod router;
pub mod sampling;
pub mod transformer;

#[cfg(test)]
mod golden;
