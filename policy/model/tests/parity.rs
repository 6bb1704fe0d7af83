//! Compares the model with `transformers` and with itself, on a small random model of every
//! architecture (`tests/golden`).
//!
//! `make check NAME=parity` prints what the tests measure. The first table is the distance to `transformers`.
//! The second is the distance between all ways to compute the same tokens here; it is 0 everywhere.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "parity/ways.rs"]
mod ways;

use artifact::checkpoint::Checkpoint;
use artifact::isa::Isa;
use artifact::threads::Threads;
use model::exact::{Arithmetic, Compute, ExactModel, KvCache};
use model::router::Routing;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use ways::WAYS;

/// The largest accepted distance of a log-probability from `transformers` in f32.
const F32_MAX: f32 = 1e-5;
/// The largest accepted distance of a logit. It is larger because an error common to all logits
/// does not change log-probabilities. `transformers` in f32 differs from itself in f64 by up to
/// 1.5e-5.
const LOGIT_MAX: f32 = 2e-5;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// A folder's weights with one of its configurations.
struct Case {
    folder: String,
    /// The file names, such as `config.NAME.json` and `expected.NAME.safetensors`.
    config: String,
    expected: String,
    checkpoint: Checkpoint,
}

impl Case {
    fn name(&self) -> String {
        format!("{} {}", self.folder, self.config)
    }

    fn expected(&self) -> Vec<u8> {
        std::fs::read(golden().join(&self.folder).join(&self.expected)).unwrap()
    }
}

/// Every folder that holds a model, sorted by name.
fn folders() -> Vec<String> {
    let entries = std::fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap());
    let models = entries.filter(|entry| entry.path().join("config.json").exists());
    let mut names: Vec<String> = models.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let folders = folders();
    for folder in &folders {
        let path = golden().join(folder);
        let checkpoint = Checkpoint::read_dir(&path).unwrap();
        let mut configs: Vec<String> = std::fs::read_dir(&path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("config.") && name.ends_with(".json"))
            .collect();
        configs.sort();
        for config in configs {
            let mut checkpoint = checkpoint.clone();
            let json = std::fs::read(path.join(&config)).unwrap();
            checkpoint.files.insert("config.json".into(), json.into());
            let own = config.replace("config.", "expected.").replace(".json", ".safetensors");
            // The spelling of transformers 4 has the same results as that of 5.
            let expected = if config == "config.v4.json" {
                "expected.safetensors".into()
            } else {
                own
            };
            cases.push(Case {
                folder: folder.clone(),
                config,
                expected,
                checkpoint,
            });
        }
    }
    assert!(
        folders.len() >= 7 && cases.len() > 2 * folders.len(),
        "the golden models are incomplete"
    );
    cases
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap().data().to_vec();
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn ids(file: &SafeTensors<'_>, name: &str) -> Vec<Vec<u32>> {
    let tensor = file.tensor(name).unwrap();
    let width = *tensor.shape().last().unwrap();
    let all: Vec<u32> = tensor
        .data()
        .chunks_exact(8)
        .map(|b| u32::try_from(i64::from_le_bytes(b.try_into().unwrap())).unwrap())
        .collect();
    all.chunks_exact(width).map(<[u32]>::to_vec).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // `f32::max` would ignore NaN
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.max_by(f32::total_cmp).unwrap_or(0.0)
}

/// Logits of every position of the sequences, one after the other.
fn score(model: &ExactModel, sequences: &[Vec<u32>]) -> (Vec<f32>, Routing) {
    let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    let rows: Vec<usize> = (0..sequences.iter().map(|ids| ids.len()).sum()).collect();
    let pass = model.score(&sequences, &rows, None).unwrap();
    (pass.logits.values().to_vec(), pass.routing)
}

fn log_probs(logits: &[f32], vocabulary: usize, sequences: &[Vec<u32>]) -> Vec<f32> {
    let mut rows = logits.chunks_exact(vocabulary);
    let mut all = Vec::new();
    for ids in sequences {
        for (t, row) in rows.by_ref().take(ids.len()).enumerate() {
            if let Some(&next) = ids.get(t + 1) {
                all.push(model::sampling::log_prob(row, 1.0, next));
            }
        }
    }
    all
}

