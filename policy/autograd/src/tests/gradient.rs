//! Gradients of the golden models against libtorch and finite differences, and their bits.

use super::golden;
use crate::{Parameters, TrainModel, checkpoint_from_f32, require_grad};
use artifact::checkpoint::Checkpoint;
use artifact::isa::Isa;
use model::config::{Family, ModelConfig};
use model::exact::{self, Arithmetic, Compute, ExactModel};
use model::gradient::Gradient;
use model::random_checkpoint;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

type Sums = BTreeMap<String, Vec<f32>>;

/// Sequences of different lengths; the first and the longest need several blocks of rows.
fn sequences(vocabulary: u32) -> Vec<Vec<u32>> {
    let ids = |n: u32, step: u32| (0..n).map(|i| (i * step + 11) % vocabulary).collect();
    vec![ids(60, 37), ids(1, 5), ids(27, 13), ids(97, 29)]
}

/// A few rows of all sequences but the third, among them neighbors, and the last of each.
const LOGIT_ROWS: [usize; 8] = [3, 31, 32, 59, 60, 150, 151, 184];

fn dense() -> Vec<(String, Checkpoint)> {
    let mut dense = Vec::new();
    for folder in golden::folders() {
        let checkpoint = golden::checkpoint(&folder);
        if Gradient::supports(&exact::config_of(&checkpoint).unwrap(), Compute::F32) {
            dense.push((folder, checkpoint));
        }
    }
    assert!(dense.len() >= 4, "llama, mistral, qwen2, qwen3");
    dense
}

/// Any gradient of logits will do.
fn of_logits(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.7).sin()).collect()
}

struct Run {
    arithmetic: Arithmetic,
    isa: Isa,
    kept_bytes_max: u64,
    /// Sequences of one pass.
    at_once: usize,
}

impl Default for Run {
    fn default() -> Self {
        Run {
            arithmetic: Arithmetic::default(),
            isa: Isa::best(),
            kept_bytes_max: u64::MAX,
            at_once: usize::MAX,
        }
    }
}

impl Run {
    fn sums(&self, checkpoint: &Checkpoint, wanted: impl Fn(&str) -> bool) -> Sums {
        let model = ExactModel::with_arithmetic(checkpoint, &self.arithmetic)
            .unwrap()
            .with_isa(self.isa);
        let vocabulary = model.config().vocab_size as usize;
        let mut gradient = Gradient::new(checkpoint, &self.arithmetic.threads, wanted).unwrap();
        let all = of_logits(LOGIT_ROWS.len() * vocabulary);
        let (mut first_row, mut first_logit) = (0, 0);
        let sequences = sequences(vocabulary as u32);
        for some in sequences.chunks(self.at_once.min(sequences.len())) {
            let refs: Vec<&[u32]> = some.iter().map(Vec::as_slice).collect();
            let count: usize = refs.iter().map(|ids| ids.len()).sum();
            let rows = LOGIT_ROWS
                .iter()
                .filter(|&&row| (first_row..first_row + count).contains(&row));
            let rows: Vec<usize> = rows.map(|row| row - first_row).collect();
            first_row += count;
            if rows.is_empty() {
                continue;
            }
            let pass = model
                .score_for_gradient(&refs, &rows, None, self.kept_bytes_max)
                .unwrap();
            gradient.add(&model, &pass, &all[first_logit..][..rows.len() * vocabulary]);
            first_logit += rows.len() * vocabulary;
        }
        gradient
            .sums()
            .map(|(name, _, values)| (name.to_string(), values.to_vec()))
            .collect()
    }
}

fn by_libtorch(checkpoint: &Checkpoint) -> Sums {
    let fresh = TrainModel::from_checkpoint(checkpoint).unwrap();
    let model = TrainModel::from_parameters(fresh.config().clone(), require_grad(fresh.parameters())).unwrap();
    let logits = sequences(model.config().vocab_size as u32).into_iter().map(|ids| {
        let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        model.logits(&Tensor::from_slice(&wide).unsqueeze(0)).squeeze_dim(0)
    });
    let rows: Vec<i64> = LOGIT_ROWS.iter().map(|&row| row as i64).collect();
    let logits = Tensor::cat(&logits.collect::<Vec<_>>(), 0).index_select(0, &Tensor::from_slice(&rows));
    let weights = Tensor::from_slice(&of_logits(logits.numel())).view_as(&logits);
    (logits * weights).sum(Kind::Float).backward();
    let values = |t: &Tensor| Vec::<f32>::try_from(&t.grad().flatten(0, -1)).unwrap();
    let parameters = model.parameters().iter();
    parameters.map(|(name, t)| (name.clone(), values(t))).collect()
}

fn bits(sums: &Sums) -> BTreeMap<&str, Vec<u32>> {
    let bits = |values: &Vec<f32>| values.iter().map(|value| value.to_bits()).collect();
    sums.iter()
        .map(|(name, values)| (name.as_str(), bits(values)))
        .collect()
}

#[test]
fn every_gradient_is_that_of_libtorch() {
    for (folder, checkpoint) in dense() {
        let (ours, theirs) = (Run::default().sums(&checkpoint, |_| true), by_libtorch(&checkpoint));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        for (name, theirs) in &theirs {
            let norm =
                |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            let size = norm(&mut theirs.iter().copied());
            let apart = norm(&mut theirs.iter().zip(&ours[name]).map(|(a, b)| a - b));
            assert!(size > 0.0, "{folder}: {name}");
            assert!(apart < 1e-5 * size, "{folder}: {name} is {} apart", apart / size);
        }
    }
}

