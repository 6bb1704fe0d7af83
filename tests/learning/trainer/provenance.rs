//! Forged generations of every kind: none is trained on, each gets its code, and the honest ones
//! around them make the step.

use super::bounds::id_at;
use super::world::{Sampled, TEST, World, ensure_assigned, register, sampler_key};
use edge::sampler::{self, SamplerKey};
use edge::tenant;
use event_log::event::signed_bytes;
use fixture::eventually;
use runs::publish::Error;
use std::collections::BTreeMap;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);

/// Sets columns of a stored generation. `values` is SQL.
async fn forge(world: &World, id: Uuid, values: &str) {
    let sql = format!("update generation set {values} where id = $1");
    sqlx::query(sqlx::AssertSqlSafe(sql))
        .bind(id)
        .execute(&world.stack.pool)
        .await
        .unwrap();
}

/// Signs a stored generation anew with any key, as its thief or its owner would.
async fn sign_with(world: &World, id: Uuid, key: &SamplerKey) {
    let (tenant, at, digest): (String, time::OffsetDateTime, Vec<u8>) = sqlx::query_as(
        "select tenant_id, coalesce(finished_at, sampled_at), unsigned_digest from generation where id = $1",
    )
    .bind(id)
    .fetch_one(&world.stack.pool)
    .await
    .unwrap();
    let digest: [u8; 32] = digest.try_into().unwrap();
    sqlx::query("update generation set sampler = $2, signature = $3 where id = $1")
        .bind(id)
        .bind(key.id())
        .bind(key.sign(&signed_bytes(&tenant, at, &digest)).as_slice())
        .execute(&world.stack.pool)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_generations_are_never_trained_on() {
    let world = World::start("forged").await;
    world.follow(1, world.base, 0).await;
    let pool = &world.stack.pool;
    let named = |name: &str| sampler_key(name);
    register(pool, &named("stolen"), "r").await;
    register(pool, &named("late"), "r").await;
    for (name, replica, policy) in [("elsewhere", "another", "demo"), ("other-policy", "r", "other")] {
        sampler::register(pool, &named(name).public_key(), replica, Some(policy), None, TEST)
            .await
            .unwrap();
    }

    let forged = world.sample(world.base, 12).await;
    world.insert_all(&forged, "champion").await;
    let mut expected = BTreeMap::new();
    let mut ids = forged.iter().map(|sampled: &Sampled| sampled.id);
    let mut next = |code: &'static str| {
        let id = ids.next().unwrap();
        expected.insert(id, code);
        id
    };
    // a client with an API key, or any producer of Kafka, has no sampler's key
    forge(
        &world,
        next("unproven"),
        "sampler = null, signature = null, unsigned_digest = null",
    )
    .await;
    forge(&world, next("unproven"), "signature = null, unsigned_digest = null").await;
    forge(
        &world,
        next("bad_signature"),
        "signature = decode(repeat('07', 64), 'hex')",
    )
    .await;
    // a true signature over other content, another tenant, another time
    forge(
        &world,
        next("bad_signature"),
        "unsigned_digest = decode(repeat('07', 32), 'hex')",
    )
    .await;
    tenant::consent(pool, "demo", "another", TEST, "").await.unwrap();
    forge(&world, next("bad_signature"), "tenant_id = 'another'").await;
    forge(
        &world,
        next("bad_signature"),
        "sampled_at = sampled_at + interval '1 second', finished_at = null",
    )
    .await;
    // its own key, which nobody registered; keys of other replicas and policies
    sign_with(&world, next("unknown_sampler"), &named("attacker")).await;
    sign_with(&world, next("sampler_of_another_replica"), &named("elsewhere")).await;
    sign_with(&world, next("sampler_of_another_policy"), &named("other-policy")).await;
    // a replica's key that was stolen, before and after its revocation
    sign_with(&world, next("revoked_sampler"), &named("stolen")).await;
    sampler::revoke(pool, named("stolen").id(), TEST, "stolen")
        .await
        .unwrap();
    sign_with(&world, next("expired_sampler"), &named("late")).await;
    sqlx::query("update sampler set expires_at = now() - interval '1 hour' where id = $1")
        .bind(named("late").id())
        .execute(pool)
        .await
        .unwrap();
    // with a valid key: from before the version was assigned
    let backdated = next("version_not_assigned");
    forge(
        &world,
        backdated,
        "sampled_at = now() - interval '1 hour', finished_at = null",
    )
    .await;
    sign_with(&world, backdated, &named("r")).await;

    let honest = world.sample(world.base, 8).await;
    world.insert_all(&honest, "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    let decided = eventually("every forgery has its code", Duration::from_secs(60), async || {
        let decided = world.dispositions().await;
        (decided.len() == forged.len() + honest.len()).then_some(decided)
    })
    .await;
    running.stop().await;
    for one in decided {
        match expected.get(&one.id) {
            Some(code) => assert_eq!((one.kind.as_str(), one.code.as_deref()), ("dropped", Some(*code))),
            None => assert_eq!(one.kind, "trained", "{one:?}"),
        }
    }
}

