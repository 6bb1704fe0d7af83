//! Whose data a policy is trained on: its own tenant's, and that of tenants that consent, until they
//! withdraw.

use super::world::{Sampled, TEST, World};
use edge::tenant;
use fixture::eventually;
use runs::publish::Error;
use std::collections::BTreeMap;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const POLICY: &str = "demo";

/// Samples of another tenant than the policy's.
async fn of_guest(world: &World, count: usize) -> Vec<Sampled> {
    let mut sampled = world.sample(world.base, count).await;
    sampled.iter_mut().for_each(|one| one.tenant = "guest".into());
    sampled
}

async fn consent(world: &World) {
    tenant::consent(&world.stack.pool, POLICY, "guest", TEST, "")
        .await
        .unwrap();
}

async fn withdraw(world: &World) {
    tenant::withdraw(&world.stack.pool, POLICY, "guest", TEST, "")
        .await
        .unwrap();
}

fn expected<const N: usize>(rows: [(&str, &str, i64); N]) -> BTreeMap<(String, String), i64> {
    rows.map(|(tenant, code, count)| ((tenant.to_owned(), code.to_owned()), count))
        .into()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_policys_tenant_and_tenants_that_consent_are_trained_on() {
    let world = World::start("consent").await;
    world.follow(1, world.base, 0).await;
    world.insert_all(&of_guest(&world, 6).await, "champion").await;
    // a policy of another name has nothing to do with it
    tenant::own(&world.stack.pool, "another", "default", TEST)
        .await
        .unwrap();
    tenant::consent(&world.stack.pool, "another", "guest", TEST, "")
        .await
        .unwrap();
    let running = world.run(world.options());
    eventually("nothing of the guest's is left", SOON, async || {
        (world.decided_by("tenant_id").await == expected([("guest", "tenant_without_consent", 6)])).then_some(())
    })
    .await;
    consent(&world).await;
    world.insert_all(&of_guest(&world, 4).await, "champion").await;
    world.insert_all(&world.sample(world.base, 4).await, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let both = [
        ("default", "trained", 4),
        ("guest", "tenant_without_consent", 6),
        ("guest", "trained", 4),
    ];
    assert_eq!(world.decided_by("tenant_id").await, expected(both));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_counts_for_what_waits_in_a_cohort() {
    let world = World::start("withdrawal").await;
    world.follow(1, world.base, 0).await;
    consent(&world).await;
    let running = world.run(world.options());
    world.insert_all(&of_guest(&world, 5).await, "champion").await;
    world.settled().await; // they are members now
    withdraw(&world).await;
    let own = world.sample(world.base, 8).await;
    world.insert_all(&own, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let decided = world.decided_by("tenant_id").await;
    assert_eq!(
        decided.get(&("default".to_owned(), "trained".to_owned())),
        Some(&8),
        "{decided:?}"
    );
    assert_eq!(
        decided.get(&("guest".to_owned(), "trained".to_owned())),
        None,
        "{decided:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_not_committed_after_a_withdrawal() {
    let world = World::start("too_late").await;
    world.follow(1, world.base, 0).await;
    consent(&world).await;
    let mut cohort = of_guest(&world, 2).await;
    cohort.extend(world.sample(world.base, 2).await);
    world.insert_all(&cohort, "champion").await;
    let (run, claim) = world.claimed_run().await;
    let prepared = world.prepare(&claim, run, &cohort).await;
    withdraw(&world).await;
    let refused = world.publisher.commit(&claim, &prepared).await;
    assert!(matches!(refused, Err(Error::ConsentWithdrawn)), "{refused:?}");
    assert_eq!(world.decided_by("tenant_id").await, BTreeMap::new());
    assert_eq!(world.line().await, (world.base, 0));
    // nor by the next process, which finds the step prepared
    let running = world.run(world.options());
    world.insert_all(&world.sample(world.base, 6).await, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    let all = [("default", "trained", 8), ("guest", "tenant_without_consent", 2)];
    assert_eq!(world.decided_by("tenant_id").await, expected(all));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_waits_for_the_commit_of_a_step() {
    let world = World::start("ordered").await;
    consent(&world).await;
    let mut step = edge::database::begin(&world.stack.pool).await.unwrap();
    tenant::hold_consents(&mut step, POLICY).await.unwrap();
    let pool = world.stack.pool.clone();
    let withdrawal = tokio::spawn(async move { tenant::withdraw(&pool, POLICY, "guest", TEST, "").await });
    eventually("the withdrawal waits", SOON, async || {
        let waiting: i64 = sqlx::query_scalar(
            "select count(*) from pg_locks l join pg_database d on d.oid = l.database
             where d.datname = current_database() and l.locktype = 'advisory' and not l.granted",
        )
        .fetch_one(&world.stack.pool)
        .await
        .unwrap();
        (waiting == 1).then_some(())
    })
    .await;
    let consents: i64 = sqlx::query_scalar("select count(*) from tenant_consent where withdrawn_at is null")
        .fetch_one(&mut *step)
        .await
        .unwrap();
    assert_eq!(consents, 1);
    step.commit().await.unwrap();
    assert!(withdrawal.await.unwrap().unwrap());
}
