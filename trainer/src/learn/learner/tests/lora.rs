//! Adapters: which weights are trained, and that exactness holds.

use super::*;
use artifact::manifest::Parent;
use model::lora::{Adapter, Config, Targets};

const SERIAL: i64 = 5;

fn config() -> Config {
    Config {
        r: 3,
        lora_alpha: 6.0,
        use_rslora: true,
        target_modules: Targets::Names(vec!["q_proj".into(), "layers.1.mlp.down_proj".into()]),
        ..Config::default()
    }
}

const ADAPTED: [&str; 3] = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
];

fn adapting(seed: u64) -> Learner {
    let base = Arc::new(random_checkpoint(&tiny(), seed));
    Learner::with_lora(base, Arithmetic::default(), (SERIAL, None), &config(), seed).unwrap()
}

fn fast() -> StepSettings {
    StepSettings {
        optimizer: OptimizerSettings {
            learning_rate: 2e-2,
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    }
}

fn step(learner: &mut Learner) -> Proposal {
    let cohort = samples(learner, 12);
    let proposal = propose(learner, &cohort, &fast());
    assert_eq!(
        proposal.metrics.mismatch.difference_max, 0.0,
        "sampler and trainer compute the same bits"
    );
    proposal
}

#[test]
fn a_step_of_an_adapter_raises_rewarded_tokens_and_changes_only_adapted_matrices() {
    let mut learner = adapting(21);
    let base = Arc::clone(learner.checkpoint());
    let cohort = samples(&learner, 12);
    let gain = |learner: &Learner| -> f64 {
        let single = |s: &Sample| batch::pack(std::slice::from_ref(s), &[0.0], 1).unwrap().swap_remove(0);
        let _no_grad = tch::no_grad_guard();
        let logp = |s: &Sample| {
            at_targets(&distribution(learner, &single(s)), &single(s))
                .sum(Kind::Double)
                .double_value(&[])
        };
        cohort.iter().map(|s| s.reward.signum() * logp(s)).sum()
    };
    let before = gain(&learner);
    for _ in 0..4 {
        let proposal = step(&mut learner);
        assert!(proposal.metrics.changed_weights > 0 && proposal.metrics.gradient_norm > 0.0);
        learner.accept();
    }
    assert!(gain(&learner) > before + 0.1, "{before} to {}", gain(&learner));
    let merged = model::lora::merged(learner.checkpoint()).unwrap();
    let changed: Vec<&str> = merged
        .tensors
        .iter()
        .filter(|(name, tensor)| base.tensors[*name] != **tensor)
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(changed, ADAPTED);
}

#[test]
fn an_adapter_saved_and_merged_into_its_base_equals_the_version() {
    let mut learner = adapting(22);
    let base = Arc::clone(learner.checkpoint());
    for _ in 0..2 {
        step(&mut learner);
        learner.accept();
    }
    let run_state = learner.run_state(record(), 0);
    let identity = run_state.lora.as_ref().unwrap();
    assert_eq!((identity.base, identity.base_root), (SERIAL, base.root()));
    let folder = tempfile::tempdir().unwrap();
    run_state.adapter().unwrap().unwrap().write_dir(folder.path()).unwrap();
    let merged = Adapter::read_dir(folder.path()).unwrap().merge(&base).unwrap();
    assert_eq!(merged.root(), model::lora::merged(learner.checkpoint()).unwrap().root());
}

#[test]
fn without_a_run_state_an_adapter_goes_on_from_the_factors_of_its_version() {
    let mut learner = adapting(26);
    let base = Arc::clone(learner.checkpoint());
    step(&mut learner);
    learner.accept();
    let head = Arc::clone(learner.checkpoint());
    let of = Parent {
        version: SERIAL,
        root: base.root(),
    };
    let from = |config: &Config| {
        let head = Arc::clone(&head);
        Learner::with_lora(head, Arithmetic::default(), (SERIAL + 1, Some(of)), config, 99).unwrap()
    };
    let mut again = from(&config());
    let proposal = step(&mut again);
    assert_eq!(proposal.adapts, Some(of));
    assert_eq!(again.run_state(record(), 0).lora.unwrap().base, SERIAL);
    let settings = Config {
        r: config().r + 1,
        ..config()
    };
    // other settings: the head is merged, and its versions have all weights
    let mut other = from(&settings);
    assert_eq!(step(&mut other).adapts, None);
}

#[test]
fn a_run_of_an_adapter_resumed_from_its_run_state_makes_the_same_bytes() {
    let mut straight = adapting(23);
    let base = Arc::clone(straight.checkpoint());
    step(&mut straight);
    let bytes = straight.run_state(record(), 7).encode().unwrap().bytes;
    straight.accept();
    let run_state = RunState::from_bytes(&bytes, None).unwrap();
    let checkpoint = Arc::clone(straight.checkpoint());
    let mut resumed = Learner::restore(checkpoint, Arithmetic::default(), &run_state, Some(Arc::clone(&base))).unwrap();
    for _ in 0..3 {
        let (a, b) = (step(&mut straight), step(&mut resumed));
        assert_eq!(a.checkpoint.root(), b.checkpoint.root());
        straight.accept();
        resumed.accept();
    }
    let (a, b) = (straight.run_state(record(), 7), resumed.run_state(record(), 7));
    assert!(a == b, "factors or moments differ");
}

#[test]
fn a_run_state_of_an_adapter_needs_the_base_that_it_names() {
    let mut learner = adapting(24);
    step(&mut learner);
    let run_state = learner.run_state(record(), 0);
    learner.accept();
    let checkpoint = Arc::clone(learner.checkpoint());
    let restore = |base| {
        let restored = Learner::restore(Arc::clone(&checkpoint), Arithmetic::default(), &run_state, base);
        format!("{:#}", restored.unwrap_err())
    };
    assert!(restore(None).contains("version 5"), "{}", restore(None));
    let error = restore(Some(Arc::new(random_checkpoint(&tiny(), 25))));
    assert!(error.contains("trained on"), "{error}");
}

#[test]
fn a_discarded_step_of_an_adapter_leaves_no_trace() {
    let (mut one, mut other) = (adapting(26), adapting(26));
    let first = step(&mut one);
    one.discard().unwrap();
    assert_eq!(one.checkpoint().root(), first.parent.root());
    assert_eq!(step(&mut one).checkpoint.root(), step(&mut other).checkpoint.root());
}

#[test]
fn gradients_of_the_factors_equal_those_of_autograd_through_base_plus_product() {
    let mut learner = adapting(27);
    step(&mut learner); // B is no longer zero, so A has a gradient
    learner.accept();
    let cohort = samples(&learner, 6);
    let advantages = rewards(&cohort);
    learner.accumulate(&cohort, &advantages, &fast(), &limits()).unwrap();
    let got = learner.take_gradients(1.0).unwrap();

    // the same loss by libtorch alone, W = W₀ + s · B · A at the published values
    let base = TrainModel::from_checkpoint(&random_checkpoint(&tiny(), 27)).unwrap();
    let published = TrainModel::from_checkpoint(learner.checkpoint()).unwrap();
    let factors = autograd::require_grad(&learner.state.master);
    let scale = 6.0 / 3f64.sqrt();
    let parameters: Parameters = base
        .parameters()
        .iter()
        .map(|(name, w0)| {
            let module = name.trim_end_matches(".weight");
            let weight = match factors.get(&format!("{module}.lora_A.weight")) {
                None => w0.copy(),
                Some(a) => {
                    let sum = w0 + factors[&format!("{module}.lora_B.weight")].matmul(a) * scale;
                    let rounded = &published.parameters()[name];
                    let off = (&sum - rounded).abs().max().double_value(&[]);
                    assert!(off < 1e-3, "{name}: {off} from the published value");
                    &sum - sum.detach() + rounded
                }
            };
            (name.clone(), weight)
        })
        .collect();
    let train_model = TrainModel::from_parameters(base.config().clone(), parameters).unwrap();
    let mut loss = Tensor::from(0f32);
    for (sample, advantage) in cohort.iter().zip(&advantages) {
        let ids: Vec<i64> = sample
            .prompt
            .iter()
            .chain(&sample.tokens)
            .map(|&id| i64::from(id))
            .collect();
        let (n, from) = (ids.len() as i64, sample.prompt.len() as i64 - 1);
        let logits = train_model.logits(&Tensor::from_slice(&ids[..ids.len() - 1]).unsqueeze(0));
        let targets = Tensor::from_slice(&ids[1..]).unsqueeze(0);
        let logp = TrainModel::token_logprobs(&logits, &targets, f64::from(sample.temperature));
        loss -= logp.narrow(1, from, n - 1 - from).sum(Kind::Float) * *advantage;
    }
    loss.backward();
    assert_eq!(got.keys().collect::<Vec<_>>(), factors.keys().collect::<Vec<_>>());
    for (name, factor) in &factors {
        let want = factor.grad();
        let scale = want.abs().max().double_value(&[]);
        let apart = (&got[name] - want).abs().max().double_value(&[]);
        assert!(scale > 1e-4 && apart < 1e-4 * scale, "{name}: {apart} of {scale}");
    }
}

#[test]
fn an_unknown_target_module_is_refused_and_the_error_lists_the_known_ones() {
    let nowhere = Config {
        target_modules: Targets::Names(vec!["c_attn".into()]),
        ..Config::default()
    };
    let base = Arc::new(random_checkpoint(&tiny(), 1));
    let error = Learner::with_lora(base, Arithmetic::default(), (SERIAL, None), &nowhere, 1)
        .unwrap_err()
        .to_string();
    assert!(error.contains("c_attn") && error.contains("q_proj"), "{error}");
}
