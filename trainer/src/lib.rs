//! How a policy improves: which trajectories, which advantages, which loss, one step, and its publication.
//!
//! ```text
//!  trajectory rows ─► select ─► advantage ─► learner (batch, loss, optim, mismatch) ─► guards ─► publish ─► version
//!                                                                                                  │
//!                     realtime: production, one run per policy          claim (fence) ─────────────┤
//!                     grpo: rollouts through the public API, a line of its own                     ▼
//!                     runs, versions: the same over HTTP, without libtorch                step, line, disposition
//!                     silence: an alarm when the learning arm hardly shows anything       run_event
//! ```
//! Knows serving only as a URL, and who is served only through the view `alias`.

pub mod advantage;
pub mod batch;
pub mod checkpoint;
pub mod claim;
pub mod drawing;
pub mod explore;
pub mod grader;
pub mod guards;
pub mod mismatch;
pub mod options;
pub mod publish;
pub mod random;
pub mod runs;
pub mod sample;
pub mod select;
pub mod settings;
pub mod silence;
pub mod upkeep;
pub mod versions;

#[cfg(feature = "torch")]
mod coming;
#[cfg(feature = "torch")]
mod execute;
#[cfg(feature = "torch")]
mod grpo;
#[cfg(feature = "torch")]
pub mod learner;
#[cfg(feature = "torch")]
pub mod loss;
#[cfg(feature = "torch")]
pub mod optim;
#[cfg(feature = "torch")]
mod realtime;
#[cfg(feature = "torch")]
mod session;
#[cfg(feature = "torch")]
pub mod sft;

#[cfg(feature = "torch")]
pub use execute::{Environment, run};
pub use options::Options;
