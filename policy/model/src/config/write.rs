//! Into a `config.json` that `transformers` loads, for models that begin here. A model that was read keeps its own file.

use super::rope::Scaling;
use super::{Family, ModelConfig, Scoring};
use serde_json::{Map, Value, json};

impl ModelConfig {
    /// The `config.json` that `transformers` loads.
    pub fn to_json(&self) -> String {
        let (model_type, architecture) = match self.family {
            Family::Llama => ("llama", "LlamaForCausalLM"),
            Family::Mistral => ("mistral", "MistralForCausalLM"),
            Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
            Family::Qwen3Moe => ("qwen3_moe", "Qwen3MoeForCausalLM"),
            Family::DeepseekV3 => ("deepseek_v3", "DeepseekV3ForCausalLM"),
        };
        let mut json = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "attention_bias": self.output_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "vocab_size": self.vocab_size,
        });
        let more = [Some(self.rope_scaling()), self.attention(), self.routing()];
        if let Value::Object(json) = &mut json {
            json.extend(more.into_iter().flatten().flatten());
        }
        format!("{json:#}\n")
    }

    fn rope_scaling(&self) -> Map<String, Value> {
        let scaling = match &self.rope.scaling {
            Scaling::None => return Map::new(),
            Scaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": *original_context as i64,
            }),
            Scaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context,
                truncate,
                attention_factor,
                score_stretch,
            } => {
                // the square of 0.1 · mscale_all_dim · ln(factor) + 1
                let all_dim = (score_stretch.sqrt() - 1.0) / (0.1 * factor.ln());
                json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "beta_fast": beta_fast,
                    "beta_slow": beta_slow,
                    "original_max_position_embeddings": *original_context as i64,
                    "truncate": truncate,
                    "attention_factor": attention_factor,
                    "mscale_all_dim": if *score_stretch == 1.0 { 0.0 } else { all_dim },
                })
            }
        };
        Map::from_iter([("rope_scaling".to_string(), scaling)])
    }

    fn attention(&self) -> Option<Map<String, Value>> {
        let mut json = Map::new();
        let mut put = |field: &str, value: Value| json.insert(field.into(), value);
        if let Some(latent) = &self.latent {
            put("q_lora_rank", json!(latent.q_rank));
            put("kv_lora_rank", json!(latent.kv_rank));
            put("qk_nope_head_dim", json!(latent.nope));
            put("qk_rope_head_dim", json!(latent.rope));
            put("v_head_dim", json!(latent.value));
            put("rope_interleave", json!(self.rope.interleaved));
        } else {
            put("head_dim", json!(self.head_dim));
        }
        if self.family == Family::Llama {
            put("mlp_bias", json!(self.mlp_bias));
        }
        if let Some(window) = self.windows.iter().flatten().next() {
            let kinds = self.windows.iter().map(|window| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            });
            put("layer_types", kinds.collect());
            put("sliding_window", json!(window));
            put("use_sliding_window", json!(true));
        } else {
            put("sliding_window", Value::Null);
        }
        Some(json)
    }

    fn routing(&self) -> Option<Map<String, Value>> {
        let experts = self.experts.as_ref()?;
        let mut json = Map::new();
        let mut put = |field: &str, value: Value| json.insert(field.into(), value);
        put("num_experts_per_tok", json!(experts.per_token));
        put("moe_intermediate_size", json!(experts.intermediate_size));
        put("norm_topk_prob", json!(experts.normalise));
        match experts.scoring {
            Scoring::Softmax => {
                let dense = experts.layers.iter().enumerate().filter(|(_, has)| !**has);
                put("num_experts", json!(experts.count));
                put("decoder_sparse_step", json!(1));
                put("mlp_only_layers", dense.map(|(layer, _)| layer).collect());
            }
            Scoring::Sigmoid {
                groups,
                groups_kept,
                scale,
            } => {
                let dense = experts.layers.iter().take_while(|has| !**has).count();
                put("n_routed_experts", json!(experts.count));
                put("n_shared_experts", json!(experts.shared));
                put("n_group", json!(groups));
                put("topk_group", json!(groups_kept));
                put("routed_scaling_factor", json!(scale));
                put("first_k_dense_replace", json!(dense));
                put("scoring_func", json!("sigmoid"));
                put("topk_method", json!("noaux_tc"));
            }
        }
        Some(json)
    }
}
