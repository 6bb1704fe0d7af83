use super::*;
use crate::image::Image;

fn config(qk_norm: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 97,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        max_position_embeddings: 64,
        tie_word_embeddings: qk_norm,
        qk_norm,
    }
}

/// Random weights large enough that the logits are far from uniform.
fn image(config: &ModelConfig) -> Image {
    let image = random_image(config, 3);
    let network = Network::from_image(&image).unwrap();
    let scaled: Parameters = network
        .parameters()
        .iter()
        .map(|(n, t)| (n.clone(), if t.dim() == 2 { t * 8.0 } else { t.copy() }))
        .collect();
    image_from_f32(&image, &scaled).unwrap()
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 97).collect()
}

fn rows(network: &Network, ids: &[u32]) -> Vec<Vec<f32>> {
    let wide: Vec<i64> = ids.iter().map(|&i| i64::from(i)).collect();
    let _no_grad = tch::no_grad_guard();
    let logits = network.logits(&Tensor::from_slice(&wide).unsqueeze(0));
    (0..ids.len())
        .map(|t| Vec::<f32>::try_from(&logits.get(0).get(t as i64)).unwrap())
        .collect()
}

fn close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() < 2e-4, "{x} against {y}");
    }
}

#[test]
fn cached_decoding_computes_what_the_whole_sequence_computes() {
    for qk_norm in [true, false] {
        let network = Network::from_image(&image(&config(qk_norm))).unwrap();
        let sequence = ids(20);
        let whole = rows(&network, &sequence);
        let mut cache = KvCache::new(&network, 2, 64);
        close(&network.prefill(&mut cache, 0, &sequence[..12]).unwrap(), &whole[11]);
        for t in 12..20 {
            let next = network.decode(&mut cache, &sequence[t..=t]).unwrap();
            close(&next[0], &whole[t]);
        }
        assert_eq!(cache.len(0), 20);
    }
}

#[test]
fn sequences_of_different_lengths_decode_together_and_move_between_slots() {
    let network = Network::from_image(&image(&config(true))).unwrap();
    let (a, b): (Vec<u32>, Vec<u32>) = (ids(18), ids(30).into_iter().rev().collect());
    let (whole_a, whole_b) = (rows(&network, &a), rows(&network, &b));
    let mut cache = KvCache::new(&network, 3, 64);
    network.prefill(&mut cache, 0, &a[..10]).unwrap();
    network.prefill(&mut cache, 2, &b[..25]).unwrap();
    cache.move_slot(2, 1);
    for step in 0..3 {
        let next = network.decode(&mut cache, &[a[10 + step], b[25 + step]]).unwrap();
        close(&next[0], &whole_a[10 + step]);
        close(&next[1], &whole_b[25 + step]);
    }
    cache.move_slot(1, 0);
    let next = network.decode(&mut cache, &[b[28]]).unwrap();
    close(&next[0], &whole_b[28]);
}

#[test]
fn what_follows_a_position_never_changes_it() {
    let network = Network::from_image(&image(&config(true))).unwrap();
    let short = rows(&network, &ids(12));
    let long = rows(&network, &ids(40));
    for t in 0..12 {
        close(&short[t], &long[t]);
    }
}

#[test]
fn an_image_survives_the_way_through_f32_bit_for_bit() {
    let image = image(&config(true));
    let network = Network::from_image(&image).unwrap();
    let back = image_from_f32(&image, network.parameters()).unwrap();
    assert_eq!(image.tensors, back.tensors);
}

#[test]
fn gradients_reach_every_parameter() {
    let image = image(&config(true));
    let network = Network::from_image(&image).unwrap();
    let leaves = require_grad(network.parameters());
    let network = Network::from_parameters(network.config().clone(), leaves);
    let wide: Vec<i64> = ids(16).iter().map(|&i| i64::from(i)).collect();
    let x = Tensor::from_slice(&wide).unsqueeze(0);
    let logits = network.logits(&x.narrow(1, 0, 15));
    Network::token_logprobs(&logits, &x.narrow(1, 1, 15), 1.0)
        .sum(Kind::Float)
        .backward();
    for (name, tensor) in network.parameters() {
        let norm = tensor.grad().norm().double_value(&[]);
        assert!(norm > 0.0 && norm.is_finite(), "{name}: gradient norm {norm}");
    }
}

