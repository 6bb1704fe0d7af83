//! Learning what users wrote instead of an answer: supervised runs, and the realtime run.

use super::grammar::checkpoint;
use super::offline::{control, get, post};
use super::uses::{SOON, dataset, insert, run};
use super::world::{Sampled, World};
use fixture::eventually;
use runs::publish::Error;
use runs::publish::run_state::Typed;
use runs::select::{self, caps::Caps};
use runs::settings::Loss;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Sends a demonstration, as the sink stores it. Returns its id.
async fn write(world: &World, about: &Sampled, text: &str, late: bool) -> Uuid {
    sqlx::query_scalar(
        "insert into feedback (id, tenant_id, generation_id, metric_name, value_text, given_at, stored_at, late)
         values (uuidv7(), 'default', $1, 'demonstration', $2, clock_timestamp(), now() - interval '1 minute', $3) returning id",
    )
    .bind(about.id)
    .bind(text)
    .bind(late)
    .fetch_one(&world.stack.pool)
    .await
    .unwrap()
}

/// The id of a key that was revoked.
async fn revoked_key(world: &World) -> Uuid {
    sqlx::query_scalar(
        "insert into api_key (tenant_id, role, digest, revoked_at) values ('default', 'admin', '', now()) returning id",
    )
    .fetch_one(&world.stack.pool)
    .await
    .unwrap()
}

