//! The sums of a canary's answers say what the answers say.

use super::{World, answer};
use serde_json::{Value, json};
use std::time::Instant;

const SUMS: [&str; 3] = [
    "delete from canary_sums",
    "delete from canary_user",
    "delete from canary_closed",
];

/// `SPRINGTIDE_EVIDENCE_ANSWERS` makes it larger, and it says how long a look reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_that_are_kept_equal_those_of_all_answers() {
    let answers = std::env::var("SPRINGTIDE_EVIDENCE_ANSWERS").map_or(4000, |number| number.parse().unwrap());
    let users = 40.max(answers / 500);
    let world = World::start("canary_sums").await;
    let id = world.propose(2, json!([{"setWeight": 50}, {"pause": {}}])).await;
    assert_eq!(world.settled(&id).await["state"], "canary");
    let mut connection = world.stack.pool.acquire().await.unwrap();
    // the surface's definition
    answer(&mut connection, "champion", 1, 1, 0.5, 0.5).await;
    sqlx::query(include_str!("sums.sql"))
        .bind(answers)
        .bind(users)
        .execute(&mut *connection)
        .await
        .unwrap();
    // the loop has summed up that there was nothing
    for table in SUMS {
        sqlx::query(table).execute(&mut *connection).await.unwrap();
    }
    sqlx::query("analyze generation, trajectory")
        .execute(&mut *connection)
        .await
        .unwrap();

    let live = match answers <= 100_000 {
        true => evidence(&world, &id).await,
        false => Value::Null,
    };
    println!("{answers} answers of {users} users");
    let began = Instant::now();
    sum_up(&world).await;
    println!("summed up in {:.1?}", began.elapsed());
    let began = Instant::now();
    let waiting = evidence(&world, &id).await;
    println!(
        "read in {:.1?}, beside the dead rows of all that was just counted",
        began.elapsed()
    );
    // what Postgres does by itself within a minute
    sqlx::query("vacuum canary_closed, canary_user")
        .execute(&mut *connection)
        .await
        .unwrap();
    let began = Instant::now();
    evidence(&world, &id).await;
    println!("read again in {:.1?}", began.elapsed());
    same(&live, &waiting);
    let left: i64 = sqlx::query_scalar("select count(*) from canary_user where answers > 0")
        .fetch_one(&mut *connection)
        .await
        .unwrap();
    assert!(left >= users, "{left} rows");
    assert_eq!(
        sum(&waiting, "answers"),
        answers + 10,
        "each is counted once: {waiting}"
    );
    let scored = sum(&waiting, "rewarded") + sum(&waiting, "unscored");
    assert!(
        (answers / 3..answers * 3 / 5).contains(&scored),
        "what is younger than the one that waits does not count: {waiting}"
    );

    sqlx::query(
        "with closed as (delete from open_generation returning generation_id)
         insert into trajectory (generation_id, surface, reward_definition, reward)
         select generation_id, 'completion', 1, 1 from closed",
    )
    .execute(&mut *connection)
    .await
    .unwrap();
    sum_up(&world).await;
    let kept = evidence(&world, &id).await;
    let trajectories: i64 =
        sqlx::query_scalar("select count(distinct coalesce(episode_id, generation_id)) from trajectory")
            .fetch_one(&mut *connection)
            .await
            .unwrap();
    assert_eq!(sum(&kept, "rewarded") + sum(&kept, "unscored"), trajectories, "{kept}");

    // its decisions have the evidence
    let (status, _) = world.decide(&id, "abort").await;
    assert_eq!(status, 200);
    let left: i64 = sqlx::query_scalar(
        "select (select count(*) from canary_user) + (select count(*) from canary_closed) + (select count(*) from canary_sums)",
    )
    .fetch_one(&mut *connection)
    .await
    .unwrap();
    assert_eq!(left, 0);
    if answers <= 100_000 {
        same(&kept, &evidence(&world, &id).await);
    }
    drop(connection);
    world.end().await;
}

fn sum(evidence: &Value, field: &str) -> i64 {
    let of = |side: &str| evidence[side][field].as_i64().unwrap();
    of("canary") + of("champion")
}

async fn evidence(world: &World, id: &str) -> Value {
    world.get(&format!("/v1/canaries/{id}/evidence")).await
}

/// The release loop looks until nothing is left to add.
async fn sum_up(world: &World) {
    let mut before = -1;
    loop {
        let _ = world.releases.round().await;
        let (behind, closed): (bool, i64) = sqlx::query_as(
            "select exists (select from canary_sums where until_at < now() - interval '2 minutes'),
                    (select count(*) from canary_closed)",
        )
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
        if !behind && closed == before {
            return;
        }
        before = closed;
    }
}

/// Sums in another order differ in their last bits.
fn same(one: &Value, other: &Value) {
    if one.is_null() {
        return;
    }
    for side in ["canary", "champion"] {
        for field in [
            "users",
            "answers",
            "rewarded",
            "declined",
            "aborted",
            "unscored",
            "excluded",
            "mean_tokens",
        ] {
            assert_eq!(one[side][field], other[side][field], "{side} {field}");
        }
    }
    for bounds in ["reward", "declined", "aborted", "unscored", "length"] {
        let of = |evidence: &Value, name: &str| evidence[bounds][name].as_f64().unwrap_or(f64::NAN);
        for name in ["difference", "low", "high"] {
            let (one, other) = (of(one, name), of(other, name));
            assert!(
                one.is_nan() && other.is_nan() || (one - other).abs() < 1e-9,
                "{bounds} {name}"
            );
        }
    }
}
