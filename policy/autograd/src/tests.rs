use super::*;
use artifact::checkpoint::Checkpoint;
use model::config::Family;
use model::exact::{self, ExactModel};
use model::random_checkpoint;

#[path = "../../model/src/golden.rs"]
mod golden;
mod gradient;

fn config(qk_norm: bool) -> ModelConfig {
    ModelConfig {
        family: if qk_norm { Family::Qwen3 } else { Family::Llama },
        vocab_size: 97,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 64,
        tie_word_embeddings: qk_norm,
        qk_norm,
        ..ModelConfig::default()
    }
}

/// Random weights large enough that the logits are far from uniform.
fn checkpoint(config: &ModelConfig) -> Checkpoint {
    let checkpoint = random_checkpoint(config, 3);
    let train_model = TrainModel::from_checkpoint(&checkpoint).unwrap();
    let scaled: Parameters = train_model
        .parameters()
        .iter()
        .map(|(n, t)| (n.clone(), if t.dim() == 2 { t * 8.0 } else { t.copy() }))
        .collect();
    checkpoint_from_f32(&checkpoint, &scaled).unwrap()
}

fn ids(n: usize, vocabulary: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % vocabulary).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(&tensor.detach().flatten(0, -1)).unwrap()
}

fn close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() < tolerance, "{x} against {y}");
    }
}

fn learning(checkpoint: &Checkpoint) -> TrainModel {
    let fresh = TrainModel::from_checkpoint(checkpoint).unwrap();
    TrainModel::from_parameters(fresh.config().clone(), require_grad(fresh.parameters())).unwrap()
}

fn gradients(train_model: &TrainModel) -> BTreeMap<String, Vec<f32>> {
    let with = train_model.parameters().iter().filter(|(_, p)| p.grad().defined());
    with.map(|(name, p)| (name.clone(), values(&p.grad()))).collect()
}

#[test]
fn both_backends_agree_up_to_the_rounding_of_f32() {
    for folder in golden::folders() {
        let checkpoint = golden::checkpoint(&folder);
        let (model, train_model) = (
            ExactModel::from_checkpoint(&checkpoint).unwrap(),
            TrainModel::from_checkpoint(&checkpoint).unwrap(),
        );
        let ids = ids(40, 96);
        let rows: Vec<usize> = (0..40).collect();
        let exact = model.score(&[&ids], &rows, None).unwrap().logits;
        let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let computed = train_model.logits(&Tensor::from_slice(&wide).unsqueeze(0));
        close(&values(&computed), exact.values(), 1e-4);
    }
}

#[test]
fn gradients_layer_by_layer_equal_those_of_one_graph() {
    for folder in golden::folders() {
        let checkpoint = golden::checkpoint(&folder);
        // Two sequences of different lengths, and a few of their rows, including the last.
        let (a, b) = (ids(20, 96), ids(27, 89));
        let logit_rows = [3usize, 19, 20, 31, 46];
        let loss = |logits: &Tensor| {
            let weights: Vec<f32> = (0..logits.numel()).map(|i| (i as f32 * 0.7).sin()).collect();
            (logits * Tensor::from_slice(&weights).view_as(logits)).sum(Kind::Float)
        };
        let pass = ExactModel::from_checkpoint(&checkpoint)
            .unwrap()
            .score_for_gradient(&[&a, &b], &logit_rows, None, 0)
            .unwrap();
        let stepwise = learning(&checkpoint);
        let logits = leaf(&pass.logits);
        loss(&logits).backward();
        stepwise.backward(&pass, &logits.grad());

        let one_graph = learning(&checkpoint);
        let rows = |ids: &[u32]| {
            let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
            one_graph.logits(&Tensor::from_slice(&wide).unsqueeze(0)).squeeze_dim(0)
        };
        let all = Tensor::cat(&[rows(&a), rows(&b)], 0);
        let logit_rows: Vec<i64> = logit_rows.iter().map(|&row| row as i64).collect();
        loss(&all.index_select(0, &Tensor::from_slice(&logit_rows))).backward();

        let (stepwise, one_graph) = (gradients(&stepwise), gradients(&one_graph));
        let zero = |values: &[f32]| values.iter().all(|v| *v == 0.0);
        for (name, expected) in &one_graph {
            match stepwise.get(name) {
                Some(got) => {
                    let scale = expected.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
                    close(got, expected, 2e-4 * scale);
                }
                None => assert!(zero(expected), "{folder}: {name} has no gradient"),
            }
        }
        // DeepSeek's choice bias has no gradient. Every parameter that was used has one.
        assert!(stepwise.keys().all(|name| !name.ends_with("e_score_correction_bias")));
        let moved = stepwise.values().filter(|values| !zero(values)).count();
        assert!(
            moved * 10 > one_graph.len() * 7,
            "{folder}: {moved} of {}",
            one_graph.len()
        );
    }
}

