//! [`Driver`] with CUDA. NVIDIA's driver and NVRTC are loaded when a device is opened, so the
//! program also runs without them.

#![expect(unsafe_code, reason = "calls the driver's C functions")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, DriverError, result, sys};
use cudarc::nvrtc::Ptx;

use super::driver::{BLOCK_THREADS, Driver};
use super::{Error, kernels, nvrtc};

/// Oldest CUDA version of the driver, in its own notation: 12.0.
const VERSION_MIN: i32 = 12_000;
/// The legacy default stream. Work that others queued there, such as PyTorch, runs first.
const DEFAULT_STREAM: sys::CUstream = std::ptr::null_mut();

#[derive(Debug)]
pub(super) struct Cuda {
    context: Arc<CudaContext>,
    kernels: HashMap<&'static str, CudaFunction>,
    /// Whether allocations are ordered with other work on the stream.
    ordered: bool,
}

impl Cuda {
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        check_libraries()?;
        result::init().map_err(failed("start CUDA"))?;
        let mut version = 0;
        // SAFETY: the driver is loaded and writes to a valid variable.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }
            .result()
            .map_err(failed("ask for the driver's version"))?;
        if version < VERSION_MIN {
            return Err(Error::Missing(format!(
                "the NVIDIA driver is for CUDA {}.{}: install one for CUDA 12 (525 or newer)",
                version / 1000,
                version % 1000 / 10
            )));
        }
        let count = result::device::get_count().map_err(failed("count the GPUs"))?;
        if usize::try_from(count).is_ok_and(|count| ordinal >= count) {
            return Err(Error::Missing(format!(
                "there is no GPU {ordinal}: CUDA sees {count}, counted from 0 (CUDA_VISIBLE_DEVICES hides some)"
            )));
        }
        let context = CudaContext::new(ordinal).map_err(failed("open the GPU"))?;
        let (major, minor) = context
            .compute_capability()
            .map_err(failed("ask for the GPU's compute capability"))?;
        if major < 8 {
            let name = context.name().unwrap_or_default();
            return Err(Error::TooOld { name, major, minor });
        }
        let compiled = nvrtc::compile(&format!("sm_{major}{minor}"))?;
        let module = context
            .load_module(Ptx::from_binary(compiled.cubin))
            .map_err(failed("load the kernels"))?;
        let mut found = HashMap::new();
        for name in kernels::NAMES {
            let kernel = module.load_function(name).map_err(failed("find a kernel"))?;
            found.insert(name, kernel);
        }
        Ok(Cuda {
            ordered: context.has_async_alloc(),
            context,
            kernels: found,
        })
    }

    /// Every operation needs this context on the calling thread.
    fn bind(&self) -> Result<(), Error> {
        self.context.bind_to_thread().map_err(failed("use the GPU"))
    }
}

/// Returns an error that names all missing libraries.
fn check_libraries() -> Result<(), Error> {
    let mut missing = vec![];
    // SAFETY: loads the driver's library by name and unloads it; it does nothing before it is
    // started.
    if !unsafe { sys::is_culib_present() } {
        missing.push(
            "the NVIDIA driver (libcuda.so.1) is not found: install the driver of this machine's GPU, 525 or newer",
        );
    }
    if !nvrtc::is_installed() {
        missing.push(
            "CUDA's compiler NVRTC (libnvrtc.so.12) is not found: install it (package cuda-nvrtc-12-9, or `make nvrtc` \
             fetches it into .nvrtc) and name its folder in LD_LIBRARY_PATH",
        );
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Missing(missing.join("; ")))
}

fn failed(action: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Driver {
        action,
        reason: reason(error),
    }
}

fn reason(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| text.map(|text| text.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Ok(name), Ok(what)) => format!("{name}: {what}"),
        _ => format!("CUDA's error {}", error.0 as u32),
    }
}

impl Driver for Cuda {
    fn name(&self) -> Result<String, Error> {
        self.context.name().map_err(failed("ask for the GPU's name"))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, Error> {
        self.bind()?;
        let address = if self.ordered {
            // SAFETY: the default stream always exists, and all work with the memory runs on it.
            unsafe { result::malloc_async(DEFAULT_STREAM, bytes) }
        } else {
            // SAFETY: the context is bound to this thread.
            unsafe { result::malloc_sync(bytes) }
        };
        address.map_err(failed("allocate memory on the GPU"))
    }

    unsafe fn free(&self, address: u64) {
        let freed = self.bind().and_then(|()| {
            let freed = if self.ordered {
                // SAFETY: allocated on the same stream; the caller frees it once.
                unsafe { result::free_async(address, DEFAULT_STREAM) }
            } else {
                // SAFETY: from `allocate`; the caller frees it once. This call waits for queued
                // work.
                unsafe { result::free_sync(address) }
            };
            freed.map_err(failed("free memory on the GPU"))
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory on the GPU leaked");
        }
    }

    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: as promised by the caller. The call returns after reading `from`.
        unsafe { result::memcpy_htod_sync(to, from) }.map_err(failed("copy to the GPU"))
    }

    unsafe fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: as promised by the caller. The call returns after the copy.
        unsafe { result::memcpy_dtoh_sync(to, from) }.map_err(failed("copy from the GPU"))
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: as promised by the caller.
        unsafe { result::memcpy_dtod_async(to, from, bytes, DEFAULT_STREAM) }.map_err(failed("copy within the GPU"))
    }

    unsafe fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), Error> {
        self.bind()?;
        let function = self.kernels.get(kernel).ok_or_else(|| Error::Driver {
            action: "launch a kernel",
            reason: format!("`{kernel}` is not known"),
        })?;
        let mut arguments: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| std::ptr::from_ref(argument).cast_mut().cast())
            .collect();
        let (grid, block) = ((blocks, 1, 1), (BLOCK_THREADS, 1, 1));
        // SAFETY: the number of arguments is the kernel's, and they are read before this returns;
        // the caller promises the rest.
        unsafe { result::launch_kernel(function.cu_function(), grid, block, 0, DEFAULT_STREAM, &mut arguments) }
            .map_err(|error| Error::Driver {
                action: "launch a kernel",
                reason: format!("`{kernel}`: {}", reason(error)),
            })
    }

    fn finish(&self) -> Result<(), Error> {
        self.bind()?;
        // SAFETY: the default stream always exists.
        unsafe { result::stream::synchronize(DEFAULT_STREAM) }.map_err(failed("wait for the GPU"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_says_what_to_install() {
        // SAFETY: as in `check_libraries`.
        let driver = unsafe { sys::is_culib_present() };
        match Cuda::open(0) {
            Ok(_) => assert!(driver),
            Err(Error::Missing(reason)) if !driver => assert!(reason.contains("install the driver"), "{reason}"),
            Err(error) => panic!("{error}"),
        }
    }
}
