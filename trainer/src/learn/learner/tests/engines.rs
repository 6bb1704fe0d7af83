//! Samples of engines with other arithmetic: what is accepted, and what their corrections do.

use super::*;
use artifact::quant::{self, Spec};
use model::exact::Threads;
use runs::settings::Correction;

/// Settings that put each sample into a micro-batch of its own.
fn corrected_by(correction: Correction) -> StepSettings {
    StepSettings {
        correction,
        micro_batch_tokens: 1,
        ..StepSettings::default()
    }
}

/// The samples as vLLM would have logged them, with w = e^`log_weight` at each token of each.
fn remote(samples: &[Sample], log_weights: &[f32]) -> Vec<Sample> {
    let logged = |(sample, by): (&Sample, &f32)| Sample {
        engine: Some("vllm".into()),
        logprobs: sample.logprobs.iter().map(|logprob| logprob - by).collect(),
        ..sample.clone()
    };
    samples.iter().zip(log_weights).map(logged).collect()
}

fn step(learner: &mut Learner, samples: &[Sample], advantages: &[f64], correction: Correction) -> Metrics {
    let outcome = learner.propose(samples, advantages, &corrected_by(correction), &Limits::default());
    match outcome.unwrap() {
        Outcome::Proposed(proposal) => proposal.metrics,
        other => panic!("no step: {other:?}"),
    }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-4 * b.abs(), "{a} against {b}");
}

#[test]
fn a_corrected_token_has_the_gradient_of_its_weighted_advantage() {
    let mut learner = learner(3);
    let cohort = samples(&learner, 3);
    let logged = remote(&cohort, &[0.2, 0.1, -0.1]);
    let [e2, e1, e_minus_1] = [0.2_f64, 0.1, -0.1].map(f64::exp);
    for (correction, weights) in [
        (Correction::None, [1.0; 3]),
        (Correction::Tis { cap: 2.0 }, [e2, e1, e_minus_1]),
        (Correction::Tis { cap: 1.15 }, [1.15, e1, e_minus_1]),
    ] {
        let got = step(&mut learner, &logged, &rewards(&cohort), correction);
        let weighted: Vec<f64> = rewards(&cohort).iter().zip(weights).map(|(a, w)| a * w).collect();
        let want = step(&mut learner, &cohort, &weighted, Correction::None);
        close(got.gradient_norm, want.gradient_norm);
        close(got.loss, want.loss);
        assert_eq!(got.tokens, want.tokens);
    }
}

#[test]
fn a_step_measures_other_engines_apart_and_what_was_truncated() {
    let mut learner = learner(3);
    let mut cohort = samples(&learner, 4);
    let lengths: Vec<usize> = cohort.iter().map(|sample| sample.tokens.len()).collect();
    let logged = remote(&cohort[..2], &[0.2, 0.1]);
    cohort.splice(..2, logged);
    let tis = Correction::Tis { cap: 1.15 };
    let metrics = step(&mut learner, &cohort, &rewards(&cohort), tis);
    assert_eq!(metrics.remote.tokens, lengths[0] + lengths[1]);
    assert_eq!(metrics.mismatch.tokens, lengths[2] + lengths[3]);
    assert_eq!(metrics.mismatch.difference_max, 0.0);
    close(metrics.remote.difference_max, 0.2);
    let tokens = lengths.iter().sum::<usize>();
    assert_eq!(metrics.correction.tokens, tokens);
    close(metrics.correction.truncated, lengths[0] as f64 / tokens as f64);
}

#[test]
fn no_correction_changes_a_step_on_samples_of_our_own_engine() {
    let (mut one, mut other) = (learner(3), learner(3));
    let cohort = samples(&one, 6);
    let a = propose(&mut one, &cohort, &corrected_by(Correction::Tis { cap: 1.0 }));
    let b = propose(&mut other, &cohort, &corrected_by(Correction::None));
    assert_eq!(a.checkpoint.root(), b.checkpoint.root());
    assert_eq!((a.metrics.correction.truncated, a.metrics.correction.ess), (0.0, 1.0));
}

#[test]
fn other_engines_may_round_and_ours_may_not() {
    let mut learner = learner(3);
    let cohort = samples(&learner, 3);
    let settings = StepSettings::default();
    let mut judge = |samples: &[Sample]| -> (Vec<usize>, usize) {
        learner.discard().unwrap();
        let checked = learner.accumulate(samples, &rewards(samples), &settings, &Limits::default());
        let checked = checked.unwrap();
        let rejected = checked.rejected.iter().map(|one| one.index).collect();
        (rejected, checked.compared.len())
    };
    let rounded = remote(&cohort, &[5e-3, -5e-3, 1.0]);
    assert_eq!(judge(&rounded), (vec![2], 3), "the last is not of its version");
    let ours: Vec<Sample> = rounded
        .into_iter()
        .map(|sample| Sample { engine: None, ..sample })
        .collect();
    assert_eq!(judge(&ours), (vec![0, 1, 2], 3));
    assert_eq!(judge(&cohort), (vec![], 3));
}

