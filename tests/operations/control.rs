//! The control role as a process: queries that span crates, and API keys.

use serde_json::Value;
use sqlx::Executor;

use fixture::Stack;
use fixture::control::Control;

/// A step from version 1 to 2 that was trained on one generation. Another generation, of version 2,
/// is open.
const HISTORY: &str = concat!(include_str!("two_versions.sql"), include_str!("control/history.sql"));
const TRAINED: &str = "01980000-0000-7000-8000-000000000001";
const OPEN: &str = "01980000-0000-7000-8000-000000000002";

#[tokio::test(flavor = "multi_thread")]
async fn the_origin_of_a_generation_leads_to_the_trajectories_of_its_version() {
    let stack = Stack::start("origin").await;
    stack.pool.execute(HISTORY).await.unwrap();
    let control = Control::start(&stack, &[("SPRINGTIDE__POLICY__NAME", "traced")]).await;

    let origin = control.json(&format!("/v1/generations/{OPEN}/origin")).await;
    assert_eq!(origin["version"]["serial"], 2);
    assert_eq!(origin["version"]["parent"], 1);
    assert_eq!(origin["version"]["manifest"], "policy/traced/version/0000000002.json");
    assert_eq!(origin["step"]["step"], 1);
    assert_eq!(origin["trajectories"].as_array().unwrap().len(), 1);
    assert_eq!(origin["trajectories"][0]["generation"], TRAINED);
    assert_eq!(origin["trajectories"][0]["reward"], 0.75);

    let origin = control.json(&format!("/v1/generations/{TRAINED}/origin")).await;
    assert_eq!(origin["generation"]["disposition"], "trained");
    assert!(origin["step"].is_null(), "an imported version has no step");

    let unknown = "/v1/generations/01980000-0000-7000-8000-00000000ffff/origin";
    assert_eq!(control.get(unknown, None).await.unwrap().status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_that_takes_too_long_ends_with_its_snapshot() {
    let stack = Stack::start("slow-ledger").await;
    let control = Control::start(&stack, &[]).await;
    let mut busy = edge::database::begin(&stack.pool).await.unwrap();
    busy.execute("lock table generation in access exclusive mode")
        .await
        .unwrap();
    let answer = control.get("/v1/ledger", None).await.unwrap();
    assert_eq!(answer.status(), 503);
    let waiting = "select count(*) from pg_stat_activity where state <> 'idle' and query like '%from generation%' \
                   and datname = current_database() and pid <> pg_backend_pid()";
    let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&mut *busy).await.unwrap();
    assert_eq!(waiting, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ledger_counts_add_up_and_can_be_filtered() {
    let stack = Stack::start("counts").await;
    stack.pool.execute(HISTORY).await.unwrap();
    let control = Control::start(&stack, &[("SPRINGTIDE__POLICY__NAME", "traced")]).await;
    let ledger = control.json("/v1/ledger").await;
    assert_eq!(
        (&ledger["generations"], &ledger["trained"], &ledger["open"]),
        (&2.into(), &1.into(), &1.into())
    );
    assert_eq!(ledger["balanced"], true);
    assert_eq!(control.json("/v1/ledger?policy=other").await["generations"], 0);
    assert_eq!(
        control.json("/v1/ledger?since=2999-01-01T00:00:00Z").await["generations"],
        0
    );
    assert_eq!(
        control.get("/v1/ledger?police=traced", None).await.unwrap().status(),
        400
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_required_key_are_refused() {
    let stack = Stack::start("keys").await;
    let required = [
        ("SPRINGTIDE__AUTH__REQUIRED", "true"),
        ("SPRINGTIDE__SERVE__API_KEY", "unused"),
        ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ];
    let mut control = Control::start(&stack, &required).await;
    for path in ["/v1/ledger", "/v1/aliases", "/v1/runs", "/v1/versions", "/v1/replicas"] {
        let answer = control.get(path, None).await.unwrap();
        assert_eq!(answer.status(), 401, "{path}");
        assert_eq!(answer.headers()["content-type"], "application/problem+json");
    }
    let key = control.output(&["key", "create", "--role", "release", "--label", "night shift"]);
    let answer = control.get("/v1/aliases", Some(key.trim())).await.unwrap();
    assert_eq!(answer.status(), 200);
    control
        .variables
        .push(("SPRINGTIDE__CLIENT__API_KEY", key.trim().to_owned()));
    let page = control.output(&["release", "list"]);
    let document: Value = serde_json::from_str(&control.output(&["release", "list", "--json"])).unwrap();
    assert_eq!(document["epoch"], 0, "{document}");
    assert!(page.contains("policy demo, epoch 0"), "{page}");
}
