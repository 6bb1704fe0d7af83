//! Between an image (canonical bytes) and f32 tensors.

use super::{Error, Parameters};
use crate::config::ModelConfig;
use crate::image::{Image, TensorData};
use bytes::Bytes;
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};
use safetensors::Dtype;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

pub(super) fn config_of(image: &Image) -> Result<ModelConfig, Error> {
    let json = image
        .files
        .get("config.json")
        .ok_or_else(|| Error::Image("there is no config.json in it".into()))?;
    Ok(ModelConfig::from_json(json)?)
}

/// Every parameter that the config names, as f32; a missing, misshapen or unexpected tensor is an error.
pub(super) fn parameters(image: &Image, config: &ModelConfig) -> Result<Parameters, Error> {
    let shapes = config.parameter_shapes();
    let mut parameters = Parameters::new();
    for (name, shape) in &shapes {
        let data = image.tensors.get(name).ok_or_else(|| Error::Tensor {
            name: name.clone(),
            why: "missing from the image".into(),
        })?;
        let have: Vec<i64> = data.shape.iter().map(|&n| n as i64).collect();
        if &have != shape {
            return Err(Error::Tensor {
                name: name.clone(),
                why: format!("has shape {have:?}, config.json asks for {shape:?}"),
            });
        }
        let values = to_f32(name, data)?;
        parameters.insert(name.clone(), Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?);
    }
    // tied models are sometimes saved with a copy of the embedding as lm_head; it carries nothing new
    match image
        .tensors
        .keys()
        .find(|name| !parameters.contains_key(*name) && *name != "lm_head.weight")
    {
        Some(name) => Err(Error::Tensor {
            name: name.clone(),
            why: "is not a parameter of this config.json".into(),
        }),
        None => Ok(parameters),
    }
}

fn to_f32(name: &str, data: &TensorData) -> Result<Vec<f32>, Error> {
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

/// The image that publishes `parameters`: each f32 value rounded to the template's dtype (to nearest, ties to even), the
/// template's files kept. Tensors that `parameters` does not name are the template's.
pub fn image_from_f32(template: &Image, parameters: &Parameters) -> Result<Image, Error> {
    let mut tensors = template.tensors.clone();
    for (name, tensor) in parameters {
        let old = tensors.get(name).ok_or_else(|| Error::Tensor {
            name: name.clone(),
            why: "is not in the template image".into(),
        })?;
        let values = Vec::<f32>::try_from(&tensor.detach().f_contiguous()?.f_view([-1i64])?)?;
        let bytes: Vec<u8> = match old.dtype {
            Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            other => {
                return Err(Error::Tensor {
                    name: name.clone(),
                    why: format!("cannot be published as {other:?}"),
                });
            }
        };
        tensors.insert(
            name.clone(),
            TensorData {
                dtype: old.dtype,
                shape: old.shape.clone(),
                bytes: Bytes::from(bytes),
            },
        );
    }
    Ok(Image {
        tensors,
        files: template.files.clone(),
    })
}

/// A freshly initialised bf16 model: norms 1, matrices N(0, 0.02), and those that write to the residual stream scaled by
/// 1/√(2 · layers) (Radford et al. 2019). Holds `config.json` and no tokenizer. The same seed gives the same bytes.
pub fn random_image(config: &ModelConfig, seed: u64) -> Image {
    let mut rng = StdRng::seed_from_u64(seed);
    let residual = 1.0 / (2.0 * config.num_hidden_layers as f64).sqrt();
    let mut tensors = BTreeMap::new();
    for (name, shape) in config.parameter_shapes() {
        let numel: i64 = shape.iter().product();
        let scale = if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            0.02 * residual
        } else {
            0.02
        };
        let bytes: Vec<u8> = (0..numel)
            .flat_map(|_| {
                let value = if shape.len() == 1 {
                    1.0
                } else {
                    normal(&mut rng) * scale
                };
                bf16::from_f64(value).to_le_bytes()
            })
            .collect();
        tensors.insert(
            name,
            TensorData {
                dtype: Dtype::BF16,
                shape: shape.iter().map(|&n| n as usize).collect(),
                bytes: Bytes::from(bytes),
            },
        );
    }
    let files = BTreeMap::from([("config.json".to_string(), Bytes::from(config.to_json()))]);
    Image { tensors, files }
}

/// Standard normal by Box and Muller.
fn normal(rng: &mut StdRng) -> f64 {
    let u: f64 = 1.0 - rng.random::<f64>();
    let v: f64 = rng.random();
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// The same tensors, as leaves that gather gradients.
pub fn require_grad(parameters: &Parameters) -> Parameters {
    parameters
        .iter()
        .map(|(name, t)| (name.clone(), t.to_kind(Kind::Float).copy().set_requires_grad(true)))
        .collect()
}
