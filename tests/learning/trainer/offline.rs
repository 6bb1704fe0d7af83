//! An offline run from request to end: rollouts through the API, grades through the log, steps on
//! its own line.

use super::fleet::{Fleet, Wrong};
use super::world::{POLICY, World};
use control::api::dead_letters::DeadLetters;
use control::api::texts::Texts;
use control::page::Site;
use edge::auth::{Auth, AuthOptions};
use event_log::Producer;
use fixture::eventually;
use runs::api::HarnessUrls;
use runs::claim::Claim;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use store::Store;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(90);

/// Serves the control API of a world's policy. Returns the base URL.
pub async fn control(world: &World) -> String {
    control_beside(world, "http://127.0.0.1:8000").await
}

/// The same, beside a fleet at `serve_url`. It knows another one: the cluster `far`.
pub async fn control_beside(world: &World, serve_url: &str) -> String {
    let harness_urls = HarnessUrls {
        anywhere: serve_url.to_owned(),
        clusters: [("far".to_owned(), "http://far.example".to_owned())].into(),
    };
    let pool = world.stack.pool_of("control");
    let auth = Auth::new(AuthOptions::default(), pool.clone());
    let kafka = world.stack.kafka.clone();
    let producer = Producer::new(&kafka).unwrap();
    let store = Store::open(&world.stack.store_url).unwrap();
    let policy_store = store.clone();
    let site = Site::new(
        pool.clone(),
        POLICY,
        Arc::new(Texts::new(pool.clone(), POLICY, store, world.stack.keys_dir.clone())),
        Arc::new(DeadLetters::new(pool.clone(), kafka, producer)),
        CancellationToken::new(),
    );
    let routes = runs::api::routes(
        pool,
        POLICY,
        Some(world.payloads().exports()),
        policy_store,
        harness_urls,
    )
    .merge(control::page::routes(site));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes.protected_by(&auth, "control")).await });
    format!("http://{address}")
}

