//! What one caller can do to the realtime run: bad samples of any age, steered sampling, rewards out
//! of bounds, slow answers, slow surfaces and silence. More traffic than others: `caps.rs`.

use super::world::{Sampled, World};
use fixture::eventually;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);

/// Code (or kind, if there is none) → how many.
async fn codes(world: &World) -> BTreeMap<String, usize> {
    let mut codes = BTreeMap::new();
    for one in world.dispositions().await {
        *codes.entry(one.code.unwrap_or(one.kind)).or_default() += 1;
    }
    codes
}

async fn set(world: &World, table: &str, column: &str, id: Uuid, value: &str) {
    let key = if table == "generation" { "id" } else { "generation_id" };
    let sql = format!("update {table} set {column} = {value} where {key} = $1");
    sqlx::query(sqlx::AssertSqlSafe(sql))
        .bind(id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
}

/// A UUIDv7 of that moment.
pub fn id_at(at: OffsetDateTime, n: u128) -> Uuid {
    let milliseconds = (at.unix_timestamp_nanos() / 1_000_000) as u128;
    Uuid::from_u128((milliseconds << 80) | (0x7 << 76) | (0x8 << 60) | n)
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_samples_are_quarantined_one_by_one_and_the_others_make_the_step() {
    let world = World::start("quarantine").await;
    world.follow(1, world.base, 0).await;
    world
        .define(&json!({"name": "stars", "reward_min": 1, "reward_max": 5}))
        .await;
    world.define(&json!({"name": "harness", "purpose": "rollout"})).await;
    let mut bad = world.sample(world.base, 7).await;
    bad[0].logprobs[2] -= 0.5;
    bad[1].logprobs[0] -= 100.0;
    bad[2].reward = Some(1e9);
    bad[3].reward = Some(-1.5);
    bad[4].surface = "rollout".into();
    bad[5].surface = "harness".into();
    bad[6].surface = "stars".into();
    world.insert_all(&bad, "champion").await;
    let weighty = world.sample(world.base, 1).await.remove(0);
    world.insert(&weighty, "champion").await;
    set(&world, "generation", "exploration_share", weighty.id, "0.999").await;
    let mut good = world.sample(world.base, 8).await;
    good[7].surface = "stars".into();
    good[7].reward = Some(4.0);
    world.insert_all(&good, "champion").await;

    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    let expected = [
        ("quarantined_exploration", 1),
        ("quarantined_logprob", 2),
        ("quarantined_reward", 3),
        ("quarantined_surface", 2),
        ("trained", 8),
    ];
    let expected: BTreeMap<String, usize> = expected.map(|(code, count)| (code.to_owned(), count)).into();
    assert_eq!(codes(&world).await, expected);
    assert_eq!(world.status().await.unwrap().0, "running");
    let metrics = world.metrics(1).await;
    assert_eq!((&metrics["sequences"], &metrics["quarantined"]), (&8.into(), &2.into()));
    assert_eq!(metrics["mismatch"]["difference_max"], 0.0);
    assert_eq!(metrics["notes"]["set_aside"]["quarantined_logprob"], 2);
}

/// Waits until the run has looked at everything that is there. What comes later with an old id is in
/// none of its usual scans.
async fn after_the_first_scan(world: &World) {
    let marker = world.sample(world.base, 1).await.remove(0);
    world.insert(&marker, "base").await;
    eventually("the first scan", SOON, async || {
        (codes(world).await.get("other_arm") == Some(&1)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_bad_sample_is_refused_like_a_new_one() {
    let world = World::start("old_samples").await;
    world.follow(1, world.base, 0).await;
    let running = world.run(world.options());
    after_the_first_scan(&world).await;
    // as on a surface whose horizon is an hour
    let hour_ago = OffsetDateTime::now_utc() - time::Duration::hours(1);
    let mut bad = world.sample(world.base, 8).await;
    bad[0].reward = Some(1e9);
    bad[1].surface = "rollout".into();
    bad[2].tokens[1] = 5_000;
    bad[4].logprobs[0] = f32::NEG_INFINITY;
    bad[5].temperature = 0.0;
    bad[6].tokens.clear();
    bad[6].logprobs.clear();
    for (n, one) in (0..).zip(&mut bad) {
        one.id = id_at(hour_ago, n);
        world.insert_open(one, "champion").await;
    }
    set(&world, "generation", "exploration_share", bad[3].id, "0.999").await;
    set(&world, "generation", "version_oldest", bad[7].id, "0").await;
    for one in &bad {
        world.close(one, one.reward.unwrap()).await;
    }
    let mut good = world.sample(world.base, 8).await;
    for (n, one) in (100..).zip(&mut good) {
        one.id = id_at(hour_ago, n);
    }
    world.insert_all(&good, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let expected = [
        ("empty", 1),
        ("greedy", 1),
        ("logprob_not_finite", 1),
        ("other_arm", 1),
        ("quarantined_exploration", 1),
        ("quarantined_reward", 1),
        ("quarantined_surface", 1),
        ("stale", 1),
        ("token_outside_vocabulary", 1),
        ("trained", 8),
    ];
    let expected: BTreeMap<String, usize> = expected.map(|(code, count)| (code.to_owned(), count)).into();
    assert_eq!(codes(&world).await, expected);
    assert_eq!(world.events().await, [""; 0], "no step had to be repeated");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_their_sampler_calls_untrainable_are_dropped_with_its_code() {
    let world = World::start("untrainable").await;
    world.follow(1, world.base, 0).await;
    let untrainable = world.sample(world.base, 3).await;
    let code = |n: usize| ["'no_token_ids'", "'no_token_ids'", "'constrained_sampling'"][n];
    for (n, one) in untrainable.iter().enumerate() {
        world.insert_open(one, "champion").await;
        set(&world, "generation", "untrainable", one.id, code(n)).await;
        world.close(one, 1.0).await;
    }
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    let expected = [("constrained_sampling", 1), ("no_token_ids", 2), ("trained", 8)];
    let expected: BTreeMap<String, usize> = expected.map(|(code, count)| (code.to_owned(), count)).into();
    assert_eq!(codes(&world).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_whose_sampling_a_caller_steered_are_not_trained_on() {
    let world = World::start("steered").await;
    world.follow(1, world.base, 0).await;
    let mut steered = world.sample(world.base, 9).await;
    for (one, temperature) in steered.iter_mut().zip([0.01, 0.49, 1.6]) {
        one.temperature = temperature;
    }
    for one in &steered {
        world.insert_open(one, "champion").await;
    }
    for (one, sampling) in steered[3..].iter().zip([
        json!({"logit_bias": {"7": 5.0}}),
        json!({"repetition_penalty": 0.5}),
        json!({"presence_penalty": -2.0}),
        json!({"frequency_penalty": -2.0}),
        json!({"top_k": 5, "logit_bias": {"7": -100.0}}),
        json!({"constraint": {"format": "f", "schema": "{}"}}),
    ]) {
        set(&world, "generation", "sampling", one.id, &format!("'{sampling}'")).await;
    }
    for one in &steered {
        world.close(one, one.reward.unwrap()).await;
    }
    // a filter keeps all 61 tokens, so it changes nothing, and a caller may use it
    let good = world.sample(world.base, 8).await;
    world.insert_open(&good[0], "champion").await;
    set(&world, "generation", "sampling", good[0].id, "'{\"top_k\": 61}'").await;
    world.close(&good[0], 0.75).await;
    world.insert_all(&good[1..], "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    let expected = [
        ("constrained_sampling", 1),
        ("steered_sampling", 5),
        ("temperature_out_of_range", 3),
        ("trained", 8),
    ];
    let expected: BTreeMap<String, usize> = expected.map(|(code, count)| (code.to_owned(), count)).into();
    assert_eq!(codes(&world).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_bad_samples_of_one_user_raise_an_alarm_and_pause_nothing() {
    let world = World::start("flood").await;
    world.follow(1, world.base, 0).await;
    let mut flood = Vec::new();
    for one in world.sample(world.base, 8).await {
        for _ in 0..8 {
            let mut bad = one.clone().renewed();
            bad.user = "mallory".into();
            bad.logprobs[0] -= 1.0;
            flood.push(bad);
        }
    }
    let mut good = world.sample(world.base, 8).await;
    for (n, one) in good.iter_mut().enumerate() {
        one.user = format!("user-{n}");
    }
    world.insert_all(&good[..2], "champion").await;
    world.insert_all(&flood, "champion").await;
    world.insert_all(&good[2..], "champion").await;
    let mut options = world.options();
    options.realtime.caps.user_share_max = 1.0;
    let running = world.run(options);
    eventually("everything is decided", SOON, async || {
        (world.dispositions().await.len() == 72).then_some(())
    })
    .await;
    assert_eq!(
        codes(&world).await,
        BTreeMap::from([("quarantined_logprob".to_owned(), 64), ("trained".to_owned(), 8)])
    );
    eventually("the alarm begins", SOON, async || {
        let events = world.events().await;
        events
            .iter()
            .any(|event| event.contains("were quarantined"))
            .then_some(())
    })
    .await;
    running.stop().await;
    assert_eq!(world.status().await.unwrap().0, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_that_are_wrong_for_everybody_pause_the_run() {
    let world = World::start("systemic").await;
    world.follow(1, world.base, 0).await;
    let mut all = world.sample(world.base, 20).await;
    for (n, one) in all.iter_mut().enumerate() {
        one.user = format!("user-{n}");
        one.replica = format!("replica-{}", n % 2);
        one.logprobs.iter_mut().for_each(|logprob| *logprob -= 1.0);
    }
    world.insert_all(&all, "champion").await;
    let running = world.run(world.options());
    let reason = world.paused().await;
    running.stop().await;
    assert!(reason.contains("on every replica (replica-0, replica-1)"), "{reason}");
    assert_eq!(world.line().await, (world.base, 0));
    assert!(codes(&world).await["quarantined_logprob"] >= 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_surface_does_not_hold_the_others_back() {
    let world = World::start("surfaces").await;
    world.follow(1, world.base, 0).await;
    let mut slow = world.sample(world.base, 1).await.remove(0);
    slow.surface = "review".into();
    world.insert_open(&slow, "champion").await;
    let mut of_slow = world.sample(world.base, 1).await.remove(0);
    of_slow.surface = "review".into();
    world.insert(&of_slow, "champion").await;
    let fast = world.sample(world.base, 8).await;
    world.insert_all(&fast, "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    let mut trained = world.dispositions().await;
    trained.retain(|one| one.kind == "trained");
    let trained: Vec<Uuid> = trained.into_iter().map(|one| one.id).collect();
    assert_eq!(trained, fast.iter().map(|one| one.id).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_is_in_the_cohort_that_it_started_in() {
    let world = World::start("slow_answers").await;
    world.follow(1, world.base, 0).await;
    // the answers began earlier, so the version was assigned earlier
    sqlx::query("update assignment set created_at = now() - interval '1 hour'")
        .execute(&world.stack.pool)
        .await
        .unwrap();
    let now = OffsetDateTime::now_utc();
    let second = time::Duration::SECOND;
    // answers of this surface take half a second or 30 seconds, as earlier ones show
    for n in 0..20 {
        let mut earlier = world.sample(world.base, 1).await.remove(0);
        earlier.id = id_at(now - 120 * second, n);
        earlier.reward = None;
        earlier.seconds = Some(if n % 4 == 0 { 30.0 } else { 0.5 });
        world.insert(&earlier, "champion").await;
    }
    let mut answers = world.sample(world.base, 10).await;
    for (n, one) in (0..).zip(&mut answers) {
        one.id = id_at(now - 20 * second + n * second, 0);
        one.seconds = Some(0.5);
    }
    // the second is still being sampled, so it has no row yet
    let mut slow = answers.remove(1);
    slow.seconds = Some(25.0);
    world.insert_all(&answers, "champion").await;
    // neither answers that nobody proves, nor as many on another surface, change what is known
    for surface in ["completion", "elsewhere"] {
        world.insert_unproven(&answers[0], surface, 2_500).await;
    }
    world.caught_up_to(now).await;
    let running = world.run(world.options());
    world.settled().await;
    assert_eq!(world.steps().await, 0, "a slow answer may be missing");
    world.insert(&slow, "champion").await;
    world.caught_up_to(now + 30 * second).await;
    world.head_after(world.base).await;
    running.stop().await;
    let mut trained = world.dispositions().await;
    trained.retain(|one| one.kind == "trained");
    let trained: Vec<Uuid> = trained.into_iter().map(|one| one.id).collect();
    assert!(trained.contains(&slow.id), "it started before the others");
    assert_eq!(trained.len(), 8);
    assert!(!trained.contains(&answers[8].id));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_waits_for_samples_with_a_gradient() {
    let world = World::start("silence_only").await;
    world.follow(1, world.base, 0).await;
    let silent = |mut sampled: Vec<Sampled>| {
        sampled.iter_mut().for_each(|one| one.reward = Some(0.0));
        sampled
    };
    let early = silent(world.sample(world.base, 12).await);
    world.insert_all(&early, "champion").await;
    let one = world.sample(world.base, 1).await;
    world.insert_all(&one, "champion").await;
    let running = world.run(world.options());
    eventually("what has no gradient does not wait", SOON, async || {
        (codes(&world).await.get("no_signal") == Some(&4)).then_some(())
    })
    .await;
    assert_eq!(world.steps().await, 0, "one sample is no cohort");
    world.insert_all(&world.sample(world.base, 1).await, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let metrics = world.metrics(1).await;
    assert_eq!(
        (&metrics["sequences"], &metrics["without_gradient"]),
        (&10.into(), &8.into())
    );
}
