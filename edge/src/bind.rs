//! Where a role may listen: anywhere but loopback only when callers must show an API key.

use std::net::SocketAddr;

use anyhow::ensure;

/// Refuses an address that other machines can reach while no API key is required.
pub fn check(address: SocketAddr, auth_required: bool) -> anyhow::Result<()> {
    ensure!(
        auth_required || address.ip().to_canonical().is_loopback(),
        "{address} can be reached from other machines, and no API key is required: \
         listen on 127.0.0.1 or set auth.required = true"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
