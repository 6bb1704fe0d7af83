//! The gradient of a mixture of experts whose sampler and trainer have routers that differ by noise.

use super::*;
use model::config::{Experts, Scoring};

fn mixture() -> ModelConfig {
    let layers = 4;
    ModelConfig {
        num_hidden_layers: layers,
        family: Family::Qwen3Moe,
        experts: Some(Experts {
            count: 16,
            per_token: 4,
            intermediate_size: 16,
            normalize: true,
            shared: 0,
            scoring: Scoring::Softmax,
            layers: vec![true; layers as usize],
        }),
        ..tiny()
    }
}

/// With each weight of the routers times 1 + `noise` · z, z with mean 0 and variance 1.
fn with_noise(checkpoint: &Checkpoint, noise: f32, seed: u64) -> Checkpoint {
    let mut random = runs::random::Random(seed);
    let mut noisy = checkpoint.clone();
    for (name, tensor) in &mut noisy.tensors {
        if !name.ends_with("mlp.gate.weight") {
            continue;
        }
        let values = model::exact::to_f32(name, tensor).unwrap();
        let mut factor = || {
            1.0 + noise
                * (0..12)
                    .map(|_| (random.draw() >> 40) as f32 / (1 << 24) as f32)
                    .sum::<f32>()
                - noise * 6.0
        };
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| (value * factor()).to_le_bytes())
            .collect();
        *tensor = artifact::tensor::TensorData::new(safetensors::Dtype::F32, tensor.shape.clone(), bytes).unwrap();
    }
    noisy
}

/// Samples as the sampler's engine logs them, with its experts.
fn sampled(sampler: &Learner, n: u32) -> Vec<Sample> {
    let mut samples = samples(sampler, n);
    for sample in &mut samples {
        let ids: Vec<u32> = sample
            .prompt
            .iter()
            .chain(&sample.tokens)
            .take(sample.input_len())
            .copied()
            .collect();
        let rows: Vec<usize> = (0..ids.len()).collect();
        let pass = sampler.state.model.score(&[&ids], &rows, None).unwrap();
        sample.experts = Some(Arc::new(pass.routing));
        sample.engine = Some("vllm".into());
    }
    samples
}

fn gradients(learner: &mut Learner, samples: &[Sample]) -> Parameters {
    learner.discard().unwrap();
    let limits = Limits {
        k3_max: f64::MAX,
        ..Limits::default()
    };
    let settings = StepSettings::default();
    let checked = learner
        .accumulate(samples, &rewards(samples), &settings, &limits)
        .unwrap();
    assert_eq!(checked.rejected, []);
    learner.take_gradients(1.0).unwrap()
}

/// |a − b| / |b| over all weights.
fn error(a: &Parameters, b: &Parameters) -> f64 {
    let squares = |of: &dyn Fn(&str) -> Tensor| -> f64 {
        b.keys()
            .map(|name| of(name).square().sum(Kind::Double).double_value(&[]))
            .sum()
    };
    (squares(&|name| &a[name] - &b[name]) / squares(&|name| b[name].shallow_clone())).sqrt()
}

/// With `--nocapture`, a table. The reference is the gradient of the sampler's own weights and experts.
#[test]
fn replayed_experts_keep_the_gradient_when_routers_differ_by_noise() {
    let checkpoint = random_checkpoint(&mixture(), 7);
    let mut trainer = Learner::from_checkpoint(Arc::new(checkpoint.clone())).unwrap();
    println!("| router noise | other experts | error with replay | without |\n|---|---|---|---|");
    for noise in [0.0, 1e-3, 1e-2] {
        let mut sums = [0.0; 3];
        let seeds = 3;
        for seed in 0..seeds {
            let mut sampler = Learner::from_checkpoint(Arc::new(with_noise(&checkpoint, noise, seed))).unwrap();
            let logged = sampled(&sampler, 48);
            let own: Vec<Sample> = logged
                .iter()
                .map(|sample| Sample {
                    experts: None,
                    ..sample.clone()
                })
                .collect();
            let others = sampled(&trainer, 48);
            let truth = gradients(&mut sampler, &logged);
            let (mut differ, mut all) = (0, 0);
            for (one, other) in logged.iter().zip(&others) {
                let layers = |sample: &Sample| sample.experts.clone().unwrap().layers().to_vec();
                for ((_, one), (_, other)) in layers(one).iter().zip(&layers(other)) {
                    differ += one.chunks(4).zip(other.chunks(4)).filter(|(a, b)| a != b).count();
                    all += one.len() / 4;
                }
            }
            sums[0] += differ as f64 / all as f64;
            sums[1] += error(&gradients(&mut trainer, &logged), &truth);
            let by_layer = trainer.accumulator.metrics(1.0).other_experts;
            assert!(by_layer.keys().eq(&[0, 1, 2, 3]), "{by_layer:?}");
            let (mean, flips) = (by_layer.values().sum::<f64>() / 4.0, differ as f64 / all as f64);
            match noise {
                0.0 => assert_eq!(mean, 0.0),
                _ => assert!((flips / 4.0..=flips * 4.0).contains(&mean), "{by_layer:?} {flips}"),
            }
            sums[2] += error(&gradients(&mut trainer, &own), &truth);
        }
        let [flips, replayed, free] = sums.map(|sum| sum / seeds as f64);
        println!("| {noise} | {:.2}% | {replayed:.1e} | {free:.1e} |", flips * 100.0);
        match noise {
            0.0 => assert_eq!((flips, replayed, free), (0.0, 0.0, 0.0)),
            _ => assert!(flips > 0.0 && replayed < free / 2.0, "{noise}: {replayed} {free}"),
        }
    }
}