#[test]
fn every_architecture_computes_what_transformers_computes() {
    println!(
        "\n| folder | configuration | max abs(logit − transformers), f32 | log-probability, f32 | logit, bf16 | of which bf16 explains | greedy |"
    );
    println!("|---|---|---|---|---|---|---|");
    for case in cases() {
        let model =
            ExactModel::from_checkpoint(&case.checkpoint).unwrap_or_else(|error| panic!("{}: {error}", case.name()));
        let bytes = case.expected();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let sequences = ids(&file, "ids");
        let (logits, routing) = score(&model, &sequences);
        let f32_logits = f32s(&file, "logits_f32");
        let vocabulary = model.config().vocab_size as usize;
        let far = distance(&logits, &f32_logits);
        let far_logprob = distance(
            &log_probs(&logits, vocabulary, &sequences),
            &f32s(&file, "logprobs_f32"),
        );
        let (mut bf16, mut greedy) = (String::new(), "");
        if let Ok(tensor) = file.tensor("logits_bf16") {
            let bf16_logits: Vec<f32> = match tensor.dtype() {
                safetensors::Dtype::F32 => f32s(&file, "logits_bf16"),
                _ => {
                    let pairs = tensor.data().chunks_exact(2);
                    pairs
                        .map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32())
                        .collect()
                }
            };
            let (ours, theirs) = (distance(&logits, &bf16_logits), distance(&f32_logits, &bf16_logits));
            bf16 = format!("{ours:.3} | {theirs:.3}");
            assert!(
                ours <= theirs + 2.0 * F32_MAX,
                "{}: {ours} from bf16, f32 is {theirs}",
                case.name()
            );
        }
        if file.tensor("greedy").is_ok() {
            let prompt = ids(&file, "prompt").concat();
            assert_eq!(
                continue_greedily(&model, &prompt, 12),
                ids(&file, "greedy").concat(),
                "{}",
                case.name()
            );
            greedy = "equal";
        }
        if file.tensor("experts").is_ok() {
            let recorded: Vec<u32> = routing
                .layers()
                .iter()
                .flat_map(|(_, experts)| experts.clone())
                .collect();
            assert_eq!(recorded, ids(&file, "experts").concat(), "{}", case.name());
        }
        println!(
            "| {} | {} | {far:.1e} | {far_logprob:.1e} | {bf16} | {greedy} |",
            case.folder, case.config
        );
        assert!(
            far <= LOGIT_MAX && far_logprob <= F32_MAX,
            "{}: {far:e}, {far_logprob:e}",
            case.name()
        );
    }
}

fn continue_greedily(model: &ExactModel, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut cache = KvCache::new(model, 1, prompt.len() + tokens);
    let mut logits = model.prefill(&mut cache, 0, prompt).unwrap();
    let mut continued = Vec::new();
    loop {
        let best = (0..logits.len())
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
            .unwrap();
        continued.push(best as u32);
        if continued.len() == tokens {
            return continued;
        }
        logits = model.decode(&mut cache, &[best as u32]).unwrap().swap_remove(0);
    }
}

#[test]
fn every_way_to_compute_a_token_gives_the_same_bits() {
    let heads: Vec<String> = WAYS.iter().map(|(name, _)| name.to_string()).collect();
    println!(
        "\nmax abs difference of logits to \"{}\" without vector instructions:",
        WAYS[0].0
    );
    println!(
        "\n| folder | products | instructions | threads | {} |",
        heads.join(" | ")
    );
    println!("|---|---|---|---|{}", "---|".repeat(WAYS.len()));
    let two = Threads::new(2).unwrap().eager();
    let mut machines: Vec<(Isa, &Threads)> = Isa::available().into_iter().map(|isa| (isa, &Threads::ONE)).collect();
    machines.push((Isa::best(), &two));
    let mut compared = 0;
    for case in cases().into_iter().filter(|case| case.config == "config.json") {
        let bytes = case.expected();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut sequences = ids(&file, "ids");
        // Other lengths, around a panel of 32 positions.
        sequences.push(sequences[0][..33].to_vec());
        sequences.push(sequences[1][..17].to_vec());
        for compute in [Compute::F32, Compute::Bf16] {
            let model = |isa: Isa, threads: &Threads| {
                let threads = threads.clone();
                ExactModel::with_arithmetic(
                    &case.checkpoint,
                    &Arithmetic {
                        compute,
                        threads,
                        quantized: None,
                    },
                )
                .unwrap()
                .with_isa(isa)
            };
            let reference = WAYS[0].1(&model(Isa::PORTABLE, &Threads::ONE), &sequences);
            for &(isa, threads) in &machines {
                let model = model(isa, threads);
                let differences: Vec<String> = WAYS
                    .iter()
                    .map(|(name, way)| {
                        let logits = way(&model, &sequences);
                        let far = distance(&logits, &reference);
                        let same = logits.iter().zip(&reference).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{} in {compute:?} on {isa:?}: {name} differs by {far:e}",
                            case.folder
                        );
                        compared += 1;
                        format!("{far:.1}")
                    })
                    .collect();
                let threads = threads.count();
                println!(
                    "| {} | {compute:?} | {isa:?} | {threads} | {} |",
                    case.folder,
                    differences.join(" | ")
                );
            }
        }
    }
    println!("\n{compared} comparisons, all equal to the bit");
}