/// How many dispositions there are of each code, or kind if there is no code.
async fn decided(world: &World) -> BTreeMap<String, usize> {
    let mut decided = BTreeMap::new();
    for one in world.dispositions().await {
        *decided.entry(one.code.unwrap_or(one.kind)).or_default() += 1;
    }
    decided
}

#[tokio::test(flavor = "multi_thread")]
async fn open_generations_that_nobody_sampled_hold_no_cohort_back() {
    let world = World::start("forged_open").await;
    world.follow(1, world.base, 0).await;
    // the oldest of all: open, of the head, and signed by nobody, with a wrong signature, or with a
    // right one of a key that is revoked now
    let mut forged = world.sample(world.base, 3).await;
    forged[2].replica = "stolen".into();
    for one in &forged {
        world.insert_open(one, "champion").await;
    }
    let unsigned = "sampler = null, signature = null, unsigned_digest = null, proven = null";
    forge(&world, forged[0].id, unsigned).await;
    let garbage = "signature = decode(repeat('07', 64), 'hex'), proven = false";
    forge(&world, forged[1].id, garbage).await;
    sqlx::query("update open_generation set proven = false where generation_id = any($1)")
        .bind([forged[0].id, forged[1].id])
        .execute(&world.stack.pool)
        .await
        .unwrap();
    sampler::revoke(&world.stack.pool, sampler_key("stolen").id(), TEST, "stolen")
        .await
        .unwrap();
    let honest = world.sample(world.base, 8).await;
    world.insert_all(&honest, "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    assert_eq!(decided(&world).await, BTreeMap::from([("trained".to_owned(), 8)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_forged_generations_takes_nobodys_turn_and_raises_an_alarm() {
    let world = World::start("forged_flood").await;
    world.follow(1, world.base, 0).await;
    let first = world.sample(world.base, 1).await.remove(0);
    world.insert(&first, "champion").await;
    // older than the other honest ones, so their turn comes first, and too many for one statement
    world.insert_unproven(&first, "completion", 1_500).await;
    world.insert_all(&world.sample(world.base, 7).await, "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    eventually("the alarm begins", SOON, async || {
        let events = world.events().await;
        events.iter().any(|event| event.contains("lack proof")).then_some(())
    })
    .await;
    running.stop().await;
    let expected = [("bad_signature", 1_500), ("trained", 8)];
    let expected: BTreeMap<String, usize> = expected.map(|(code, count)| (code.to_owned(), count)).into();
    assert_eq!(decided(&world).await, expected);
    assert_eq!(world.status().await.unwrap().0, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_not_committed_with_samples_of_a_revoked_sampler() {
    let world = World::start("revoked_step").await;
    world.follow(1, world.base, 0).await;
    let mut cohort = world.sample(world.base, 4).await;
    cohort[1].replica = "stolen".into();
    world.insert_all(&cohort, "champion").await;
    let (run, claim) = world.claimed_run().await;
    let prepared = world.prepare(&claim, run, &cohort).await;
    sampler::revoke(&world.stack.pool, sampler_key("stolen").id(), TEST, "stolen")
        .await
        .unwrap();
    let refused = world.publisher.commit(&claim, &prepared).await;
    assert!(matches!(refused, Err(Error::Revoked)), "{refused:?}");
    assert_eq!(world.line().await, (world.base, 0));
    assert_eq!(decided(&world).await, BTreeMap::new());
    // nor by the next process, which finds the step prepared
    let running = world.run(world.options());
    eventually("the sample has its code", SOON, async || {
        (decided(&world).await.get("revoked_sampler") == Some(&1)).then_some(())
    })
    .await;
    assert_eq!(world.line().await, (world.base, 0));
    world.insert_all(&world.sample(world.base, 5).await, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    assert_eq!(decided(&world).await["trained"], 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_that_joined_before_their_sampler_was_revoked_are_not_trained_on() {
    let world = World::start("revoked_member").await;
    world.follow(1, world.base, 0).await;
    let mut stolen = world.sample(world.base, 4).await;
    let hour_ago = OffsetDateTime::now_utc() - time::Duration::hours(1);
    for (n, one) in (0..).zip(&mut stolen) {
        one.replica = "stolen".into();
        // outside of what the run looks through at each poll
        one.id = id_at(hour_ago, n);
    }
    let running = world.run(world.options());
    world.insert_all(&stolen, "champion").await;
    world.settled().await; // they are members now
    sampler::revoke(&world.stack.pool, sampler_key("stolen").id(), TEST, "stolen")
        .await
        .unwrap();
    world.insert_all(&world.sample(world.base, 8).await, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let expected = [("revoked_sampler", 4), ("trained", 8)];
    let expected: BTreeMap<String, usize> = expected.map(|(code, count)| (code.to_owned(), count)).into();
    assert_eq!(decided(&world).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_counts_only_while_it_is_assigned() {
    let world = World::start("assigned").await;
    let fault = async |arm: &str, version: i64, seconds: f64| -> Option<String> {
        sqlx::query_scalar("select provenance_fault($1, 'r', 'demo', $2, $3, now() + make_interval(secs => $4), now() + interval '1 hour')")
            .bind(sampler_key("r").id())
            .bind(arm)
            .bind(version)
            .bind(seconds)
            .fetch_one(&world.stack.pool)
            .await
            .unwrap()
    };
    register(&world.stack.pool, &sampler_key("r"), "r").await;
    assert_eq!(fault("champion", 1, 0.0).await.as_deref(), Some("version_not_assigned"));
    ensure_assigned(&world.stack.pool, "champion", 1).await;
    assert_eq!(fault("champion", 1, 0.0).await, None);
    assert_eq!(
        fault("champion", 1, -60.0).await.as_deref(),
        Some("version_not_assigned"),
        "a minute before"
    );
    assert_eq!(fault("canary", 1, 0.0).await.as_deref(), Some("version_not_assigned"));
    assert_eq!(fault("champion", 2, 0.0).await.as_deref(), Some("version_not_assigned"));
    ensure_assigned(&world.stack.pool, "champion", 2).await;
    assert_eq!(
        fault("champion", 1, 60.0).await,
        None,
        "requests end on the version they began with"
    );
    assert_eq!(
        fault("champion", 1, 600.0).await.as_deref(),
        Some("version_not_assigned"),
        "ten minutes after the next assignment"
    );
    let in_two_hours = fault("champion", 2, 7200.0).await;
    assert_eq!(in_two_hours.as_deref(), Some("sampled_in_the_future"));
}
