//! One tensor, as NumPy and torch take it.

use artifact::tensor::TensorData;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use safetensors::Dtype;

use crate::error::refused;

/// A tensor whose bytes do not change. Arrays made of it share its memory and keep it alive.
#[pyclass(frozen, module = "springtide")]
pub struct Tensor {
    data: TensorData,
}

impl From<TensorData> for Tensor {
    fn from(data: TensorData) -> Self {
        Tensor { data }
    }
}

#[pymethods]
impl Tensor {
    /// A copy of the bytes of all values, row-major and little-endian. `dtype` is a name as safetensors has it.
    #[staticmethod]
    fn from_bytes(dtype: &str, shape: Vec<usize>, bytes: &[u8]) -> PyResult<Self> {
        let dtype = serde_json::from_value(dtype.into()).map_err(|error| refused(&error))?;
        let data = TensorData::new(dtype, shape, bytes.to_vec()).map_err(|error| refused(&error))?;
        Ok(data.into())
    }

    /// The dtype's name, as in safetensors: `BF16`, `F32`, …
    #[getter]
    fn dtype(&self) -> String {
        self.data.dtype.to_string()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.data.shape)
    }

    /// Bytes of all values.
    #[getter]
    fn nbytes(&self) -> usize {
        self.data.bytes.len()
    }

    /// BLAKE3 of the bytes, in hex.
    fn digest(&self, py: Python<'_>) -> String {
        py.detach(|| self.data.bytes.digest().to_string())
    }

    /// NumPy's protocol for memory that another object owns, version 3.
    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (typestr, whole_bytes) = typestr(self.data.dtype);
        let shape = match whole_bytes {
            true => PyTuple::new(py, &self.data.shape)?,
            false => PyTuple::new(py, [self.data.bytes.len()])?,
        };
        let read_only = true;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("shape", shape)?;
        interface.set_item("data", (self.data.bytes.as_ptr() as usize, read_only))?;
        Ok(interface)
    }

    /// A read-only array of the tensor's memory. NumPy has no bfloat16 and no 8-bit floats: their
    /// bits come as unsigned integers of the same width. Values narrower than a byte come as a row of
    /// bytes.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("springtide._arrays")?.call_method1("to_numpy", (slf,))
    }

    /// A torch tensor of the tensor's memory, in its own dtype. torch cannot make it read-only: never
    /// write to it.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("springtide._arrays")?.call_method1("to_torch", (slf,))
    }

    fn __repr__(&self) -> String {
        format!("<springtide.Tensor {} {:?}>", self.data.dtype, self.data.shape)
    }
}

/// NumPy's name of the dtype, and whether a value fills whole bytes.
fn typestr(dtype: Dtype) -> (&'static str, bool) {
    let name = match dtype {
        Dtype::BOOL => "|b1",
        Dtype::I8 => "|i1",
        Dtype::I16 => "<i2",
        Dtype::U16 | Dtype::BF16 => "<u2",
        Dtype::F16 => "<f2",
        Dtype::I32 => "<i4",
        Dtype::U32 => "<u4",
        Dtype::F32 => "<f4",
        Dtype::I64 => "<i8",
        Dtype::U64 => "<u8",
        Dtype::F64 => "<f8",
        Dtype::C64 => "<c8",
        _ => "|u1",
    };
    (name, dtype.bitsize().is_multiple_of(8))
}
