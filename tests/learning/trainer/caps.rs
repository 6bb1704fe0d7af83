//! What the caps do to a running trainer: who sends much more than others weighs no more, and nobody
//! else loses by it. The arithmetic is tested in `trainer/runs/src/select/caps/tests.rs`.

use super::world::{Sampled, World};
use event_log::event::ANONYMOUS_USER_PREFIX;
use fixture::eventually;
use runs::Options;
use std::collections::BTreeMap;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// Samples of these users, in this order.
async fn of_users(world: &World, version: i64, users: &[&str]) -> Vec<Sampled> {
    let mut sampled = world.sample(version, users.len()).await;
    for (one, user) in sampled.iter_mut().zip(users) {
        one.user = (*user).into();
    }
    sampled
}

fn how_many(decided: &BTreeMap<(String, String), i64>, user: &str, code: &str) -> i64 {
    decided.get(&(user.into(), code.into())).copied().unwrap_or(0)
}

/// Caps that apply after the first cohort of eight.
fn options(world: &World) -> Options {
    let mut options = world.options();
    options.realtime.caps.window = 60;
    options.realtime.step.optimizer.learning_rate = 1e-5;
    options
}

/// Trains on one sample of each of eight users. Returns the head.
async fn after_eight_users(world: &World) -> i64 {
    world.follow(1, world.base, 0).await;
    let users = ["u-0", "u-1", "u-2", "u-3", "u-4", "u-5", "u-6", "u-7"];
    let sampled = of_users(world, world.base, &users).await;
    world.insert_all(&sampled, "champion").await;
    let running = world.run(options(world));
    let head = world.head_after(world.base).await;
    running.stop().await;
    head
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_samples_that_name_a_user_use_up_none_of_its_cap() {
    let world = World::start("caps_quarantine").await;
    let head = after_eight_users(&world).await;
    // a typical user has one, so everybody may have two
    let users = [
        "victim", "victim", "victim", "v-0", "v-1", "v-2", "v-3", "v-4", "v-5", "v-6",
    ];
    let mut sampled = of_users(&world, head, &users).await;
    sampled[0].logprobs[0] -= 1.0;
    sampled[1].logprobs[0] -= 1.0;
    world.insert_all(&sampled, "champion").await;
    let running = world.run(options(&world));
    world.head_after(head).await;
    running.stop().await;
    let decided = world.decided_by("user_key").await;
    assert_eq!(how_many(&decided, "victim", "quarantined_logprob"), 2);
    assert_eq!(how_many(&decided, "victim", "trained"), 1, "{decided:?}");
    assert_eq!(how_many(&decided, "victim", "capped_user"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_without_user_keys_is_one_user_and_raises_an_alarm() {
    let world = World::start("caps_flood").await;
    let head = after_eight_users(&world).await;
    let names: Vec<String> = (0..40).map(|n| format!("{ANONYMOUS_USER_PREFIX}{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let flood = of_users(&world, head, &names).await;
    world.insert_all(&flood, "champion").await;
    let running = world.run(options(&world));
    let event = eventually("the alarm begins", SOON, async || {
        let events = world.events().await;
        events.into_iter().find(|event| event.contains("were dropped by a cap"))
    })
    .await;
    assert!(event.contains("capped"), "{event}");
    assert_eq!(world.status().await.unwrap().0, "running");
    // two of the flood wait for the others
    let sampled = of_users(&world, head, &["u-0", "u-1", "u-2", "u-3", "u-4", "u-5"]).await;
    world.insert_all(&sampled, "champion").await;
    world.head_after(head).await;
    running.stop().await;
    let mut codes: BTreeMap<String, i64> = BTreeMap::new();
    for ((user, code), count) in world.decided_by("user_key").await {
        if user.starts_with(ANONYMOUS_USER_PREFIX) {
            *codes.entry(code).or_default() += count;
        }
    }
    let expected = [("capped_user", 38), ("trained", 2)].map(|(code, count)| (code.to_owned(), count));
    assert_eq!(codes, expected.into());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_samples_much_more_than_others_weighs_at_most_half() {
    let world = World::start("caps_replica").await;
    world.follow(1, world.base, 0).await;
    let mut sampled = world.sample(world.base, 8).await;
    for (n, one) in sampled.iter_mut().enumerate() {
        (one.user, one.replica) = (format!("u-{n}"), format!("replica-{}", n % 4));
    }
    world.insert_all(&sampled, "champion").await;
    let running = world.run(options(&world));
    let head = world.head_after(world.base).await;
    running.stop().await;
    let mut sampled = world.sample(head, 40).await;
    for (n, one) in sampled.iter_mut().enumerate() {
        // 32 of a stolen key, each of another user, before eight others
        one.user = format!("invented-{n}");
        one.replica = format!("replica-{}", n.saturating_sub(31) % 4);
    }
    world.insert_all(&sampled, "champion").await;
    let running = world.run(options(&world));
    world.head_after(head).await;
    running.stop().await;
    let weight: i64 = sqlx::query_scalar(
        "select count(*) from disposition d join generation g on g.id = d.generation_id
         where d.kind = 'trained' and g.replica = 'replica-0'",
    )
    .fetch_one(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(weight, 6, "of 16: half of what had joined when it reached its cap");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_twenty_times_the_traffic_weighs_no_more_than_the_cap() {
    const USERS: usize = 50;
    const WINDOW: i32 = 200;
    let world = World::start("caps").await;
    world.follow(1, world.base, 0).await;
    let mut options = world.options();
    options.realtime.cohort_size = 49;
    options.realtime.caps.window = WINDOW as u32;
    options.realtime.step.optimizer.learning_rate = 1e-5;
    let running = world.run(options);
    let mut head = world.base;
    for _ in 0..6 {
        let mut round = world.sample(head, 20 + USERS - 1).await;
        for (n, one) in round.iter_mut().enumerate() {
            one.user = match n.checked_sub(19) {
                None => "mallory".into(),
                Some(0) => "mallory".into(),
                Some(n) => format!("user-{n}"),
            };
        }
        world.insert_all(&round, "champion").await;
        head = world.head_after(head).await;
    }
    running.stop().await;
    assert_eq!(world.events().await, [""; 0], "no step had to be repeated");
    let shares: Vec<(String, i64, f64)> = sqlx::query_as(
        "select user_key, trajectories, share from trained_share((select id from run where kind = 'realtime'), $1)",
    )
    .bind(WINDOW)
    .fetch_all(&world.stack.pool)
    .await
    .unwrap();
    assert_eq!(shares.iter().map(|(_, count, _)| count).sum::<i64>(), i64::from(WINDOW));
    assert_eq!(shares.len(), USERS, "everybody is trained on");
    let cap = 2.0 / USERS as f64;
    assert!(shares[0].2 <= cap + 1e-9, "{:?} is above {cap}", shares[0]);
    let sql = "select count(*) from disposition d join generation g on g.id = d.generation_id
               where d.code = 'capped_user' and (g.user_key = 'mallory') = $1";
    for (mallory, expected) in [(true, 50..=120), (false, 0..=0)] {
        let capped: i64 = sqlx::query_scalar(sql)
            .bind(mallory)
            .fetch_one(&world.stack.pool)
            .await
            .unwrap();
        assert!(expected.contains(&capped), "{capped} of mallory: {mallory}");
    }
}
