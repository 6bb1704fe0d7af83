//! Turns of episodes: tokens of older versions, and how long trajectories are averaged.

use super::*;

fn one_turn_each() -> StepSettings {
    StepSettings {
        micro_batch_tokens: 1,
        ..StepSettings::default()
    }
}

/// Makes the samples turns of one episode.
fn as_episode(samples: &mut [Sample]) {
    let rewards = vec![None; samples.len()];
    for (index, sample) in samples.iter_mut().enumerate() {
        sample.turn = Sample::example_of(1, index, &rewards).turn;
    }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-4 * b.abs(), "{a} against {b}");
}

#[test]
fn tokens_of_older_versions_are_weighted_by_the_truncated_ratio_and_not_quarantined() {
    let mut learner = learner(3);
    let cohort = samples(&learner, 4);
    let settings = one_turn_each();
    // π/μ is e^0.5 at every token of the first, and e, above the cap of 2, of the second
    let mut stale = cohort.clone();
    for (index, by) in [(0, 0.5), (1, 1.0)] {
        stale[index].staleness = 1;
        stale[index].logprobs.iter_mut().for_each(|logprob| *logprob -= by);
    }
    let mut advantages = rewards(&cohort);
    let outcome = learner
        .propose(&stale, &advantages, &settings, &Limits::default())
        .unwrap();
    let Outcome::Proposed(Proposal { metrics, .. }) = outcome else {
        panic!("no step: {outcome:?}")
    };
    advantages[0] *= 0.5_f64.exp();
    advantages[1] *= 2.0;
    let outcome = learner
        .propose(&cohort, &advantages, &settings, &Limits::default())
        .unwrap();
    let Outcome::Proposed(Proposal { metrics: want, .. }) = outcome else {
        panic!("no step: {outcome:?}")
    };
    close(metrics.gradient_norm, want.gradient_norm);
    close(metrics.loss, want.loss);
    assert_eq!(metrics.quarantined, 0);
    let lengths: Vec<usize> = cohort.iter().map(|sample| sample.tokens.len()).collect();
    assert_eq!(metrics.stale.tokens, lengths[0] + lengths[1]);
    assert_eq!(metrics.mismatch.tokens, lengths[2] + lengths[3]);
    assert_eq!(metrics.mismatch.difference_max, 0.0, "the head's tokens alone");
    close(metrics.stale.difference_max, 1.0);
    close(metrics.clipped, lengths[1] as f64 / metrics.tokens as f64);
}

#[test]
fn what_the_model_cannot_produce_is_refused_whatever_its_version() {
    let mut learner = learner(3);
    let mut cohort = samples(&learner, 4);
    for (index, logprob) in [(0, f32::NAN), (1, f32::NEG_INFINITY), (2, -50.0)] {
        cohort[index].staleness = 2;
        cohort[index].logprobs[0] = logprob;
    }
    cohort[3].logprobs[0] -= 1.0;
    let checked = learner
        .accumulate(&cohort, &rewards(&cohort), &one_turn_each(), &limits())
        .unwrap();
    let rejected: Vec<usize> = checked.rejected.iter().map(|rejected| rejected.index).collect();
    assert_eq!(rejected, [0, 1, 3], "only an older version may differ");
}

#[test]
fn the_sum_of_a_session_is_not_divided_by_its_turns() {
    let mut learner = learner(3);
    let cohort = samples(&learner, 6);
    let settings = one_turn_each();
    let single = propose(&mut learner, &cohort, &settings).metrics;
    assert_eq!((single.trajectories, single.sequences), (6, 6));
    // four of them are the turns of one session: three trajectories
    let mut turns = cohort.clone();
    as_episode(&mut turns[..4]);
    turns[..4].iter_mut().for_each(|turn| turn.reward = 0.75);
    let outcome = learner
        .propose(&turns, &rewards(&cohort), &settings, &Limits::default())
        .unwrap();
    let Outcome::Proposed(Proposal { metrics, .. }) = outcome else {
        panic!("no step: {outcome:?}")
    };
    assert_eq!((metrics.trajectories, metrics.sequences), (3, 6));
    close(metrics.gradient_norm, single.gradient_norm * 6.0 / 3.0);
    close(metrics.loss, single.loss * 6.0 / 3.0);
    let rewards = [0.75, cohort[4].reward, cohort[5].reward];
    close(metrics.reward_mean, rewards.iter().sum::<f64>() / 3.0);
}

