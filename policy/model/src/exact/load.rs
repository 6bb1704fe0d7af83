//! From an image (canonical bytes) to packed weights.

use super::{Error, Parameter};
use crate::config::ModelConfig;
use crate::kernel::{Compute, Element, Matrix, Vector};
use crate::transformer::Transformer;
use artifact::checkpoint::Checkpoint;
use artifact::memory::Buffer;
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use bytes::Bytes;
use half::{bf16, f16};
use safetensors::Dtype;
use std::collections::BTreeSet;

/// The shape that an image's `config.json` names.
pub(crate) fn config_of(image: &Checkpoint) -> Result<ModelConfig, Error> {
    let json = image
        .files
        .get("config.json")
        .ok_or_else(|| Error::Checkpoint("there is no config.json in it".into()))?;
    Ok(ModelConfig::from_json(json)?)
}

/// Every parameter that the config names; a missing, misshapen or unexpected tensor is an error.
pub(super) fn transformer(
    image: &Checkpoint,
    config: &ModelConfig,
    compute: Compute,
    threads: &Threads,
) -> Result<Transformer<Parameter>, Error> {
    let mut seen = BTreeSet::new();
    let transformer = Transformer::build::<Error>(config, &mut |name: &str, shape: &[i64]| {
        let data = tensor(image, name, shape)?;
        seen.insert(name.to_string());
        // a router is small, and whether two experts are near each other must not hang on the rounding of its input
        let compute = match name.ends_with("mlp.gate.weight") {
            true => Compute::F32,
            false => compute,
        };
        Ok(match shape {
            [outputs, inputs] => {
                let pack = |values| Matrix::pack(values, *outputs as usize, *inputs as usize, compute, threads);
                // bf16 stays what it is; everything else becomes f32 of the same values
                Parameter::Matrix(match data.dtype {
                    Dtype::BF16 => pack(Element::Bf16(data.bytes.as_chunks().0)),
                    _ => pack(Element::F32(&to_f32(name, data)?)),
                })
            }
            _ => Parameter::Vector(Vector::new(&to_f32(name, data)?)),
        })
    })?;
    refuse_unexpected(image, config, &|name| seen.contains(name))?;
    Ok(transformer)
}

/// A tensor of the image with the shape that the config asks for.
pub(crate) fn tensor<'a>(image: &'a Checkpoint, name: &str, shape: &[i64]) -> Result<&'a TensorData, Error> {
    let refuse = |why: String| Error::Tensor { name: name.into(), why };
    let data = image
        .tensors
        .get(name)
        .ok_or_else(|| refuse("missing from the image".into()))?;
    let have: Vec<i64> = data.shape.iter().map(|&n| n as i64).collect();
    if have != shape {
        return Err(refuse(format!("has shape {have:?}, config.json asks for {shape:?}")));
    }
    Ok(data)
}

/// A tensor that the config does not name would be weights left out in silence. Three kinds carry nothing that is computed
/// with: a tied model's copy of its embedding, rotary tables that old checkpoints saved, and DeepSeek's layers behind the
/// last, which predict further tokens.
pub(crate) fn refuse_unexpected(
    image: &Checkpoint,
    config: &ModelConfig,
    expected: &dyn Fn(&str) -> bool,
) -> Result<(), Error> {
    let behind = |name: &str| {
        let rest = name.strip_prefix("model.layers.");
        let layer = rest.and_then(|rest| rest.split('.').next()?.parse::<i64>().ok());
        config.latent.is_some() && layer.is_some_and(|layer| layer >= config.num_hidden_layers)
    };
    let unused = |name: &str| {
        (config.tie_word_embeddings && name == "lm_head.weight")
            || name.ends_with(".rotary_emb.inv_freq")
            || behind(name)
    };
    match image.tensors.keys().find(|name| !expected(name) && !unused(name)) {
        Some(name) => Err(Error::Tensor {
            name: name.clone(),
            why: "is not a parameter of this config.json".into(),
        }),
        None => Ok(()),
    }
}

/// The values of a tensor as f32, exactly.
pub(crate) fn to_f32(name: &str, data: &TensorData) -> Result<Vec<f32>, Error> {
    let pairs = || data.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    let values: Vec<f32> = match data.dtype {
        Dtype::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F32 => data
            .bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        other => {
            return Err(Error::Tensor {
                name: name.into(),
                why: format!("has dtype {other:?}; supported are BF16, F16, F32"),
            });
        }
    };
    if values.len() != data.shape.iter().product::<usize>() {
        return Err(Error::Tensor {
            name: name.into(),
            why: "has fewer bytes than its shape asks for".into(),
        });
    }
    Ok(values)
}

/// `values` as a tensor of the shape and dtype of `like`: rounded to nearest, ties to even.
pub(crate) fn rounded(name: &str, like: &TensorData, values: &[f32]) -> Result<TensorData, Error> {
    let refuse = |why: String| Error::Tensor { name: name.into(), why };
    let bytes = match like.dtype {
        Dtype::BF16 => in_bytes(values, |v| bf16::from_f32(v).to_le_bytes()),
        Dtype::F16 => in_bytes(values, |v| f16::from_f32(v).to_le_bytes()),
        Dtype::F32 => in_bytes(values, f32::to_le_bytes),
        other => return Err(refuse(format!("cannot be published as {other:?}"))),
    };
    TensorData::new(like.dtype, like.shape.clone(), bytes).map_err(|error| refuse(error.to_string()))
}

fn in_bytes<const W: usize>(values: &[f32], one: impl Fn(f32) -> [u8; W]) -> Bytes {
    let mut bytes = Buffer::unset(values.len() * W);
    for (bytes, &value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = one(value);
    }
    Bytes::from_owner(bytes)
}
