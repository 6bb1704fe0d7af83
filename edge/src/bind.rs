//! Where a role may listen: anywhere but loopback only when callers must show an API key. And ports for processes that are
//! told theirs before they start.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
};

use anyhow::{Context, ensure};
use rand::Rng;

/// Below what Linux hands out by itself (32768 and up), for port 0 and for outgoing connections: between choosing a port here
/// and binding it, only another caller of [`free_ports`] could take it.
const CHOSEN_FROM: Range<u16> = 20_000..32_768;
/// Ports tried before giving up.
const TRIES_MAX: usize = 1000;

/// Refuses an address that other machines can reach while no API key is required.
pub fn check(address: SocketAddr, auth_required: bool) -> anyhow::Result<()> {
    ensure!(
        auth_required || address.ip().to_canonical().is_loopback(),
        "{address} can be reached from other machines, and no API key is required: \
         listen on 127.0.0.1 or set auth.required = true"
    );
    Ok(())
}

/// `N` different loopback ports that nothing listened on a moment ago.
pub fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let mut rng = rand::rng();
    // Held until all are chosen, so that none is chosen twice.
    let held: Vec<TcpListener> = (0..TRIES_MAX)
        .filter_map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, rng.random_range(CHOSEN_FROM))).ok())
        .take(N)
        .collect();
    ensure!(
        held.len() == N,
        "no {N} free ports on 127.0.0.1 between {CHOSEN_FROM:?} in {TRIES_MAX} tries: is something holding them?"
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
    fn free_ports_differ_and_are_not_those_that_the_system_hands_out() {
        let mut ports = free_ports::<50>().unwrap();
        assert!(ports.iter().all(|port| CHOSEN_FROM.contains(port)));
        ports.sort_unstable();
        assert!(ports.is_sorted_by(|a, b| a < b), "one was chosen twice: {ports:?}");
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn loopback_needs_no_key() {
        for text in ["127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:8000"] {
            assert!(check(address(text), false).is_ok(), "{text}");
        }
    }

    #[test]
    fn anything_else_needs_one() {
        for text in ["0.0.0.0:8000", "[::]:8000", "10.1.2.3:8000"] {
            assert!(check(address(text), false).is_err(), "{text}");
            assert!(check(address(text), true).is_ok(), "{text}");
        }
    }
}
