//! Compiles the kernels for an architecture with NVRTC. NVRTC is loaded on first use and needs no
//! GPU.

#![expect(unsafe_code, reason = "calls NVRTC's C functions")]

use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};

use super::Error;

const SOURCE: &str = include_str!("kernels.cu");

/// The compiled kernels.
#[derive(Debug)]
pub(super) struct Compiled {
    /// Machine code. A driver of the same major CUDA version accepts it, even if it refuses the PTX
    /// of a newer NVRTC.
    pub cubin: Vec<u8>,
    #[cfg_attr(not(test), expect(dead_code, reason = "for people and tests"))]
    pub ptx: String,
    /// Warnings. Empty if there are none.
    #[cfg_attr(not(test), expect(dead_code, reason = "a newer NVRTC may have more of them"))]
    pub log: String,
}

/// Whether the library is installed.
pub(super) fn is_installed() -> bool {
    // SAFETY: loads a library by name and unloads it; NVRTC does nothing when it is loaded.
    unsafe { sys::is_culib_present() }
}

/// Compiles for an architecture such as `sm_80`. The library must be [installed](is_installed).
pub(super) fn compile(architecture: &str) -> Result<Compiled, Error> {
    let failed = |error: result::NvrtcError| Error::Compile(format!("for {architecture}: {error}"));
    let source = CString::new(SOURCE).map_err(|_| Error::Compile("the source has a zero byte".into()))?;
    let program = Program {
        handle: result::create_program(&source, Some(c"kernels.cu")).map_err(failed)?,
    };
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".into(),
        "--fmad=false".into(),
    ];
    // SAFETY: the program was created and not destroyed.
    let compiled = unsafe { result::compile_program(program.handle, &options) };
    // SAFETY: as above.
    let log = text(&unsafe { result::get_program_log(program.handle) }.map_err(failed)?);
    compiled.map_err(|error| Error::Compile(format!("for {architecture}: {error}: {log}")))?;
    // SAFETY: as above, and it was compiled.
    let ptx = text(&unsafe { result::get_ptx(program.handle) }.map_err(failed)?);
    Ok(Compiled {
        cubin: program.cubin().map_err(failed)?,
        ptx,
        log,
    })
}

struct Program {
    handle: sys::nvrtcProgram,
}

impl Program {
    fn cubin(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut bytes = 0;
        // SAFETY: the program is compiled for a real architecture, and the size is written to a
        // valid variable.
        unsafe { sys::nvrtcGetCUBINSize(self.handle, &raw mut bytes) }.result()?;
        let mut cubin = vec![0u8; bytes];
        // SAFETY: `cubin` has the size that NVRTC gave.
        unsafe { sys::nvrtcGetCUBIN(self.handle, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created, and is destroyed once.
        if let Err(error) = unsafe { result::destroy_program(self.handle) } {
            tracing::debug!(%error, "destroy NVRTC's program");
        }
    }
}

/// The text before the first zero byte.
fn text(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&char| char as u8).collect();
    let text =
        CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned());
    text.trim().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `make check NAME=ptx` installs NVRTC. The PTX is written to the folder `SPRINGTIDE_PTX` if that is set.
    #[test]
    fn the_kernels_compile_without_a_warning_for_ampere_and_hopper() {
        assert!(is_installed(), "NVRTC is not here: run `make check NAME=ptx`");
        for architecture in ["sm_80", "sm_90"] {
            let compiled = compile(architecture).unwrap();
            assert_eq!(compiled.log, "", "{architecture}");
            assert!(compiled.ptx.contains(&format!(".target {architecture}")));
            assert!(compiled.cubin.starts_with(b"\x7fELF"));
            for kernel in crate::device::kernels::NAMES {
                assert!(compiled.ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
            if let Some(folder) = std::env::var_os("SPRINGTIDE_PTX") {
                let folder = std::path::PathBuf::from(folder);
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join(format!("{architecture}.ptx")), &compiled.ptx).unwrap();
            }
        }
    }

    #[test]
    fn an_unknown_architecture_is_refused_by_name() {
        let error = compile("sm_1").unwrap_err().to_string();
        assert!(error.contains("sm_1"), "{error}");
    }
}
