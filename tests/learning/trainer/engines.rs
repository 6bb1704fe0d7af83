//! Engines whose log-probabilities are not exactly the trainer's: those of others are judged as a
//! distribution and corrected, and our own may not differ at all. Neither pauses a run.

use super::world::{Sampled, World};
use fixture::eventually;
use std::collections::BTreeMap;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// Samples of the base version by as many users on two replicas, whose log-probabilities are off by so
/// many nats, up and down in turn.
async fn off_by(world: &World, count: usize, nats: f32, engine: Option<&str>) -> Vec<Sampled> {
    let mut sampled = world.sample(world.base, count).await;
    for (n, one) in sampled.iter_mut().enumerate() {
        one.user = format!("user-{n}");
        one.replica = format!("replica-{}", n % 2);
        one.engine = engine.map(str::to_owned);
        for (at, logprob) in one.logprobs.iter_mut().enumerate() {
            *logprob += if at % 2 == 0 { nats } else { -nats };
        }
    }
    sampled
}

/// Code (or kind, if there is none) → how many.
async fn codes(world: &World) -> BTreeMap<String, usize> {
    let mut codes = BTreeMap::new();
    for one in world.dispositions().await {
        *codes.entry(one.code.unwrap_or(one.kind)).or_default() += 1;
    }
    codes
}

#[tokio::test(flavor = "multi_thread")]
async fn rounding_of_another_engine_is_corrected_and_trained_on() {
    let world = World::start("other_engine").await;
    world.follow(1, world.base, 0).await;
    // an answer that is not from its version at all
    let mut wrong = off_by(&world, 1, 1.0, Some("vllm")).await;
    wrong[0].user = "mallory".into();
    world.insert_all(&wrong, "champion").await;
    world
        .insert_all(&off_by(&world, 6, 5e-3, Some("vllm")).await, "champion")
        .await;
    world.insert_all(&off_by(&world, 2, 0.0, None).await, "champion").await;
    let running = world.run(world.options());
    world.head_after(world.base).await;
    running.stop().await;
    let expected = [("quarantined_logprob".to_owned(), 1), ("trained".to_owned(), 8)];
    assert_eq!(codes(&world).await, BTreeMap::from(expected));
    let metrics = world.metrics(1).await;
    let of = |pointer: &str| metrics.pointer(pointer).and_then(serde_json::Value::as_f64).unwrap();
    assert_eq!((of("/remote/tokens"), of("/mismatch/tokens")), (30.0, 10.0));
    assert_eq!(of("/mismatch/difference_max"), 0.0);
    for quantile in ["p50", "p99", "max"] {
        let difference = of(&format!("/remote/difference_{quantile}"));
        assert!((difference - 5e-3).abs() < 1e-5, "{quantile}: {difference}");
    }
    assert_eq!(of("/correction/tokens"), 40.0);
    assert!(of("/correction/ess") < 1.0 && of("/correction/ess") > 0.9999);
    assert_eq!(world.events().await, [""; 0], "no alarm");
    assert_eq!(world.status().await.unwrap().0, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_of_our_own_engine_is_quarantined_with_an_alarm_and_pauses_nothing() {
    let world = World::start("inexact").await;
    world.follow(1, world.base, 0).await;
    // from everybody, on every replica
    world
        .insert_all(&off_by(&world, 40, 5e-3, None).await, "champion")
        .await;
    let running = world.run(world.options());
    eventually("all of them are decided", SOON, async || {
        (codes(&world).await.get("quarantined_logprob") == Some(&40)).then_some(())
    })
    .await;
    eventually("the alarm begins", SOON, async || {
        let events = world.events().await;
        events
            .iter()
            .any(|event| event.contains("samples of our own engine do not have"))
            .then_some(())
    })
    .await;
    // learning goes on as soon as the engine is exact again
    world.insert_all(&off_by(&world, 8, 0.0, None).await, "champion").await;
    world.head_after(world.base).await;
    running.stop().await;
    assert_eq!(codes(&world).await["trained"], 8);
    assert_eq!(world.status().await.unwrap().0, "running");
}
