//! A run whose harness forces calls of a tool. Our own engine constrains them, and the trainer computes
//! its masks again. Everything is real: replica, release, log, sink and trainer.

use super::environment::{Leased, create, end, lease};
use super::offline::{control_beside, ended, ingest, offline, post};
use super::world::{World, register};
use artifact::checkpoint::Checkpoint;
use edge::sampler::SamplerKey;
use fixture::eventually;
use fixture::serving::{releases, serve, wait_until_ready};
use model::config::ModelConfig;
use model::random_checkpoint;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);
const GROUP: i64 = 4;
const STEPS: i64 = 2;
/// After the 256 bytes.
pub const END: u32 = 256;
pub const DECLINE: u32 = 257;
/// Longer than the log takes. Such a call is logged as untrainable.
const TOO_LONG: usize = 70_000;

/// A model with a tokenizer of bytes and a chat template. Its vocabulary has more ids than the
/// tokenizer.
pub fn checkpoint() -> Checkpoint {
    let config = ModelConfig {
        vocab_size: 261,
        max_position_embeddings: 256,
        ..super::world::config()
    };
    let mut checkpoint = random_checkpoint(&config, 5);
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let written = |byte: u8| match printable(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|&b| !printable(b)).count() as u32).unwrap(),
    };
    let vocab: serde_json::Map<String, Value> = (0..=255u8)
        .map(|byte| (written(byte).to_string(), byte.into()))
        .collect();
    let special = |(content, id): (&str, u32)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let added = [("<|end|>", END), ("<|decline|>", DECLINE)].map(special);
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let generation = json!({"eos_token_id": END, "springtide_decline_token_id": DECLINE});
    for (name, text) in [
        ("tokenizer.json", tokenizer.to_string()),
        ("generation_config.json", generation.to_string()),
        (
            "chat_template.jinja",
            "{% for m in messages %}{{ m.content }}{% endfor %}".into(),
        ),
    ] {
        checkpoint.files.insert(name.into(), text.into());
    }
    checkpoint
}

/// A turn that must call the tool `pick`. Returns the choice.
async fn call(lease: &Value, prompt: &str, description: &str) -> Value {
    let letters = json!({"type": "object", "required": ["letter"], "additionalProperties": false,
        "properties": {"letter": {"enum": ["a", "b", "y", "z"], "description": description}}});
    let tool = json!({"type": "function", "function": {"name": "pick", "parameters": letters}});
    let body = json!({"model": "any", "messages": [{"role": "user", "content": prompt}], "tools": [tool],
        "tool_choice": "required"});
    let url = format!("{}/chat/completions", lease["base_url"].as_str().unwrap());
    let (status, mut answer) = post(url, &body).await;
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0].take()
}

/// How good the call is. One that was cut off is none.
fn rewarded(choice: &Value) -> f64 {
    let call = &choice["message"]["tool_calls"][0]["function"];
    let arguments = call["arguments"]
        .as_str()
        .and_then(|text| serde_json::from_str::<Value>(text).ok());
    let Some(arguments) = arguments else {
        assert_eq!(choice["finish_reason"], "length", "{choice}");
        return 0.0;
    };
    assert_eq!(call["name"], "pick");
    let letter = arguments["letter"].as_str().unwrap();
    assert!(["a", "b", "y", "z"].contains(&letter), "{letter}");
    if letter < "m" { 1.0 } else { 0.25 }
}

