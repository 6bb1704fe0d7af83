//! GRPO runs that choose what they train on: groups with a signal, answers that are not too long,
//! rewards of several graders.

use super::environment::{Leased, end, lease, turn};
use super::fleet::Wrong;
use super::offline::{control, control_beside, create_as, ended, fleet, get, ingest, offline, post, request};
use super::world::World;
use fixture::eventually;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(90);
const GROUP: usize = 16;

/// Tasks whose completions all have the reward 1 with `contains`.
fn silent(count: usize) -> Vec<Value> {
    let task = |nth| json!({"id": format!("silent {nth}"), "prompt": format!("p{nth}"), "answer": ""});
    (0..count).map(task).collect()
}

fn request_with(tasks: &[Value]) -> Value {
    let mut request = request();
    request.as_object_mut().unwrap().remove("tasks_jsonl");
    request["tasks"] = json!(tasks);
    request
}

fn id(run: &Value) -> Uuid {
    run["id"].as_str().unwrap().parse().unwrap()
}

async fn notes(world: &World, run: &Value, step: i64) -> Value {
    sqlx::query_scalar("select metrics -> 'notes' from step where run_id = $1 and step = $2")
        .bind(id(run))
        .bind(step)
        .fetch_one(&world.stack.pool)
        .await
        .unwrap()
}

/// How many rollouts the run has made.
async fn rollouts(world: &World, run: &Value) -> i64 {
    sqlx::query_scalar("select count(*) from rollout where run_id = $1")
        .bind(id(run))
        .fetch_one(&world.stack.pool)
        .await
        .unwrap()
}

/// A run with three tasks and groups of two, whose rollouts the test makes.
fn pulled(tasks_per_step: u32, steps: u32, staleness_max: u32) -> Value {
    let task = |id: &str| json!({"id": id, "prompt": id, "answer": ""});
    json!({
        "kind": "grpo", "environment": {"kind": "pull"}, "tasks": [task("one"), task("two"), task("three")],
        "group_size": 2, "tasks_per_step": tasks_per_step, "steps": steps, "staleness_max": staleness_max,
        "dynamic_sampling": true, "learning_rate": 1e-3,
    })
}

/// Leases a rollout, and lets the policy act.
async fn take(run: &str) -> Value {
    let offered = async || match lease(run).await {
        Leased::One(lease) => Some(lease),
        Leased::Nothing | Leased::Ended => None,
    };
    let lease = eventually("a rollout is offered", SOON, offered).await;
    turn(&lease, "go").await;
    lease
}

async fn reward(control: &str, lease: &Value, reward: f64) {
    let (status, ended) = end(control, lease, "reward", &json!({"reward": reward})).await;
    assert_eq!(status, 200, "{ended}");
}

fn group(lease: &Value) -> String {
    lease["group_id"].as_str().unwrap().to_owned()
}

fn task(lease: &Value) -> String {
    lease["task"]["id"].as_str().unwrap().to_owned()
}

