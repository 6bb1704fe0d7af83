//! `springtide.Checkpoint`: all bytes of one version.

use std::num::NonZero;
use std::path::PathBuf;

use artifact::checkpoint;
use artifact::delta;
use artifact::digest::Digest;
use artifact::threads::Threads;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{ArtifactError, of_checkpoint, refused};
use crate::tensor::Tensor;

/// All bytes of one version: tensors in Hugging Face coordinates, and the files beside them.
#[pyclass(frozen, module = "springtide")]
pub struct Checkpoint {
    pub inner: checkpoint::Checkpoint,
}

#[pymethods]
impl Checkpoint {
    /// Maps a Hugging Face folder into memory. Nobody may change its files while tensors of it are
    /// in use; to replace a folder, rename another one over it.
    #[staticmethod]
    fn open(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| checkpoint::Checkpoint::map_dir(&folder));
        Ok(Checkpoint {
            inner: inner.map_err(of_checkpoint)?,
        })
    }

    /// The content hash, in hex. Hashes all bytes, once, on `threads` threads (all, if None).
    #[pyo3(signature = (*, threads = None))]
    fn root(&self, py: Python<'_>, threads: Option<usize>) -> PyResult<String> {
        let threads = compute_threads(threads)?;
        Ok(py.detach(|| self.inner.root_on(&threads)).to_string())
    }

    /// Raises `ArtifactError` unless the content hash is `root`.
    #[pyo3(signature = (root, *, threads = None))]
    fn verify(&self, py: Python<'_>, root: &str, threads: Option<usize>) -> PyResult<()> {
        let expected: Digest = root
            .parse()
            .map_err(|error| ArtifactError::new_err(format!("{root:?} is no content hash: {error}")))?;
        let threads = compute_threads(threads)?;
        let found = py.detach(|| self.inner.root_on(&threads));
        match found == expected {
            true => Ok(()),
            false => Err(ArtifactError::new_err(format!(
                "the checkpoint has the content hash {found}, not {expected}: it is another version or damaged; \
                 fetch it again"
            ))),
        }
    }

    /// The version that a delta makes of this one: decoded, and verified to the last byte. Tensors
    /// that stay as they are share this one's memory.
    #[pyo3(signature = (delta, *, threads = None))]
    fn apply_delta(&self, py: Python<'_>, delta: &[u8], threads: Option<usize>) -> PyResult<Self> {
        let threads = compute_threads(threads)?;
        let applied = py.detach(|| delta::apply(&self.inner, delta, &threads));
        Ok(Checkpoint {
            inner: applied.map_err(|error| refused(&error))?,
        })
    }

    /// The delta from this version to another, as the trainer publishes it.
    #[pyo3(signature = (result, *, threads = None))]
    fn delta_to<'py>(
        &self,
        py: Python<'py>,
        result: &Checkpoint,
        threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let threads = compute_threads(threads)?;
        let encoded = py.detach(|| delta::encode(&self.inner, &result.inner, &threads));
        Ok(PyBytes::new(py, &encoded.map_err(|error| refused(&error))?))
    }

    /// Writes a Hugging Face folder; each file atomically.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        py.detach(|| self.inner.write_dir(&folder)).map_err(of_checkpoint)
    }

    /// `config.json`, `tokenizer.json`, … by name. Each access copies them.
    #[getter]
    fn files<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let files = PyDict::new(py);
        for (name, bytes) in &self.inner.files {
            files.set_item(name, PyBytes::new(py, bytes))?;
        }
        Ok(files)
    }

    /// Bytes of all tensors.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.tensor_bytes()
    }

    /// Names of all tensors, in order.
    fn keys(&self) -> Vec<String> {
        self.inner.tensors.keys().cloned().collect()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Tensor> {
        let tensor = self.inner.tensors.get(name).cloned();
        let tensor = tensor.ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        Ok(tensor.into())
    }

    fn __contains__(&self, name: &str) -> bool {
        self.inner.tensors.contains_key(name)
    }

    fn __len__(&self) -> usize {
        self.inner.tensors.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.keys().into_pyobject(py)?.call_method0("__iter__")
    }

    fn __repr__(&self) -> String {
        format!(
            "<springtide.Checkpoint {} tensors, {} bytes>",
            self.inner.tensors.len(),
            self.inner.tensor_bytes()
        )
    }
}

fn compute_threads(count: Option<usize>) -> PyResult<Threads> {
    let all = || std::thread::available_parallelism().map_or(1, NonZero::get);
    Threads::new(count.unwrap_or_else(all)).map_err(|error| refused(&error))
}
