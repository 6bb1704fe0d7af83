//! A model that was trained, saved and read again equals its version, for all weights and adapters.
//!
//! With `SPRINGTIDE_SAVED=DIR` the folders and the engine's answers stay in DIR. `make check NAME=saved`
//! compares them with `transformers` and PEFT.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use artifact::checkpoint::Checkpoint;
use artifact::tensor::TensorData;
use model::exact::{ExactModel, KvCache};
use model::lora::{Adapter, Config};
use model::sampling::{Params, Source, sample};
use runs::publish::run_state::StepRecord;
use runs::sample::Sample;
use runs::settings::{Limits, OptimizerSettings, StepSettings};
use safetensors::Dtype;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use text::tokenizer::Tokenizer;
use trainer::learn::learner::{Learner, Outcome};
use uuid::Uuid;

const PROMPTS: [&str; 8] = [
    "use std::collections::HashMap;\n\nfn main() {\n    let mut map = HashMap::<|cut|>",
    "impl Default for Options {\n    fn default() <|cut|>",
    "    /// Returns the number of elements.\n    pub fn len(&self) -> <|cut|>",
    "#[derive(Debug, Clone, <|cut|>",
    "    match self {\n        Some(value) => <|cut|>",
    "pub struct Error {\n    kind: ErrorKind,\n}\n\nimpl std::fmt::<|cut|>",
    "fn read(path: &Path) -> io::Result<Vec<u8>> {\n    let mut file = File::<|cut|>",
    "#[cfg(test)]\nmod tests {\n    use <|cut|>",
];
const STEPS: i64 = 4;
const GREEDY_TOKENS: usize = 16;

fn demo_base() -> Checkpoint {
    Checkpoint::read_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/models/base")).unwrap()
}

/// The same values as f32, so that a merged adapter and a separate one differ by no rounding.
fn in_f32(mut checkpoint: Checkpoint) -> Checkpoint {
    for tensor in checkpoint.tensors.values_mut() {
        let wide = |b: &[u8]| (u32::from(u16::from_le_bytes([b[0], b[1]])) << 16).to_le_bytes();
        let bytes: Vec<u8> = tensor.bytes.chunks_exact(2).flat_map(wide).collect();
        *tensor = TensorData::new(Dtype::F32, tensor.shape.clone(), bytes).unwrap();
    }
    let config = String::from_utf8(checkpoint.files["config.json"].to_vec()).unwrap();
    let config = config.replace("\"bfloat16\"", "\"float32\"");
    checkpoint.files.insert("config.json".into(), config.into());
    checkpoint
}

/// Writes folders into a directory that is kept or temporary.
struct Shelf {
    root: PathBuf,
    _temporary: Option<tempfile::TempDir>,
}

impl Shelf {
    fn new(name: &str) -> Self {
        match std::env::var_os("SPRINGTIDE_SAVED") {
            Some(folder) => Shelf {
                root: Path::new(&folder).join(name),
                _temporary: None,
            },
            None => {
                let temporary = tempfile::tempdir().unwrap();
                Shelf {
                    root: temporary.path().join(name),
                    _temporary: Some(temporary),
                }
            }
        }
    }
}

fn prompts(checkpoint: &Checkpoint) -> Vec<Vec<u32>> {
    let tokenizer = Tokenizer::from_checkpoint(checkpoint).unwrap();
    let ids = PROMPTS.iter().map(|prompt| tokenizer.encode_prompt(prompt));
    ids.collect::<Result<_, _>>().unwrap()
}

/// Continues a prompt with the tokens that `next` chooses from the logits.
fn continued(model: &ExactModel, prompt: &[u32], tokens: usize, mut next: impl FnMut(&[f32]) -> u32) -> Vec<u32> {
    let mut cache = KvCache::new(model, 1, prompt.len() + tokens);
    let mut logits = model.prefill(&mut cache, 0, prompt).unwrap();
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let id = next(&logits);
        ids.push(id);
        logits = model.decode(&mut cache, &[id]).unwrap().swap_remove(0);
    }
    ids
}

