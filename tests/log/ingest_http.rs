//! The HTTP API with a real broker and Postgres: batches, repeated ids, compressed bodies,
//! CloudEvents and dry runs. `ingest.rs` tests what happens behind the log.

use std::collections::BTreeMap;
use std::time::Duration;

use edge::auth::AuthOptions;
use ingest::reward::Definition;
use serde_json::{Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use fixture::ingest::{JSON, Service, count, dead_letters, generation, stored};
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(90);

/// The horizon is longer than any test.
fn options() -> ingest::Options {
    ingest::Options {
        surface: vec![Definition {
            horizon_seconds: 600.0,
            ..Definition::completion()
        }],
        request_bytes_max: 1024 * 1024,
        ..ingest::Options::default()
    }
}

fn feedback_about(generation: Uuid) -> Value {
    json!({
        "feedback_id": Uuid::now_v7(), "generation_id": generation, "metric_name": "accept", "value": true,
    })
}

fn canonical(id: &str, kind: &str, body: &Value) -> Value {
    json!({"source": "app", "id": id, "time": "2026-01-01T00:00:00Z", kind: body})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_valid_events_of_a_batch_are_stored_once_however_often_it_is_sent() {
    let stack = Stack::start("batch").await;
    let service = Service::start_with(&stack, options()).await;
    let generation = generation();
    let mut items = vec![canonical(
        "g",
        "generation",
        &serde_json::to_value(&generation).unwrap(),
    )];
    for index in 0..100 {
        items.push(canonical(
            &format!("f-{index}"),
            "feedback",
            &feedback_about(generation.id),
        ));
    }
    let mut invalid = canonical("bad", "feedback", &feedback_about(generation.id));
    invalid["feedback"]["value"] = json!("yes");
    items.push(invalid);
    let items = Value::Array(items);
    let first = service.post("/v1/events:batch", &items).await;
    assert_eq!(first.0, 207, "{}", first.1);
    let results = first.1["results"].as_array().unwrap();
    assert_eq!(results.len(), 102);
    assert!(results[..101].iter().all(|result| result["status"] == 200));
    assert_eq!(results[101]["problem"]["field"], "value");
    stored(&stack.pool, 101).await;
    assert_eq!(service.post("/v1/events:batch", &items).await, first);
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 100);

    let mut conflict = items[1].clone();
    conflict["feedback"]["value"] = json!(false);
    let (status, answer) = service.post("/v1/events:batch", &json!([conflict])).await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (207, &json!(409)),
        "{answer}"
    );
    stored(&stack.pool, 101).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idempotency_key_identifies_one_feedback_event_and_another_body_is_a_409() {
    let stack = Stack::start("idempotency").await;
    let service = Service::start_with(&stack, options()).await;
    let body = json!({"generation_id": Uuid::now_v7(), "metric_name": "stars", "value": 4});
    let keyed = [JSON, ("idempotency-key", "click-1")];
    let (status, _, first) = service.post_with("/v1/feedback", &keyed, body.to_string()).await;
    assert_eq!(status, 200, "{first}");
    // Before and after the event is stored.
    let (status, _, again) = service.post_with("/v1/feedback", &keyed, body.to_string()).await;
    assert_eq!((status, &again), (200, &first));
    eventually("it is stored", SOON, async || {
        (count(&stack.pool, "select count(*) from feedback").await == 1).then_some(())
    })
    .await;
    let (status, _, again) = service.post_with("/v1/feedback", &keyed, body.to_string()).await;
    assert_eq!((status, &again), (200, &first));
    for (field, value) in [("value", json!(5)), ("generation_id", json!(Uuid::now_v7()))] {
        let mut other = body.clone();
        other[field] = value;
        let (status, _, problem) = service.post_with("/v1/feedback", &keyed, other.to_string()).await;
        assert_eq!(status, 409, "{problem}");
    }
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 1);
    service.stop().await;
}

/// A UUIDv7 of this many seconds from now.
fn id_made_in(seconds: i64) -> Uuid {
    let at = OffsetDateTime::now_utc() + time::Duration::seconds(seconds);
    let milliseconds = u64::try_from(at.unix_timestamp_nanos() / 1_000_000).unwrap();
    let random = Uuid::now_v7().into_bytes();
    uuid::Builder::from_unix_timestamp_millis(milliseconds, random[6..].try_into().unwrap()).into_uuid()
}

