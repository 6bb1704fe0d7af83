//! Rollouts beside what the same version does for users with the same prompts.

use super::environment::{Leased, create, end, lease, make};
use super::fleet::Wrong;
use super::offline::{control_beside, ended, fleet, get, ingest, offline, post};
use super::world::World;
use crate::support::eventually;
use serde_json::{Value, json};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(90);
const PROMPTS: usize = 8;
/// Of each prompt: answers for users, and rollouts.
const TRACES: usize = 12;

fn prompt(nth: usize) -> String {
    format!("box {nth}?")
}

/// Requests of users, to whom the version of `champion` answers.
async fn use_product(world: &World, serve_url: &str) {
    for nth in 0..PROMPTS {
        let request = json!({
            "model": "demo@realtime", "prompt": prompt(nth), "n": TRACES, "user": format!("user-{nth}"),
            "surface": "product", "metadata": {"purpose": "production"},
        });
        let (status, answer) = post(format!("{serve_url}/v1/completions"), &request).await;
        assert_eq!(status, 200, "{answer}");
    }
    eventually("what users got has closed", SOON, async || {
        (world.ledger("censored").await == (PROMPTS * TRACES) as i64).then_some(())
    })
    .await;
}

/// A run of one step whose harness does `rollout` for each lease. Returns it when it has ended.
async fn run(control: &str, rollout: impl AsyncFn(&Value)) -> Value {
    let task = |nth| json!({"id": format!("{nth}"), "prompt": prompt(nth), "answer": ""});
    let request = json!({
        "kind": "grpo", "environment": {"kind": "pull"}, "tasks": (0..PROMPTS).map(task).collect::<Vec<_>>(),
        "group_size": TRACES, "tasks_per_step": PROMPTS, "steps": 1, "learning_rate": 1e-3,
    });
    let (run, _) = create(control, &request).await;
    loop {
        match lease(&run).await {
            Leased::One(lease) => rollout(&lease).await,
            Leased::Nothing => {}
            Leased::Ended => break,
        }
    }
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    let realism = &done["result"]["realism"];
    let pairs = PROMPTS * TRACES;
    for (field, expected) in [
        ("rollouts", pairs),
        ("production", pairs),
        ("pairs", pairs),
        ("prompts", PROMPTS),
        ("left_out", 0),
        ("step", 1),
        ("pairs_tested", pairs / 2),
    ] {
        assert_eq!(realism[field], expected, "{field}: {realism}");
    }
    let alarms = get(format!("{run}/events")).await;
    let alarms = alarms["data"].as_array().unwrap().iter();
    let alarms = alarms.filter(|event| event["data"]["alarm"] == "realism").count();
    assert_eq!(alarms, usize::from(realism["alarm"] == true), "{done}");
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn a_harness_that_cuts_answers_short_is_told_from_production_and_an_honest_one_is_not() {
    let world = World::start("realism").await;
    world.follow(1, world.base, 0).await;
    let serve_url = fleet(&world, Wrong::None).await;
    let stop = CancellationToken::new();
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &serve_url).await;
    use_product(&world, &serve_url).await;
    let running = world.run_against(offline(&world), &serve_url);

    // its second turns are not compared: the product has single answers
    let honest = run(&control, async |lease| make(&control, lease).await).await;
    let realism = &honest["result"]["realism"];
    assert_eq!(
        (&realism["alarm"], &honest["alarm"]),
        (&json!(false), &Value::Null),
        "{honest}"
    );
    let [low, high] = [0, 1].map(|end| realism["right_share_interval"][end].as_f64().unwrap());
    let share = realism["right_share"].as_f64().unwrap();
    assert!(low < share && share < high && low <= 0.6, "{realism}");

    let cut_short = async |lease: &Value| {
        let url = format!("{}/completions", lease["base_url"].as_str().unwrap());
        let request = json!({"model": "any", "prompt": lease["task"]["prompt"], "max_tokens": 2});
        let (status, answer) = post(url, &request).await;
        assert_eq!(status, 200, "{answer}");
        let reward = answer["choices"][0]["text"].as_str().unwrap() < "m";
        let reward = json!({"reward": f64::from(u8::from(reward))});
        let (status, ended) = end(&control, lease, "reward", &reward).await;
        assert_eq!(status, 200, "{ended}");
    };
    let short = run(&control, cut_short).await;
    let realism = &short["result"]["realism"];
    assert_eq!(
        (&realism["alarm"], &realism["right_share"]),
        (&json!(true), &json!(1.0)),
        "{realism}"
    );
    let alarm = short["alarm"].as_str().unwrap();
    assert!(alarm.starts_with("a classifier tells rollouts"), "{alarm}");
    let differences = realism["differences"].as_array().unwrap();
    let tokens = differences.iter().find(|one| one["what"] == "sampled tokens").unwrap();
    assert_eq!(
        (&tokens["production"], &tokens["rollouts"]),
        (&json!(5.0), &json!(2.0)),
        "{realism}"
    );

    running.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
}
