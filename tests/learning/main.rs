//! Trainers: runs, versions, the policy store, rollouts, clusters.
//! With a real Postgres and a real Apache Kafka, which `fixture` starts once on free ports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod beside_trainer;
mod clusters;
mod door_kills;
mod kills;
mod quantized;
mod rollout_kills;
mod session_long;
mod shards;
mod spine;
mod store;
mod texts;
mod trainer;