/// A session whose turns continue each other, logged with the bits of the learner's own model.
fn session(learner: &Learner) -> Vec<Sample> {
    let mut turns = samples(learner, 6);
    as_episode(&mut turns);
    let mut context = Vec::new();
    for (index, turn) in turns.iter_mut().enumerate() {
        context.append(&mut turn.prompt);
        turn.prompt.clone_from(&context);
        context.extend(&turn.tokens);
        turn.temperature = 0.7 + 0.1 * index as f32;
        turn.suppressed = index == 2;
        turn.mask[0] = index != 3;
        turn.behavior = (index > 3).then(|| {
            let params = Params {
                temperature: turn.temperature,
                repetition_penalty: 1.3,
                presence_penalty: 0.2,
                ..Params::default()
            };
            Arc::new(Behavior {
                params,
                candidates: None,
                masks: None,
            })
        });
    }
    turns
}

/// Log-probabilities by turn, and all logits, as bits.
fn scored(learner: &Learner, batches: &[MicroBatch]) -> (Vec<(usize, Vec<u32>)>, Vec<u32>) {
    let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
    let (mut turns, mut logits) = (Vec::new(), Vec::new());
    for batch in batches {
        let scored = learner.score(batch, None).unwrap();
        logits.extend(bits(scored.pass.logits.values()));
        let mut rest = scored.recomputed.as_slice();
        for (index, count) in &batch.samples {
            let (own, later) = rest.split_at(*count);
            turns.push((*index, bits(own)));
            rest = later;
        }
        assert!(rest.is_empty());
    }
    (turns, logits)
}

#[test]
fn turns_that_share_a_sequence_have_the_bits_that_they_have_alone() {
    let learner = learner(3);
    let turns = session(&learner);
    let together = batch::pack(&turns, &[1.0; 6], 100).unwrap();
    assert_eq!((together.len(), together[0].sequences.len()), (1, 1));
    let length = together[0].sequences[0].len();
    assert!(length > 40, "several tiles of the kernels: {length}");
    let alone: Vec<MicroBatch> = turns
        .iter()
        .enumerate()
        .map(|(index, turn)| {
            let mut batch = batch::pack(std::slice::from_ref(turn), &[1.0], 100).unwrap().remove(0);
            batch.samples[0].0 = index;
            batch
        })
        .collect();
    assert_eq!(scored(&learner, &together), scored(&learner, &alone));
}

#[test]
fn a_session_in_one_sequence_makes_the_step_that_its_turns_make_alone() {
    let mut learner = learner(3);
    let mut turns = session(&learner);
    for batch in batch::pack(&turns, &[1.0; 6], 1).unwrap() {
        let mut logprobs = learner.score(&batch, None).unwrap().recomputed.into_iter();
        let turn = &mut turns[batch.samples[0].0];
        let trained = turn
            .logprobs
            .iter_mut()
            .zip(&turn.mask)
            .filter(|(_, trained)| **trained);
        trained.for_each(|(logprob, _)| *logprob = logprobs.next().unwrap());
    }
    let mut metrics = |micro_batch_tokens: usize| {
        let settings = StepSettings {
            micro_batch_tokens,
            ..StepSettings::default()
        };
        propose(&mut learner, &turns, &settings).metrics
    };
    let (alone, together) = (metrics(1), metrics(4096));
    assert_eq!((alone.sequences, together.sequences), (6, 6));
    assert_eq!(together.mismatch.difference_max, 0.0);
    close(together.gradient_norm, alone.gradient_norm);
    close(together.loss, alone.loss);
    close(together.entropy, alone.entropy);
}
