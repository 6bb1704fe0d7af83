//! A replica reports how its slots were used, by production and by each run, and begins again with
//! what it knew.

use fixture::serving::{Publisher, control, releases, serve, wait_until_ready};
use fixture::{Stack, eventually};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

const DEADLINE: Duration = Duration::from_secs(90);
const TOKENS: u64 = 6;

async fn get(url: &str) -> Value {
    let response = reqwest::get(url).await.unwrap();
    assert_eq!(response.status(), 200, "{url}");
    response.json().await.unwrap()
}

/// A request that succeeds.
async fn complete(url: &str, metadata: Value) {
    let body = json!({"model": "demo@champion", "prompt": [5, 6, 7], "max_tokens": TOKENS, "metadata": metadata});
    let client = reqwest::Client::new();
    let response = client
        .post(format!("{url}/v1/completions"))
        .json(&body)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap_or_default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_each_run_used_is_reported_and_known_after_a_restart() {
    let stack = Stack::start("tide").await;
    let mut publisher = Publisher::new(&stack);
    let releases = releases(&stack);
    let control = control(&stack, &releases).await;
    publisher.publish(1, None, 0).await;
    releases.round().await.unwrap();
    let state_dir = stack.dir.path().join("serve");
    let replica = serve(&stack, Some(control.url.clone()), state_dir.clone()).await;
    wait_until_ready(&replica.url).await;
    let report = format!("{}/v1/replicas", control.url);
    eventually("the replica reports", DEADLINE, async || {
        (!get(&report).await["replicas"].as_array().unwrap().is_empty()).then_some(())
    })
    .await;
    let run = Uuid::now_v7();
    complete(&replica.url, json!({"consent": false})).await;
    for _ in 0..3 {
        complete(&replica.url, json!({"purpose": "rollout", "run_id": run})).await;
    }
    complete(&replica.url, json!({"purpose": "evaluation"})).await;
    // a replica that stops reports once more
    replica.stop().await;

    let too_long = json!({"policy": "demo", "process": run, "history_days": 13_393_652, "minutes": [], "uses": []});
    let url = format!("{}/v1/tide/another", control.url);
    let refused = reqwest::Client::new().post(url).json(&too_long).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    let tide = get(&format!("{}/v1/tide", control.url)).await;
    let engine = &tide["engines"][0];
    assert_eq!(
        (&engine["replica"], &engine["cluster"]),
        (&json!("replica-1"), &json!("local"))
    );
    assert_eq!(engine["slots"], 16);
    assert!(engine["why"].is_string() && engine["slot_limit"].is_i64(), "{engine}");
    assert!(engine["harvested_slot_seconds"].as_f64().unwrap() > 0.0, "{engine}");
    assert!(engine["lendable_slot_seconds"].as_f64().unwrap() > 0.0, "{engine}");
    assert!(engine["first_token_ms_alone"].as_f64().unwrap() > 0.0, "{engine}");
    assert_eq!(
        tide["clusters"][0]["harvested_slot_seconds"],
        engine["harvested_slot_seconds"]
    );

    let costs = get(&format!("{}/v1/ledger/cost", control.url)).await;
    let of = |work: &str, run: Option<Uuid>| {
        let mut costs = costs["costs"].as_array().unwrap().iter();
        costs
            .find(|cost| cost["work"] == work && cost["run"] == json!(run))
            .unwrap()
            .clone()
    };
    assert_eq!(of("production", None)["sampled"], TOKENS);
    assert_eq!(of("evaluation", None)["sampled"], TOKENS);
    let rollouts = of("rollout", Some(run));
    assert_eq!(
        (&rollouts["sampled"], &rollouts["thrown_away"]),
        (&json!(3 * TOKENS), &json!(0))
    );
    assert!(rollouts["engine_seconds"].as_f64().unwrap() > 0.0);
    let one = get(&format!("{}/v1/ledger/cost?run={run}", control.url)).await;
    assert_eq!(one["costs"].as_array().unwrap().len(), 1);

    let past = get(&format!("{}/v1/tide/replica-1/history", control.url)).await;
    assert!(past["past"][0]["lent_slot_seconds"].as_f64().unwrap() > 0.0, "{past}");
    // the counts of another process are added
    let again = serve(&stack, Some(control.url.clone()), state_dir).await;
    wait_until_ready(&again.url).await;
    complete(&again.url, json!({"purpose": "rollout", "run_id": run})).await;
    again.stop().await;
    let both = get(&format!("{}/v1/ledger/cost?run={run}", control.url)).await;
    assert_eq!(both["costs"][0]["sampled"], 4 * TOKENS);
    control.stop().await;
}