#[test]
fn a_router_gets_a_gradient_through_the_weights_of_the_recorded_experts() {
    let checkpoint = golden::checkpoint("qwen3_moe");
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    let ids = ids(24, 96);
    let rows: Vec<usize> = (0..24).collect();
    let mut other = model.score_for_gradient(&[&ids], &rows, None, 0).unwrap();
    let chosen = other.routing.of_layer(0).unwrap().to_vec();
    // The same pass with other recorded experts: the gradient follows the recording.
    let run = |pass: &model::exact::Pass| {
        let train_model = learning(&checkpoint);
        train_model.backward(pass, &tensor(&pass.logits).sin());
        gradients(&train_model)["model.layers.0.mlp.gate.weight"].clone()
    };
    let recorded = run(&other);
    assert!(recorded.iter().any(|g| *g != 0.0));
    let mut routing = model::router::Routing::default();
    for (layer, experts) in other.routing.layers() {
        let moved = experts
            .chunks(2)
            .flat_map(|pair| if pair == [0, 1] { [2, 3] } else { [0, 1] });
        routing.record(*layer, if *layer == 0 { moved.collect() } else { experts.clone() });
    }
    assert_ne!(routing.of_layer(0).unwrap(), chosen);
    other.routing = routing;
    assert_ne!(run(&other), recorded);
}

#[test]
fn routers_are_computed_in_f32_when_other_products_are_in_bf16() {
    let mut checkpoint = golden::checkpoint("qwen3_moe");
    let mut json: serde_json::Value = serde_json::from_slice(&checkpoint.files["config.json"]).unwrap();
    json["num_experts_per_tok"] = 1.into();
    checkpoint.files.insert("config.json".into(), json.to_string().into());
    for (name, tensor) in &mut checkpoint.tensors {
        if name.ends_with("o_proj.weight") {
            // Without attention, both backends give the first router the same rows.
            tensor.bytes = vec![0; tensor.bytes.len()].into();
        }
        if model::transformer::is_router(name) {
            // Rows of four experts that differ by less than bf16 can tell. In bf16 their logits are
            // equal and the first of them wins; in f32 the first or the last one wins.
            let values = model::exact::to_f32(name, tensor).unwrap();
            let width = tensor.shape[1];
            let row = |expert: usize| {
                let (first, step) = (expert / 4 * 4, 1.0 + (expert % 4) as f32 / 2048.0);
                values[first * width..][..width].iter().map(move |value| value * step)
            };
            let bytes: Vec<u8> = (0..tensor.shape[0]).flat_map(row).flat_map(f32::to_le_bytes).collect();
            *tensor = artifact::tensor::TensorData::new(safetensors::Dtype::F32, tensor.shape.clone(), bytes).unwrap();
        }
    }
    let arithmetic = model::exact::Arithmetic::new(Compute::Bf16, 1).unwrap();
    let model = ExactModel::with_arithmetic(&checkpoint, &arithmetic).unwrap();
    let train_model = TrainModel::from_checkpoint(&checkpoint)
        .unwrap()
        .with_compute(Compute::Bf16);
    let ids = ids(40, 96);
    let rows: Vec<usize> = (0..40).collect();
    let exact = model.score(&[&ids], &rows, None).unwrap();
    let last_wins = exact
        .routing
        .of_layer(0)
        .unwrap()
        .iter()
        .filter(|&expert| expert % 4 == 3);
    assert!(last_wins.count() >= 10, "f32 tells the experts apart");
    let wide: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
    let computed = values(&train_model.logits(&Tensor::from_slice(&wide).unsqueeze(0)));
    let width = exact.logits.width();
    let apart = |row: usize| {
        let pairs = exact.logits.row(row).iter().zip(&computed[row * width..][..width]);
        pairs.map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap()
    };
    // The two kinds of rounding to bf16 may move a row across a tie in a later layer.
    let close = (0..40).filter(|&row| apart(row) < 0.1).count();
    assert!(
        close >= 36,
        "{close} of 40 rows are close: {:?}",
        rows.iter().map(|&row| apart(row)).collect::<Vec<_>>()
    );
}

