//! The memory that a gradient needs: the activations of one layer, whatever the depth, and each
//! layer's input.
//!
//! Each depth runs in its own process, which reports by how much its resident memory rose.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use model::autograd::{self, TrainModel, random_checkpoint, require_grad};
use model::config::ModelConfig;
use model::exact::ExactModel;
use std::process::Command;
use tch::{Kind, Tensor};

const LAYERS: &str = "SPRINGTIDE_MEMORY_LAYERS";
const WHOLE: &str = "SPRINGTIDE_MEMORY_WHOLE";
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
    if std::env::var(WHOLE).is_ok() {
        let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let wide = Tensor::from_slice(&wide).unsqueeze(0).repeat([SEQUENCES as i64, 1]);
        loss(&train_model.logits(&wide)).backward();
    } else {
        let logit_rows: Vec<usize> = (0..SEQUENCES * TOKENS).step_by(64).collect();
        let pass = model.score(&[ids.as_slice(); SEQUENCES], &logit_rows, None).unwrap();
        let input_values: usize = pass.inputs.iter().map(|rows| rows.values().len()).sum();
        assert_eq!(input_values, pass.inputs.len() * SEQUENCES * TOKENS * WIDTH);
        let hidden = autograd::leaf(&pass.hidden);
        loss(&train_model.project(&hidden)).backward();
        train_model.backward(&pass, hidden.grad());
    }
    println!("rose by {}", status("VmHWM") - before);
}

fn rise(layers: usize, one_graph: bool) -> usize {
    let layers = layers.to_string();
    let mut set = vec![(LAYERS, layers.as_str())];
    if one_graph {
        set.push((WHOLE, "1"));
    }
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
fn a_gradient_needs_the_activations_of_one_layer_and_the_inputs_of_every_layer() {
    let more = 12;
    let inputs = more * SEQUENCES * TOKENS * WIDTH * size_of::<f32>();
    let grows = |one_graph| rise(4 + more, one_graph).saturating_sub(rise(4, one_graph));
    let (stepwise, one_graph) = (grows(false), grows(true));
    println!(
        "{more} more layers: {stepwise} bytes more, of which layer inputs are {inputs}; in one graph {one_graph} bytes"
    );
    // Weights, gradients and the allocator's overhead are small in comparison. A layer's
    // activations are ten times its input, so keeping them would show.
    assert!(stepwise < 2 * inputs, "{stepwise} bytes for {inputs}");
    // The measurement does detect kept activations.
    assert!(one_graph > 8 * inputs, "{one_graph} bytes in one graph");
}
