//! The measurements of one model in one setting.

use super::bounds::Limits;
use super::libtorch::Plain;
use super::{Row, Setting};
use artifact::checkpoint::Checkpoint;
use artifact::threads::Threads;
use autograd::{Parameters, TrainModel, require_grad};
use model::exact::{Arithmetic, Compute, ExactModel, KvCache};
use model::gradient::Gradient;
use std::time::Instant;
use tch::{Kind, Tensor};

/// The least duration of a measurement.
const SECONDS_MIN: f64 = 0.3;
/// Batch sizes of decode, and the steps of one call.
const BATCHES: [(usize, usize); 4] = [(1, 16), (4, 8), (16, 4), (64, 2)];
/// What a training step keeps of its forward pass, as `trainer.activation_bytes_max` by default.
const KEPT_BYTES_MAX: u64 = 1 << 30;
/// The most rows of a training step.
const TRAINED_MAX: usize = 512;

pub struct Case<'a> {
    pub model: &'static str,
    pub folder: &'static str,
    pub setting: Setting,
    pub limits: &'a Limits,
    pub rounds: usize,
    /// Measure training steps alone.
    pub training_only: bool,
}

impl Case<'_> {
    /// Half of the `context` tokens are the prompt; decoding follows it.
    pub fn run(&self, checkpoint: &Checkpoint, context: usize) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
        autograd::set_threads(self.setting.threads as i32);
        let model = ExactModel::with_arithmetic(
            checkpoint,
            &Arithmetic::new(self.setting.compute, self.setting.threads)?,
        )?;
        let config = model.config().clone();
        let fresh = TrainModel::from_checkpoint(checkpoint)?;
        let parameters = self.of_kind(fresh.parameters());
        let (slots, half) = (64, context / 2);
        let mut cache = KvCache::new(&model, slots, context);
        let mut plain = Plain::new(&config, &parameters, slots as i64, context as i64);
        let ids: Vec<u32> = (0..context as u32)
            .map(|i| i * 7919 % config.vocab_size as u32)
            .collect();
        let shapes = config.parameter_shapes();
        let weights: i64 = shapes.iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
        let logits = (config.vocab_size * config.hidden_size) as f64;
        let body = weights as f64 - logits;
        let limits = self.limits;
        let training = |fresh: &TrainModel| {
            let passes = match Gradient::supports(&config, self.setting.compute) {
                true => 3.0,
                false => 4.0,
            };
            let bound = limits.flops / (2.0 * passes * body);
            self.training(checkpoint, &model, fresh.parameters(), &ids[..half], bound)
        };
        if self.training_only {
            return Ok(vec![training(&fresh)?]);
        }
        let mut rows = Vec::new();

        let speeds = in_turn(
            self.rounds,
            || {
                cache.clear(0);
                model.prefill(&mut cache, 0, &ids[..half]).map(|_| half)
            },
            || {
                let _no_grad = tch::no_grad_guard();
                let _ = plain.prefill(0, &ids[..half]);
                half
            },
        )?;
        let bound = limits.flops / (2.0 * (body + logits / half as f64));
        rows.push(self.row(format!("prefill of {half}"), 0, speeds, bound, "multiply-adds"));

        for slot in 1..slots {
            cache.copy_prefix(0, slot, half);
        }
        plain.spread(slots as i64);
        for (batch, steps) in BATCHES {
            let tokens = vec![11u32; batch];
            let speeds = in_turn(
                self.rounds,
                || {
                    for slot in 0..batch {
                        cache.copy_prefix(slot, slot, half);
                    }
                    for _ in 0..steps {
                        model.decode(&mut cache, &tokens)?;
                    }
                    Ok(steps * batch)
                },
                || {
                    let _no_grad = tch::no_grad_guard();
                    for step in 0..steps {
                        let _ = plain.decode(&tokens, (half + step) as i64);
                    }
                    steps * batch
                },
            )?;
            // A step reads every weight once, two bytes each, and multiplies it once per row.
            let read = limits.bytes_per_second / (2.0 * (body + logits)) * batch as f64;
            let multiply = limits.flops / (2.0 * (body + logits));
            let by = match read < multiply {
                true => "bytes of weights",
                false => "multiply-adds",
            };
            rows.push(self.row(format!("decode, batch {batch}"), steps, speeds, read.min(multiply), by));
        }
        rows.push(training(&fresh)?);
        Ok(rows)
    }

    /// A training step: a forward pass and a backward pass that costs two. With bf16 products also the
    /// forward pass's recomputation.
    fn training(
        &self,
        checkpoint: &Checkpoint,
        model: &ExactModel,
        parameters: &Parameters,
        ids: &[u32],
        bound: f64,
    ) -> Result<Row, Box<dyn std::error::Error>> {
        let (config, length) = (model.config(), ids.len());
        let count = TRAINED_MAX / length;
        let leaves = self.of_kind(parameters);
        let leaves: Parameters = leaves
            .iter()
            .map(|(name, t)| (name.clone(), t.copy().set_requires_grad(true)))
            .collect();
        let plain = Plain::new(config, &leaves, 1, length as i64);
        let learning =
            TrainModel::from_parameters(config.clone(), require_grad(parameters))?.with_compute(self.setting.compute);
        let mut gradient = match Gradient::supports(config, self.setting.compute) {
            true => Some(Gradient::new(checkpoint, &Threads::ONE, |_| true)?),
            false => None,
        };
        let sequences: Vec<&[u32]> = vec![ids; count];
        let logit_rows: Vec<usize> = (0..count * length).filter(|row| row % length >= length - 16).collect();
        let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let wide = Tensor::from_slice(&wide).unsqueeze(0).repeat([count as i64, 1]);
        let picked: Vec<i64> = logit_rows.iter().map(|&row| row as i64).collect();
        let picked = Tensor::from_slice(&picked);
        let loss = |logits: &Tensor| {
            let log_probabilities = logits.log_softmax(-1, Kind::Float);
            log_probabilities.select(-1, 3).sum(Kind::Float).backward();
        };
        let speeds = in_turn(
            self.rounds,
            || {
                let pass = model.score_for_gradient(&sequences, &logit_rows, None, KEPT_BYTES_MAX)?;
                let logits = autograd::leaf(&pass.logits);
                loss(&logits);
                let by_logits = logits.grad();
                match &mut gradient {
                    Some(gradient) => {
                        let mut values = vec![0.0; by_logits.numel()];
                        by_logits.copy_data(&mut values, by_logits.numel());
                        gradient.add(model, &pass, &values);
                    }
                    None => learning.backward(&pass, &by_logits),
                }
                Ok(count * length)
            },
            || {
                loss(&plain.logits(&wide).flatten(0, 1).index_select(0, &picked));
                count * length
            },
        )?;
        let what = format!("training step, {count} × {length}, 16 trained each");
        Ok(self.row(what, 0, speeds, bound, "multiply-adds"))
    }

    fn of_kind(&self, parameters: &Parameters) -> Parameters {
        let kind = match self.setting.compute {
            Compute::F32 => Kind::Float,
            Compute::Bf16 => Kind::BFloat16,
        };
        parameters
            .iter()
            .map(|(name, t)| (name.clone(), t.to_kind(kind)))
            .collect()
    }

    fn row(&self, what: String, steps: usize, speeds: Speeds, bound: f64, bound_by: &'static str) -> Row {
        Row {
            model: self.model,
            folder: self.folder,
            setting: self.setting,
            what,
            steps,
            ours: speeds.ours,
            libtorch: speeds.theirs,
            ratio: speeds.ratio,
            bound,
            bound_by,
        }
    }
}

/// Tokens per second of both, and the ratio.
#[derive(Clone, Copy)]
struct Speeds {
    ours: f64,
    theirs: f64,
    ratio: f64,
}

/// Alternates rounds of both, after one round each to warm up.
fn in_turn(
    rounds: usize,
    mut ours: impl FnMut() -> Result<usize, model::exact::Error>,
    mut theirs: impl FnMut() -> usize,
) -> Result<Speeds, model::exact::Error> {
    ours()?;
    theirs();
    let (mut a, mut b, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let rate = |work: &mut dyn FnMut() -> Result<usize, model::exact::Error>| {
            let started = Instant::now();
            let mut tokens = 0;
            while started.elapsed().as_secs_f64() < SECONDS_MIN {
                tokens += work()?;
            }
            Ok::<f64, model::exact::Error>(tokens as f64 / started.elapsed().as_secs_f64())
        };
        let x = rate(&mut ours)?;
        let y = rate(&mut || Ok(theirs()))?;
        a.push(x);
        b.push(y);
        ratios.push(x / y);
    }
    Ok(Speeds {
        ours: median(a),
        theirs: median(b),
        ratio: median(ratios),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