/// A sample of `tokens` tokens, each with the trainer's log-probability at that temperature.
fn long_sample(learner: &Learner, tokens: u32, temperature: f32) -> Sample {
    let mut sample = samples(learner, 1).remove(0);
    sample.temperature = temperature;
    sample.tokens = (0..tokens).map(|at| (at * 7 + 5) % 61).collect();
    sample.mask = vec![true; sample.tokens.len()];
    sample.logprobs = vec![0.0; sample.tokens.len()];
    let single = batch::pack(std::slice::from_ref(&sample), &[0.0], 1).unwrap();
    sample.logprobs = learner.score(&single[0], None).unwrap().recomputed;
    sample
}

#[test]
fn a_few_tokens_that_are_far_off_are_left_to_the_correction() {
    let mut learner = learner(3);
    let tis = Correction::Tis { cap: 2.0 };
    // tokens, w of the first token, and how many are truncated
    for (tokens, w, truncated) in [(5, 2.1_f32, 1.0), (16, 5.1, 1.0), (16, 150.0, 1.0), (16, 0.01, 0.0)] {
        let mut sample = remote(&[long_sample(&learner, tokens, 1.0)], &[1e-3]).remove(0);
        sample.logprobs[0] -= w.ln();
        let metrics = step(&mut learner, &[sample], &[0.5], tis);
        assert_eq!((metrics.sequences, metrics.quarantined), (1, 0));
        assert_eq!(metrics.correction.truncated, truncated / f64::from(tokens), "w = {w}");
    }
}

#[test]
fn samples_of_other_weights_are_quarantined() {
    let (mut one, other) = (learner(3), learner(4));
    // random weights of this size are near uniform at a higher temperature, whichever they are
    for tokens in [5, 16, 40] {
        let sample = remote(&[long_sample(&other, tokens, 0.05)], &[0.0]).remove(0);
        let outcome = one.propose(&[sample], &[0.5], &StepSettings::default(), &Limits::default());
        assert!(
            matches!(outcome.unwrap(), Outcome::Empty(metrics) if metrics.quarantined == 1),
            "{tokens} tokens"
        );
    }
}

#[test]
fn the_values_of_a_copy_are_exact_for_whoever_serves_it_and_a_mismatch_for_others() {
    let checkpoint = Arc::new(random_checkpoint(&tiny(), 2));
    let settings = StepSettings::default();
    for spec in Spec::ALL {
        let arithmetic = Arithmetic {
            quantized: Some(spec),
            ..Arithmetic::default()
        };
        let mut rounded = Learner::with_arithmetic(Arc::clone(&checkpoint), arithmetic).unwrap();
        let values = quant::dequantized(&checkpoint, spec, &Threads::ONE).unwrap();
        let mut of_values = Learner::from_checkpoint(Arc::new(values)).unwrap();
        let cohort = samples(&of_values, 9);
        let step = propose(&mut rounded, &cohort, &settings);
        let same = propose(&mut of_values, &cohort, &settings);
        assert_eq!(step.metrics.mismatch.difference_max, 0.0, "{spec}");
        assert_eq!(step.metrics.gradient_norm, same.metrics.gradient_norm, "{spec}");
        // the master is the version's own, so what is published is near it
        assert_eq!(step.parent.root(), checkpoint.root());
        let changes = artifact::delta::stats(&checkpoint, &step.checkpoint);
        assert!(changes.changed_weights < changes.total_weights, "{spec}: {changes:?}");
        // the next step has the values of the new copy
        rounded.accept();
        let values = quant::dequantized(&step.checkpoint, spec, &Threads::ONE).unwrap();
        let next = samples(&Learner::from_checkpoint(Arc::new(values)).unwrap(), 9);
        let step = propose(&mut rounded, &next, &settings).metrics;
        assert_eq!(step.mismatch.difference_max, 0.0, "{spec}");
        let mut plain = Learner::from_checkpoint(Arc::clone(&checkpoint)).unwrap();
        assert!(propose(&mut plain, &cohort, &settings).metrics.mismatch.difference_max > 1e-5);
    }
}
