//! The network's shape, read from a Hugging Face `config.json`.
//!
//! Qwen3 and plain Llama are understood. A field that would change the mathematics and is not implemented is refused by
//! its name, so that a folder is never half-understood.

use serde_json::Value;

/// Why a `config.json` was refused. Each message names the field.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("config.json is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("config.json has no `{0}`, or it is not of the expected type")]
    Missing(&'static str),
    #[error("config.json: `{field}` is {value}, which is not supported; supported: {supported}")]
    Unsupported {
        field: &'static str,
        value: String,
        supported: &'static str,
    },
    #[error("config.json: {0}")]
    Contradiction(String),
}

/// Shape of a decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the SwiGLU.
    pub intermediate_size: i64,
    pub num_hidden_layers: i64,
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    pub head_dim: i64,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    /// Longest context, in tokens.
    pub max_position_embeddings: i64,
    /// The output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// RMSNorm over each head's query and key (Qwen3).
    pub qk_norm: bool,
}

impl ModelConfig {
    /// Reads the bytes of a `config.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let json: Value = serde_json::from_slice(bytes)?;
        let model_type = json["model_type"].as_str().ok_or(Error::Missing("model_type"))?;
        let qk_norm = match model_type {
            "qwen3" => true,
            "llama" => false,
            other => {
                return Err(Error::Unsupported {
                    field: "model_type",
                    value: other.into(),
                    supported: "qwen3, llama",
                });
            }
        };
        refuse_unless(&json, "hidden_act", "silu", |v| v == "silu")?;
        refuse_unless(&json, "attention_bias", "false", |v| v == false)?;
        refuse_unless(&json, "mlp_bias", "false", |v| v == false)?;
        refuse_unless(&json, "use_sliding_window", "false", |v| v == false)?;
        refuse_unless(&json, "rope_scaling", "null", Value::is_null)?;
        // transformers 5 moved rope_theta into rope_parameters
        let rope = &json["rope_parameters"];
        if let Some(kind) = rope["rope_type"].as_str()
            && kind != "default"
        {
            return Err(Error::Unsupported {
                field: "rope_parameters.rope_type",
                value: kind.into(),
                supported: "default",
            });
        }
        let hidden_size = int(&json, "hidden_size")?;
        let num_attention_heads = int(&json, "num_attention_heads")?;
        let config = ModelConfig {
            vocab_size: int(&json, "vocab_size")?,
            hidden_size,
            intermediate_size: int(&json, "intermediate_size")?,
            num_hidden_layers: int(&json, "num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: json["num_key_value_heads"].as_i64().unwrap_or(num_attention_heads),
            head_dim: json["head_dim"]
                .as_i64()
                .unwrap_or(hidden_size / num_attention_heads.max(1)),
            rms_norm_eps: json["rms_norm_eps"].as_f64().ok_or(Error::Missing("rms_norm_eps"))?,
            rope_theta: rope["rope_theta"]
                .as_f64()
                .or(json["rope_theta"].as_f64())
                .unwrap_or(10_000.0),
            max_position_embeddings: int(&json, "max_position_embeddings")?,
            tie_word_embeddings: json["tie_word_embeddings"].as_bool().unwrap_or(false),
            qk_norm,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), Error> {
        if self.num_key_value_heads == 0 || self.num_attention_heads % self.num_key_value_heads != 0 {
            return Err(Error::Contradiction(format!(
                "`num_attention_heads` {} is not a multiple of `num_key_value_heads` {}",
                self.num_attention_heads, self.num_key_value_heads
            )));
        }
        if self.head_dim % 2 != 0 {
            return Err(Error::Contradiction(format!(
                "`head_dim` {} is odd; rotary positions need pairs",
                self.head_dim
            )));
        }
        Ok(())
    }

    /// The `config.json` that `transformers` loads.
    pub fn to_json(&self) -> String {
        let (model_type, architecture) = if self.qk_norm {
            ("qwen3", "Qwen3ForCausalLM")
        } else {
            ("llama", "LlamaForCausalLM")
        };
        let json = serde_json::json!({
            "architectures": [architecture],
            "model_type": model_type,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "vocab_size": self.vocab_size,
        });
        format!("{json:#}\n")
    }

    /// Every parameter's name and shape in Hugging Face coordinates, in forward order.
    pub fn parameter_shapes(&self) -> Vec<(String, Vec<i64>)> {
        let (d, hd) = (self.hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * hd, self.num_key_value_heads * hd);
        let mut shapes = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab_size, d])];
        for layer in 0..self.num_hidden_layers {
            let mut push = |name: &str, shape: Vec<i64>| {
                shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
            };
            push("input_layernorm", vec![d]);
            push("self_attn.q_proj", vec![q, d]);
            push("self_attn.k_proj", vec![kv, d]);
            push("self_attn.v_proj", vec![kv, d]);
            if self.qk_norm {
                push("self_attn.q_norm", vec![hd]);
                push("self_attn.k_norm", vec![hd]);
            }
            push("self_attn.o_proj", vec![d, q]);
            push("post_attention_layernorm", vec![d]);
            push("mlp.gate_proj", vec![self.intermediate_size, d]);
            push("mlp.up_proj", vec![self.intermediate_size, d]);
            push("mlp.down_proj", vec![d, self.intermediate_size]);
        }
        shapes.push(("model.norm.weight".into(), vec![d]));
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".into(), vec![self.vocab_size, d]));
        }
        shapes
    }
}

fn int(json: &Value, field: &'static str) -> Result<i64, Error> {
    match json[field].as_i64() {
        Some(n) if n > 0 => Ok(n),
        _ => Err(Error::Missing(field)),
    }
}

fn refuse_unless(
    json: &Value,
    field: &'static str,
    supported: &'static str,
    ok: impl Fn(&Value) -> bool,
) -> Result<(), Error> {
    let value = &json[field];
    if value.is_null() || ok(value) {
        return Ok(());
    }
    Err(Error::Unsupported {
        field,
        value: value.to_string(),
        supported,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> ModelConfig {
        ModelConfig {
            vocab_size: 64,
            hidden_size: 16,
            intermediate_size: 32,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 8,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            max_position_embeddings: 32,
            tie_word_embeddings: true,
            qk_norm: true,
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for config in [
            tiny(),
            ModelConfig {
                qk_norm: false,
                tie_word_embeddings: false,
                ..tiny()
            },
        ] {
            assert_eq!(ModelConfig::from_json(config.to_json().as_bytes()).unwrap(), config);
        }
    }

    #[test]
    fn an_unsupported_field_is_refused_by_name() {
        for (field, value) in [
            ("rope_scaling", serde_json::json!({"factor": 8.0})),
            ("attention_bias", serde_json::json!(true)),
            ("hidden_act", serde_json::json!("gelu")),
            ("model_type", serde_json::json!("gpt2")),
        ] {
            let mut json: Value = serde_json::from_str(&tiny().to_json()).unwrap();
            json[field] = value;
            let error = ModelConfig::from_json(json.to_string().as_bytes()).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn heads_that_do_not_divide_are_a_contradiction() {
        let config = ModelConfig {
            num_attention_heads: 3,
            num_key_value_heads: 2,
            ..tiny()
        };
        let error = ModelConfig::from_json(config.to_json().as_bytes()).unwrap_err();
        assert!(error.to_string().contains("num_key_value_heads"), "{error}");
    }
}
