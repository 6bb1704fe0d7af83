//! How a policy improves: which trajectories, which advantages, which loss, one step, one version.
//!
//! The folders follow the life of a step:
//!
//! ```text
//! context    the full prompt of a generation that was logged turn by turn
//! dataset/   named queries over closed trajectories, for runs that do not learn from the stream
//! select/    rewarded trajectories of the database ─► samples; others get the reason why not
//! learn/     advantage ─► batch ─► loss ─► gradient ─► optimizer ─► guards
//! publish/   run state, delta, manifest, and one fenced transaction: a new version
//! runs/      what drives the steps: realtime (production), grpo (rollouts), runs over datasets
//! leases     who makes which rollout, and how it ended
//! judge/     models behind endpoints that grade rollouts, and their stored answers
//! uses       which runs used a trajectory, and what for
//! api/       runs, versions and lines over HTTP, without libtorch
//! memory     what training a model needs, said before it is taken
//! computing  whether this process computes, over HTTP
//! ```
//! The crate knows serving only as a URL, and reads which version an alias serves from the view
//! `alias`.

pub mod api;
#[cfg(feature = "torch")]
mod computing;
pub mod context;
pub mod dataset;
pub mod judge;
pub mod learn;
mod leases;
pub mod memory;
pub mod options;
pub mod publish;
pub mod runs;
pub mod select;
pub mod uses;

#[cfg(feature = "torch")]
pub use computing::Computing;
pub use options::Options;
#[cfg(feature = "torch")]
pub use runs::{process::run, trainer::Environment};