/// Four steps on samples of the learner's own versions. Tokens with an even id are rewarded.
fn train(learner: &mut Learner, learning_rate: f64) {
    let settings = StepSettings {
        optimizer: OptimizerSettings {
            learning_rate,
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    };
    for step in 0..STEPS {
        let model = ExactModel::from_checkpoint(learner.checkpoint()).unwrap();
        let prompts = prompts(learner.checkpoint());
        let samples: Vec<Sample> = (0u128..)
            .zip(&prompts)
            .map(|(i, prompt)| {
                let mut source = Source::new(step as u64 * 100 + i as u64);
                let mut logprobs = Vec::new();
                let tokens = continued(&model, prompt, 6, |logits| {
                    let (id, logprob) = sample(logits, &Params::default(), &mut source);
                    logprobs.push(logprob);
                    id
                });
                let even = tokens.iter().filter(|&&id| id % 2 == 0).count();
                Sample {
                    generation: Uuid::from_u128(i),
                    tenant: "default".into(),
                    user: "u".into(),
                    replica: "r".into(),
                    engine: None,
                    class: "completion".into(),
                    group: None,
                    turn: None,
                    version: 1,
                    staleness: 0,
                    prompt: prompt.clone(),
                    mask: vec![true; tokens.len()],
                    tokens,
                    logprobs,
                    temperature: 1.0,
                    behavior: None,
                    experts: None,
                    reward: even as f64 / 3.0 - 1.0,
                    kept: None,
                    typed: None,
                    suppressed: false,
                    weight: 1.0,
                }
            })
            .collect();
        let rewards: Vec<f64> = samples.iter().map(|s| s.reward).collect();
        let outcome = learner
            .propose(&samples, &rewards, &settings, &Limits::default())
            .unwrap();
        let Outcome::Proposed(proposal) = outcome else {
            panic!("a guard refused the step");
        };
        assert_eq!(proposal.metrics.mismatch.difference_max, 0.0);
        assert!(proposal.metrics.changed_weights > 0);
        learner.accept();
    }
}

/// Saves the version, reads it back, and records its answers.
fn save(checkpoint: &Checkpoint, shelf: &Shelf) {
    let folder = shelf.root.join("model");
    checkpoint.write_dir(&folder).unwrap();
    let again = Checkpoint::read_dir(&folder).unwrap();
    assert_eq!(again.root(), checkpoint.root());
    let model = ExactModel::from_checkpoint(&again).unwrap();
    let answers: Vec<serde_json::Value> = PROMPTS
        .iter()
        .zip(prompts(&again))
        .map(|(prompt, ids)| {
            let rows: Vec<usize> = (0..ids.len()).collect();
            let logits = model.score(&[&ids], &rows, None).unwrap().logits;
            let greedy = continued(&model, &ids, GREEDY_TOKENS, |logits| {
                let params = Params {
                    temperature: 0.0,
                    ..Params::default()
                };
                sample(logits, &params, &mut Source::new(0)).0
            });
            let logits: Vec<&[f32]> = logits.rows().collect();
            json!({"prompt": prompt, "ids": ids, "greedy": greedy, "logits": logits})
        })
        .collect();
    std::fs::write(shelf.root.join("answers.json"), serde_json::to_vec(&answers).unwrap()).unwrap();
}

fn save_adapter(base: &Checkpoint, config: &Config, name: &str) {
    let shelf = Shelf::new(name);
    let mut learner = Learner::with_lora(
        Arc::new(base.clone()),
        model::exact::Arithmetic::default(),
        (1, None),
        config,
        7,
    )
    .unwrap();
    train(&mut learner, 2e-3);
    let version = model::lora::merged(learner.checkpoint()).unwrap();
    save(&version, &shelf);
    base.write_dir(&shelf.root.join("base")).unwrap();
    let record = StepRecord {
        run: Uuid::nil(),
        step: STEPS,
        cohort: vec![],
        dropped: Default::default(),
        typed: Default::default(),
        lease: None,
        baselines: Default::default(),
        metrics: serde_json::Value::Null,
    };
    let adapter = learner.run_state(record, 0).adapter().unwrap().unwrap();
    let folder = shelf.root.join("adapter");
    adapter.write_dir(&folder).unwrap();
    let merged = Adapter::read_dir(&folder).unwrap().merge(base).unwrap();
    assert_eq!(merged.root(), version.root());
}

#[test]
fn a_model_that_was_trained_and_saved_is_read_back_as_the_version() {
    let shelf = Shelf::new("all_weights");
    let mut learner = Learner::from_checkpoint(Arc::new(demo_base())).unwrap();
    train(&mut learner, 3e-4);
    save(learner.checkpoint(), &shelf);
}

#[test]
fn an_adapter_that_was_trained_and_saved_is_the_version_once_it_is_merged() {
    let rslora = Config {
        r: 4,
        lora_alpha: 8.0,
        use_rslora: true,
        ..Config::default()
    };
    save_adapter(&demo_base(), &Config::default(), "adapter_bf16");
    save_adapter(&in_f32(demo_base()), &rslora, "adapter_f32");
}
