//! The load: episodes with generations, feedback, retractions and ends, and the mistakes of real
//! producers: repetitions, wrong order, and ids that are taken.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ingest::event::{self, Body, EpisodeEnd, Event, Feedback, Generation, Retraction, Target, Value};
use rand::Rng;
use rand::rngs::StdRng;
use uuid::Uuid;

use super::client::Client;
use super::ledger::Ledger;
use crate::ingest::generation;

pub const SOURCE: &str = "tests/chaos";
/// Mean number of events per story, repetitions included.
pub const EVENTS_PER_STORY: f64 = 4.4;
/// The events of a story are sent within this time.
const SPREAD_MS: u64 = 2_000;
const REPEATED: f64 = 0.3;
const CONTRADICTED: f64 = 0.01;
const WITHOUT_GENERATION: f64 = 0.03;

/// Sends one story.
pub fn send_story(rng: &mut StdRng, ledger: &Ledger, client: &Client) {
    for event in story(rng) {
        let delay = Duration::from_millis(rng.random_range(0..SPREAD_MS));
        let index = ledger.note(&event);
        let event = Arc::new(event);
        client.send(index, event.clone(), delay);
        if rng.random_bool(REPEATED) {
            let again = Duration::from_millis(rng.random_range(0..SPREAD_MS));
            client.send(index, event.clone(), again);
        }
        if let Some(other) = contradict(&event).filter(|_| rng.random_bool(CONTRADICTED)) {
            let index = ledger.note(&other);
            let at = Duration::from_millis(rng.random_range(0..SPREAD_MS));
            client.send(index, Arc::new(other), at);
        }
    }
}

fn story(rng: &mut StdRng) -> Vec<Event> {
    let episode_id = Uuid::now_v7();
    let surface = ["completion", "session", "ending"][rng.random_range(0..3)];
    let mut events = Vec::new();
    for turn in 0..rng.random_range(1..=2) {
        let length = rng.random_range(1..=64);
        let generation = Generation {
            episode_id,
            turn,
            surface: surface.to_owned(),
            versions: vec![event::VersionSpan {
                version: 3,
                root: [3; 32],
                tokens: length,
            }],
            token_ids: (0..length).map(|_| rng.random_range(0..1000)).collect(),
            logprobs: (0..length).map(|_| -rng.random::<f32>()).collect(),
            train_mask: None,
            sampling: None,
            proof: None,
            ..generation()
        };
        let about = Target::Generation(generation.id);
        if !rng.random_bool(WITHOUT_GENERATION) {
            events.push(generation.into_event("default", SOURCE));
        }
        for _ in 0..rng.random_range(0..=2) {
            let (metric, value) = match rng.random_bool(0.8) {
                true => ("accept", Value::Bool(rng.random())),
                false => ("comment", Value::Text("as I would have it".to_owned())),
            };
            events.push(feedback(about, metric, value));
        }
    }
    if rng.random_bool(0.1) {
        events.push(feedback(Target::Episode(episode_id), "accept", Value::Bool(true)));
    }
    let given = events.iter().filter_map(|event| match &event.body {
        Body::Feedback(feedback) => Some(feedback.id),
        _ => None,
    });
    let retracted: Vec<Uuid> = given.filter(|_| rng.random_bool(0.1)).collect();
    for feedback_id in retracted {
        let retraction = Retraction {
            id: Uuid::now_v7(),
            feedback_id,
            reason: String::new(),
        };
        events.push(retraction.into_event("default", SOURCE, event::now()));
    }
    if rng.random_bool(0.3) {
        events.push(EpisodeEnd { episode_id }.into_event("default", SOURCE, event::now()));
    }
    events
}

fn feedback(target: Target, metric: &str, value: Value) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target,
        metric_name: metric.to_owned(),
        value,
        tags: BTreeMap::from([("load".to_owned(), "chaos".to_owned())]),
    };
    feedback.into_event("default", SOURCE, event::now())
}

/// The same event with another body.
fn contradict(event: &Event) -> Option<Event> {
    let mut other = event.clone();
    match &mut other.body {
        Body::Generation(generation) => "someone-else".clone_into(&mut generation.user_key),
        Body::Feedback(feedback) => {
            feedback.tags.insert("load".to_owned(), "other".to_owned());
        }
        Body::Retraction(_) | Body::EpisodeEnd(_) => return None,
    }
    Some(other)
}
