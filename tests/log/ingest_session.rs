//! Long sessions: each turn logs only its new tokens, and readers rebuild the context. With real
//! HTTP, log and tables.

use std::time::Duration;

use event_log::event::{Event, Generation, PayloadRef};
use event_log::payload::{self, Experts, Store};
use rand::SeedableRng;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};
use runs::context::{Broken, prompts};
use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

use fixture::Stack;
use fixture::ingest::{Service, count, options, send, stored};
use fixture::session::{hex, payload_url, tokens, turn, upload, upload_ids};

const TURNS: usize = 50;
/// Tokens of the first prompt. Each turn adds a prompt and an answer.
const OPENING: usize = 150_000;
const PROMPT: usize = 500;
const ANSWER: usize = 500;
const CONTEXT: usize = OPENING + TURNS * (PROMPT + ANSWER);

async fn service(stack: &Stack) -> Service {
    let options = ::ingest::Options {
        payload_store: Some(payload_url(stack)),
        ..options()
    };
    Service::start_with(stack, options).await
}

/// Bytes of the keys and values on the topic of generations.
async fn bytes_on_the_topic(stack: &Stack, records: usize) -> usize {
    let kafka = stack.kafka.clone();
    let read = move || {
        let consumer: BaseConsumer = kafka
            .config(&[])
            .set("group.id", "tests")
            .set("enable.auto.commit", "false")
            .create()
            .unwrap();
        let mut from_start = TopicPartitionList::new();
        for partition in 0..fixture::PARTITIONS {
            let topic = kafka.topics().generation;
            from_start
                .add_partition_offset(&topic, partition, Offset::Beginning)
                .unwrap();
        }
        consumer.assign(&from_start).unwrap();
        let (mut bytes, mut seen) = (0, 0);
        while seen < records {
            let Some(Ok(message)) = consumer.poll(Duration::from_secs(10)) else {
                panic!("{seen} of {records} records");
            };
            bytes += message.payload_len() + message.key_len();
            seen += 1;
        }
        bytes
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

async fn bytes_of_generations(pool: &PgPool) -> i64 {
    let query = "select sum(pg_total_relation_size(relid))::bigint from pg_partition_tree('generation')";
    count(pool, query).await
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_turns_of_a_200_000_token_context_are_logged_once_and_rebuilt() {
    let stack = Stack::start("session").await;
    let service = service(&stack).await;
    let empty = bytes_of_generations(&stack.pool).await;
    let mut random = rand::rngs::StdRng::seed_from_u64(200_000);
    let opening = tokens(&mut random, OPENING);
    let payload = upload_ids(&service, &opening).await;
    let mut context = opening;
    let mut turns: Vec<Generation> = Vec::new();
    let mut contexts: Vec<(Uuid, Vec<u32>)> = Vec::new();
    let mut bytes_whole = 0;
    for number in 0..TURNS {
        let (prompt, answer) = (tokens(&mut random, PROMPT), tokens(&mut random, ANSWER));
        let mut turn = turn(turns.last(), &context, prompt.clone(), answer.clone());
        if number == 0 {
            turn.payload = Some(payload.clone());
        }
        let body = serde_json::to_value(&turn).unwrap();
        let (status, answered) = service.post("/v1/generations", &body).await;
        assert_eq!(status, 200, "{answered}");
        context.extend(&prompt);
        // The size without parents and payloads.
        let alone = Generation {
            parent_id: None,
            prompt_prefix: None,
            payload: None,
            prompt_ids: context.clone(),
            ..turn.clone()
        };
        bytes_whole += alone.into_event("default", "springtide/api").encode().len();
        contexts.push((turn.id, context.clone()));
        context.extend(&answer);
        turns.push(turn);
    }
    assert_eq!(context.len(), CONTEXT);
    stored(&stack.pool, TURNS as i64).await;

    let store = Store::open(&payload_url(&stack)).unwrap();
    let ids: Vec<Uuid> = contexts.iter().map(|(id, _)| *id).collect();
    let mut connection = stack.pool.acquire().await.unwrap();
    let started = std::time::Instant::now();
    let read = prompts(&mut connection, &store, &ids, CONTEXT).await.unwrap();
    let rebuilt_in = started.elapsed();
    for (id, sent) in &contexts {
        assert!(read[id].as_ref().unwrap() == sent, "the context of {id} differs");
    }
    let short = prompts(&mut connection, &store, &ids[..1], 1000).await.unwrap();
    assert_eq!(short[&ids[0]], Err(Broken::TooLong));

    let topic = bytes_on_the_topic(&stack, TURNS).await;
    let table = bytes_of_generations(&stack.pool).await - empty
        + count(&stack.pool, "select pg_total_relation_size('payload_reference')").await;
    let rows = count(&stack.pool, "select sum(pg_column_size(g.*))::bigint from generation g").await;
    // The same table with complete contexts, for comparison.
    sqlx::query("create table whole (like generation including all excluding generated)")
        .execute(&stack.pool)
        .await
        .unwrap();
    for (id, prompt) in &contexts {
        let prompt: Vec<i32> = prompt.iter().map(|id| id.cast_signed()).collect();
        sqlx::query("insert into whole select * from generation where id = $1")
            .bind(id)
            .execute(&stack.pool)
            .await
            .unwrap();
        sqlx::query("update whole set prompt_ids = $2 where id = $1")
            .bind(id)
            .bind(prompt)
            .execute(&stack.pool)
            .await
            .unwrap();
    }
    sqlx::query("vacuum full whole").execute(&stack.pool).await.unwrap();
    let table_whole = count(&stack.pool, "select pg_total_relation_size('whole')").await;
    println!("{TURNS} turns of a context that grows to {CONTEXT} tokens");
    println!("  on the topic            {topic:>12} bytes; whole contexts {bytes_whole:>12}");
    println!("  in the tables           {table:>12} bytes; whole contexts {table_whole:>12}");
    println!("  of that, rows           {rows:>12} bytes (pg_column_size)");
    println!("  in the object store     {:>12} bytes", payload.size_bytes);
    println!("  all {TURNS} contexts put together and checked in {rebuilt_in:?}");
    assert!(topic * 20 < bytes_whole, "{topic} bytes on the topic");
    assert!(table * 10 < table_whole, "{table} bytes in the tables");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_that_cannot_be_rebuilt_has_a_reason() {
    let stack = Stack::start("broken").await;
    let service = service(&stack).await;
    let store = Store::open(&payload_url(&stack)).unwrap();
    let parent = turn(None, &[], vec![1, 2, 3], vec![4, 5]);
    let context = [1, 2, 3, 4, 5];
    let child = |shared: &[u32]| turn(Some(&parent), shared, vec![6], vec![7]);
    let good = child(&context);
    let early = child(&context[..2]);
    let too_long = child(&[1, 2, 3, 4, 5, 6]);
    let other_hash = child(&[1, 2, 3, 4, 6]);
    let orphan = Generation {
        parent_id: Some(Uuid::now_v7()),
        ..child(&context)
    };
    let mut circle = [child(&context), child(&context)];
    circle[0].parent_id = Some(circle[1].id);
    circle[1].parent_id = Some(circle[0].id);
    let foreign = child(&context);
    let references = |media_type: &str| PayloadRef::of(b"12345678", media_type);
    let by_reference = |payload: PayloadRef| Generation {
        payload: Some(payload),
        ..turn(None, &[], vec![6], vec![7])
    };
    let missing = by_reference(references(payload::TOKEN_IDS));
    let unknown = by_reference(references("application/x-later"));
    let damaged = PayloadRef::of(&payload::token_bytes(&[8, 9]), payload::TOKEN_IDS);
    let differs = by_reference(damaged.clone());
    let path = format!("payload/{}/{}", blake3::hash(b"default").to_hex(), hex(&damaged.digest));
    let path = stack.dir.path().join("payloads").join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, payload::token_bytes(&[8, 10])).unwrap();

    let expected = [
        (&good, Ok(vec![1, 2, 3, 4, 5, 6])),
        (&early, Ok(vec![1, 2, 6])),
        (&too_long, Err(Broken::PrefixTooLong)),
        (&other_hash, Err(Broken::PrefixDiffers)),
        (&orphan, Err(Broken::ParentMissing)),
        (&circle[0], Err(Broken::Cycle)),
        (&circle[1], Err(Broken::Cycle)),
        (&foreign, Err(Broken::ParentMissing)),
        (&missing, Err(Broken::PayloadMissing)),
        (&unknown, Err(Broken::PayloadUnknown)),
        (&differs, Err(Broken::PayloadDiffers)),
    ];
    let tenant = |generation: &Generation| {
        if generation.id == foreign.id {
            "other"
        } else {
            "default"
        }
    };
    let event = |generation: &Generation| generation.clone().into_event(tenant(generation), "tests");
    let events: Vec<Event> = expected.iter().map(|(generation, _)| event(generation)).collect();
    // Producers may write such events directly to the log, and a parent may arrive later.
    send(&stack, &events).await;
    stored(&stack.pool, events.len() as i64).await;
    let ids: Vec<Uuid> = expected.iter().map(|(generation, _)| generation.id).collect();
    let mut connection = stack.pool.acquire().await.unwrap();
    let before = prompts(&mut connection, &store, &ids, 100).await.unwrap();
    assert_eq!(
        before[&good.id],
        Err(Broken::ParentMissing),
        "its parent has not arrived"
    );
    send(&stack, &[parent.clone().into_event("default", "tests")]).await;
    stored(&stack.pool, events.len() as i64 + 1).await;
    let read = prompts(&mut connection, &store, &ids, 100).await.unwrap();
    for (generation, outcome) in &expected {
        assert_eq!(&read[&generation.id], outcome, "{}", generation.id);
    }
    assert_eq!(
        prompts(&mut connection, &store, &[good.id], 5).await.unwrap()[&good.id],
        Err(Broken::TooLong)
    );
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_must_be_uploaded_before_the_event_that_names_it() {
    let stack = Stack::start("payload").await;
    let service = service(&stack).await;
    let experts = Experts {
        first: 3,
        layers: 2,
        per_layer: 2,
        experts: 384,
        ids: vec![0, 383, 17, 4],
    };
    let bytes = experts.encode().unwrap();
    let mut routed = turn(None, &[], vec![1, 2, 3], vec![4]);
    routed.experts = Some(PayloadRef::of(&bytes, payload::EXPERTS));
    let digest = hex(&routed.experts.as_ref().unwrap().digest);
    let body = serde_json::to_value(&routed).unwrap();
    let (status, answer) = service.post("/v1/generations", &body).await;
    assert_eq!((status, answer["field"].as_str()), (400, Some("experts")), "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains(&digest), "{answer}");

    let (status, answer) = upload(&service, &bytes[1..], &digest).await;
    assert_eq!((status, answer["field"].as_str()), (400, Some("digest")), "{answer}");
    for _ in 0..2 {
        let (status, answer) = upload(&service, &bytes, &digest).await;
        assert_eq!((status, &answer["digest"]), (200, &json!(digest)), "{answer}");
    }
    let (status, answer) = service.post("/v1/generations", &body).await;
    assert_eq!(status, 200, "{answer}");
    stored(&stack.pool, 1).await;
    let stored: (String, Vec<u8>, i64, String) =
        sqlx::query_as("select kind, digest, size_bytes, media_type from payload_reference where generation_id = $1")
            .bind(routed.id)
            .fetch_one(&stack.pool)
            .await
            .unwrap();
    assert_eq!(
        (stored.0.as_str(), stored.2, stored.3.as_str()),
        ("experts", bytes.len() as i64, payload::EXPERTS)
    );
    let store = Store::open(&payload_url(&stack)).unwrap();
    let reference = routed.experts.unwrap();
    let read = store.get("default", &reference).await.unwrap();
    assert_eq!(Experts::decode(&read).unwrap(), experts);
    service.stop().await;
}
