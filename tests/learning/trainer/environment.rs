//! Runs whose rollouts a harness outside makes: leases over HTTP, turns through the lease's base URL,
//! rewards at the end. Over 500 lines, because all tests use the same run and harness.

use super::fleet::Wrong;
use super::offline::{control_beside, ended, fleet, get, ingest, offline, post};
use super::world::{POLICY, World};
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post as on_post;
use axum::{Json, Router};
use event_log::Producer;
use event_log::event::{Feedback, Target, Value as FeedbackValue};
use fixture::eventually;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use time::OffsetDateTime;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(90);
const GROUP: i64 = 6;

fn request(steps: u32, lease_seconds: u32) -> Value {
    json!({
        "kind": "grpo",
        "environment": {"kind": "pull", "lease_seconds": lease_seconds},
        "tasks": [{"id": "one", "prompt": "one", "answer": "a"}, {"id": "two", "prompt": "two", "answer": "b"}],
        "group_size": GROUP,
        "tasks_per_step": 2,
        "steps": steps,
        "staleness_max": 2,
        "learning_rate": 1e-3,
    })
}

pub async fn create(control: &str, request: &Value) -> (String, String) {
    let (status, created) = post(format!("{control}/v1/runs"), request).await;
    assert_eq!(status, 201, "{created}");
    let id = created["id"].as_str().unwrap().to_owned();
    (format!("{control}/v1/runs/{id}"), id)
}

/// What a harness got when it asked for a rollout.
pub enum Leased {
    One(Value),
    Nothing,
    Ended,
}

pub async fn lease(run: &str) -> Leased {
    let body = json!({"wait_seconds": 1});
    let response = reqwest::Client::new()
        .post(format!("{run}/leases"))
        .json(&body)
        .send()
        .await
        .unwrap();
    match response.status().as_u16() {
        201 => Leased::One(response.json().await.unwrap()),
        204 => {
            assert_eq!(response.headers()["retry-after"], "1");
            Leased::Nothing
        }
        409 => Leased::Ended,
        other => panic!("{other}: {}", response.text().await.unwrap()),
    }
}

/// One turn of a rollout. Returns the text.
pub async fn turn(lease: &Value, prompt: &str) -> String {
    labeled_turn(lease, prompt, json!({})).await
}

