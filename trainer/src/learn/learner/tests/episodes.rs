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
    let rejected = learner
        .accumulate(&cohort, &rewards(&cohort), &one_turn_each(), DIFFERENCE_MAX)
        .unwrap();
    let rejected: Vec<usize> = rejected.iter().map(|rejected| rejected.index).collect();
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
