//! One way of a link: reads packets from one device, writes them to the other when they are due.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd as _;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tun_rs::SyncDevice;

use super::wire::{Fate, Wire};
use super::{MTU, Shared};

/// How long nothing may happen before somebody looks whether to stop.
const LOOK: Duration = Duration::from_millis(20);
/// Packets that are read before those that are due are written.
const ROUND: usize = 64;

struct Packet {
    due: Duration,
    bytes: Vec<u8>,
}

/// Until `shared.stop`.
pub fn run(from: &SyncDevice, to: &SyncDevice, shared: &Shared, seed: u64) -> io::Result<()> {
    let started = Instant::now();
    let mut wire = Wire::new(seed);
    let mut under_way: VecDeque<Packet> = VecDeque::new();
    let mut spare: Vec<Vec<u8>> = vec![];
    while !shared.stop.load(Ordering::Relaxed) {
        let conditions = *shared.conditions.read().unwrap_or_else(PoisonError::into_inner);
        let now = started.elapsed();
        for _ in 0..ROUND {
            let mut bytes = spare.pop().unwrap_or_else(|| Vec::with_capacity(MTU.into()));
            bytes.resize(MTU.into(), 0);
            match from.recv(&mut bytes) {
                Ok(length) => bytes.truncate(length),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    spare.push(bytes);
                    break;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            match wire.enter(now, bytes.len(), &conditions) {
                Fate::Due(due) => under_way.push_back(Packet { due, bytes }),
                Fate::Lost => {
                    shared.lost.fetch_add(1, Ordering::Relaxed);
                    spare.push(bytes);
                }
                Fate::Full => {
                    shared.full.fetch_add(1, Ordering::Relaxed);
                    spare.push(bytes);
                }
            }
        }
        let now = started.elapsed();
        while let Some(packet) = under_way.pop_front_if(|packet| packet.due <= now) {
            to.send(&packet.bytes)?;
            shared.packets.fetch_add(1, Ordering::Relaxed);
            shared.bytes.fetch_add(packet.bytes.len() as u64, Ordering::Relaxed);
            spare.push(packet.bytes);
        }
        let until_due = under_way
            .front()
            .map_or(LOOK, |packet| packet.due.saturating_sub(started.elapsed()).min(LOOK));
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
