//! A bare TCP stream over the link: what anything over one connection could have.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::Brought;
use crate::region::Region;
use anyhow::Context;

const PIECE_BYTES: usize = 1 << 18;

/// Sends so many bytes from the near end to the far one.
pub fn stream(region: &Region, bytes: u64, limit: Duration) -> anyhow::Result<Brought> {
    let address = SocketAddr::from((region.link.near(), 0));
    let listener = region.near.run(move || TcpListener::bind(address))?;
    let listener = listener.context("listen at the link's near end")?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut connection, _) = listener.accept()?;
        let piece = vec![0x5A; PIECE_BYTES];
        let mut left = bytes;
        while left > 0 {
            let now = usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            connection.write_all(&piece[..now])?;
            left -= now as u64;
        }
        Ok(())
    });
    let received = region.far.run(move || receive(address, bytes, limit))??;
    match sender.join() {
        Ok(Err(error)) if received.bytes == bytes => Err(error).context("send"),
        // Where it was cut off, the sender's connection breaks.
        Ok(_) => Ok(received),
        Err(_) => anyhow::bail!("the sender panicked"),
    }
}

fn receive(address: SocketAddr, bytes: u64, limit: Duration) -> std::io::Result<Brought> {
    let started = Instant::now();
    let mut connection = TcpStream::connect(address)?;
    let mut piece = vec![0; PIECE_BYTES];
    let mut brought = Brought {
        bytes: 0,
        seconds: 0.0,
        again: 0,
    };
    while brought.bytes < bytes {
        let Some(left) = limit.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) else {
            break;
        };
        connection.set_read_timeout(Some(left))?;
        match connection.read(&mut piece) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => brought.bytes += read as u64,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
        brought.seconds = started.elapsed().as_secs_f64();
    }
    Ok(brought)
}
