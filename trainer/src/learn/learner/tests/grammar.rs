//! Samples that a grammar constrained, drawn as the engine draws them.

use super::*;
use serde_json::{Value, json};
use text::constraint::Matcher;
use text::tokenizer::Tokenizer;
use tokenizer::{END, constraint, with_tokenizer};

#[path = "../../../../runs/src/grammar/tests/tokenizer.rs"]
mod tokenizer;

fn learner_with_tokenizer(seed: u64) -> Learner {
    let checkpoint = with_tokenizer(random_checkpoint(&tiny(), seed));
    Learner::from_checkpoint(Arc::new(checkpoint)).unwrap()
}

/// What an engine has after it has compiled the schema.
fn matcher(checkpoint: &Checkpoint, schema: &Value) -> Matcher {
    Tokenizer::from_checkpoint(checkpoint)
        .unwrap()
        .constrain(schema)
        .unwrap()
}

fn schemas() -> [Value; 4] {
    let call = |name: &str| {
        json!({"type": "object", "properties": {"name": {"const": name}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"], "additionalProperties": false})
    };
    [
        json!({"type": "array", "items": {"enum": ["ab", "ac", "b"]}, "minItems": 2}),
        json!({"type": "object", "properties": {"z": {"type": "boolean"}, "a": {"type": "integer"}},
            "required": ["z", "a"], "additionalProperties": false}),
        json!({"anyOf": [call("read"), call("run")]}),
        json!({"type": "string", "minLength": 12}),
    ]
}

/// As an engine samples them: masked, then drawn. Without their masks.
fn drawn_within(learner: &Learner, schema: &Value, params: &Params, n: u32) -> Vec<Sample> {
    let mut samples = samples(learner, n);
    for (seed, sample) in (0u64..).zip(&mut samples) {
        let mut matcher = matcher(&learner.state.checkpoint, schema);
        let mut cache = KvCache::new(&learner.state.model, 1, 64);
        let mut logits = learner.state.model.prefill(&mut cache, 0, &sample.prompt).unwrap();
        let (mut history, mut source) = (PreviousTokens::new(&sample.prompt), Source::new(seed));
        (sample.tokens, sample.logprobs) = (Vec::new(), Vec::new());
        while sample.tokens.len() < 40 && !sample.tokens.contains(&END) {
            if let Some(last) = sample.tokens.last() {
                matcher.accept(*last).unwrap();
            }
            matcher.mask(&mut logits, &[END], None).unwrap();
            let drawn = sampling::draw(&logits, params, &history, &mut source);
            sample.tokens.push(drawn.id);
            sample.logprobs.push(drawn.log_prob);
            history.push(drawn.id);
            let mut step = learner.state.model.decode(&mut cache, &[drawn.id]).unwrap();
            logits = step.swap_remove(0);
        }
        sample.mask = vec![true; sample.tokens.len()];
        sample.temperature = params.temperature;
        sample.behavior = (!params.is_plain()).then(|| {
            Arc::new(Behavior {
                params: params.clone(),
                candidates: None,
                masks: None,
            })
        });
    }
    samples
}

/// The same with the masks that the trainer computes.
fn with_masks(learner: &Learner, samples: &[Sample], schema: &Value) -> Vec<Sample> {
    let grammars = learner.model_limits().grammars;
    let mut samples = samples.to_vec();
    for sample in &mut samples {
        sample.constrain(grammars.masks(&constraint(schema), &sample.tokens).unwrap());
    }
    samples
}

#[test]
fn log_probabilities_are_the_samplers_to_the_bit() {
    let filtered = Params {
        temperature: 0.8,
        top_p: 0.9,
        repetition_penalty: 1.2,
        ..Params::default()
    };
    let mut excluded = 0;
    for (seed, schema) in (20..).zip(schemas()) {
        let learner = learner_with_tokenizer(seed);
        for params in [Params::default(), filtered.clone()] {
            let drawn = drawn_within(&learner, &schema, &params, 6);
            let samples = with_masks(&learner, &drawn, &schema);
            for batch in batch::pack(&samples, &rewards(&samples), 4096).unwrap() {
                let recomputed = learner.score(&batch, None).unwrap().recomputed;
                let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
                assert_eq!(bits(&recomputed), bits(&batch.behavior), "{schema}");
            }
            for batch in batch::pack(&drawn, &rewards(&drawn), 4096).unwrap() {
                let unmasked = learner.score(&batch, None).unwrap().recomputed;
                let lower = unmasked
                    .iter()
                    .zip(&batch.behavior)
                    .filter(|(own, logged)| own < logged);
                excluded += lower.count();
            }
        }
    }
    assert!(excluded > 100, "the grammars change the distribution: {excluded}");
}

#[test]
fn a_step_on_constrained_samples_has_exact_parity_and_without_their_masks_they_are_rejected() {
    let mut learner = learner_with_tokenizer(31);
    let [schema, ..] = schemas();
    let drawn = drawn_within(&learner, &schema, &Params::default(), 12);
    let samples = with_masks(&learner, &drawn, &schema);
    let metrics = propose(&mut learner, &samples, &StepSettings::default()).metrics;
    let tokens: usize = samples.iter().map(Sample::trained_tokens).sum();
    assert_eq!(
        (metrics.sequences, metrics.tokens, metrics.quarantined),
        (12, tokens, 0)
    );
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
    learner.discard().unwrap();
    let checked = learner.accumulate(&drawn, &rewards(&drawn), &StepSettings::default(), &limits());
    assert_eq!(checked.unwrap().rejected.len(), 12);
}

#[test]
fn the_gradient_is_that_of_a_softmax_over_the_allowed_ids_and_0_for_all_others() {
    let learner = learner_with_tokenizer(32);
    for schema in schemas() {
        let drawn = drawn_within(&learner, &schema, &Params::default(), 4);
        let samples = with_masks(&learner, &drawn, &schema);
        let batches = batch::pack(&samples, &rewards(&samples), 4096).unwrap();
        let [batch] = batches.as_slice() else {
            panic!("one micro-batch")
        };
        let pass = score(&learner.state.model, batch, None).unwrap();
        let leaf = || autograd::tensor(&pass.logits).set_requires_grad(true);
        let advantage = Tensor::from_slice(&batch.advantage);
        let settings = StepSettings::default();
        let loss = |logp: &Tensor| {
            let terms = loss::terms(
                settings.loss,
                &Tokens {
                    logp,
                    behavior: &logp.detach(),
                    advantage: &advantage,
                    lengths: &[logp.size()[0]],
                    kept: &[None],
                    masked: None,
                },
            );
            terms.per_token.sum(Kind::Float)
        };
        let masked = leaf();
        let transform = behavior::logit_transform(batch, &pass.logits)
            .map(|transform| transform.affine.map(|part| Tensor::from_slice(&part).view_as(&masked)));
        loss(&at_targets(&log_softmax(&masked, batch, transform.as_ref()), batch)).backward();

        // the reference knows the allowed ids alone, row by row
        let reference = leaf();
        let (mut logp, mut excluded) = (Vec::new(), Vec::new());
        for token in &batch.reshaped {
            let mut row = vec![0.0; 61];
            let masks = token.behavior.masks.as_ref().unwrap();
            masks.exclude(token.position, &mut row);
            let allowed: Vec<i64> = (0..61).filter(|id| row[*id as usize] == 0.0).collect();
            excluded.extend(
                (0..61)
                    .filter(|id| row[*id as usize] != 0.0)
                    .map(|id| (token.index as i64, id)),
            );
            let target = allowed.iter().position(|id| *id == batch.targets[token.index]).unwrap();
            let kept = reference
                .get(token.index as i64)
                .index_select(0, &Tensor::from_slice(&allowed));
            let kept = kept / f64::from(batch.temperature[token.index]);
            logp.push(kept.log_softmax(0, Kind::Float).get(target as i64));
        }
        assert_eq!(logp.len(), batch.targets.len());
        loss(&Tensor::stack(&logp, 0)).backward();
        let (gradient, expected) = (masked.grad(), reference.grad());
        let difference = (&gradient - &expected).abs().max().double_value(&[]);
        assert!(difference < 1e-6, "{schema}: {difference}");
        assert!(gradient.abs().max().double_value(&[]) > 0.0, "{schema}");
        assert!(excluded.len() > 100, "{schema}");
        for (row, id) in excluded {
            assert_eq!(gradient.double_value(&[row, id]), 0.0, "{schema}: {row}, {id}");
        }
    }
}
