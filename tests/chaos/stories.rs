//! What happens to the users of the load: episodes with their generations, what is said about them, taken back, ended, and
//! the ways in which real producers get it wrong: twice, in the wrong order, under a name that is taken.

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
/// Events of a story on the average, repetitions included.
pub const EVENTS_PER_STORY: f64 = 4.4;
/// How far apart the events of a story are sent at most.
const SPREAD_MS: u64 = 2_000;
const REPEATED: f64 = 0.3;
const CONTRADICTED: f64 = 0.01;
const WITHOUT_GENERATION: f64 = 0.03;

/// Tells one story.
pub fn tell(rng: &mut StdRng, ledger: &Ledger, client: &Client) {
    for event in story(rng) {
        let delay = Duration::from_millis(rng.random_range(0..SPREAD_MS));
        let nth = ledger.note(&event);
        let event = Arc::new(event);
        client.send(nth, event.clone(), delay);
        if rng.random_bool(REPEATED) {
            let again = Duration::from_millis(rng.random_range(0..SPREAD_MS));
            client.send(nth, event.clone(), again);
        }
        if let Some(other) = contradict(&event).filter(|_| rng.random_bool(CONTRADICTED)) {
            let nth = ledger.note(&other);
            let at = Duration::from_millis(rng.random_range(0..SPREAD_MS));
            client.send(nth, Arc::new(other), at);
        }
    }
}

fn story(rng: &mut StdRng) -> Vec<Event> {
    let episode_id = Uuid::now_v7();
    let mut events = Vec::new();
    for turn in 0..rng.random_range(1..=2) {
        let length = rng.random_range(1..=64);
        let generation = Generation {
            episode_id,
            turn,
            versions: vec![event::VersionSpan {
                version: 3,
                root: [3; 32],
                tokens: length,
            }],
            token_ids: (0..length).map(|_| rng.random_range(0..1000)).collect(),
            logprobs: (0..length).map(|_| -rng.random::<f32>()).collect(),
            train_mask: None,
            sampling: None,
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
    let taken_back: Vec<Uuid> = given.filter(|_| rng.random_bool(0.1)).collect();
    for feedback_id in taken_back {
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

/// Another body under the same name.
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
