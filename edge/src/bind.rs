//! Which addresses a server may listen on, and free ports for processes whose port is chosen before
//! they start.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
};

use anyhow::{Context, ensure};
use rand::Rng;

/// Below Linux's ephemeral ports (32768 and up). Between choosing and binding a port, only another
/// caller of [`free_ports`] could take it.
const PORTS: Range<u16> = 20_000..32_768;
/// Ports that are tried before giving up.
const TRIES_MAX: usize = 1000;

/// Without required API keys, only loopback addresses are allowed.
pub fn check(address: SocketAddr, auth_required: bool) -> anyhow::Result<()> {
    ensure!(
        auth_required || address.ip().to_canonical().is_loopback(),
        "other machines can reach {address}, but no API key is required: \
         listen on 127.0.0.1 or set auth.required = true"
    );
    Ok(())
}

/// Returns `N` different loopback ports that were free a moment ago.
pub fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let mut rng = rand::rng();
    // All listeners stay open until the last port is chosen, so no port is chosen twice.
    let held: Vec<TcpListener> = (0..TRIES_MAX)
        .filter_map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, rng.random_range(PORTS))).ok())
        .take(N)
        .collect();
    ensure!(
        held.len() == N,
        "found only {} of {N} free ports on 127.0.0.1 in {PORTS:?} after {TRIES_MAX} tries",
        held.len()
    );
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&held) {
        *port = listener.local_addr().context("read local address")?.port();
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_distinct_and_below_the_ephemeral_range() {
        let mut ports = free_ports::<50>().unwrap();
        assert!(ports.iter().all(|port| PORTS.contains(port)));
        ports.sort_unstable();
        assert!(ports.is_sorted_by(|a, b| a < b), "a port was chosen twice: {ports:?}");
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn loopback_addresses_need_no_key() {
        for text in ["127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:8000"] {
            assert!(check(address(text), false).is_ok(), "{text}");
        }
    }

    #[test]
    fn other_addresses_need_a_key() {
        for text in ["0.0.0.0:8000", "[::]:8000", "10.1.2.3:8000"] {
            assert!(check(address(text), false).is_err(), "{text}");
            assert!(check(address(text), true).is_ok(), "{text}");
        }
    }
}
