//! Worlds that are virtual machines (QEMU). A machine boots once, until its services answer; its memory
//! and the state of its devices are saved. Each world is a fork of this snapshot:
//!
//! ```text
//!   boot ─► services answer ─► snapshot: memory, state
//!                                 ├─► fork: pages of `memory` until it writes to them, then its own
//!                                 └─► fork …
//! ```
//! The disk is read-only and shared by all. What a world writes goes to a layer in its memory, so a fork
//! of the memory is a fork of the disk, and no world writes to a disk of the host. A fork gets its own
//! id, host name, clock and entropy. It shares with the others what the kernel and the services chose at
//! boot: addresses in memory, process ids, `boot_id`, the identifier of the Postgres cluster.
//!
//! Machines have no network. This module makes no snapshots of worlds that already ran something.

mod agent;
mod image;
mod launch;
mod machine;
mod options;
mod pool;
mod qmp;
mod snapshot;

pub use machine::Machine;
pub use options::{Accelerator, Options};
pub use pool::{Pool, State};
pub use snapshot::Snapshot;
