use super::*;
use crate::exact::ExactModel;
use crate::golden;
use artifact::tensor::TensorData;
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use std::fs;

fn named(names: &[&str]) -> Config {
    Config {
        target_modules: Targets::Names(names.iter().map(|name| name.to_string()).collect()),
        ..Config::default()
    }
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // `f32::max` would ignore NaN
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.max_by(f32::total_cmp).unwrap_or(0.0)
}

#[test]
fn a_merged_peft_adapter_computes_what_peft_and_transformers_compute() {
    let base = golden::checkpoint("qwen2");
    for name in ["adapter", "adapter_rslora"] {
        let folder = golden::path("qwen2").join(name);
        let merged = Adapter::read_dir(&folder).unwrap().merge(&base).unwrap();
        let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let values = |name: &str| -> Vec<f32> {
            let chunks = expected.tensor(name).unwrap().data().chunks_exact(4);
            chunks.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let ids: Vec<u32> = expected
            .tensor("ids")
            .unwrap()
            .data()
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32)
            .collect();
        let sequences: Vec<&[u32]> = ids.chunks(40).collect();
        let rows: Vec<usize> = (0..ids.len()).collect();
        let pass = ExactModel::from_checkpoint(&merged)
            .unwrap()
            .score(&sequences, &rows, None)
            .unwrap();
        let logits: Vec<Vec<f32>> = pass.logits.rows().map(<[f32]>::to_vec).collect();
        let following = (0..ids.len()).filter(|row| row % 40 != 39);
        let logprobs: Vec<f32> = following
            .map(|row| crate::sampling::log_prob(&logits[row], 1.0, ids[row + 1]))
            .collect();
        let apart = distance(pass.logits.values(), &values("logits_f32"));
        let logprobs_apart = distance(&logprobs, &values("logprobs_f32"));
        println!("{name}: logits {apart:.2e}, log-probabilities {logprobs_apart:.2e} from transformers");
        assert!(apart < 2e-5 && logprobs_apart < 1e-5, "{apart} {logprobs_apart}");
    }
}

#[test]
fn a_written_folder_is_read_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["adapter", "adapter_rslora"] {
        let before = Adapter::read_dir(&golden::path("qwen2").join(name)).unwrap();
        before.write_dir(folder.path()).unwrap();
        let after = Adapter::read_dir(folder.path()).unwrap();
        assert_eq!(before, after);
    }
    // `all-linear` is written as the modules that it matched.
    let fresh = Adapter::fresh(Config::default(), &golden::checkpoint("qwen2"), 1).unwrap();
    fresh.write_dir(folder.path()).unwrap();
    let after = Adapter::read_dir(folder.path()).unwrap();
    assert_eq!(fresh.pairs, after.pairs);
    let all = [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ];
    assert_eq!(after.config, named(&all));
}