/// A process knows what it acknowledged last. It asks the tables about older ids, and leaves new ones
/// to the sink.
#[tokio::test(flavor = "multi_thread")]
async fn another_body_is_a_409_at_once_and_by_another_process_a_409_or_a_dead_letter() {
    let stack = Stack::start("contradiction").await;
    let service = Service::start_with(&stack, options()).await;
    let about = Uuid::now_v7();
    // Counts as made just now until the end of the test.
    let (new, old) = (id_made_in(50), id_made_in(-120));
    let send = async |service: &Service, id: Uuid, stars: u32| {
        let body = json!({"id": id, "generation_id": about, "metric_name": "stars", "value": stars});
        service.post("/v1/feedback", &body).await.0
    };
    for id in [new, old] {
        // Whether or not the tables hold it by now.
        assert_eq!(send(&service, id, 4).await, 200);
        assert_eq!(send(&service, id, 5).await, 409);
        assert_eq!(send(&service, id, 4).await, 200);
    }
    // Nothing else was sent to the log.
    stored(&stack.pool, 2).await;
    service.stop().await;

    let service = Service::start_with(&stack, options()).await;
    assert_eq!(send(&service, old, 5).await, 409);
    assert_eq!(send(&service, old, 4).await, 200);
    assert_eq!(send(&service, new, 5).await, 200);
    stored(&stack.pool, 3).await;
    let letters = dead_letters(&stack, 1).await;
    assert_eq!(letters[0].headers["reason"], "conflict");
    // The process remembers the body that the sink refused, but the tables decide.
    assert_eq!(send(&service, new, 4).await, 200);
    stored(&stack.pool, 3).await;
    let first = "select count(*) from feedback where value_float = 4";
    assert_eq!(count(&stack.pool, first).await, 2);
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 2);
    service.stop().await;
}

