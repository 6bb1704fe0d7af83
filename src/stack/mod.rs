//! A private Postgres 18 and Apache Kafka node on this machine. They are downloaded once into a
//! cache and started as child processes that die with their parent. Only the user who starts them
//! may use them: Postgres listens on a Unix socket in a private folder, Kafka on loopback with a
//! generated password. Not for production: no replication.

pub mod backup;
pub mod child;
pub mod ephemeral;
pub mod exec;
pub mod fetch;
pub mod kafka;
mod port;
pub mod postgres;
mod reach;
pub mod vllm;
