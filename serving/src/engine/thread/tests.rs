//! The scheduler with a fake model whose next token depends on the whole sequence, so that mixed-up
//! slots show in the tokens.

mod beside_trainer;

use super::*;
use crate::engine::backend::Step;
use crate::engine::caller::{Caller, Work};
use crate::engine::{Constraint, Finish};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use model::sampling::Params;
use serde_json::{Value, json};
use text::tokenizer::Tokenizer;
use tokio::sync::mpsc;

const VOCAB: u32 = 50;
const STOP: u32 = 49;

#[derive(Default)]
struct SequenceHash {
    slots: Vec<Vec<u32>>,
    pace: Duration,
    /// The prompts in the order in which they were read.
    read: Arc<Mutex<Vec<Vec<u32>>>>,
}

impl SequenceHash {
    fn step(&self, slot: usize) -> Step {
        let next = next(&self.slots[slot]);
        let broken = self.slots[slot] == [14];
        let other = if broken { f32::NAN } else { 0.0 };
        Step {
            logits: (0..VOCAB).map(|id| if id == next { 50.0 } else { other }).collect(),
            ..Step::default()
        }
    }
}

/// The model's next token after `ids`.
fn next(ids: &[u32]) -> u32 {
    ids.iter()
        .enumerate()
        .map(|(i, id)| (i as u32 + 1) * (id + 3))
        .sum::<u32>()
        % (VOCAB - 1)
}

fn continuation(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut ids = prompt.to_vec();
    for _ in 0..n {
        ids.push(next(&ids));
    }
    ids.split_off(prompt.len())
}

impl Backend for SequenceHash {
    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn advance(&mut self, segments: &[(usize, &[u32])]) -> anyhow::Result<Vec<Step>> {
        let thirteen = |(slot, ids): &(usize, &[u32])| *ids == [13] && self.slots[*slot].is_empty();
        anyhow::ensure!(!segments.iter().any(thirteen), "thirteen");
        std::thread::sleep(self.pace);
        for (slot, ids) in segments {
            if self.slots[*slot].is_empty() {
                self.read.lock().unwrap().push(ids.to_vec());
            }
            self.slots[*slot].extend_from_slice(ids);
        }
        Ok(segments.iter().map(|(slot, _)| self.step(*slot)).collect())
    }

    fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        self.slots[to] = self.slots[from][..tokens].to_vec();
    }
}

fn version(serial: i64) -> Arc<LoadedVersion> {
    Arc::new(LoadedVersion {
        serial,
        root: Digest([serial as u8; 32]),
        line: "realtime".into(),
        adapts: None,
        context: 128,
        vocab: VOCAB,
        stop_ids: vec![STOP],
        experts: None,
        decline_id: None,
        tokenizer: None,
        reference: None,
        templates: crate::routing::tests::no_templates(),
    })
}

fn backend(slots: usize, pace_ms: u64) -> Box<dyn Backend> {
    Box::new(SequenceHash {
        slots: vec![Vec::new(); slots],
        pace: Duration::from_millis(pace_ms),
        ..SequenceHash::default()
    })
}

fn engine(queue: usize) -> Handle {
    spawn(Config {
        queue_choices_max: queue,
        queue_wait_max: Duration::from_secs(60),
        prompt_tokens_per_pass_max: 2,
        slots_reserved_for_production: 1,
        parked_max: Duration::from_secs(600),
    })
    .unwrap()
    .handle
}

fn request(
    version: &Arc<LoadedVersion>,
    prompt: &[u32],
    max_tokens: usize,
) -> (SampleRequest, mpsc::Receiver<SampleEvent>) {
    let (sender, events) = mpsc::channel(max_tokens + 1);
    let request = SampleRequest {
        version: version.clone(),
        prompt: prompt.into(),
        max_tokens,
        params: Params {
            temperature: 0.0,
            ..Params::default()
        },
        seed: 1,
        suppressed: None,
        constraint: None,
        ends: Default::default(),
        score_prompt: None,
        top_logprobs: 0,
        caller: Caller::new("default", None),
        class: TrafficClass::Production,
        priority: 0,
        session: None,
        events: sender,
        submitted: Instant::now(),
    };
    (request, events)
}

