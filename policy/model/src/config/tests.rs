use super::rope::Scaling;
use super::*;
use crate::golden;
use serde_json::{Value, json};

fn tiny() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocab_size: 64,
        hidden_size: 16,
        intermediate_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 32,
        tie_word_embeddings: true,
        qk_norm: true,
        ..ModelConfig::default()
    }
}

fn bytes(folder: &str, file: &str) -> Vec<u8> {
    std::fs::read(golden::path(folder).join(file)).unwrap()
}

fn read(folder: &str, file: &str) -> ModelConfig {
    ModelConfig::from_json(&bytes(folder, file)).unwrap()
}

/// The error for another value of a field.
fn refused(folder: &str, field: &str, value: Value) -> String {
    let mut json: Value = serde_json::from_slice(&bytes(folder, "config.v4.json")).unwrap();
    json[field] = value;
    match ModelConfig::from_json(json.to_string().as_bytes()) {
        Ok(_) => panic!("{folder} with another {field} is accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn both_spellings_give_one_config_that_survives_a_round_trip() {
    for folder in golden::folders() {
        let config = read(&folder, "config.json");
        assert_eq!(read(&folder, "config.v4.json"), config, "{folder}");
        let mut back = ModelConfig::from_json(config.to_json().as_bytes()).unwrap();
        // The scale goes through a logarithm and back.
        if let (Scaling::Yarn { score_scale: a, .. }, Scaling::Yarn { score_scale: b, .. }) =
            (&mut back.rope.scaling, &config.rope.scaling)
        {
            assert!((*a - b).abs() < 1e-12);
            *a = *b;
        }
        assert_eq!(back, config, "{folder}");
    }
    assert_eq!(ModelConfig::from_json(tiny().to_json().as_bytes()).unwrap(), tiny());
}

#[test]
fn unsupported_fields_are_refused_by_name() {
    for (folder, field, value) in [
        ("llama", "hidden_act", json!("gelu")),
        ("llama", "model_type", json!("gpt2")),
        ("llama", "rope_scaling", json!({"rope_type": "longrope"})),
        ("llama", "rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})),
        ("llama", "rope_scaling", json!("yes")),
        ("llama", "partial_rotary_factor", json!(0.5)),
        ("llama", "sliding_window", json!(128)),
        ("llama", "hidden_size", json!(0)),
        ("llama", "tie_word_embeddings", json!("no")),
        ("deepseek_v3", "scoring_func", json!("softmax")),
        ("deepseek_v3", "topk_method", json!("greedy")),
        ("deepseek_v3", "moe_layer_freq", json!(2)),
        ("deepseek_v3", "q_lora_rank", json!("many")),
    ] {
        let error = refused(folder, field, value);
        let named = if field == "rope_scaling" { "rope" } else { field };
        assert!(error.contains(named), "{field}: {error}");
    }
}

#[test]
fn contradictions_are_refused() {
    for (folder, field, value, named) in [
        ("llama", "num_attention_heads", json!(3), "num_key_value_heads"),
        ("llama", "head_dim", json!(7), "head_dim"),
        ("qwen3_moe", "num_experts_per_tok", json!(99), "num_experts_per_tok"),
        ("deepseek_v3", "n_group", json!(3), "n_group"),
        ("deepseek_v3", "num_experts_per_tok", json!(5), "topk_group"),
        ("deepseek_v3", "qk_rope_head_dim", json!(7), "qk_rope_head_dim"),
    ] {
        let error = refused(folder, field, value);
        assert!(error.contains(named), "{field}: {error}");
    }
}

#[test]
fn each_layer_has_the_window_that_its_config_gives_it() {
    assert_eq!(read("mistral", "config.json").windows, [Some(12), Some(12)]);
    assert!(read("mistral", "config.full.json").windows.is_empty());
    let mixed = read("qwen2", "config.sliding.json");
    assert!(mixed.windows.iter().any(Option::is_some), "{:?}", mixed.windows);
}
