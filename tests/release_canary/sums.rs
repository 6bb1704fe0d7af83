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

    let began = Instant::now();
    let waiting = evidence(&world, &id).await;
    println!(
        "{answers} answers of {users} users summed up in {:.1?}",
        began.elapsed()
    );
    let began = Instant::now();
    assert_eq!(evidence(&world, &id).await["canary"], waiting["canary"]);
    println!("read in {:.1?}", began.elapsed());
    let left: i64 = sqlx::query_scalar("select count(*) from canary_user where answers > 0")
        .fetch_one(&mut *connection)
        .await
        .unwrap();
    assert!(left >= users, "{left} rows");
    let ten = i64::from(answers >= 10);
    assert_eq!(
        sum(&waiting, "answers"),
        answers + 10 * ten,
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
    let kept = evidence(&world, &id).await;
    let trajectories: i64 =
        sqlx::query_scalar("select count(distinct coalesce(episode_id, generation_id)) from trajectory")
            .fetch_one(&mut *connection)
            .await
            .unwrap();
    assert_eq!(sum(&kept, "rewarded") + sum(&kept, "unscored"), trajectories, "{kept}");

    if answers <= 100_000 {
        // as if all had come just now
        let now = [
            "update generation set stored_at = clock_timestamp()",
            "update trajectory set closed_at = clock_timestamp()",
        ];
        for sql in SUMS.into_iter().chain(now) {
            sqlx::query(sql).execute(&mut *connection).await.unwrap();
        }
        let whole = evidence(&world, &id).await;
        for side in ["canary", "champion"] {
            assert_eq!(kept[side], whole[side]);
        }
        for bounds in ["reward", "declined", "aborted", "unscored", "length"] {
            let (kept, whole) = (&kept[bounds], &whole[bounds]);
            let of = |bounds: &Value, name: &str| bounds[name].as_f64().unwrap_or(f64::NAN);
            for name in ["difference", "low", "high"] {
                let (kept, whole) = (of(kept, name), of(whole, name));
                assert!(
                    kept.is_nan() && whole.is_nan() || (kept - whole).abs() < 1e-9,
                    "{bounds} {name}"
                );
            }
        }
    }
    drop(connection);
    world.end().await;
}

fn sum(evidence: &Value, field: &str) -> i64 {
    let of = |side: &str| evidence[side][field].as_i64().unwrap();
    of("canary") + of("champion")
}

/// Asks again while it is being summed up.
async fn evidence(world: &World, id: &str) -> Value {
    loop {
        let url = format!("{}/v1/canaries/{id}/evidence", world.control.url);
        let answer = reqwest::get(url).await.unwrap();
        if answer.status() != 503 {
            assert_eq!(answer.status(), 200);
            return answer.json().await.unwrap();
        }
    }
}
