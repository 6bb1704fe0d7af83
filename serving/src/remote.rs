//! Engines that run elsewhere, behind the same API, routes and log as our own.
//!
//! Each engine holds one version, or serves adapters of one base beside each other. [`Pool`] queues
//! requests, sends each to an engine of its version and passes the tokens on. [`Updater`] changes
//! the version of an engine: it drains it, gives it the weights that differ, and probes it. An
//! engine gets no traffic before its probe: its log-probabilities of fixed prompts must be those
//! that the manifest has.
//!
//! | module | |
//! |---|---|
//! | `placement` | which engine answers or changes next |
//! | `pool` | the queue, and one task per running sequence |
//! | `sequence` | one sequence on one engine |
//! | `update` | new weights for an engine |
//! | `probe` | compares an engine with the reference of a version |
//! | `client` | what the others need of an engine, of whatever kind |
//! | `vllm`, `sglang`, `openai` | the kinds of engines |
//! | `protocol` | what all of them share |
//! | `completions` | token ids through `/v1/completions`, which several kinds have |
//! | `routed` | the experts that a model used |
//! | `http` | commands, and answers as server-sent events |

mod client;
mod completions;
mod http;
mod openai;
mod options;
pub(crate) mod placement;
mod pool;
mod probe;
mod protocol;
mod routed;
mod sequence;
mod sglang;
mod update;
mod vllm;

pub use client::slots;
pub use http::EXPECT_WEIGHTS;
pub use options::{InFlight, OpenAiServer, Options, Server};
pub use pool::{Pass, Pool};
pub use update::{NoEngine, Updater, VersionWeights};

#[cfg(test)]
mod recorded;
#[cfg(test)]
pub(crate) mod tests;