async fn dropped(world: &World, code: &str) -> usize {
    let dispositions = world.dispositions().await;
    let with_code = dispositions.iter().filter(|one| one.code.as_deref() == Some(code));
    with_code.count()
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_are_made_of_groups_with_a_signal_if_the_run_asks_for_it() {
    let world = World::start("dynamic_sampling").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let mut tasks = silent(6);
    tasks.push(json!({"prompt": "one", "answer": "a"}));
    tasks.push(json!({"prompt": "two", "answer": "b"}));
    let mut wanted = request_with(&tasks);
    wanted["dynamic_sampling"] = json!(true);
    wanted["staleness_max"] = json!(1);
    wanted["steps"] = json!(3);
    let (_, run) = create_as(&control, &wanted).await;
    let mut options = offline(&world);
    options.offline.empty_draws_max = 1;
    let running = world.run_against(options, &serve_url);
    let done = ended(&run).await;
    assert_eq!(
        (&done["status"], &done["steps_done"]),
        (&json!("succeeded"), &json!(3)),
        "{done}"
    );
    let (mut drawn, mut without_signal) = (0, 0);
    for step in 1..=3 {
        let notes = notes(&world, &done, step).await;
        let count = |name: &str| notes[name].as_u64().unwrap() as usize;
        assert_eq!(count("trajectories"), 2 * GROUP, "two tasks per step: {notes}");
        assert_eq!(count("groups_drawn"), count("groups_without_signal") + 2, "{notes}");
        assert_eq!(count("rollouts"), count("groups_drawn") * GROUP, "{notes}");
        let steps = notes["staleness"].as_object().unwrap().keys();
        assert!(steps.into_iter().all(|steps| steps == "0" || steps == "1"), "{notes}");
        drawn += count("groups_drawn");
        without_signal += count("groups_without_signal");
    }
    assert!(
        without_signal > 3,
        "six of eight tasks have no signal: {without_signal}"
    );
    assert_eq!(rollouts(&world, &done).await, (drawn * GROUP) as i64);
    assert_eq!(dropped(&world, "zero_variance_group").await, without_signal * GROUP);
    assert_eq!(world.ledger("trained").await, 3 * 2 * GROUP as i64);

    // no task has a signal: three times two tasks are drawn
    let mut wanted = request_with(&silent(4));
    wanted["dynamic_sampling"] = json!(true);
    wanted["draws_per_step_max"] = json!(3);
    let (_, run) = create_as(&control, &wanted).await;
    let done = ended(&run).await;
    assert_eq!(done["status"], "failed", "{done}");
    let reason = done["reason"].as_str().unwrap();
    assert!(reason.contains("different rewards"), "{reason}");
    assert_eq!(rollouts(&world, &done).await, (3 * 2 * GROUP) as i64);
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_step_has_drawn_outlives_the_trainer() {
    let world = World::start("dynamic_restart").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (_, run) = create_as(&control, &pulled(2, 1, 0)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let take = async || take(&run).await;
    let reward = async |lease: &Value, value: f64| reward(&control, lease, value).await;

    // two tasks; the rewards of one are equal
    let mut first = [take().await, take().await, take().await, take().await];
    first.sort_by_key(group);
    for (lease, value) in first.iter().zip([1.0, 1.0, 1.0, 0.0]) {
        reward(lease, value).await;
    }
    // the third one in its place, whose rewards are equal too; the trainer ends between them
    let third = take().await;
    let tasks: BTreeSet<String> = [&first[0], &first[2], &third].map(task).into();
    assert_eq!(tasks.len(), 3, "{tasks:?}");
    reward(&third, 0.5).await;
    running.stop().await;
    let running = world.run_against(offline(&world), &serve_url);
    let companion = take().await;
    assert_eq!(group(&companion), group(&third));
    reward(&companion, 0.5).await;
    // all tasks again
    let last = [take().await, take().await];
    assert_eq!(group(&last[0]), group(&last[1]));
    assert_eq!(get(run.clone()).await["steps_done"], 0);
    reward(&last[0], 1.0).await;
    reward(&last[1], 0.0).await;

    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    let notes = notes(&world, &done, 1).await;
    let expected = json!({"groups_drawn": 4, "groups_without_signal": 2, "rollouts": 8, "trajectories": 4,
                          "reward_mean": 0.625, "dropped": {"zero_variance_group": 4}});
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&notes[name], value, "{name}: {notes}");
    }
    let counts = get(format!("{run}/rollouts")).await;
    assert_eq!(counts["by_state"], json!({"spent": 8}), "{counts}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_a_later_step_are_replaced_before_its_turn() {
    let world = World::start("dynamic_ahead").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    let (_, run) = create_as(&control, &pulled(1, 2, 1)).await;
    let running = world.run_against(offline(&world), &serve_url);
    let first = [take(&run).await, take(&run).await];
    let silent = [take(&run).await, take(&run).await];
    for lease in &silent {
        reward(&control, lease, 0.5).await;
    }
    // nothing of the first step has ended
    let instead = [take(&run).await, take(&run).await];
    assert_eq!(group(&instead[0]), group(&instead[1]));
    assert_ne!(task(&instead[0]), task(&silent[0]));
    for lease in [&first, &instead] {
        reward(&control, &lease[0], 1.0).await;
        reward(&control, &lease[1], 0.0).await;
    }
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    let (one, two) = (notes(&world, &done, 1).await, notes(&world, &done, 2).await);
    let drawn = |notes: &Value| (notes["groups_drawn"].clone(), notes["groups_without_signal"].clone());
    assert_eq!((drawn(&one), drawn(&two)), ((json!(1), json!(0)), (json!(2), json!(1))));
    assert_eq!(
        two["staleness"],
        json!({"1": 2}),
        "they were made before the first step"
    );
    assert_eq!(rollouts(&world, &done).await, 6);
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rewards_of_several_graders_are_compared_one_by_one_each_night() {
    let world = World::start("gdpo").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let contains = |text: &str| json!({"type": "string_check", "operation": "like", "input": "{{ sample.output_text }}", "reference": text});
    let mut wanted = request();
    wanted["steps"] = json!(1);
    wanted["advantage"] = json!("gdpo");
    // answers have 5 tokens, so none is cut off
    wanted["max_tokens"] = json!(6);
    wanted["overlong"] = json!("mask");
    wanted["schedule"] = json!({"repeats": "0 3 * * * Europe/Berlin"});
    let mut product = wanted.clone();
    wanted["grader"] = json!({"type": "multi", "calculate_output": "0.75 * right + 0.25 * other",
        "graders": {"right": contains("{{ item.answer }}"), "other": contains("k")}});
    product["grader"] = wanted["grader"].clone();
    product["grader"]["calculate_output"] = json!("right * other");
    let (status, problem) = post(format!("{control}/v1/runs"), &product).await;
    let detail = problem["detail"].as_str().unwrap();
    assert!(status == 400 && detail.contains("weighted sum"), "{problem}");

    let (_, url) = create_as(&control, &wanted).await;
    let mut options = offline(&world);
    options.offline.empty_draws_max = 1;
    let running = world.run_against(options, &serve_url);
    let done = ended(&url).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    let notes = notes(&world, &done, 1).await;
    let part = |name: &str| notes["reward_part_means"][name].as_f64().unwrap();
    let mean = 0.75 * part("right") + 0.25 * part("other");
    assert!((notes["reward_mean"].as_f64().unwrap() - mean).abs() < 1e-9, "{notes}");
    assert!(part("right") > 0.0 && part("other") > 0.0, "{notes}");
    assert_eq!(dropped(&world, "overlong").await, 0);

    // it comes again, with its tasks
    let next = eventually("the next one is queued", SOON, async || {
        let runs = get(format!("{control}/v1/runs")).await;
        let mut runs = runs["data"].as_array().unwrap().clone().into_iter();
        runs.find(|run| run["recurs_from"] == done["id"])
    })
    .await;
    assert_eq!(next["status"], "queued", "{next}");
    let next = format!("{control}/v1/runs/{}", next["id"].as_str().unwrap());
    let spec = async |url: &str| {
        let mut spec = get(format!("{url}/spec")).await;
        spec["schedule"].as_object_mut().unwrap().remove("starts_at");
        spec
    };
    let again = spec(&next).await;
    assert_eq!(again["tasks"].as_array().unwrap().len(), 3);
    assert_eq!(again, spec(&url).await);
    assert_eq!(post(format!("{next}/cancel"), &json!({})).await.0, 200);

    // answers of 5 tokens are cut off
    wanted["schedule"] = json!({});
    wanted["max_tokens"] = json!(5);
    let (_, url) = create_as(&control, &wanted).await;
    let done = ended(&url).await;
    assert_eq!(done["status"], "failed", "{done}");
    assert_eq!(dropped(&world, "overlong").await, 2 * GROUP);
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_graded_by_python_in_a_sandbox() {
    let world = World::start("python_grader").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control(&world).await;
    let mut wanted = request();
    wanted["steps"] = json!(1);
    wanted["group_size"] = json!(6);
    // the share of letters up to m, and an error for what begins with one of the first five
    wanted["grader"] = json!({"type": "python", "source": "
def grade(sample, item):
    text = sample['output_text']
    if text < 'f':
        raise ValueError(text)
    return sum(letter <= 'm' for letter in text) / len(text)
"});
    wanted["failure_reward"] = json!(0.5);
    let (_, run) = create_as(&control, &wanted).await;
    let mut options = offline(&world);
    // other tests have the processor, too
    (
        options.offline.sandbox.wall_seconds,
        options.offline.sandbox.cpu_seconds,
    ) = (60, 60);
    let running = world.run_against(options, &serve_url);
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    let rewards: Vec<f64> = sqlx::query_scalar("select reward from rollout where run_id = $1 and reward is not null")
        .bind(id(&done))
        .fetch_all(&world.stack.pool)
        .await
        .unwrap();
    let notes = notes(&world, &done, 1).await;
    assert_eq!(notes["rollouts"], rewards.len(), "{notes}");
    let fifths = |reward: f64| (reward * 5.0 - (reward * 5.0).round()).abs() < 1e-9;
    assert!(
        rewards
            .iter()
            .all(|reward| (0.0..=1.0).contains(reward) && (fifths(*reward) || *reward == 0.5)),
        "{rewards:?}"
    );
    let distinct: BTreeSet<u64> = rewards.iter().map(|reward| reward.to_bits()).collect();
    assert!(distinct.len() > 1, "{rewards:?}");
    assert_eq!(notes["lost"], json!({}), "an error costs a reward: {notes}");
    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}