async fn finish(mut events: mpsc::Receiver<SampleEvent>) -> (Vec<u32>, Option<SampleEvent>) {
    let mut ids = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            SampleEvent::Token(token) => ids.push(token.id),
            last => return (ids, Some(last)),
        }
    }
    (ids, None)
}

#[tokio::test]
async fn sequences_that_start_and_end_at_any_time_never_mix() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), backend(4, 0)).await.unwrap();
    let mut waiting = Vec::new();
    for i in 0..40u32 {
        let prompt = vec![i % 7, i % 11, i];
        let n = 1 + (i as usize * 5) % 17;
        let (request, events) = request(&v, &prompt, n);
        handle.submit(vec![request]).unwrap();
        waiting.push((prompt, n, events));
    }
    for (prompt, n, events) in waiting {
        let (ids, last) = finish(events).await;
        assert_eq!(last, Some(SampleEvent::Finished(Finish::Length)));
        assert_eq!(ids, continuation(&prompt, n));
    }
}

#[tokio::test]
async fn a_stop_id_ends_its_sequence_and_stays_in_it() {
    let handle = engine(8);
    let expected = continuation(&[1, 2], 5);
    let stop = expected[4];
    let v = Arc::new(LoadedVersion {
        stop_ids: vec![stop],
        ..Arc::into_inner(version(1)).unwrap()
    });
    handle.install(v.clone(), backend(2, 0)).await.unwrap();
    let (request, events) = request(&v, &[1, 2], 30);
    let end = expected.iter().position(|id| *id == stop).unwrap();
    handle.submit(vec![request]).unwrap();
    let (ids, last) = finish(events).await;
    assert_eq!(ids, expected[..=end]);
    assert_eq!(last, Some(SampleEvent::Finished(Finish::Stop(stop))));
}

#[tokio::test]
async fn a_suppressed_token_is_never_sampled_by_its_request_but_by_others() {
    let handle = engine(8);
    let v = version(1);
    handle.install(v.clone(), backend(2, 0)).await.unwrap();
    let expected = continuation(&[1, 2], 6);
    let (mut without, events) = request(&v, &[1, 2], 6);
    without.suppressed = Some(expected[2]);
    let (with, heard_with) = request(&v, &[1, 2], 6);
    handle.submit(vec![without, with]).unwrap();
    let (ids, _) = finish(events).await;
    assert_eq!(ids[..2], expected[..2]);
    assert!(!ids.contains(&expected[2]), "{ids:?}");
    assert_eq!(finish(heard_with).await.0, expected);
}

#[tokio::test]
async fn a_full_queue_refuses_and_production_displaces_rollouts() {
    let handle = engine(1);
    // no version is installed, so every request waits
    let v = version(1);
    let (mut rollout, events) = request(&v, &[1], 4);
    rollout.class = TrafficClass::Background;
    handle.submit(vec![rollout]).unwrap();
    let (user, _user) = request(&v, &[1], 4);
    handle.submit(vec![user]).unwrap();
    assert_eq!(finish(events).await.1, Some(SampleEvent::Displaced));
    let (user, _heard) = request(&v, &[1], 4);
    assert_eq!(handle.submit(vec![user]).unwrap_err(), SubmitError::Full { waiting: 1 });
}