#[test]
fn training_needs_no_memory_for_positions_that_no_sequence_reaches() {
    let mut checkpoint = golden::checkpoint("llama");
    let mut json: serde_json::Value = serde_json::from_slice(&checkpoint.files["config.json"]).unwrap();
    json["max_position_embeddings"] = (1i64 << 40).into();
    checkpoint.files.insert("config.json".into(), json.to_string().into());
    let wide: Vec<i64> = ids(20, 96).iter().map(|&id| i64::from(id)).collect();
    let logits = |checkpoint: &Checkpoint| {
        let train_model = TrainModel::from_checkpoint(checkpoint).unwrap();
        values(&train_model.logits(&Tensor::from_slice(&wide).unsqueeze(0)))
    };
    assert_eq!(logits(&checkpoint), logits(&golden::checkpoint("llama")));
}

#[test]
fn later_tokens_never_change_a_position() {
    let train_model = TrainModel::from_checkpoint(&checkpoint(&config(true))).unwrap();
    let rows = |n: usize| {
        let wide: Vec<i64> = ids(n, 97).iter().map(|&i| i64::from(i)).collect();
        values(&train_model.logits(&Tensor::from_slice(&wide).unsqueeze(0)))
    };
    let (short, long) = (rows(12), rows(40));
    close(&short, &long[..short.len()], 2e-4);
}

#[test]
fn a_checkpoint_survives_a_round_trip_through_f32_bit_for_bit() {
    let checkpoint = checkpoint(&config(true));
    let train_model = TrainModel::from_checkpoint(&checkpoint).unwrap();
    let back = checkpoint_from_f32(&checkpoint, train_model.parameters()).unwrap();
    assert_eq!(checkpoint.tensors, back.tensors);
}

#[test]
fn a_tied_head_is_saved_like_its_embedding_under_every_name_that_the_checkpoint_has() {
    let checkpoint = checkpoint(&config(true));
    let embedding = checkpoint.tensors[exact::EMBEDDING].clone();
    let mut copied = checkpoint.clone();
    copied.tensors.insert(exact::HEAD.into(), embedding.clone());
    let mut head_alone = copied.clone();
    head_alone.tensors.remove(exact::EMBEDDING);
    for given in [&copied, &head_alone] {
        let train_model = TrainModel::from_checkpoint(given).unwrap();
        assert_eq!(
            &checkpoint_from_f32(given, train_model.parameters()).unwrap().tensors,
            &given.tensors
        );
        let doubled = train_model
            .parameters()
            .iter()
            .map(|(n, t)| (n.clone(), t * 2.0))
            .collect();
        let doubled = checkpoint_from_f32(given, &doubled).unwrap();
        TrainModel::from_checkpoint(&doubled).unwrap();
        assert_ne!(doubled.tensors[exact::HEAD], embedding);
    }
    // A head of its own would silently be another model.
    let mut differing = checkpoint.clone();
    let other = checkpoint_from_f32(
        &copied,
        &require_grad(TrainModel::from_checkpoint(&checkpoint).unwrap().parameters())
            .iter()
            .map(|(n, t)| (n.clone(), t * 2.0))
            .collect(),
    )
    .unwrap();
    differing
        .tensors
        .insert(exact::HEAD.into(), other.tensors[exact::HEAD].clone());
    let refused = TrainModel::from_checkpoint(&differing).err().unwrap().to_string();
    assert!(
        refused.contains("lm_head.weight") && refused.contains("tie_word_embeddings"),
        "{refused}"
    );
    assert!(ExactModel::from_checkpoint(&differing).is_err());
}

#[test]
fn gradients_reach_every_parameter() {
    let train_model = learning(&checkpoint(&config(true)));
    let wide: Vec<i64> = ids(16, 97).iter().map(|&i| i64::from(i)).collect();
    let x = Tensor::from_slice(&wide).unsqueeze(0);
    let logits = train_model.logits(&x.narrow(1, 0, 15));
    TrainModel::token_logprobs(&logits, &x.narrow(1, 1, 15), 1.0)
        .sum(Kind::Float)
        .backward();
    for (name, tensor) in train_model.parameters() {
        let norm = tensor.grad().norm().double_value(&[]);
        assert!(norm > 0.0 && norm.is_finite(), "{name}: gradient norm {norm}");
    }
}

#[test]
fn missing_parameters_are_refused_by_name() {
    let mut checkpoint = checkpoint(&config(true));
    checkpoint.tensors.remove("model.norm.weight");
    let error = TrainModel::from_checkpoint(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
    let fresh = random_checkpoint(&config(false), 1);
    let parameters = TrainModel::from_checkpoint(&fresh)
        .unwrap()
        .parameters()
        .iter()
        .map(|(n, t)| (n.clone(), t.copy()))
        .collect();
    let error = TrainModel::from_parameters(config(true), parameters)
        .unwrap_err()
        .to_string();
    assert!(error.contains("self_attn.q_norm"), "{error}");
}
