//! From the policy store to serving, and back to an older version. A real engine with random
//! weights follows signed assignments while callers send requests; every answer names the version
//! that gave it.

use artifact::sign::SigningKey;
use fixture::serving::{DEADLINE, Publisher, complete, control, get, releases, serve, served_version, wait_for};
use fixture::{Stack, eventually};
use release::{self};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_version_reaches_users_without_an_error_and_a_rollback_needs_no_upload() {
    let stack = Stack::start("swap").await;
    let mut publisher = Publisher::new(&stack);
    let releases = releases(&stack);
    let control = control(&stack, &releases).await;
    let replica = serve(&stack, Some(control.url.clone()), stack.dir.path().join("serve")).await;
    assert_eq!(
        get(&format!("{}/health", replica.url)).await.0,
        503,
        "nothing serves yet"
    );
    assert_eq!(complete(&replica.url, "demo").await.0, 503);

    publisher.publish(1, None, 0).await;
    assert_eq!(releases.round().await.unwrap().changes, 3, "learner, champion and base");
    wait_for(&replica.url, "demo@champion", 1).await;
    assert_eq!(get(&format!("{}/health", replica.url)).await.0, 200);

    // callers send requests during the swaps
    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..3)
        .map(|_| {
            let (stop, url) = (stop.clone(), replica.url.clone());
            tokio::spawn(async move {
                let mut answers = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    answers.push(complete(&url, "demo@champion").await);
                }
                answers
            })
        })
        .collect();
    for serial in 2..=4 {
        publisher.publish(serial, Some(serial - 1), 0).await;
        assert_eq!(releases.round().await.unwrap().changes, 2, "learner and champion");
        wait_for(&replica.url, "demo@champion", serial).await;
    }
    assert_eq!(
        served_version(&replica.url, "demo@base").await,
        Some(1),
        "the frozen arm stays"
    );
    stop.store(true, Ordering::Relaxed);
    let mut by_version: BTreeMap<i64, Value> = BTreeMap::new();
    for caller in callers {
        for (status, answer) in caller.await.unwrap() {
            assert_eq!(status, 200, "{answer}");
            let choice = &answer["choices"][0];
            let version = choice["version"].as_i64().unwrap();
            assert_eq!(choice["root"], publisher.checkpoints[&version].root().to_string());
            // with one seed and one prompt, the tokens depend only on the version
            let tokens = by_version.entry(version).or_insert_with(|| choice["token_ids"].clone());
            assert_eq!(*tokens, choice["token_ids"], "version {version}");
        }
    }
    assert!(by_version.len() >= 2, "{by_version:?}");

    // back to the previous version, without naming it
    let release = json!({"kind": "rollback", "alias": "champion", "reason": "worse"});
    let response = reqwest::Client::new()
        .post(format!("{}/v1/releases", control.url))
        .json(&release)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 201);
    let done: Value = response.json().await.unwrap();
    assert_eq!(
        (done["from_version"].as_i64(), done["to_version"].as_i64()),
        (Some(4), Some(3))
    );
    assert_eq!(
        (&done["also"][0]["alias"], done["also"][0]["to_version"].as_i64()),
        (&json!("learner"), Some(3))
    );
    let audited: Vec<(String, String, String)> =
        sqlx::query_as("select action, subject, reason from audit order by id desc limit 2")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    for (row, alias) in audited.iter().zip(["learner", "champion"]) {
        let expected = (
            "release.rollback".to_owned(),
            format!("demo@{alias}"),
            "worse".to_owned(),
        );
        assert_eq!(*row, expected);
    }
    wait_for(&replica.url, "demo@champion", 3).await;
    wait_for(&replica.url, "demo@learner", 3).await;
    assert_eq!(
        releases.round().await.unwrap().changes,
        0,
        "the abandoned head is not followed"
    );
    // the trainer re-bases: a new branch from the served version
    publisher.publish(5, Some(3), 1).await;
    assert_eq!(releases.round().await.unwrap().changes, 1, "learner alone");
    wait_for(&replica.url, "demo@learner", 5).await;
    assert_eq!(
        served_version(&replica.url, "demo@champion").await,
        Some(3),
        "the rollback holds"
    );
    // without a version: that of learner
    let release = json!({"kind": "promote", "alias": "champion", "reason": "good again"});
    let response = reqwest::Client::new()
        .post(format!("{}/v1/releases", control.url))
        .json(&release)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 201);
    wait_for(&replica.url, "demo@champion", 5).await;

    // the fleet API shows the reports
    let replicas = eventually("the replica reports its epoch", DEADLINE, async || {
        let (_, replicas) = get(&format!("{}/v1/replicas", control.url)).await;
        (replicas["replicas"][0]["epoch"] == 7).then_some(replicas)
    })
    .await;
    assert_eq!(replicas["replicas"][0]["ready"], true);
    let swaps = eventually("every swap is reported", DEADLINE, async || {
        let (_, swaps) = get(&format!("{}/v1/swaps", control.url)).await;
        let swaps = swaps["swaps"].as_array().unwrap().clone();
        (swaps.len() >= 5).then_some(swaps)
    })
    .await;
    let mut pauses: Vec<f64> = swaps.iter().map(|swap| swap["pause_ms"].as_f64().unwrap()).collect();
    pauses.sort_by(f64::total_cmp);
    // the scheduler may interrupt one pause, but hardly most of them
    assert!(pauses[pauses.len() / 2] < 5.0, "{pauses:?}");
    let (_, releases) = get(&format!("{}/v1/releases?alias=champion", control.url)).await;
    let kinds: Vec<&str> = releases["releases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["promote", "rollback", "follow", "follow", "follow", "follow"]);
    replica.stop().await;
    control.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_assignment_older_than_the_last_verified_one_is_never_served() {
    let stack = Stack::start("epoch").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    releases(&stack).round().await.unwrap();
    let state_dir = stack.dir.path().join("serve");
    std::fs::create_dir_all(&state_dir).unwrap();
    let state = json!({"policy": "demo", "epoch": 40, "signers": {"a key": 40}, "assignment": null, "roots": {},
                       "revocations": {}, "stated_at": null});
    std::fs::write(state_dir.join("follow-demo.json"), state.to_string()).unwrap();
    let replica = serve(&stack, None, state_dir).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(get(&format!("{}/health", replica.url)).await.0, 503);
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_signed_by_an_unknown_key_is_never_served_and_the_old_one_keeps_serving() {
    let stack = Stack::start("stranger").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    let releases = releases(&stack);
    releases.round().await.unwrap();
    let replica = serve(&stack, None, stack.dir.path().join("serve")).await;
    wait_for(&replica.url, "demo@champion", 1).await;
    publisher.key = SigningKey::load_or_create(&stack.dir.path().join("elsewhere"), "trainer").unwrap();
    publisher.publish(2, Some(1), 0).await;
    releases.round().await.unwrap();
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(served_version(&replica.url, "demo@champion").await, Some(1));
    assert_eq!(complete(&replica.url, "demo@2").await.0, 404);
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_leader_publishes_a_document_that_a_crash_left_out() {
    let stack = Stack::start("crash").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    releases(&stack).round().await.unwrap();
    publisher.publish(2, Some(1), 0).await;
    releases(&stack).round().await.unwrap();
    let folder = stack.store_url.strip_prefix("file://").unwrap().to_string() + "/policy/demo/assignment";
    std::fs::remove_file(format!("{folder}/0000000002.json")).unwrap();
    let next = releases(&stack);
    assert_eq!(next.round().await.unwrap(), release::Round { epoch: 2, changes: 0 });
    let keys = artifact::sign::TrustedKeys::load(&stack.keys_dir).unwrap();
    let assignment = publisher
        .store
        .latest_assignment("demo", 1, &keys)
        .await
        .unwrap()
        .unwrap();
    assert_eq!((assignment.epoch, assignment.aliases["champion"].version), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_release_loops_one_leads_and_the_other_takes_over() {
    let stack = Stack::start("leader").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    let loops: Vec<(CancellationToken, JoinHandle<anyhow::Result<()>>)> = (0..2)
        .map(|_| {
            let stop = CancellationToken::new();
            let task = tokio::spawn(release::run(releases(&stack), stop.clone()));
            (stop, task)
        })
        .collect();
    let epochs = async || -> i64 {
        sqlx::query_scalar("select coalesce(max(epoch), 0) from assignment")
            .fetch_one(&stack.pool)
            .await
            .unwrap()
    };
    eventually("the first assignment", DEADLINE, async || {
        (epochs().await == 1).then_some(())
    })
    .await;
    for (i, (stop, task)) in loops.into_iter().enumerate() {
        let serial = 2 + i as i64;
        publisher.publish(serial, Some(serial - 1), 0).await;
        eventually("the head is followed", DEADLINE, async || {
            (epochs().await == serial).then_some(())
        })
        .await;
        stop.cancel();
        task.await.unwrap().unwrap();
    }
    let releases: i64 = sqlx::query_scalar("select count(*) from release")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(releases, 7, "learner, champion and base, then two moves of two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_release_request_is_refused_and_audited() {
    let stack = Stack::start("refuse").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    let releases = releases(&stack);
    releases.round().await.unwrap();
    let control = control(&stack, &releases).await;
    for (body, status, expected) in [
        (
            json!({"kind": "promote", "alias": "champion", "version": 9}),
            404,
            "no version 9",
        ),
        (
            json!({"kind": "rollback", "alias": "champion"}),
            409,
            "has served nothing but version 1 and versions judged bad",
        ),
        (
            json!({"kind": "promote", "alias": "learner"}),
            400,
            "promote needs `version`",
        ),
        (json!({"kind": "pin", "alias": "ghost"}), 404, "`ghost` does not exist"),
        (json!({"kind": "ship", "alias": "champion"}), 400, "unknown variant"),
    ] {
        let url = format!("{}/v1/releases", control.url);
        let response = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{body}");
        let problem: Value = response.json().await.unwrap();
        assert!(
            problem["detail"].as_str().unwrap().contains(expected),
            "{body}: {problem}"
        );
    }
    let (_, releases) = get(&format!("{}/v1/releases", control.url)).await;
    let refused = &releases["releases"][0];
    assert_eq!(
        (refused["status"].as_str(), refused["epoch"].is_null()),
        (Some("refused"), true)
    );
    assert_eq!(refused["actor"], "operator");
    control.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_log_requests_are_refused_with_retry_after() {
    let mut stack = Stack::start("nolog").await;
    let mut publisher = Publisher::new(&stack);
    publisher.publish(1, None, 0).await;
    let releases = releases(&stack);
    releases.round().await.unwrap();
    let real = std::mem::replace(&mut stack.kafka.brokers, "127.0.0.1:1".into());
    stack.kafka.librdkafka.insert("message.timeout.ms".into(), "500".into());
    let replica = serve(&stack, None, stack.dir.path().join("serve")).await;
    let health = format!("{}/health", replica.url);
    eventually("ready by polling the store", DEADLINE, async || {
        (get(&health).await.0 == 200).then_some(())
    })
    .await;
    let body = json!({"model": "demo", "prompt": [5], "max_tokens": 2});
    let url = format!("{}/v1/completions", replica.url);
    let response = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "2");
    replica.stop().await;
    stack.kafka.brokers = real;
    stack.kafka.librdkafka.clear();
}