/// Takes another format's name into a stored generation, as if another version had sampled it.
async fn sampled_by_another_version(world: &World, choice: &Value) {
    let id: Uuid = choice["generation_id"].as_str().unwrap().parse().unwrap();
    eventually("it is stored", SOON, async || {
        let sql =
            "update generation set sampling = jsonb_set(sampling, '{constraint,format}', '\"other\"') where id = $1";
        let done = sqlx::query(sql).bind(id).execute(&world.stack.pool).await.unwrap();
        (done.rows_affected() == 1).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_a_grammar_forced_are_trained_on_with_the_samplers_own_bits() {
    let world = World::start_from("grammar", checkpoint()).await;
    let pool = &world.stack.pool;
    register(pool, &SamplerKey::from_seed(&[1; 32]), "replica-1").await;
    let stop = CancellationToken::new();
    let releasing = tokio::spawn(::release::run(releases(&world.stack), stop.clone()));
    let replica = serve(&world.stack, None, world.stack.dir.path().join("serve")).await;
    wait_until_ready(&replica.url).await;
    let ingest = ingest(&world, &stop).await;
    let control = control_beside(&world, &replica.url).await;
    let request = json!({
        "kind": "grpo",
        "environment": {"kind": "pull", "lease_seconds": 600},
        "tasks": [{"id": "one", "prompt": "one", "answer": "a"}, {"id": "two", "prompt": "two", "answer": "b"}],
        "group_size": GROUP,
        "tasks_per_step": 2,
        "steps": STEPS,
        "staleness_max": 0,
        "learning_rate": 1e-3,
    });
    let (run, _) = create(&control, &request).await;
    let running = world.run_against(offline(&world), &replica.url);
    let mut rollouts = 0;
    loop {
        let lease = match lease(&run).await {
            Leased::One(lease) => lease,
            Leased::Nothing => continue,
            Leased::Ended => break,
        };
        let choice = call(&lease, lease["task"]["prompt"].as_str().unwrap(), "").await;
        assert_eq!(choice.get("untrainable"), None, "{choice}");
        // an unconstrained turn beside it
        let url = format!("{}/completions", lease["base_url"].as_str().unwrap());
        let (status, answer) = post(url, &json!({"model": "any", "prompt": "why?", "max_tokens": 6})).await;
        assert_eq!(status, 200, "{answer}");
        match rollouts {
            0 => {
                let choice = call(&lease, "again", &"x".repeat(TOO_LONG)).await;
                assert_eq!(choice["untrainable"], "constrained_sampling");
            }
            1 => sampled_by_another_version(&world, &call(&lease, "again", "").await).await,
            _ => {}
        }
        // A small part for the rollout's number, so that no group has the same reward throughout.
        let reward = 0.5 * rewarded(&choice) + 0.01 * rollouts as f64;
        let (status, ended) = end(&control, &lease, "reward", &json!({"reward": reward})).await;
        assert_eq!(status, 200, "{ended}");
        rollouts += 1;
    }
    let done = ended(&run).await;
    assert_eq!(done["status"], "succeeded", "{done}");
    running.stop().await;
    replica.stop().await;
    stop.cancel();
    ingest.await.unwrap().unwrap();
    releasing.await.unwrap().unwrap();

    assert_eq!(rollouts, STEPS * 2 * GROUP);
    let mut codes: BTreeMap<String, usize> = BTreeMap::new();
    for one in world.dispositions().await {
        *codes.entry(one.code.unwrap_or(one.kind)).or_default() += 1;
    }
    let expected = [
        ("constrained_sampling", 1),
        ("constraint_not_followed", 1),
        ("trained", 2 * rollouts as usize),
    ];
    assert_eq!(codes, expected.map(|(code, count)| (code.to_owned(), count)).into());
    let constrained: i64 = sqlx::query_scalar(
        "select count(*) from generation g join disposition d on d.generation_id = g.id and d.kind = 'trained'
         where g.sampling #>> '{constraint,schema}' like '%\"pick\"%' and g.untrainable is null",
    )
    .fetch_one(pool)
    .await
    .unwrap();
    assert_eq!(constrained, rollouts);
    for step in 1..=STEPS {
        let metrics = world.metrics(step).await;
        let tokens: i64 = sqlx::query_scalar(
            "select sum(cardinality(g.token_ids)) from generation g join disposition d on d.generation_id = g.id
             where d.kind = 'trained' and d.step = $1",
        )
        .bind(step)
        .fetch_one(pool)
        .await
        .unwrap();
        assert_eq!(metrics["sequences"], 2 * 2 * GROUP, "{metrics}");
        assert_eq!(
            (&metrics["tokens"], &metrics["quarantined"]),
            (&json!(tokens), &json!(0))
        );
        let mismatch = &metrics["mismatch"];
        assert_eq!(
            (&mismatch["tokens"], &mismatch["difference_max"]),
            (&json!(tokens), &json!(0.0))
        );
        assert!(metrics["gradient_norm"].as_f64().unwrap() > 0.0, "{metrics}");
    }
    let alarms: i64 = sqlx::query_scalar("select count(*) from run_event where level <> 'info'")
        .fetch_one(pool)
        .await
        .unwrap();
    assert_eq!(alarms, 0, "{:?}", world.events().await);
}