async fn labeled_turn(lease: &Value, prompt: &str, metadata: Value) -> String {
    let url = format!("{}/completions", lease["base_url"].as_str().unwrap());
    let (status, answer) = post(url, &json!({"model": "any", "prompt": prompt, "metadata": metadata})).await;
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

pub async fn end(control: &str, lease: &Value, how: &str, body: &Value) -> (u16, Value) {
    let mut body = body.clone();
    body["secret"] = lease["secret"].clone();
    let url = format!("{control}/v1/leases/{}/{how}", lease["id"].as_str().unwrap());
    post(url, &body).await
}

/// Two turns, then the share of `a` to `m` among their letters.
pub async fn make(control: &str, lease: &Value) {
    let first = turn(lease, lease["task"]["prompt"].as_str().unwrap()).await;
    let second = turn(lease, &format!("{first}, and then?")).await;
    reward(control, lease, &format!("{first}{second}")).await;
}

/// Ends a rollout with the share of `a` to `m` among the letters. Returns it.
async fn reward(control: &str, lease: &Value, letters: &str) -> f64 {
    let small = letters.chars().filter(|letter| ('a'..='m').contains(letter)).count();
    let reward = small as f64 / letters.chars().count() as f64;
    let (status, ended) = end(control, lease, "reward", &json!({"reward": reward})).await;
    assert_eq!((status, ended["state"].as_str()), (200, Some("rewarded")), "{ended}");
    reward
}

/// A harness that makes rollouts until the run has ended. Counts them.
fn harness(control: &str, run: &str, made: &Arc<AtomicUsize>) -> JoinHandle<()> {
    let (control, run, made) = (control.to_owned(), run.to_owned(), made.clone());
    tokio::spawn(async move {
        loop {
            match lease(&run).await {
                Leased::One(lease) => {
                    make(&control, &lease).await;
                    made.fetch_add(1, Ordering::Relaxed);
                }
                Leased::Nothing => {}
                Leased::Ended => return,
            }
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_learns_from_sessions_that_a_harness_makes_while_it_computes() {
    let world = World::start("environment").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (run, _) = create(&control, &request(4, 600)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let made = Arc::new(AtomicUsize::new(0));
    let harnesses = [harness(&control, &run, &made), harness(&control, &run, &made)];
    let done = ended(&run).await;
    assert_eq!(
        (&done["status"], &done["steps_done"]),
        (&json!("succeeded"), &json!(4)),
        "{done}"
    );
    for harness in harnesses {
        harness.await.unwrap();
    }
    running.stop().await;

    // four steps of two groups, and none too many
    assert_eq!(made.load(Ordering::Relaxed), 4 * 2 * GROUP as usize);
    let counts = get(format!("{run}/rollouts")).await;
    assert_eq!(counts["by_state"], json!({"spent": 8 * GROUP}), "{counts}");
    assert_eq!(counts["lost"], json!({}));
    let mut oldest = 0;
    for step in 1..=4 {
        let metrics = world.metrics(step).await;
        let notes = &metrics["notes"];
        assert_eq!(
            (&notes["rollouts"], &notes["rollouts_failed"]),
            (&json!(2 * GROUP), &json!(0)),
            "{notes}"
        );
        assert_eq!(
            notes["trajectories"],
            2 * GROUP,
            "a rollout of two turns is one: {notes}"
        );
        let staleness = notes["staleness"].as_object().unwrap();
        let turns: u64 = staleness.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(turns, 2 * 2 * GROUP as u64, "{notes}");
        oldest = oldest.max(staleness.keys().map(|steps| steps.parse().unwrap()).max().unwrap());
    }
    assert!(oldest <= 2, "{oldest}");
    let trained = world.ledger("trained").await;
    assert_eq!(trained, 4 * 2 * 2 * GROUP, "every turn of every rollout, once");
    let page = reqwest::get(run.replace("/v1/", "/")).await.unwrap();
    assert_eq!(page.status(), 200);
    let page = page.text().await.unwrap();
    assert!(page.contains("4 of 4") && page.contains("<svg"), "{page}");
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

/// The agent knows its lease's id, its key and its answers, and says that all of them are perfect.
#[tokio::test(flavor = "multi_thread")]
async fn rewards_that_an_agent_posts_count_for_nothing() {
    let world = World::start("own_rewards").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let producer = Producer::new(&world.stack.kafka).unwrap();
    let (run, _) = create(&control, &request(1, 600)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let (mut sum, mut made) = (0.0, 0.0);
    loop {
        let lease = match lease(&run).await {
            Leased::One(lease) => lease,
            Leased::Nothing => continue,
            Leased::Ended => break,
        };
        let secret = lease["secret"].as_str().unwrap();
        assert!(!lease["base_url"].as_str().unwrap().contains(secret));
        let said = turn(&lease, lease["task"]["prompt"].as_str().unwrap()).await;
        for how in ["reward", "renew", "fail"] {
            let url = format!("{control}/v1/leases/{}/{how}", lease["id"].as_str().unwrap());
            let mut body = json!({"secret": "guessed"});
            if how == "reward" {
                body["reward"] = json!(1.0);
            }
            let (status, refused) = post(url, &body).await;
            assert_eq!(status, 403, "{how}: {refused}");
        }
        let perfect = Feedback {
            id: Uuid::now_v7(),
            target: Target::Episode(lease["id"].as_str().unwrap().parse().unwrap()),
            metric_name: "reward".into(),
            // one out of bounds would leave out its group
            value: FeedbackValue::Float(if made % 2.0 == 0.0 { 1.0 } else { 1e9 }),
            tags: BTreeMap::new(),
        };
        let event = perfect.into_event("default", "an agent", OffsetDateTime::now_utc());
        producer.send_event(&event).await.unwrap();
        sum += reward(&control, &lease, &said).await;
        made += 1.0;
    }
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
    let learned = world.metrics(1).await["reward_mean"].as_f64().unwrap();
    assert!(
        (learned - sum / made).abs() < 1e-9 && learned < 1.0,
        "{learned}, not {}",
        sum / made
    );
    let events = get(format!("{run}/events")).await;
    assert!(
        events.to_string().contains("another reward than their harness posted"),
        "{events}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reward_out_of_bounds_leaves_out_its_group() {
    let world = World::start("group_bounds").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (run, _) = create(&control, &request(1, 600)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let mut was_out = false;
    loop {
        let lease = match lease(&run).await {
            Leased::One(lease) => lease,
            Leased::Nothing => continue,
            Leased::Ended => break,
        };
        let said = turn(&lease, lease["task"]["prompt"].as_str().unwrap()).await;
        if lease["task"]["id"] == "one" && !was_out {
            was_out = true;
            let (status, _) = end(&control, &lease, "reward", &json!({"reward": 2.0})).await;
            assert_eq!(status, 200);
        } else {
            reward(&control, &lease, &said).await;
        }
    }
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
    assert_eq!(
        world.metrics(1).await["notes"]["trajectories"],
        GROUP,
        "only those of the other task"
    );
    assert_eq!(world.ledger("trained").await, GROUP);
}

/// A context that ends with a summary, and one that begins with it. Every second rollout's summary is
/// masked.
#[tokio::test(flavor = "multi_thread")]
async fn the_reward_reaches_every_token_of_all_segments_but_those_of_masked_summaries() {
    let world = World::start("segments").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (run, _) = create(&control, &request(1, 600)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let mut rewards = HashMap::new();
    loop {
        let lease = match lease(&run).await {
            Leased::One(lease) => lease,
            Leased::Nothing => continue,
            Leased::Ended => break,
        };
        let first = turn(&lease, lease["task"]["prompt"].as_str().unwrap()).await;
        let train = if rewards.len() % 2 == 0 { "true" } else { "false" };
        let summary = labeled_turn(&lease, &format!("{first}, in short?"), json!({"train": train})).await;
        let last = labeled_turn(&lease, &format!("{summary}, and then?"), json!({"segment": "1"})).await;
        let given = reward(&control, &lease, &format!("{first}{last}")).await;
        rewards.insert(lease["id"].as_str().unwrap().to_owned(), given);
    }
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();

    assert_eq!(rewards.len(), 2 * GROUP as usize);
    let turns: Vec<(String, i32, Option<f64>, i64, i64)> = sqlx::query_as(
        "select t.episode_id::text, g.segment, t.reward, cardinality(g.token_ids)::bigint,
                coalesce(cardinality(array_positions(g.train_mask, true)), cardinality(g.token_ids))::bigint
         from trajectory t join generation g on g.id = t.generation_id
         where g.purpose = 'rollout'
         order by t.episode_id, g.segment, g.turn, g.id",
    )
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(turns.len(), 3 * rewards.len());
    let mut masked = 0;
    for rollout in turns.chunks(3) {
        let segments: Vec<i32> = rollout.iter().map(|turn| turn.1).collect();
        assert_eq!(segments, [0, 0, 1]);
        for (episode, _, reward, ..) in rollout {
            assert_eq!(*reward, rewards.get(episode).copied(), "{episode}");
        }
        assert_eq!((rollout[0].4, rollout[2].4), (rollout[0].3, rollout[2].3));
        masked += i64::from(rollout[1].4 == 0);
    }
    assert_eq!(masked, GROUP, "the summaries of half of the rollouts");
    assert_eq!(
        world.ledger("trained").await,
        3 * 2 * GROUP,
        "every turn of every rollout, once"
    );
    let metrics = world.metrics(1).await;
    assert_eq!(metrics["notes"]["trajectories"], 2 * GROUP, "{metrics}");
    let trained: i64 = turns.iter().map(|turn| turn.4).sum();
    assert_eq!(metrics["tokens"], trained, "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_harness_that_dies_or_fails_costs_no_group_and_a_killed_trainer_nothing() {
    let world = World::start("lost_leases").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (run, _) = create(&control, &request(1, 10)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let take = || async {
        eventually("a rollout is offered", SOON, async || match lease(&run).await {
            Leased::One(lease) => Some(lease),
            _ => None,
        })
        .await
    };
    let (silent, broken, slow, good) = (take().await, take().await, take().await, take().await);
    turn(&silent, "one").await;
    turn(&slow, "one").await;
    let (status, failed) = end(&control, &broken, "fail", &json!({"reason": "no tool"})).await;
    assert_eq!((status, failed["code"].as_str()), (200, Some("harness_failed")));
    let (status, slow) = end(&control, &slow, "fail", &json!({"timed_out": true})).await;
    assert_eq!(
        (status, slow["reward"].as_f64()),
        (200, Some(0.0)),
        "what the policy causes costs it something"
    );
    let (status, refused) = end(&control, &broken, "reward", &json!({"reward": 1.0})).await;
    assert_eq!(status, 409, "{refused}");
    assert!(
        refused["detail"].as_str().unwrap().contains("harness_failed"),
        "{refused}"
    );
    make(&control, &good).await;

    // what has finished outlives the trainer
    running.stop().await;
    let running = world.run_against(offline(&world), &serve_url);
    eventually("the silent lease has expired", SOON, async || {
        let counts = get(format!("{run}/rollouts")).await;
        (counts["lost"]["lease_expired"] == 1).then_some(())
    })
    .await;
    let (status, refused) = end(&control, &silent, "reward", &json!({"reward": 1.0})).await;
    assert_eq!(status, 409);
    assert!(
        refused["detail"].as_str().unwrap().contains("offered again"),
        "{refused}"
    );
    let (status, refused) = end(&control, &silent, "renew", &json!({})).await;
    assert_eq!(status, 409, "{refused}");

    let made = Arc::new(AtomicUsize::new(0));
    let harness = harness(&control, &run, &made);
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    harness.await.unwrap();
    running.stop().await;
    assert_eq!(
        made.load(Ordering::Relaxed),
        2 * GROUP as usize - 2,
        "two were made before"
    );
    let notes = &world.metrics(1).await["notes"];
    assert_eq!(
        (&notes["rollouts"], &notes["rollouts_failed"]),
        (&json!(2 * GROUP), &json!(2)),
        "{notes}"
    );
    let lost = json!({"harness_failed": 1, "lease_expired": 1});
    assert_eq!(notes["lost"], lost, "{notes}");
    // the turn of the silent harness is censored, not a reward of 0
    eventually("its turn has closed", SOON, async || {
        (world.ledger("censored").await >= 1 && world.ledger("open").await == 0).then_some(())
    })
    .await;
    assert_eq!(
        world.ledger("trained").await,
        2 * 2 * GROUP - 1,
        "the slow one had one turn"
    );
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rewards_that_come_while_a_run_is_paused_reach_the_log() {
    let world = World::start("paused_rewards").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (run, _) = create(&control, &request(1, 600)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let leased = eventually("a rollout is offered", SOON, async || match lease(&run).await {
        Leased::One(lease) => Some(lease),
        _ => None,
    })
    .await;
    turn(&leased, "one").await;
    post(format!("{run}/pause"), &json!({})).await;
    eventually("the run is paused", SOON, async || {
        (get(run.clone()).await["status"] == "paused").then_some(())
    })
    .await;
    reward(&control, &leased, "abc").await;
    eventually("its episode closes with the reward", SOON, async || {
        let rewards: Vec<f64> = sqlx::query_scalar("select reward from trajectory where episode_id = $1::uuid")
            .bind(leased["id"].as_str().unwrap())
            .fetch_all(&world.stack.pool)
            .await
            .unwrap();
        (rewards == [1.0]).then_some(())
    })
    .await;
    assert_eq!(get(run.clone()).await["status"], "paused");
    eventually("the rollout is settled", SOON, async || {
        (get(format!("{run}/rollouts")).await["by_state"]["settled"] == 1).then_some(())
    })
    .await;
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

/// A replica says that it still samples with the base, so no rollouts are offered that would be older than
/// one step when they are trained on.
#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_that_lags_gets_no_rollouts_that_would_be_too_old() {
    let world = World::start("lag").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let mut wanted = request(3, 600);
    (wanted["tasks_per_step"], wanted["staleness_max"]) = (json!(1), json!(1));
    let (run, _) = create(&control, &wanted).await;
    let line = get(run.clone()).await["line"].clone();
    sqlx::query(
        "insert into replica (id, cluster, policy, address, epoch, resident, ready, reported_at)
         values ('slow', 'near', $1, '', 1, $2, true, now() + interval '1 day')",
    )
    .bind(POLICY)
    .bind(json!([{"version": world.base, "root": "", "aliases": [line]}]))
    .execute(&world.stack.pool)
    .await
    .unwrap();
    let running = world.run_against(offline(&world), &serve_url);
    let harness = harness(&control, &run, &Arc::default());
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    harness.await.unwrap();
    running.stop().await;
    // two draws while its base is the head, and the next one once the run has waited for the fleet
    let early: Vec<i64> = sqlx::query_scalar(
        "select o.draw from rollout o join step s on s.run_id = o.run_id and s.step = 2
         where o.draw >= 2 and o.offered_at < s.committed_at",
    )
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    assert!(early.is_empty(), "{early:?}");
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

/// What the policy said in each rollout of an environment that the trainer calls.
type Said = Arc<Mutex<HashMap<String, Vec<String>>>>;

/// An environment of two turns. Its reward is the share of `a` to `m` among the policy's letters. The
/// second step of every eighth rollout fails.
async fn environment(said: Said) -> String {
    async fn reset(State(said): State<Said>, Json(call): Json<Value>) -> Json<Value> {
        let rollout = call["rollout"].as_str().unwrap().to_owned();
        assert!(
            said.lock().unwrap().insert(rollout, Vec::new()).is_none(),
            "one reset for each rollout"
        );
        Json(json!({"messages": [{"role": "user", "content": call["task"]["prompt"]}]}))
    }
    async fn step(State(said): State<Said>, Json(call): Json<Value>) -> Result<Json<Value>, StatusCode> {
        let mut said = said.lock().unwrap();
        let rollouts = said.len();
        let turns = said.get_mut(call["rollout"].as_str().unwrap()).unwrap();
        turns.push(call["message"]["content"].as_str().unwrap().to_owned());
        if turns.len() == 2 && rollouts % 8 == 0 {
            return Err(StatusCode::INTERNAL_SERVER_ERROR);
        }
        let next = json!([{"role": "user", "content": "and then?"}]);
        Ok(Json(json!({"messages": next, "done": turns.len() == 2})))
    }
    async fn score(State(said): State<Said>, Json(call): Json<Value>) -> Json<Value> {
        let both = said.lock().unwrap()[call["rollout"].as_str().unwrap()].concat();
        let small = both.chars().filter(|letter| ('a'..='m').contains(letter)).count();
        Json(json!({"reward": small as f64 / both.chars().count() as f64}))
    }
    let routes = Router::new()
        .route("/reset", on_post(reset))
        .route("/step", on_post(step))
        .route("/score", on_post(score))
        .with_state(said);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_calls_an_environment_for_each_turn() {
    let world = World::start("push").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let said = Said::default();
    let mut wanted = request(1, 600);
    wanted["environment"] = json!({"kind": "push", "url": environment(said.clone()).await});
    let (run, _) = create(&control, &wanted).await;
    let mut options = offline(&world);
    // one after the other, so that the environment knows which of them fails
    options.offline.rollouts_max = 1;
    let running = world.run_against(options, &serve_url);
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    running.stop().await;
    let notes = &world.metrics(1).await["notes"];
    assert_eq!(
        (&notes["rollouts"], &notes["trajectories"]),
        (&json!(2 * GROUP), &json!(2 * GROUP)),
        "{notes}"
    );
    assert_eq!(notes["lost"], json!({"harness_failed": 1}), "{notes}");
    assert_eq!(world.ledger("trained").await, 2 * 2 * GROUP, "both turns of each");
    let said = said.lock().unwrap().clone();
    assert_eq!(said.len() as i64, 2 * GROUP + 1, "one was made again");
    assert!(said.values().all(|turns| turns.len() == 2));
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_harness_cannot_ask_for_is_refused() {
    let world = World::start("lease_refusals").await;
    let control = control_beside(&world, "http://127.0.0.1:8000").await;
    let mut graded = request(1, 600);
    graded["grader"] = json!("contains");
    let (status, problem) = post(format!("{control}/v1/runs"), &graded).await;
    assert_eq!(status, 400);
    assert!(problem["detail"].as_str().unwrap().starts_with("grader"), "{problem}");
    let (status, problem) = post(format!("{control}/v1/runs"), &request(1, 5)).await;
    assert_eq!(status, 400);
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .starts_with("environment.lease_seconds"),
        "{problem}"
    );

    let mut completions = request(1, 600);
    completions.as_object_mut().unwrap().remove("environment");
    let (run, _) = create(&control, &completions).await;
    let (status, problem) = post(format!("{run}/leases"), &json!({})).await;
    assert_eq!(status, 409);
    assert!(problem["detail"].as_str().unwrap().contains("not leased"), "{problem}");

    let (run, _) = create(&control, &request(1, 600)).await;
    assert!(
        matches!(lease(&run).await, Leased::Nothing),
        "nothing is offered before a trainer works"
    );
    let (status, problem) = post(format!("{run}/leases"), &json!({"wait_seconds": 31})).await;
    assert_eq!(status, 400, "{problem}");
    let (status, problem) = post(format!("{run}/leases"), &json!({"cluster": "near"})).await;
    assert_eq!(status, 400, "{problem}");
    assert!(
        problem["detail"].as_str().unwrap().ends_with("which has: far"),
        "{problem}"
    );
    let (status, _) = post(format!("{run}/cancel"), &json!({})).await;
    assert_eq!(status, 200);
    assert!(matches!(lease(&run).await, Leased::Ended));
    let missing = format!("{control}/v1/leases/{}", Uuid::now_v7());
    for (how, body) in [
        ("renew", json!({"secret": "x"})),
        ("reward", json!({"secret": "x", "reward": 1.0})),
        ("fail", json!({"secret": "x"})),
    ] {
        let (status, problem) = post(format!("{missing}/{how}"), &body).await;
        assert_eq!(status, 404, "{problem}");
    }
}
