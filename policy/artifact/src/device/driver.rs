//! What the rest of this module asks of a device. Two things give it: CUDA (`cuda`), and in tests
//! this machine's processor. Work is done in the order in which it was asked for; what reads waits
//! for it.

#![expect(unsafe_code, reason = "declares what may be asked for of addresses")]

use std::fmt::Debug;

use super::Error;

/// Threads of a block, in every launch.
pub(super) const BLOCK_THREADS: u32 = 256;

pub(super) trait Driver: Debug + Send + Sync {
    fn name(&self) -> Result<String, Error>;

    /// The address of so many bytes, more than 0; a multiple of 256. What they are is not said.
    fn allocate(&self, bytes: usize) -> Result<u64, Error>;

    /// # Safety
    /// `address` is one that [`allocate`](Self::allocate) gave, once; nothing that is asked for
    /// from now on touches it.
    unsafe fn free(&self, address: u64);

    /// # Safety
    /// As many bytes as `from` has lie at `to` on the device, and stay until this work is done.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<(), Error>;

    /// # Safety
    /// As many bytes as `to` has lie at `from` on the device.
    unsafe fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Error>;

    /// # Safety
    /// So many bytes lie at `from` and at `to` on the device, do not overlap, and stay until this
    /// work is done.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error>;

    /// Runs a kernel on so many blocks.
    ///
    /// # Safety
    /// The kernel takes as many arguments of eight bytes, and what it reads and writes with them is
    /// there until this work is done.
    unsafe fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), Error>;

    /// Waits until all that was asked for is done.
    fn finish(&self) -> Result<(), Error>;
}
