//! One direction of a link: reads packets from one device and writes them to the other when they
//! are due.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd as _;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tun_rs::SyncDevice;

use super::wire::{Delivery, Wire};
use super::{MTU, Shared};

/// How often an idle direction checks whether to stop.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Packets read before the due ones are written.
const READS_PER_ROUND: usize = 64;

struct Packet {
    due: Duration,
    bytes: Vec<u8>,
}

/// Runs until `shared.stop`.
pub fn run(from: &SyncDevice, to: &SyncDevice, shared: &Shared, seed: u64) -> io::Result<()> {
    let started = Instant::now();
    let mut wire = Wire::new(seed);
    let mut in_flight: VecDeque<Packet> = VecDeque::new();
    let mut buffers: Vec<Vec<u8>> = vec![];
    while !shared.stop.load(Ordering::Relaxed) {
        let conditions = *shared.conditions.read().unwrap_or_else(PoisonError::into_inner);
        let now = started.elapsed();
        for _ in 0..READS_PER_ROUND {
            let mut bytes = buffers.pop().unwrap_or_else(|| Vec::with_capacity(MTU.into()));
            bytes.resize(MTU.into(), 0);
            match from.recv(&mut bytes) {
                Ok(length) => bytes.truncate(length),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    buffers.push(bytes);
                    break;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            match wire.enter(now, bytes.len(), &conditions) {
                Delivery::Due(due) => in_flight.push_back(Packet { due, bytes }),
                Delivery::Lost => {
                    shared.lost.fetch_add(1, Ordering::Relaxed);
                    buffers.push(bytes);
                }
                Delivery::Full => {
                    shared.full.fetch_add(1, Ordering::Relaxed);
                    buffers.push(bytes);
                }
            }
        }
        let now = started.elapsed();
        while let Some(packet) = in_flight.pop_front_if(|packet| packet.due <= now) {
            to.send(&packet.bytes)?;
            shared.packets.fetch_add(1, Ordering::Relaxed);
            shared.bytes.fetch_add(packet.bytes.len() as u64, Ordering::Relaxed);
            buffers.push(packet.bytes);
        }
        let until_due = in_flight.front().map_or(STOP_CHECK_INTERVAL, |packet| {
            packet.due.saturating_sub(started.elapsed()).min(STOP_CHECK_INTERVAL)
        });
        if !until_due.is_zero() {
            let mut wanted = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
            match ppoll(&mut wanted, Some(TimeSpec::from_duration(until_due)), None) {
                Err(error) if error != nix::errno::Errno::EINTR => return Err(error.into()),
                _ => {}
            }
        }
    }
    Ok(())
}