#[test]
fn products_of_bf16_are_as_near_to_f32_as_transformers_in_bf16_is() {
    println!(
        "\n| folder | configuration | products of bf16 from f32: logit | log-probability | transformers in bf16 from f32: logit | ours from transformers, both bf16 | greedy tokens equal |"
    );
    println!("|---|---|---|---|---|---|---|");
    for case in cases() {
        let bytes = case.expected();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let Ok(tensor) = file.tensor("logits_bf16") else {
            continue;
        };
        let pairs = tensor.data().chunks_exact(2);
        let theirs: Vec<f32> = match tensor.dtype() {
            safetensors::Dtype::F32 => f32s(&file, "logits_bf16"),
            _ => pairs
                .map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32())
                .collect(),
        };
        let arithmetic = Arithmetic::new(Compute::Bf16, 1).unwrap();
        let model = ExactModel::with_arithmetic(&case.checkpoint, &arithmetic).unwrap();
        let sequences = ids(&file, "ids");
        let logits = score(&model, &sequences).0;
        let exact = f32s(&file, "logits_f32");
        let vocabulary = model.config().vocab_size as usize;
        let log_probability = distance(
            &log_probs(&logits, vocabulary, &sequences),
            &f32s(&file, "logprobs_f32"),
        );
        let (far, far_theirs) = (distance(&logits, &exact), distance(&theirs, &exact));
        let mut greedy = String::new();
        if file.tensor("greedy").is_ok() {
            let ours = continue_greedily(&model, &ids(&file, "prompt").concat(), 12);
            let wanted = ids(&file, "greedy").concat();
            let equal = ours.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
            greedy = format!("{equal} of {}", wanted.len());
        }
        println!(
            "| {} | {} | {far:.3} | {log_probability:.3} | {far_theirs:.3} | {:.3} | {greedy} |",
            case.folder,
            case.config,
            distance(&logits, &theirs),
        );
        assert!(far > 0.0 && far <= far_theirs, "{}: {far}, {far_theirs}", case.name());
    }
}

/// The checkpoint with every value of the tensors with this ending moved up or down at random.
fn nudged(checkpoint: &Checkpoint, ending: &str, by: f32) -> Checkpoint {
    let mut checkpoint = checkpoint.clone();
    let mut count = 0u32;
    for (_, tensor) in checkpoint.tensors.iter_mut().filter(|(name, _)| name.ends_with(ending)) {
        let mut nudge = |value: f32| {
            count = count.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            value + if count >> 31 == 0 { by } else { -by }
        };
        let bytes: Vec<u8> = match tensor.dtype {
            safetensors::Dtype::F32 => {
                let values = tensor
                    .bytes
                    .chunks_exact(4)
                    .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                values.flat_map(|value| nudge(value).to_le_bytes()).collect()
            }
            _ => {
                let values = tensor
                    .bytes
                    .chunks_exact(2)
                    .map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()));
                values
                    .flat_map(|value| half::bf16::from_f32(nudge(value.to_f32())).to_le_bytes())
                    .collect()
            }
        };
        tensor.bytes = bytes.into();
    }
    checkpoint
}

#[test]
fn a_replay_of_the_experts_removes_the_effect_of_another_choice() {
    // DeepSeek's choice has a bias of its own, which changes nothing but the choice. Qwen's choice
    // changes only with the router's weights, which also weight the experts. A replay keeps that
    // second effect.
    for (folder, ending, by, exact) in [
        ("deepseek_v3", "e_score_correction_bias", 0.1, true),
        ("qwen3_moe", "mlp.gate.weight", 0.05, false),
    ] {
        let checkpoint = Checkpoint::read_dir(&golden().join(folder)).unwrap();
        let bytes = std::fs::read(golden().join(folder).join("expected.safetensors")).unwrap();
        let sequences = ids(&SafeTensors::deserialize(&bytes).unwrap(), "ids");
        let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
        let (logits, routing) = score(&model, &sequences);
        let other = ExactModel::from_checkpoint(&nudged(&checkpoint, ending, by)).unwrap();
        let refs: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let rows: Vec<usize> = (0..refs.iter().map(|ids| ids.len()).sum()).collect();
        let free = other.score(&refs, &rows, None).unwrap();
        let replayed = other.score(&refs, &rows, Some(&routing)).unwrap();
        assert!(
            free.routing != routing && replayed.routing == routing,
            "{folder}: some choice moves"
        );
        let without = distance(free.logits.values(), &logits);
        let with = distance(replayed.logits.values(), &logits);
        println!("{folder}: logits differ by {without:.3} without replay, by {with:.3} with it");
        assert!(
            if exact {
                with == 0.0 && without > 0.1
            } else {
                with < without
            },
            "{folder}: {with}, {without}"
        );
        // If the choice is the same, a replay changes nothing.
        let again = model.score(&refs, &rows, Some(&routing)).unwrap();
        assert_eq!(again.logits.values(), logits);
        // A recording of other rows is refused.
        let short = score(&model, &sequences[..1]).1;
        let error = model.score(&refs, &rows, Some(&short)).unwrap_err().to_string();
        assert!(error.contains("choices is next"), "{error}");
    }
}
