//! What training a model needs of memory, said before any of it is taken.

use crate::options::{Options, REALTIME_LINE};
use crate::publish::{EXACT_BYTES_MAX, record};
use crate::settings::StepSettings;
use anyhow::Context;
use artifact::need::{Limit, Need, gb};
use artifact::sign::TrustedKeys;
use model::exact::{Compute, kept_bytes};
use model::gradient::Gradient;
use model::lora;
use model::size::Size;
use sqlx::PgPool;
use std::path::Path;
use store::Store;

/// A master weight, a gradient, or a moment: f32.
const F32: u64 = 4;
/// Tables of a micro-batch's logits at a time: values, distribution, and their gradients.
const LOGITS_COPIES: u64 = 4;

/// The most that the process needs at a time, without offline runs.
pub fn needed(size: &Size, options: &Options, compute: Compute) -> Need {
    let need = Need::default();
    let realtime = &options.realtime;
    match realtime.enabled {
        true if !realtime.trainer.is_springtide() => need.plus(&outside(size)),
        true => need.plus(&learner(size, realtime.lora.as_ref(), &realtime.step, compute)),
        false => need,
    }
}

/// The most that one run needs at a time: while it publishes a step, of which the state before and after is
/// in memory, and the state after once more as tensors and bytes.
fn learner(size: &Size, lora: Option<&lora::Config>, step: &StepSettings, compute: Compute) -> Need {
    let Size {
        config,
        tensor_bytes,
        packed_bytes,
    } = size;
    let all = size.weights(|_| true);
    // by default an adapter has the matrices of all layers
    let layers = || size.weights(|name| name.starts_with("model.layers."));
    let (gradients, masters, bases) = match lora {
        None => (all, all, 0),
        Some(lora) => (layers(), factors(size, lora.r), 1),
    };
    let held = match Gradient::supports(config, compute) {
        true => *packed_bytes,
        // libtorch's leaves
        false => all * F32,
    };
    let rows = step.micro_batch_tokens as u64;
    let inputs = rows * F32 * (config.hidden_size * config.num_hidden_layers).unsigned_abs();
    let kept = kept_bytes(config, rows).saturating_mul(config.num_hidden_layers.unsigned_abs());
    let logits = rows.saturating_mul(F32 * config.vocab_size.unsigned_abs() * LOGITS_COPIES);
    Need::default()
        .and("weights", (2 + bases) * tensor_bytes + 2 * packed_bytes + held)
        .and("gradients", 2 * gradients * F32)
        .and("master weights", 4 * masters * F32)
        .and("optimizer state", 4 * 2 * masters * F32)
        .and(
            "activations",
            inputs
                .saturating_add(logits)
                .saturating_add(kept.min(step.activation_bytes_max)),
        )
}

/// While a step of a trainer outside is verified and published: both versions packed to measure KL, if that is
/// done. What else there is of them keeps to `policy.memory_bytes`.
fn outside(size: &Size) -> Need {
    let packed = match size.tensor_bytes > EXACT_BYTES_MAX {
        true => 0,
        false => 2 * size.packed_bytes,
    };
    Need::default().and("weights", packed)
}

/// The values of both factors of every matrix of the layers.
fn factors(size: &Size, rank: usize) -> u64 {
    let shapes = size.config.parameter_shapes().into_iter();
    let matrices = shapes.filter(|(name, shape)| name.starts_with("model.layers.") && shape.len() == 2);
    matrices
        .map(|(_, shape)| shape.iter().sum::<i64>().unsigned_abs() * rank as u64)
        .sum()
}

/// Refuses to train what does not fit, with what to do.
pub fn ask(size: &Size, options: &Options, compute: Compute, limit: &Limit) -> anyhow::Result<()> {
    let mend = "lower trainer.realtime.step.micro_batch_tokens and activation_bytes_max, set trainer.realtime.lora or \
                trainer.folds = false, take a smaller model or a larger machine, or set trainer.realtime.enabled = false \
                and publish what another trainer makes (`springtide policy publish`)";
    needed(size, options, compute).fits(limit, "training this model", mend)?;
    Ok(())
}

