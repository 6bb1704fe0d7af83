//! What a policy computes: one transformer for all supported architectures, exact kernels to sample
//! with, libtorch to train with (feature `torch`), sampling, and LoRA adapters.
//!
//! Knows checkpoints (`artifact`). Knows no text, no object store, no network and no database.

#[cfg(feature = "torch")]
pub mod autograd;
pub mod config;
pub mod exact;
pub mod kernel;
pub mod lora;
pub mod router;
pub mod sampling;
pub mod transformer;
