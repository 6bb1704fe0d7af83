//! Inserts `quantization_config` into `config.json`, after the first brace. Every other byte of the
//! file stays, so number formats and field order do not change.

use super::{Error, Spec};
use bytes::Bytes;
use serde_json::{Map, Value};

/// `config.json` with the fields that vLLM and `transformers` read.
pub(super) fn with_quantization(config: &[u8], spec: Spec, untouched: &[String]) -> Result<Bytes, Error> {
    let fields: Map<String, Value> =
        serde_json::from_slice(config).map_err(|_| Error::Config("is not a JSON object"))?;
    if fields.contains_key("quantization_config") || fields.contains_key("compression_config") {
        return Err(Error::Config("says that the weights are quantized already"));
    }
    let brace = config.iter().position(|&byte| byte == b'{');
    let (head, rest) = brace
        .and_then(|at| config.split_at_checked(at + 1))
        .ok_or(Error::Config("is not a JSON object"))?;
    let comma = if fields.is_empty() { "" } else { "," };
    let quantization = quantization(spec, untouched);
    let put = format!("\n  \"quantization_config\": {quantization}{comma}");
    Ok([head, put.as_bytes(), rest].concat().into())
}

/// The value, written by hand so that no formatter becomes part of a spec.
fn quantization(spec: Spec, untouched: &[String]) -> String {
    let names: Vec<String> = untouched
        .iter()
        .map(|name| Value::from(name.as_str()).to_string())
        .collect();
    let names = names.join(", ");
    match spec {
        Spec::Fp8 => format!(
            "{{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"activation_scheme\": \"dynamic\", \
             \"weight_block_size\": [128, 128], \"modules_to_not_convert\": [{names}]}}"
        ),
        Spec::Nvfp4 => format!(
            "{{\"quant_method\": \"compressed-tensors\", \"format\": \"nvfp4-pack-quantized\", \
             \"quantization_status\": \"compressed\", \"config_groups\": {{\"group_0\": {{\"targets\": [\"Linear\"], \
             \"weights\": {{\"num_bits\": 4, \"type\": \"float\", \"symmetric\": true, \"strategy\": \"tensor_group\", \
             \"group_size\": 16, \"dynamic\": false}}, \"input_activations\": null, \"output_activations\": null}}}}, \
             \"ignore\": [{names}]}}"
        ),
        Spec::Int4 => format!(
            "{{\"quant_method\": \"compressed-tensors\", \"format\": \"pack-quantized\", \
             \"quantization_status\": \"compressed\", \"config_groups\": {{\"group_0\": {{\"targets\": [\"Linear\"], \
             \"weights\": {{\"num_bits\": 4, \"type\": \"int\", \"symmetric\": true, \"strategy\": \"group\", \
             \"group_size\": 32, \"dynamic\": false}}, \"input_activations\": null, \"output_activations\": null}}}}, \
             \"ignore\": [{names}]}}"
        ),
    }
}
