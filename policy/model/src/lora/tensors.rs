//! An adapter as tensors by name, `MODULE.lora_A.weight` and `MODULE.lora_B.weight`: as PEFT's files and a run's checkpoints
//! have them.

use super::{Adapter, Config, Pair};
use crate::exact;
use artifact::tensor::TensorData;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";

impl Adapter {
    /// Both factors of every module, f32.
    pub fn to_tensors(&self) -> BTreeMap<String, TensorData> {
        let tensor = |shape: [usize; 2], values: &[f32]| TensorData {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into(),
        };
        self.pairs
            .iter()
            .flat_map(|(module, pair)| {
                [
                    (format!("{module}{A}"), tensor([pair.rank, pair.inputs], &pair.a)),
                    (format!("{module}{B}"), tensor([pair.outputs, pair.rank], &pair.b)),
                ]
            })
            .collect()
    }

    /// Refuses what is no pair of factors, and what `config` says otherwise.
    pub fn from_tensors(config: Config, tensors: &BTreeMap<String, TensorData>) -> Result<Self, String> {
        let targets = config.target_modules.matcher()?;
        let mut modules = BTreeSet::new();
        for name in tensors.keys() {
            let module = name
                .strip_suffix(A)
                .or_else(|| name.strip_suffix(B))
                .ok_or_else(|| format!("`{name}` is not A or B of a matrix, which is all that is computed here"))?;
            if !targets.matches(module) {
                return Err(format!("`{name}` is there, and `target_modules` does not name it"));
            }
            modules.insert(module);
        }
        if modules.is_empty() {
            return Err("there are no tensors in it".into());
        }
        let mut pairs = BTreeMap::new();
        for module in modules {
            let ([rank, inputs], a) = factor(tensors, &format!("{module}{A}"))?;
            let ([outputs, rank_b], b) = factor(tensors, &format!("{module}{B}"))?;
            let (wanted, _) = config.of(module).map_err(|error| error.to_string())?;
            if rank != wanted || rank_b != wanted {
                return Err(format!(
                    "A and B of `{module}` have ranks {rank} and {rank_b}; `r` and `rank_pattern` say {wanted}"
                ));
            }
            let pair = Pair {
                rank,
                inputs,
                outputs,
                a,
                b,
            };
            pairs.insert(module.to_string(), pair);
        }
        Ok(Adapter { config, pairs })
    }
}

fn factor(tensors: &BTreeMap<String, TensorData>, name: &str) -> Result<([usize; 2], Vec<f32>), String> {
    let data = tensors.get(name).ok_or_else(|| format!("`{name}` is missing"))?;
    let &[rows, columns] = data.shape.as_slice() else {
        return Err(format!("`{name}` has shape {:?}, not two dimensions", data.shape));
    };
    let values = exact::to_f32(name, data).map_err(|error| error.to_string())?;
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(([rows, columns], values)),
        false => Err(format!("`{name}` has values that are not finite")),
    }
}
