//! An arm that falls silent: one event when it does and one when it shows again, whoever looks and however often.

use super::offline::{control, get};
use super::world::World;
use sqlx::Row;
use trainer::options::Realtime;
use trainer::silence::Watch;

/// Generations of an arm, of which the first `shown` are shown and half of those answered.
async fn generate(world: &World, arm: &str, count: i32, shown: i32, suppressed: bool) {
    sqlx::query(
        "with generated as (
             insert into generation
                 (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                  episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                  finish_reason, declined, sampled_at, decline_suppressed, exploration_share)
             select uuidv7(), 'default', 'demo', 1, 1, '[]', '', 'realtime', 'r', 'production', 'completion',
                    uuidv7(), 'u', $1, 1, '{1}', '{2}', '{0}', 1, 1, 'stop', nth > $3, now(), $4, 0.02
             from generate_series(1, $2) as nth
             returning id, declined
         ),
         numbered as (select id, declined, row_number() over (order by id) as nth from generated)
         insert into trajectory (generation_id, surface, reward_definition, reward, censor_code)
         select id, 'completion', 1, case when nth % 2 = 0 then 0.75 end, case when nth % 2 = 1 then 'no_feedback' end
         from numbered where not declined",
    )
    .bind(arm)
    .bind(count)
    .bind(shown)
    .bind(suppressed)
    .execute(&world.stack.pool)
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_arm_that_falls_silent_is_told_once_and_once_when_it_shows_again() {
    let world = World::start("silence").await;
    let pool = &world.stack.pool;
    let (run, _claim) = world.claimed_run().await;
    let options = Realtime::default();
    let mut watch = Watch::new(pool.clone(), "demo", &options);
    watch.look().await.unwrap();
    generate(&world, "base", 200, 80, false).await;
    generate(&world, "champion", 200, 70, false).await;
    watch.look().await.unwrap();
    assert!(world.events().await.is_empty(), "35 % is not silence");

    // what exploration makes it show is not its own doing
    generate(&world, "champion", 480, 20, false).await;
    generate(&world, "champion", 300, 300, true).await;
    watch.look().await.unwrap();
    watch.look().await.unwrap();
    let mut restarted = Watch::new(pool.clone(), "demo", &options);
    restarted.look().await.unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 1, "{events:?}");
    // of the latest 500: 20 of 480, and the 20 before, which were not shown
    assert!(
        events[0].starts_with("champion falls silent: it shows 4.0 % of its latest 500"),
        "{events:?}"
    );
    assert!(events[0].contains("the other arms show 40 %"), "{events:?}");
    let row = sqlx::query("select level, data ->> 'state' as state from run_event where run_id = $1")
        .bind(run)
        .fetch_one(pool)
        .await
        .unwrap();
    assert_eq!(
        (row.get::<&str, _>("level"), row.get::<&str, _>("state")),
        ("warn", "began")
    );

    let shown = format!("{}/v1/runs/{run}", control(&world).await);
    assert_eq!(get(shown.clone()).await["alarm"], events[0].as_str());

    generate(&world, "champion", 500, 150, false).await;
    restarted.look().await.unwrap();
    restarted.look().await.unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!(events[1], "champion shows again: 30 % of its latest 500 generations");
    assert!(get(shown).await["alarm"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_other_arms_the_version_it_started_from_is_what_it_is_compared_with() {
    let world = World::start("silence_alone").await;
    let (run, _claim) = world.claimed_run().await;
    sqlx::query("update run set base_version = 1 where id = $1")
        .bind(run)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let mut options = Realtime::default();
    options.alarms.show_rate_window = 100;
    generate(&world, "champion", 100, 90, false).await;
    generate(&world, "champion", 100, 25, false).await;
    Watch::new(world.stack.pool.clone(), "demo", &options)
        .look()
        .await
        .unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(
        events[0].contains("version 1, from which it started, showed 90 %"),
        "{events:?}"
    );
}
