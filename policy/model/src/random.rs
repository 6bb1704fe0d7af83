//! New models.

use crate::config::ModelConfig;
use crate::transformer::writes_to_residual_stream;
use artifact::checkpoint::Checkpoint;
use artifact::tensor::TensorData;
use bytes::Bytes;
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use safetensors::Dtype;
use std::collections::BTreeMap;

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
