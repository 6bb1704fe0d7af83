use super::*;
use crate::golden;

fn ids(n: usize, vocabulary: u32) -> Vec<u32> {
    (0..n as u32)
        .map(|i| (i * 2_654_435 + 7919) % 997 * 31 % vocabulary)
        .collect()
}

#[test]
fn on_the_real_base_the_sampler_and_the_trainer_have_the_same_bits() {
    let checkpoint = golden::checkpoint("../../../../demo/models/base");
    for compute in [Compute::F32, Compute::Bf16] {
        same_bits(&ExactModel::with_arithmetic(&checkpoint, &Arithmetic::new(compute, 1).unwrap()).unwrap());
    }
    // Sequences this long are shared among two threads.
    same_bits(&ExactModel::with_arithmetic(&checkpoint, &Arithmetic::new(Compute::F32, 2).unwrap()).unwrap());
}

fn same_bits(model: &ExactModel) {
    let vocabulary = model.config().vocab_size as u32;
    let sequences: Vec<Vec<u32>> = (0..8).map(|row| ids(120 + 13 * row, vocabulary)).collect();
    let mut cache = KvCache::new(model, 8, 256);
    let mut sampled: Vec<Vec<f32>> = Vec::new();
    for (slot, ids) in sequences.iter().enumerate() {
        sampled.push(model.prefill(&mut cache, slot, &ids[..ids.len() - 10]).unwrap());
    }
    for step in 0..9 {
        let tokens: Vec<u32> = sequences.iter().map(|s| s[s.len() - 10 + step]).collect();
        for (all, logits) in sampled.iter_mut().zip(model.decode(&mut cache, &tokens).unwrap()) {
            all.extend(logits);
        }
    }
    let mut first = 0;
    let mut logit_rows = Vec::new();
    for ids in &sequences {
        logit_rows.extend(first + ids.len() - 11..first + ids.len() - 1);
        first += ids.len();
    }
    let refs: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    let recomputed = model.score(&refs, &logit_rows, None).unwrap().logits;
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&sampled.concat()), bits(recomputed.values()));
}

#[test]
fn experts_recorded_while_sampling_equal_those_of_a_trainers_pass_and_replay() {
    let model = ExactModel::from_checkpoint(&golden::checkpoint("qwen3_moe")).unwrap();
    let ids = ids(20, 96);
    let mut cache = KvCache::new(&model, 1, 64);
    let mut recorded = Routing::default();
    let mut step = Routing::default();
    for part in [&ids[..15], &ids[15..16], &ids[16..17], &ids[17..18]] {
        model.advance(&mut cache, &[(0, part)], Some(&mut step)).unwrap();
        recorded.append(&step).unwrap();
    }
    // The rows that predict the sampled tokens.
    let logit_rows = [14, 15, 16, 17];
    let pass = model.score(&[&ids[..18]], &logit_rows, None).unwrap();
    assert_eq!(pass.routing, recorded);
    let per_token = model.config().experts.as_ref().unwrap().per_token as usize;
    assert!(
        recorded
            .layers()
            .iter()
            .all(|(_, experts)| experts.len() == 18 * per_token)
    );
    let replayed = model.score(&[&ids[..18]], &logit_rows, Some(&recorded)).unwrap();
    assert_eq!(replayed.logits.values(), pass.logits.values());
}

#[test]
fn a_copied_slot_decodes_the_same_bits_as_its_original() {
    for compute in [Compute::F32, Compute::Bf16] {
        let arithmetic = Arithmetic::new(compute, 1).unwrap();
        let model = ExactModel::with_arithmetic(&golden::checkpoint("deepseek_v3"), &arithmetic).unwrap();
        let mut cache = KvCache::new(&model, 2, 64);
        model.prefill(&mut cache, 0, &ids(39, 96)).unwrap();
        cache.copy_prefix(0, 1, 64);
        let both = model.decode(&mut cache, &[5, 5]).unwrap();
        assert_eq!(both[0], both[1]);
        assert_eq!((cache.len(0), cache.len(1)), (40, 40));
    }
}