async fn steps(world: &World, run: &Value) -> Vec<Value> {
    sqlx::query_scalar("select metrics from step where run_id = $1 order by step")
        .bind(run["id"].as_str().unwrap().parse::<Uuid>().unwrap())
        .fetch_all(&world.stack.pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supervised_run_learns_what_users_wrote_instead() {
    let world = World::start_from("demonstrations", checkpoint()).await;
    world.follow(1, world.base, 0).await;
    let mut sampled = world.sample(world.base, 5).await;
    // the most probable answer says as little about what the user wrote as any other
    sampled.extend(world.sample_at(0.0, world.base, 1).await);
    // and so does one that declined, whatever it earned
    sampled[0].tokens = vec![super::world::DECLINE];
    sampled[0].logprobs = vec![-1.0];
    sampled[0].suppressed = false;
    insert(&world, &sampled).await;
    sqlx::query("update trajectory set signal = 'alone' where generation_id = $1")
        .bind(sampled[4].id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    write(&world, &sampled[0], "yes", true).await;
    write(&world, &sampled[1], "no", false).await;
    write(&world, &sampled[1], "yes", false).await;
    write(&world, &sampled[2], "yes<|end|>", false).await;
    let taken_back = write(&world, &sampled[3], "no", false).await;
    sqlx::query(
        "insert into retraction (id, tenant_id, feedback_id, reason, given_at, late)
         values (uuidv7(), 'default', $1, '', now(), true)",
    )
    .bind(taken_back)
    .execute(&world.stack.pool)
    .await
    .unwrap();
    write(&world, &sampled[5], "yes", false).await;

    let mut options = world.options();
    options.realtime.enabled = false;
    options.offline.enabled = true;
    options.offline.guards.kl_max = 10.0; // large steps
    let running = world.run(options);
    let control = control(&world).await;
    dataset(&control, "all", json!({})).await;
    dataset(&control, "alone", json!({"signals": ["alone"]})).await;
    let mut body = json!({"kind": "sft", "dataset": "all@1", "target": "demonstration", "base_version": world.base,
                          "batch_size": 8, "learning_rate": 3e-3});
    let (status, problem) = post(format!("{control}/v1/runs"), &body).await;
    assert_eq!(status, 400, "{problem}");
    assert!(problem["detail"].as_str().unwrap().starts_with("steps"), "{problem}");
    body["steps"] = json!(40);
    let learned = run(&control, body.clone()).await;

    let made = steps(&world, &learned).await;
    let used: Vec<Uuid> = sqlx::query_scalar("select distinct generation_id from trajectory_use where run_id = $1")
        .bind(learned["id"].as_str().unwrap().parse::<Uuid>().unwrap())
        .fetch_all(&world.stack.pool)
        .await
        .unwrap();
    let of = [0, 1, 5].map(|nth: usize| sampled[nth].id);
    assert_eq!(
        used.into_iter().collect::<BTreeSet<_>>(),
        of.into_iter().collect::<BTreeSet<_>>()
    );
    // three texts of three letters and an end
    assert_eq!(
        (&made[0]["tokens"], &made[0]["notes"]["refused"]),
        (&json!(12), &json!({"special_token_in_demonstration": 1}))
    );
    // an untrained model finds any of 261 ids about as probable; all three wrote the same
    let loss = |step: &Value| step["loss"].as_f64().unwrap();
    assert_eq!(made.len(), 40);
    assert!(loss(&made[0]) > 4.0 && loss(&made[39]) < 1.0, "{made:?}");
    let events = get(format!("{control}/v1/runs/{}/events", learned["id"].as_str().unwrap())).await;
    let says = |text: &str| events.to_string().contains(text);
    assert!(says("4 of 6 trajectories have a demonstration"), "{events}");
    assert!(!events.to_string().contains("yes"), "texts are users': {events}");

    // capability: the version writes what users wrote, and the base does not
    let evaluate = async |version: &Value| {
        let body = json!({"kind": "evaluate", "dataset": "all@1", "base_version": version});
        run(&control, body).await["result"]["demonstrations"].clone()
    };
    let (before, after) = (evaluate(&json!(world.base)).await, evaluate(&learned["head"]).await);
    assert_eq!(
        (&before["generations"], &before["right_per_100"]),
        (&json!(3), &json!(0.0))
    );
    assert_eq!(
        (&after["generations"], &after["right_per_100"]),
        (&json!(3), &json!(100.0))
    );
    let logprob = |measured: &Value| measured["logprob_mean"].as_f64().unwrap();
    assert!((logprob(&before) + loss(&made[0])).abs() < 1e-3, "{before} {}", made[0]);
    assert!(logprob(&after) > logprob(&before), "{before} {after}");

    // what came after the dataset was made is not in it
    let late = write(&world, &sampled[4], "late", true).await;
    sqlx::query("update feedback set stored_at = now() where id = $1")
        .bind(late)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let again = run(&control, body.clone()).await;
    let root = async |run: &Value| {
        let url = format!("{control}/v1/runs/{}/checkpoints", run["id"].as_str().unwrap());
        get(url).await["data"][0]["root"].as_str().unwrap().to_owned()
    };
    assert_eq!(root(&again).await, root(&learned).await);
    body["dataset"] = json!("alone@1");
    let (status, created) = post(format!("{control}/v1/runs"), &body).await;
    assert_eq!(status, 201, "{created}");
    let url = format!("{control}/v1/runs/{}", created["id"].as_str().unwrap());
    let failed = eventually("the run fails", SOON, async || {
        let run = get(url.clone()).await;
        run["finished_at"].is_string().then_some(run)
    })
    .await;
    assert_eq!(failed["status"], "failed", "{failed}");
    assert!(
        failed["reason"].as_str().unwrap().contains("has a demonstration"),
        "{failed}"
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_realtime_run_learns_what_keys_that_may_teach_typed() {
    let world = World::start_from("typed", checkpoint()).await;
    world.follow(1, world.base, 0).await;
    let mut options = world.options();
    options.realtime.step.loss = Loss::Verdicts { weight_max: 20.0 };
    options.realtime.step.optimizer.learning_rate = 3e-3;
    options.realtime.guards.kl_max = 10.0; // large steps
    options.realtime.demonstration_share_max = 0.5;
    // one key sends four texts, another one, and half of a cohort of eight is room for four
    let [busy, other] = [Uuid::now_v7(), Uuid::now_v7()];
    let revoked = revoked_key(&world).await;
    let keys = [busy, busy, busy, busy, revoked, other, other].map(Some);
    let texts = ["yes", "yes", "yes", "yes", "no", "yes", "yes", "no"];
    let teachers = keys.into_iter().chain([None]).zip(texts);
    let cohort = async |version: i64| {
        let sampled = world.sample(version, 16).await.into_iter();
        // this model declines by another token than was masked
        let mut sampled: Vec<Sampled> = sampled.filter(|one| !one.suppressed).take(8).collect();
        // its user wrote what the policy would not
        sampled[0].tokens = vec![super::grammar::DECLINE];
        sampled[0].logprobs = vec![-1.0];
        sampled[0].reward = Some(0.0);
        for (nth, one) in sampled.iter_mut().enumerate() {
            one.user = if nth < 4 { "typist" } else { "other" }.into();
        }
        for (one, (teacher, text)) in sampled.iter().zip(teachers.clone()) {
            let said = write(&world, one, text, false).await;
            sqlx::query("update feedback set teacher = $2 where id = $1")
                .bind(said)
                .bind(teacher)
                .execute(&world.stack.pool)
                .await
                .unwrap();
        }
        world.insert_all(&sampled, "champion").await;
        // logged with `train` "false"
        let untrained =
            "update generation set train_mask = array_fill(false, array[cardinality(token_ids)]) where id = $1";
        let untrained = sqlx::query(untrained).bind(sampled[6].id);
        untrained.execute(&world.stack.pool).await.unwrap();
        sampled
    };
    let first = cohort(world.base).await;
    let running = world.run(options);
    let head = world.head_after(world.base).await;
    let metrics = world.metrics(1).await;
    assert_eq!(
        (&metrics["typed"], &metrics["quarantined"]),
        (&json!(4), &json!(0)),
        "{metrics}"
    );
    let yes = 4; // three letters and an end
    let sampled = |places: &[usize]| places.iter().map(|&nth| first[nth].tokens.len()).sum::<usize>();
    let of_typist = 3 * yes + sampled(&[3]);
    let of_other = yes + sampled(&[4, 7]);
    assert_eq!(metrics["tokens"], json!(of_typist + of_other), "{metrics}");
    let nats = |metrics: &Value| metrics["typed_nats"].as_f64().unwrap();
    assert!(nats(&metrics) > 4.0, "an untrained model: {metrics}");
    let trained = world.dispositions().await;
    assert_eq!(trained.iter().filter(|one| one.kind == "trained").count(), 8);

    // which these were and who sent them is recorded, and a restart counts what was learned of them
    let typed =
        "select generation_id, typed_tokens, teacher from disposition where typed_tokens is not null order by 1";
    let typed: Vec<(Uuid, i32, Uuid)> = sqlx::query_as(typed).fetch_all(&world.stack.pool).await.unwrap();
    let tokens = i32::try_from(yes).unwrap();
    let mut learned = [(0, busy), (1, busy), (2, busy), (5, other)].map(|(nth, key)| (first[nth].id, tokens, key));
    learned.sort_unstable();
    assert_eq!(typed, learned, "keys take turns");
    let run: Uuid = sqlx::query_scalar("select id from run")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    let recent = select::trained(&world.stack.pool_of("train"), run, Caps::default())
        .await
        .unwrap();
    let of_other = of_other + 1; // one without a trained token counts as one
    let share = of_typist.max(of_other) as f64 / (of_typist + of_other) as f64;
    assert_eq!((recent.users(), recent.largest_user_share()), (2, share));
    let counted: i64 = sqlx::query_scalar("select tokens from trained_share($1, 100) where user_key = 'typist'")
        .bind(run)
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(counted, i64::try_from(of_typist).unwrap());

    cohort(head).await;
    world.head_after(head).await;
    running.stop().await;
    let later = world.metrics(2).await;
    assert!(nats(&later) < nats(&metrics) - 0.1, "{metrics} {later}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_not_committed_with_texts_that_a_revoked_key_sent() {
    let world = World::start("revoked_teacher").await;
    let cohort = world.sample(world.base, 4).await;
    world.insert_all(&cohort, "champion").await;
    let (run, claim) = world.claimed_run().await;
    let mut draft = world.draft(run, &cohort).await;
    let key = revoked_key(&world).await;
    draft.record.typed.insert(cohort[0].id, Typed { tokens: 1, key });
    let prepared = world.publisher.prepare(&claim, draft).await.unwrap();
    let refused = world.publisher.commit(&claim, &prepared).await;
    assert!(matches!(refused, Err(Error::Revoked)), "{refused:?}");
    assert_eq!(world.line().await, (world.base, 0));
    assert!(world.dispositions().await.iter().all(|one| one.kind != "trained"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_version_cannot_encode_what_is_typed_pauses_and_says_why() {
    let world = World::start("untaught").await;
    world.follow(1, world.base, 0).await;
    let mut options = world.options();
    options.realtime.step.loss = Loss::Verdicts { weight_max: 20.0 };
    options.realtime.demonstration_share_max = 0.5;
    let running = world.run(options);
    let reason = world.paused().await;
    running.stop().await;
    assert!(reason.contains("demonstrations need"), "{reason}");
    assert!(reason.contains("demonstration_share_max to 0"), "{reason}");
}