#[test]
fn a_few_positions_have_the_values_and_gradients_that_they_have_among_all() {
    let image = image(&config(true));
    let wide: Vec<i64> = ids(24).iter().map(|&id| i64::from(id)).collect();
    let wide = Tensor::from_slice(&wide).view([2, 12]);
    let positions = Tensor::from_slice(&[3i64, 11, 12, 20]);
    let run = |few: bool| {
        let fresh = Network::from_image(&image).unwrap();
        let network = Network::from_parameters(fresh.config().clone(), require_grad(fresh.parameters()));
        let hidden = match few {
            true => network.hidden_at(&wide, &positions),
            false => network.hidden(&wide).flatten(0, 1).index_select(0, &positions),
        };
        hidden.square().sum(Kind::Float).backward();
        let gradients = network.parameters().values().filter(|p| p.grad().defined());
        let gradients: Vec<f32> = gradients
            .flat_map(|p| Vec::<f32>::try_from(&p.grad().flatten(0, -1)).unwrap())
            .collect();
        let values = Vec::<f32>::try_from(&hidden.detach().flatten(0, -1)).unwrap();
        (values, gradients)
    };
    let ((few, few_gradients), (all, all_gradients)) = (run(true), run(false));
    close(&few, &all);
    close(&few_gradients, &all_gradients);
    assert!(few_gradients.iter().any(|g| g.abs() > 1e-2));
}

#[test]
fn bad_ids_full_contexts_and_missing_tensors_are_errors() {
    let mut image = image(&config(true));
    let network = Network::from_image(&image).unwrap();
    let mut cache = KvCache::new(&network, 1, 16);
    assert!(matches!(
        network.prefill(&mut cache, 0, &[97]),
        Err(Error::TokenId { id: 97, .. })
    ));
    assert!(matches!(
        network.prefill(&mut cache, 0, &ids(17)),
        Err(Error::ContextFull {
            wanted: 17,
            context: 16
        })
    ));
    network.prefill(&mut cache, 0, &ids(16)).unwrap();
    assert!(matches!(
        network.decode(&mut cache, &[1]),
        Err(Error::ContextFull { .. })
    ));
    image.tensors.remove("model.norm.weight");
    let error = Network::from_image(&image).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
}

/// Largest |Δ log p| between what the sampler logs (prefill, then cached decoding in a batch of `rows`) and what the trainer
/// recomputes over the whole sequences, on the committed base policy.
fn largest_difference(network: &Network, rows: usize) -> f32 {
    let vocab = network.config().vocab_size as u32;
    let sequences: Vec<Vec<u32>> = (0..rows as u32)
        .map(|row| {
            let n = 120 + 13 * row % 100;
            (0..n)
                .map(|i| (i * 2_654_435 + row * 7919) % 997 * 31 % vocab)
                .collect()
        })
        .collect();
    let logprob = |logits: &[f32], id: u32| {
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
        (f64::from(logits[id as usize] - max) - sum.ln()) as f32
    };
    let mut cache = KvCache::new(network, rows, 256);
    let mut next: Vec<Vec<f32>> = sequences
        .iter()
        .enumerate()
        .map(|(slot, ids)| network.prefill(&mut cache, slot, &ids[..ids.len() - 10]).unwrap())
        .collect();
    let mut logged = vec![Vec::new(); rows];
    for step in 0..10 {
        let tokens: Vec<u32> = sequences.iter().map(|s| s[s.len() - 10 + step]).collect();
        for row in 0..rows {
            logged[row].push(logprob(&next[row], tokens[row]));
        }
        next = network.decode(&mut cache, &tokens).unwrap();
    }
    let longest = sequences.iter().map(Vec::len).max().unwrap();
    let padded: Vec<i64> = sequences
        .iter()
        .flat_map(|s| {
            let ids = s.iter().map(|&id| i64::from(id));
            ids.chain(std::iter::repeat_n(0, longest - s.len())).collect::<Vec<_>>()
        })
        .collect();
    let _no_grad = tch::no_grad_guard();
    let ids = Tensor::from_slice(&padded).view([rows as i64, longest as i64]);
    let t = longest as i64 - 1;
    let recomputed = Network::token_logprobs(&network.logits(&ids.narrow(1, 0, t)), &ids.narrow(1, 1, t), 1.0);
    let mut worst = 0f32;
    for (row, sequence) in sequences.iter().enumerate() {
        for (step, logged) in logged[row].iter().enumerate() {
            let at = (sequence.len() - 11 + step) as i64;
            let again = recomputed.get(row as i64).get(at).double_value(&[]) as f32;
            worst = worst.max((logged - again).abs());
        }
    }
    worst
}

#[test]
fn on_the_real_base_sampler_and_trainer_agree_to_the_rounding_of_f32() {
    set_threads(1);
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo-base");
    let network = Network::from_image(&Image::read_dir(&dir).unwrap()).unwrap();
    for rows in [1, 2, 3, 5, 8] {
        let worst = largest_difference(&network, rows);
        println!("batch of {rows}: largest difference {worst:e}");
        assert!(worst <= 2e-5, "batch of {rows}: {worst:e}");
    }
}
