//! f32 tensors of libtorch as bytes, and back.

use anyhow::{Context, ensure};
use artifact::tensor::TensorData;
use autograd::Parameters;
use safetensors::Dtype;
use std::collections::BTreeMap;
use tch::Tensor;

/// The bytes of parameters.
pub(super) fn to_data(parameters: &Parameters) -> BTreeMap<String, TensorData> {
    parameters
        .iter()
        .map(|(name, tensor)| {
            let mut bytes = vec![0; 4 * tensor.numel()];
            // little-endian on every machine that libtorch is fetched for
            tensor.copy_data_u8(&mut bytes, tensor.numel());
            let data = TensorData {
                dtype: Dtype::F32,
                shape: tensor.size().iter().map(|&n| n as usize).collect(),
                bytes: bytes.into(),
            };
            (name.clone(), data)
        })
        .collect()
}

/// Tensors of `data`, which must have exactly the names and shapes of `like`.
pub(super) fn from_data(data: &BTreeMap<String, TensorData>, like: &Parameters) -> anyhow::Result<Parameters> {
    ensure!(
        data.len() == like.len(),
        "{} tensors, expected {}",
        data.len(),
        like.len()
    );
    like.iter()
        .map(|(name, model)| {
            let stored = data.get(name).with_context(|| format!("`{name}` is missing"))?;
            let stored = tensor(stored).with_context(|| format!("`{name}`"))?;
            ensure!(
                stored.size() == model.size(),
                "`{name}` has shape {:?}, expected {:?}",
                stored.size(),
                model.size()
            );
            Ok((name.clone(), stored))
        })
        .collect()
}

pub(super) fn tensor(data: &TensorData) -> anyhow::Result<Tensor> {
    let shape: Vec<i64> = data.shape.iter().map(|&n| n as i64).collect();
    let values: Vec<f32> = data
        .bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    Ok(Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?)
}
