//! The scheduler against a model whose next token is a function of the whole sequence, so that a slot mixed up with
//! another shows in the tokens.

use super::*;
use crate::engine::model::Step;
use crate::engine::{Event, Finish};
use policy::digest::Digest;
use policy::sampling::Params;
use tokio::sync::mpsc;

const VOCAB: u32 = 50;
const STOP: u32 = 49;

struct Sums {
    slots: Vec<Vec<u32>>,
    pace: Duration,
}

impl Sums {
    fn step(&self, slot: usize) -> Step {
        let next = next(&self.slots[slot]);
        Step {
            logits: (0..VOCAB).map(|id| if id == next { 50.0 } else { 0.0 }).collect(),
            ..Step::default()
        }
    }
}

/// What the model says after `ids`.
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

impl Model for Sums {
    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn prefill(&mut self, slot: usize, ids: &[u32]) -> anyhow::Result<Step> {
        assert!(self.slots[slot].is_empty(), "slot {slot} is in use");
        anyhow::ensure!(ids != [13], "thirteen");
        self.slots[slot] = ids.to_vec();
        Ok(self.step(slot))
    }

    fn decode(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<Step>> {
        std::thread::sleep(self.pace);
        for (slot, &token) in tokens.iter().enumerate() {
            assert!(!self.slots[slot].is_empty(), "slot {slot} is empty");
            self.slots[slot].push(token);
        }
        Ok((0..tokens.len()).map(|slot| self.step(slot)).collect())
    }

    fn move_slot(&mut self, from: usize, to: usize) {
        self.slots[to] = std::mem::take(&mut self.slots[from]);
    }

    fn clear(&mut self, slot: usize) {
        self.slots[slot].clear();
    }
}

fn version(serial: i64) -> Arc<Version> {
    Arc::new(Version {
        serial,
        root: Digest([serial as u8; 32]),
        line: "realtime".into(),
        context: 128,
        vocab: VOCAB,
        stop_ids: vec![STOP],
        experts: None,
        decline_id: None,
        tokenizer: None,
        templates: crate::engine::templates::Rendering::from_image(&policy::image::Image::default()),
    })
}

fn model(slots: usize, pace_ms: u64) -> Box<dyn Model> {
    Box::new(Sums {
        slots: vec![Vec::new(); slots],
        pace: Duration::from_millis(pace_ms),
    })
}

fn engine(queue: usize) -> Handle {
    spawn(Config {
        queue_choices_max: queue,
        prefills_per_step_max: 2,
        slots_reserved_for_production: 1,
    })
    .unwrap()
    .handle
}

fn request(version: &Arc<Version>, prompt: &[u32], max_tokens: usize) -> (Request, mpsc::Receiver<Event>) {
    let (events, heard) = mpsc::channel(max_tokens + 1);
    let request = Request {
        version: version.clone(),
        prompt: prompt.into(),
        max_tokens,
        params: Params {
            temperature: 0.0,
            ..Params::default()
        },
        seed: 1,
        stop_ids: Vec::new(),
        suppressed: None,
        top_logprobs: 0,
        class: Class::Production,
        priority: 0,
        events,
        submitted: Instant::now(),
    };
    (request, heard)
}

async fn finish(mut heard: mpsc::Receiver<Event>) -> (Vec<u32>, Option<Event>) {
    let mut ids = Vec::new();
    while let Some(event) = heard.recv().await {
        match event {
            Event::Token(token) => ids.push(token.id),
            last => return (ids, Some(last)),
        }
    }
    (ids, None)
}

#[tokio::test]
async fn sequences_that_come_and_go_never_mix() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), model(4, 0)).await.unwrap();
    let mut waiting = Vec::new();
    for i in 0..40u32 {
        let prompt = vec![i % 7, i % 11, i];
        let n = 1 + (i as usize * 5) % 17;
        let (request, heard) = request(&v, &prompt, n);
        handle.submit(vec![request]).unwrap();
        waiting.push((prompt, n, heard));
    }
    for (prompt, n, heard) in waiting {
        let (ids, last) = finish(heard).await;
        assert_eq!(last, Some(Event::Finished(Finish::Length)));
        assert_eq!(ids, continuation(&prompt, n));
    }
}

#[tokio::test]
async fn a_stop_id_of_the_request_ends_it_and_stays_in_it() {
    let handle = engine(8);
    let v = version(1);
    handle.install(v.clone(), model(2, 0)).await.unwrap();
    let expected = continuation(&[1, 2], 5);
    let (mut request, heard) = request(&v, &[1, 2], 30);
    request.stop_ids = vec![expected[4]];
    let cut = expected.iter().position(|id| *id == expected[4]).unwrap();
    handle.submit(vec![request]).unwrap();
    let (ids, last) = finish(heard).await;
    assert_eq!(ids, expected[..=cut]);
    assert_eq!(last, Some(Event::Finished(Finish::Stop(expected[4]))));
}

