use super::rope::Scaling;
use super::*;
use crate::golden;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

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

fn parsed(json: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::from_json(json.to_string().as_bytes())
}

/// The defaults of the configuration classes of `transformers`, by `model_type` and field.
fn defaults() -> BTreeMap<String, Map<String, Value>> {
    let bytes = std::fs::read(golden::path("defaults.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

/// A `config.json` that has every field, with the default of `transformers`.
fn complete(model_type: &str) -> Value {
    let mut json = Value::Object(defaults()[model_type].clone());
    json["model_type"] = json!(model_type);
    json
}

fn without(json: &Value, field: &str) -> Value {
    let mut json = json.clone();
    json.as_object_mut().unwrap().remove(field);
    json
}

#[test]
fn a_missing_field_means_what_transformers_takes_or_is_refused_by_name() {
    let mut refused = BTreeSet::new();
    for (model_type, fields) in defaults() {
        let mut json = complete(&model_type);
        // Twice the default, so that no default equals a value that is computed from others.
        json["num_attention_heads"] = json!(2 * fields["num_attention_heads"].as_i64().unwrap());
        for window in [false, true] {
            if fields.contains_key("use_sliding_window") {
                json["use_sliding_window"] = json!(window);
            }
            let config = parsed(&json).unwrap();
            for field in fields.keys().filter(|&field| json[field] == fields[field]) {
                match parsed(&without(&json, field)) {
                    Ok(defaulted) => assert_eq!(defaulted, config, "{model_type} without {field}"),
                    Err(Error::Missing(named)) => {
                        assert_eq!(named, field, "{model_type}");
                        refused.insert(named);
                    }
                    Err(error) => panic!("{model_type} without {field}: {error}"),
                }
            }
        }
    }
    // Every published config.json has these.
    let sizes = "hidden_size intermediate_size kv_lora_rank max_position_embeddings moe_intermediate_size n_routed_experts \
                 num_experts num_experts_per_tok num_hidden_layers qk_nope_head_dim qk_rope_head_dim rms_norm_eps v_head_dim \
                 vocab_size";
    assert_eq!(refused, sizes.split(' ').collect::<BTreeSet<_>>());
}

#[test]
fn deepseek_and_mistral_have_the_defaults_of_transformers() {
    let mut deepseek = complete("deepseek_v3");
    for field in ["n_group", "topk_group", "routed_scaling_factor", "n_shared_experts"] {
        deepseek = without(&deepseek, field);
    }
    let experts = parsed(&deepseek).unwrap().experts.unwrap();
    let (groups, top_groups, scale) = (8, 4, 2.5);
    assert_eq!(
        experts.scoring,
        Scoring::Sigmoid {
            groups,
            top_groups,
            scale
        }
    );
    assert_eq!(experts.shared, 1);
    let mistral = parsed(&without(&complete("mistral"), "sliding_window")).unwrap();
    assert_eq!(mistral.windows, vec![Some(4096); 32]);
}

#[test]
fn every_layer_has_a_window_where_the_first_windowed_layer_is_0() {
    let mut json = complete("qwen2");
    json["use_sliding_window"] = json!(true);
    json["max_window_layers"] = json!(0);
    json["layer_types"] = Value::Null;
    let config = parsed(&json).unwrap();
    assert_eq!(config.windows.len() as i64, config.num_hidden_layers);
    assert!(config.windows.iter().all(Option::is_some));
}

#[test]
fn null_is_a_value_and_not_a_missing_field() {
    let with_null = |model_type: &str, field: &str| {
        let mut json = complete(model_type);
        json[field] = Value::Null;
        parsed(&json)
    };
    assert!(with_null("mistral", "sliding_window").unwrap().windows.is_empty());
    let latent = with_null("deepseek_v3", "q_lora_rank").unwrap().latent.unwrap();
    assert_eq!(latent.q_rank, None);
    assert!(!with_null("deepseek_v3", "rope_interleave").unwrap().rope.interleaved);
    let experts = with_null("deepseek_v3", "norm_topk_prob").unwrap().experts.unwrap();
    assert!(!experts.normalize);
    assert_eq!(
        with_null("mistral", "num_key_value_heads").unwrap().num_key_value_heads,
        32
    );
    for field in [
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
    ] {
        let error = with_null("deepseek_v3", field).unwrap_err().to_string();
        assert!(error.contains(field), "{field}: {error}");
    }
}

#[test]
fn every_field_that_is_read_is_written() {
    for (model_type, fields) in defaults() {
        let json = complete(&model_type);
        let config = parsed(&json).unwrap();
        let written: Value = serde_json::from_str(&config.to_json()).unwrap();
        for (field, default) in &fields {
            let mut changed = json.clone();
            changed[field] = match default {
                Value::Bool(flag) => json!(!flag),
                Value::Number(number) => json!(number.as_f64().unwrap() as i64 + 1),
                Value::Null => json!(2),
                _ => json!("another"),
            };
            let other = parsed(&changed).ok();
            if let Some(other) = &other {
                let again: Value = serde_json::from_str(&other.to_json()).unwrap();
                assert_eq!(parsed(&again).unwrap(), *other, "{model_type}: {field}");
            }
            let read = other != Some(config.clone());
            let named = match field.as_str() {
                "rope_parameters" => "rope_theta",
                field => field,
            };
            assert!(
                !read || written.get(named).is_some(),
                "{model_type}: {field} is not written"
            );
        }
    }
}

#[test]
fn a_config_with_other_values_than_the_defaults_keeps_its_meaning() {
    let earlier = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": false,
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
        "intermediate_size": 64, "max_position_embeddings": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 96, "q_lora_rank": null, "kv_lora_rank": 16,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "rope_interleave": true,
        "sliding_window": null, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
        "n_routed_experts": 6, "n_shared_experts": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    });
    let config = parsed(&earlier).unwrap();
    let experts = config.experts.as_ref().unwrap();
    let (groups, top_groups, scale) = (1, 1, 1.0);
    assert_eq!(
        experts.scoring,
        Scoring::Sigmoid {
            groups,
            top_groups,
            scale
        }
    );
    assert_eq!(
        (experts.shared, experts.layers.as_slice()),
        (0, [true, true].as_slice())
    );
    assert_eq!(config.latent.as_ref().unwrap().q_rank, None);
    let again: Value = serde_json::from_str(&config.to_json()).unwrap();
    assert_eq!(again, earlier);

    let mistral = ModelConfig {
        family: Family::Mistral,
        qk_norm: false,
        ..tiny()
    };
    let written: Value = serde_json::from_str(&mistral.to_json()).unwrap();
    assert_eq!(written.get("sliding_window"), Some(&Value::Null));
    assert_eq!(parsed(&written).unwrap(), mistral);
}

#[test]
fn a_stretched_context_is_as_long_as_vllm_takes_it() {
    for (positions, scaling, expected) in [
        (
            32768,
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
            131_072,
        ),
        (32768, json!({"type": "yarn", "factor": 4.0}), 131_072),
        (
            40960,
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
            131_072,
        ),
        (
            163_840,
            json!({"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}),
            163_840,
        ),
        (4096, json!({"rope_type": "linear", "factor": 4.0}), 16_384),
        (
            131_072,
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}),
            131_072,
        ),
        (32768, Value::Null, 32768),
    ] {
        let mut json = complete("qwen3");
        json["max_position_embeddings"] = positions.into();
        json["rope_scaling"] = scaling;
        let config = parsed(&json).unwrap();
        assert_eq!(config.context(), expected, "{json}");
        let back = ModelConfig::from_json(config.to_json().as_bytes()).unwrap();
        assert_eq!(back.context(), expected, "{json}");
        json["model_type"] = "other".into();
        assert_eq!(super::declared_context(&json), Some(expected));
    }
    let unknown = json!({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "longrope"}});
    assert_eq!(super::declared_context(&unknown), Some(100));
}

