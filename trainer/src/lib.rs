//! How a policy improves: one step from rewards to new weights, and what drives the steps. Needs
//! libtorch.
//!
//! The crate `runs` (`trainer/runs`) has all that needs no libtorch: the API, schedules, selection,
//! advantages, grading, publication.
//!
//! - `process.rs` is `springtide train`. It executes the realtime run (`realtime.rs`) and queued
//!   offline runs (`offline.rs`): GRPO (`grpo.rs`) and runs over datasets. `trainer.rs` has what they
//!   share.
//! - `executor.rs` takes every step: a cohort (`cohort.rs`), the learner ([`learn`]), its metrics
//!   (`step_metrics.rs`), and `runs::publish`. `outside.rs` takes those that another trainer computes.
//! - `parity.rs`, `quarantine.rs` and `share_alarm.rs` watch what was sampled.
//! - `sft.rs` is a program of its own.
//! - `computing.rs` says over HTTP whether this process computes, `working.rs` when it works.
//!
//! The crate knows serving only as a URL.

mod cohort;
mod computing;
mod executor;
mod grpo;
pub mod learn;
mod offline;
mod outside;
mod parity;
mod process;
mod quarantine;
mod realtime;
pub mod sft;
mod share_alarm;
mod step_metrics;
mod trainer;
mod typed;
mod working;

pub use computing::Computing;
pub use process::run;
pub use trainer::Environment;
