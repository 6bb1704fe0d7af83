//! Quantized copies of the same pairs: how much of a copy a step changes, and how fast it is made.

use crate::pairs::{self, Pair};
use crate::{ROUNDS, alone, best};
use artifact::checkpoint::Checkpoint;
use artifact::quant::{self, Spec};
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use serde_json::{Value, json};

/// Columns of the matrix that a synthetic pair becomes.
const COLUMNS: usize = 4096;

pub fn rows(pair: &Pair, cores: usize) -> Result<Vec<Value>, Box<dyn std::error::Error>> {
    let (base, result) = (model(&pair.base), model(&pair.result));
    let all = Threads::new(cores)?;
    let bytes = result.tensor_bytes() as usize;
    let changed = pairs::bounds(pair).changed;
    let mut rows = vec![];
    for spec in Spec::ALL {
        let previous = quant::quantize(&base, spec, &all)?;
        let copy = quant::quantize(&result, spec, &all)?;
        let quantize = |threads: &Threads| drop(quant::quantize(&result, spec, threads));
        let row = json!({
            "pair": pair.name, "spec": spec, "model_bytes": bytes, "copy_bytes": copy.tensor_bytes(),
            "weights_changed_share": changed,
            "codes_changed_share": codes_changed(&previous, &copy),
            "quantise_gb_per_second": alone(bytes, ROUNDS, || (), |()| quantize(&Threads::ONE)),
            "quantise_gb_per_second_all_cores": best(bytes, ROUNDS, || (), |()| quantize(&all)),
            "root_gb_per_second": alone(bytes, ROUNDS, || copy_without_digests(&copy), |copy| {
                std::hint::black_box(copy.root());
            }),
        });
        println!("{}", line(&row));
        rows.push(row);
    }
    Ok(rows)
}

/// Otherwise the content hash would be computed once and then remembered.
fn copy_without_digests(copy: &Checkpoint) -> Checkpoint {
    let mut copy = copy.clone();
    for tensor in copy.tensors.values_mut() {
        tensor.bytes = bytes::Bytes::clone(&tensor.bytes).into();
    }
    copy
}

pub const HEAD: &str = "| pair | spec | weights changed | codes changed | quantize, GB/s | quantize, all cores |\n|---|---|---|---|---|---|";

fn line(row: &Value) -> String {
    let share = |name: &str| format!("{:.4}%", 100.0 * row[name].as_f64().unwrap_or_default());
    let speed = |name: &str| format!("{:.2}", row[name].as_f64().unwrap_or_default());
    format!(
        "| {} | {} | {} | {} | {} | {} |",
        row["pair"].as_str().unwrap_or_default(),
        row["spec"].as_str().unwrap_or_default(),
        share("weights_changed_share"),
        share("codes_changed_share"),
        speed("quantise_gb_per_second"),
        speed("quantise_gb_per_second_all_cores"),
    )
}

/// Makes a synthetic pair's weights a matrix that is quantized. A folder's weights stay unchanged.
fn model(checkpoint: &Checkpoint) -> Checkpoint {
    let mut model = checkpoint.clone();
    if let Some(weights) = model.tensors.remove("w") {
        let rows = weights.bytes.len() / 2 / COLUMNS;
        let matrix = TensorData {
            shape: vec![rows, COLUMNS],
            bytes: weights.bytes.slice(..rows * COLUMNS * 2).into(),
            ..weights
        };
        model.tensors.insert("model.layers.0.mlp.up_proj.weight".into(), matrix);
        model.files.insert("config.json".into(), "{}".into());
    }
    model
}

/// Share of the codes of all matrices: bytes of fp8, halves of bytes of int4.
fn codes_changed(old: &Checkpoint, new: &Checkpoint) -> f64 {
    let (mut differ, mut codes) = (0, 0);
    for (name, new) in &new.tensors {
        let Some(old) = old.tensors.get(name) else { continue };
        let pairs = old.bytes.iter().zip(new.bytes.iter());
        match new.dtype {
            safetensors::Dtype::F8_E4M3 => {
                differ += pairs.filter(|(old, new)| old != new).count();
                codes += new.bytes.len();
            }
            safetensors::Dtype::I32 => {
                let halves = pairs.map(|(old, new)| old ^ new);
                differ += halves
                    .map(|half| usize::from(half & 0xf != 0) + usize::from(half >> 4 != 0))
                    .sum::<usize>();
                codes += 2 * new.bytes.len();
            }
            _ => {}
        }
    }
    differ as f64 / codes.max(1) as f64
}
