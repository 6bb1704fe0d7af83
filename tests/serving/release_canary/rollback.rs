//! Where a rollback goes that names no version.

use super::World;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollback_without_a_number_passes_over_what_was_trained_on_top_of_a_bad_version() {
    let world = World::start("rollback_bad").await;
    // champion serves 1, then 3, then 2, on top of which 3 was trained
    for version in [3, 2] {
        let promote = json!({"kind": "promote", "alias": "champion", "version": version, "reason": "try"});
        let (status, done) = world.post("/v1/releases", &promote).await;
        assert_eq!(status, 201, "{done}");
    }
    let bad = json!({"version": 2, "verdict": "bad", "reason": "it invents functions"});
    let (status, judged) = world.post("/v1/judgments", &bad).await;
    assert_eq!((status, &judged["last_known_good"]), (201, &Value::Null), "{judged}");
    let rollback = json!({"kind": "rollback", "alias": "champion", "reason": "worse"});
    let (status, done) = world.post("/v1/releases", &rollback).await;
    assert_eq!(
        (status, &done["from_version"], &done["to_version"]),
        (201, &json!(2), &json!(1)),
        "{done}"
    );
    world.end().await;
}
