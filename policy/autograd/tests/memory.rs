//! The memory that a gradient needs: each layer's input, the activations of one layer, and what else
//! it may keep.
//!
//! Each depth runs in its own process, which reports by how much its resident memory rose.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use artifact::threads::Threads;
use autograd::{TrainModel, require_grad};
use model::config::ModelConfig;
use model::exact::ExactModel;
use model::gradient::Gradient;
use model::random_checkpoint;
use std::process::Command;
use tch::{Kind, Tensor};

const LAYERS: &str = "SPRINGTIDE_MEMORY_LAYERS";
/// Bytes that the pass may keep for the gradient. Not set: one graph of libtorch.
const KEPT: &str = "SPRINGTIDE_MEMORY_KEPT";
const SEQUENCES: usize = 8;
const TOKENS: usize = 512;
/// With narrow weights and many rows, nearly all memory that grows with depth is activations.
const WIDTH: usize = 64;

fn config(layers: i64) -> ModelConfig {
    ModelConfig {
        vocab_size: 128,
        hidden_size: WIDTH as i64,
        intermediate_size: 256,
        num_hidden_layers: layers,
        num_attention_heads: 2,
        num_key_value_heads: 2,
        head_dim: 32,
        rms_norm_eps: 1e-5,
        max_position_embeddings: TOKENS as i64,
        tie_word_embeddings: true,
        ..ModelConfig::default()
    }
}

/// A field of `/proc/self/status`, bytes.
fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let kilobytes = line.split_whitespace().nth(1).unwrap();
    kilobytes.parse::<usize>().unwrap() * 1024
}

/// Does nothing unless the test below starts it by name in its own process.
#[test]
fn one_depth_forward_and_back() {
    let Ok(layers) = std::env::var(LAYERS) else { return };
    autograd::set_threads(1);
    let config = config(layers.parse().unwrap());
    let checkpoint = random_checkpoint(&config, 1);
    let fresh = TrainModel::from_checkpoint(&checkpoint).unwrap();
    let train_model = TrainModel::from_parameters(config, require_grad(fresh.parameters())).unwrap();
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % 128).collect();
    let loss = |logits: &Tensor| logits.log_softmax(-1, Kind::Float).select(-1, 3).sum(Kind::Float);
    let before = status("VmRSS");
    if let Ok(kept) = std::env::var(KEPT) {
        let logit_rows: Vec<usize> = (0..SEQUENCES * TOKENS).step_by(64).collect();
        let mut gradient = Gradient::new(&checkpoint, &Threads::ONE, |_| true).unwrap();
        let pass = model
            .score_for_gradient(&[ids.as_slice(); SEQUENCES], &logit_rows, None, kept.parse().unwrap())
            .unwrap();
        let logits = autograd::leaf(&pass.logits);
        loss(&logits).backward();
        let mut by_logits = vec![0.0; logits.numel()];
        logits.grad().copy_data(&mut by_logits, logits.numel());
        gradient.add(&model, &pass, &by_logits);
    } else {
        let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let wide = Tensor::from_slice(&wide).unsqueeze(0).repeat([SEQUENCES as i64, 1]);
        loss(&train_model.logits(&wide)).backward();
    }
    println!("rose by {}", status("VmHWM") - before);
}

fn rise(layers: usize, kept: Option<usize>) -> usize {
    let (layers, kept) = (layers.to_string(), kept.map(|bytes| bytes.to_string()));
    let mut set = vec![(LAYERS, layers.as_str())];
    set.extend(kept.as_deref().map(|bytes| (KEPT, bytes)));
    risen("one_depth_forward_and_back", &set)
}

/// Runs a test of this file in its own process and returns the bytes that it prints.
fn risen(test: &str, set: &[(&str, &str)]) -> usize {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", test, "--nocapture"])
        // Freed memory goes back to the kernel at once, so that only memory in use is measured.
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .envs(set.iter().copied());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let (_, rest) = text.split_once("rose by ").unwrap();
    rest.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_gradient_needs_the_inputs_of_every_layer_and_what_it_may_keep() {
    let more = 12;
    let inputs = more * SEQUENCES * TOKENS * WIDTH * size_of::<f32>();
    let grows = |kept| rise(4 + more, kept).saturating_sub(rise(4, kept));
    let [nothing, bounded, everything] = [0, 2 * inputs, usize::MAX >> 1].map(|kept| grows(Some(kept)));
    let one_graph = grows(None);
    println!(
        "{more} more layers: {nothing} bytes more, of which layer inputs are {inputs}; with {} kept {bounded}; with \
         everything kept {everything}; in one graph of libtorch {one_graph}",
        2 * inputs
    );
    // Weights, gradients and the allocator's overhead are small in comparison. What a layer computes is
    // 13 times its input, so keeping more would show.
    assert!(nothing < 2 * inputs, "{nothing} bytes for {inputs}");
    assert!(
        bounded < 4 * inputs,
        "{bounded} bytes for {inputs} and as much again twice"
    );
    // The measurement does detect kept activations.
    assert!(everything > 8 * inputs, "{everything} bytes kept");
    assert!(one_graph > 8 * inputs, "{one_graph} bytes in one graph");
}
