//! Reads `config.json` as `transformers` 4 and 5 write it.
//!
//! A missing field means the default of the configuration class in `transformers`. Null is a value
//! of its own: it is false for a flag, "no window" for `sliding_window`, and an error for a number
//! without a meaning for null. `tests/golden/defaults.json` has the defaults.

use super::family::{AttentionBias, ExpertFields, Window};
use super::field::{count_or, either, flag, int, int_or, nullable, refuse_unless};
use super::{Error, Experts, Family, Latent, ModelConfig, Rope, Scoring};
use serde_json::Value;

impl ModelConfig {
    /// Reads the bytes of a `config.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let json: Value = serde_json::from_slice(bytes)?;
        let family = Family::of(json["model_type"].as_str().ok_or(Error::Missing("model_type"))?)?;
        let conventions = family.conventions();
        refuse_unless(&json, "hidden_act", "silu", |v| v == "silu")?;
        let latent = conventions.latent.then(|| latent(&json)).transpose()?;
        let hidden_size = int(&json, "hidden_size")?;
        let num_hidden_layers = int(&json, "num_hidden_layers")?;
        let num_attention_heads = int(&json, "num_attention_heads")?;
        let configured = flag(&json, "attention_bias", false)?;
        let (qkv_bias, output_bias) = match conventions.attention_bias {
            AttentionBias::Configured => (configured, configured),
            AttentionBias::QueryKeyValue => (true, false),
            AttentionBias::Never => (false, false),
        };
        let max_position_embeddings = int(&json, "max_position_embeddings")?;
        let absent = conventions.absent;
        let config = ModelConfig {
            family,
            vocab_size: int(&json, "vocab_size")?,
            hidden_size,
            intermediate_size: int(&json, "intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: nullable(&json, "num_key_value_heads", absent.key_value_heads)?
                .unwrap_or(num_attention_heads),
            head_dim: match &latent {
                Some(latent) => latent.nope + latent.rope,
                None => nullable(&json, "head_dim", absent.head_dim)?.unwrap_or(hidden_size / num_attention_heads),
            },
            rms_norm_eps: json["rms_norm_eps"].as_f64().ok_or(Error::Missing("rms_norm_eps"))?,
            rope: Rope::from_json(&json, conventions.interleaved_rope, max_position_embeddings)?,
            max_position_embeddings,
            tie_word_embeddings: flag(&json, "tie_word_embeddings", false)?,
            qk_norm: conventions.qk_norm,
            qkv_bias,
            output_bias,
            mlp_bias: conventions.mlp_bias && flag(&json, "mlp_bias", false)?,
            windows: windows(&json, &conventions.window, num_hidden_layers)?,
            experts: match conventions.experts {
                Some(ExpertFields::Qwen3) => Some(qwen3_experts(&json, num_hidden_layers)?),
                Some(ExpertFields::Deepseek) => Some(deepseek_experts(&json, num_hidden_layers)?),
                None => None,
            },
            latent,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |why: String| Err(Error::Contradiction(why));
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            return refuse(format!(
                "`num_attention_heads` {} is not a multiple of `num_key_value_heads` {}",
                self.num_attention_heads, self.num_key_value_heads
            ));
        }
        if self.rotary_dim() < 2 || self.rotary_dim() % 2 != 0 {
            let field = self.latent.as_ref().map_or("head_dim", |_| "qk_rope_head_dim");
            let width = self.rotary_dim();
            return refuse(format!("`{field}` {width} is 0 or odd; rotary positions need pairs"));
        }
        let Some(experts) = &self.experts else { return Ok(()) };
        if experts.per_token > experts.count {
            return refuse(format!(
                "`num_experts_per_tok` {} exceeds the number of experts, {}",
                experts.per_token, experts.count
            ));
        }
        if let Scoring::Sigmoid { groups, top_groups, .. } = experts.scoring {
            if experts.count % groups != 0 || top_groups > groups {
                return refuse(format!(
                    "`n_group` {groups} must divide `n_routed_experts` {} and be at least `topk_group` {top_groups}",
                    experts.count
                ));
            }
            if experts.count / groups * top_groups < experts.per_token {
                return refuse(format!(
                    "`topk_group` {top_groups} groups hold fewer experts than `num_experts_per_tok` {}",
                    experts.per_token
                ));
            }
        }
        Ok(())
    }
}

