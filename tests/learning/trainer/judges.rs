//! Rollouts graded by a judge: an HTTP endpoint that answers, hangs, breaks and talks nonsense.

use super::fleet::Wrong;
use super::offline::{control, create_as, ended, fleet, get, ingest, offline, request};
use super::world::World;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// An endpoint whose answer to a message is always the same.
#[derive(Debug, Clone, Default)]
struct Endpoint(Arc<Mutex<Asked>>);

#[derive(Debug, Default)]
struct Asked {
    requests: usize,
    /// Messages that were answered well, in order.
    answered: Vec<String>,
    /// After so many good answers another model answers.
    changes_after: Option<usize>,
}

impl Endpoint {
    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new()
            .route("/v1/chat/completions", post(answer))
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        format!("http://{address}/v1")
    }
}

async fn answer(State(endpoint): State<Endpoint>, Json(body): Json<Value>) -> Response {
    assert_eq!(body["response_format"]["type"], "json_schema");
    let text = body["messages"][1]["content"].as_str().unwrap().to_owned();
    let digest = *blake3::hash(text.as_bytes()).as_bytes();
    let reply = |model: &str, content: String| {
        Json(json!({"model": model, "system_fingerprint": "fp_1", "choices": [
            {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}))
        .into_response()
    };
    endpoint.0.lock().unwrap().requests += 1;
    match digest[0] % 8 {
        0 => std::future::pending().await,
        1 => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        2 => reply("judge-1", "quite good".to_owned()),
        _ => {
            let mut asked = endpoint.0.lock().unwrap();
            let is_other = asked.changes_after.is_some_and(|after| asked.answered.len() >= after);
            asked.answered.push(text);
            let model = if is_other { "judge-2" } else { "judge-1" };
            // never 0: a reward of 0 would be an error that was taken for a reward
            reply(model, json!({"answer": 0.1 + f64::from(digest[1]) / 512.0}).to_string())
        }
    }
}

/// How many rollouts of a run have no reward, by why.
async fn codes_of(world: &World, run: &Value) -> BTreeMap<String, i64> {
    let run: uuid::Uuid = run["id"].as_str().unwrap().parse().unwrap();
    let rows: Vec<(String, i64)> =
        sqlx::query_as("select code, count(*) from rollout where run_id = $1 and code is not null group by code")
            .bind(run)
            .fetch_all(&world.stack.pool)
            .await
            .unwrap();
    rows.into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_judge_is_asked_once_and_each_of_its_failures_has_a_code() {
    let world = World::start("judges").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let endpoint = Endpoint::default();
    let mut options = offline(&world);
    options.offline.empty_draws_max = 2;
    let judge = json!({"name": "large", "url": endpoint.serve().await, "model": "judge", "tries_max": 1,
        "timeout_seconds": 3.0, "concurrency": 16});
    options.judge = vec![serde_json::from_value(judge).unwrap()];
    let running = world.run_against(options, &serve_url);
    let mut wanted = request();
    wanted["steps"] = json!(1);
    wanted["group_size"] = json!(32);
    wanted["grader"] = json!({"type": "rubric", "model": "large", "rubric": "It is right.", "range": [0.0, 1.0]});

    let (_, run) = create_as(&control, &wanted).await;
    let first = ended(&run).await;
    assert_eq!(first["status"], "succeeded", "{first}");
    let notes = world.metrics(1).await["notes"].clone();
    let lost: BTreeMap<String, i64> = serde_json::from_value(notes["lost"].clone()).unwrap();
    let codes = ["grade_failed", "grade_invalid", "grade_timeout"];
    assert!(lost.keys().all(|code| codes.contains(&code.as_str())), "{notes}");
    assert!(lost.values().sum::<i64>() > 0, "{notes}");
    let stored = codes_of(&world, &first).await;
    assert_eq!(stored, lost);
    let zeros: i64 = sqlx::query_scalar("select count(*) from trajectory where reward <= 0")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(zeros, 0, "an error is no reward");
    let events = get(format!("{run}/events")).await;
    let said = |what: &str| {
        let events = events["data"].as_array().unwrap().iter();
        events
            .filter(|event| event["message"].as_str().unwrap().contains(what))
            .count()
    };
    assert_eq!(said("judge large answers as model \"judge-1\""), 1, "{events}");
    assert!(said("grade_") > 0, "{events}");

    // each text was paid for once, and no text is stored
    let answered = endpoint.0.lock().unwrap().answered.clone();
    let distinct: BTreeSet<&String> = answered.iter().collect();
    assert_eq!(distinct.len(), answered.len());
    let stored: i64 = sqlx::query_scalar("select count(*) from judge_answer where model = 'judge-1'")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(stored, answered.len() as i64);

    // stored answers alone: nobody is asked
    let requests = endpoint.0.lock().unwrap().requests;
    let mut replayed = wanted.clone();
    replayed["replay"] = json!(true);
    let (_, run) = create_as(&control, &replayed).await;
    let replay = ended(&run).await;
    assert_eq!(endpoint.0.lock().unwrap().requests, requests);
    let codes: Vec<String> = codes_of(&world, &replay).await.into_keys().collect();
    assert_eq!(codes, ["grade_not_stored"]);

    // another model answers in the middle of a run
    endpoint.0.lock().unwrap().changes_after = Some(answered.len() + 4);
    wanted["steps"] = json!(20);
    let (_, run) = create_as(&control, &wanted).await;
    let changed = ended(&run).await;
    assert_eq!(changed["status"], "failed", "{changed}");
    let reason = changed["reason"].as_str().unwrap();
    assert!(reason.contains("judge-2") && reason.contains("judge-1"), "{reason}");

    wanted["grader"]["model"] = json!("small");
    let (_, run) = create_as(&control, &wanted).await;
    let unknown = ended(&run).await;
    assert!(
        unknown["reason"]
            .as_str()
            .unwrap()
            .contains("no [[trainer.judge]] \"small\""),
        "{unknown}"
    );
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}
