//! Users that were erased: what is not trained on any more, and which versions contain them.

use super::door::{Door, forget_refusals, trained};
use super::world::World;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use uuid::Uuid;

async fn erase(world: &World, user: &str) -> Value {
    let register = "select register_erasure($1, 'default', user_digest('default', $2), 'a test')";
    let register = sqlx::query(register).bind(Uuid::now_v7()).bind(user);
    register.execute(&world.stack.pool).await.unwrap();
    sqlx::query_scalar("select erase_user('default', $1, user_digest('default', $1))")
        .bind(user)
        .fetch_one(&world.stack.pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leased_cohort_of_an_erased_user_commits_nothing_and_the_others_are_trained_on() {
    let (door, leased) = Door::leased("erasure_door", "a").await;
    let leaver =
        "update generation set user_key = 'leaver' where id in (select id from generation order by id limit 2)";
    sqlx::query(leaver).execute(&door.world.stack.pool).await.unwrap();
    let files = leased
        .upload(&trained(&*door.world.materialize(door.world.base).await))
        .await;
    let found = erase(&door.world, "leaver").await;
    assert_eq!(found["generations"], json!(2));
    assert_eq!((&found["cohorts"], &found["trained"]), (&json!(1), &json!([])));
    let (status, refused) = leased.commit("late", &files, &json!({})).await;
    assert_eq!(status, 409, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("erased"), "{refused}");

    // the rest, with more
    let more = door.world.sample(door.world.base, 8).await;
    door.world.insert_all(&more, "champion").await;
    let next = door.lease("b").await;
    forget_refusals(&door.world).await;
    let files = next
        .upload(&trained(&*door.world.materialize(door.world.base).await))
        .await;
    let (status, committed) = next.commit("next", &files, &json!({})).await;
    assert_eq!(status, 200, "{committed}");
    let version = committed["version"].as_i64().unwrap();
    let mut kinds = BTreeMap::new();
    for one in door.world.dispositions().await {
        *kinds.entry(one.kind).or_insert(0) += 1;
    }
    assert_eq!(kinds["erased"], 2);
    assert_eq!(kinds["trained"], 8);

    // a user that was trained on: the version is named, and what continues it
    let user: String = sqlx::query_scalar(
        "select g.user_key from generation g join disposition d on d.generation_id = g.id where d.kind = 'trained' limit 1",
    )
    .fetch_one(&door.world.stack.pool)
    .await
    .unwrap();
    let found = erase(&door.world, &user).await;
    assert_eq!(found["trained"], json!([{"policy": "demo", "version": version}]));
    let later: Vec<i64> = sqlx::query_scalar("select descendants('demo', $1)")
        .bind(vec![door.world.base])
        .fetch_all(&door.world.stack.pool)
        .await
        .unwrap();
    assert_eq!(later, [door.world.base, version]);
    door.running.stop().await;
}
