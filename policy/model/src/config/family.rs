//! What `model_type` alone decides. CONTRIBUTING.md says how to add an architecture.

use super::Error;

/// The architectures that load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    #[default]
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    /// Includes Kimi K2, whose `model_type` may also be `kimi_k2`.
    DeepseekV3,
}

/// What `transformers` does for a family without a field of `config.json` for it.
#[derive(Clone, Copy)]
pub(super) struct Conventions {
    /// Accepted values of `model_type`. The first one is written to new files.
    pub model_types: &'static [&'static str],
    /// The class name in `architectures`.
    pub class: &'static str,
    pub attention_bias: AttentionBias,
    /// The family has the field `mlp_bias`.
    pub mlp_bias: bool,
    /// RMSNorm over each head's query and key.
    pub qk_norm: bool,
    pub window: Window,
    /// Attention is multi-head latent attention.
    pub latent: bool,
    /// Checkpoints may hold layers after the last one, which predict further tokens. They are
    /// ignored.
    pub extra_layers: bool,
    pub experts: Option<ExpertFields>,
    /// Rotary pairs are adjacent values unless `rope_interleave` is false.
    pub interleaved_rope: bool,
    pub absent: Absent,
}

/// What `transformers` takes for fields that `config.json` does not have. `None`: what it takes for
/// null.
#[derive(Clone, Copy)]
pub(super) struct Absent {
    /// `num_key_value_heads`. Null means as many as `num_attention_heads`.
    pub key_value_heads: Option<i64>,
    /// `head_dim`. Null means `hidden_size / num_attention_heads`.
    pub head_dim: Option<i64>,
}

/// Which projections of attention have a bias.
#[derive(Clone, Copy)]
pub(super) enum AttentionBias {
    /// All four, if the field `attention_bias` is true.
    Configured,
    /// Queries, keys and values, always.
    QueryKeyValue,
    Never,
}

/// Which layers use a sliding window.
#[derive(Clone, Copy)]
pub(super) enum Window {
    /// None. The field `sliding_window` is refused.
    Refused,
    /// Those of `layer_types`, or all layers, unless `sliding_window` is null.
    EveryLayer,
    /// All layers, if `use_sliding_window` is true.
    EveryLayerIfEnabled,
    /// Those of `layer_types`, or layers from `max_window_layers` on, if `use_sliding_window` is
    /// true.
    UpperLayersIfEnabled,
}

/// Whose field names describe the mixture of experts.
#[derive(Clone, Copy)]
pub(super) enum ExpertFields {
    Qwen3,
    Deepseek,
}

impl Family {
    const ALL: [Family; 6] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::Qwen3Moe,
        Family::DeepseekV3,
    ];

    pub(super) fn conventions(self) -> Conventions {
        let llama = Conventions {
            model_types: &["llama"],
            class: "LlamaForCausalLM",
            attention_bias: AttentionBias::Configured,
            mlp_bias: true,
            qk_norm: false,
            window: Window::Refused,
            latent: false,
            extra_layers: false,
            experts: None,
            interleaved_rope: false,
            absent: Absent {
                key_value_heads: None,
                head_dim: None,
            },
        };
        let key_value_heads = |heads: i64| Absent {
            key_value_heads: Some(heads),
            head_dim: None,
        };
        let plain = Conventions {
            mlp_bias: false,
            ..llama
        };
        match self {
            Family::Llama => llama,
            Family::Mistral => Conventions {
                model_types: &["mistral"],
                class: "MistralForCausalLM",
                attention_bias: AttentionBias::Never,
                window: Window::EveryLayer,
                absent: key_value_heads(8),
                ..plain
            },
            Family::Qwen2 => Conventions {
                model_types: &["qwen2"],
                class: "Qwen2ForCausalLM",
                attention_bias: AttentionBias::QueryKeyValue,
                window: Window::UpperLayersIfEnabled,
                absent: key_value_heads(32),
                ..plain
            },
            Family::Qwen3 => Conventions {
                model_types: &["qwen3"],
                class: "Qwen3ForCausalLM",
                qk_norm: true,
                window: Window::UpperLayersIfEnabled,
                absent: Absent {
                    key_value_heads: Some(32),
                    head_dim: Some(128),
                },
                ..plain
            },
            Family::Qwen3Moe => Conventions {
                model_types: &["qwen3_moe"],
                class: "Qwen3MoeForCausalLM",
                qk_norm: true,
                window: Window::EveryLayerIfEnabled,
                experts: Some(ExpertFields::Qwen3),
                absent: key_value_heads(4),
                ..plain
            },
            Family::DeepseekV3 => Conventions {
                model_types: &["deepseek_v3", "kimi_k2"],
                class: "DeepseekV3ForCausalLM",
                latent: true,
                extra_layers: true,
                experts: Some(ExpertFields::Deepseek),
                interleaved_rope: true,
                absent: key_value_heads(128),
                ..plain
            },
        }
    }

    /// The family of a `model_type`, or an error that lists the supported ones.
    pub(super) fn of(model_type: &str) -> Result<Family, Error> {
        let types = |family: Family| family.conventions().model_types;
        let found = Self::ALL
            .into_iter()
            .find(|&family| types(family).contains(&model_type));
        found.ok_or_else(|| Error::Unsupported {
            field: "model_type",
            value: model_type.to_owned(),
            supported: Self::ALL.map(types).concat().join(", ").into(),
        })
    }
}
