//! `springtide.Patch`: the weights in which one version differs from another.

use std::collections::BTreeMap;
use std::path::PathBuf;

use artifact::atomic;
use artifact::patch::{self, Contents, LocalPart};
use artifact::tensor::TensorData;
use bytes::Bytes;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use safetensors::Dtype;

use crate::checkpoint::Checkpoint;
use crate::error::{of_io, refused, refused_file};
use crate::tensor::Tensor;

/// A checked patch, in memory: nobody else can change it.
#[pyclass(frozen, module = "springtide")]
pub struct Patch {
    contents: Contents,
    file: Bytes,
}

/// The weights of one tensor that change.
#[pyclass(frozen, module = "springtide")]
pub struct Changes {
    inner: patch::Changes,
}

#[pymethods]
impl Patch {
    /// Reads a file and checks all of it: format, digest, and that every index lies in its tensor.
    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| {
            let file = std::fs::read(&path).map_err(|error| of_io("read", &path, &error))?;
            let file = Bytes::from(file);
            let contents = Contents::from_bytes(&file).map_err(|error| refused_file(&path, &error))?;
            Ok(Patch { contents, file })
        })
    }

    /// The same of the bytes of a file.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, file: Vec<u8>) -> PyResult<Self> {
        py.detach(|| {
            let file = Bytes::from(file);
            let contents = Contents::from_bytes(&file).map_err(|error| refused(&error))?;
            Ok(Patch { contents, file })
        })
    }

    /// The bytes of the patch of one worker of an engine. `parts`: what it holds, as JSON (`artifact::patch::LocalPart`).
    fn of_worker<'py>(&self, py: Python<'py>, parts: &str) -> PyResult<Bound<'py, PyBytes>> {
        let made = py.detach(|| {
            let parts: Vec<LocalPart> = serde_json::from_str(parts).map_err(|error| refused(&error))?;
            self.contents.of_worker(&parts).map_err(|error| refused(&error))
        });
        Ok(PyBytes::new(py, &made?.file))
    }

    /// The weights in which `new` differs from `old`. Raises `ArtifactError` if they have different
    /// tensors or another `config.json`.
    #[staticmethod]
    fn between(py: Python<'_>, old: &Checkpoint, new: &Checkpoint) -> PyResult<Self> {
        py.detach(|| {
            let patch = patch::between(&old.inner, &new.inner).map_err(|error| refused(&error))?;
            let file = Bytes::from(patch.file);
            let contents = Contents::from_bytes(&file).map_err(|error| refused(&error))?;
            Ok(Patch { contents, file })
        })
    }

    /// Writes the patch to a file, atomically.
    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| atomic::replace(&path, &[&self.file]))
            .map_err(|error| of_io("write", &path, &error))
    }

    /// The bytes of the file.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.file)
    }

    /// Content hash of the version that it applies to, in hex.
    #[getter(from_root)]
    fn base_root(&self) -> String {
        self.contents.from.to_string()
    }

    /// Content hash of the version that it makes, in hex.
    #[getter(to_root)]
    fn result_root(&self) -> String {
        self.contents.to.to_string()
    }

    /// Number of weights that it changes.
    #[getter]
    fn weights(&self) -> u64 {
        self.contents.weights()
    }

    /// Names of the tensors that change, in order.
    fn keys(&self) -> Vec<String> {
        self.tensors().keys().cloned().collect()
    }

    fn __getitem__(&self, name: &str) -> PyResult<Changes> {
        let changes = self.tensors().get(name).cloned();
        let inner = changes.ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        Ok(Changes { inner })
    }

    fn __contains__(&self, name: &str) -> bool {
        self.tensors().contains_key(name)
    }

    fn __len__(&self) -> usize {
        self.tensors().len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.keys().into_pyobject(py)?.call_method0("__iter__")
    }

    fn __repr__(&self) -> String {
        let Contents { from, to, .. } = &self.contents;
        let weights = self.contents.weights();
        format!(
            "<springtide.Patch {} to {}, {weights} weights>",
            from.short(),
            to.short()
        )
    }
}

impl Patch {
    fn tensors(&self) -> &BTreeMap<String, patch::Changes> {
        &self.contents.tensors
    }
}

#[pymethods]
impl Changes {
    /// Shape of the whole tensor.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.inner.shape)
    }

    /// Where: I64 `[k]`, flat, ascending.
    #[getter]
    fn indices(&self, py: Python<'_>) -> PyResult<Tensor> {
        py.detach(|| {
            let mut bytes = vec![0; self.inner.count() * size_of::<i64>()];
            for (place, index) in bytes.as_chunks_mut().0.iter_mut().zip(self.inner.indices()) {
                *place = (index as i64).to_le_bytes();
            }
            let indices = TensorData::new(Dtype::I64, vec![self.inner.count()], bytes);
            indices.map(Tensor::from).map_err(|error| refused(&error))
        })
    }

    /// What is there now: `[k]`, in the tensor's dtype.
    #[getter]
    fn values(&self) -> Tensor {
        self.inner.values.clone().into()
    }

    fn __len__(&self) -> usize {
        self.inner.count()
    }
}
