//! Judges, surfaces and texts of the tests.

use std::collections::BTreeMap;
use std::time::Duration;

use event_log::event::{self, Event, Feedback, Generation, Target, Value};
use ingest::judge;
use ingest::rescore::{Reader, Request};
use ingest::reward::{Definition, Metric, MetricType, Outcome, Unit};
use serde_json::json;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use super::endpoint::Endpoint;
use crate::ingest_order::{hold_the_closer, release_the_closer};
use fixture::ingest::{Trajectory, count, generation, options, send};
use fixture::{Stack, eventually};

pub const SOON: Duration = Duration::from_secs(120);
pub const SOURCE: &str = "tests/judge";
/// Longer than a test takes.
pub const FOR_EVER: f64 = 3_600.0;

pub fn judge_at(url: impl Into<String>) -> judge::Options {
    let judge = json!({
        "name": "sadness",
        "metric": "dissatisfied",
        "of": "follow_up",
        "url": url.into(),
        "model": "small",
        "rubric": "The user is dissatisfied with the answer before.",
        "patience_seconds": FOR_EVER,
    });
    serde_json::from_value(judge).unwrap()
}

pub fn judge_of(endpoint: &Endpoint) -> judge::Options {
    judge_at(format!("http://{}/v1", endpoint.address))
}

/// `chat`: dissatisfied is −1, satisfied 0.5. `session`: the same of whole sessions, by their turns.
pub fn with_judges(judges: impl IntoIterator<Item = judge::Options>) -> ::ingest::Options {
    let chat = Definition {
        name: "chat".to_owned(),
        reward: Some("dissatisfied == null ? null : (dissatisfied ? -1.0 : 0.5)".to_owned()),
        ..options().surface[0].clone()
    };
    let session = Definition {
        name: "session".to_owned(),
        trajectory: Unit::Episode,
        reward: Some("turn.count.dissatisfied == 0 ? null : 0.5 - turn.mean.dissatisfied".to_owned()),
        turn_reward: Some("dissatisfied == null ? null : (dissatisfied ? -1.0 : 1.0)".to_owned()),
        ..chat.clone()
    };
    let moody = Definition {
        name: "moody".to_owned(),
        reward: Some("mood".to_owned()),
        ..chat.clone()
    };
    ::ingest::Options {
        surface: vec![chat, session, moody, options().surface[0].clone()],
        metric: vec![
            Metric::new("dissatisfied", MetricType::Boolean),
            Metric::new("mood", MetricType::Float),
            Metric::new("follow_up", MetricType::Comment),
        ],
        judge: judges.into_iter().collect(),
        ..options()
    }
}

pub fn on(surface: &str) -> Generation {
    Generation {
        surface: surface.to_owned(),
        ..generation()
    }
}

pub fn logged(generation: &Generation) -> Event {
    generation.clone().into_event("default", SOURCE)
}

/// What the user wrote right after the generation, however slow this test is.
pub fn follow_up(generation: &Generation, text: &str) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target: Target::Generation(generation.id),
        metric_name: "follow_up".to_owned(),
        value: Value::Text(text.to_owned()),
        tags: BTreeMap::new(),
    };
    let time = event::time_of(generation.id).unwrap() + Duration::from_millis(10);
    feedback.into_event("default", SOURCE, time)
}

pub fn feedback_id(event: &Event) -> Uuid {
    match &event.body {
        event::Body::Feedback(feedback) => feedback.id,
        other => panic!("{other:?}"),
    }
}

/// Sends generations with a follow-up each, and lets nothing close before the texts are queued.
pub async fn send_queued(stack: &Stack, turns: &[(&Generation, &str)]) -> Vec<Event> {
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let queued = count(&stack.pool, "select count(*) from judgement").await;
    let generations: Vec<Event> = turns.iter().map(|(generation, _)| logged(generation)).collect();
    send(stack, &generations).await;
    let texts: Vec<Event> = turns
        .iter()
        .map(|(generation, text)| follow_up(generation, text))
        .collect();
    send(stack, &texts).await;
    let all = queued + i64::try_from(texts.len()).unwrap();
    becomes(&stack.pool, "select count(*) from judgement", all).await;
    release_the_closer(&stack.pool).await;
    texts
}

pub async fn becomes(pool: &PgPool, query: &'static str, number: i64) {
    eventually(query, SOON, async || (count(pool, query).await == number).then_some(())).await;
}

/// (Error code, failed attempts) of the only judgement of a text, once it is given up.
pub async fn given_up(pool: &PgPool, text: &Event) -> (String, i32) {
    eventually("the text is given up", SOON, async || {
        let row = sqlx::query_as("select error, attempts from judgement where feedback_id = $1 and error is not null");
        row.bind(feedback_id(text)).fetch_optional(pool).await.unwrap()
    })
    .await
}

/// The new scores by the current definition of a surface.
pub async fn rescored(
    stack: &Stack,
    options: &::ingest::Options,
    surface: &str,
    as_seen: bool,
) -> BTreeMap<Uuid, Outcome> {
    let rules = options.rules().unwrap();
    let request = Request {
        rule: rules.into_iter().find(|rule| rule.definition.name == surface).unwrap(),
        judges: options.judges().unwrap(),
        since: None,
        until: None,
        tenant: None,
        as_seen,
        // All horizons of the tests are over.
        known: OffsetDateTime::now_utc() + Duration::from_secs(3_600),
    };
    let mut reader = Reader::new(stack.pool.clone(), request).await.unwrap();
    let lines = reader.next().await.unwrap().into_iter();
    lines.map(|line| (line.generation_id, line.outcome.unwrap())).collect()
}

pub fn unscored() -> Trajectory {
    Trajectory::censored("unscored_judge")
}