#[tokio::test]
async fn a_suppressed_token_is_never_sampled_by_its_request_and_by_others_it_is() {
    let handle = engine(8);
    let v = version(1);
    handle.install(v.clone(), model(2, 0)).await.unwrap();
    let expected = continuation(&[1, 2], 6);
    let (mut without, heard) = request(&v, &[1, 2], 6);
    without.suppressed = Some(expected[2]);
    let (with, heard_with) = request(&v, &[1, 2], 6);
    handle.submit(vec![without, with]).unwrap();
    let (ids, _) = finish(heard).await;
    assert_eq!(ids[..2], expected[..2]);
    assert!(!ids.contains(&expected[2]), "{ids:?}");
    assert_eq!(finish(heard_with).await.0, expected);
}

#[tokio::test]
async fn a_full_queue_refuses_and_production_displaces_rollouts() {
    let handle = engine(1);
    // nothing is resident, so everything waits
    let v = version(1);
    let (mut rollout, heard) = request(&v, &[1], 4);
    rollout.class = Class::Background;
    handle.submit(vec![rollout]).unwrap();
    let (user, _user) = request(&v, &[1], 4);
    handle.submit(vec![user]).unwrap();
    assert_eq!(finish(heard).await.1, Some(Event::Displaced));
    let (user, _heard) = request(&v, &[1], 4);
    assert_eq!(handle.submit(vec![user]).unwrap_err(), Refused::Full { waiting: 1 });
}

#[tokio::test]
async fn rollouts_leave_the_reserved_slots_to_users() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), model(2, 20)).await.unwrap();
    let mut rollouts = Vec::new();
    for _ in 0..3 {
        let (mut rollout, heard) = request(&v, &[5], 100);
        rollout.class = Class::Background;
        handle.submit(vec![rollout]).unwrap();
        rollouts.push(heard);
    }
    let (user, heard) = request(&v, &[1], 3);
    handle.submit(vec![user]).unwrap();
    finish(heard).await;
    // the first rollout still runs, the others have not begun
    assert!(rollouts[0].len() < 100);
    assert_eq!(rollouts[1].len(), 0);
    assert_eq!(rollouts[2].len(), 0);
}

#[tokio::test]
async fn a_caller_that_goes_away_frees_its_slot() {
    let handle = engine(64);
    let v = version(1);
    // to the end it would take 5 s
    handle.install(v.clone(), model(1, 50)).await.unwrap();
    let (long, heard) = request(&v, &[1], 100);
    handle.submit(vec![long]).unwrap();
    drop(heard);
    let (next, heard) = request(&v, &[2], 1);
    let began = Instant::now();
    handle.submit(vec![next]).unwrap();
    finish(heard).await;
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_version_serves_until_its_last_request_ends_and_then_leaves() {
    let handle = engine(64);
    let old = version(1);
    let installed = handle.install(old.clone(), model(2, 20)).await.unwrap();
    let (slow, heard) = request(&old, &[1, 2, 3], 60);
    handle.submit(vec![slow]).unwrap();
    let new = version(2);
    let second = handle.install(new.clone(), model(2, 0)).await.unwrap();
    let weak = Arc::downgrade(&old);
    drop(old);
    let (quick, answered) = request(&new, &[9], 5);
    handle.submit(vec![quick]).unwrap();
    assert_eq!(finish(answered).await.0, continuation(&[9], 5));
    assert!(weak.upgrade().is_some(), "a request still runs on it");
    assert_eq!(finish(heard).await.0, continuation(&[1, 2, 3], 60));
    installed.left.await.unwrap();
    assert!(weak.upgrade().is_none());
    let mut second = second.left;
    assert!(second.try_recv().is_err(), "the held version stays");
}

#[tokio::test]
async fn a_prompt_that_fails_fails_alone() {
    let handle = engine(64);
    let v = version(1);
    handle.install(v.clone(), model(2, 1)).await.unwrap();
    let (good, heard) = request(&v, &[1], 20);
    handle.submit(vec![good]).unwrap();
    let (bad, failed) = request(&v, &[13], 20);
    handle.submit(vec![bad]).unwrap();
    assert_eq!(finish(failed).await.1, Some(Event::Failed("thirteen".into())));
    assert_eq!(finish(heard).await.0, continuation(&[1], 20));
}

#[tokio::test]
async fn a_stopped_engine_tells_everyone() {
    let thread = spawn(Config {
        queue_choices_max: 4,
        prefills_per_step_max: 1,
        slots_reserved_for_production: 0,
    })
    .unwrap();
    let v = version(1);
    let (waiting, heard) = request(&v, &[1], 4);
    thread.handle.submit(vec![waiting]).unwrap();
    thread.handle.stop();
    assert_eq!(finish(heard).await, (Vec::new(), None));
    assert!(thread.ended.await.is_err());
    let (late, _heard) = request(&v, &[1], 4);
    assert_eq!(thread.handle.submit(vec![late]).unwrap_err(), Refused::Stopped);
}
