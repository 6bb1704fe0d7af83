//! Quantized copies: exact codes and scales, which tensors are quantized, and the files they make.
//! Over 500 lines, because all cases share the matrices at the top.

use super::weight::Bf16;
use super::*;
use crate::manifest::{self, Quantized};
use crate::tensor::TensorData;
use half::bf16;
use proptest::prelude::*;
use safetensors::Dtype;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

const CONFIG: &str = "{\n  \"model_type\": \"qwen3\",\n  \"rms_norm_eps\": 1e-06\n}\n";
const UP: &str = "model.layers.0.mlp.up_proj.weight";

fn tensor(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> TensorData {
    TensorData::new(dtype, shape.to_vec(), bytes).unwrap()
}

fn model(tensors: impl IntoIterator<Item = (String, TensorData)>) -> Checkpoint {
    Checkpoint {
        tensors: tensors.into_iter().collect(),
        files: [("config.json".into(), CONFIG.into())].into(),
    }
}

/// One matrix of bf16 bits.
fn matrix(rows: usize, columns: usize, weights: &[u16]) -> Checkpoint {
    let bytes = weights.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    model([(UP.into(), tensor(Dtype::BF16, &[rows, columns], bytes))])
}

fn bf16_bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&value| bf16::from_f32(value).to_bits()).collect()
}

fn copy_of(checkpoint: &Checkpoint, spec: Spec) -> Checkpoint {
    quantize(checkpoint, spec, &Threads::ONE).unwrap()
}

