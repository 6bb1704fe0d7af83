//! Configurable rewards: typed metrics, expressions over several signals, and versions of
//! definitions.

use event_log::event::{self, Body, Event, Feedback, Generation, Retraction, Target, Value};
use ingest::reward::{Definition, Level, Metric, MetricType};
use serde_json::json;
use std::collections::BTreeMap;
use uuid::Uuid;

use fixture::Stack;
use fixture::ingest::{Service, Trajectory, count, generation, options, send, trajectory};

const SOURCE: &str = "tests/reward";

/// Kept characters minus a penalty per retry. Without them, the thumb decides.
const REWARD: &str = "declined ? 0.0 : kept != null ? kept - 0.1 * double(all.retry.size()) : thumb == null ? null : (thumb ? 1.0 : -1.0)";

fn chat() -> ingest::Options {
    let metric = |name: &str, metric_type, level| Metric {
        level,
        ..Metric::new(name, metric_type)
    };
    let surface = Definition {
        name: "chat".to_owned(),
        reward: Some(REWARD.to_owned()),
        ..options().surface[0].clone()
    };
    ingest::Options {
        surface: vec![surface],
        metric: vec![
            metric("kept", MetricType::Float, Some(Level::Generation)),
            metric("retry", MetricType::Float, Some(Level::Generation)),
            metric("thumb", MetricType::Boolean, Some(Level::Episode)),
        ],
        ..options()
    }
}

fn in_chat() -> Generation {
    Generation {
        surface: "chat".to_owned(),
        decline_suppressed: false,
        exploration_share: None,
        sampling: None,
        untrainable: None,
        engine: None,
        proof: None,
        ..generation()
    }
}

fn about(target: Target, metric: &str, value: Value) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target,
        metric_name: metric.to_owned(),
        value,
        tags: BTreeMap::new(),
    };
    feedback.into_event("default", SOURCE, event::now())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expression_combines_several_signals() {
    let stack = Stack::start("reward-expression").await;
    let service = Service::start_with(&stack, chat()).await;
    let (kept, thumbed, unanswered) = (in_chat(), in_chat(), in_chat());
    let (kept_id, thumbed_id, unanswered_id) = (kept.id, thumbed.id, unanswered.id);
    let mut events = vec![
        about(Target::Generation(kept_id), "retry", Value::Float(1.0)),
        about(Target::Generation(kept_id), "kept", Value::Float(0.75)),
        about(Target::Generation(kept_id), "retry", Value::Float(1.0)),
        about(Target::Episode(thumbed.episode_id), "thumb", Value::Bool(false)),
        about(
            Target::Generation(unanswered_id),
            "comment",
            Value::Text("well".to_owned()),
        ),
    ];
    events.extend([kept, thumbed, unanswered].map(|generation| generation.into_event("default", SOURCE)));
    send(&stack, &events).await;

    let weighed = trajectory(&stack.pool, kept_id).await;
    assert_eq!(weighed, Trajectory::rewarded(0.55, "expression"));
    let thumbed = trajectory(&stack.pool, thumbed_id).await;
    assert_eq!(thumbed, Trajectory::rewarded(-1.0, "expression"));
    let unanswered = trajectory(&stack.pool, unanswered_id).await;
    assert_eq!(unanswered, Trajectory::censored("no_feedback"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_word_on_what_was_kept_is_stored_and_changes_no_reward() {
    let stack = Stack::start("reward-kept").await;
    let service = Service::start(&stack).await;
    let (edited, taken_back, silent) = (generation(), generation(), generation());
    let of = |generation: &Generation, characters| {
        about(
            Target::Generation(generation.id),
            "kept_characters",
            Value::Float(characters),
        )
    };
    let retracted = of(&taken_back, 9.0);
    let Body::Feedback(said) = &retracted.body else {
        panic!("no feedback")
    };
    let retraction = Retraction {
        id: Uuid::now_v7(),
        feedback_id: said.id,
        reason: String::new(),
    };
    let retraction = retraction.into_event("default", SOURCE, event::now());
    let mut events = vec![
        of(&edited, 4.0),
        of(&edited, 12.0),
        of(&edited, 7.0),
        retracted,
        retraction,
    ];
    for answered in [&edited, &taken_back, &silent] {
        events.push(about(Target::Generation(answered.id), "accept", Value::Bool(false)));
    }
    let ids = [edited.id, taken_back.id, silent.id];
    events.extend([edited, taken_back, silent].map(|generation| generation.into_event("default", SOURCE)));
    send(&stack, &events).await;
    let mut kept = Vec::new();
    for id in ids {
        assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(-0.25, "reject"));
        let sql = "select kept_characters from trajectory where generation_id = $1";
        let of_one: Option<i32> = sqlx::query_scalar(sql).bind(id).fetch_one(&stack.pool).await.unwrap();
        kept.push(of_one);
    }
    assert_eq!(kept, [Some(7), None, None]);
    let half = json!({"generation_id": ids[0], "metric_name": "kept_characters", "value": 1.5});
    let (status, problem) = service.post("/v1/feedback", &half).await;
    assert_eq!((status, &problem["field"]), (400, &json!("value")), "{problem}");
    let of_episode = json!({"episode_id": ids[0], "metric_name": "kept_characters", "value": 1.0});
    let (status, problem) = service.post("/v1/feedback", &of_episode).await;
    assert_eq!((status, &problem["field"]), (400, &json!("episode_id")), "{problem}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_of_another_type_or_level_than_its_metric_is_refused() {
    let stack = Stack::start("reward-metrics").await;
    let service = Service::start_with(&stack, chat()).await;
    let id = Uuid::now_v7();
    let text = json!({"generation_id": id, "metric_name": "kept", "value": "all"});
    let (status, problem) = service.post("/v1/feedback", &text).await;
    assert_eq!((status, &problem["field"]), (400, &json!("value")), "{problem}");
    let level = json!({"generation_id": id, "metric_name": "thumb", "value": true});
    let (status, problem) = service.post("/v1/feedback", &level).await;
    assert_eq!((status, &problem["field"]), (400, &json!("generation_id")), "{problem}");
    assert!(
        problem["detail"].as_str().unwrap().contains("send episode_id"),
        "{problem}"
    );
    let right = json!({"episode_id": id, "metric_name": "thumb", "value": true});
    assert_eq!(service.post("/v1/feedback", &right).await.0, 200);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_expression_is_a_new_version_and_trajectories_name_their_version() {
    let stack = Stack::start("reward-versions").await;
    let mut versions = Vec::new();
    for reward in ["kept", "2.0 * kept", "2.0 * kept"].map(|gives| format!("kept == null ? null : {gives}")) {
        let mut options = chat();
        options.surface[0].reward = Some(reward);
        let service = Service::start_with(&stack, options).await;
        let generation = in_chat();
        let id = generation.id;
        let kept = about(Target::Generation(id), "kept", Value::Float(0.5));
        send(&stack, &[kept, generation.into_event("default", SOURCE)]).await;
        trajectory(&stack.pool, id).await;
        let version: i32 = sqlx::query_scalar("select reward_definition from trajectory where generation_id = $1")
            .bind(id)
            .fetch_one(&stack.pool)
            .await
            .unwrap();
        versions.push(version);
        service.stop().await;
    }
    assert_eq!(versions, [1, 2, 2]);
    let query = "select count(*) from reward_definition where surface = 'chat'";
    assert_eq!(count(&stack.pool, query).await, 2);
}