#[tokio::test]
async fn a_caller_that_fills_the_queue_loses_places_and_the_next_slot_to_another() {
    let handle = engine(8);
    let v = version(1);
    let mut flood = Vec::new();
    for _ in 0..8 {
        let (request, events) = request(&v, &[1], 4);
        handle.submit(vec![request]).unwrap();
        flood.push(events);
    }
    let of = |key: u128| Caller::new("default", Some(uuid::Uuid::from_u128(key)));
    let (mut honest, answered) = request(&v, &[2], 4);
    honest.caller = of(1);
    handle.submit(vec![honest]).unwrap();
    assert_eq!(finish(flood.pop().unwrap()).await.1, Some(SampleEvent::Displaced));
    let read = Arc::default();
    let backend = SequenceHash {
        slots: vec![Vec::new()],
        read: Arc::clone(&read),
        ..SequenceHash::default()
    };
    handle.install(v.clone(), Box::new(backend)).await.unwrap();
    assert_eq!(finish(answered).await.0, continuation(&[2], 4));
    for events in flood {
        let finished = finish(events).await;
        assert_eq!(finished.1, Some(SampleEvent::Finished(Finish::Length)), "not displaced");
    }
    let read = read.lock().unwrap();
    assert_eq!(
        (read.len(), &read[1]),
        (8, &vec![2]),
        "second, although seven waited before it"
    );
}

/// A list, in a vocabulary that can write one.
fn list() -> Constraint {
    let words = "[]{}:,.\"0123456789abcdefghijklmnopqrstuvwxyzABCDE".chars();
    let vocab: serde_json::Map<String, Value> = words.zip(0u32..).map(|(c, id)| (c.to_string(), id.into())).collect();
    assert_eq!(vocab.len(), STOP as usize);
    let end = json!({"id": STOP, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let json = json!({"version": "1.0", "added_tokens": [end], "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let files = [
        ("tokenizer.json", json.to_string()),
        ("config.json", json!({"eos_token_id": STOP}).to_string()),
    ];
    let tokenizer = Tokenizer::from_checkpoint(&Checkpoint {
        files: files.map(|(name, text)| (name.to_owned(), text.into())).into(),
        ..Checkpoint::default()
    })
    .unwrap();
    let schema = json!({"type": "array"});
    Constraint {
        matcher: tokenizer.constrain(&schema).unwrap(),
        schema: Arc::new(schema),
    }
}

#[tokio::test]
async fn constrained_sequences_beyond_the_limit_wait_and_hold_nobody_else_up() {
    let handle = engine(32);
    let v = version(1);
    let mut answers = Vec::new();
    let prompts = 20..20 + CONSTRAINED_MAX as u32 + 2;
    for prompt in prompts.clone() {
        let (mut request, events) = request(&v, &[prompt], 3);
        request.constraint = Some(list());
        handle.submit(vec![request]).unwrap();
        answers.push(events);
    }
    let (free, answered) = request(&v, &[1], 3);
    handle.submit(vec![free]).unwrap();
    let read = Arc::default();
    let backend = SequenceHash {
        slots: vec![Vec::new(); CONSTRAINED_MAX + 4],
        read: Arc::clone(&read),
        ..SequenceHash::default()
    };
    handle.install(v.clone(), Box::new(backend)).await.unwrap();
    assert_eq!(finish(answered).await.0, continuation(&[1], 3));
    for events in answers {
        let (ids, last) = finish(events).await;
        assert_eq!((ids[0], last), (0, Some(SampleEvent::Finished(Finish::Length))), "[");
    }
    let read: Vec<u32> = read.lock().unwrap().iter().map(|prompt| prompt[0]).collect();
    let place = |id: u32| read.iter().position(|first| *first == id).unwrap();
    assert!(place(1) < place(prompts.end - 2), "{read:?}");
    assert!(place(prompts.end - 3) < place(1), "{read:?}");
}

#[tokio::test]
async fn rollouts_leave_the_reserved_slots_to_users() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), backend(2, 20)).await.unwrap();
    let mut rollouts = Vec::new();
    for _ in 0..3 {
        let (mut rollout, events) = request(&v, &[5], 100);
        rollout.class = TrafficClass::Background;
        handle.submit(vec![rollout]).unwrap();
        rollouts.push(events);
    }
    let (user, events) = request(&v, &[1], 3);
    handle.submit(vec![user]).unwrap();
    finish(events).await;
    // the first rollout still runs, the others have not begun
    assert!(rollouts[0].len() < 100);
    assert_eq!(rollouts[1].len(), 0);
    assert_eq!(rollouts[2].len(), 0);
}

