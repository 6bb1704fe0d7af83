//! Errors as Python exceptions: `OSError` and its kinds for files that cannot be read or written,
//! `ArtifactError` for bytes that are refused.

use std::error::Error;
use std::path::Path;

use artifact::checkpoint;
use pyo3::exceptions::PyValueError;
use pyo3::{PyErr, create_exception};

create_exception!(
    springtide,
    ArtifactError,
    PyValueError,
    "A checkpoint, patch or delta was refused. The message says why, and what to do."
);

/// The exception for an error of `checkpoint`.
pub fn of_checkpoint(error: checkpoint::Error) -> PyErr {
    match error {
        checkpoint::Error::Io { action, path, source } => of_io(action, Path::new(&path), &source),
        other => refused(&other),
    }
}

/// The exception for a file that cannot be read or written.
pub fn of_io(action: &str, path: &Path, error: &std::io::Error) -> PyErr {
    let text = format!("{action} {}: {error}", path.display());
    std::io::Error::new(error.kind(), text).into()
}

/// The exception for bytes that were refused, with all causes.
pub fn refused(error: &dyn Error) -> PyErr {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // some errors already quote their cause
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    ArtifactError::new_err(text)
}

/// [`refused`] for one file.
pub fn refused_file(path: &Path, error: &dyn Error) -> PyErr {
    ArtifactError::new_err(format!("{}: {error}", path.display()))
}
