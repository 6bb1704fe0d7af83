//! What several benchmarks use.

pub mod events;
pub mod process;
pub mod quantiles;
pub mod stack;
pub mod versions;
pub mod vllm;
pub mod world;
