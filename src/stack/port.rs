//! Which user listens on a port of this machine. Any local user can take a free port; a secret must
//! not go to such a program.

use std::fs;

use anyhow::Context;
use nix::unistd::Uid;

use super::exec;

/// The kernel's number for a socket that listens.
const LISTEN: &str = "0A";

/// Whether a server of the stack listens on this port of 127.0.0.1. False if nothing listens.
pub fn is_ours(port: u16) -> anyhow::Result<bool> {
    let owner = exec::server_user().unwrap_or(Uid::effective().as_raw());
    let table = fs::read_to_string("/proc/net/tcp").context("list the sockets that listen")?;
    // A kernel without IPv6 has no second table.
    let table6 = fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
    Ok(listener(&table, port).or_else(|| listener(&table6, port)) == Some(owner))
}

/// The user id of the socket that listens on this port of 127.0.0.1, in a table of `/proc/net`.
fn listener(table: &str, port: u16) -> Option<u32> {
    let loopback = u32::from_ne_bytes([127, 0, 0, 1]);
    let address = format!("{loopback:08X}:{port:04X}");
    let mut listening = table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next()?, fields.nth(1)?);
        (local.ends_with(&address) && state == LISTEN).then(|| fields.nth(3)?.parse().ok())?
    });
    listening.next()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_owner_of_a_listening_socket_is_found() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let table = fs::read_to_string("/proc/net/tcp").unwrap();
        assert_eq!(listener(&table, port), Some(Uid::effective().as_raw()));
        // Root's own socket is not the server's.
        assert_eq!(is_ours(port).unwrap(), !Uid::effective().is_root());
        drop(socket);
        assert!(!is_ours(port).unwrap());
    }

    #[test]
    fn an_address_of_both_families_is_found() {
        let table = "  sl  local_address ...\n   0: 0000000000000000FFFF00000100007F:4AF8 \
            00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 65530        0 4711 1\n";
        if u32::from_ne_bytes([127, 0, 0, 1]) == 0x0100_007F {
            assert_eq!(listener(table, 19192), Some(65530));
            assert_eq!(listener(table, 19193), None);
        }
    }
}
