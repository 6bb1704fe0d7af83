//! Memory on a device. It gives out addresses only for ranges within its bounds, and checks every
//! transfer.

#![expect(unsafe_code, reason = "works with device addresses, which are checked here")]

use std::ops::Range;
use std::sync::Arc;

use super::driver::Driver;
use super::{Device, Error, Tensor};

/// Bytes that kernels read at once. Tensors begin at a multiple of it.
const ALIGNMENT: u64 = 16;

/// Freed when dropped, unless borrowed.
#[derive(Debug)]
pub(super) struct Memory {
    driver: Arc<dyn Driver>,
    address: u64,
    bytes: usize,
    owned: bool,
}

impl Device {
    /// A tensor in memory that another library allocated on this device, in its primary context.
    ///
    /// # Safety
    /// `address` has `bytes` writable bytes until the last clone of the tensor is dropped. Others
    /// use them on the default stream, or not at the same time.
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
    /// Allocates memory with unspecified content.
    pub fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, Error> {
        Ok(Memory {
            driver: driver.clone(),
            // devices refuse to allocate 0 bytes
            address: driver.allocate(bytes.max(1))?,
            bytes,
            owned: true,
        })
    }

    pub fn upload(driver: &Arc<dyn Driver>, bytes: &[u8]) -> Result<Self, Error> {
        let memory = Self::new(driver, bytes.len())?;
        // SAFETY: the memory was just allocated with this length, and is freed after this
        // operation.
        unsafe { driver.write(memory.address, bytes)? };
        Ok(memory)
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The address of a part. Returns an error if the part is not within the memory.
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
        // SAFETY: `address` checked the part, and `bytes` has its length.
        unsafe { self.driver.read(from, &mut bytes)? };
        Ok(bytes)
    }

    /// Copies a part of other memory on the same device.
    pub fn copy(&self, from: &Memory, part: Range<usize>, to: Range<usize>) -> Result<(), Error> {
        let bytes = part.len().min(to.len());
        let (from, to) = (from.address(part)?, self.address(to)?);
        // SAFETY: both parts have at least `bytes` bytes; two `Memory` do not overlap.
        unsafe { self.driver.copy(from, to, bytes) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: allocated in `new`, freed once; earlier operations run before this one.
            unsafe { self.driver.free(self.address) };
        }
    }
}
