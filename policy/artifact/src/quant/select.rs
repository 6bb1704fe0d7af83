//! Which tensors of a version are quantized, and what the copy's are called.

use super::{Spec, fp8, int4, nvfp4};
use crate::checkpoint::Checkpoint;
use crate::tensor::TensorData;
use safetensors::Dtype;

/// A matrix that becomes codes and scales.
pub(super) struct Matrix<'a> {
    pub name: &'a str,
    pub tensor: &'a TensorData,
    pub rows: usize,
    pub columns: usize,
}

/// A tensor of the copy that replaces a matrix.
pub(super) struct Place {
    pub name: String,
    pub dtype: Dtype,
    pub rows: usize,
    pub columns: usize,
}

impl Place {
    pub fn shape(&self) -> Vec<usize> {
        vec![self.rows, self.columns]
    }
}

/// The linear projections of attention, MLPs and experts: `….NAME_proj.weight` and
/// `….kv_a_proj_with_mqa.weight`, in two dimensions, BF16 or F32. Embeddings, norms, heads and
/// routers have other names.
pub(super) fn matrix<'a>(name: &'a str, tensor: &'a TensorData, spec: Spec) -> Option<Matrix<'a>> {
    let &[rows, columns] = tensor.shape.as_slice() else {
        return None;
    };
    let module = name.strip_suffix(".weight")?;
    let last = module.rsplit('.').next()?;
    let projects = last.ends_with("_proj") || last == "kv_a_proj_with_mqa";
    let dtype = matches!(tensor.dtype, Dtype::BF16 | Dtype::F32);
    let fits = match spec {
        Spec::Fp8 => true,
        Spec::Int4 => columns.is_multiple_of(int4::GROUP),
        Spec::Nvfp4 => columns.is_multiple_of(nvfp4::GROUP),
    };
    (projects && dtype && fits && rows > 0 && columns > 0).then_some(Matrix {
        name,
        tensor,
        rows,
        columns,
    })
}

/// Modules that an engine must not treat as quantized: the head, even without weights of its own,
/// and every matrix that is not quantized.
pub(super) fn untouched(checkpoint: &Checkpoint, spec: Spec) -> Vec<String> {
    let stays = checkpoint
        .tensors
        .iter()
        .filter(|(name, tensor)| tensor.shape.len() == 2 && matrix(name, tensor, spec).is_none());
    let mut modules: Vec<String> = stays
        .filter_map(|(name, _)| name.strip_suffix(".weight"))
        .map(str::to_owned)
        .chain(["lm_head".to_owned()])
        .collect();
    modules.sort();
    modules.dedup();
    modules
}

impl Matrix<'_> {
    /// The tensors for codes and scales.
    pub fn places(&self, spec: Spec) -> [Place; 2] {
        let place = |suffix: &str, dtype, rows, columns| Place {
            name: format!("{}{suffix}", self.name),
            dtype,
            rows,
            columns,
        };
        match spec {
            Spec::Fp8 => {
                let blocks = |weights: usize| weights.div_ceil(fp8::BLOCK);
                [
                    place("", Dtype::F8_E4M3, self.rows, self.columns),
                    place("_scale_inv", Dtype::F32, blocks(self.rows), blocks(self.columns)),
                ]
            }
            Spec::Int4 => [
                place("_packed", Dtype::I32, self.rows, self.columns / 8),
                place("_scale", Dtype::BF16, self.rows, self.columns / int4::GROUP),
            ],
            Spec::Nvfp4 => [
                place("_packed", Dtype::U8, self.rows, self.columns / 2),
                place("_scale", Dtype::F8_E4M3, self.rows, self.columns / nvfp4::GROUP),
            ],
        }
    }

    /// What engines compute as one matrix, which has one common scale: queries, keys and values, the first projections
    /// of latent attention, or gate and up.
    pub fn joined(&self) -> &str {
        let module = self.name.trim_end_matches(".weight");
        match module.rsplit_once('.') {
            Some((
                parent,
                "q_proj" | "k_proj" | "v_proj" | "q_a_proj" | "kv_a_proj_with_mqa" | "gate_proj" | "up_proj",
            )) => parent,
            _ => module,
        }
    }

    /// What compressed-tensors needs besides: the shape of the matrix, or the `common` scale.
    pub fn third_tensor(&self, spec: Spec, common: f32) -> Option<(String, TensorData)> {
        let dimensions = || [self.rows, self.columns].map(|dimension| (dimension as u64).to_le_bytes());
        let (suffix, dtype, shape, bytes) = match spec {
            Spec::Fp8 => return None,
            Spec::Int4 => ("_shape", Dtype::I64, vec![2], dimensions().concat()),
            Spec::Nvfp4 => ("_global_scale", Dtype::F32, vec![1], common.to_le_bytes().to_vec()),
        };
        let bytes = bytes.into();
        let tensor = TensorData { dtype, shape, bytes };
        Some((format!("{}{suffix}", self.name), tensor))
    }
}
