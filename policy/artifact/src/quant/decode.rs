//! The values that the codes and scales of a copy stand for.

use super::select::{self, Matrix};
use super::{Error, Spec, fp8, int4, make, nvfp4};
use crate::checkpoint::Checkpoint;
use crate::tensor::TensorData;
use crate::threads::Threads;
use half::bf16;
use safetensors::Dtype;

/// `checkpoint` with the values of its copy in f32.
pub(super) fn values(checkpoint: &Checkpoint, spec: Spec, threads: &Threads) -> Result<Checkpoint, Error> {
    let copy = make::make(checkpoint, spec, threads)?;
    let tensors = checkpoint.tensors.iter();
    let matrices = tensors.filter_map(|(name, tensor)| select::matrix(name, tensor, spec));
    let decoded = threads.map(matrices.collect(), |matrix: Matrix<'_>| {
        let values: Vec<u8> = matrix.decoded(&copy, spec).flat_map(f32::to_le_bytes).collect();
        let tensor = TensorData::new(Dtype::F32, matrix.tensor.shape.clone(), values)?;
        Ok::<_, Error>((matrix.name.to_owned(), tensor))
    });
    let mut values = checkpoint.clone();
    for decoded in decoded {
        values.tensors.extend([decoded?]);
    }
    Ok(values)
}

impl Matrix<'_> {
    /// code · scale, row by row.
    fn decoded(&self, copy: &Checkpoint, spec: Spec) -> impl Iterator<Item = f32> {
        let bytes = |name: &str| copy.tensors.get(name).map_or(&[][..], |tensor| &tensor.bytes);
        let [codes, scales] = self.places(spec).map(|place| bytes(&place.name));
        let columns = self.columns;
        let blocks = self.columns.div_ceil(fp8::BLOCK);
        let half = move |at: usize| codes[at / 2] >> (at % 2 * 4) & 0xf;
        let common = match bytes(&format!("{}_global_scale", self.name)).as_chunks() {
            ([common], []) => f32::from_le_bytes(*common),
            _ => 1.0,
        };
        let value = move |at: usize| match spec {
            Spec::Fp8 => {
                let block = at / columns / fp8::BLOCK * blocks + at % columns / fp8::BLOCK;
                fp8::value(codes[at]) * f32::from_le_bytes(scales.as_chunks().0[block])
            }
            Spec::Int4 => {
                let scale = bf16::from_le_bytes(scales.as_chunks().0[at / int4::GROUP]);
                (f32::from(half(at)) - 8.0) * scale.to_f32()
            }
            Spec::Nvfp4 => nvfp4::value(half(at)) * (fp8::value(scales[at / nvfp4::GROUP]) / common),
        };
        (0..self.rows * columns).map(value)
    }
}