/// Refuses another run beside what the process needs anyway.
pub fn ask_beside(
    size: &Size,
    lora: Option<&lora::Config>,
    options: &Options,
    compute: Compute,
    limit: &Limit,
) -> anyhow::Result<()> {
    let need = learner(size, lora, &options.realtime.step, compute);
    let all = needed(size, options, compute).plus(&need);
    let mend = "train an adapter (`lora`), run it in a process of its own on another machine, or set \
                trainer.realtime.enabled = false in this one";
    all.fits(
        limit,
        format!(
            "this run, which alone needs {}, beside the realtime run",
            gb(need.bytes())
        ),
        mend,
    )?;
    Ok(())
}

/// The size of the version that the realtime run continues from: the head of its line, or the base. `None`: its
/// files cannot be read, which whoever loads it says better.
pub async fn size_at_start(
    pool: &PgPool,
    store: &Store,
    keys_dir: &Path,
    policy: &str,
    base: &Path,
) -> anyhow::Result<Option<Size>> {
    let size = match record::line(pool, policy, REALTIME_LINE).await? {
        Some((head, _)) => {
            let keys = TrustedKeys::load(keys_dir).context("load the trusted keys")?;
            size_of(store, policy, head, keys).await
        }
        None => {
            let base = base.to_owned();
            let read = tokio::task::spawn_blocking(move || Size::of_folder(&base));
            read.await?.map_err(Into::into)
        }
    };
    Ok(size
        .inspect_err(|error| tracing::warn!(error = format!("{error:#}"), "what training needs is not known"))
        .ok())
}

/// The size of a version in the store.
pub async fn size_of(store: &Store, policy: &str, serial: i64, keys: TrustedKeys) -> anyhow::Result<Size> {
    let keys = store.trusted(policy, keys).await?;
    let manifest = store.get_manifest(policy, serial, &keys).await?;
    let files = store.files(policy, serial, &keys, &["config.json"]).await?;
    let mut tensor_bytes = manifest.tensor_bytes;
    if let Some(base) = manifest.adapts {
        tensor_bytes += store.get_manifest(policy, base.version, &keys).await?.tensor_bytes;
    }
    Ok(Size::of_files(&files.files, tensor_bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Qwen2.5-1.5B, by its published configuration.
    fn qwen() -> Size {
        let json = br#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
            "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 32768, "model_type": "qwen2",
            "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,
            "vocab_size": 151936}"#;
        let files = BTreeMap::from([("config.json".to_owned(), json.as_slice().into())]);
        Size::of_files(&files, 3_087_428_608).unwrap()
    }

    #[test]
    fn training_a_model_of_3_gb_on_24_gb_is_refused_with_figures_and_settings() {
        let options = Options::default();
        assert_eq!(qwen().weights(|_| true), 1_543_714_304);
        let limit = Limit::setting("the machine's memory", 24 << 30);
        let refused = ask(&qwen(), &options, Compute::F32, &limit).unwrap_err().to_string();
        for part in [
            "master weights 24.7 GB",
            "optimizer state 49.4 GB",
            "25.8 GB",
            "trainer.realtime.lora",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        // its factors alone have masters
        let mut lora = Options::default();
        lora.realtime.lora = Some(serde_json::from_str("{}").unwrap());
        let bytes = |options: &Options| needed(&qwen(), options, Compute::F32).bytes();
        assert!(
            bytes(&lora) * 2 < bytes(&options),
            "{} {}",
            bytes(&lora),
            bytes(&options)
        );
        // another run beside this one
        let two = needed(&qwen(), &lora, Compute::F32).bytes() * 2;
        let beside = |bytes| {
            let limit = Limit::setting("the machine's memory", bytes);
            ask_beside(&qwen(), lora.realtime.lora.as_ref(), &lora, Compute::F32, &limit)
        };
        beside(two).unwrap();
        let refused = beside(two / 2).unwrap_err().to_string();
        assert!(refused.contains("beside the realtime run"), "{refused}");
        // no learner
        let mut none = Options::default();
        none.realtime.enabled = false;
        ask(&qwen(), &none, Compute::F32, &limit).unwrap();
    }
}
