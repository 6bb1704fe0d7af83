//! What drives the steps: runs, the process that executes them, and the claim that lets it write.
//!
//! `process.rs` is `springtide train`. It executes the realtime run (`realtime.rs`) and queued
//! offline runs (`offline.rs`): GRPO (`grpo.rs`) and runs over datasets. What trains does it through
//! `executor.rs`. `schedule.rs` says when a run may work. `learning.rs` knows which alias is learned
//! from. `show_rate.rs` watches the show rate, `monitors.rs` what answers are like, and `trainer.rs` has
//! what they share. `sft.rs` is a program of its own.

pub mod claim;
pub mod grader;
pub mod learning;
pub mod monitors;
pub mod random;
pub mod schedule;
pub mod show_rate;

#[cfg(feature = "torch")]
mod cohort;
#[cfg(feature = "torch")]
mod executor;
#[cfg(feature = "torch")]
mod grpo;
#[cfg(feature = "torch")]
mod offline;
#[cfg(feature = "torch")]
mod parity;
#[cfg(feature = "torch")]
pub mod process;
#[cfg(feature = "torch")]
mod quarantine;
#[cfg(feature = "torch")]
mod realtime;
#[cfg(feature = "torch")]
pub mod sft;
#[cfg(feature = "torch")]
mod share_alarm;
#[cfg(feature = "torch")]
mod step_metrics;
#[cfg(feature = "torch")]
pub mod trainer;
#[cfg(feature = "torch")]
mod unproven;
#[cfg(feature = "torch")]
mod working;
