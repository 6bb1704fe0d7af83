//! Simulates a link between two network namespaces, with a rate, a delay, loss and a queue.
//!
//! Packets leave one namespace through a TUN device, are read here, and enter the other namespace
//! when they are due. This needs root and `/dev/net/tun`, but not `netem` in the kernel. Namespaces
//! and devices have no name and vanish with the process. There is no jitter, reordering or
//! corruption: tests and benchmarks only ask how a transfer fills a link.

mod forward;
mod namespace;
mod wire;

use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;

use serde::Serialize;
use tun_rs::{DeviceBuilder, SyncDevice};

pub use namespace::Namespace;
pub use wire::Conditions;

/// Of IP packets, as on Ethernet.
const MTU: u16 = 1500;
/// Packets that the device buffers until they are read. It drops further ones, so this is large.
const DEVICE_QUEUE: u32 = 20_000;

/// A link between two namespaces. Stops on drop.
pub struct Link {
    near: Ipv4Addr,
    far: Ipv4Addr,
    shared: Arc<Shared>,
    directions: Vec<JoinHandle<io::Result<()>>>,
}

/// State shared by both directions.
struct Shared {
    conditions: RwLock<Conditions>,
    stop: AtomicBool,
    packets: AtomicU64,
    bytes: AtomicU64,
    lost: AtomicU64,
    full: AtomicU64,
}

/// Packets so far, in both directions together.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Counts {
    /// Delivered packets.
    pub packets: u64,
    /// Bytes of delivered packets.
    pub bytes: u64,
    /// Dropped by random loss.
    pub lost: u64,
    /// Dropped because the queue was full.
    pub full: u64,
}

impl Link {
    /// Joins two namespaces by `10.77.subnet.0/24`, in which neither may have an address yet. The
    /// same seed and traffic lose the same packets.
    pub fn between(
        near: &Namespace,
        far: &Namespace,
        subnet: u8,
        conditions: Conditions,
        seed: u64,
    ) -> io::Result<Self> {
        let addresses = [1, 2].map(|host| Ipv4Addr::new(10, 77, subnet, host));
        let devices = [device(near, addresses[0])?, device(far, addresses[1])?];
        let shared = Arc::new(Shared {
            conditions: RwLock::new(conditions),
            stop: AtomicBool::new(false),
            packets: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            full: AtomicU64::new(0),
        });
        let mut link = Self {
            near: addresses[0],
            far: addresses[1],
            shared,
            directions: vec![],
        };
        for (from, to) in [(0, 1), (1, 0)] {
            let (from_device, to_device) = (devices[from].clone(), devices[to].clone());
            let (shared, seed) = (link.shared.clone(), seed.wrapping_mul(2).wrapping_add(from as u64));
            let thread = std::thread::Builder::new().name(format!("link-{subnet}-{from}"));
            link.directions
                .push(thread.spawn(move || forward::run(&from_device, &to_device, &shared, seed))?);
        }
        Ok(link)
    }

    /// The near end's address.
    pub fn near(&self) -> Ipv4Addr {
        self.near
    }

    /// The far end's address.
    pub fn far(&self) -> Ipv4Addr {
        self.far
    }

    /// Changes the conditions for packets that enter from now on.
    pub fn set(&self, conditions: Conditions) {
        *self.shared.conditions.write().unwrap_or_else(PoisonError::into_inner) = conditions;
    }

    pub fn counts(&self) -> Counts {
        Counts {
            packets: self.shared.packets.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            lost: self.shared.lost.load(Ordering::Relaxed),
            full: self.shared.full.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for direction in self.directions.drain(..) {
            if !matches!(direction.join(), Ok(Ok(()))) {
                eprintln!("a link ended before it was dropped");
            }
        }
    }
}

fn device(namespace: &Namespace, address: Ipv4Addr) -> io::Result<Arc<SyncDevice>> {
    let device = namespace.run(move || {
        let device = DeviceBuilder::new()
            .mtu(MTU)
            .with(|builder| {
                builder.tx_queue_len(DEVICE_QUEUE);
            })
            .ipv4(address, 24, None)
            .build_sync()?;
        device.set_nonblocking(true)?;
        Ok(Arc::new(device))
    });
    device?
}
