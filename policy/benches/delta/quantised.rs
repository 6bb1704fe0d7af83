//! Quantised copies of the same pairs: how much of a copy a step changes, and how fast it is made, from nothing and out of the
//! copy before.

use crate::pairs::{self, Pair};
use crate::{ROUNDS, alone, best};
use policy::image::{Image, TensorData};
use policy::kernel::Threads;
use policy::quant::{self, Spec, Touched};
use serde_json::{Value, json};

/// Of the matrix that a made pair becomes.
const COLUMNS: usize = 4096;

pub fn rows(pair: &Pair, cores: usize) -> Result<Vec<Value>, Box<dyn std::error::Error>> {
    let (base, result) = (model(&pair.base), model(&pair.result));
    let all = Threads::new(cores)?;
    let bytes = result.tensor_bytes() as usize;
    let changed = pairs::bounds(pair).changed;
    let mut rows = vec![];
    for spec in Spec::ALL {
        let previous = quant::quantise(&base, spec, &all)?;
        let (copy, touched) = quant::requantise(&previous, &base, &result, spec, &all)?;
        if copy != quant::quantise(&result, spec, &all)? {
            return Err(format!("{}: {spec} out of the copy before is another copy", pair.name).into());
        }
        let fresh = |threads: &Threads| drop(quant::quantise(&result, spec, threads));
        let again = |threads: &Threads| drop(quant::requantise(&previous, &base, &result, spec, threads));
        let one = |run: &dyn Fn(&Threads)| alone(bytes, ROUNDS, || (), |()| run(&Threads::ONE));
        let many = |run: &dyn Fn(&Threads)| best(bytes, ROUNDS, || (), |()| run(&all));
        let row = json!({
            "pair": pair.name, "spec": spec, "model_bytes": bytes, "copy_bytes": copy.tensor_bytes(),
            "weights_changed_share": changed,
            "codes_changed_share": codes_changed(&previous, &copy),
            "blocks": touched.blocks, "blocks_touched": touched.touched, "scales_changed": touched.rescaled,
            "weights_coded": touched.coded,
            "quantise_gb_per_second": one(&fresh), "quantise_gb_per_second_all_cores": many(&fresh),
            "requantise_gb_per_second": one(&again), "requantise_gb_per_second_all_cores": many(&again),
            "root_gb_per_second": alone(bytes, ROUNDS, || (), |()| {
                std::hint::black_box(quant::root(&copy, &Threads::ONE));
            }),
        });
        println!("{}", line(&row, touched));
        rows.push(row);
    }
    Ok(rows)
}

pub const HEAD: &str = "| pair | spec | weights changed | codes changed | blocks touched | scales changed | quantise, GB/s | touched alone, GB/s | \
                        quantise, all cores | touched alone, all cores |\n|---|---|---|---|---|---|---|---|---|---|";

fn line(row: &Value, touched: Touched) -> String {
    let percent = |part: u64, of: u64| format!("{:.3}%", 100.0 * part as f64 / of.max(1) as f64);
    let share = |name: &str| format!("{:.4}%", 100.0 * row[name].as_f64().unwrap_or_default());
    let speed = |name: &str| format!("{:.2}", row[name].as_f64().unwrap_or_default());
    format!(
        "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        row["pair"].as_str().unwrap_or_default(),
        row["spec"].as_str().unwrap_or_default(),
        share("weights_changed_share"),
        share("codes_changed_share"),
        percent(touched.touched, touched.blocks),
        percent(touched.rescaled, touched.blocks),
        speed("quantise_gb_per_second"),
        speed("requantise_gb_per_second"),
        speed("quantise_gb_per_second_all_cores"),
        speed("requantise_gb_per_second_all_cores"),
    )
}

/// A made pair's weights as a matrix that is quantised; a folder's as they are.
fn model(image: &Image) -> Image {
    let mut model = image.clone();
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
fn codes_changed(old: &Image, new: &Image) -> f64 {
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
