//! Springtide's integration tests: one binary with a module per topic. They use a real Postgres and
//! a real Apache Kafka, which `support` starts once on free ports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(feature = "torch")]
mod arms;
#[cfg(feature = "torch")]
mod attacks;
#[cfg(feature = "torch")]
mod audit;
#[cfg(feature = "torch")]
mod beside_trainer;
#[cfg(feature = "torch")]
mod canary;
mod chaos;
#[cfg(feature = "torch")]
mod clusters;
mod control;
mod database_users;
mod disk;
mod dlq;
#[cfg(feature = "torch")]
mod expiry;
mod feedback_token;
mod follow;
mod foreign_rows;
mod ingest;
mod ingest_clock;
mod ingest_crash;
mod ingest_episode;
mod ingest_episode_limits;
mod ingest_evolution;
mod ingest_http;
mod ingest_identity;
mod ingest_judge;
mod ingest_memory;
mod ingest_order;
mod ingest_partitions;
mod ingest_poison;
mod ingest_proof;
mod ingest_rescore;
mod ingest_retention;
mod ingest_revoke;
mod ingest_reward;
mod ingest_session;
mod ingest_telemetry;
mod keys;
mod overload;
mod page;
mod plans;
mod private;
#[cfg(feature = "torch")]
mod quantized;
#[cfg(feature = "torch")]
mod quotas;
mod relay;
mod relay_link;
mod release_canary;
mod release_kills;
#[cfg(feature = "torch")]
mod revocation;
#[cfg(feature = "torch")]
mod rollout_kills;
#[cfg(feature = "torch")]
mod scopes;
#[cfg(feature = "torch")]
mod serving;
mod session_cases;
mod session_demo;
mod session_long;
mod session_model;
mod session_order;
mod session_rescore;
mod session_stories;
#[cfg(feature = "torch")]
mod shards;
#[cfg(feature = "torch")]
mod spine;
mod spool;
#[cfg(feature = "torch")]
mod stolen_keys;
#[cfg(feature = "torch")]
mod store;
mod support;
#[cfg(feature = "torch")]
mod sync;
#[cfg(feature = "torch")]
mod sync_kills;
mod tenants;
#[cfg(feature = "torch")]
mod texts;
#[cfg(feature = "torch")]
mod tide;
mod tls;
#[cfg(feature = "torch")]
mod trainer;
mod up;
