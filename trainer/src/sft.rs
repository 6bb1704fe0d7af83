//! Supervised training of all weights on packed windows: next-token cross-entropy with a weight per
//! position.
//!
//! Makes the demo's base policy. Muon trains matrices, AdamW embeddings and norms. Master weights
//! are f32. The learning rate warms up, stays constant, and falls to zero over the last half.

mod data;
mod muon;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use autograd::TrainModel;
use model::config::ModelConfig;
use model::exact::Compute;
use muon::Optimizer;
use std::path::PathBuf;
use tch::{Kind, Tensor};

pub use data::Windows;

/// What a run begins with.
#[derive(Debug, Clone)]
pub enum Start {
    /// Random weights of this shape, and the tokenizer's files of the data.
    Random(Box<ModelConfig>),
    /// A Hugging Face folder. The data must have been made with its tokenizer.
    Model(PathBuf),
}

/// One supervised run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folder with `train.safetensors`, `held_out.safetensors` and the tokenizer's files.
    pub data: PathBuf,
    /// Hugging Face folder to write.
    pub out: PathBuf,
    /// The model to train.
    pub start: Start,
    pub steps: usize,
    /// Windows in one step.
    pub batch: usize,
    /// Muon's step for matrices: each update has this spectral norm, times √max(1, rows/columns).
    pub matrix_rate: f64,
    /// AdamW's step for embeddings and norms.
    pub vector_rate: f64,
    pub seed: u64,
    /// libtorch threads.
    pub threads: i32,
    /// Precision of matrix products.
    pub compute: Compute,
}

/// The faster precision of matrix products on this CPU: bf16 needs AVX512-BF16, and is several
/// times slower than f32 without.
pub fn faster_compute() -> Compute {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") {
        return Compute::Bf16;
    }
    Compute::F32
}

/// Progress of a run.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    pub step: usize,
    pub steps: usize,
    /// Weighted mean of the step's cross-entropy, nats per token.
    pub loss: f64,
}

/// Mean cross-entropy on held-out windows, nats per token: of all text, and of the text after a
/// cut.
#[derive(Debug, Clone, Copy)]
pub struct HeldOut {
    pub text: f64,
    pub rest: f64,
}

/// Trains and writes the folder. Returns the held-out loss of the weights as
/// written (bf16).
pub fn run(options: &Options, mut progress: impl FnMut(Progress)) -> anyhow::Result<HeldOut> {
    tch::set_num_threads(options.threads);
    let train = Windows::read(&options.data.join("train.safetensors"))?;
    let held_out = Windows::read(&options.data.join("held_out.safetensors"))?;
    ensure!(
        train.len() >= options.batch,
        "{} has {} windows, fewer than one batch of {}",
        options.data.display(),
        train.len(),
        options.batch
    );
    let template = template(options)?;
    let fresh = TrainModel::from_checkpoint(&template).context("build the model")?;
    let model = TrainModel::from_parameters(fresh.config().clone(), autograd::require_grad(fresh.parameters()))?
        .with_compute(options.compute);
    let mut optimizer = Optimizer::new(model.parameters(), options);
    for step in 0..options.steps {
        let batch = train.batch(step * options.batch, options.batch);
        let loss = weighted_loss(&model, &batch);
        loss.backward();
        optimizer.step(model.parameters(), rate_at(step, options.steps));
        progress(Progress {
            step: step + 1,
            steps: options.steps,
            loss: loss.double_value(&[]),
        });
    }
    let checkpoint = autograd::checkpoint_from_f32(&template, model.parameters())?;
    checkpoint
        .write_dir(&options.out)
        .with_context(|| format!("write {}", options.out.display()))?;
    evaluate(&checkpoint, &held_out, options.compute)
}

/// The checkpoint that training begins with.
fn template(options: &Options) -> anyhow::Result<Checkpoint> {
    let config = match &options.start {
        Start::Random(config) => config,
        Start::Model(dir) => {
            return Checkpoint::read_dir(dir).with_context(|| format!("read the model of {}", dir.display()));
        }
    };
    let mut checkpoint = model::random_checkpoint(config, options.seed);
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let path = options.data.join(name);
        let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        checkpoint.files.insert(name.to_string(), bytes.into());
    }
    Ok(checkpoint)
}

/// 40 steps of warm-up, then constant, then linear to zero over the last half.
fn rate_at(step: usize, steps: usize) -> f64 {
    let fraction = step as f64 / steps as f64;
    let warm = (step + 1) as f64 / 40.0;
    warm.min(1.0).min(2.0 * (1.0 - fraction))
}

/// Σ w · cross-entropy / Σ w over a batch.
fn weighted_loss(model: &TrainModel, batch: &data::Batch) -> Tensor {
    let logits = model.logits(&batch.input);
    let logp = TrainModel::token_logprobs(&logits, &batch.labels, 1.0);
    -(&logp * &batch.weights).sum(Kind::Float) / batch.weights.sum(Kind::Float)
}

/// Held-out loss of a checkpoint.
fn evaluate(checkpoint: &Checkpoint, windows: &Windows, compute: Compute) -> anyhow::Result<HeldOut> {
    let model = TrainModel::from_checkpoint(checkpoint)?.with_compute(compute);
    let _no_grad = tch::no_grad_guard();
    // sums of losses and of tokens; the text after a cut has a weight above 1
    let (mut text, mut rest) = ((0.0, 0.0), (0.0, 0.0));
    const BATCH: usize = 16;
    for i in 0..(windows.len().min(40 * BATCH) / BATCH).max(1) {
        let batch = windows.batch(i * BATCH, BATCH.min(windows.len()));
        let logits = model.logits(&batch.input);
        let loss = -TrainModel::token_logprobs(&logits, &batch.labels, 1.0);
        for (sums, mask) in [(&mut text, batch.weights.gt(0.0)), (&mut rest, batch.weights.gt(1.0))] {
            let mask = mask.to_kind(Kind::Float);
            sums.0 += (&loss * &mask).sum(Kind::Double).double_value(&[]);
            sums.1 += mask.sum(Kind::Double).double_value(&[]);
        }
    }
    Ok(HeldOut {
        text: text.0 / text.1,
        rest: rest.0 / rest.1,
    })
}

#[cfg(test)]
mod tests {
    use super::rate_at;

    #[test]
    fn the_rate_warms_up_stays_and_falls_to_zero() {
        assert!((rate_at(0, 1000) - 0.025).abs() < 1e-12);
        assert_eq!(rate_at(100, 1000), 1.0);
        assert_eq!(rate_at(500, 1000), 1.0);
        assert!((rate_at(750, 1000) - 0.5).abs() < 1e-12);
        assert!(rate_at(999, 1000) < 0.01);
    }
}
