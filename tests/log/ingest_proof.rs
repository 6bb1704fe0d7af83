//! The sink verifies who sampled a generation when it stores it, so that what nobody sampled holds no
//! cohort back.

use std::collections::BTreeMap;
use std::time::Duration;

use edge::audit::Actor;
use edge::sampler::{self, SamplerKey};
use event_log::event::{Body, Event, Generation, Proof, signed_bytes};
use ingest::reward::Definition;
use sqlx::PgPool;
use uuid::Uuid;

use fixture::ingest::{Service, generation, options, send};
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(90);
const TEST: Actor<'static> = Actor {
    key: None,
    name: "test",
};

/// An event that `key` has signed for `tenant`.
fn signed_for(tenant: &str, key: &SamplerKey, generation: Generation) -> Event {
    let digest = generation.unsigned_digest();
    let mut event = generation.into_event("default", "springtide/serve/replica-1");
    let signature = key.sign(&signed_bytes(tenant, event.time, &digest));
    if let Body::Generation(generation) = &mut event.body {
        let sampler = key.id().to_owned();
        generation.proof = Some(Proof { sampler, signature });
    }
    event
}

fn signed(key: &SamplerKey) -> Event {
    signed_for("default", key, generation())
}

fn id(event: &Event) -> Uuid {
    match &event.body {
        Body::Generation(generation) => generation.id,
        _ => unreachable!("these events are generations"),
    }
}

/// What is stored of each generation: its own flag, and that of its open row.
async fn stored(pool: &PgPool, count: usize) -> BTreeMap<Uuid, (Option<bool>, bool)> {
    let sql = "select g.id, g.proven, o.proven from generation g join open_generation o on o.generation_id = g.id";
    let rows = eventually("the generations are stored", SOON, async || {
        let rows: Vec<(Uuid, Option<bool>, bool)> = sqlx::query_as(sql).fetch_all(pool).await.unwrap();
        (rows.len() == count).then_some(rows)
    })
    .await;
    rows.into_iter()
        .map(|(id, proven, open)| (id, (proven, open)))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_is_proven_if_its_registered_sampler_has_signed_it() {
    let stack = Stack::start("proof").await;
    let pool = &stack.pool;
    let service = Service::start_with(
        &stack,
        ::ingest::Options {
            surface: vec![Definition {
                horizon_seconds: 3600.0,
                ..Definition::completion()
            }],
            ..options()
        },
    )
    .await;
    let keys: Vec<SamplerKey> = (1..=7).map(|seed| SamplerKey::from_seed(&[seed; 32])).collect();
    let [own, elsewhere, other_policy, every_policy, revoked, expired, unknown] = &keys[..] else {
        unreachable!()
    };
    for (key, replica, policy) in [
        (own, "replica-1", Some("demo")),
        (elsewhere, "replica-2", Some("demo")),
        (other_policy, "replica-1", Some("other")),
        (every_policy, "replica-1", None),
        (revoked, "replica-1", Some("demo")),
        (expired, "replica-1", Some("demo")),
    ] {
        sampler::register(pool, &key.public_key(), replica, policy, None, TEST)
            .await
            .unwrap();
    }
    sampler::revoke(pool, revoked.id(), TEST, "stolen").await.unwrap();
    sqlx::query("update sampler set expires_at = now() - interval '1 hour' where id = $1")
        .bind(expired.id())
        .execute(pool)
        .await
        .unwrap();

    let mut garbage = signed(own);
    if let Body::Generation(Generation { proof: Some(proof), .. }) = &mut garbage.body {
        proof.signature = [7; 64];
    }
    let mut other_content = signed(own);
    if let Body::Generation(generation) = &mut other_content.body {
        generation.user_key = "somebody else".to_owned();
    }
    let mut later = signed(own);
    later.time += Duration::from_secs(1);
    let cases = [
        (signed(own), Some(true)),
        (signed(every_policy), Some(true)),
        (garbage, Some(false)),
        (other_content, Some(false)),
        (later, Some(false)),
        (signed_for("another", own, generation()), Some(false)),
        (signed(elsewhere), Some(false)),
        (signed(other_policy), Some(false)),
        (signed(revoked), Some(false)),
        (signed(expired), Some(false)),
        (signed(unknown), None),
        (generation().into_event("default", "tests/ingest"), None),
    ];
    for (event, _) in &cases {
        send(&stack, std::slice::from_ref(event)).await;
    }
    let found = stored(pool, cases.len()).await;
    for (n, (event, proven)) in cases.iter().enumerate() {
        assert_eq!(found[&id(event)], (*proven, *proven == Some(true)), "case {n}");
    }

    // a new key counts at once, a revocation within seconds
    sampler::register(pool, &unknown.public_key(), "replica-1", Some("demo"), None, TEST)
        .await
        .unwrap();
    let mut sent = cases.len();
    let mut proven_now = async |key: &SamplerKey| {
        let event = signed(key);
        send(&stack, std::slice::from_ref(&event)).await;
        sent += 1;
        stored(pool, sent).await[&id(&event)].0
    };
    assert_eq!(proven_now(unknown).await, Some(true));
    sampler::revoke(pool, own.id(), TEST, "stolen").await.unwrap();
    eventually("the sink knows of the revocation", SOON, async || {
        (proven_now(own).await == Some(false)).then_some(())
    })
    .await;
    service.stop().await;
}
