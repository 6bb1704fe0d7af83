//! Forged generations of every kind: none is trained on, each gets its code, and the honest ones
//! around them make the step.

use super::world::{Sampled, TEST, World, ensure_assigned, register, sampler_key};
use crate::support::eventually;
use edge::sampler::{self, SamplerKey};
use ingest::event::signed_bytes;
use std::collections::BTreeMap;
use std::time::Duration;
use uuid::Uuid;

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
