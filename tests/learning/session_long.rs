//! What is stored of a long session, byte for byte.

use edge::sampler::SamplerKey;
use event_log::event::{Body, Generation, Proof, VersionSpan, signed_bytes};
use event_log::payload::Store;
use rand::SeedableRng;
use rand::rngs::StdRng;
use runs::context::prompts;
use serde_json::json;
use uuid::Uuid;

use fixture::Stack;
use fixture::ingest::{Service, Trajectory, count, trajectory};
use fixture::session::with_sessions;
use fixture::session::{payload_url, tokens, turn, upload_ids};

/// Turns of the long session, and where a summary opens a new segment.
pub const TURNS: usize = 50;
const SEGMENTS: [usize; 3] = [0, 20, 35];
/// Tokens with which each segment opens, and of each prompt and answer.
const OPENINGS: [usize; 3] = [100_000, 30_000, 20_000];
const PROMPT: usize = 600;
pub const ANSWER: usize = 400;
/// Within this turn, the second version begins.
pub const SWAPPED: usize = 27;
/// The turn that has a reward of its own, and how much.
pub const KEPT: (usize, f64) = (30, 0.5);

/// Which tokens of an answer are trained on. What a tool wrote into it is context.
pub fn mask(number: usize) -> Vec<bool> {
    let by_tool = 100..180;
    (0..ANSWER)
        .map(|nth| number % 7 != 3 || !by_tool.contains(&nth))
        .collect()
}

/// Who samples the long session.
pub struct Sampler {
    pub versions: [i64; 2],
    pub tokens: fn(&mut StdRng, usize) -> Vec<u32>,
    /// Signs what it samples.
    pub key: Option<SamplerKey>,
}

/// 50 turns with 200,000 tokens that are logged once, in three segments, sampled by two versions of
/// which the second begins within a turn. With each, its whole context.
async fn long_session(service: &Service, sampler: &Sampler) -> Vec<(Generation, Vec<u32>)> {
    let mut random = StdRng::seed_from_u64(19);
    let mut tokens = |count| (sampler.tokens)(&mut random, count);
    let [old, new] = sampler.versions;
    let episode_id = Uuid::now_v7();
    let mut session: Vec<(Generation, Vec<u32>)> = Vec::new();
    let mut context: Vec<u32> = Vec::new();
    let mut segment = 0;
    for number in 0..TURNS {
        let (prompt, answer) = (tokens(PROMPT), tokens(ANSWER));
        let opens = SEGMENTS.iter().position(|first| *first == number);
        let mut turn = match opens {
            // A summary: its context has no parent.
            Some(nth) => {
                segment = nth;
                context = tokens(OPENINGS[nth]);
                let payload = upload_ids(service, &context).await;
                Generation {
                    payload: Some(payload),
                    ..turn(None, &[], prompt.clone(), answer.clone())
                }
            }
            None => turn(
                session.last().map(|(turn, _)| turn),
                &context,
                prompt.clone(),
                answer.clone(),
            ),
        };
        let span = |version: i64, tokens: usize| VersionSpan {
            version,
            root: [u8::try_from(version).unwrap(); 32],
            tokens: u32::try_from(tokens).unwrap(),
        };
        turn.versions = match number {
            0..SWAPPED => vec![span(old, ANSWER)],
            SWAPPED => vec![span(old, 150), span(new, ANSWER - 150)],
            _ => vec![span(new, ANSWER)],
        };
        turn.train_mask = Some(mask(number)).filter(|mask| mask.contains(&false));
        turn.episode_id = episode_id;
        turn.segment = u32::try_from(segment).unwrap();
        turn.turn = u32::try_from(number).unwrap();
        turn.surface = "session".to_owned();
        context.extend(&prompt);
        session.push((turn, context.clone()));
        context.extend(&answer);
    }
    session
}

/// Sends the long session over HTTP, with a reward for one turn, one for the whole, and its end.
/// Waits until it has closed.
pub async fn run_long_session(stack: &Stack, service: &Service, sampler: &Sampler) -> Vec<(Generation, Vec<u32>)> {
    let session = long_session(service, sampler).await;
    let logged_once: usize = OPENINGS.iter().sum::<usize>() + TURNS * (PROMPT + ANSWER);
    assert_eq!(logged_once, 200_000);
    for (turn, _) in &session {
        let mut event = turn.clone().into_event("default", "tests/session-long");
        if let (Body::Generation(generation), Some(key)) = (&mut event.body, &sampler.key) {
            let signature = key.sign(&signed_bytes("default", event.time, &generation.unsigned_digest()));
            let sampler = key.id().to_owned();
            generation.proof = Some(Proof { sampler, signature });
        }
        let mut event = serde_json::to_value(event).unwrap();
        event.as_object_mut().unwrap().remove("tenant");
        let (status, answer) = service.post("/v1/events:batch", &json!([event])).await;
        assert_eq!(status, 200, "{answer}");
    }
    let episode_id = session[0].0.episode_id;
    let thumb = json!({"episode_id": episode_id, "metric_name": "accept", "value": true});
    let kept = json!({"generation_id": session[KEPT.0].0.id, "metric_name": "kept", "value": KEPT.1});
    for body in [thumb, kept] {
        assert_eq!(service.post("/v1/feedback", &body).await.0, 200);
    }
    let ended = service
        .post("/v1/episode-ends", &json!({"episode_id": episode_id}))
        .await;
    assert_eq!(ended.0, 200);
    for (turn, _) in &session {
        assert_eq!(
            trajectory(&stack.pool, turn.id).await,
            Trajectory::rewarded(0.75, "accept")
        );
    }
    session
}

