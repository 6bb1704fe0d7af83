//! A session of 50 turns with 200,000 tokens from HTTP to the model's input, byte for byte.
//! `tests/learning/session_long.rs` makes the session and compares what is stored.

use super::episodes::{claim, code, limits, second_version, selected};
use super::world::{DECLINE, POLICY, World, config, ensure_assigned, register, sampler_key};
use crate::session_long::{ANSWER, KEPT, SWAPPED, Sampler, TURNS, check_stored, mask, run_long_session, service};
use rand::Rng;
use rand::rngs::StdRng;
use runs::sample::ModelLimits;
use runs::select;
use trainer::learn::batch;

/// Of the model's vocabulary. A sampler would end at the decline token.
fn tokens(random: &mut StdRng, count: usize) -> Vec<u32> {
    let vocabulary = u32::try_from(config().vocab_size).unwrap();
    let any = |_| random.random_range(0..vocabulary - 1);
    (0..count).map(any).map(|id| id + u32::from(id >= DECLINE)).collect()
}

/// The layers up to the model's input: a forward pass over 200,000 tokens would take hours here.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_200_000_tokens_reaches_the_model_byte_for_byte() {
    let world = World::start("long_episode").await;
    let head = second_version(&world).await;
    let pool = &world.stack.pool;
    let key = sampler_key("replica-1");
    register(pool, &key, "replica-1").await;
    for version in [world.base, head] {
        ensure_assigned(pool, "champion", version).await;
    }
    let ingest = service(&world.stack).await;
    let sampler = Sampler {
        versions: [world.base, head],
        tokens,
        key: Some(key),
    };
    let session = run_long_session(&world.stack, &ingest, &sampler).await;
    check_stored(&world.stack, &session).await;
    ingest.stop().await;

    let mut rewards = vec![None; TURNS];
    rewards[KEPT.0] = Some(KEPT.1);
    let claim = claim(&world).await;
    let limits = ModelLimits {
        context: 200_000,
        ..limits()
    };
    let versions = select::versions(pool, POLICY, head, 1).await.unwrap();
    assert_eq!(versions, [head, world.base]);
    let mut trajectories = selected(&world, &claim, &versions, &limits, 8, &[]).await;
    assert_eq!(trajectories.len(), 1);
    let samples = trajectories.remove(0);
    assert_eq!(samples.len(), TURNS);
    for (number, (sample, (turn, context))) in samples.iter().zip(&session).enumerate() {
        assert_eq!(sample.generation, turn.id);
        assert!(sample.prompt == *context, "the context of turn {number}");
        assert!(
            sample.tokens == turn.token_ids && sample.mask == mask(number),
            "turn {number}"
        );
        let bits = |logprobs: &[f32]| -> Vec<u32> { logprobs.iter().map(|logprob| logprob.to_bits()).collect() };
        assert_eq!(bits(&sample.logprobs), bits(&turn.logprobs));
        assert_eq!(sample.staleness, usize::from(number <= SWAPPED), "turn {number}");
        let place = sample.turn.as_ref().unwrap();
        assert_eq!(
            (place.episode, place.index, place.reward()),
            (turn.episode_id, number, rewards[number])
        );
        assert_eq!(&place.rewards[..], &rewards[..]);
    }
    let batches = batch::pack(&samples, &[0.75; TURNS], 4096).unwrap();
    let mut seen = [false; TURNS];
    for batch in &batches {
        // longer than the budget, so each sequence goes alone, with the turns that continue each other
        let [sequence] = &batch.sequences[..] else {
            panic!("{} sequences", batch.sequences.len())
        };
        let (mut at, mut length) = (0, 0);
        for &(number, count) in &batch.samples {
            seen[number] = true;
            let span = at..at + count;
            at = span.end;
            let (turn, context) = &session[number];
            let sampled = turn.token_ids.iter().zip(&turn.logprobs).zip(mask(number));
            let (targets, behavior): (Vec<i64>, Vec<f32>) = sampled
                .filter(|(_, trained)| *trained)
                .map(|((token, logprob), _)| (i64::from(*token), *logprob))
                .unzip();
            assert_eq!(count, if number % 7 == 3 { ANSWER - 80 } else { ANSWER });
            assert!(batch.targets[span.clone()] == targets, "turn {number}");
            assert!(batch.behavior[span.clone()] == behavior, "turn {number}");
            let whole = [&context[..], &turn.token_ids[..]].concat();
            length = whole.len() - 1;
            assert!(sequence.starts_with(&whole[..length]), "turn {number}");
            let predicted = batch.positions[span].iter().map(|position| whole[position + 1]);
            assert!(predicted.map(i64::from).eq(targets), "turn {number}");
            assert_eq!(batch.stale, number <= SWAPPED);
        }
        assert_eq!((sequence.len(), at), (length, batch.targets.len()));
        assert!(at <= 4096, "{at} rows of logits at once");
    }
    assert!(
        batches.len() <= TURNS / 4,
        "turns go together: {} sequences",
        batches.len()
    );
    assert!(seen.iter().all(|seen| *seen));
    // with no room for older versions, the turns before the swap are dropped and the others stay
    let mut trajectories = selected(&world, &claim, &versions[..1], &limits, 8, &[]).await;
    let rest = trajectories.remove(0);
    assert_eq!(rest.len(), TURNS - SWAPPED - 1);
    let first = rest[0].turn.as_ref().unwrap();
    assert_eq!((first.index, first.rewards.len()), (SWAPPED + 1, TURNS));
    assert_eq!(code(&world, session[SWAPPED].0.id).await, "stale");
}
