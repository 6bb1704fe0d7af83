//! [`Driver`] on this machine's processor. A C++ compiler compiles `kernels.cu`, and a launch is a
//! loop over its threads. Memory has guards on both sides, and undefined behavior in C++, such as a
//! misaligned read, stops the process.

#![expect(unsafe_code, reason = "calls the kernels as C functions")]

use std::alloc::Layout;
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use libloading::Library;

use crate::device::driver::{BLOCK_THREADS, Driver};
use crate::device::{Error, kernels};

/// Guard bytes before and after each allocation.
const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xa5;

#[derive(Debug)]
pub struct Host {
    library: Library,
    /// Whether threads run in descending order. Results must not depend on the order.
    backwards: bool,
    allocated: Mutex<HashMap<u64, usize>>,
}

type Three = unsafe extern "C" fn(u64, u64, u64);
type Four = unsafe extern "C" fn(u64, u64, u64, u64);
type Five = unsafe extern "C" fn(u64, u64, u64, u64, u64);
type Eight = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64);

impl Host {
    pub fn new(backwards: bool) -> Self {
        static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
        let (_, path) = BUILT.get_or_init(build);
        // SAFETY: the library runs no code when it is loaded.
        let library = unsafe { Library::new(path) }.unwrap();
        for name in kernels::NAMES {
            // SAFETY: the function is looked up, not called.
            unsafe { library.get::<Three>(name) }.unwrap();
        }
        Host {
            library,
            backwards,
            allocated: Mutex::default(),
        }
    }
}

fn build() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernels.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/device");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]);
    compiler.args(["-Wno-unknown-pragmas", "-fno-strict-aliasing"]);
    compiler.args([
        "-fsanitize=undefined",
        "-fsanitize-undefined-trap-on-error",
        "-I",
        source,
    ]);
    compiler.arg(format!("{source}/tests/host.cpp")).arg("-o").arg(&path);
    let output = compiler
        .output()
        .expect("a C++ compiler is needed, as librdkafka needs one");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (folder, path)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes + 2 * GUARD, 256).unwrap()
}

impl Driver for Host {
    fn name(&self) -> Result<String, Error> {
        Ok("this machine's processor".into())
    }

    fn allocate(&self, bytes: usize) -> Result<u64, Error> {
        // SAFETY: the layout has a size above 0.
        let start = unsafe { std::alloc::alloc(layout(bytes)) };
        assert!(!start.is_null());
        // SAFETY: this number of bytes was just allocated.
        unsafe { start.write_bytes(GUARD_BYTE, bytes + 2 * GUARD) };
        let address = start as u64 + GUARD as u64;
        self.allocated.lock().unwrap().insert(address, bytes);
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        let bytes = self.allocated.lock().unwrap().remove(&address).unwrap();
        let start = (address - GUARD as u64) as *mut u8;
        // SAFETY: `allocate` allocated this number of bytes there.
        let guarded = unsafe { std::slice::from_raw_parts(start, bytes + 2 * GUARD) };
        let intact = |guard: &[u8]| guard.iter().all(|&byte| byte == GUARD_BYTE);
        assert!(
            intact(&guarded[..GUARD]) && intact(&guarded[GUARD + bytes..]),
            "a kernel wrote outside its memory"
        );
        // SAFETY: allocated with the same layout, and freed once.
        unsafe { std::alloc::dealloc(start, layout(bytes)) };
    }

    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<(), Error> {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Error> {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), Error> {
        type Place = unsafe extern "C" fn(u32, u32, u32);
        // SAFETY: `host.cpp` defines it with these parameters.
        let place = unsafe { self.library.get::<Place>("place") }.unwrap();
        let threads = u64::from(blocks) * u64::from(BLOCK_THREADS);
        let each = |run: &dyn Fn()| {
            for n in 0..threads {
                let n = if self.backwards { threads - 1 - n } else { n };
                let (block, thread) = (n / u64::from(BLOCK_THREADS), n % u64::from(BLOCK_THREADS));
                // SAFETY: it sets variables of this thread.
                unsafe { place(block as u32, thread as u32, BLOCK_THREADS) };
                run();
            }
        };
        // SAFETY of all calls: the kernel has this number of parameters of eight bytes; the caller
        // promises the rest.
        match *arguments {
            [a, b, c] => {
                // SAFETY: above.
                let kernel = unsafe { self.library.get::<Three>(kernel) }.unwrap();
                // SAFETY: above.
                each(&|| unsafe { kernel(a, b, c) });
            }
            [a, b, c, d] => {
                // SAFETY: above.
                let kernel = unsafe { self.library.get::<Four>(kernel) }.unwrap();
                // SAFETY: above.
                each(&|| unsafe { kernel(a, b, c, d) });
            }
            [a, b, c, d, e] => {
                // SAFETY: above.
                let kernel = unsafe { self.library.get::<Five>(kernel) }.unwrap();
                // SAFETY: above.
                each(&|| unsafe { kernel(a, b, c, d, e) });
            }
            [a, b, c, d, e, f, g, h] => {
                // SAFETY: above.
                let kernel = unsafe { self.library.get::<Eight>(kernel) }.unwrap();
                // SAFETY: above.
                each(&|| unsafe { kernel(a, b, c, d, e, f, g, h) });
            }
            _ => panic!("`{kernel}` with {} arguments", arguments.len()),
        }
        Ok(())
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(())
    }
}
