//! Converts between checkpoints and f32 tensors.

use crate::{Error, Parameters};
use artifact::checkpoint::Checkpoint;
use model::config::ModelConfig;
use model::exact;
use model::transformer::Transformer;
use tch::{Kind, Tensor};

/// Every parameter of the config in f32. A missing or unexpected tensor, or a wrong shape, is an
/// error.
pub fn parameters(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<Parameters, Error> {
    let mut parameters = Parameters::new();
    for (name, shape) in config.parameter_shapes() {
        let values = exact::to_f32(&name, exact::tensor(checkpoint, config, &name, &shape)?)?;
        parameters.insert(name, Tensor::f_from_slice(&values)?.f_view(shape.as_slice())?);
    }
    exact::refuse_unexpected(checkpoint, config, &|name| parameters.contains_key(name))?;
    Ok(parameters)
}

/// The same tensors, arranged for the forward pass.
pub fn transformer(config: &ModelConfig, parameters: &Parameters) -> Result<Transformer<Tensor>, Error> {
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
