//! The log and what is stored of it: events over HTTP and Kafka, sinks, closers, rewards, dead letters, retention.
//! With a real Postgres and a real Apache Kafka, which `fixture` starts once on free ports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attacks;
mod chaos;
mod disk;
mod dlq;
mod expiry;
mod feedback_token;
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
mod overload;
mod plans;
mod session_cases;
mod session_model;
mod session_order;
mod session_rescore;
mod session_stories;
mod spool;
