//! The learner on small models. More than 500 lines, because all cases share the sample helpers at
//! the top.

use super::*;
use model::config::{Family, ModelConfig};
use model::exact::{Compute, KvCache};
use model::random_checkpoint;
use model::sampling::{self, Params, PreviousTokens, Source};
use runs::publish::run_state::{RunState, StepRecord};
use runs::sample::Behavior;
use runs::settings::{Loss, OptimizerSettings};
use uuid::Uuid;

mod engines;
mod episodes;
mod experts;
mod grammar;
mod lora;
mod threads;

pub(crate) fn tiny() -> ModelConfig {
    ModelConfig {
        vocab_size: 61,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}

/// Some tests compute log-probabilities with libtorch, so the bound is not 0.
fn limits() -> Limits {
    Limits {
        difference_max: 0.01,
        ..Limits::default()
    }
}

fn learner(seed: u64) -> Learner {
    Learner::from_checkpoint(Arc::new(random_checkpoint(&tiny(), seed))).unwrap()
}

/// Samples whose logged log-probabilities are those of the learner's own model.
fn samples(learner: &Learner, n: u32) -> Vec<Sample> {
    let mut samples: Vec<Sample> = (0..n)
        .map(|i| {
            let id = |j: u32| (i * 17 + j * 7 + 3) % 61;
            let tokens: Vec<u32> = (20..22 + i % 4).map(id).collect();
            Sample {
                generation: Uuid::from_u128(u128::from(i) + 1),
                tenant: "default".into(),
                user: "u".into(),
                replica: "r".into(),
                engine: None,
                class: "completion".into(),
                group: None,
                turn: None,
                version: 1,
                staleness: 0,
                prompt: (0..3 + i % 5).map(id).collect(),
                logprobs: vec![0.0; tokens.len()],
                mask: vec![true; tokens.len()],
                tokens,
                temperature: 0.8,
                behavior: None,
                experts: None,
                reward: if i % 3 == 0 { 0.75 } else { -0.25 },
                kept: None,
                typed: None,
                suppressed: false,
                weight: 1.0,
            }
        })
        .collect();
    let _no_grad = tch::no_grad_guard();
    for sample in &mut samples {
        let single = batch::pack(std::slice::from_ref(sample), &[0.0], 1).unwrap();
        let logits = score(&learner.state.model, &single[0], None).unwrap().logits;
        sample.logprobs = behavior::log_behavior(&logits, &single[0], None);
    }
    samples
}

fn distribution(learner: &Learner, batch: &MicroBatch) -> Tensor {
    log_softmax(
        &autograd::tensor(&score(&learner.state.model, batch, None).unwrap().logits),
        batch,
        None,
    )
}

fn rewards(samples: &[Sample]) -> Vec<f64> {
    samples.iter().map(|s| s.reward).collect()
}

fn propose(learner: &mut Learner, samples: &[Sample], settings: &StepSettings) -> Proposal {
    match learner
        .propose(samples, &rewards(samples), settings, &limits())
        .unwrap()
    {
        Outcome::Proposed(proposal) => proposal,
        other => panic!("no step: {other:?}"),
    }
}

fn record() -> StepRecord {
    StepRecord {
        run: Uuid::nil(),
        step: 1,
        cohort: vec![],
        dropped: Default::default(),
        typed: Default::default(),
        lease: None,
        baselines: Default::default(),
        metrics: serde_json::Value::Null,
    }
}

#[test]
fn a_step_raises_the_probability_of_rewarded_tokens_and_lowers_the_others() {
    let mut learner = learner(1);
    let samples = samples(&learner, 12);
    let logp = |learner: &Learner, s: &Sample| {
        let single = batch::pack(std::slice::from_ref(s), &[0.0], 1).unwrap();
        let _no_grad = tch::no_grad_guard();
        at_targets(&distribution(learner, &single[0]), &single[0])
            .sum(Kind::Double)
            .double_value(&[])
    };
    let before: Vec<f64> = samples.iter().map(|s| logp(&learner, s)).collect();
    let settings = StepSettings {
        optimizer: OptimizerSettings {
            learning_rate: 1e-3,
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    };
    let proposal = propose(&mut learner, &samples, &settings);
    assert_eq!(proposal.metrics.mismatch.difference_max, 0.0);
    assert!(proposal.metrics.kl > 0.0 && proposal.metrics.changed_weights > 0);
    learner.accept();
    let gain: f64 = samples
        .iter()
        .zip(&before)
        .map(|(s, before)| s.reward.signum() * (logp(&learner, s) - before))
        .sum();
    assert!(gain > 0.0, "{gain}");
}

/// Samples drawn with `params` from the learner's own model, as serving does.
fn drawn(learner: &Learner, params: &Params, n: u64) -> Vec<Sample> {
    let mut samples = samples(learner, n as u32);
    for (seed, sample) in (0..n).zip(&mut samples) {
        let mut cache = KvCache::new(&learner.state.model, 1, 64);
        let mut logits = learner.state.model.prefill(&mut cache, 0, &sample.prompt).unwrap();
        let (mut history, mut source) = (PreviousTokens::new(&sample.prompt), Source::new(seed));
        let mut candidates = Vec::new();
        for at in 0..sample.tokens.len() {
            let drawn = sampling::draw(&logits, params, &history, &mut source);
            (sample.tokens[at], sample.logprobs[at]) = (drawn.id, drawn.log_prob);
            candidates.push(drawn.candidates);
            history.push(drawn.id);
            logits = learner
                .state
                .model
                .decode(&mut cache, &[drawn.id])
                .unwrap()
                .swap_remove(0);
        }
        sample.temperature = params.temperature;
        let candidates = (seed % 2 == 0).then_some(candidates); // some requests log it, some do not
        sample.behavior = Some(Arc::new(Behavior {
            params: params.clone(),
            candidates,
            masks: None,
        }));
    }
    samples
}

#[test]
fn sampling_parameters_are_applied_before_log_probabilities_are_taken() {
    let mut learner = learner(3);
    let params = Params {
        temperature: 0.9,
        top_p: 0.9,
        top_k: 20,
        min_p: 0.05,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        logit_bias: [(5, -4.0), (7, 2.0)].into(),
    };
    let samples = drawn(&learner, &params, 12);
    let settings = StepSettings {
        optimizer: OptimizerSettings {
            learning_rate: 1e-3,
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    };
    let metrics = propose(&mut learner, &samples, &settings).metrics;
    assert_eq!(metrics.mismatch.difference_max, 0.0);
    assert!(
        (metrics.mismatch.weight_mean - 1.0).abs() < 1e-5,
        "{:?}",
        metrics.mismatch
    );
    assert!(
        metrics.kl > 0.0 && metrics.kl.is_finite() && metrics.entropy > 0.0,
        "{metrics:?}"
    );

    // without their parameters, the same samples have other probabilities
    learner.discard().unwrap();
    let plain: Vec<Sample> = samples
        .iter()
        .cloned()
        .map(|sample| Sample {
            behavior: None,
            ..sample
        })
        .collect();
    let limits = Limits {
        difference_max: f64::INFINITY,
        kl_max: f64::INFINITY,
        ..Limits::default()
    };
    let outcome = learner.propose(&plain, &rewards(&plain), &settings, &limits).unwrap();
    let Outcome::Proposed(proposal) = outcome else {
        panic!("refused")
    };
    assert!(proposal.metrics.mismatch.difference_max > 0.1);
}

#[test]
fn the_only_token_that_could_be_sampled_has_no_gradient() {
    let mut learner = learner(3);
    let params = Params {
        top_k: 1,
        ..Params::default()
    };
    let samples = drawn(&learner, &params, 4);
    assert!(
        samples
            .iter()
            .all(|sample| sample.logprobs.iter().all(|&logprob| logprob == 0.0))
    );
    let outcome = learner.propose(
        &samples,
        &rewards(&samples),
        &StepSettings::default(),
        &Limits::default(),
    );
    let Outcome::Empty(metrics) = outcome.unwrap() else {
        panic!("a step without a gradient");
    };
    assert_eq!(
        (metrics.gradient_norm, metrics.entropy, metrics.mismatch.difference_max),
        (0.0, 0.0, 0.0)
    );
}

#[test]
fn explored_samples_are_recomputed_with_the_decline_token_masked_and_have_a_smaller_weight() {
    let mut checkpoint = random_checkpoint(&tiny(), 12);
    let config = r#"{"springtide_decline_token_id": 9}"#;
    checkpoint.files.insert("generation_config.json".into(), config.into());
    let mut learner = Learner::from_checkpoint(Arc::new(checkpoint)).unwrap();
    let mut cohort = samples(&learner, 6);
    for sample in cohort.iter_mut().step_by(2) {
        sample.suppressed = true;
        sample.tokens.retain(|&id| id != 9);
        sample.mask.truncate(sample.tokens.len());
        let single = batch::pack(std::slice::from_ref(sample), &[0.0], 1).unwrap();
        let _no_grad = tch::no_grad_guard();
        let distribution = distribution(&learner, &single[0]);
        // log π(a) − log(1 − π(d)), worked out in f64
        sample.logprobs = (0i64..)
            .zip(&sample.tokens)
            .map(|(row, &id)| {
                let decline = distribution.double_value(&[row, 9]).exp();
                (distribution.double_value(&[row, i64::from(id)]) - (1.0 - decline).ln()) as f32
            })
            .collect();
    }
    let metrics = propose(&mut learner, &cohort, &StepSettings::default()).metrics;
    assert_eq!((metrics.sequences, metrics.explored), (6, 3));
    assert!(metrics.mismatch.difference_max < 1e-5, "{:?}", metrics.mismatch);
    // part of the probability was on declining
    assert!(metrics.mismatch.weight_mean < 0.9999, "{:?}", metrics.mismatch);

    // without the flag, the same samples are rejected
    cohort.iter_mut().for_each(|sample| sample.suppressed = false);
    learner.discard().unwrap();
    let checked = learner.accumulate(&cohort, &rewards(&cohort), &StepSettings::default(), &limits());
    let rejected: Vec<usize> = checked
        .unwrap()
        .rejected
        .iter()
        .map(|rejected| rejected.index)
        .collect();
    assert_eq!(rejected, [0, 2, 4]);
}

#[test]
fn the_size_of_micro_batches_does_not_change_the_step() {
    let settings = |tokens| StepSettings {
        micro_batch_tokens: tokens,
        ..StepSettings::default()
    };
    let (mut large, mut small) = (learner(2), learner(2));
    let samples = samples(&large, 9);
    let a = propose(&mut large, &samples, &settings(4096)).metrics;
    let b = propose(&mut small, &samples, &settings(16)).metrics;
    assert!((a.loss - b.loss).abs() < 1e-5 * a.loss.abs().max(1.0));
    assert!((a.gradient_norm - b.gradient_norm).abs() < 1e-4 * a.gradient_norm);
    assert!((a.entropy - b.entropy).abs() < 1e-5);
    assert_eq!(a.tokens, b.mismatch.tokens);
}

#[test]
fn bf16_has_exact_parity_too_and_a_gradient_close_to_that_of_f32() {
    let checkpoint = Arc::new(random_checkpoint(&tiny(), 2));
    let arithmetic = Arithmetic::new(Compute::Bf16, 2).unwrap();
    let mut rounded = Learner::with_arithmetic(Arc::clone(&checkpoint), arithmetic).unwrap();
    let mut plain = Learner::from_checkpoint(checkpoint).unwrap();
    let cohort = samples(&rounded, 9);
    let settings = StepSettings::default();
    let step = propose(&mut rounded, &cohort, &settings).metrics;
    assert_eq!(step.mismatch.difference_max, 0.0);
    let logged = samples(&plain, 9);
    let other = propose(&mut plain, &logged, &settings).metrics;
    let far = (step.gradient_norm - other.gradient_norm).abs() / other.gradient_norm;
    assert!(far < 0.02, "{far}");
    // sampling in f32 and training in bf16 shows as a mismatch
    rounded.discard().unwrap();
    let mixed = propose(&mut rounded, &logged, &settings).metrics;
    assert!(mixed.mismatch.difference_max > 0.0);
}

/// Like [`propose`], but samples join in parts.
fn accumulate(learner: &mut Learner, parts: &[&[Sample]], settings: &StepSettings) -> Proposal {
    for part in parts {
        let checked = learner.accumulate(part, &rewards(part), settings, &limits());
        assert_eq!(checked.unwrap().rejected, []);
    }
    match learner.finish(settings, &Limits::default()).unwrap() {
        Outcome::Proposed(proposal) => proposal,
        other => panic!("no step: {other:?}"),
    }
}

fn master(learner: &Learner) -> Vec<f32> {
    let pending = learner.pending.as_ref().unwrap();
    pending.master.values().flat_map(to_vec).collect()
}

#[test]
fn accumulating_the_same_micro_batches_makes_the_same_bits() {
    let (mut at_once, mut in_parts) = (learner(10), learner(10));
    let one_sample_each = StepSettings {
        micro_batch_tokens: 1,
        ..StepSettings::default()
    };
    for _ in 0..2 {
        let mut cohort = samples(&at_once, 9);
        cohort.sort_by_key(|s| std::cmp::Reverse(s.input_len())); // the order of packing a whole cohort
        let a = propose(&mut at_once, &cohort, &one_sample_each);
        let b = accumulate(&mut in_parts, &cohort.chunks(1).collect::<Vec<_>>(), &one_sample_each);
        assert_eq!(a.checkpoint.root(), b.checkpoint.root());
        let timeless = |metrics| Metrics {
            seconds: 0.0,
            guard_seconds: 0.0,
            ..metrics
        };
        assert_eq!(timeless(a.metrics), timeless(b.metrics));
        assert!(at_once.run_state(record(), 0) == in_parts.run_state(record(), 0));
        at_once.accept();
        in_parts.accept();
    }
}

#[test]
fn accumulating_in_any_order_makes_the_same_step_up_to_rounding() {
    let settings = StepSettings {
        optimizer: OptimizerSettings {
            epsilon: 1e-3, // else Adam's first step is the gradient's sign, which rounding can flip
            ..OptimizerSettings::default()
        },
        ..StepSettings::default()
    };
    let (mut at_once, mut in_parts) = (learner(11), learner(11));
    let mut cohort = samples(&at_once, 9);
    let a = propose(&mut at_once, &cohort, &settings).metrics;
    cohort.reverse();
    let b = accumulate(&mut in_parts, &[&cohort[..2], &cohort[2..3], &cohort[3..]], &settings).metrics;
    assert!((a.gradient_norm - b.gradient_norm).abs() < 1e-6 * a.gradient_norm);
    assert!((a.loss - b.loss).abs() < 1e-6);
    let difference = master(&at_once)
        .into_iter()
        .zip(master(&in_parts))
        .map(|(a, b)| (a - b).abs());
    assert!(difference.max_by(f32::total_cmp).unwrap() < 1e-6);
}

#[test]
fn samples_with_zero_advantage_skip_the_backward_pass_and_change_nothing() {
    let (mut skipped, mut run) = (learner(12), learner(12));
    let mut cohort = samples(&skipped, 9);
    for sample in cohort.iter_mut().step_by(3) {
        sample.reward = 0.0;
    }
    // a tiny advantage takes the backward pass and adds nothing
    let nearly: Vec<f64> = rewards(&cohort)
        .iter()
        .map(|&r| if r == 0.0 { 1e-30 } else { r })
        .collect();
    let settings = StepSettings::default();
    skipped
        .accumulate(&cohort, &rewards(&cohort), &settings, &limits())
        .unwrap();
    run.accumulate(&cohort, &nearly, &settings, &limits()).unwrap();
    let (a, b) = (skipped.take_gradients(1.0).unwrap(), run.take_gradients(1.0).unwrap());
    let length = optimizer::norm(&a);
    let apart: Parameters = a.iter().map(|(name, a)| (name.clone(), a - &b[name])).collect();
    assert!(length > 0.1 && optimizer::norm(&apart) < 1e-6 * length);

    skipped.discard().unwrap();
    let metrics = propose(&mut skipped, &cohort, &settings).metrics;
    assert_eq!((metrics.sequences, metrics.without_gradient), (9, 3));
    assert_eq!(metrics.mismatch.tokens, metrics.tokens, "parity holds for every token");
}

#[test]
fn a_cohort_without_any_gradient_changes_nothing_although_the_moments_are_warm() {
    let mut learner = learner(13);
    let settings = StepSettings::default();
    for _ in 0..3 {
        let cohort = samples(&learner, 6);
        propose(&mut learner, &cohort, &settings);
        learner.accept();
    }
    let root = learner.checkpoint().root();
    let steps = learner.state.optimizer.step;
    let momentum = optimizer::norm(&learner.state.optimizer.first);
    assert!(momentum > 0.0, "momentum alone would move the weights");
    let mut cohort = samples(&learner, 4);
    cohort.iter_mut().for_each(|s| s.reward = 0.0);
    let outcome = learner.propose(&cohort, &rewards(&cohort), &settings, &Limits::default());
    let Outcome::Empty(metrics) = outcome.unwrap() else {
        panic!("a step without a gradient");
    };
    assert_eq!((metrics.gradient_norm, metrics.without_gradient), (0.0, 4));
    assert_eq!(learner.checkpoint().root(), root);
    let optimizer = &learner.state.optimizer;
    assert_eq!((optimizer.step, optimizer::norm(&optimizer.first)), (steps, momentum));
    let cohort = samples(&learner, 6);
    propose(&mut learner, &cohort, &settings); // and the learner continues
}

#[test]
fn discarded_gradient_sums_leave_no_trace() {
    let (mut one, mut other) = (learner(14), learner(14));
    let cohort = samples(&one, 6);
    let settings = StepSettings::default();
    one.accumulate(&cohort[..4], &[3.0; 4], &settings, &limits()).unwrap();
    one.discard().unwrap();
    let again = accumulate(&mut one, &[&cohort], &settings);
    let straight = propose(&mut other, &cohort, &settings);
    assert_eq!(again.checkpoint.root(), straight.checkpoint.root());
    assert_eq!(again.metrics.sequences, 6);
    assert!(
        one.accumulate(&cohort, &rewards(&cohort), &settings, &limits())
            .is_err(),
        "the proposed step is open"
    );
}

#[test]
fn a_discarded_step_leaves_no_trace() {
    let (mut one, mut other) = (learner(3), learner(3));
    let samples = samples(&one, 6);
    let first = propose(&mut one, &samples, &StepSettings::default());
    one.discard().unwrap();
    assert_eq!(one.checkpoint().root(), first.parent.root());
    let again = propose(&mut one, &samples, &StepSettings::default());
    let straight = propose(&mut other, &samples, &StepSettings::default());
    assert_eq!(again.checkpoint.root(), straight.checkpoint.root());
}

#[test]
fn a_run_resumed_from_its_run_state_makes_the_same_bytes() {
    let mut straight = learner(4);
    let cohort = samples(&straight, 8);
    propose(&mut straight, &cohort, &StepSettings::default());
    let run_state = straight.run_state(record(), 7);
    straight.accept();
    let bytes = run_state.encode().unwrap().bytes;
    let run_state = RunState::from_bytes(&bytes, None).unwrap();
    let checkpoint = Arc::clone(straight.checkpoint());
    let mut resumed = Learner::restore(checkpoint, Arithmetic::default(), &run_state, None).unwrap();
    for _ in 0..2 {
        let cohort = samples(&straight, 8);
        let a = propose(&mut straight, &cohort, &StepSettings::default());
        let b = propose(&mut resumed, &cohort, &StepSettings::default());
        assert_eq!(a.checkpoint.root(), b.checkpoint.root());
        straight.accept();
        resumed.accept();
    }
    let (a, b) = (straight.run_state(record(), 7), resumed.run_state(record(), 7));
    assert!(a == b, "master weights or moments differ");
}

#[test]
fn a_run_state_of_another_version_is_refused() {
    let mut one = learner(5);
    let cohort = samples(&one, 6);
    propose(&mut one, &cohort, &StepSettings::default());
    let run_state = one.run_state(record(), 0);
    let other = Arc::new(random_checkpoint(&tiny(), 6));
    let error = Learner::restore(other, Arithmetic::default(), &run_state, None).unwrap_err();
    assert!(error.to_string().contains("do not round to those of its version"));
}

#[test]
fn a_broken_guard_changes_nothing() {
    let mut learner = learner(7);
    let cohort = samples(&learner, 6);
    let root = learner.checkpoint().root();
    let tight = Limits {
        kl_max: 1e-12,
        ..Limits::default()
    };
    let outcome = learner
        .propose(&cohort, &rewards(&cohort), &StepSettings::default(), &tight)
        .unwrap();
    assert!(matches!(
        outcome,
        Outcome::Refused {
            breach: Breach::Kl { .. },
            ..
        }
    ));
    let nan = vec![f64::NAN; cohort.len()];
    let outcome = learner
        .propose(&cohort, &nan, &StepSettings::default(), &Limits::default())
        .unwrap();
    assert!(matches!(
        outcome,
        Outcome::Refused {
            breach: Breach::Loss(_),
            ..
        }
    ));
    assert_eq!(learner.checkpoint().root(), root);
    propose(&mut learner, &cohort, &StepSettings::default()); // and the learner continues
}

#[test]
fn a_sample_with_wrong_log_probabilities_is_rejected_and_the_others_make_the_same_step() {
    let (mut one, mut other) = (learner(8), learner(8));
    let cohort = samples(&one, 6);
    let mut with_bad = cohort.clone();
    let mut bad = [cohort[2].clone(), cohort[3].clone(), cohort[4].clone()];
    bad[0].logprobs[0] -= 0.5;
    bad[1].logprobs[0] = f32::NAN;
    bad[2].logprobs[1] += 0.02;
    bad[2].reward = 1e6;
    with_bad.splice(1..1, bad);
    let settings = StepSettings::default();
    let checked = one.accumulate(&with_bad, &rewards(&with_bad), &settings, &limits());
    let rejected = checked.unwrap().rejected;
    assert_eq!(rejected.iter().map(|one| one.index).collect::<Vec<_>>(), [1, 2, 3]);
    let difference = |index: usize| rejected[index].mismatch.unwrap().difference_max;
    assert!((difference(0) - 0.5).abs() < 1e-5 && difference(1).is_nan());
    let Outcome::Proposed(proposal) = one.finish(&settings, &Limits::default()).unwrap() else {
        panic!("a bad sample stopped the others");
    };
    let (metrics, clean) = (proposal.metrics, propose(&mut other, &cohort, &settings).metrics);
    assert_eq!((metrics.sequences, metrics.quarantined), (6, 3));
    assert_eq!(metrics.mismatch.difference_max, 0.0);
    assert_eq!(metrics.reward_mean, clean.reward_mean);
    assert!((metrics.gradient_norm - clean.gradient_norm).abs() < 1e-5 * clean.gradient_norm);
    assert!((metrics.loss - clean.loss).abs() < 1e-6);
}

#[test]
fn a_group_with_a_rejected_rollout_teaches_nothing_and_the_others_make_the_same_step() {
    let (mut one, mut other) = (learner(8), learner(8));
    let mut cohort = samples(&one, 8);
    for (index, sample) in cohort.iter_mut().enumerate() {
        sample.group = Some(format!("group-{}", index % 2));
    }
    let clean: Vec<Sample> = cohort.iter().skip(1).step_by(2).cloned().collect();
    cohort[4].logprobs[0] -= 1.0;
    // the first samples are in another micro-batch than the bad one
    let settings = StepSettings {
        micro_batch_tokens: 16,
        ..StepSettings::default()
    };
    let checked = one.accumulate(&cohort, &rewards(&cohort), &settings, &limits());
    let rejected: Vec<_> = checked
        .unwrap()
        .rejected
        .iter()
        .map(|one| (one.index, one.mismatch.is_some()))
        .collect();
    assert_eq!(rejected, [(0, false), (2, false), (4, true), (6, false)]);
    let Outcome::Proposed(proposal) = one.finish(&settings, &Limits::default()).unwrap() else {
        panic!("a bad group stopped the others");
    };
    let clean = propose(&mut other, &clean, &settings);
    assert_eq!((proposal.metrics.sequences, proposal.metrics.quarantined), (4, 1));
    assert_eq!(proposal.metrics.gradient_norm, clean.metrics.gradient_norm);
    assert_eq!(proposal.checkpoint.root(), clean.checkpoint.root());
}

#[test]
fn a_cohort_of_bad_samples_alone_makes_no_step() {
    let mut learner = learner(8);
    let mut cohort = samples(&learner, 3);
    cohort.iter_mut().for_each(|one| one.logprobs[0] -= 1.0);
    let outcome = learner.propose(&cohort, &rewards(&cohort), &StepSettings::default(), &Limits::default());
    assert!(matches!(outcome.unwrap(), Outcome::Empty(metrics) if metrics.quarantined == 3));
}

#[test]
fn ppo_clip_on_policy_has_the_gradient_of_reinforce() {
    // at the start of a step both ratios are 1, so the gradients agree
    let ppo = StepSettings {
        loss: Loss::PpoClip {
            low: 0.2,
            high: 0.2,
            dual: None,
        },
        ..StepSettings::default()
    };
    let (mut a, mut b) = (learner(9), learner(9));
    let cohort = samples(&a, 6);
    let x = propose(&mut a, &cohort, &ppo).metrics.gradient_norm;
    let y = propose(&mut b, &cohort, &StepSettings::default()).metrics.gradient_norm;
    assert!((x - y).abs() < 1e-4 * y, "{x} against {y}");
}
