//! Which addresses a server may listen on, and free ports for processes whose port is chosen before
//! they start.

use std::{
    collections::HashSet,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
    sync::{LazyLock, Mutex, PoisonError},
};

use anyhow::{Context, ensure};
use rand::Rng;

/// Below Linux's ephemeral ports (32768 and up). Between choosing and binding a port, only another
/// process that calls [`free_ports`] could take it.
const PORTS: Range<u16> = 20_000..32_768;
/// Ports that this process was given. Their users may not have bound them yet.
static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);
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

/// Returns `N` different loopback ports that were free a moment ago. Never returns a port twice in
/// one process.
pub fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let mut rng = rand::rng();
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let ports: Vec<u16> = (0..TRIES_MAX)
        .map(|_| rng.random_range(PORTS))
        .filter(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() && given.insert(port))
        .take(N)
        .collect();
    ports.as_slice().try_into().with_context(|| {
        format!(
            "found only {} of {N} free ports on 127.0.0.1 in {PORTS:?} after {TRIES_MAX} tries",
            ports.len()
        )
    })
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