fn latent(json: &Value) -> Result<Latent, Error> {
    Ok(Latent {
        q_rank: nullable(json, "q_lora_rank", Some(1536))?,
        kv_rank: int(json, "kv_lora_rank")?,
        nope: int(json, "qk_nope_head_dim")?,
        rope: int(json, "qk_rope_head_dim")?,
        value: int(json, "v_head_dim")?,
    })
}

/// The window of each layer, from `layer_types` or the family's convention. Empty: no layer has
/// one.
fn windows(json: &Value, convention: &Window, layers: i64) -> Result<Vec<Option<i64>>, Error> {
    let used = match convention {
        Window::EveryLayer => true,
        Window::EveryLayerIfEnabled | Window::UpperLayersIfEnabled => flag(json, "use_sliding_window", false)?,
        Window::Refused => {
            refuse_unless(json, "sliding_window", "null", Value::is_null)?;
            false
        }
    };
    let window = match used {
        true => nullable(json, "sliding_window", Some(4096))?,
        false => None,
    };
    let Some(window) = window else {
        return Ok(Vec::new());
    };
    // Qwen3-MoE has no `layer_types`.
    let by_layer = !matches!(convention, Window::EveryLayerIfEnabled);
    if let Some(types) = json["layer_types"].as_array().filter(|_| by_layer) {
        if types.len() as i64 != layers {
            let why = format!(
                "`layer_types` names {} layers, `num_hidden_layers` {layers}",
                types.len()
            );
            return Err(Error::Contradiction(why));
        }
        let one = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(Some(window)),
            _ => Err(Error::Unsupported {
                field: "layer_types",
                value: kind.to_string(),
                supported: "full_attention, sliding_attention".into(),
            }),
        };
        return types.iter().map(one).collect();
    }
    let first = match convention {
        Window::UpperLayersIfEnabled => count_or(json, "max_window_layers", 28)?,
        _ => 0,
    };
    Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect())
}

fn qwen3_experts(json: &Value, layers: i64) -> Result<Experts, Error> {
    let step = int_or(json, "decoder_sparse_step", 1)?;
    let dense: Vec<i64> = match &json["mlp_only_layers"] {
        Value::Null => Vec::new(),
        layers => {
            let layers = layers.as_array().ok_or(Error::Missing("mlp_only_layers"))?;
            let one = |layer: &Value| layer.as_i64().ok_or(Error::Missing("mlp_only_layers"));
            layers.iter().map(one).collect::<Result<_, _>>()?
        }
    };
    Ok(Experts {
        count: either(json, "num_experts", "num_local_experts")?,
        per_token: int(json, "num_experts_per_tok")?,
        intermediate_size: int(json, "moe_intermediate_size")?,
        normalize: flag(json, "norm_topk_prob", false)?,
        shared: 0,
        scoring: Scoring::Softmax,
        layers: (0..layers)
            .map(|layer| !dense.contains(&layer) && (layer + 1) % step == 0)
            .collect(),
    })
}

fn deepseek_experts(json: &Value, layers: i64) -> Result<Experts, Error> {
    refuse_unless(json, "scoring_func", "sigmoid", |v| v == "sigmoid")?;
    refuse_unless(json, "topk_method", "noaux_tc", |v| v == "noaux_tc")?;
    refuse_unless(json, "moe_layer_freq", "1", |v| v == 1)?;
    let dense = count_or(json, "first_k_dense_replace", 3)?;
    Ok(Experts {
        count: either(json, "n_routed_experts", "num_local_experts")?,
        per_token: int(json, "num_experts_per_tok")?,
        intermediate_size: int(json, "moe_intermediate_size")?,
        normalize: flag(json, "norm_topk_prob", true)?,
        // DeepSeek's own code takes null for none.
        shared: match json.get("n_shared_experts") {
            Some(Value::Null) => 0,
            _ => count_or(json, "n_shared_experts", 1)?,
        },
        scoring: Scoring::Sigmoid {
            groups: int_or(json, "n_group", 8)?,
            top_groups: int_or(json, "topk_group", 4)?,
            scale: match json.get("routed_scaling_factor") {
                None => 2.5,
                Some(scale) => scale.as_f64().ok_or(Error::Missing("routed_scaling_factor"))?,
            },
        },
        layers: (0..layers).map(|layer| layer >= dense).collect(),
    })
}
