//! The load: single generations and sessions with feedback, retractions and ends, and the mistakes of
//! real producers: repetitions, wrong order, late events, and ids that are taken.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use event_log::event::{self, Body, EpisodeEnd, Event, Feedback, Generation, Retraction, Target, Value};
use rand::Rng;
use rand::rngs::StdRng;
use time::OffsetDateTime;
use uuid::{Builder, Uuid};

use super::client::Client;
use super::ledger::Ledger;
use fixture::ingest::generation;

pub const SOURCE: &str = "tests/chaos";
/// Mean number of events per story, repetitions included.
pub const EVENTS_PER_STORY: f64 = 6.7;
/// The events of a story are sent within this time.
const SPREAD_MS: u64 = 2_000;
/// How old the events of a session may be that closes early. Its turns lie before and after its end.
const AGE_MS: i64 = 4_000;
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
    let surface = ["completion", "session", "ending", "deciding"][rng.random_range(0..4)];
    let is_session = surface != "completion";
    let age_max = if ["ending", "deciding"].contains(&surface) {
        AGE_MS
    } else {
        0
    };
    let now = event::now();
    let time = |rng: &mut StdRng| now - time::Duration::milliseconds(rng.random_range(0..=age_max));
    let mut events = Vec::new();
    for turn in 0..rng.random_range(1..=if is_session { 5 } else { 2 }) {
        let length = rng.random_range(1..=64);
        let time = time(rng);
        let generation = Generation {
            id: id_of(time, rng),
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
            engine: None,
            proof: None,
            ..generation()
        };
        let about = Target::Generation(generation.id);
        if !rng.random_bool(WITHOUT_GENERATION) {
            let mut event = generation.into_event("default", SOURCE);
            event.time = time;
            events.push(event);
        }
        for _ in 0..rng.random_range(0..=if is_session { 1 } else { 2 }) {
            let (metric, value) = match rng.random_bool(0.8) {
                true => ("accept", Value::Bool(rng.random())),
                false => ("comment", Value::Text("as I would have it".to_owned())),
            };
            events.push(feedback(about, metric, value, now));
        }
    }
    for share in if is_session { [0.6, 0.2] } else { [0.1, 0.0] } {
        if rng.random_bool(share) {
            let thumb = Value::Bool(rng.random());
            events.push(feedback(Target::Episode(episode_id), "accept", thumb, time(rng)));
        }
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
        events.push(retraction.into_event("default", SOURCE, time(rng)));
    }
    if rng.random_bool(0.4) {
        events.push(EpisodeEnd { episode_id }.into_event("default", SOURCE, time(rng)));
    }
    events
}

/// A UUIDv7 of this time.
fn id_of(time: OffsetDateTime, rng: &mut StdRng) -> Uuid {
    let millis = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap();
    Builder::from_unix_timestamp_millis(millis, &rng.random()).into_uuid()
}

fn feedback(target: Target, metric: &str, value: Value, time: OffsetDateTime) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target,
        metric_name: metric.to_owned(),
        value,
        tags: BTreeMap::from([("load".to_owned(), "chaos".to_owned())]),
    };
    feedback.into_event("default", SOURCE, time)
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