#[test]
fn bad_ids_full_contexts_and_wrong_tensors_are_errors_and_change_nothing() {
    let mut checkpoint = golden::checkpoint("qwen3");
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    let mut cache = KvCache::new(&model, 2, 16);
    assert!(matches!(
        model.prefill(&mut cache, 0, &[96]),
        Err(Error::TokenId { id: 96, .. })
    ));
    assert!(matches!(model.prefill(&mut cache, 0, &[]), Err(Error::Empty)));
    let full = model.prefill(&mut cache, 0, &ids(17, 96));
    assert!(matches!(
        full,
        Err(Error::ContextFull {
            wanted: 17,
            context: 16
        })
    ));
    assert_eq!(cache.len(0), 0);
    model.prefill(&mut cache, 0, &ids(16, 96)).unwrap();
    assert!(matches!(model.decode(&mut cache, &[1]), Err(Error::ContextFull { .. })));
    // If one of two slots fails, the other is unchanged.
    cache.clear(1);
    assert!(model.decode(&mut cache, &[1, 2]).is_err());
    assert_eq!(cache.len(1), 0);
    assert!(model.score(&[&ids(300, 96)], &[0], None).is_err());
    assert!(model.score(&[&[1, 2]], &[2], None).is_err());

    let mut wrong = checkpoint.clone();
    if let Some(tensor) = wrong.tensors.get_mut("model.norm.weight") {
        tensor.shape = vec![1, 64];
    }
    let error = ExactModel::from_checkpoint(&wrong).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight") && error.contains("[48]"), "{error}");
    let extra = checkpoint.tensors["model.norm.weight"].clone();
    checkpoint.tensors.insert("model.layers.0.surprise".into(), extra);
    let error = ExactModel::from_checkpoint(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.surprise"), "{error}");
}

#[test]
fn every_architecture_passes_the_self_check_on_this_machine() {
    for folder in golden::folders() {
        let checkpoint = golden::checkpoint(&folder);
        for compute in [Compute::F32, Compute::Bf16] {
            let model = ExactModel::with_arithmetic(&checkpoint, &Arithmetic::new(compute, 1).unwrap()).unwrap();
            assert_eq!(model.self_check().unwrap(), None, "{folder}, {compute:?}");
        }
    }
}

/// The checkpoint with another value of a field of its `config.json`.
fn with_field(folder: &str, field: &str, value: i64) -> Checkpoint {
    let mut checkpoint = golden::checkpoint(folder);
    let mut json: serde_json::Value = serde_json::from_slice(&checkpoint.files["config.json"]).unwrap();
    json[field] = value.into();
    checkpoint.files.insert("config.json".into(), json.to_string().into());
    checkpoint
}

#[test]
fn a_model_needs_no_memory_for_positions_that_no_sequence_reaches() {
    // cos and sin of all these positions would be terabytes.
    let long = ExactModel::from_checkpoint(&with_field("llama", "max_position_embeddings", 1 << 40)).unwrap();
    let short = ExactModel::from_checkpoint(&golden::checkpoint("llama")).unwrap();
    let ids = ids(40, 96);
    let logits = |model: &ExactModel| model.score(&[&ids], &[0, 20, 39], None).unwrap().logits;
    assert_eq!(logits(&long), logits(&short));
    let mut cache = KvCache::new(&long, 1, 64);
    let sampled = long.prefill(&mut cache, 0, &ids).unwrap();
    assert_eq!(sampled, logits(&short).row(2));
}

#[test]
fn the_bytes_of_a_cache_are_known_before_it_is_allocated() {
    for folder in golden::folders() {
        for compute in [Compute::F32, Compute::Bf16] {
            let arithmetic = Arithmetic::new(compute, 1).unwrap();
            let model = ExactModel::with_arithmetic(&golden::checkpoint(&folder), &arithmetic).unwrap();
            for (slots, context) in [(0, 10), (1, 1), (3, 50), (2, 1_000_000)] {
                let known = KvCache::bytes_for(model.config(), slots, context, compute);
                assert_eq!(
                    known,
                    KvCache::new(&model, slots, context).bytes(),
                    "{folder}, {compute:?}"
                );
            }
        }
    }
}

#[test]
fn the_expanded_heads_of_latent_attention_are_counted() {
    let bytes = std::fs::read(golden::path("defaults.json")).unwrap();
    let mut defaults: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let mut json = defaults["deepseek_v3"].take();
    json["model_type"] = "deepseek_v3".into();
    let config = ModelConfig::from_json(json.to_string().as_bytes()).unwrap();
    let token = |compute| KvCache::bytes_for(&config, 1, 4096, compute) / 4096;
    // 61 layers of 128 heads, each with a key of 192 values and a value of 128.
    assert_eq!(token(Compute::F32), 61 * 128 * (192 + 128) * 4);
    assert_eq!(token(Compute::Bf16), 61 * 128 * (192 + 128) * 2);
    // The count saturates instead of wrapping to something small.
    let vast = ModelConfig {
        max_position_embeddings: i64::MAX / 2,
        ..config
    };
    assert_eq!(
        KvCache::bytes_for(&vast, usize::MAX, i64::MAX as usize / 2, Compute::F32),
        u64::MAX
    );
}
