//! A session of 50 turns with 200,000 tokens: what of it reaches the model, byte for byte. What is stored
//! of such a session is tested in `tests/session_long.rs`.

use super::context::{refer, shorten, shorten_to};
use super::episodes::{claim, close, code, limits, log, second_version, selected};
use super::world::{POLICY, Sampled, World};
use ingest::payload::{self, TOKEN_IDS};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainer::learn::batch;
use trainer::learn::sample::ModelLimits;
use trainer::select;
use uuid::Uuid;

/// Turns of the long session, and where a summary opens a new segment.
const TURNS: usize = 50;
const SEGMENTS: [usize; 3] = [0, 20, 35];
/// Tokens with which each segment opens, and of each prompt and answer.
const OPENINGS: [usize; 3] = [100_000, 30_000, 20_000];
const PROMPT: usize = 600;
const ANSWER: usize = 400;
/// Within this turn, the second version begins.
const SWAPPED: usize = 27;

/// Which tokens of an answer are trained on; a tool wrote the others.
fn mask(number: usize) -> Vec<bool> {
    (0..ANSWER)
        .map(|nth| number % 7 != 3 || !(100..180).contains(&nth))
        .collect()
}

/// Logs a session of 50 turns with 200,000 tokens in three segments, of two versions. Returns its turns
/// with their whole contexts.
async fn log_long_session(world: &World, episode: Uuid, old: i64, new: i64) -> Vec<Sampled> {
    let pool = &world.stack.pool;
    let mut random = StdRng::seed_from_u64(19);
    let mut tokens = |count: usize| -> Vec<u32> { (0..count).map(|_| random.random_range(0..61)).collect() };
    let like = world.sample(old, 1).await.remove(0);
    let mut session: Vec<Sampled> = Vec::new();
    let mut segment = 0;
    for number in 0..TURNS {
        let (rest, answer) = (tokens(PROMPT), tokens(ANSWER));
        let logprobs: Vec<f32> = answer
            .iter()
            .map(|id| -0.001 * (*id as f32) - 1e-7 * number as f32)
            .collect();
        let mut turn = Sampled {
            version: if number < SWAPPED { old } else { new },
            prompt: rest.clone(),
            tokens: answer,
            logprobs,
            suppressed: false,
            ..like.clone().renewed()
        };
        if let Some(nth) = SEGMENTS.iter().position(|first| *first == number) {
            segment = nth;
            let opening = tokens(OPENINGS[nth]);
            log(
                world,
                episode,
                i32::try_from(segment).unwrap(),
                number,
                std::slice::from_ref(&turn),
            )
            .await;
            let bytes = payload::token_bytes(&opening);
            let prompt = world.payloads().put("default", bytes.into(), TOKEN_IDS).await.unwrap();
            refer(pool, turn.id, "prompt", &prompt).await;
            shorten_to(pool, turn.id, &rest).await;
            turn.prompt = [opening, rest].concat();
        } else {
            let parent = &session[number - 1];
            let shared = [&parent.prompt[..], &parent.tokens[..]].concat();
            log(
                world,
                episode,
                i32::try_from(segment).unwrap(),
                number,
                std::slice::from_ref(&turn),
            )
            .await;
            shorten(pool, turn.id, parent.id, &shared, &rest).await;
            turn.prompt = [shared, rest].concat();
        }
        let swapped = (number == SWAPPED).then_some(old);
        sqlx::query(
            "update generation set train_mask = $2, version_oldest = coalesce($3, version_oldest) where id = $1",
        )
        .bind(turn.id)
        .bind(mask(number))
        .bind(swapped)
        .execute(pool)
        .await
        .unwrap();
        session.push(turn);
    }
    session
}

/// The layers up to the model's input: a forward pass over 3 million tokens would take a day here.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_200_000_tokens_reaches_the_model_byte_for_byte() {
    let world = World::start("long_episode").await;
    let head = second_version(&world).await;
    let episode = Uuid::now_v7();
    let session = log_long_session(&world, episode, world.base, head).await;
    let logged_once = OPENINGS.iter().sum::<usize>() + TURNS * (PROMPT + ANSWER);
    assert_eq!(logged_once, 200_000);
    let mut rewards = vec![None; TURNS];
    rewards[30] = Some(0.5);
    close(&world, episode, 0.75, &rewards).await;
    let claim = claim(&world).await;
    let limits = ModelLimits {
        context: 200_000,
        ..limits()
    };
    let versions = select::versions(&world.stack.pool, POLICY, head, 1).await.unwrap();
    assert_eq!(versions, [head, world.base]);
    let mut trajectories = selected(&world, &claim, &versions, &limits, 8, &[]).await;
    assert_eq!(trajectories.len(), 1);
    let samples = trajectories.remove(0);
    assert_eq!(samples.len(), TURNS);
    for (number, (sample, turn)) in samples.iter().zip(&session).enumerate() {
        assert_eq!(sample.generation, turn.id);
        assert!(sample.prompt == turn.prompt, "the context of turn {number}");
        assert!(
            sample.tokens == turn.tokens && sample.mask == mask(number),
            "turn {number}"
        );
        let bits = |logprobs: &[f32]| -> Vec<u32> { logprobs.iter().map(|logprob| logprob.to_bits()).collect() };
        assert_eq!(bits(&sample.logprobs), bits(&turn.logprobs));
        assert_eq!(sample.staleness, usize::from(number <= SWAPPED), "turn {number}");
        let place = sample.turn.as_ref().unwrap();
        assert_eq!(
            (place.episode, place.index, place.reward()),
            (episode, number, rewards[number])
        );
        assert_eq!(&place.rewards[..], &rewards[..]);
    }
    let batches = batch::pack(&samples, &[0.75; TURNS], 4096).unwrap();
    let mut seen = [false; TURNS];
    for batch in &batches {
        // longer than the budget, so each turn goes alone
        let [(number, count)] = batch.samples[..] else {
            panic!("{:?}", batch.samples)
        };
        seen[number] = true;
        let turn = &session[number];
        let sampled = turn.tokens.iter().zip(&turn.logprobs).zip(mask(number));
        let (targets, behavior): (Vec<i64>, Vec<f32>) = sampled
            .filter(|(_, trained)| *trained)
            .map(|((token, logprob), _)| (i64::from(*token), *logprob))
            .unzip();
        assert_eq!(count, if number % 7 == 3 { ANSWER - 80 } else { ANSWER });
        assert!(batch.targets == targets && batch.behavior == behavior, "turn {number}");
        let whole = [&turn.prompt[..], &turn.tokens[..]].concat();
        assert!(batch.sequences == [&whole[..whole.len() - 1]], "turn {number}");
        let predicted = batch.positions.iter().map(|position| i64::from(whole[position + 1]));
        assert!(predicted.eq(batch.targets.iter().copied()), "turn {number}");
        assert_eq!(batch.stale, number <= SWAPPED);
    }
    assert!(seen.iter().all(|seen| *seen));
    // with no room for older versions, the turns before the swap are dropped and the others stay
    let mut trajectories = selected(&world, &claim, &versions[..1], &limits, 8, &[]).await;
    let rest = trajectories.remove(0);
    assert_eq!(rest.len(), TURNS - SWAPPED - 1);
    let first = rest[0].turn.as_ref().unwrap();
    assert_eq!((first.index, first.rewards.len()), (SWAPPED + 1, TURNS));
    assert_eq!(code(&world, session[SWAPPED].id).await, "stale");
}
