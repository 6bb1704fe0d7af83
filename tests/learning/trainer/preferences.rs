//! Runs of the kinds `dpo` and `kto`, supervised runs by a budget of tokens, and what a run's spec, its
//! forks and its curve say.

use super::offline::{control, get, post};
use super::uses::{dataset, insert, run};
use super::world::{Sampled, World};
use fixture::succeed;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Ten trajectories of five prompts. The first four prompts have an accepted and a rejected answer; those
/// of the fourth have the same reward. The last two are alone.
async fn preferences(world: &World) -> Vec<Sampled> {
    let mut sampled = world.sample(world.base, 10).await;
    for at in 0..8 {
        sampled[at].prompt = sampled[at - at % 2].prompt.clone();
        sampled[at].reward = Some(if at % 2 == 0 { 0.75 } else { -0.25 });
    }
    sampled[7].reward = Some(0.75);
    sampled[8].reward = Some(0.75);
    sampled[9].reward = Some(-0.25);
    insert(world, &sampled).await;
    sampled
}

async fn steps(world: &World, run: &Value) -> Vec<Value> {
    let rows: Vec<(Value,)> = sqlx::query_as("select metrics from step where run_id = $1 order by step")
        .bind(run["id"].as_str().unwrap().parse::<Uuid>().unwrap())
        .fetch_all(&world.stack.pool)
        .await
        .unwrap();
    rows.into_iter().map(|(metrics,)| metrics).collect()
}