fn decoded(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 0xf), f64::from(code & 7));
    let magnitude = match exponent {
        0 => fraction / 8.0 * 2f64.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn fp8_codes_are_rounded_to_nearest_even() {
    // every bf16 that E4M3 reaches, over scales that are and are not powers of two, subnormal
    // quotients included
    for scale in [1.0f32, 0.037, 3.1e-5, 1e12] {
        for weight in 0..=u16::MAX {
            let bits = u32::from(weight) << 16;
            let quotient = f32::from_bits(bits) / scale;
            if quotient.is_nan() || quotient.abs() > 448.0 {
                continue;
            }
            let code = fp8::e4m3(bits, scale);
            assert_eq!(code >> 7, (weight >> 15) as u8);
            let distance = |code: u8| (decoded(code) - f64::from(quotient)).abs();
            let (own, magnitude) = (distance(code), code & 0x7f);
            for other in [magnitude.saturating_sub(1), (magnitude + 1).min(0x7e)] {
                let other = other | code & 0x80;
                let even = own == distance(other) && code & 1 == 0;
                assert!(
                    other == code || own < distance(other) || even,
                    "{quotient} became {code:#x}"
                );
            }
        }
    }
}

#[test]
fn int4_codes_are_rounded_to_nearest_even() {
    for scale in [1.0f32, 0.0625, 3.3e-4, 7e20] {
        for weight in 0..=u16::MAX {
            let bits = u32::from(weight) << 16;
            let quotient = f32::from_bits(bits) / scale;
            if quotient.abs() > 8.0 || quotient.is_nan() {
                continue;
            }
            let expected = quotient.round_ties_even().clamp(-8.0, 7.0);
            assert_eq!(f32::from(int4::nibble(bits, scale)) - 8.0, expected, "{quotient}");
        }
    }
}

#[derive(Deserialize)]
struct Golden {
    dtype: String,
    rows: usize,
    columns: usize,
    weights: String,
    #[serde(flatten)]
    specs: BTreeMap<Spec, GoldenCodes>,
}

#[derive(Deserialize)]
struct GoldenCodes {
    codes: String,
    scales: String,
}

#[test]
fn torch_and_compressed_tensors_make_the_same_codes_and_scales() {
    let recorded = include_str!("../../tests/golden/quantised.json");
    let recorded: Vec<Golden> = serde_json::from_str(recorded).unwrap();
    for golden in &recorded {
        let dtype = if golden.dtype == "F32" { Dtype::F32 } else { Dtype::BF16 };
        let weights = hex::decode(&golden.weights).unwrap();
        let checkpoint = model([(UP.into(), tensor(dtype, &[golden.rows, golden.columns], weights))]);
        assert_eq!(golden.specs.len(), Spec::ALL.len());
        for (&spec, expected) in &golden.specs {
            let copy = copy_of(&checkpoint, spec);
            let bytes = |suffix: &str| hex::encode(&*copy.tensors[&format!("{UP}{suffix}")].bytes);
            let (codes, scales) = match spec {
                Spec::Fp8 => (bytes(""), bytes("_scale_inv")),
                Spec::Int4 | Spec::Nvfp4 => (bytes("_packed"), bytes("_scale")),
            };
            assert_eq!(codes, expected.codes, "{spec} {} × {}", golden.rows, golden.columns);
            assert_eq!(scales, expected.scales, "{spec} {} × {}", golden.rows, golden.columns);
        }
    }
}

/// A model of all kinds of tensors, the same for ever.
fn sample() -> Checkpoint {
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    // exponents around those of weights
    let mut weights = |dtype: Dtype, shape: &[usize]| {
        let bytes = (0..shape.iter().product::<usize>()).flat_map(|_| {
            let bits = next();
            let bits = bits & 0x807f_ffff | (100 + (bits >> 23 & 0xff) % 24) << 23;
            match dtype {
                Dtype::F32 => bits.to_le_bytes().to_vec(),
                _ => bits.to_le_bytes()[2..].to_vec(),
            }
        });
        tensor(dtype, shape, bytes.collect())
    };
    let mut checkpoint = model([]);
    for (name, dtype, shape) in [
        ("lm_head.weight", Dtype::BF16, &[40, 160][..]),
        ("model.embed_tokens.weight", Dtype::BF16, &[40, 160]),
        ("model.layers.0.input_layernorm.weight", Dtype::BF16, &[160]),
        (
            "model.layers.0.mlp.experts.0.down_proj.weight",
            Dtype::BF16,
            &[160, 300],
        ),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", Dtype::F32, &[300, 160]),
        ("model.layers.0.mlp.gate.weight", Dtype::BF16, &[2, 160]),
        (
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            Dtype::BF16,
            &[257, 160],
        ),
        ("model.layers.0.self_attn.q_proj.bias", Dtype::BF16, &[129]),
        ("model.layers.0.self_attn.q_proj.weight", Dtype::BF16, &[129, 160]),
        ("model.layers.0.self_attn.v_proj.weight", Dtype::F16, &[8, 160]),
    ] {
        checkpoint.tensors.insert(name.into(), weights(dtype, shape));
    }
    checkpoint
}

#[test]
fn the_bits_of_a_spec_never_change() {
    // a change of these is another spec, with another name
    let roots = Spec::ALL.map(|spec| (spec.name(), copy_of(&sample(), spec).root().to_string()));
    assert_eq!(
        roots.each_ref().map(|(name, root)| (*name, root.as_str())),
        GOLDEN_ROOTS
    );
}

const GOLDEN_ROOTS: [(&str, &str); 3] = [
    (
        "fp8-e4m3-b128.1",
        "07964bed59a56c9ceb27893dc4ea71108f0c50ad08bb0f36e8247971dd1e8fe8",
    ),
    (
        "int4-sym-g32.1",
        "5e599aeef11d8c0f6dd283ce633fd96025b7a73da81920c0d703bee0d989e6e4",
    ),
    (
        "nvfp4-e4m3-g16.1",
        "8f90d6a296e74caf694a828bf9e4a4ac1dddf55e7ec9c6102597b2e4cdb37485",
    ),
];

#[test]
fn projections_are_quantized_and_other_tensors_are_unchanged() {
    let checkpoint = sample();
    let dtype_and_shape = |copy: &Checkpoint, name: &str| {
        let tensor = &copy.tensors[name];
        (tensor.dtype, tensor.shape.clone())
    };
    let fp8 = copy_of(&checkpoint, Spec::Fp8);
    let int4 = copy_of(&checkpoint, Spec::Int4);
    let q = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(dtype_and_shape(&fp8, q), (Dtype::F8_E4M3, vec![129, 160]));
    assert_eq!(
        dtype_and_shape(&fp8, &format!("{q}_scale_inv")),
        (Dtype::F32, vec![2, 2])
    );
    assert_eq!(
        dtype_and_shape(&int4, &format!("{q}_packed")),
        (Dtype::I32, vec![129, 20])
    );
    assert_eq!(
        dtype_and_shape(&int4, &format!("{q}_scale")),
        (Dtype::BF16, vec![129, 5])
    );
    assert_eq!(dtype_and_shape(&int4, &format!("{q}_shape")), (Dtype::I64, vec![2]));
    assert_eq!(
        int4.tensors[&format!("{q}_shape")].bytes[..],
        [129, 0, 0, 0, 0, 0, 0, 0, 160, 0, 0, 0, 0, 0, 0, 0]
    );
    assert!(!int4.tensors.contains_key(q));
    let unchanged = |copy: &Checkpoint| -> BTreeSet<String> {
        let same = checkpoint
            .tensors
            .iter()
            .filter(|(name, tensor)| copy.tensors.get(*name) == Some(*tensor));
        same.map(|(name, _)| name.trim_start_matches("model.layers.0.").into())
            .collect()
    };
    let mut expected = BTreeSet::from(
        [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "input_layernorm.weight",
            "mlp.gate.weight",
            "self_attn.q_proj.bias",
            "self_attn.v_proj.weight",
        ]
        .map(str::to_owned),
    );
    assert_eq!(unchanged(&fp8), expected);
    // 300 columns are not a multiple of a group
    expected.insert("mlp.experts.0.down_proj.weight".into());
    assert_eq!(unchanged(&int4), expected);
    assert_eq!(int4.tensors.len(), expected.len() + 3 * 3);

    let settings =
        |copy: &Checkpoint| -> serde_json::Value { serde_json::from_slice(&copy.files["config.json"]).unwrap() };
    let fp8 = &settings(&fp8)["quantization_config"];
    assert_eq!(fp8["quant_method"], "fp8");
    assert_eq!(fp8["weight_block_size"], serde_json::json!([128, 128]));
    let modules = [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn.v_proj",
    ];
    assert_eq!(fp8["modules_to_not_convert"], serde_json::json!(modules));
    let int4 = &settings(&int4)["quantization_config"];
    assert_eq!(int4["format"], "pack-quantized");
    assert_eq!(int4["config_groups"]["group_0"]["weights"]["group_size"], 32);
    assert_eq!(int4["ignore"].as_array().unwrap().len(), modules.len() + 1);
}

#[test]
fn config_json_keeps_its_own_bytes() {
    let copy = copy_of(&matrix(1, 32, &[0x3f80; 32]), Spec::Fp8);
    let expected = CONFIG.replacen(
        '{',
        "{\n  \"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"activation_scheme\": \"dynamic\", \
         \"weight_block_size\": [128, 128], \"modules_to_not_convert\": [\"lm_head\"]},",
        1,
    );
    assert_eq!(copy.files["config.json"], expected);
    let with = |config: &'static str| {
        let mut checkpoint = matrix(1, 32, &[0x3f80; 32]);
        checkpoint.files.insert("config.json".into(), config.into());
        quantize(&checkpoint, Spec::Int4, &Threads::ONE)
    };
    let empty = with(" {}").unwrap();
    assert!(serde_json::from_slice::<serde_json::Value>(&empty.files["config.json"]).is_ok());
    for bad in [
        "",
        "[]",
        "{",
        "{\"quantization_config\": null}",
        "{\"compression_config\": {}}",
    ] {
        assert!(matches!(with(bad), Err(Error::Config(_))), "{bad}");
    }
    let mut checkpoint = matrix(1, 32, &[0x3f80; 32]);
    checkpoint.files.clear();
    assert!(matches!(
        quantize(&checkpoint, Spec::Fp8, &Threads::ONE),
        Err(Error::Config("is not there"))
    ));
}

