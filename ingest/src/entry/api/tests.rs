//! The whole router as callers see it, with librdkafka's mock log and without a database.

use axum::body::Body;
use axum::http::Request;
use edge::auth::AuthOptions;
use event_log::Producer;
use event_log::event::{FinishReason, Generation, PayloadRef, Prefix, Purpose, VersionSpan};
use event_log::kafka::ClientOptions;
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use tower::ServiceExt;
use uuid::Uuid;

use super::*;
use crate::entry::destination::Destination;

/// With every field.
pub(super) fn generation() -> Generation {
    let id = Uuid::now_v7();
    Generation {
        id,
        episode_id: id,
        segment: 0,
        turn: 1,
        parent_id: Some(Uuid::now_v7()),
        policy: "demo".to_owned(),
        line: "realtime".to_owned(),
        versions: vec![VersionSpan {
            version: 3,
            root: [3; 32],
            tokens: 2,
        }],
        replica: "replica-1".to_owned(),
        purpose: Purpose::Production,
        run_id: Some(id),
        task_id: Some("task".to_owned()),
        group_id: Some("group".to_owned()),
        surface: "completion".to_owned(),
        user_key: "user-1".to_owned(),
        arm: "champion".to_owned(),
        arm_probability: 0.6,
        prompt_prefix: Some(Prefix {
            length: 1,
            hash: [1; 32],
        }),
        prompt_ids: vec![10, 11],
        token_ids: vec![20, 2],
        logprobs: vec![-0.1, -2.5],
        train_mask: Some(vec![true, false]),
        payload: Some(PayloadRef {
            digest: [2; 32],
            size_bytes: 5,
            media_type: "application/json".to_owned(),
        }),
        experts: Some(PayloadRef {
            digest: [3; 32],
            size_bytes: 6,
            media_type: "application/json".to_owned(),
        }),
        temperature: 1.0,
        top_p: 1.0,
        seed: Some(7),
        finish_reason: FinishReason::Stop,
        declined: false,
        shown: Some(true),
        consent: true,
        decline_suppressed: true,
        exploration_share: Some(0.02),
        sampling: None,
        untrainable: None,
        engine: None,
        proof: None,
    }
}

/// Nothing listens at this address.
fn no_database() -> PgPool {
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_millis(50));
    options.connect_lazy("postgres://nobody@127.0.0.1:1/none").unwrap()
}

fn router_with(kafka: &ClientOptions, options: &Options, pool: PgPool) -> Router {
    let producer = Producer::new(kafka).unwrap();
    let validator = Validator::new(options.metrics().unwrap(), time::Duration::minutes(5));
    let api = Api::new(
        options,
        Some(pool.clone()),
        Destination::Log(producer),
        Arc::new(validator),
    );
    api.router(&Auth::new(AuthOptions::default(), pool))
}

#[tokio::test]
async fn only_pages_of_named_origins_may_send_feedback() {
    let options = Options {
        feedback_origins: vec!["https://app.example".to_owned()],
        ..Options::default()
    };
    let ask = async |options: &Options, origin: &str, path: &str| {
        let ask = Request::options(path)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type")
            .body(Body::empty())
            .unwrap();
        let answer = router_without_log(options).oneshot(ask).await.unwrap();
        let headers = answer.headers();
        let allowed = headers.get("access-control-allow-origin");
        assert!(allowed.is_none() || headers.contains_key("access-control-allow-headers"));
        allowed.map(|origin| origin.to_str().unwrap().to_owned())
    };
    let app = "https://app.example";
    assert_eq!(ask(&options, app, "/v1/feedback").await.as_deref(), Some(app));
    assert_eq!(ask(&options, "https://other.example", "/v1/feedback").await, None);
    assert_eq!(ask(&options, app, "/v1/generations").await, None);
    assert_eq!(ask(&Options::default(), app, "/v1/feedback").await, None);
    let said = Request::post("/v1/feedback")
        .header("origin", app)
        .body(Body::from("{}"))
        .unwrap();
    let answer = router_without_log(&options).oneshot(said).await.unwrap();
    assert_eq!(
        answer.headers()["access-control-allow-origin"],
        app,
        "also of a refusal"
    );
    for wrong in [
        "*",
        "app.example",
        "https://app.example/",
        "https://App.example",
        "https://app.example/page",
    ] {
        let options = Options {
            feedback_origins: vec![wrong.to_owned()],
            ..Options::default()
        };
        assert!(
            options.check().unwrap_err().to_string().contains("feedback_origins"),
            "{wrong}"
        );
    }
}

