//! Real Rust for the demo: the sources of the crates that this project's own build fetches.
//!
//! `springtide corpus build` turns them into a tokenizer and packed training windows for `springtide train sft`;
//! `springtide demo` replays developers on the files of the demo split. Crates are split by family, so that no file of a
//! demo or held-out crate, nor of a sibling by the same authors, was trained on.

mod build;
pub mod pauses;
mod sources;
mod tokenizer;

pub use build::{BuildArgs, build};
#[cfg(feature = "torch")]
pub use pauses::{EvaluateArgs, evaluate};
pub use sources::{demo_files, development_files};