#[test]
fn rotary_settings_mean_what_transformers_takes() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut json = complete("qwen3");
        change(&mut json);
        parsed(&json)
    };
    assert_eq!(with(&|_| ()).unwrap().rope.theta, 10_000.0);
    let yarn = |json: Value| match with(&|config| config["rope_scaling"] = json.clone())
        .unwrap()
        .rope
        .scaling
    {
        Scaling::Yarn {
            original_context,
            truncate,
            ..
        } => (original_context, truncate),
        other => panic!("{other:?}"),
    };
    let full = json!({"rope_type": "yarn", "factor": 4.0});
    assert_eq!(yarn(full), (32768.0, true));
    let null = json!({"rope_type": "yarn", "factor": 4.0, "truncate": null, "original_max_position_embeddings": 64});
    assert_eq!(yarn(null), (64.0, false));
    let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
    let both = with(&|json| {
        json["rope_parameters"] = linear(2.0);
        json["rope_scaling"] = linear(4.0);
    });
    assert_eq!(both.unwrap().rope.scaling, Scaling::Linear { factor: 4.0 });
    let by_layer = with(&|json| json["rope_parameters"] = json!({"full_attention": linear(2.0)}));
    assert!(by_layer.unwrap_err().to_string().contains("rope_parameters"));
}

#[test]
fn each_layer_has_the_window_that_its_config_gives_it() {
    assert_eq!(read("mistral", "config.json").windows, [Some(12), Some(12)]);
    assert!(read("mistral", "config.full.json").windows.is_empty());
    let mut moe = complete("qwen3_moe");
    moe["use_sliding_window"] = json!(true);
    // transformers has no `layer_types` for this family.
    moe["layer_types"] = json!(vec!["full_attention"; 24]);
    assert_eq!(parsed(&moe).unwrap().windows, vec![Some(4096); 24]);
    let mixed = read("qwen2", "config.sliding.json");
    assert!(mixed.windows.iter().any(Option::is_some), "{:?}", mixed.windows);
}
