//! What runs it all: keys, tenants, `control`, its page, the supervisor, privacy, TLS.
//! With a real Postgres and a real Apache Kafka, which `fixture` starts once on free ports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod audit;
mod canary;
mod control;
mod database_users;
mod erasure;
mod keys;
mod page;
mod private;
mod quotas;
mod releases;
mod scopes;
mod session_demo;
mod tenants;
mod tls;
mod transactions;
mod up;
