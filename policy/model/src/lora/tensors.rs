//! Converts adapters to and from named tensors, `MODULE.lora_A.weight` and `MODULE.lora_B.weight`,
//! as in PEFT's files and in a trainer's run state.

use super::{Adapter, Config, Pair};
use crate::exact;
use artifact::tensor::TensorData;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";

impl Adapter {
    /// Both factors of every module, in f32.
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

    /// Builds an adapter from the tensors of [`Self::to_tensors`].
    ///
    /// # Errors
    /// If a tensor is not A or B of a target module, a factor is missing or not finite, or the
    /// ranks do not fit `config`.
    pub fn from_tensors(config: Config, tensors: &BTreeMap<String, TensorData>) -> Result<Self, String> {
        let targets = config.target_modules.matcher()?;
        let mut modules = BTreeSet::new();
        for name in tensors.keys() {
            let module = name.strip_suffix(A).or_else(|| name.strip_suffix(B)).ok_or_else(|| {
                format!("`{name}` is not supported: only `lora_A.weight` and `lora_B.weight` of a matrix are")
            })?;
            if !targets.matches(module) {
                return Err(format!("`{name}` is not of a module in `target_modules`"));
            }
            modules.insert(module);
        }
        if modules.is_empty() {
            return Err("the file has no tensors".into());
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