#[test]
fn zeros_subnormals_and_the_largest_numbers_have_codes() {
    let largest = f32::from(bf16::MAX);
    let smallest = f32::from_bits(1 << 16);
    // blocks of their own in both specs
    let mut weights = vec![];
    for values in [
        [0.0, -0.0, smallest, -smallest],
        [2f32.powi(-101), 0.0, -0.0, -2f32.powi(-101)],
        [2f32.powi(-100), -2f32.powi(-101), smallest, 0.0],
        [largest, -largest, 1.0, -smallest],
    ] {
        weights.extend(values.repeat(32));
    }
    let copy = copy_of(&matrix(1, 512, &bf16_bits(&weights)), Spec::Fp8);
    let codes = &copy.tensors[UP].bytes;
    let scales: Vec<f32> = copy.tensors[&format!("{UP}_scale_inv")]
        .bytes
        .as_chunks()
        .0
        .iter()
        .map(|&b| f32::from_le_bytes(b))
        .collect();
    assert_eq!(scales, [1.0, 1.0, 2f32.powi(-100) / 448.0, largest / 448.0]);
    assert_eq!(codes[..4], [0, 0x80, 0, 0x80]);
    assert_eq!(codes[128..132], [0, 0, 0x80, 0x80]);
    assert_eq!(codes[256..260], [0x7e, 0xf6, 0, 0]);
    assert_eq!(codes[384..388], [0x7e, 0xfe, 0, 0x80]);

    let copy = copy_of(&matrix(1, 512, &bf16_bits(&weights)), Spec::Int4);
    let scales: Vec<f32> = copy.tensors[&format!("{UP}_scale")]
        .bytes
        .as_chunks()
        .0
        .iter()
        .map(|&b| bf16::from_le_bytes(b).to_f32())
        .collect();
    let tiny = bf16::from_f32(2f32.powi(-100) / 7.5).to_f32();
    let huge = bf16::from_f32(largest / 7.5).to_f32();
    assert_eq!([scales[0], scales[4], scales[8], scales[12]], [1.0, 1.0, tiny, huge]);
    let codes = &copy.tensors[&format!("{UP}_packed")].bytes;
    assert_eq!((codes[0], codes[64], codes[128], codes[192]), (0x88, 0x88, 0x4f, 0x0f));
}