/// Until the engine's load is as it should be.
async fn until(handle: &Handle, is_so: impl Fn(&Load) -> bool) {
    while !handle.loads().iter().all(&is_so) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn lend(handle: &Handle, slots: usize) {
    let whole = false;
    handle.lend(&[Limit { slots, whole }]);
}

#[tokio::test]
async fn rollouts_give_slots_back_when_fewer_are_lent_and_continue_with_the_same_tokens() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), backend(4, 5)).await.unwrap();
    let mut rollouts = Vec::new();
    for prompt in 0..3 {
        let (mut rollout, events) = request(&v, &[prompt], 100);
        rollout.class = TrafficClass::Background;
        rollout.caller = Caller::new("default", None).working_on(Work::Rollout(None));
        handle.submit(vec![rollout]).unwrap();
        rollouts.push(events);
    }
    until(&handle, |load| load.background == 3).await;
    lend(&handle, 1);
    until(&handle, |load| (load.background, load.parked) == (1, 2)).await;
    lend(&handle, 0);
    until(&handle, |load| {
        (load.background, load.parked, load.background_waiting) == (0, 3, 3)
    })
    .await;
    let sampled: Vec<usize> = rollouts.iter().map(mpsc::Receiver::len).collect();
    let (user, events) = request(&v, &[9], 5);
    handle.submit(vec![user]).unwrap();
    assert_eq!(finish(events).await.0, continuation(&[9], 5));
    let after: Vec<usize> = rollouts.iter().map(mpsc::Receiver::len).collect();
    assert_eq!(after, sampled, "nothing is lent");
    lend(&handle, 2);
    until(&handle, |load| (load.background, load.parked) == (2, 1)).await;
    lend(&handle, usize::MAX);
    for (prompt, events) in (0..).zip(rollouts) {
        assert_eq!(finish(events).await.0, continuation(&[prompt], 100));
    }
    let all_counted = |load: &Load| {
        let used = load.totals.work.get(&Work::Rollout(None));
        used.is_some_and(|used| used.sampled == 300)
    };
    until(&handle, all_counted).await;
    let load = handle.loads().remove(0);
    assert_eq!(load.totals.taken_back, 3);
    let used = load.totals.work[&Work::Rollout(None)];
    assert_eq!((used.sampled, used.thrown_away, used.read), (300, 0, 3 + 3 * 99));
    assert!(load.totals.alone.first_tokens == 1 && load.totals.alone.tokens == 4);
}

#[tokio::test]
async fn a_rollout_that_is_parked_for_too_long_lets_its_version_go() {
    let thread = spawn(Config {
        queue_choices_max: 4,
        queue_wait_max: Duration::from_secs(60),
        prompt_tokens_per_pass_max: 2,
        slots_reserved_for_production: 0,
        parked_max: Duration::ZERO,
    });
    let handle = thread.unwrap().handle;
    let v = version(1);
    let installed = handle.install(v.clone(), backend(2, 5)).await.unwrap();
    let (mut rollout, mut events) = request(&v, &[5], 100);
    rollout.class = TrafficClass::Background;
    handle.submit(vec![rollout]).unwrap();
    assert!(matches!(events.recv().await, Some(SampleEvent::Token(_))));
    lend(&handle, 0);
    assert_eq!(finish(events).await.1, Some(SampleEvent::Displaced));
    drop(v);
    installed.retired.await.unwrap();
    let given_up = |load: &Load| {
        let mut used = load.totals.work.values();
        used.any(|used| used.thrown_away > 0 && used.sampled == 0)
    };
    until(&handle, given_up).await;
}

