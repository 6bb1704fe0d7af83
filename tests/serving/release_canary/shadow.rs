//! A canary that answers unseen before its first user.

use super::{World, users_of};
use edge::audit::Actor;
use edge::sampler::{self, SamplerKey};
use fixture::serving::wait_for;
use serde_json::json;

const TEST: Actor<'static> = Actor {
    key: None,
    name: "tests",
};

/// Replicas answer requests of champion a second time, and the answers reach the tables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_answers_unseen_before_it_gets_users() {
    let world = World::start("canary_shadow").await;
    let sink = fixture::ingest::Service::start(&world.stack).await;
    let replica = SamplerKey::from_seed(&[1; 32]).public_key();
    sampler::register(&world.stack.pool, &replica, "replica-1", None, None, TEST)
        .await
        .unwrap();
    let strategy = json!({"steps": [{"setWeight": 50}, {"pause": {}}], "shadow": {"percent": 100, "answers": 20}});
    let body = json!({"version": 2, "strategy": strategy});
    let (_, canary) = world.post("/v1/canaries", &body).await;
    let id = canary["id"].as_str().unwrap();
    let canary = world.settled(id).await;
    assert_eq!(
        (&canary["state"], &canary["share"], &canary["control"]),
        (&json!("shadow"), &json!(0.0), &json!(1)),
        "{canary}"
    );
    wait_for(&world.replica.url, "demo@canary", 2).await;
    let served = world.served_with(json!({})).await;
    assert!(
        users_of(&served, "canary").is_empty() && users_of(&served, "champion").len() > 20,
        "{served:?}"
    );
    let canary = fixture::eventually(
        "enough unseen answers",
        std::time::Duration::from_secs(90),
        async || Some(world.settled(id).await).filter(|canary| canary["state"] != "shadow"),
    )
    .await;
    let pass = canary["transitions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["from_state"] == "shadow")
        .unwrap();
    assert_eq!(
        (&canary["state"], &canary["share"]),
        (&json!("canary"), &json!(0.5)),
        "{canary}"
    );
    let unseen = &pass["evidence"]["canary"];
    assert!(
        unseen["answers"].as_i64() >= Some(20) && unseen["rewarded"] == 0,
        "{pass}"
    );
    let seen: i64 = sqlx::query_scalar("select count(*) from generation where arm = 'canary' and arm_probability < 1")
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
    assert_eq!(seen, 0, "no user had it");
    sink.stop().await;
    world.end().await;
}

/// What would be taken back from users is refused before the first one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_whose_unseen_answers_are_longer_is_refused() {
    let world = World::start("canary_shadow_longer").await;
    let strategy = json!({"steps": [{"setWeight": 50}, {"pause": {}}], "shadow": {"percent": 100, "answers": 100000}});
    let (_, canary) = world
        .post("/v1/canaries", &json!({"version": 2, "strategy": strategy}))
        .await;
    let id = canary["id"].as_str().unwrap();
    assert_eq!(world.settled(id).await["state"], "shadow");
    world.answers("champion", 1, 60, 0.5, 0.0).await;
    world.answers("canary", 2, 60, 0.5, 1.0).await;
    assert_eq!(
        world.settled(id).await["state"],
        "shadow",
        "answers that a user had are not unseen"
    );
    for (arm, tokens) in [("canary", 38), ("champion", 8)] {
        sqlx::query(
            "update generation set version_spans = jsonb_build_array(jsonb_build_array(version, $2 + right(user_key, 1)::int % 3))
             where arm = $1",
        )
        .bind(arm)
        .bind(tokens)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    }
    // each to a request of champion; those that were cut off say nothing
    let unseen =
        "with numbered as (select id, arm, row_number() over (partition by arm order by id) as number from generation)
                  update generation g
                  set arm = 'shadow', purpose = 'evaluation', group_id = of.id, finish_reason = $1
                  from numbered its join numbered of on of.number = its.number and of.arm = 'champion'
                  where g.id = its.id and its.arm = $2";
    for (finish, arm, state) in [("abort", "canary", "shadow"), ("stop", "shadow", "aborted")] {
        let done = sqlx::query(unseen)
            .bind(finish)
            .bind(arm)
            .execute(&world.stack.pool)
            .await
            .unwrap();
        assert_eq!(done.rows_affected(), 600);
        assert_eq!(world.settled(id).await["state"], state);
    }
    let canary = world.settled(id).await;
    let reason = canary["transitions"][0]["reason"].as_str().unwrap();
    assert!(
        canary["state"] == "aborted" && reason.starts_with("no user has seen it: ") && reason.contains("longer"),
        "{canary}"
    );
    assert_eq!(world.version_of("canary").await, None);
    world.end().await;
}
