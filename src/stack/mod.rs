//! The parts that Springtide does not write itself, run privately on loopback: Postgres 18 and one Apache Kafka node.
//! Fetched once into a cache, started as child processes that die with their parent. Deliberately not a production
//! deployment: no replication, no authentication; an external cluster of either is a URL in the configuration.

pub mod cli;
pub mod ephemeral;
pub mod exec;
pub mod fetch;
pub mod kafka;
pub mod postgres;
mod reach;