/// With a log that accepts everything.
pub(super) fn router() -> Router {
    router_with_database(no_database())
}

fn router_with_database(pool: PgPool) -> Router {
    let mut kafka = ClientOptions::default();
    kafka
        .librdkafka
        .insert("test.mock.num.brokers".to_owned(), "1".to_owned());
    router_with(&kafka, &Options::default(), pool)
}

/// With an unreachable log.
fn router_without_log(options: &Options) -> Router {
    let mut kafka = ClientOptions {
        brokers: "127.0.0.1:1".to_owned(),
        ..ClientOptions::default()
    };
    kafka
        .librdkafka
        .insert("message.timeout.ms".to_owned(), "300".to_owned());
    router_with(&kafka, options, no_database())
}

async fn send(router: &Router, request: Request<Body>) -> (u16, Value) {
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

fn post(path: &str, content_type: &str, body: &Value) -> Request<Body> {
    let request = Request::post(path).header("content-type", content_type);
    request.body(Body::from(body.to_string())).unwrap()
}

async fn post_json(router: &Router, path: &str, body: &Value) -> (u16, Value) {
    send(router, post(path, "application/json", body)).await
}

fn feedback() -> Value {
    json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true})
}

fn canonical(id: &str, value: &Value) -> Value {
    let body = json!({
        "feedback_id": Uuid::now_v7(), "generation_id": Uuid::now_v7(), "metric_name": "accept", "value": value,
    });
    json!({"source": "app", "id": id, "time": "2026-11-21T10:00:00Z", "feedback": body})
}

#[tokio::test]
async fn single_events_are_acknowledged_by_the_log() {
    let router = router();
    let (status, answer) = post_json(&router, "/v1/feedback", &feedback()).await;
    assert_eq!(status, 200, "{answer}");
    assert!(answer["feedback_id"].is_string());
    let body = serde_json::to_value(generation()).unwrap();
    let (status, answer) = post_json(&router, "/v1/generations", &body).await;
    assert_eq!(
        (status, &answer["generation_id"]),
        (200, &body["generation_id"]),
        "{answer}"
    );
}

#[tokio::test]
async fn a_new_event_is_acknowledged_without_asking_the_database() {
    // Accepts connections and never answers, so every question is a connection.
    let database = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    database.set_nonblocking(true).unwrap();
    let address = database.local_addr().unwrap();
    let asked = || database.accept().is_ok();
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_millis(50));
    let pool = options.connect_lazy(&format!("postgres://nobody@{address}/none?sslmode=disable"));
    let router = router_with_database(pool.unwrap());
    let (feedback_id, generation_id) = (Uuid::now_v7(), Uuid::now_v7());
    let sent = async |id: String, value: bool| {
        let mut event = canonical(&id, &json!(value));
        event["feedback"]["feedback_id"] = json!(feedback_id);
        event["feedback"]["generation_id"] = json!(generation_id);
        post_json(&router, "/v1/events:batch", &json!([event])).await.1["results"][0]["status"].clone()
    };
    let new = Uuid::now_v7().to_string();
    assert_eq!(sent(new.clone(), true).await, 200);
    assert_eq!(sent(new.clone(), true).await, 200);
    let body = serde_json::to_value(generation()).unwrap();
    assert_eq!(post_json(&router, "/v1/generations", &body).await.0, 200);
    assert_eq!(post_json(&router, "/v1/feedback", &feedback()).await.0, 200);
    assert!(!asked());
    // The tables may hold the first of these, and decide what the second contradicts.
    assert_eq!(sent("of any age".to_owned(), true).await, 200);
    assert!(asked());
    assert_eq!(sent(new, false).await, 409);
    assert!(asked());
}

#[tokio::test]
async fn a_batch_answers_for_each_event_in_order() {
    let router = router();
    let first = canonical("1", &json!(true));
    let mut conflict = first.clone();
    conflict["feedback"]["value"] = json!(false);
    let items = json!([first, canonical("2", &json!("yes")), {"id": "3"}, 4, first, conflict]);
    let (status, answer) = post_json(&router, "/v1/events:batch", &items).await;
    assert_eq!(status, 207, "{answer}");
    let results = answer["results"].as_array().unwrap();
    let summary: Vec<_> = results
        .iter()
        .map(|result| (result["status"].as_u64().unwrap(), result["id"].as_str()))
        .collect();
    assert_eq!(
        summary,
        [
            (200, Some("1")),
            (400, Some("2")),
            (400, Some("3")),
            (400, None),
            (200, Some("1")),
            (409, Some("1"))
        ]
    );
    assert_eq!(results[1]["problem"]["field"], "value");
    let answer = post_json(&router, "/v1/events:batch", &json!([first])).await;
    assert_eq!(answer.0, 200);
    assert_eq!(post_json(&router, "/v1/events:batch", &json!([])).await.0, 200);
    assert_eq!(
        post_json(&router, "/v1/events:batch", &json!({"events": []})).await.0,
        400
    );
    let many = Value::Array(vec![Value::Null; Options::default().request_events_max + 1]);
    assert_eq!(post_json(&router, "/v1/events:batch", &many).await.0, 413);
}