#[test]
fn every_value_is_the_base_plus_its_sum_rounded_to_the_bases_dtype() {
    let mut base = golden::checkpoint("llama");
    let name = "model.layers.1.self_attn.q_proj";
    let weight = format!("{name}.weight");
    // −0, and values for which f32 and bf16 sums round differently.
    let mut values: Vec<f32> = (0..64 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
    values[0] = -0.0;
    let old = base.tensors[&weight].clone();
    base.tensors.insert(
        weight.clone(),
        crate::exact::to_dtype_of(&weight, &old, &values).unwrap(),
    );
    let mut adapter = Adapter::fresh(named(&[name]), &golden::checkpoint("llama"), 3).unwrap();
    assert_eq!(
        adapter.merge(&base).unwrap().root(),
        base.root(),
        "B is zero: not a bit changes"
    );

    let pair = adapter.pairs.get_mut(name).unwrap();
    pair.b = (0..64 * 8).map(|i| (i as f32 * 0.11).cos()).collect();
    let pair = pair.clone();
    let merged = adapter.merge(&base).unwrap();
    let w0 = crate::exact::to_f32(&weight, &base.tensors[&weight]).unwrap();
    let bits: Vec<u8> = (0..64 * 64)
        .flat_map(|i| {
            let (row, column) = (i / 64, i % 64);
            let mut sum = 0f32;
            for k in 0..8 {
                sum += pair.b[row * 8 + k] * pair.a[k * 64 + column];
            }
            bf16::from_f32(w0[i] + sum).to_le_bytes() // s = 8/8
        })
        .collect();
    assert_eq!(merged.tensors[&weight].bytes.as_ref(), bits);
    let others = |checkpoint: &Checkpoint| {
        let mut checkpoint = checkpoint.clone();
        checkpoint.tensors.remove(&weight);
        checkpoint
    };
    assert_eq!(others(&merged), others(&base));
}

#[test]
fn a_new_adapter_is_uniform_within_one_over_the_root_of_the_inputs_and_depends_on_the_seed() {
    let model = golden::checkpoint("llama");
    let adapter = Adapter::fresh(Config::default(), &model, 5).unwrap();
    assert_eq!(adapter, Adapter::fresh(Config::default(), &model, 5).unwrap());
    assert_ne!(adapter, Adapter::fresh(Config::default(), &model, 6).unwrap());
    assert_eq!(adapter.pairs.len(), 14, "seven matrices in two layers, and no head");
    let (mut square, mut count) = (0.0, 0.0);
    for pair in adapter.pairs.values() {
        let bound = 1.0 / (pair.inputs as f64).sqrt();
        assert!(pair.a.iter().all(|&a| f64::from(a).abs() <= bound));
        assert!(pair.b.iter().all(|&b| b == 0.0));
        square += pair.a.iter().map(|&a| (f64::from(a) / bound).powi(2)).sum::<f64>();
        count += pair.a.len() as f64;
    }
    let variance = square / count; // of the uniform distribution on ±1: 1/3
    assert!((variance - 1.0 / 3.0).abs() < 0.02, "{variance}");
}

#[test]
fn ranks_scales_and_modules_are_chosen_as_peft_does() {
    let text = |text: &str| Targets::Text(text.into());
    let config = Config {
        r: 4,
        lora_alpha: 2.0,
        use_rslora: true,
        target_modules: text(r"model\.layers\.0\..*_proj"),
        rank_pattern: [("q_proj".to_string(), 9)].into(),
        alpha_pattern: [(r"layers\.0\.self_attn\.k_proj".to_string(), 6.0)].into(),
    };
    assert_eq!(
        config.of("model.layers.0.self_attn.q_proj").unwrap(),
        (9, (2.0f64 / 3.0) as f32)
    );
    assert_eq!(config.of("model.layers.0.self_attn.k_proj").unwrap(), (4, 3.0));
    assert_eq!(config.of("model.layers.1.self_attn.k_proj").unwrap(), (4, 1.0));
    let modules = |config: &Config| {
        let adapter = Adapter::fresh(config.clone(), &golden::checkpoint("llama"), 1).unwrap();
        adapter.pairs.into_keys().collect::<Vec<_>>()
    };
    assert_eq!(modules(&config).len(), 7);
    // The end of a name starts after a dot, so `proj` matches nothing.
    let error = Adapter::fresh(named(&["proj"]), &golden::checkpoint("llama"), 1).unwrap_err();
    assert!(error.to_string().contains("q_proj"), "{error}");
    assert_eq!(
        modules(&named(&["layers.1.mlp.up_proj"])),
        ["model.layers.1.mlp.up_proj"]
    );
    for folder in ["qwen3_moe", "deepseek_v3"] {
        let adapter = Adapter::fresh(Config::default(), &golden::checkpoint(folder), 1).unwrap();
        assert!(adapter.pairs.keys().all(|module| module.contains(".self_attn.")));
        assert!(adapter.merge(&golden::checkpoint(folder)).is_ok());
    }
}

/// The error for the golden adapter with a changed configuration.
fn refusal(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(golden::path("qwen2/adapter").join(name), folder.path().join(name)).unwrap();
    }
    let path = folder.path().join("adapter_config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    let error = Adapter::read_dir(folder.path()).unwrap_err().to_string();
    assert!(error.contains(folder.path().to_str().unwrap()), "{error}");
    error
}

#[test]
fn unsupported_settings_are_refused_by_the_name_of_their_field() {
    let cases = [
        ("peft_type", serde_json::json!("LOHA")),
        ("use_dora", serde_json::json!(true)),
        ("modules_to_save", serde_json::json!(["lm_head"])),
        ("fan_in_fan_out", serde_json::json!(true)),
        ("bias", serde_json::json!("all")),
        ("lora_bias", serde_json::json!(true)),
        ("target_parameters", serde_json::json!(["mlp.experts.down_proj"])),
        ("layer_replication", serde_json::json!([[0, 2]])),
        ("init_lora_weights", serde_json::json!("pissa")),
        ("something_new", serde_json::json!(7)),
        ("r", serde_json::json!("four")),
        ("r", serde_json::json!(8)),
        ("r", serde_json::json!(0)),
        ("lora_alpha", serde_json::json!(-1)),
        ("target_modules", serde_json::json!(null)),
        ("target_modules", serde_json::json!(["q_proj"])),
        ("target_modules", serde_json::json!("(q_proj")),
        ("rank_pattern", serde_json::json!({"q_proj": 3})),
    ];
    for (field, value) in cases {
        let error = refusal(|json| json[field] = value.clone());
        assert!(error.contains(&format!("`{field}`")), "{field} {value}: {error}");
    }
    let twice = serde_json::json!({"q_proj": 6, "self_attn.q_proj": 7});
    let error = refusal(|json| json["alpha_pattern"] = twice);
    assert!(error.contains("two values"), "{error}");
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let base = golden::checkpoint("qwen2");
    let read = || Adapter::read_dir(&golden::path("qwen2/adapter")).unwrap();
    let module = "model.layers.0.mlp.up_proj".to_string();
    let merged = |adapter: &Adapter| adapter.merge(&base).err().unwrap().to_string();

    let mut other = read();
    let pair = other.pairs.get_mut(&module).unwrap();
    pair.inputs -= 1;
    let error = merged(&other);
    assert!(error.contains(&module) && error.contains("shape"), "{error}");

    let mut other = read();
    let pair = other.pairs.remove(&module).unwrap();
    for name in [
        "model.layers.7.mlp.up_proj",
        "lm_head",
        "model.embed_tokens",
        "model.norm",
    ] {
        let mut other = other.clone();
        other.pairs.insert(name.into(), pair.clone());
        let error = merged(&other);
        assert!(error.contains(name), "{error}");
    }

    let mut other = read();
    let pair = other.pairs.get_mut(&module).unwrap();
    (pair.a[0], pair.b[0]) = (f32::MAX, f32::MAX);
    let error = merged(&other);
    assert!(error.contains("not finite"), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let with = |change: &dyn Fn(&mut BTreeMap<String, TensorData>)| {
        read().write_dir(folder.path()).unwrap();
        let bytes = bytes::Bytes::from(fs::read(&path).unwrap());
        let mut tensors: BTreeMap<String, TensorData> = SafeTensors::deserialize(&bytes)
            .unwrap()
            .iter()
            .map(|(name, view)| {
                let data = TensorData::new(view.dtype(), view.shape().to_vec(), bytes.slice_ref(view.data()));
                (name.to_string(), data.unwrap())
            })
            .collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(n, t)| {
            (
                n,
                safetensors::tensor::TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap(),
            )
        });
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        Adapter::read_dir(folder.path()).unwrap_err().to_string()
    };
    let b = format!("base_model.model.{module}.lora_B.weight");
    let error = with(&|tensors| drop(tensors.remove(&b)));
    assert!(
        error.contains(&format!("`{module}.lora_B.weight` is missing")),
        "{error}"
    );
    let error = with(&|tensors| {
        let b = tensors[&b].clone();
        tensors.insert("base_model.model.model.embed_tokens.lora_embedding_B".into(), b);
    });
    assert!(error.contains("lora_embedding_B"), "{error}");
    let error = with(&|tensors| {
        let nan = TensorData::new(Dtype::F32, vec![72, 4], [f32::NAN; 288].map(f32::to_le_bytes).concat());
        tensors.insert(b.clone(), nan.unwrap());
    });
    assert!(error.contains("not finite"), "{error}");
    fs::write(&path, b"{}").unwrap();
    assert!(Adapter::read_dir(folder.path()).is_err());
    fs::remove_file(&path).unwrap();
    let error = Adapter::read_dir(folder.path()).unwrap_err().to_string();
    assert!(error.contains("adapter_model.safetensors"), "{error}");
}
