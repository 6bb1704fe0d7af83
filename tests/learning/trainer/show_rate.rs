//! The alarm on a low show rate: one event when it begins and one when it ends, however often it is
//! polled.

use super::offline::{control, get};
use super::world::World;
use runs::options::Realtime;
use runs::show_rate::ShowRateAlarm;
use sqlx::Row;

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

/// The run learns from `learner`.
async fn with_learner(world: &World) {
    let arms = "insert into experiment (policy, epoch, salt, arms, source, actor, reason)
                values ('demo', 1, '', '[{\"alias\": \"learner\", \"weight\": 1}]', 'configuration', 'test', '')";
    sqlx::query(arms).execute(&world.stack.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_show_rate_alarm_appends_one_event_when_it_begins_and_one_when_it_ends() {
    let world = World::start("silence").await;
    with_learner(&world).await;
    let pool = &world.stack.pool;
    let (run, _claim) = world.claimed_run().await;
    let options = Realtime::default();
    let mut alarm = ShowRateAlarm::new(pool.clone(), "demo", &options);
    alarm.poll().await.unwrap();
    generate(&world, "base", 200, 80, false).await;
    generate(&world, "learner", 200, 70, false).await;
    alarm.poll().await.unwrap();
    assert!(world.events().await.is_empty(), "35 % is enough");

    // generations that exploration forced to show do not count
    generate(&world, "learner", 480, 20, false).await;
    generate(&world, "learner", 300, 300, true).await;
    alarm.poll().await.unwrap();
    alarm.poll().await.unwrap();
    let mut restarted = ShowRateAlarm::new(pool.clone(), "demo", &options);
    restarted.poll().await.unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 1, "{events:?}");
    // the latest 500: 20 shown of 480, and 20 earlier ones that were declined
    assert!(
        events[0].starts_with("learner declines almost everything: it shows 4.0 % of its latest 500"),
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

    generate(&world, "learner", 500, 150, false).await;
    restarted.poll().await.unwrap();
    restarted.poll().await.unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!(
        events[1],
        "learner shows enough again: 30 % of its latest 500 generations"
    );
    assert!(get(shown).await["alarm"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_other_arms_the_show_rate_is_compared_with_the_first_version() {
    let world = World::start("silence_alone").await;
    with_learner(&world).await;
    let (run, _claim) = world.claimed_run().await;
    sqlx::query("update run set base_version = 1 where id = $1")
        .bind(run)
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let mut options = Realtime::default();
    options.alarms.show_rate_window = 100;
    generate(&world, "learner", 100, 90, false).await;
    generate(&world, "learner", 100, 25, false).await;
    ShowRateAlarm::new(world.stack.pool.clone(), "demo", &options)
        .poll()
        .await
        .unwrap();
    let events = world.events().await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(
        events[0].contains("version 1, where the run started, showed 90 %"),
        "{events:?}"
    );
}