#[tokio::test]
async fn users_that_wait_too_long_are_told_and_rollouts_wait_on() {
    let thread = spawn(Config {
        queue_choices_max: 4,
        queue_wait_max: Duration::from_millis(50),
        prompt_tokens_per_pass_max: 2,
        slots_reserved_for_production: 0,
        parked_max: Duration::from_secs(600),
    });
    let handle = thread.unwrap().handle;
    // its version is not installed yet
    let v = version(1);
    let (user, expired) = request(&v, &[1], 4);
    let (mut rollout, events) = request(&v, &[2], 4);
    rollout.class = TrafficClass::Background;
    handle.submit(vec![user]).unwrap();
    handle.submit(vec![rollout]).unwrap();
    assert_eq!(finish(expired).await, (Vec::new(), Some(SampleEvent::Expired)));
    handle.install(v, backend(1, 0)).await.unwrap();
    assert_eq!(finish(events).await.0, continuation(&[2], 4));
}

#[tokio::test]
async fn a_caller_that_disconnects_frees_its_slot() {
    let handle = engine(64);
    let v = version(1);
    // the whole sequence would take 5 s
    handle.install(v.clone(), backend(1, 50)).await.unwrap();
    let (long, events) = request(&v, &[1], 100);
    handle.submit(vec![long]).unwrap();
    drop(events);
    let (next, events) = request(&v, &[2], 1);
    let began = Instant::now();
    handle.submit(vec![next]).unwrap();
    finish(events).await;
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_version_serves_until_its_last_request_ends_and_then_retires() {
    let handle = engine(64);
    let first_version = version(1);
    let installed = handle.install(first_version.clone(), backend(2, 20)).await.unwrap();
    let (slow, events) = request(&first_version, &[1, 2, 3], 60);
    handle.submit(vec![slow]).unwrap();
    let second_version = version(2);
    let second = handle.install(second_version.clone(), backend(2, 0)).await.unwrap();
    let weak = Arc::downgrade(&first_version);
    drop(first_version);
    let (quick, answered) = request(&second_version, &[9], 5);
    handle.submit(vec![quick]).unwrap();
    assert_eq!(finish(answered).await.0, continuation(&[9], 5));
    assert!(weak.upgrade().is_some(), "a request still runs on it");
    assert_eq!(finish(events).await.0, continuation(&[1, 2, 3], 60));
    installed.retired.await.unwrap();
    assert!(weak.upgrade().is_none());
    let mut second = second.retired;
    assert!(second.try_recv().is_err(), "a held version stays installed");
}

#[tokio::test]
async fn a_prompt_that_fails_does_not_affect_others() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), backend(2, 1)).await.unwrap();
    let (good, events) = request(&v, &[1], 20);
    handle.submit(vec![good]).unwrap();
    let (bad, failed) = request(&v, &[13], 20);
    handle.submit(vec![bad]).unwrap();
    assert_eq!(finish(failed).await.1, Some(SampleEvent::Failed("thirteen".into())));
    let (broken, failed) = request(&v, &[14], 20);
    handle.submit(vec![broken]).unwrap();
    let not_finite = "the logits of version 1 are not finite".to_owned();
    assert_eq!(finish(failed).await, (vec![], Some(SampleEvent::Failed(not_finite))));
    assert_eq!(finish(events).await.0, continuation(&[1], 20));
}

#[tokio::test]
async fn a_stopped_engine_notifies_every_caller() {
    let thread = spawn(Config {
        queue_choices_max: 4,
        queue_wait_max: Duration::from_secs(60),
        prompt_tokens_per_pass_max: 2,
        slots_reserved_for_production: 0,
        parked_max: Duration::from_secs(600),
    })
    .unwrap();
    let v = version(1);
    let (waiting, events) = request(&v, &[1], 4);
    thread.handle.submit(vec![waiting]).unwrap();
    thread.handle.stop();
    assert_eq!(finish(events).await, (Vec::new(), None));
    assert!(thread.ended.await.is_err());
    let (late, _heard) = request(&v, &[1], 4);
    assert_eq!(thread.handle.submit(vec![late]).unwrap_err(), SubmitError::Stopped);
}
