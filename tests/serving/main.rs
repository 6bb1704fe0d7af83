//! Releases and replicas: arms, canaries, followers, relays, revocation.
//! With a real Postgres and a real Apache Kafka, which `fixture` starts once on free ports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arms;
mod follow;
mod relay;
mod relay_link;
mod release_canary;
mod release_kills;
mod revocation;
mod serving;
mod stolen_keys;
mod sync;
mod sync_kills;
mod tide;
