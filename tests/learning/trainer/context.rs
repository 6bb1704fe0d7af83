//! Generations that were logged in parts: assembled and trained on, or dropped with the reason.

use event_log::event::PayloadRef;
use event_log::payload::{self, TOKEN_IDS};
use sqlx::PgPool;
use uuid::Uuid;

use super::SOON;
use super::world::{Sampled, World};
use fixture::eventually;

/// Shortens a stored prompt to `rest`; its parent has the `shared` prefix.
pub async fn shorten(pool: &PgPool, id: Uuid, parent: Uuid, shared: &[u32], rest: &[u32]) {
    let rest: Vec<i32> = rest.iter().map(|id| id.cast_signed()).collect();
    sqlx::query(
        "update generation set parent_id = $2, prompt_prefix_len = $3, prompt_prefix_hash = $4, prompt_ids = $5 where id = $1",
    )
    .bind(id)
    .bind(parent)
    .bind(i32::try_from(shared.len()).unwrap())
    .bind(blake3::hash(&payload::token_bytes(shared)).as_bytes().to_vec())
    .bind(rest)
    .execute(pool)
    .await
    .unwrap();
}

pub async fn refer(pool: &PgPool, id: Uuid, kind: &str, payload: &PayloadRef) {
    let prompt = kind == "prompt";
    sqlx::query("update generation set payload_digest = case when $2 then $3 end where id = $1")
        .bind(id)
        .bind(prompt)
        .bind(payload.digest.to_vec())
        .execute(pool)
        .await
        .unwrap();
    sqlx::query("insert into payload_reference values ($1, $2, 'default', $3, $4, $5)")
        .bind(id)
        .bind(kind)
        .bind(payload.digest.to_vec())
        .bind(i64::try_from(payload.size_bytes).unwrap())
        .bind(&payload.media_type)
        .execute(pool)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_in_parts_is_trained_on_with_its_whole_context_and_a_broken_turn_is_dropped_with_its_code() {
    let world = World::start("parts").await;
    world.follow(1, world.base, 0).await;
    let pool = &world.stack.pool;
    let sampled = world.sample(world.base, 14).await;
    // The broken ones are older, so the poll that fills the cohort sees all of them.
    let (broken, cohort) = sampled.split_at(6);
    // Two of the cohort are in parts: one shares a prefix with a parent of another arm, one has its
    // prefix by reference.
    let parent = Sampled {
        prompt: cohort[0].prompt[..1].to_vec(),
        tokens: cohort[0].prompt[1..2].to_vec(),
        logprobs: vec![-1.0],
        ..cohort[0].clone().renewed()
    };
    world.insert(&parent, "base").await;
    for one in &sampled {
        world.insert_open(one, "champion").await;
    }
    shorten(
        pool,
        cohort[0].id,
        parent.id,
        &cohort[0].prompt[..2],
        &cohort[0].prompt[2..],
    )
    .await;
    let bytes = payload::token_bytes(&cohort[1].prompt[..2]);
    let prompt = world.payloads().put("default", bytes.into(), TOKEN_IDS).await.unwrap();
    refer(pool, cohort[1].id, "prompt", &prompt).await;
    shorten_to(pool, cohort[1].id, &cohort[1].prompt[2..]).await;
    shorten(pool, broken[0].id, parent.id, &[59], &[1]).await;
    shorten(pool, broken[1].id, Uuid::now_v7(), &[1], &[1]).await;
    let absent = PayloadRef::of(&payload::token_bytes(&[1]), TOKEN_IDS);
    refer(pool, broken[2].id, "prompt", &absent).await;
    refer(pool, broken[3].id, "experts", &absent).await;
    let long = PayloadRef {
        size_bytes: 4 * 65,
        ..absent.clone()
    };
    refer(pool, broken[4].id, "prompt", &long).await;
    let odd = payload::token_bytes(&[61]);
    let odd = world.payloads().put("default", odd.into(), TOKEN_IDS).await.unwrap();
    refer(pool, broken[5].id, "prompt", &odd).await;
    for one in &sampled {
        world.close(one, one.reward.unwrap()).await;
    }
    // The parent of this one is too late.
    sqlx::query("update trajectory set closed_at = now() - interval '2 minutes' where generation_id = $1")
        .bind(broken[1].id)
        .execute(pool)
        .await
        .unwrap();

    let running = world.run(world.options());
    world.head_after(world.base).await;
    eventually("everything is decided", SOON, async || {
        (world.dispositions().await.len() == 15).then_some(())
    })
    .await;
    running.stop().await;
    let dispositions = world.dispositions().await;
    let decided = |id| dispositions.iter().find(|d| d.id == id).unwrap();
    for one in cohort {
        assert_eq!(decided(one.id).kind, "trained");
    }
    // Recomputed log-probabilities agree only with the sampler's context.
    let parity = world.metrics(1).await["mismatch"]["difference_max"].as_f64().unwrap();
    assert_eq!(parity, 0.0, "sampler and trainer have the same bits");
    let codes: Vec<_> = broken
        .iter()
        .map(|one| decided(one.id).code.as_deref().unwrap())
        .collect();
    assert_eq!(
        codes,
        [
            "prefix_differs",
            "parent_missing",
            "payload_missing",
            "has_experts",
            "longer_than_context",
            "token_outside_vocabulary"
        ]
    );
}

pub async fn shorten_to(pool: &PgPool, id: Uuid, rest: &[u32]) {
    let rest: Vec<i32> = rest.iter().map(|id| id.cast_signed()).collect();
    sqlx::query("update generation set prompt_ids = $2 where id = $1")
        .bind(id)
        .bind(rest)
        .execute(pool)
        .await
        .unwrap();
}
