//! Deltas of weights in a GPU's memory. The GPU finds the changes for [`delta::encode_changes`],
//! writes a [`delta::Patch`] in place, and hashes frames. All results equal those of `delta` on the
//! CPU, bit for bit.
//!
//! Weights are bytes here. The CPU has the base and encodes the delta. All work runs in order on
//! the context's default stream, after work that others queued there.
//!
//! - `driver`: the operations of a device; `cuda`: the same with CUDA; `nvrtc`: CUDA's compiler
//! - `memory`: memory on the device, with its bounds
//! - `kernels.cu`: the kernels; `kernels`: checked calls of them
//! - `compare`, `write`, `hash`: the operations built from the kernels

mod compare;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod hash;
mod kernels;
mod memory;
#[cfg(feature = "cuda")]
mod nvrtc;
mod write;

use std::collections::BTreeMap;
use std::sync::Arc;

use safetensors::Dtype;

use crate::delta::{self, Change, Patch, PatchState};
use driver::Driver;
use memory::Memory;

/// Why an operation on a device failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Missing(String),
    #[error("the GPU {name} has compute capability {major}.{minor}: 8.0 (Ampere) or newer is needed")]
    TooOld { name: String, major: i32, minor: i32 },
    #[error("compile the kernels with NVRTC: {0}")]
    Compile(String),
    #[error("{action}: {reason}")]
    Driver { action: &'static str, reason: String },
    #[error("{address:#x} is no multiple of 16: copy the tensor to memory that begins at one")]
    Unaligned { address: u64 },
    #[error("{needed} bytes are needed where there are {found}")]
    Bounds { needed: usize, found: usize },
    #[error("`{kernel}` would need more than 2^31 blocks")]
    TooMany { kernel: &'static str },
    #[error("the tensors are on different devices, or were opened twice")]
    Elsewhere,
    #[error("`{0}` is not among the tensors on the device")]
    NoTensor(String),
    #[error("`{name}` has {found} bytes on the device, where the patch needs {needed}")]
    Size { name: String, needed: usize, found: usize },
    #[error("the tensors on the device were not the patch's base: the patch was reverted")]
    NotResult,
    #[error(transparent)]
    Delta(#[from] delta::Error),
}

/// One GPU.
#[derive(Debug, Clone)]
pub struct Device {
    driver: Arc<dyn Driver>,
}

/// The bytes of a tensor on a device. Clones share the memory; dropping the last one frees it.
#[derive(Debug, Clone)]
pub struct Tensor(Arc<Memory>);

/// A patch on the device, with the tensors that it changes. Writing it transfers nothing from the
/// host.
#[derive(Debug)]
pub struct Staged {
    writes: write::PatchWrites,
    frames: hash::PatchFrames,
}

impl Device {
    /// The GPU with this number in CUDA's order.
    #[cfg(feature = "cuda")]
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Ok(Device {
            driver: Arc::new(cuda::Cuda::open(ordinal)?),
        })
    }

    pub fn name(&self) -> Result<String, Error> {
        self.driver.name()
    }

    /// Copies bytes to the device.
    pub fn upload(&self, bytes: &[u8]) -> Result<Tensor, Error> {
        Ok(Tensor(Arc::new(Memory::upload(&self.driver, bytes)?)))
    }

    /// The change of each frame from `old` to `new`, which have the same dtype and shape: an entry
    /// of [`delta::Changes`].
    pub fn changes(&self, dtype: Dtype, old: &Tensor, new: &Tensor) -> Result<Vec<Change>, Error> {
        self.check(old)?;
        self.check(new)?;
        compare::changes(&self.driver, crate::tensor::weight_bytes(dtype), &old.0, &new.0)
    }

    /// XXH3-128 (seed 0, as an integer) of each frame of a tensor.
    pub fn digests(&self, dtype: Dtype, tensor: &Tensor) -> Result<Vec<u128>, Error> {
        self.check(tensor)?;
        let (bytes, frame) = (
            tensor.bytes(),
            delta::FRAME_WEIGHTS * crate::tensor::weight_bytes(dtype),
        );
        let frames = (0..bytes).step_by(frame).map(|start| start..bytes.min(start + frame));
        hash::Hashes::new(&self.driver, frames.map(|range| (&tensor.0, range)))?.digests()
    }

    /// Uploads a patch for `tensors`, by name. They must include every tensor that it changes.
    pub fn stage(&self, patch: &Patch, tensors: &BTreeMap<String, Tensor>) -> Result<Staged, Error> {
        for tensor in tensors.values() {
            self.check(tensor)?;
        }
        let mut touched = vec![];
        for name in patch.tensors() {
            let tensor = tensors.get(name).ok_or_else(|| Error::NoTensor(name.into()))?;
            for piece in patch.pieces(name) {
                if piece.byte_range.end > tensor.0.len() {
                    return Err(Error::Size {
                        name: name.into(),
                        needed: piece.byte_range.end,
                        found: tensor.0.len(),
                    });
                }
                touched.push((&tensor.0, piece));
            }
        }
        Ok(Staged {
            writes: write::PatchWrites::upload(&self.driver, &touched)?,
            frames: hash::PatchFrames::new(&self.driver, &touched)?,
        })
    }

    /// Waits until all queued work is done.
    pub fn finish(&self) -> Result<(), Error> {
        self.driver.finish()
    }

    fn check(&self, tensor: &Tensor) -> Result<(), Error> {
        if Arc::ptr_eq(&self.driver, tensor.0.driver()) {
            Ok(())
        } else {
            Err(Error::Elsewhere)
        }
    }
}

impl Tensor {
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Copies the bytes from the device.
    pub fn download(&self) -> Result<Vec<u8>, Error> {
        self.0.read(0..self.0.len())
    }
}

impl Staged {
    /// Writes the result's values and waits until they are written, also after a write or
    /// [`revert`](Self::revert) that stopped halfway. Nothing else may use the tensors meanwhile.
    pub fn write(&self) -> Result<(), Error> {
        self.writes.write(true)
    }

    /// Writes the base's values back.
    pub fn revert(&self) -> Result<(), Error> {
        self.writes.write(false)
    }

    /// Which version the tensors are, by XXH3-128 of the changed frames, computed on the device.
    pub fn state(&self) -> Result<PatchState, Error> {
        self.frames.state()
    }

    /// [`write`](Self::write) that then checks the frames. If they are not the result's, it writes
    /// the base's values back and returns an error.
    pub fn apply(&self) -> Result<(), Error> {
        self.write()?;
        if self.state()? != PatchState::Result {
            self.revert()?;
            return Err(Error::NotResult);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
