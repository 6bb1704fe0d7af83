//! Converts between checkpoints and f32 tensors, and creates new models.

use super::{Error, Parameters};
use crate::config::ModelConfig;
use crate::exact;
use crate::transformer::{Transformer, writes_to_residual_stream};
use artifact::checkpoint::Checkpoint;
use artifact::tensor::TensorData;
use bytes::Bytes;
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use safetensors::Dtype;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Every parameter of the config in f32. A missing or unexpected tensor, or a wrong shape, is an
/// error.
pub(super) fn parameters(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<Parameters, Error> {
    let mut parameters = Parameters::new();
    for (name, shape) in config.parameter_shapes() {
        let values = exact::to_f32(&name, exact::tensor(checkpoint, config, &name, &shape)?)?;
        parameters.insert(name, Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?);
    }
    exact::refuse_unexpected(checkpoint, config, &|name| parameters.contains_key(name))?;
    Ok(parameters)
}

/// The same tensors, arranged for the forward pass.
pub(super) fn transformer(config: &ModelConfig, parameters: &Parameters) -> Result<Transformer<Tensor>, Error> {
    Transformer::build(config, &mut |name: &str, shape: &[i64]| match parameters.get(name) {
        Some(tensor) if tensor.size() == shape => Ok(tensor.shallow_clone()),
        other => Err(Error::Tensor {
            name: name.into(),
            why: match other {
                Some(tensor) => format!("has shape {:?}, the config needs {shape:?}", tensor.size()),
                None => "is missing from the parameters".into(),
            },
        }),
    })
}

/// The template with the values of `parameters`, rounded to the template's dtypes (to nearest, ties
/// to even). Files, and tensors that `parameters` does not name, are the template's. A head of the
/// template that `parameters` does not name is tied: it gets the embedding's values.
pub fn checkpoint_from_f32(template: &Checkpoint, parameters: &Parameters) -> Result<Checkpoint, Error> {
    let mut tensors = template.tensors.clone();
    for (name, tensor) in parameters {
        let values = Vec::<f32>::try_from(&tensor.detach().f_contiguous()?.f_view([-1i64])?)?;
        let is_tied = name == exact::EMBEDDING && !parameters.contains_key(exact::HEAD);
        let tied = is_tied.then_some(exact::HEAD);
        let mut found = false;
        for name in [name.as_str()].into_iter().chain(tied) {
            if let Some(old) = tensors.get_mut(name) {
                *old = exact::to_dtype_of(name, old, &values)?;
                found = true;
            }
        }
        if !found {
            return Err(Error::Tensor {
                name: name.clone(),
                why: "is not in the template".into(),
            });
        }
    }
    Ok(Checkpoint {
        tensors,
        files: template.files.clone(),
    })
}

/// A new bf16 model, with `config.json` and without a tokenizer. The same seed gives the same
/// bytes.
///
/// Norms are 1, biases 0 and matrices N(0, 0.02). Matrices that write to the residual stream are
/// scaled by 1/√(2 · layers) (Radford et al. 2019).
pub fn random_checkpoint(config: &ModelConfig, seed: u64) -> Checkpoint {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let residual = 1.0 / (2.0 * config.num_hidden_layers as f64).sqrt();
    let mut tensors = BTreeMap::new();
    for (name, shape) in config.parameter_shapes() {
        let numel: i64 = shape.iter().product();
        let scale = match writes_to_residual_stream(&name) {
            true => 0.02 * residual,
            false => 0.02,
        };
        let bytes: Vec<u8> = (0..numel)
            .flat_map(|_| {
                let value = match shape.len() {
                    1 if name.ends_with("bias") => 0.0,
                    1 => 1.0,
                    _ => normal(&mut rng) * scale,
                };
                bf16::from_f64(value).to_le_bytes()
            })
            .collect();
        tensors.insert(
            name,
            TensorData {
                dtype: Dtype::BF16,
                shape: shape.iter().map(|&n| n as usize).collect(),
                bytes: bytes.into(),
            },
        );
    }
    let files = BTreeMap::from([("config.json".to_string(), Bytes::from(config.to_json()))]);
    Checkpoint { tensors, files }
}

/// A standard normal value (Box & Muller 1958).
fn normal(rng: &mut ChaCha12Rng) -> f64 {
    let u: f64 = 1.0 - rng.random::<f64>();
    let v: f64 = rng.random();
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// Copies of all tensors, as f32 leaves that gather gradients.
pub fn require_grad(parameters: &Parameters) -> Parameters {
    require_grad_of(parameters, |_| true)
}

/// Copies of all tensors, as f32 leaves. Those for which `wanted` is true gather gradients.
pub fn require_grad_of(parameters: &Parameters, wanted: impl Fn(&str) -> bool) -> Parameters {
    let leaf = |name: &String, t: &Tensor| t.to_kind(Kind::Float).copy().set_requires_grad(wanted(name));
    parameters
        .iter()
        .map(|(name, t)| (name.clone(), leaf(name, t)))
        .collect()
}
