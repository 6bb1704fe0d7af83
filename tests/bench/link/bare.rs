//! A bare TCP stream over the link: the most that one connection can reach.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::Transfer;
use crate::region::Region;
use anyhow::Context;

const CHUNK_BYTES: usize = 1 << 18;

/// Sends `bytes` from the near end to the far end.
pub fn stream(region: &Region, bytes: u64, limit: Duration) -> anyhow::Result<Transfer> {
    let address = SocketAddr::from((region.link.near(), 0));
    let listener = region.near.run(move || TcpListener::bind(address))?;
    let listener = listener.context("listen at the link's near end")?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut connection, _) = listener.accept()?;
        let chunk = vec![0x5A; CHUNK_BYTES];
        let mut left = bytes;
        while left > 0 {
            let now = usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            connection.write_all(&chunk[..now])?;
            left -= now as u64;
        }
        Ok(())
    });
    let received = region.far.run(move || receive(address, bytes, limit))??;
    match sender.join() {
        Ok(Err(error)) if received.bytes == bytes => Err(error).context("send"),
        // if the receiver stopped at the limit, the sender sees a broken connection
        Ok(_) => Ok(received),
        Err(_) => anyhow::bail!("the sender panicked"),
    }
}

fn receive(address: SocketAddr, bytes: u64, limit: Duration) -> std::io::Result<Transfer> {
    let started = Instant::now();
    let mut connection = TcpStream::connect(address)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut transfer = Transfer {
        bytes: 0,
        seconds: 0.0,
        resent_parts: 0,
    };
    while transfer.bytes < bytes {
        let Some(left) = limit.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) else {
            break;
        };
        connection.set_read_timeout(Some(left))?;
        match connection.read(&mut chunk) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => transfer.bytes += read as u64,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
        transfer.seconds = started.elapsed().as_secs_f64();
    }
    Ok(transfer)
}
