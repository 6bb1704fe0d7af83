//! Engines that run elsewhere, behind the same API, routes and log as our own.
//!
//! Each engine holds one version. [`Pool`] queues requests, sends each to an engine of its version
//! and passes the tokens on. [`Updater`] changes the version of an engine: it drains it, gives it
//! the weights that differ, and probes it. An engine gets no traffic before its probe: its
//! log-probabilities of fixed prompts must equal those of our exact model.
//!
//! | module | |
//! |---|---|
//! | `placement` | which engine answers or changes next |
//! | `pool` | the queue, and one task per running sequence |
//! | `sequence` | one sequence on one engine |
//! | `update` | new weights for an engine |
//! | `probe` | compares an engine with our exact model |
//! | `vllm` | the client of a vLLM server |

mod options;
mod placement;
mod pool;
mod probe;
mod sequence;
mod update;
mod vllm;

pub use options::{Options, Server};
pub use pool::Pool;
pub use update::Updater;

#[cfg(test)]
mod tests;
