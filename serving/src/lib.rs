//! How a policy answers.
//!
//! | module | |
//! |---|---|
//! | `serve` | the role `springtide serve`: starts all parts of one replica |
//! | `options` | the configuration of `springtide serve` |
//! | `api` | the OpenAI-compatible HTTP API |
//! | `engine` | samples tokens |
//! | `remote` | has engines elsewhere sample tokens |
//! | `routing` | which loaded version answers a request |
//! | `follower` | loads the versions that the newest assignment names |
//! | `memory` | what versions need, said before it is taken |
//! | `fleet` | reports of the replicas |
//! | `tide` | lends what production does not use to rollouts |
//! | `follow` | the role `springtide follow`: a follower beside an engine that is not ours |
//! | `relay` | passes objects of a distant store on to followers |
//!
//! The crate `release`, in this folder, decides which version each alias names. This crate and the
//! trainer meet only in the policy store, the log, the database and the public API. It needs no
//! libtorch: the serving model has its own kernels (`model::exact`).

pub mod api;
#[cfg(test)]
mod captured;
pub mod engine;
pub mod fleet;
pub mod follow;
pub mod follower;
pub mod memory;
mod options;
pub mod relay;
pub mod remote;
pub mod routing;
pub mod serve;
pub mod tide;

pub use options::Options as ServeOptions;
