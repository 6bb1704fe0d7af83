//! A learner's state as bytes, and back to the last bit.

use super::Learner;
use super::lora::Lora;
use crate::checkpoint::{Checkpoint, StepRecord};
use crate::optim::AdamW;
use anyhow::{Context, bail, ensure};
use policy::image::{Image, TensorData};
use policy::model::Arithmetic;
use policy::network::Parameters;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::sync::Arc;
use tch::Tensor;

impl Learner {
    /// The state after the proposed step, or the present one if none is proposed.
    pub fn checkpoint(&self, record: StepRecord, random: u64) -> Checkpoint {
        let (master, optimiser) = match &self.pending {
            Some(pending) => (&pending.master, &pending.optimiser),
            None => (&self.master, &self.optimiser),
        };
        Checkpoint {
            record,
            lora: self.lora.as_ref().map(|lora| lora.identity().clone()),
            optimiser_step: optimiser.step,
            random,
            master: to_data(master),
            first: to_data(&optimiser.first),
            second: to_data(&optimiser.second),
        }
    }

    /// Stands where the checkpoint's run stood. `image` is the version that its step made; a checkpoint that does not
    /// come to exactly that image is refused. `base` is needed by a checkpoint of an adapter: the version that it names.
    pub fn restore(
        image: Arc<Image>,
        arithmetic: Arithmetic,
        checkpoint: &Checkpoint,
        base: Option<Arc<Image>>,
    ) -> anyhow::Result<Self> {
        let mut learner = match (&checkpoint.lora, base) {
            (None, _) => Learner::with_arithmetic(image, arithmetic)?,
            (Some(identity), Some(base)) => Learner::adapting(image, arithmetic, Lora::named(base, identity.clone())?)?,
            (Some(identity), None) => bail!("the adapter's base, version {}, was not given", identity.base),
        };
        let master = of_data(&checkpoint.master, &learner.master).context("restore master weights")?;
        learner.optimiser = AdamW {
            step: checkpoint.optimiser_step,
            first: of_data(&checkpoint.first, &master).context("restore first moments")?,
            second: of_data(&checkpoint.second, &master).context("restore second moments")?,
        };
        let published = learner.published(&master)?;
        ensure!(
            published.tensors == learner.image.tensors,
            "the checkpoint's master weights are not those of its version"
        );
        learner.master = master;
        Ok(learner)
    }
}

pub(super) fn to_data(parameters: &Parameters) -> BTreeMap<String, TensorData> {
    parameters
        .iter()
        .map(|(name, tensor)| {
            let mut bytes = vec![0; 4 * tensor.numel()];
            tensor.copy_data_u8(&mut bytes, tensor.numel()); // little-endian, as every machine that libtorch is fetched for
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
fn of_data(data: &BTreeMap<String, TensorData>, like: &Parameters) -> anyhow::Result<Parameters> {
    ensure!(
        data.len() == like.len(),
        "{} tensors, expected {}",
        data.len(),
        like.len()
    );
    like.iter()
        .map(|(name, model)| {
            let stored = data.get(name).with_context(|| format!("`{name}` is missing"))?;
            let shape: Vec<i64> = stored.shape.iter().map(|&n| n as i64).collect();
            ensure!(
                shape == model.size(),
                "`{name}` has shape {shape:?}, expected {:?}",
                model.size()
            );
            Ok((name.clone(), tensor(stored).with_context(|| format!("`{name}`"))?))
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