pub async fn post(url: String, body: &Value) -> (u16, Value) {
    let response = reqwest::Client::new().post(url).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

pub async fn get(url: String) -> Value {
    reqwest::get(url).await.unwrap().json().await.unwrap()
}

pub fn request() -> Value {
    json!({
        "kind": "grpo",
        "tasks_jsonl": "{\"prompt\": \"one\", \"answer\": \"a\"}\n{\"prompt\": \"two\", \"answer\": \"b\"}\n{\"prompt\": \"three\", \"answer\": \"c\"}",
        "grader": "contains",
        "group_size": 16,
        "tasks_per_step": 2,
        "steps": 2,
        "learning_rate": 1e-3,
        "max_tokens": 5,
        "staleness_max": 0,
    })
}

/// Asks for the run of [`request`]. Returns the answer and the run's URL.
async fn create(control: &str) -> (Value, String) {
    create_as(control, &request()).await
}

pub async fn create_as(control: &str, request: &Value) -> (Value, String) {
    let (status, created) = post(format!("{control}/v1/runs"), request).await;
    assert_eq!((status, created["status"].as_str()), (201, Some("queued")), "{created}");
    let run = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
    (created, run)
}

/// Only offline runs.
pub fn offline(world: &World) -> runs::Options {
    let mut options = world.options();
    options.offline.enabled = true;
    options.realtime.enabled = false;
    options
}

/// The run once it has ended.
pub async fn ended(run: &str) -> Value {
    let started = Instant::now();
    loop {
        let now = get(run.to_owned()).await;
        if now["finished_at"].is_string() {
            return now;
        }
        if started.elapsed() > SOON {
            let events = get(format!("{run}/events")).await;
            panic!("not within {SOON:?}: the run ends. It is {now}, with the events {events}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Starts a fleet. Returns its base URL.
pub async fn fleet(world: &World, wrong: Wrong) -> String {
    let fleet = Fleet {
        pool: world.stack.pool.clone(),
        store: world.publisher.store.clone(),
        trusted: Arc::new(world.publisher.trusted().await.unwrap()),
        producer: Producer::new(&world.stack.kafka).unwrap(),
        seeds: Arc::new(AtomicU64::new(1)),
        groups: Arc::default(),
        wrong,
    };
    fleet.serve().await
}

pub async fn ingest(world: &World, stop: &CancellationToken) -> JoinHandle<anyhow::Result<()>> {
    let pool = world.stack.pool_of("ingest");
    tokio::spawn(::ingest::run(
        ::ingest::Options {
            // What the fleet answers to itself closes soon.
            surface: vec![::ingest::reward::Definition {
                horizon_seconds: 3.0,
                ..::ingest::reward::Definition::completion()
            }],
            ..::ingest::Options::default()
        },
        world.stack.kafka.clone(),
        pool.clone(),
        Auth::new(AuthOptions::default(), pool),
        TcpListener::bind("127.0.0.1:0").await.unwrap().into(),
        axum::Router::new(),
        stop.clone(),
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_a_wrong_rollout_teaches_nothing() {
    let world = World::start("wrong_rollouts").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::OneOfEachGroup).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let (_, run) = create(&control).await;
    let mut options = offline(&world);
    options.offline.empty_draws_max = 8;
    let running = world.run_against(options, &serve_url);
    let ended = ended(&run).await;
    assert_eq!(
        (&ended["status"], &ended["steps_done"]),
        (&json!("failed"), &json!(0)),
        "{ended}"
    );
    let (mut wrong, mut companions) = (0, 0);
    for one in world.dispositions().await {
        match one.code.as_deref() {
            Some("quarantined_logprob") => wrong += 1,
            Some("incomplete_group") => companions += 1,
            Some("zero_variance_group") => {}
            other => panic!("{other:?}: {one:?}"),
        }
    }
    let reason = ended["reason"].as_str().unwrap();
    assert!(
        reason.contains(&format!("{wrong} rollouts were quarantined")),
        "{reason}"
    );
    assert!(wrong > 0 && companions == 15 * wrong, "{companions} beside {wrong}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_rollouts_are_not_exact_pauses_at_once_with_that_reason() {
    let world = World::start("inexact_rollouts").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::EachSlightly).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let (_, run) = create(&control).await;
    let running = world.run_against(offline(&world), &serve_url);
    let paused = eventually("the run pauses", SOON, async || {
        let run = get(run.clone()).await;
        (run["status"] == "paused").then_some(run)
    })
    .await;
    let reason = paused["reason"].as_str().unwrap();
    assert!(
        reason.contains("rollouts do not have the trainer's log-probabilities"),
        "{reason}"
    );
    assert!(reason.contains("policy.compute"), "{reason}");
    assert_eq!(paused["steps_done"], 0);
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grpo_run_publishes_on_a_line_of_its_own() {
    let world = World::start("grpo").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let (created, run) = create(&control).await;
    let running = world.run_against(offline(&world), &serve_url);
    let ended = ended(&run).await;
    assert_eq!(ended["status"], "succeeded", "{ended}");
    assert_eq!(ended["steps_done"], 2);

    let line = created["line"].as_str().unwrap();
    let versions = get(format!("{control}/v1/versions?line={line}")).await;
    let serials: Vec<i64> = versions["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v["serial"].as_i64().unwrap())
        .collect();
    assert_eq!(serials.len(), 2);
    assert_eq!(ended["head"], serials[0]);
    assert_eq!(versions["data"][1]["parent"], world.base);
    assert_eq!(world.line().await, (world.base, 0), "users' line has not moved");
    let head = world.materialize(serials[0]).await;
    assert_eq!(head.root().to_string(), world.root(serials[0]).await);
    let checkpoints = get(format!("{run}/checkpoints")).await;
    let parity = checkpoints["data"][0]["metrics"]["mismatch"]["difference_max"]
        .as_f64()
        .unwrap();
    assert_eq!(parity, 0.0);

    // every rollout has exactly one disposition, and every probe is a censored evaluation
    eventually("nothing is left open or queued", SOON, async || {
        let left = world.ledger("open").await + world.ledger("queued").await;
        (left == 0).then_some(())
    })
    .await;
    let trained = world.ledger("trained").await;
    let metrics = world.metrics(1).await;
    assert!(trained >= 4, "{trained}");
    assert_eq!(metrics["notes"]["rollouts"], 32);
    let events = get(format!("{run}/events")).await;
    assert!(
        events["data"][0]["message"].as_str().unwrap().starts_with("succeeded"),
        "{events}"
    );
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_fails_costs_one_rollout_which_is_made_again() {
    let world = World::start("failed_rollouts").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::FailsSometimes).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let mut wanted = request();
    wanted["advantage"] = json!("rloo");
    wanted["grader"] = json!({"type": "multi", "calculate_output": "0.5 * right", "graders": {"right": {
        "type": "string_check", "operation": "like", "input": "{{ sample.output_text }}",
        "reference": "{{ item.answer }}"}}});
    let (created, run) = create_as(&control, &wanted).await;
    assert_eq!(created["config"]["grader"], wanted["grader"], "{created}");
    let running = world.run_against(offline(&world), &serve_url);
    let ended = ended(&run).await;
    assert_eq!(
        (&ended["status"], &ended["steps_done"]),
        (&json!("succeeded"), &json!(2)),
        "{ended}"
    );
    let notes = &world.metrics(1).await["notes"];
    assert_eq!(notes["rollouts"], 32, "{notes}");
    let lost = notes["lost"]["request_failed"].as_u64().unwrap();
    assert!(lost > 0 && notes["rollouts_failed"] == lost, "{notes}");
    let mean = notes["reward_mean"].as_f64().unwrap();
    assert!((0.0..=0.5).contains(&mean), "{mean}");
    let events = get(format!("{run}/events")).await;
    let failed = events["data"].as_array().unwrap().iter().find(|event| {
        let message = event["message"].as_str().unwrap();
        message.starts_with(&format!("{lost} rollouts have no reward")) && message.contains("500")
    });
    assert!(failed.is_some(), "{events}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_were_logged_and_not_received_are_not_trained_on() {
    let world = World::start("lost_answers").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::LosesSome).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let mut wanted = request();
    wanted["steps"] = json!(1);
    let (_, run) = create_as(&control, &wanted).await;
    let running = world.run_against(offline(&world), &serve_url);
    let ended = ended(&run).await;
    assert_eq!(ended["status"], "succeeded", "{ended}");
    let (logged, received): (i64, i64) = sqlx::query_as(
        "select (select count(*) from generation where purpose = 'rollout'),
                (select sum(cardinality(answers)) from rollout)",
    )
    .fetch_one(&world.stack.pool)
    .await
    .unwrap();
    assert!(logged > received && received >= 32, "{logged} and {received}");
    let of = |code: Option<&str>, dispositions: &[super::world::Disposition]| {
        dispositions.iter().filter(|one| one.code.as_deref() == code).count() as i64
    };
    let dispositions = world.dispositions().await;
    assert_eq!(
        of(Some("caller_gone"), &dispositions),
        logged - received,
        "{dispositions:?}"
    );
    let trajectories = world.metrics(1).await["notes"]["trajectories"].as_i64().unwrap();
    assert_eq!(world.ledger("trained").await, trajectories, "one answer of each");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn draws_without_a_gradient_are_counted_over_restarts() {
    let world = World::start("empty_draws").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let mut wanted = request();
    wanted["tasks_jsonl"] = json!("{\"prompt\": \"one\", \"answer\": \"no letters: 0\"}");
    (wanted["group_size"], wanted["tasks_per_step"]) = (json!(2), json!(1));
    let (_, run) = create_as(&control, &wanted).await;
    let mut options = offline(&world);
    options.offline.empty_draws_max = 6;
    let spent = async || -> i64 {
        sqlx::query_scalar("select count(distinct draw) from rollout where state = 'spent'")
            .fetch_one(&world.stack.pool)
            .await
            .unwrap()
    };
    let running = world.run_against(options.clone(), &serve_url);
    eventually("three draws are spent", SOON, async || {
        (spent().await >= 3).then_some(())
    })
    .await;
    running.stop().await;
    let running = world.run_against(options, &serve_url);
    let ended = ended(&run).await;
    assert_eq!(ended["status"], "failed", "{ended}");
    assert_eq!(spent().await, 6);
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_for_its_window_and_for_runs_of_higher_priority() {
    let world = World::start("schedules").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let scheduled = |schedule: Value, steps: u32| {
        let mut request = request();
        request["schedule"] = schedule;
        request["steps"] = json!(steps);
        request
    };
    // two hours from now, for an hour
    let hour = (time::OffsetDateTime::now_utc().hour() + 2) % 24;
    let window = format!("{hour:02}:00-{:02}:00 UTC", (hour + 1) % 24);
    let (_, waiting) = create_as(&control, &scheduled(json!({"window": window}), 1)).await;
    let starts_at = time::OffsetDateTime::now_utc() + time::Duration::DAY;
    let starts_at = starts_at
        .format(&time::format_description::well_known::Rfc3339)
        .unwrap();
    let (_, later) = create_as(&control, &scheduled(json!({"starts_at": starts_at}), 1)).await;
    let (_, slow) = create_as(&control, &scheduled(json!({"priority": -1}), 3)).await;
    let running = world.run_against(offline(&world), &serve_url);
    eventually("the slow run works", SOON, async || {
        (get(slow.clone()).await["status"] == "running").then_some(())
    })
    .await;
    let (urgent, urgent_url) = create_as(&control, &scheduled(json!({"priority": 1}), 1)).await;
    assert_eq!(ended(&urgent_url).await["status"], "succeeded");
    assert_eq!(get(slow.clone()).await["finished_at"], Value::Null);
    let ended = ended(&slow).await;
    assert_eq!(
        (&ended["status"], &ended["steps_done"]),
        (&json!("succeeded"), &json!(3)),
        "{ended}"
    );
    let events = get(format!("{slow}/events")).await;
    let gave_way = format!("queued: waits for run {}", urgent["id"].as_str().unwrap());
    let said = |event: &Value| event["message"].as_str().unwrap().starts_with(&gave_way);
    assert!(events["data"].as_array().unwrap().iter().any(said), "{events}");
    for waiting in [&waiting, &later] {
        let run = get(waiting.clone()).await;
        assert_eq!(
            (&run["status"], &run["started_at"]),
            (&json!("queued"), &Value::Null),
            "{run}"
        );
    }
    assert_eq!(get(waiting.clone()).await["config"]["schedule"]["window"], window);
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();

    // what a person asks for while a run gives way is not lost
    for (request, status, ends) in [("pause", "paused", false), ("cancel", "cancelled", true)] {
        let id = waiting.rsplit('/').next().unwrap().parse().unwrap();
        let claim = Claim::take(&world.stack.pool, id).await.unwrap().unwrap();
        assert_eq!(post(format!("{waiting}/{request}"), &json!({})).await.0, 200);
        claim.give_way(&world.stack.pool, "waits").await.unwrap();
        let run = get(waiting.clone()).await;
        assert_eq!(
            (run["status"].as_str(), run["finished_at"].is_string()),
            (Some(status), ends),
            "{run}"
        );
        assert_eq!(run["reason"], format!("{status} by request"));
        post(format!("{waiting}/resume"), &json!({})).await;
    }

    let mut wrong = request();
    wrong["schedule"] = json!({"window": "22:00-06:00"});
    let (status, problem) = post(format!("{control}/v1/runs"), &wrong).await;
    assert_eq!(status, 400);
    assert!(
        problem["detail"].as_str().unwrap().contains("Europe/Berlin"),
        "{problem}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_head_is_not_served_fails_with_that_reason() {
    let world = World::start("unserved").await;
    let control = control(&world).await;
    let (_, run) = create(&control).await;
    let mut options = offline(&world);
    options.offline.served_timeout_seconds = 1;
    let running = world.run(options);
    let ended = ended(&run).await;
    running.stop().await;
    assert_eq!(ended["status"], "failed");
    assert!(
        ended["reason"].as_str().unwrap().contains("did not serve version"),
        "{ended}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_are_checked_listed_paused_and_cancelled_over_http() {
    let world = World::start("runs").await;
    let control = control(&world).await;
    let runs = format!("{control}/v1/runs");
    let mut lonely = request();
    lonely["group_size"] = json!(1);
    let (status, problem) = post(runs.clone(), &lonely).await;
    assert_eq!(status, 400);
    assert!(
        problem["detail"].as_str().unwrap().starts_with("group_size"),
        "{problem}"
    );
    let mut unknown = request();
    unknown["base_version"] = json!(9_999);
    assert_eq!(post(runs.clone(), &unknown).await.0, 404);
    let mut misspelled = request();
    misspelled["grop_size"] = json!(4);
    let (status, problem) = post(runs.clone(), &misspelled).await;
    assert_eq!(status, 400, "an unknown field is refused: {problem}");

    let (created, run) = create(&control).await;
    assert_eq!(created["base_version"], world.base);
    let (status, paused) = post(format!("{run}/pause"), &json!({})).await;
    assert_eq!((status, paused["status"].as_str()), (200, Some("paused")));
    let (_, resumed) = post(format!("{run}/resume"), &json!({})).await;
    assert_eq!(resumed["status"], "queued");
    let (_, cancelled) = post(format!("{run}/cancel"), &json!({})).await;
    assert_eq!(cancelled["status"], "cancelled");
    let (status, problem) = post(format!("{run}/resume"), &json!({})).await;
    assert_eq!(status, 409);
    assert!(
        problem["detail"].as_str().unwrap().contains("is cancelled"),
        "{problem}"
    );
    let list = get(format!("{runs}?status=cancelled&kind=grpo")).await;
    assert_eq!(list["data"].as_array().unwrap().len(), 1);
    let missing = uuid::Uuid::now_v7();
    assert_eq!(get(format!("{runs}/{missing}")).await["status"], 404);
}
