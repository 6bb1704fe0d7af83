//! The kernels, compiled for a kind of GPU by NVRTC, which is loaded when it is needed and needs no
//! GPU itself.

#![expect(unsafe_code, reason = "calls NVRTC's C functions")]

use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};

use super::Error;

const SOURCE: &str = include_str!("kernels.cu");

/// What came of compiling.
#[derive(Debug)]
pub(super) struct Compiled {
    /// Machine code: a driver of the same major version of CUDA takes it, where it refuses the PTX
    /// of a newer NVRTC.
    pub cubin: Vec<u8>,
    #[cfg_attr(not(test), expect(dead_code, reason = "for people and tests"))]
    pub ptx: String,
    /// Warnings; empty where there are none.
    #[cfg_attr(not(test), expect(dead_code, reason = "a newer NVRTC may have more of them"))]
    pub log: String,
}

/// Whether the library is there.
pub(super) fn found() -> bool {
    // SAFETY: loads a library by name and lets it go again; NVRTC does nothing when it is loaded.
    unsafe { sys::is_culib_present() }
}

/// For a kind of GPU such as `sm_80`. The library must have been [`found`].
pub(super) fn compile(kind: &str) -> Result<Compiled, Error> {
    let failed = |error: result::NvrtcError| Error::Compile(format!("for {kind}: {error}"));
    let source = CString::new(SOURCE).map_err(|_| Error::Compile("the source has a zero byte".into()))?;
    let program = Program {
        handle: result::create_program(&source, Some(c"kernels.cu")).map_err(failed)?,
    };
    let options = [
        format!("--gpu-architecture={kind}"),
        "--std=c++17".into(),
        "--fmad=false".into(),
    ];
    // SAFETY: the program was created and not destroyed.
    let compiled = unsafe { result::compile_program(program.handle, &options) };
    // SAFETY: as above.
    let log = text(&unsafe { result::get_program_log(program.handle) }.map_err(failed)?);
    compiled.map_err(|error| Error::Compile(format!("for {kind}: {error}: {log}")))?;
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
        // SAFETY: the program is compiled for a real kind of GPU, and the size is written to a number that is there.
        unsafe { sys::nvrtcGetCUBINSize(self.handle, &raw mut bytes) }.result()?;
        let mut cubin = vec![0u8; bytes];
        // SAFETY: as many bytes as it said are there to be written.
        unsafe { sys::nvrtcGetCUBIN(self.handle, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once.
        if let Err(error) = unsafe { result::destroy_program(self.handle) } {
            tracing::debug!(%error, "destroy NVRTC's program");
        }
    }
}

/// Up to the first zero byte.
fn text(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&char| char as u8).collect();
    let text =
        CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned());
    text.trim().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `make ptx` puts NVRTC where it is found; `SPRINGTIDE_PTX` is a folder for what comes of it.
    #[test]
    fn the_kernels_compile_without_a_warning_for_ampere_and_hopper() {
        assert!(found(), "NVRTC is not here: run `make ptx`");
        for kind in ["sm_80", "sm_90"] {
            let compiled = compile(kind).unwrap();
            assert_eq!(compiled.log, "", "{kind}");
            assert!(compiled.ptx.contains(&format!(".target {kind}")));
            assert!(compiled.cubin.starts_with(b"\x7fELF"));
            for kernel in crate::device::kernels::NAMES {
                assert!(compiled.ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
            if let Some(folder) = std::env::var_os("SPRINGTIDE_PTX") {
                let folder = std::path::PathBuf::from(folder);
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join(format!("{kind}.ptx")), &compiled.ptx).unwrap();
            }
        }
    }

    #[test]
    fn a_kind_that_nvrtc_does_not_know_is_refused_by_name() {
        let error = compile("sm_1").unwrap_err().to_string();
        assert!(error.contains("sm_1"), "{error}");
    }
}
