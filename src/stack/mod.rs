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

use std::net::TcpListener;

use anyhow::Context;

/// `n` loopback ports that nothing listened on a moment ago, all different.
pub fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let mut held = Vec::with_capacity(N); // held until all are chosen, so that none is chosen twice
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
        *port = listener.local_addr().context("read local address")?.port();
        held.push(listener);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_different_and_can_be_bound() {
        let [a, b, c] = free_ports().unwrap();
        assert!(a != b && b != c && a != c);
        for port in [a, b, c] {
            TcpListener::bind(("127.0.0.1", port)).unwrap();
        }
    }
}