#[tokio::test]
async fn cloudevents_come_in_three_forms() {
    let router = router();
    let data = json!({
        "feedback_id": Uuid::now_v7(), "generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true,
    });
    let event = json!({
        "specversion": "1.0", "type": "springtide.feedback.v1", "source": "/app", "id": "e-1", "data": data,
    });
    let named = json!({"source": "/app", "id": "e-1"});
    let structured = post("/v1/events", "application/cloudevents+json; charset=utf-8", &event);
    assert_eq!(send(&router, structured).await, (200, named.clone()));

    let mut binary = post("/v1/events", "application/json", &data);
    for (name, value) in [
        ("ce-specversion", "1.0"),
        ("ce-type", "springtide.feedback.v1"),
        ("ce-source", "/app"),
        ("ce-id", "e-1"),
    ] {
        binary.headers_mut().insert(name, value.parse().unwrap());
    }
    assert_eq!(send(&router, binary).await, (200, named));

    let batch = post(
        "/v1/events",
        "application/cloudevents-batch+json",
        &json!([event, {"id": "e-2"}]),
    );
    let (status, answer) = send(&router, batch).await;
    assert_eq!(status, 207, "{answer}");
    assert_eq!(
        (&answer["results"][0]["status"], &answer["results"][1]["status"]),
        (&json!(200), &json!(400))
    );

    let (status, problem) = post_json(&router, "/v1/events", &data).await;
    assert_eq!(status, 415, "{problem}");
}

#[tokio::test]
async fn invalid_requests_are_refused_with_the_reason() {
    let router = router();
    let plain = post("/v1/feedback", "text/plain", &feedback());
    assert_eq!(send(&router, plain).await.0, 415);
    let (status, problem) = send(
        &router,
        post("/v1/feedback?dry_run=true", "application/json", &feedback()),
    )
    .await;
    assert_eq!(status, 400, "{problem}");
    let mut keyed = post("/v1/feedback", "application/json", &feedback());
    keyed
        .headers_mut()
        .insert("idempotency-key", "x".repeat(300).parse().unwrap());
    assert_eq!(send(&router, keyed).await.0, 400);
    let deep = format!(r#"{{"value": {}1{}}}"#, "[".repeat(200), "]".repeat(200));
    let deep = Request::post("/v1/feedback")
        .header("content-type", "application/json")
        .body(Body::from(deep));
    let (status, problem) = send(&router, deep.unwrap()).await;
    assert_eq!(status, 400);
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("expected a boolean, a number or a text"), "{problem}");
}

#[tokio::test]
async fn a_dry_run_without_a_database_is_refused() {
    let router = router();
    let mut dry = feedback();
    dry["dryrun"] = true.into();
    assert_eq!(post_json(&router, "/v1/feedback", &dry).await.0, 503);
    let (status, _) = post_json(
        &router,
        "/v1/events:batch?dryrun=true",
        &json!([canonical("1", &json!(true))]),
    )
    .await;
    assert_eq!(status, 503);
}

#[tokio::test]
async fn after_a_few_failures_of_the_log_requests_are_refused_at_once() {
    let options = Options {
        log_failures_max: 3,
        log_probe_seconds: 60.0,
        ..Options::default()
    };
    let router = router_without_log(&options);
    for _ in 0..3 {
        let (status, problem) = post_json(&router, "/v1/feedback", &feedback()).await;
        assert_eq!(status, 503, "{problem}");
    }
    let started = std::time::Instant::now();
    let response = router
        .clone()
        .oneshot(post("/v1/feedback", "application/json", &feedback()))
        .await
        .unwrap();
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    assert!(
        started.elapsed() < Duration::from_millis(100),
        "{:?}",
        started.elapsed()
    );
    let items = json!([canonical("1", &json!(true)), canonical("2", &json!(true))]);
    let (status, answer) = post_json(&router, "/v1/events:batch", &items).await;
    assert_eq!(
        (status, answer["results"].as_array().unwrap().len()),
        (503, 2),
        "{answer}"
    );
}
