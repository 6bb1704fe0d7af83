//! Packs a checkpoint's tensors, and converts tensors to and from f32.

use super::{Error, Parameter};
use crate::config::ModelConfig;
use crate::kernel::{Compute, Element, Matrix, Vector};
use crate::transformer::{Transformer, is_router};
use artifact::checkpoint::Checkpoint;
use artifact::memory::Buffer;
use artifact::tensor::TensorData;
use bytes::Bytes;
use half::{bf16, f16};
use safetensors::Dtype;
use std::collections::BTreeSet;

/// The name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The name of the output projection.
pub const HEAD: &str = "lm_head.weight";

/// The configuration in a checkpoint's `config.json`.
pub fn config_of(checkpoint: &Checkpoint) -> Result<ModelConfig, Error> {
    let json = checkpoint
        .files
        .get("config.json")
        .ok_or_else(|| Error::Checkpoint("config.json is missing".into()))?;
    Ok(ModelConfig::from_json(json)?)
}

/// Packs every parameter of the config, and matrices by `packed`, from row-major
/// `[outputs, inputs]`. A missing or unexpected tensor, or a wrong shape, is an error.
pub(crate) fn pack_transformer(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    packed: &impl Fn(Element<'_>, usize, usize, Compute) -> Matrix,
    compute: Compute,
) -> Result<Transformer<Parameter>, Error> {
    let mut seen = BTreeSet::new();
    let transformer = Transformer::build::<Error>(config, &mut |name: &str, shape: &[i64]| {
        let data = tensor(checkpoint, config, name, shape)?;
        seen.insert(name.to_string());
        // Routers stay f32: rounding could choose other experts.
        let compute = match is_router(name) {
            true => Compute::F32,
            false => compute,
        };
        Ok(match shape {
            [outputs, inputs] => {
                let pack = |values| packed(values, *outputs as usize, *inputs as usize, compute);
                // bf16 stays bf16; `TensorData::new` checked that its bytes fit the shape. Other
                // dtypes become f32 of the same values.
                Parameter::Matrix(match data.dtype {
                    Dtype::BF16 => pack(Element::Bf16(data.bytes.as_chunks().0)),
                    _ => pack(Element::F32(&to_f32(name, data)?)),
                })
            }
            _ => Parameter::Vector(Vector::new(&to_f32(name, data)?)),
        })
    })?;
    refuse_unexpected(checkpoint, config, &|name| seen.contains(name))?;
    Ok(transformer)
}

/// A tensor of the checkpoint. It must have the given shape. A tied embedding may be saved under the
/// name of its head alone.
pub fn tensor<'a>(
    checkpoint: &'a Checkpoint,
    config: &ModelConfig,
    name: &str,
    shape: &[i64],
) -> Result<&'a TensorData, Error> {
    let error = |why: String| Error::Tensor { name: name.into(), why };
    let tied = || (config.tie_word_embeddings && name == EMBEDDING).then(|| checkpoint.tensors.get(HEAD));
    let data = (checkpoint.tensors.get(name))
        .or_else(|| tied().flatten())
        .ok_or_else(|| error("is missing from the checkpoint".into()))?;
    let have: Vec<i64> = data.shape.iter().map(|&n| n as i64).collect();
    if have != shape {
        return Err(error(format!("has shape {have:?}, config.json needs {shape:?}")));
    }
    Ok(data)
}

/// Refuses tensors that the model would silently leave out. Tensors that [`ModelConfig::ignores`]
/// names are allowed; of them, the head of a tied embedding must equal the embedding.
pub fn refuse_unexpected(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    expected: &dyn Fn(&str) -> bool,
) -> Result<(), Error> {
    let [embedding, head] = [EMBEDDING, HEAD].map(|name| checkpoint.tensors.get(name));
    if config.tie_word_embeddings && head.is_some() && embedding.is_some() && head != embedding {
        return Err(Error::Tensor {
            name: HEAD.into(),
            why: format!(
                "differs from {EMBEDDING}, and config.json says `tie_word_embeddings`: set it to false to use \
                 this head, or remove this tensor to use the embedding"
            ),
        });
    }
    let mut names = checkpoint.tensors.keys();
    match names.find(|name| !expected(name) && !config.ignores(name)) {
        Some(name) => Err(Error::Tensor {
            name: name.clone(),
            why: "is not a parameter of this config.json".into(),
        }),
        None => Ok(()),
    }
}

/// The values of a bf16, f16 or f32 tensor as f32, without rounding.
pub fn to_f32(name: &str, data: &TensorData) -> Result<Vec<f32>, Error> {
    let byte_pairs = || data.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    let values: Vec<f32> = match data.dtype {
        Dtype::BF16 => byte_pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => byte_pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
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
            why: "has a number of bytes that does not fit its shape".into(),
        });
    }
    Ok(values)
}

/// `values` as a tensor with the shape and dtype of `like`, rounded to nearest, ties to even.
pub fn to_dtype_of(name: &str, like: &TensorData, values: &[f32]) -> Result<TensorData, Error> {
    to_dtype(name, (like.dtype, &like.shape), values)
}

/// The same with a dtype and a shape.
pub fn to_dtype(name: &str, (dtype, shape): (Dtype, &[usize]), values: &[f32]) -> Result<TensorData, Error> {
    let error = |why: String| Error::Tensor { name: name.into(), why };
    let bytes = match dtype {
        Dtype::BF16 => to_bytes(values, |v| bf16::from_f32(v).to_le_bytes()),
        Dtype::F16 => to_bytes(values, |v| f16::from_f32(v).to_le_bytes()),
        Dtype::F32 => to_bytes(values, f32::to_le_bytes),
        other => return Err(error(format!("cannot be published as {other:?}"))),
    };
    TensorData::new(dtype, shape.to_vec(), bytes).map_err(|wrong| error(wrong.to_string()))
}

fn to_bytes<const W: usize>(values: &[f32], convert: impl Fn(f32) -> [u8; W]) -> Bytes {
    let mut bytes = Buffer::unset(values.len() * W);
    for (bytes, &value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = convert(value);
    }
    Bytes::from_owner(bytes)
}
