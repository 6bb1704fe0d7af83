//! Deltas where the weights are in a GPU's memory: which weights differ and their new values come
//! from there for [`delta::encode_changes`], a [`delta::Patch`] is written into place there, and
//! frames are hashed there. To the bit what `delta` does on the CPU.
//!
//! Weights are bytes here. Coding stays with the CPU, which has the base; so does the decision what
//! to follow. What is done here is done one after another on the context's default stream, after
//! what others asked for there.
//!
//! - `driver`: what is asked of a device; `cuda`: CUDA's; `nvrtc`: its compiler. `memory`: bytes
//!   there, and their bounds
//! - `kernels.cu`, `kernels`: what runs there, and what each may touch
//! - `compare`, `write`, `hash`: what those make together

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

/// Why something was not done on a device.
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
    #[error("the patch did not make its result of what was on the device, which has its values of before again")]
    NotResult,
    #[error(transparent)]
    Delta(#[from] delta::Error),
}

/// One GPU.
#[derive(Debug, Clone)]
pub struct Device {
    driver: Arc<dyn Driver>,
}

/// The bytes of a tensor on a device. Clones are the same memory, which goes with the last of them.
#[derive(Debug, Clone)]
pub struct Tensor(Arc<Memory>);

/// A patch on the device, beside the tensors that it is for: writing it needs nothing from the
/// host.
#[derive(Debug)]
pub struct Staged {
    written: write::Written,
    frames: hash::Frames,
}

impl Device {
    /// The GPU of this number, by CUDA's order.
    #[cfg(feature = "cuda")]
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        Ok(Device {
            driver: Arc::new(cuda::Cuda::open(ordinal)?),
        })
    }

    /// What the device is called.
    pub fn name(&self) -> Result<String, Error> {
        self.driver.name()
    }

    /// Copies bytes to the device.
    pub fn upload(&self, bytes: &[u8]) -> Result<Tensor, Error> {
        Ok(Tensor(Arc::new(Memory::of(&self.driver, bytes)?)))
    }

    /// What becomes of each frame of `old` in `new`, tensors of the same dtype and shape: an entry
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
        hash::Hashes::of(&self.driver, frames.map(|at| (&tensor.0, at)))?.digests()
    }

    /// Brings a patch to the device, for `tensors` by name: all that it changes must be among them.
    pub fn stage(&self, patch: &Patch, tensors: &BTreeMap<String, Tensor>) -> Result<Staged, Error> {
        for tensor in tensors.values() {
            self.check(tensor)?;
        }
        let mut touched = vec![];
        for name in patch.tensors() {
            let tensor = tensors.get(name).ok_or_else(|| Error::NoTensor(name.into()))?;
            for piece in patch.pieces(name) {
                if piece.at.end > tensor.0.len() {
                    return Err(Error::Size {
                        name: name.into(),
                        needed: piece.at.end,
                        found: tensor.0.len(),
                    });
                }
                touched.push((&tensor.0, piece));
            }
        }
        Ok(Staged {
            written: write::Written::of(&self.driver, &touched)?,
            frames: hash::Frames::of(&self.driver, &touched)?,
        })
    }

    /// Waits until all that was asked for is done.
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
    /// Writes the result's values, from whatever a write or a [`revert`](Self::revert) before it
    /// left. What computes with the tensors pauses for this; when it returns, it is done.
    pub fn write(&self) -> Result<(), Error> {
        self.written.write(true)
    }

    /// Writes the base's values back.
    pub fn revert(&self) -> Result<(), Error> {
        self.written.write(false)
    }

    /// Which end of the patch the tensors are at, by XXH3-128 of the frames that change, on the
    /// device.
    pub fn state(&self) -> Result<PatchState, Error> {
        self.frames.state()
    }

    /// [`write`](Self::write), and then a look at the frames: where they are not the result's, the
    /// base's values are written back.
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
