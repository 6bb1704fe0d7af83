//! One tensor: its dtype, its shape and its bytes. What the values mean is not known here.

use safetensors::Dtype;

use crate::digest::Hashed;

/// One tensor: row-major, little-endian, exactly `shape`'s product times the dtype's width in
/// bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorData {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Hashed,
}

/// The bytes do not fill the shape.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{bytes} bytes do not make a tensor {dtype} {shape:?}")]
pub struct WrongSize {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes given.
    pub bytes: usize,
}

impl TensorData {
    /// Returns an error if the number of bytes does not follow from `dtype` and `shape`.
    pub fn new(dtype: Dtype, shape: Vec<usize>, bytes: impl Into<Hashed>) -> Result<Self, WrongSize> {
        let bytes = bytes.into();
        if bytes_of(dtype, &shape) != Some(bytes.len()) {
            let bytes = bytes.len();
            return Err(WrongSize { dtype, shape, bytes });
        }
        Ok(TensorData { dtype, shape, bytes })
    }

    /// Elements in the tensor: 1 for a scalar, 0 if a dimension is 0.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// Bytes of a tensor. None if the number overflows, or if elements narrower than a byte do not
/// fill whole bytes.
pub fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &dimension| bits.checked_mul(dimension))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Bytes of one weight. 1 for dtypes narrower than a byte: there each byte counts as a weight.
pub fn weight_bytes(dtype: Dtype) -> usize {
    (dtype.bitsize() / 8).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_do_not_fill_the_shape_are_refused() {
        assert!(TensorData::new(Dtype::BF16, vec![2, 2], vec![0; 7]).is_err());
        assert!(TensorData::new(Dtype::F4, vec![3], vec![0; 2]).is_err());
        assert!(TensorData::new(Dtype::U8, vec![usize::MAX, 2], vec![]).is_err());
        assert_eq!(TensorData::new(Dtype::F32, vec![], vec![0; 4]).unwrap().elements(), 1);
    }
}