#[test]
fn weights_that_are_not_finite_and_models_without_projections_are_refused() {
    for spec in Spec::ALL {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let before = matrix(2, 64, &bf16_bits(&[1.0; 128]));
            let mut weights = [1.0; 128];
            weights[100] = bad;
            let after = matrix(2, 64, &bf16_bits(&weights));
            let refused =
                |result: Result<Checkpoint, Error>| matches!(result, Err(Error::NotFinite(name)) if name == UP);
            assert!(refused(quantize(&after, spec, &Threads::ONE)), "{spec} {bad}");
            let copy = copy_of(&before, spec);
            // a copy is no version to quantize
            assert!(matches!(quantize(&copy, spec, &Threads::ONE), Err(Error::Config(_))));
        }
        let embedding = model([(
            "model.embed_tokens.weight".into(),
            tensor(Dtype::BF16, &[1, 32], vec![0; 64]),
        )]);
        assert!(matches!(
            quantize(&embedding, spec, &Threads::ONE),
            Err(Error::Nothing(_))
        ));
    }
    let mut taken = matrix(1, 32, &[0; 32]);
    taken
        .tensors
        .insert(format!("{UP}_scale_inv"), tensor(Dtype::F32, &[1], vec![0; 4]));
    assert!(matches!(
        quantize(&taken, Spec::Fp8, &Threads::ONE),
        Err(Error::Taken(_))
    ));
}

fn finite() -> impl Strategy<Value = u16> {
    // weights as they are, zeros and numbers that count as 0, and any that are finite
    prop_oneof![
        6 => (0u16..0x200).prop_map(|low| 0x3c00 | low | (low & 1) << 15),
        1 => prop_oneof![Just(0u16), Just(0x8000), Just(0x0d40), Just(0x0d80), Just(1)],
        2 => any::<u16>().prop_map(|bits| if bits & 0x7f80 == 0x7f80 { bits & 0xbfff } else { bits }),
    ]
}

/// A matrix of any shape and dtype, beside one that is more than a block high.
fn matrices() -> impl Strategy<Value = Checkpoint> {
    let shape = prop_oneof![
        (1usize..6, 1usize..300),
        (120usize..140, 1usize..40),
        (1usize..4, (1usize..12).prop_map(|n| 32 * n))
    ];
    (shape, prop_oneof![Just(Dtype::BF16), Just(Dtype::F32)]).prop_flat_map(|((rows, columns), dtype)| {
        proptest::collection::vec(finite(), rows * columns).prop_map(move |weights| {
            // f32 with bits that no bf16 has
            let bytes = weights.iter().flat_map(|&bits| match dtype {
                Dtype::F32 => (u32::from(bits) << 16 | u32::from(bits)).to_le_bytes().to_vec(),
                _ => bits.to_le_bytes().to_vec(),
            });
            let high = tensor(Dtype::BF16, &[130, 32], [0x80, 0x3f].repeat(130 * 32));
            model([
                (UP.into(), tensor(dtype, &[rows, columns], bytes.collect())),
                ("model.layers.0.mlp.gate_proj.weight".into(), high),
            ])
        })
    })
}