/// `length` zeros in zstd format, built by hand so that the test needs no encoder.
pub fn zstd_zeros(length: usize) -> Vec<u8> {
    // One frame: magic, no checksum, a window of 128 KiB, then blocks that each repeat one byte 128
    // KiB times.
    const BLOCK: usize = 128 * 1024;
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD, 0x00, 0x38];
    let blocks = length.div_ceil(BLOCK);
    for index in 0..blocks {
        let last = usize::from(index + 1 == blocks);
        // Size, type 1 (RLE), last-block flag.
        let header = (BLOCK << 3) | (1 << 1) | last;
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.push(0);
    }
    frame
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decompression_bomb_is_a_413_and_the_service_keeps_running() {
    let stack = Stack::start("bomb").await;
    let service = Service::start_with(&stack, options()).await;
    let bomb = zstd_zeros(1 << 30);
    assert!(bomb.len() < 64 * 1024);
    for _ in 0..10 {
        let headers = [JSON, ("content-encoding", "zstd")];
        let (status, _, problem) = service.post_with("/v1/events:batch", &headers, bomb.clone()).await;
        assert_eq!(status, 413, "{problem}");
    }
    let (status, headers, _) = service
        .post_with("/v1/feedback", &[JSON, ("content-encoding", "br")], "x")
        .await;
    assert_eq!(
        (status, &headers["accept-encoding"]),
        (415, &"gzip, zstd".parse().unwrap())
    );
    let body = json!({"generation_id": Uuid::now_v7(), "metric_name": "stars", "value": 4});
    assert_eq!(service.post("/v1/feedback", &body).await.0, 200);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_event_as_cloudevent_and_as_canonical_event_is_one_event() {
    let stack = Stack::start("cloudevents").await;
    let service = Service::start_with(&stack, options()).await;
    let generation = serde_json::to_value(generation()).unwrap();
    let event = json!({
        "specversion": "1.0", "type": "springtide.generation.v1", "source": "app", "id": "g",
        "time": "2026-01-01T00:00:00Z", "data": generation,
    });
    let structured = [("content-type", "application/cloudevents+json")];
    let (status, _, answer) = service.post_with("/v1/events", &structured, event.to_string()).await;
    assert_eq!((status, answer), (200, json!({"source": "app", "id": "g"})));
    stored(&stack.pool, 1).await;
    let binary = [
        JSON,
        ("ce-specversion", "1.0"),
        ("ce-type", "springtide.generation.v1"),
        ("ce-source", "app"),
        ("ce-id", "g"),
    ];
    assert_eq!(
        service.post_with("/v1/events", &binary, generation.to_string()).await.0,
        200
    );
    let batched = [("content-type", "application/cloudevents-batch+json")];
    assert_eq!(
        service
            .post_with("/v1/events", &batched, json!([event, event]).to_string())
            .await
            .0,
        200
    );
    let (status, _) = service
        .post("/v1/events:batch", &json!([canonical("g", "generation", &generation)]))
        .await;
    assert_eq!(status, 200);
    // All were duplicates, so none was sent to the log again.
    stored(&stack.pool, 1).await;
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_previews_what_feedback_would_do_and_writes_nothing() {
    let stack = Stack::start("dryrun").await;
    let service = Service::start_with(&stack, options()).await;
    let open = generation();
    let body = json!({"generation_id": open.id, "metric_name": "accept", "value": true, "dryrun": true});
    let (_, unknown) = service.post("/v1/feedback", &body).await;
    assert_eq!(
        unknown["dryrun"],
        json!({"duplicate": false, "target": "unknown", "feedback_stored": 0, "feedback": "waits"})
    );

    let generation = serde_json::to_value(&open).unwrap();
    let (_, dry) = service.post("/v1/generations?dryrun=true", &generation).await;
    assert_eq!(dry["dryrun"]["target"], "unknown", "{dry}");
    assert_eq!(service.post("/v1/generations", &generation).await.0, 200);
    stored(&stack.pool, 1).await;
    let (_, counts) = service.post("/v1/feedback", &body).await;
    let preview = (&counts["dryrun"]["target"], &counts["dryrun"]["feedback"]);
    assert_eq!(preview, (&json!("open"), &json!("counts")), "{counts}");
    let mut after = body.clone();
    after["generation_id"] = Value::Null;
    after["episode_id"] = json!(open.episode_id);
    let (_, counts) = service.post("/v1/feedback", &after).await;
    assert_eq!(counts["dryrun"]["feedback"], "counts", "{counts}");
    let (_, known) = service.post("/v1/generations?dryrun=true", &generation).await;
    assert_eq!(
        (&known["dryrun"]["duplicate"], &known["dryrun"]["target"]),
        (&json!(true), &json!("open"))
    );

    // As if it had been sampled an hour ago.
    sqlx::raw_sql(
        "update generation set sampled_at = now() - interval '1 hour', finished_at = now() - interval '1 hour'; \
         update open_generation set closes_at = now() - interval '50 minutes'",
    )
    .execute(&stack.pool)
    .await
    .unwrap();
    let items = json!([canonical("f", "feedback", &feedback_about(open.id)), {"id": "bad"}]);
    let late = eventually("it is late", SOON, async || {
        let (_, answer) = service.post("/v1/feedback", &body).await;
        (answer["dryrun"]["feedback"] == "late" && answer["dryrun"]["target"] == "closed").then_some(answer)
    })
    .await;
    assert_eq!(late["dryrun"]["feedback_stored"], 0);
    let (status, answer) = service.post("/v1/events:batch?dryrun=true", &items).await;
    assert_eq!(status, 207, "{answer}");
    assert_eq!(answer["results"][0]["dryrun"]["feedback"], "late", "{answer}");
    stored(&stack.pool, 1).await;
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openapi_document_is_served_without_a_key() {
    let stack = Stack::start("openapi").await;
    let required = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    let service = Service::start_behind(&stack, options(), required).await;
    let url = format!("http://{}/openapi.json", service.address);
    let response = reqwest::Client::new().get(url).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let document: BTreeMap<String, Value> = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert!(document["paths"]["/v1/events:batch"]["post"].is_object());
    service.stop().await;
}
