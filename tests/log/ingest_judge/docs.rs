//! The example of docs/guide-serving.md that combines the signals that nobody presses, as it stands
//! there.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use event_log::event::{self, EpisodeEnd, Event, Feedback, Generation, Target, Value};
use serde::Deserialize;
use uuid::Uuid;

use super::endpoint::{Endpoint, Reply};
use super::world::{SOURCE, becomes, follow_up, logged, on};
use crate::ingest_order::{hold_the_closer, release_the_closer};
use fixture::Stack;
use fixture::ingest::{Service, Trajectory, options, send, trajectory};

#[derive(Deserialize)]
struct File {
    ingest: ingest::Options,
}

/// The configuration in the docs, with the test's endpoint and a shorter horizon.
fn example(endpoint: &Endpoint) -> ingest::Options {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide-serving.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut blocks = page
        .split("```toml\n")
        .skip(1)
        .map(|block| block.split("```").next().unwrap());
    let block = blocks.find(|block| block.contains("[[ingest.judge]]")).unwrap();
    let File { mut ingest } = toml::from_str(block).unwrap();
    assert_eq!((ingest.judge.len(), ingest.surface.len()), (1, 1));
    ingest.judge[0].url = format!("http://{}/v1", endpoint.address);
    ingest.judge[0].api_key = None;
    ingest.judge[0].patience_seconds = 3_600.0;
    ingest.surface[0].horizon_seconds = 2.0;
    ingest.close_grace_seconds = options().close_grace_seconds;
    ingest
}

/// A session of three turns with what happened at each of them: (turn, metric, value).
struct Session {
    turns: Vec<Generation>,
    signals: Vec<(usize, &'static str, Value)>,
    /// What the user wrote after the first turn.
    follow_up: Option<&'static str>,
    ended: bool,
    reward: Option<f64>,
}

fn session(
    signals: &[(usize, &'static str, Value)],
    follow_up: Option<&'static str>,
    ended: bool,
    reward: Option<f64>,
) -> Session {
    let episode_id = Uuid::now_v7();
    let turn = |turn| Generation {
        episode_id,
        turn,
        ..on("assistant")
    };
    Session {
        turns: (0..3).map(turn).collect(),
        signals: signals.to_vec(),
        follow_up,
        ended,
        reward,
    }
}

impl Session {
    /// All events but the generations, by their times within the horizon.
    fn said(&self) -> Vec<Event> {
        let after = |turn: &Generation| event::time_of(turn.id).unwrap() + Duration::from_millis(10);
        let mut events = Vec::new();
        for (turn, metric, value) in &self.signals {
            let feedback = Feedback {
                id: Uuid::now_v7(),
                target: Target::Generation(self.turns[*turn].id),
                metric_name: (*metric).to_owned(),
                value: value.clone(),
                tags: BTreeMap::new(),
            };
            events.push(feedback.into_event("default", SOURCE, after(&self.turns[*turn])));
        }
        events.extend(self.follow_up.map(|text| follow_up(&self.turns[0], text)));
        if self.ended {
            let end = EpisodeEnd {
                episode_id: self.turns[0].episode_id,
            };
            let at = self.turns.iter().map(&after).max().unwrap() + Duration::from_millis(10);
            events.push(end.into_event("default", SOURCE, at));
        }
        events
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_of_the_docs_combines_what_users_do_without_pressing_anything() {
    let endpoint = Endpoint::start(|text, _| Reply::answer(text.contains("wrong"))).await;
    let stack = Stack::start("judge-docs").await;
    let service = Service::start_with(&stack, example(&endpoint)).await;
    let yes = Value::Bool(true);
    let kept = |turn, share| (turn, "kept", Value::Float(share));
    let sessions = [
        // Satisfied: everything was kept.
        session(&[kept(0, 1.0), kept(1, 1.0)], Some("thanks"), true, Some(1.0)),
        // Two of three retried, a tool failed, and in the end the user wrote it anew.
        session(
            &[
                (0, "retry", yes.clone()),
                (1, "retry", yes.clone()),
                (1, "tool_failed", yes.clone()),
                kept(2, 0.5),
                (2, "demonstration", Value::Text("what was really written".to_owned())),
            ],
            Some("that is wrong"),
            true,
            Some(0.5 - 1.0 - 0.2 - 0.1 - 0.2),
        ),
        // Kept a little, and left.
        session(&[kept(0, 0.25)], None, false, Some(0.25 - 0.25)),
        // A failed tool is a signal, and so is a retry.
        session(&[(0, "tool_failed", yes.clone())], None, true, Some(-0.1)),
        // Silence is not, even if the user leaves.
        session(&[], None, true, None),
        session(&[], None, false, None),
    ];
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let turns: Vec<Event> = sessions
        .iter()
        .flat_map(|session| session.turns.iter().map(logged))
        .collect();
    let said: Vec<Event> = sessions.iter().flat_map(Session::said).collect();
    let signals = said
        .iter()
        .filter(|event| matches!(event.body, event::Body::Feedback(_)))
        .count();
    send(&stack, &turns).await;
    send(&stack, &said).await;
    becomes(
        &stack.pool,
        "select count(*) from feedback where metric_name <> 'dissatisfied'",
        i64::try_from(signals).unwrap(),
    )
    .await;
    becomes(&stack.pool, "select count(*) from episode_end", 4).await;
    release_the_closer(&stack.pool).await;
    for (nth, session) in sessions.iter().enumerate() {
        for turn in &session.turns {
            let closed = trajectory(&stack.pool, turn.id).await;
            match session.reward {
                None => assert_eq!(closed, Trajectory::censored("no_feedback"), "session {nth}"),
                Some(reward) => {
                    let is = closed.reward().unwrap_or_else(|| panic!("session {nth}: {closed:?}"));
                    assert!((is - reward).abs() < 1e-9, "session {nth}: {is}, not {reward}");
                }
            }
        }
    }
    service.stop().await;
}