/// The codes and the scale of a block of weights, as the specs are written in FORMAT.md. `common`: of nvfp4.
fn by_the_spec(weights: &[f32], spec: Spec, common: f32) -> (Vec<u8>, Vec<u8>) {
    let counted = weights.iter().map(|w| w.abs()).filter(|&w| w >= 2f32.powi(-100));
    let largest = counted.fold(0f32, f32::max);
    let (scale, bytes) = match spec {
        _ if largest == 0.0 && spec == Spec::Fp8 => (1.0, 1f32.to_le_bytes().to_vec()),
        _ if largest == 0.0 && spec == Spec::Int4 => (1.0, half::bf16::ONE.to_le_bytes().to_vec()),
        Spec::Fp8 => (largest / 448.0, (largest / 448.0).to_le_bytes().to_vec()),
        Spec::Int4 => {
            let scale = half::bf16::from_f32(largest / 7.5);
            (scale.to_f32(), scale.to_le_bytes().to_vec())
        }
        Spec::Nvfp4 => {
            let largest = weights.iter().map(|w| w.abs()).fold(0f32, f32::max);
            let wanted = f64::from(common * (largest / 6.0));
            // 0 is left out: its place is that of 0.125
            let nearest = (1..=0x7e_u8).min_by(|&a, &b| {
                let far = |code: u8| (decoded(code) - wanted).abs();
                far(a).total_cmp(&far(b)).then((a % 2).cmp(&(b % 2)))
            });
            let nearest = nearest.filter(|&code| wanted > decoded(code) / 2.0).unwrap_or(0x20);
            ((decoded(nearest) as f32) / common, vec![nearest])
        }
    };
    let codes = weights.iter().map(|w| match spec {
        Spec::Fp8 => fp8::e4m3(w.to_bits(), scale),
        Spec::Int4 => ((w / scale).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8,
        Spec::Nvfp4 => {
            let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0_f32];
            let far = |at: usize| (magnitudes[at] - (w / scale).abs()).abs();
            let nearest = (0..8).min_by(|&a, &b| far(a).total_cmp(&far(b)).then((a % 2).cmp(&(b % 2))));
            nearest.unwrap() as u8 | if *w < 0.0 { 8 } else { 0 }
        }
    });
    (codes.collect(), bytes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_block_has_the_codes_and_the_scale_of_the_spec(version in matrices(), three in any::<bool>()) {
        let threads = if three { Threads::new(3).unwrap() } else { Threads::ONE };
        for spec in Spec::ALL {
            let copy = quantize(&version, spec, &threads).unwrap();
            for (name, matrix) in &version.tensors {
                let (rows, columns) = (matrix.shape[0], matrix.shape[1]);
                let width = matrix.bytes.len() / rows / columns;
                let weight = |at: usize| match matrix.bytes[at * width..(at + 1) * width] {
                    [a, b] => f32::from_le_bytes([0, 0, a, b]),
                    [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                    _ => unreachable!("two or four bytes"),
                };
                let (high, wide) = match spec {
                    Spec::Fp8 => (128, 128),
                    Spec::Int4 | Spec::Nvfp4 if columns % if spec == Spec::Int4 { 32 } else { 16 } != 0 => {
                        prop_assert_eq!(&copy.tensors[name], matrix);
                        continue;
                    }
                    Spec::Int4 => (1, 32),
                    Spec::Nvfp4 => (1, 16),
                };
                let suffixes = if spec == Spec::Fp8 { ["", "_scale_inv"] } else { ["_packed", "_scale"] };
                let [codes, scales] = suffixes.map(|suffix| &copy.tensors[&format!("{name}{suffix}")].bytes);
                let code = |at: usize| match spec {
                    Spec::Fp8 => codes[at],
                    Spec::Int4 | Spec::Nvfp4 => codes[at / 2] >> (4 * (at % 2)) & 0xf,
                };
                let common = match copy.tensors.get(&format!("{name}_global_scale")) {
                    None => 1.0,
                    Some(scale) => f32::from_le_bytes(scale.bytes[..].try_into().unwrap()),
                };
                let mut expected_scales = vec![];
                for top in (0..rows).step_by(high) {
                    for left in (0..columns).step_by(wide) {
                        let cells = (top..rows.min(top + high)).flat_map(|row| {
                            (left..columns.min(left + wide)).map(move |column| row * columns + column)
                        });
                        let cells: Vec<usize> = cells.collect();
                        let weights: Vec<f32> = cells.iter().map(|&at| weight(at)).collect();
                        let (expected, scale) = by_the_spec(&weights, spec, common);
                        let found: Vec<u8> = cells.iter().map(|&at| code(at)).collect();
                        prop_assert_eq!(found, expected, "{} {}", spec, name);
                        expected_scales.extend(scale);
                    }
                }
                prop_assert_eq!(&scales[..], &expected_scales[..], "{} {}", spec, name);
            }
        }
    }
}

#[test]
fn a_copy_must_have_the_content_hash_of_the_manifest() {
    let checkpoint = sample();
    let mut manifest = manifest::tests::sample();
    let check = |manifest: &Manifest, spec| verified(&checkpoint, manifest, spec, &Threads::ONE);
    assert!(matches!(check(&manifest, Spec::Fp8), Err(Error::NotNamed { .. })));
    let named = |spec: &str, root| Quantized {
        spec: spec.into(),
        root,
    };
    manifest.quantized.push(named("mxfp4.7", checkpoint.root()));
    manifest
        .quantized
        .push(named(Spec::Fp8.name(), copy_of(&checkpoint, Spec::Fp8).root()));
    assert_eq!(check(&manifest, Spec::Fp8).unwrap(), copy_of(&checkpoint, Spec::Fp8));
    let error = check(&manifest, Spec::Int4).unwrap_err().to_string();
    assert!(error.contains("mxfp4.7, fp8-e4m3-b128.1"), "{error}");
    manifest.quantized.push(named(Spec::Int4.name(), checkpoint.root()));
    assert!(matches!(check(&manifest, Spec::Int4), Err(Error::WrongRoot { .. })));
}

#[test]
fn an_unknown_spec_is_refused_with_the_list_of_known_ones() {
    for spec in Spec::ALL {
        assert_eq!(spec.name().parse(), Ok(spec));
        assert_eq!(serde_json::from_value::<Spec>(spec.name().into()).unwrap(), spec);
    }
    let error = "fp8".parse::<Spec>().unwrap_err().to_string();
    assert!(
        error.contains("`fp8`") && error.contains("fp8-e4m3-b128.1, int4-sym-g32.1"),
        "{error}"
    );
}

#[test]
fn the_largest_magnitude_ignores_signs() {
    let weights = bf16_bits(&[0.5, -3.0, 2.0]);
    let bytes: Vec<u8> = weights.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    assert_eq!(weight::largest::<Bf16>(&bytes), 3f32.to_bits());
    assert_eq!(weight::largest::<Bf16>(&[]), 0);
}

#[test]
fn the_values_of_a_copy_are_its_codes_times_their_scales() {
    let checkpoint = sample();
    for spec in Spec::ALL {
        let (copy, values) = (
            copy_of(&checkpoint, spec),
            dequantized(&checkpoint, spec, &Threads::ONE).unwrap(),
        );
        assert_eq!(values.files, checkpoint.files);
        let f32s = |tensor: &TensorData| -> Vec<f32> {
            tensor
                .bytes
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| f32::from_le_bytes(bytes))
                .collect()
        };
        for (name, tensor) in &checkpoint.tensors {
            let Some(select::Matrix { columns, .. }) = select::matrix(name, tensor, spec) else {
                assert_eq!(values.tensors[name], *tensor, "{spec} {name}");
                continue;
            };
            let of = |suffix: &str| &copy.tensors[&format!("{name}{suffix}")];
            let half = |at: usize| of("_packed").bytes[at / 2] >> (4 * (at % 2)) & 15;
            for (at, value) in f32s(&values.tensors[name]).into_iter().enumerate() {
                let expected = match spec {
                    Spec::Fp8 => {
                        let [row, column] = [at / columns, at % columns];
                        let scale = f32s(of("_scale_inv"))[row / 128 * columns.div_ceil(128) + column / 128];
                        decoded(of("").bytes[at]) * f64::from(scale)
                    }
                    Spec::Int4 => {
                        let bits = of("_scale").bytes.as_chunks().0[at / 32];
                        (f64::from(half(at)) - 8.0) * bf16::from_le_bytes(bits).to_f64()
                    }
                    Spec::Nvfp4 => {
                        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(half(at) & 7)];
                        let sign = if half(at) < 8 { 1.0 } else { -1.0 };
                        let common = f64::from(f32s(of("_global_scale"))[0]);
                        sign * magnitude * decoded(of("_scale").bytes[at / 16]) / common
                    }
                };
                let close = (f64::from(value) - expected).abs() <= 1e-6 * expected.abs();
                assert!(close, "{spec} {name} {at}: {value} {expected}");
            }
        }
    }
}