async fn used(world: &World, run: &Value) -> BTreeSet<Uuid> {
    let rows: Vec<(Uuid, String)> =
        sqlx::query_as("select generation_id, purpose from trajectory_use where run_id = $1")
            .bind(run["id"].as_str().unwrap().parse::<Uuid>().unwrap())
            .fetch_all(&world.stack.pool)
            .await
            .unwrap();
    assert!(rows.iter().all(|(_, purpose)| purpose == "trained"), "{rows:?}");
    rows.into_iter().map(|(id, _)| id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dpo_run_prefers_the_better_of_two_answers_and_counts_what_has_no_partner() {
    let world = World::start("dpo").await;
    world.follow(1, world.base, 0).await;
    let sampled = preferences(&world).await;
    let mut options = world.options();
    options.realtime.enabled = false;
    options.offline.enabled = true;
    let running = world.run(options);
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;

    let body = json!({"kind": "dpo", "dataset": "all@1", "base_version": world.base, "steps": 6, "batch_size": 3,
                      "learning_rate": 1e-3});
    let dpo = run(&control, body.clone()).await;
    assert_eq!(dpo["steps_done"], 6);
    let made = steps(&world, &dpo).await;
    // at the start the policy is the reference
    let loss = |step: &Value| step["loss"].as_f64().unwrap();
    assert!((loss(&made[0]) - std::f64::consts::LN_2).abs() < 1e-9, "{}", made[0]);
    assert!(
        loss(&made[5]) < loss(&made[0]),
        "{} {}",
        made[0]["loss"],
        made[5]["loss"]
    );
    let preference = &made[5]["notes"]["preference"];
    assert_eq!(
        (&preference["pairs"], &preference["accuracy"]),
        (&json!(3), &json!(1.0))
    );
    assert!(preference["margin"].as_f64().unwrap() > 0.0, "{preference}");
    // three pairs; two have equal rewards, two are alone
    let paired: BTreeSet<Uuid> = sampled[..6].iter().map(|one| one.id).collect();
    assert_eq!(used(&world, &dpo).await, paired);
    let url = format!("{control}/v1/runs/{}", dpo["id"].as_str().unwrap());
    let events = get(format!("{url}/events")).await;
    let noted = events["data"]
        .as_array()
        .unwrap()
        .iter()
        .find(|event| event["data"]["pairs"].is_number());
    let noted = &noted.unwrap()["data"];
    assert_eq!((&noted["pairs"], &noted["trajectories"]), (&json!(3), &json!(10)));
    assert_eq!(
        (&noted["unpaired"]["margin"], &noted["unpaired"]["no_partner"]),
        (&json!(2), &json!(2))
    );

    // a margin that no pair has is said
    let mut wide = body.clone();
    wide["margin"] = json!(1.5);
    let (status, refused) = post(format!("{control}/v1/runs"), &wide).await;
    assert_eq!(status, 201, "{refused}");
    let ended = fixture::eventually("the run fails", super::uses::SOON, async || {
        let run = get(format!("{control}/v1/runs/{}", refused["id"].as_str().unwrap())).await;
        run["finished_at"].is_string().then_some(run)
    })
    .await;
    assert_eq!(ended["status"], "failed");
    assert!(
        ended["reason"].as_str().unwrap().contains("nothing to compare"),
        "{ended}"
    );

    // the spec makes the same run: the same weights, to the bit
    let spec = get(format!("{url}/spec")).await;
    let again = run(&control, spec).await;
    assert_eq!(again["config"], dpo["config"]);
    let root = async |run: &Value| {
        let steps = get(format!("{control}/v1/runs/{}/checkpoints", run["id"].as_str().unwrap())).await;
        steps["data"][0]["root"].as_str().unwrap().to_owned()
    };
    assert_eq!(root(&again).await, root(&dpo).await);

    // a fork goes on from the head, with another seed
    let (status, fork) = post(format!("{url}/fork"), &json!({"seed": 7, "steps": 2})).await;
    assert_eq!(status, 201, "{fork}");
    assert_eq!(
        (&fork["base_version"], &fork["config"]["seed"]),
        (&dpo["head"], &json!(7))
    );
    assert_eq!(
        (&fork["config"]["beta"], &fork["steps_total"]),
        (&dpo["config"]["beta"], &json!(2))
    );
    for (changes, field) in [
        (json!({"kind": "kto"}), "kind"),
        (json!({"beta": -1}), "beta"),
        (json!({"betta": 1}), "betta"),
        (json!({"base_version": 1_000_000}), "base_version"),
    ] {
        let (status, problem) = post(format!("{url}/fork"), &changes).await;
        assert_eq!(status, 400, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(field), "{problem}");
    }

    // the curve has the steps in order, and the comparison what differs
    let curve = get(format!("{url}/curve")).await;
    let points = curve["data"].as_array().unwrap();
    assert_eq!(
        points
            .iter()
            .map(|point| point["step"].as_i64().unwrap())
            .collect::<Vec<_>>(),
        [1, 2, 3, 4, 5, 6]
    );
    assert_eq!(points[5]["loss"], made[5]["loss"]);
    assert_eq!(points[5]["preference"], made[5]["notes"]["preference"]);
    // six rewards, half 0.75 and half −0.25: deviation √0.3, and 1.96 √(0.3 / 6) beside the mean
    let interval = &points[0]["reward_interval"];
    let half = interval[1].as_f64().unwrap() - points[0]["reward_mean"].as_f64().unwrap();
    assert!((half - 1.959_964 * (0.3f64 / 6.0).sqrt()).abs() < 1e-6, "{interval}");
    assert!(points[1]["sequences_per_second"].as_f64().unwrap() > 0.0);
    let page = get(format!("{url}/curve?after=4&limit=1")).await;
    assert_eq!((&page["data"][0]["step"], &page["has_more"]), (&json!(5), &json!(true)));
    let ids = [&dpo, &fork].map(|run| run["id"].as_str().unwrap()).join(",");
    let compared = get(format!("{control}/v1/runs/compare?ids={ids}")).await;
    assert_eq!(compared["differences"]["seed"], json!([0, 7]));
    assert!(
        compared["differences"].get("beta").is_none(),
        "{}",
        compared["differences"]
    );
    assert_eq!(compared["runs"][0]["curve"]["data"].as_array().unwrap().len(), 6);
    assert_eq!(get(format!("{control}/v1/runs/compare?ids=x")).await["status"], 400);

    // the same from the command line
    let cli = |args: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = world.stack.springtide(&args);
        tokio::task::block_in_place(|| succeed(command.env("SPRINGTIDE__CLIENT__CONTROL", &control)))
    };
    let id = dpo["id"].as_str().unwrap();
    let spec: Value = serde_json::from_str(&cli(&format!("run spec {id}"))).unwrap();
    assert_eq!(
        (&spec["kind"], &spec["base_version"]),
        (&json!("dpo"), &json!(world.base))
    );
    assert!(cli(&format!("run curve {id}")).lines().count() > 6);
    cli(&format!("run export-tensorboard {id} board"));
    let file = std::fs::read_dir(world.stack.dir.path().join("board"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    assert!(file.file_name().to_string_lossy().starts_with("events.out.tfevents."));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kto_run_needs_no_pairs_and_is_resumed_where_it_was_stopped() {
    let world = World::start("kto").await;
    world.follow(1, world.base, 0).await;
    let sampled = preferences(&world).await;
    let mut options = world.options();
    options.realtime.enabled = false;
    options.offline.enabled = true;
    let running = world.run(options.clone());
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;
    let body = json!({"kind": "kto", "dataset": "all@1", "base_version": world.base, "threshold": 0.5, "steps": 8,
                      "batch_size": 4, "learning_rate": 1e-3, "undesirable_weight": 1.5});
    let whole = run(&control, body.clone()).await;
    let made = steps(&world, &whole).await;
    let of = |step: &Value, field: &str| step["notes"]["preference"][field].as_f64().unwrap();
    // at the start Δ and z₀ are 0, and every loss is half its weight
    let expected = (0.5 * of(&made[0], "desirable") + 0.75 * of(&made[0], "undesirable")) / 4.0;
    assert!(
        (made[0]["loss"].as_f64().unwrap() - expected).abs() < 1e-9,
        "{}",
        made[0]
    );
    assert_eq!(
        (of(&made[0], "reference_point"), of(&made[0], "mismatched")),
        (0.0, 4.0)
    );
    assert!(
        of(&made[7], "chosen") > of(&made[7], "rejected"),
        "{}",
        made[7]["notes"]
    );
    let all: BTreeSet<Uuid> = sampled.iter().map(|one| one.id).collect();
    assert_eq!(used(&world, &whole).await, all);

    // stopped in the middle of a pass, and gone on with: the same steps
    let (_, created) = post(format!("{control}/v1/runs"), &body).await;
    let url = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
    fixture::eventually("it has made a step", super::uses::SOON, async || {
        (get(url.clone()).await["steps_done"].as_i64().unwrap() >= 1).then_some(())
    })
    .await;
    running.stop().await;
    let running = world.run(options);
    let resumed = fixture::eventually("the run ends", super::uses::SOON, async || {
        let run = get(url.clone()).await;
        run["finished_at"].is_string().then_some(run)
    })
    .await;
    assert_eq!(resumed["status"], "succeeded", "{resumed}");
    let again = steps(&world, &resumed).await;
    for (one, other) in made.iter().zip(&again) {
        assert_eq!(
            (&one["loss"], &one["notes"]["position"]),
            (&other["loss"], &other["notes"]["position"])
        );
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supervised_run_takes_as_many_trajectories_as_fit_into_its_tokens() {
    let world = World::start("tokens-per-step").await;
    world.follow(1, world.base, 0).await;
    let sampled = world.sample(world.base, 12).await;
    insert(&world, &sampled).await;
    let mut options = world.options();
    options.realtime.enabled = false;
    options.offline.enabled = true;
    let running = world.run(options);
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;
    let longest = sampled
        .iter()
        .map(|one| one.prompt.len() + one.tokens.len())
        .max()
        .unwrap();
    let budget = 3 * longest;
    let mut body = json!({"kind": "sft", "dataset": "all@1", "base_version": world.base, "tokens_per_step": budget});
    for (field, value) in [("nothing", Value::Null), ("batch_size", json!(4))] {
        let mut wrong = body.clone();
        if !value.is_null() {
            wrong[field] = value;
        }
        let (status, problem) = post(format!("{control}/v1/runs"), &wrong).await;
        assert_eq!(status, 400, "{problem}");
    }
    body["steps"] = json!(2);
    let sft = run(&control, body).await;
    let mut first_pass = BTreeSet::new();
    let rows: Vec<(i64, Vec<Uuid>)> = sqlx::query_as(
        "select step, array_agg(generation_id) from trajectory_use where run_id = $1 group by step order by step",
    )
    .bind(sft["id"].as_str().unwrap().parse::<Uuid>().unwrap())
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(rows.len(), 2);
    for (step, ids) in &rows {
        let of = |id: &Uuid| sampled.iter().find(|one| one.id == *id).unwrap();
        let tokens: usize = ids.iter().map(|id| of(id).prompt.len() + of(id).tokens.len()).sum();
        assert!(tokens <= budget, "step {step}: {tokens} of {budget}");
        assert!(
            *step > 1 || tokens > budget - longest,
            "the next one would have fit: {tokens} of {budget}"
        );
        assert!(
            ids.iter().all(|id| first_pass.insert(*id)),
            "none comes twice in a pass"
        );
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evaluation_comes_again_and_measures_what_its_alias_is_then() {
    let world = World::start("recurrence").await;
    world.follow(1, world.base, 0).await;
    let sampled = world.sample(world.base, 4).await;
    insert(&world, &sampled).await;
    let mut options = world.options();
    options.realtime.enabled = false;
    options.offline.enabled = true;
    let running = world.run(options);
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;
    let nightly = json!({"kind": "evaluate", "dataset": "all@1", "base": "champion",
                         "schedule": {"repeats": "0 3 * * * Europe/Berlin", "priority": 3}});
    let mut both = nightly.clone();
    both["base_version"] = json!(world.base);
    assert_eq!(post(format!("{control}/v1/runs"), &both).await.0, 400);
    let mut nobody = nightly.clone();
    nobody["base"] = json!("nobody");
    assert_eq!(post(format!("{control}/v1/runs"), &nobody).await.0, 404);

    let first = run(&control, nightly).await;
    assert_eq!(
        (&first["base_version"], &first["result"]["version"]),
        (&Value::Null, &json!(world.base))
    );
    let next = async |of: &Value| {
        fixture::eventually("the next one is queued", super::uses::SOON, async || {
            let runs = get(format!("{control}/v1/runs")).await;
            runs["data"]
                .as_array()
                .unwrap()
                .iter()
                .find(|run| run["recurs_from"] == of["id"])
                .cloned()
        })
        .await
    };
    let second = next(&first).await;
    assert_eq!(second["status"], "queued");
    let mut expected = first["config"].clone();
    let starts = second["config"]["schedule"]["starts_at"].as_str().unwrap();
    // on the clock of Berlin, in winter or in summer
    assert!(
        starts.ends_with("T02:00:00Z") || starts.ends_with("T01:00:00Z"),
        "{starts}"
    );
    expected["schedule"]["starts_at"] = json!(starts);
    assert_eq!(second["config"], expected);

    // the one that waits ends the series when it is canceled
    let url = format!("{control}/v1/runs/{}", second["id"].as_str().unwrap());
    assert_eq!(post(format!("{url}/cancel"), &json!({})).await.0, 200);
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    let runs = get(format!("{control}/v1/runs")).await;
    assert_eq!(runs["data"].as_array().unwrap().len(), 2, "{runs}");
    let mut connection = world.stack.pool.acquire().await.unwrap();
    let rows = runs::api::audited::audited(&mut connection).await.unwrap();
    let trail = edge::audit::rows::Trail::read(&mut connection, "run").await.unwrap();
    assert_eq!(edge::audit::rows::compare("run", &rows, &trail), Vec::<String>::new());
    running.stop().await;
}
