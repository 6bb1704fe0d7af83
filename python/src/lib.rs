//! The extension module `springtide._artifact`: checkpoints, patches and deltas for Python.
//!
//! It converts arguments, results and errors. What the bytes mean is in `artifact`. Arrays share the
//! memory of what was read: NumPy takes address, shape and owner from `__array_interface__`, so
//! neither NumPy's C API nor the buffer protocol is needed, and one wheel serves all Pythons.

#![expect(
    clippy::needless_pass_by_value,
    reason = "PyO3 hands over what it converts, such as paths"
)]

mod checkpoint;
mod error;
mod patch;
mod tensor;

use pyo3::pymodule;

#[pymodule]
mod _artifact {
    #[pymodule_export]
    use super::checkpoint::Checkpoint;
    #[pymodule_export]
    use super::error::ArtifactError;
    #[pymodule_export]
    use super::patch::{Changes, Patch};
    #[pymodule_export]
    use super::tensor::Tensor;
}
