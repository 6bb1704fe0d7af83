//! A private Postgres 18 and Apache Kafka node on loopback. They are downloaded once into a cache
//! and started as child processes that die with their parent. Not for production: no replication,
//! no authentication.

pub mod child;
pub mod ephemeral;
pub mod exec;
pub mod fetch;
pub mod kafka;
pub mod postgres;
mod reach;
