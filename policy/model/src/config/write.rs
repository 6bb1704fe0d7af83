//! Writes `config.json` for models created here. A model that was read keeps its own file.
//!
//! Every field that the reader looks at is written, so that no model depends on a default.

use super::family::Window;
use super::rope::Scaling;
use super::{ModelConfig, Scoring};
use serde_json::{Value, json};

impl ModelConfig {
    /// A `config.json` that `transformers` loads and [`ModelConfig::from_json`] reads back.
    pub fn to_json(&self) -> String {
        let conventions = self.family.conventions();
        let mut json = json!({
            "architectures": [conventions.class],
            "model_type": conventions.model_types[0],
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
        if let Some(scaling) = self.rope_scaling() {
            json["rope_scaling"] = scaling;
        }
        if let Some(latent) = &self.latent {
            json["q_lora_rank"] = json!(latent.q_rank);
            json["kv_lora_rank"] = json!(latent.kv_rank);
            json["qk_nope_head_dim"] = json!(latent.nope);
            json["qk_rope_head_dim"] = json!(latent.rope);
            json["v_head_dim"] = json!(latent.value);
            json["rope_interleave"] = json!(self.rope.interleaved);
        } else {
            json["head_dim"] = json!(self.head_dim);
        }
        if conventions.mlp_bias {
            json["mlp_bias"] = json!(self.mlp_bias);
        }
        let window = self.windows.iter().flatten().next();
        json["sliding_window"] = json!(window);
        if matches!(
            conventions.window,
            Window::EveryLayerIfEnabled | Window::UpperLayersIfEnabled
        ) {
            json["use_sliding_window"] = json!(window.is_some());
        }
        if window.is_some() {
            let kinds = self.windows.iter().map(|window| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            });
            json["layer_types"] = kinds.collect();
        }
        self.write_experts(&mut json);
        format!("{json:#}\n")
    }

    fn rope_scaling(&self) -> Option<Value> {
        Some(match &self.rope.scaling {
            Scaling::None => return None,
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
                score_scale,
            } => {
                // score_scale is the square of 0.1 · mscale_all_dim · ln(factor) + 1
                let all_dim = (score_scale.sqrt() - 1.0) / (0.1 * factor.ln());
                json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "beta_fast": beta_fast,
                    "beta_slow": beta_slow,
                    "original_max_position_embeddings": *original_context as i64,
                    "truncate": truncate,
                    "attention_factor": attention_factor,
                    "mscale_all_dim": if *score_scale == 1.0 { 0.0 } else { all_dim },
                })
            }
        })
    }

    fn write_experts(&self, json: &mut Value) {
        let Some(experts) = &self.experts else { return };
        json["num_experts_per_tok"] = json!(experts.per_token);
        json["moe_intermediate_size"] = json!(experts.intermediate_size);
        json["norm_topk_prob"] = json!(experts.normalize);
        match experts.scoring {
            Scoring::Softmax => {
                let dense = experts.layers.iter().enumerate().filter(|(_, has)| !**has);
                json["num_experts"] = json!(experts.count);
                json["decoder_sparse_step"] = json!(1);
                json["mlp_only_layers"] = dense.map(|(layer, _)| layer).collect();
            }
            Scoring::Sigmoid {
                groups,
                top_groups,
                scale,
            } => {
                let dense = experts.layers.iter().take_while(|has| !**has).count();
                json["n_routed_experts"] = json!(experts.count);
                json["n_shared_experts"] = json!(experts.shared);
                json["n_group"] = json!(groups);
                json["topk_group"] = json!(top_groups);
                json["routed_scaling_factor"] = json!(scale);
                json["first_k_dense_replace"] = json!(dense);
                json["scoring_func"] = json!("sigmoid");
                json["topk_method"] = json!("noaux_tc");
            }
        }
    }
}