pub async fn service(stack: &Stack) -> Service {
    let options = ingest::Options {
        payload_store: Some(payload_url(stack)),
        ..with_sessions()
    };
    Service::start_with(stack, options).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_of_a_session_is_what_was_sent() {
    let stack = Stack::start("long-session").await;
    let service = service(&stack).await;
    let sampler = Sampler {
        versions: [4, 5],
        tokens,
        key: None,
    };
    let session = run_long_session(&stack, &service, &sampler).await;
    check_stored(&stack, &session).await;
    service.stop().await;
}

/// Compares the rows with what was sent, byte for byte.
pub async fn check_stored(stack: &Stack, session: &[(Generation, Vec<u32>)]) {
    type Stored = (
        (Uuid, i32, i32, Option<Uuid>, i32, Option<Vec<u8>>),
        (Vec<i32>, Vec<i32>, Vec<f32>, Option<Vec<bool>>),
        (serde_json::Value, i64, i64, Vec<u8>, Option<Vec<u8>>),
    );
    for (turn, _) in session {
        let row: (Uuid, i32, i32, Option<Uuid>, i32, Option<Vec<u8>>) = sqlx::query_as(
            "select episode_id, segment, turn, parent_id, prompt_prefix_len, prompt_prefix_hash from generation where id = $1",
        )
        .bind(turn.id)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
        let ids = sqlx::query_as("select prompt_ids, token_ids, logprobs, train_mask from generation where id = $1")
            .bind(turn.id)
            .fetch_one(&stack.pool)
            .await
            .unwrap();
        let versions = sqlx::query_as(
            "select version_spans, version, version_oldest, root, payload_digest from generation where id = $1",
        )
        .bind(turn.id)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
        let stored: Stored = (row, ids, versions);
        let narrow = |ids: &[u32]| -> Vec<i32> { ids.iter().map(|id| id.cast_signed()).collect() };
        let prefix = turn.prompt_prefix;
        let spans = turn.versions.iter().map(|span| json!([span.version, span.tokens]));
        let sent: Stored = (
            (
                turn.episode_id,
                turn.segment.cast_signed(),
                turn.turn.cast_signed(),
                turn.parent_id,
                prefix.map_or(0, |prefix| prefix.length.cast_signed()),
                prefix.map(|prefix| prefix.hash.to_vec()),
            ),
            (
                narrow(&turn.prompt_ids),
                narrow(&turn.token_ids),
                turn.logprobs.clone(),
                turn.train_mask.clone(),
            ),
            (
                spans.collect(),
                turn.versions[turn.versions.len() - 1].version,
                turn.versions[0].version,
                turn.versions[turn.versions.len() - 1].root.to_vec(),
                turn.payload.as_ref().map(|payload| payload.digest.to_vec()),
            ),
        );
        // Bit for bit, which `==` of floats does not say.
        let bits = |row: &Stored| -> Vec<u32> { row.1.2.iter().map(|logprob| logprob.to_bits()).collect() };
        assert_eq!(bits(&stored), bits(&sent));
        assert!(stored == sent, "turn {} differs", turn.turn);
    }
    let ids: Vec<Uuid> = session.iter().map(|(turn, _)| turn.id).collect();
    let store = Store::open(&payload_url(stack)).unwrap();
    let mut connection = stack.pool.acquire().await.unwrap();
    let rebuilt = prompts(&mut connection, &store, &ids, 200_000).await.unwrap();
    for (turn, context) in session {
        assert!(
            rebuilt[&turn.id].as_ref().unwrap() == context,
            "the context of turn {}",
            turn.turn
        );
    }
    type Closed = (Uuid, Option<Uuid>, Option<i32>, Option<f64>);
    let rows: Vec<Closed> =
        sqlx::query_as("select generation_id, episode_id, episode_turns, turn_reward from trajectory where surface = 'session' order by 1")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    let episode_id = session[0].0.episode_id;
    let own = |nth: usize| (nth == KEPT.0).then_some(KEPT.1);
    let expected = ids
        .iter()
        .enumerate()
        .map(|(nth, id)| (*id, Some(episode_id), Some(50), own(nth)));
    let mut expected: Vec<_> = expected.collect();
    expected.sort_by_key(|row| row.0);
    assert_eq!(rows, expected);
    let transactions = "select count(distinct xmin::text) from trajectory where surface = 'session'";
    assert_eq!(count(&stack.pool, transactions).await, 1);
}
