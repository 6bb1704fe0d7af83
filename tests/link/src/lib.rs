//! A link between two network namespaces: rate, delay, loss and a queue, as far as tests and benchmarks need them. Packets leave
//! one namespace by a TUN device, are read here, and enter the other one when they are due; so nothing but `/dev/net/tun` and root
//! is needed, least of all `netem` in the kernel.
//!
//! Nothing has a name outside and nothing is left behind: namespaces and devices are gone with the process that made them,
//! however it ends. Deliberately no jitter, reordering or damage: what is asked here is how a transfer fills a link.

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

/// Of IP, as on Ethernet.
const MTU: u16 = 1500;
/// Packets that the device holds until they are read; it drops what is more, so there are many.
const DEVICE_QUEUE: u32 = 20_000;

/// Two namespaces joined. Ends when it is dropped.
pub struct Link {
    near: Ipv4Addr,
    far: Ipv4Addr,
    shared: Arc<Shared>,
    ways: Vec<JoinHandle<io::Result<()>>>,
}

/// What the two ways have in common.
struct Shared {
    conditions: RwLock<Conditions>,
    stop: AtomicBool,
    packets: AtomicU64,
    bytes: AtomicU64,
    lost: AtomicU64,
    full: AtomicU64,
}

/// Packets so far, both ways together.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Counts {
    /// That arrived.
    pub packets: u64,
    /// Of these packets.
    pub bytes: u64,
    /// By the dice.
    pub lost: u64,
    /// Because the queue was full.
    pub full: u64,
}

impl Link {
    /// Joins two namespaces. `subnet`: of which neither has an address yet; it becomes `10.77.subnet.0/24`. The same seed loses the
    /// same packets of the same traffic.
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
            ways: vec![],
        };
        for (from, to) in [(0, 1), (1, 0)] {
            let (from_device, to_device) = (devices[from].clone(), devices[to].clone());
            let (shared, seed) = (link.shared.clone(), seed.wrapping_mul(2).wrapping_add(from as u64));
            let way = std::thread::Builder::new().name(format!("link-{subnet}-{from}"));
            link.ways
                .push(way.spawn(move || forward::run(&from_device, &to_device, &shared, seed))?);
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

    /// For packets that enter from now on.
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
        for way in self.ways.drain(..) {
            if !matches!(way.join(), Ok(Ok(()))) {
                eprintln!("a link ended before it was dropped");
            }
        }
    }
}

fn device(namespace: &Namespace, address: Ipv4Addr) -> io::Result<Arc<SyncDevice>> {
    let made = namespace.run(move || {
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
    made?
}
