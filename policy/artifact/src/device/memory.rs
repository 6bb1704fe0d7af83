//! Bytes on a device. Addresses are given out for ranges that lie within, and every transfer is
//! bounded by them.

#![expect(
    unsafe_code,
    reason = "the device's memory is known by its addresses; they are checked here"
)]

use std::ops::Range;
use std::sync::Arc;

use super::driver::Driver;
use super::{Device, Error, Tensor};

/// What kernels read in one piece begins at multiples of this.
const ALIGNMENT: u64 = 16;

/// Freed when dropped, unless it is borrowed.
#[derive(Debug)]
pub(super) struct Memory {
    driver: Arc<dyn Driver>,
    address: u64,
    bytes: usize,
    owned: bool,
}

impl Device {
    /// Takes memory that somebody else allocated on this device, in its primary context, for a
    /// tensor.
    ///
    /// # Safety
    /// So many bytes lie at `address` until the last clone of the tensor is dropped, and may be
    /// written. Who else works with them does it on the default stream, or not at the same time.
    pub unsafe fn borrow(&self, address: u64, bytes: usize) -> Result<Tensor, Error> {
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Error::Unaligned { address });
        }
        Ok(Tensor(Arc::new(Memory {
            driver: self.driver.clone(),
            address,
            bytes,
            owned: false,
        })))
    }
}

impl Memory {
    /// Of any content.
    pub fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, Error> {
        Ok(Memory {
            driver: driver.clone(),
            // a device refuses to allocate nothing
            address: driver.allocate(bytes.max(1))?,
            bytes,
            owned: true,
        })
    }

    pub fn of(driver: &Arc<dyn Driver>, bytes: &[u8]) -> Result<Self, Error> {
        let memory = Self::new(driver, bytes.len())?;
        // SAFETY: the memory was just allocated for as many bytes, and is freed in order after this.
        unsafe { driver.write(memory.address, bytes)? };
        Ok(memory)
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Where a part of it begins; refused where it is not all within.
    pub fn address(&self, part: Range<usize>) -> Result<u64, Error> {
        if part.start > part.end || part.end > self.bytes {
            return Err(Error::Bounds {
                needed: part.end,
                found: self.bytes,
            });
        }
        Ok(self.address + part.start as u64)
    }

    pub fn read(&self, part: Range<usize>) -> Result<Vec<u8>, Error> {
        let from = self.address(part.clone())?;
        let mut bytes = vec![0; part.len()];
        // SAFETY: `address` refuses what is not within, and `bytes` has the length of the part.
        unsafe { self.driver.read(from, &mut bytes)? };
        Ok(bytes)
    }

    /// Copies a part from other memory, of the same device.
    pub fn copy(&self, from: &Memory, at: Range<usize>, to: Range<usize>) -> Result<(), Error> {
        let bytes = at.len().min(to.len());
        let (from, to) = (from.address(at)?, self.address(to)?);
        // SAFETY: both addresses are for at least so many bytes; two `Memory` do not overlap.
        unsafe { self.driver.copy(from, to, bytes) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: it was allocated in `new` and is freed once; work that was asked for before is done before.
            unsafe { self.driver.free(self.address) };
        }
    }
}
