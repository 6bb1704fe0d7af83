//! How a policy answers: the engine and its OpenAI-compatible API, the follower that brings new versions to it, and the
//! release loop that decides which version an alias names. Never meets the trainer but through the policy store, the log,
//! the database and the public API.
//!
//! Needs no libtorch: the model that answers computes with kernels of its own (`policy::model`).

pub mod api;
pub mod engine;
pub mod fleet;
pub mod follow;
pub mod options;
pub mod relay;
pub mod release;
pub mod routing;
pub mod serve;

pub use options::{ArmOptions, ReleaseOptions, ServeOptions};
