//! Reads and writes PEFT's folder: `adapter_config.json` and `adapter_model.safetensors`.

use super::config::ALL_LINEAR;
use super::{Adapter, Config, Error, Targets};
use artifact::adapter::{CONFIG, PREFIX};
use artifact::atomic;
use artifact::tensor::TensorData;
use bytes::Bytes;
use safetensors::{SafeTensors, tensor::TensorView};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

const MODEL: &str = "adapter_model.safetensors";

/// Fields that do not change an adapter's results: notes, training settings, and settings that
/// chose the adapted modules. The tensors in the file already show which modules those are.
const IGNORED_FIELDS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];
/// Initializations that leave the base weights unchanged. Others, such as `pissa`, change them.
const INIT_METHODS: &[&str] = &["eva", "gaussian", "orthogonal"];

pub(super) fn read(folder: &Path) -> Result<Adapter, Error> {
    let path = folder.join(CONFIG);
    let json = fs::read(&path).map_err(io("read", &path))?;
    let config = read_config(&json).map_err(|why| refuse(&path, why))?;
    let path = folder.join(MODEL);
    let bytes = Bytes::from(fs::read(&path).map_err(io("read", &path))?);
    read_tensors(&bytes)
        .and_then(|tensors| Adapter::from_tensors(config, &tensors))
        .map_err(|why| refuse(&path, why))
}

pub(super) fn read_config(json: &[u8]) -> Result<Config, String> {
    let mut fields: Map<String, Value> = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let kind = take::<String>(&mut fields, "peft_type")?;
    if kind.as_deref() != Some("LORA") {
        return Err(format!(
            "`peft_type` is {}, which is not supported; supported: LORA",
            kind.unwrap_or_default()
        ));
    }
    let defaults = Config::default();
    let config = Config {
        r: take(&mut fields, "r")?.unwrap_or(defaults.r),
        lora_alpha: take(&mut fields, "lora_alpha")?.unwrap_or(defaults.lora_alpha),
        use_rslora: take(&mut fields, "use_rslora")?.unwrap_or_default(),
        target_modules: take(&mut fields, "target_modules")?.ok_or("there is no `target_modules`")?,
        rank_pattern: take(&mut fields, "rank_pattern")?.unwrap_or_default(),
        alpha_pattern: take(&mut fields, "alpha_pattern")?.unwrap_or_default(),
    };
    match take::<Value>(&mut fields, "init_lora_weights")? {
        None | Some(Value::Bool(_)) => {}
        Some(Value::String(name)) if INIT_METHODS.contains(&name.as_str()) => {}
        Some(other) => {
            return Err(format!(
                "`init_lora_weights` is {other}, which changes the base weights. Save the adapter as a plain one \
                 (PEFT's `path_initial_model_for_weight_conversion`)"
            ));
        }
    }
    let neutral = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::String(text) => text == "none",
        _ => false,
    };
    let unknown = |(name, value): &(&String, &Value)| !IGNORED_FIELDS.contains(&name.as_str()) && !neutral(value);
    if let Some((name, value)) = fields.iter().find(unknown) {
        return Err(format!("`{name}` is {value}, which is not supported"));
    }
    config.check()?;
    Ok(config)
}

/// Removes a field. `None` if it is missing or null.
fn take<T: DeserializeOwned>(fields: &mut Map<String, Value>, name: &str) -> Result<Option<T>, String> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value)
            .map(Some)
            .map_err(|error| format!("`{name}`: {error}")),
    }
}

fn read_tensors(bytes: &Bytes) -> Result<BTreeMap<String, TensorData>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let tensors = file.iter().map(|(name, view)| {
        let own = name
            .strip_prefix(PREFIX)
            .ok_or_else(|| format!("`{name}` does not begin with `{PREFIX}`"))?;
        let data = TensorData::new(view.dtype(), view.shape().to_vec(), bytes.slice_ref(view.data()));
        Ok((own.to_string(), data.map_err(|error| error.to_string())?))
    });
    tensors.collect()
}

pub(super) fn write(adapter: &Adapter, folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(io("create", folder))?;
    let path = folder.join(MODEL);
    let tensors = adapter.to_tensors();
    let views = tensors.iter().map(|(name, tensor)| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
        Ok((format!("{PREFIX}{name}"), view?))
    });
    let metadata = HashMap::from([("format".into(), "pt".into())]);
    let bytes = views
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .and_then(|views| safetensors::serialize(views, Some(metadata)))
        .map_err(|error| refuse(&path, error.to_string()))?;
    atomic::replace(&path, &[&bytes]).map_err(io("write", &path))?;

    // Written last, because PEFT reads it first.
    let path = folder.join(CONFIG);
    atomic::replace(&path, &[&config_bytes(adapter)]).map_err(io("write", &path))
}

/// `adapter_config.json`.
pub(super) fn config_bytes(adapter: &Adapter) -> Vec<u8> {
    format!("{:#}", config_json(adapter)).into_bytes()
}

fn config_json(adapter: &Adapter) -> Value {
    let config = &adapter.config;
    // PEFT writes the modules that `all-linear` matched.
    let targets = match &config.target_modules {
        Targets::Text(text) if text == ALL_LINEAR => {
            let ends = adapter.pairs.keys().filter_map(|module| module.rsplit('.').next());
            json!(BTreeSet::from_iter(ends))
        }
        other => json!(other),
    };
    // PEFT writes whole numbers as integers.
    let number = |value: f64| match value.fract() == 0.0 && value.abs() < 1e15 {
        true => json!(value as i64),
        false => json!(value),
    };
    let alphas: Map<String, Value> = config
        .alpha_pattern
        .iter()
        .map(|(k, &v)| (k.clone(), number(v)))
        .collect();
    json!({
        "alpha_pattern": alphas,
        "base_model_name_or_path": null,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": number(config.lora_alpha),
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": config.rank_pattern,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": config.use_rslora,
    })
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.display().to_string();
    move |source| Error::Io { action, path, source }
}

fn refuse(path: &Path, why: String) -> Error {
    Error::File {
        path: path.display().to_string(),
        why,
    }
}