/// Bytes that let a pass keep some of its layers, but not all.
fn some_layers(checkpoint: &Checkpoint) -> u64 {
    let model = ExactModel::from_checkpoint(checkpoint).unwrap();
    let sequences = sequences(model.config().vocab_size as u32);
    let refs: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    let kept = |bytes: u64| {
        let pass = model.score_for_gradient(&refs, &LOGIT_ROWS, None, bytes).unwrap();
        pass.layers.iter().filter(|layer| layer.parts.is_some()).count()
    };
    let bytes = (10..).map(|n| 3 << n).find(|&bytes| kept(bytes) > 0).unwrap();
    assert!(kept(bytes) < model.config().num_hidden_layers as usize);
    bytes
}

#[test]
fn threads_memory_and_instructions_change_no_bit() {
    for (folder, checkpoint) in dense() {
        let alone = Run::default().sums(&checkpoint, |_| true);
        for threads in [2, 4] {
            let mut arithmetic = Arithmetic::new(Compute::F32, threads).unwrap();
            arithmetic.threads = arithmetic.threads.eager();
            let run = Run {
                arithmetic,
                ..Run::default()
            };
            assert!(
                bits(&run.sums(&checkpoint, |_| true)) == bits(&alone),
                "{folder}, {threads} threads"
            );
        }
        for kept_bytes_max in [0, some_layers(&checkpoint)] {
            let run = Run {
                kept_bytes_max,
                ..Run::default()
            };
            assert!(
                bits(&run.sums(&checkpoint, |_| true)) == bits(&alone),
                "{folder}, {kept_bytes_max} bytes"
            );
        }
        for isa in Isa::available() {
            let run = Run { isa, ..Run::default() };
            assert!(
                bits(&run.sums(&checkpoint, |_| true)) == bits(&alone),
                "{folder}, {isa:?}"
            );
        }
    }
}

#[test]
fn passes_of_a_few_sequences_add_up() {
    let checkpoint = golden::checkpoint("qwen3");
    let together = Run::default().sums(&checkpoint, |_| true);
    let run = Run {
        at_once: 1,
        ..Run::default()
    };
    for (name, one_by_one) in run.sums(&checkpoint, |_| true) {
        let size = together[&name].iter().fold(0f32, |max, x| max.max(x.abs()));
        for (a, b) in one_by_one.iter().zip(&together[&name]) {
            assert!((a - b).abs() < 1e-5 * size, "{name}: {a} and {b}");
        }
    }
}

#[test]
fn only_wanted_gradients_are_summed_with_the_same_bits() {
    let checkpoint = golden::checkpoint("qwen2");
    let all = Run::default().sums(&checkpoint, |_| true);
    let wanted = |name: &str| name.contains("layers.1.mlp.up") || name.contains("layers.0.self_attn.q");
    let some = Run::default().sums(&checkpoint, wanted);
    assert!(some.len() >= 2 && some.keys().all(|name| wanted(name)));
    for (name, values) in &some {
        assert!(*values == all[name], "{name}");
    }
}

/// A model whose loss is not flat, in f32.
fn tiny() -> Checkpoint {
    let config = ModelConfig {
        family: Family::Qwen3,
        vocab_size: 185,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 128,
        tie_word_embeddings: true,
        qk_norm: true,
        ..ModelConfig::default()
    };
    let mut checkpoint = random_checkpoint(&config, 5);
    let scaled: Parameters = TrainModel::from_checkpoint(&checkpoint)
        .unwrap()
        .parameters()
        .iter()
        .map(|(name, t)| (name.clone(), if t.dim() == 2 { t * 12.0 } else { t * 1.3 }))
        .collect();
    for data in checkpoint.tensors.values_mut() {
        let count: usize = data.shape.iter().product();
        *data =
            artifact::tensor::TensorData::new(safetensors::Dtype::F32, data.shape.clone(), vec![0; 4 * count]).unwrap();
    }
    checkpoint_from_f32(&checkpoint, &scaled).unwrap()
}

#[test]
fn gradients_are_finite_differences() {
    let checkpoint = tiny();
    let sums = Run::default().sums(&checkpoint, |_| true);
    let loss = |checkpoint: &Checkpoint| {
        let model = ExactModel::from_checkpoint(checkpoint).unwrap();
        let sequences = sequences(185);
        let refs: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let logits = model.score(&refs, &LOGIT_ROWS, None).unwrap().logits;
        let weighted = logits.values().iter().zip(of_logits(logits.values().len()));
        weighted.map(|(x, w)| f64::from(*x) * f64::from(w)).sum::<f64>()
    };
    let parameters = TrainModel::from_checkpoint(&checkpoint).unwrap();
    for (name, t) in parameters.parameters() {
        // Along the gradient itself, which every component takes part in.
        let length = sums[name].iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let direction = Tensor::from_slice(&sums[name]).view_as(t) / length;
        let step = 2e-3;
        let moved = |by: f64| {
            let moved = Parameters::from([(name.clone(), t + &direction * by)]);
            loss(&checkpoint_from_f32(&checkpoint, &moved).unwrap())
        };
        let slope = (moved(step) - moved(-step)) / (2.0 * step);
        assert!(
            (slope / length - 1.0).abs() < 5e-3,
            "{name}: {slope} by differences, {length} by us"
        );
    }
}
