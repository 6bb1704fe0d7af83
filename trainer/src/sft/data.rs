//! Packed windows on disk: `input_ids` and `labels` `[N, T]` u16, `weights` `[N, T]` f32.

use anyhow::{Context, ensure};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;
use tch::{Kind, Tensor};

/// All windows of a file, in memory.
#[derive(Debug)]
pub struct Windows {
    input: Tensor,
    labels: Tensor,
    weights: Tensor,
}

/// A batch of windows: ids i64, weights f32, each `[B, T]`.
pub(super) struct Batch {
    pub input: Tensor,
    pub labels: Tensor,
    pub weights: Tensor,
}

impl Windows {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = std::fs::read(path)
            .with_context(|| format!("read {}; make it with `springtide corpus build`", path.display()))?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| format!("parse {}", path.display()))?;
        let load = |name: &str, dtype: Dtype| -> anyhow::Result<Tensor> {
            let view = file
                .tensor(name)
                .with_context(|| format!("{}: find `{name}`", path.display()))?;
            ensure!(
                view.dtype() == dtype && view.shape().len() == 2,
                "{}: `{name}` must be a matrix of {dtype:?}",
                path.display()
            );
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            let tensor = match dtype {
                Dtype::U16 => {
                    // libtorch has no arithmetic on u16
                    let ids: Vec<i32> = view
                        .data()
                        .chunks_exact(2)
                        .map(|b| i32::from(u16::from_le_bytes([b[0], b[1]])))
                        .collect();
                    Tensor::f_from_slice(&ids)?
                }
                _ => {
                    let values: Vec<f32> = view
                        .data()
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                        .collect();
                    Tensor::f_from_slice(&values)?
                }
            };
            Ok(tensor.f_view(shape.as_slice())?)
        };
        let windows = Windows {
            input: load("input_ids", Dtype::U16)?,
            labels: load("labels", Dtype::U16)?,
            weights: load("weights", Dtype::F32)?,
        };
        ensure!(
            windows.input.size() == windows.labels.size() && windows.input.size() == windows.weights.size(),
            "{}: input_ids, labels and weights differ in shape",
            path.display()
        );
        Ok(windows)
    }

    pub fn len(&self) -> usize {
        self.input.size()[0] as usize
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `count` windows from `start`, wrapping around at the end.
    pub(super) fn batch(&self, start: usize, count: usize) -> Batch {
        let rows: Vec<i64> = (0..count).map(|i| ((start + i) % self.len()) as i64).collect();
        let rows = Tensor::from_slice(&rows);
        let pick = |t: &Tensor, kind| t.index_select(0, &rows).to_kind(kind);
        Batch {
            input: pick(&self.input, Kind::Int64),
            labels: pick(&self.labels, Kind::Int64),
            weights: pick(&self.weights, Kind::Float),
        }
    }
}
