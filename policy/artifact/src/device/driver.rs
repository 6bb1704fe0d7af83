//! The operations of a device, implemented with CUDA (`cuda`) and, in tests, on this machine's
//! processor. Operations run in the order of the calls. Reads wait for earlier operations.

#![expect(unsafe_code, reason = "declares operations on device addresses")]

use std::fmt::Debug;

use super::Error;

/// Threads per block, in every launch.
pub(super) const BLOCK_THREADS: u32 = 256;

pub(super) trait Driver: Debug + Send + Sync {
    fn name(&self) -> Result<String, Error>;

    /// Allocates `bytes` bytes, more than 0, with unspecified content. The address is a multiple of
    /// 256.
    fn allocate(&self, bytes: usize) -> Result<u64, Error>;

    /// # Safety
    /// `address` comes from [`allocate`](Self::allocate) and is freed once. No later operation uses
    /// it.
    unsafe fn free(&self, address: u64);

    /// # Safety
    /// The device has `from.len()` bytes at `to`, allocated until this operation is done.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<(), Error>;

    /// # Safety
    /// The device has `to.len()` bytes at `from`.
    unsafe fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Error>;

    /// # Safety
    /// The device has `bytes` bytes at `from` and at `to`. They do not overlap and stay allocated
    /// until this operation is done.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error>;

    /// Runs a kernel on `blocks` blocks.
    ///
    /// # Safety
    /// The kernel has this number of parameters, of eight bytes each. The memory that it reads and
    /// writes stays allocated until this operation is done.
    unsafe fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), Error>;

    /// Waits until all operations are done.
    fn finish(&self) -> Result<(), Error>;
}
