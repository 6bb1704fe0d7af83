//! From an event to a trajectory: HTTP and Kafka in, rows and dead letters out, with a real broker
//! and Postgres. Over 500 lines, because it has the main cases of every kind of event.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use edge::auth::{AuthOptions, Role};
use event_log::Producer;
use event_log::event::{self, Event, Generation, Purpose, Sampling, Target, Value};
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use serde_json::json;
use sqlx::types::Json;
use time::format_description::well_known::Rfc3339;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use uuid::Uuid;

use fixture::ingest::{
    SOON, SOURCE, Service, Trajectory, about, accept, count, dead_letters, generation, no_dead_letters,
    number_of_dead_letters, options, send, send_raw, stored, trajectory,
};
use fixture::{Stack, create_key, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_generation_becomes_a_rewarded_trajectory() {
    let stack = Stack::start("accepted").await;
    let service = Service::start(&stack).await;
    let generation = generation();
    let event = generation.clone().into_event("default", SOURCE);
    let given_at = (event.time + time::Duration::milliseconds(1_234))
        .format(&Rfc3339)
        .unwrap();
    send(&stack, &[event]).await;
    let body = json!({
        "generation_id": generation.id,
        "metric_name": "accept",
        "value": true,
        "tags": {"editor": "vim"},
        "time": given_at,
    });
    let (status, answer) = service.post("/v1/feedback", &body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        trajectory(&stack.pool, generation.id).await,
        Trajectory::rewarded(0.75, "accept")
    );

    type Row = (
        i64,
        i64,
        serde_json::Value,
        Vec<u8>,
        Vec<i32>,
        Vec<i32>,
        Vec<f32>,
        Option<Vec<bool>>,
        i64,
        bool,
        Option<f32>,
        Option<Json<Sampling>>,
    );
    let row: Row = sqlx::query_as(
        "select version, version_oldest, version_spans, root, prompt_ids, token_ids, logprobs, train_mask, seed, \
         decline_suppressed, exploration_share, sampling from generation where id = $1",
    )
    .bind(generation.id)
    .fetch_one(&stack.pool)
    .await
    .unwrap();
    assert_eq!((row.0, row.1), (4, 3));
    assert_eq!(row.2, json!([[3, 1], [4, 2]]));
    assert_eq!(row.3, [4; 32]);
    assert_eq!((row.4, row.5), (vec![10, 11, 12, 13], vec![20, 21, 2]));
    assert_eq!(row.6, generation.logprobs);
    assert_eq!(row.7, Some(vec![true, true, false]));
    assert_eq!(row.8.cast_unsigned(), u64::MAX);
    assert_eq!((row.9, row.10), (true, Some(0.02)));
    assert_eq!(row.11.map(|Json(sampling)| sampling), generation.sampling);
    let partition: String = sqlx::query_scalar("select tableoid::regclass::text from generation")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_ne!(partition, "generation_default", "a partition was made ahead of time");
    assert_eq!(count(&stack.pool, "select count(*) from open_generation").await, 0);
    let tags: serde_json::Value = sqlx::query_scalar("select tags from feedback")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(tags, json!({"editor": "vim"}));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resending_an_event_changes_nothing() {
    let stack = Stack::start("duplicate").await;
    let service = Service::start(&stack).await;
    let generation = generation().into_event("default", SOURCE);
    let feedback = accept(Uuid::parse_str(&generation.id).unwrap(), true);
    let events = [generation.clone(), generation.clone(), feedback.clone(), feedback];
    send(&stack, &events).await;
    stored(&stack.pool, 4).await;
    send(&stack, &events).await;
    stored(&stack.pool, 8).await;

    let id = Uuid::now_v7();
    let body = json!({"id": id, "generation_id": generation.id, "metric_name": "stars", "value": 4});
    let first = service.post("/v1/feedback", &body).await;
    stored(&stack.pool, 9).await;
    let again = service.post("/v1/feedback", &body).await;
    assert_eq!(first, (200, json!({"feedback_id": id})));
    assert_eq!(again, first);

    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 1);
    assert_eq!(count(&stack.pool, "select count(*) from feedback").await, 2);
    assert_eq!(count(&stack.pool, "select count(*) from event_key").await, 3);
    no_dead_letters(&stack).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_with_another_body_is_a_409_over_http_and_a_dead_letter_from_kafka() {
    let stack = Stack::start("conflict").await;
    let service = Service::start(&stack).await;
    let first = generation().into_event("default", SOURCE);
    let mut second = first.clone();
    let event::Body::Generation(body) = &mut second.body else {
        panic!("a generation");
    };
    body.user_key = "someone-else".to_owned();
    send(&stack, std::slice::from_ref(&first)).await;
    stored(&stack.pool, 1).await;
    send(&stack, &[second]).await;
    let records = dead_letters(&stack, 1).await;
    assert_eq!(records[0].headers["reason"], "conflict");
    assert_eq!(records[0].headers["offset"], "1");

    let id = Uuid::now_v7();
    let mut body = json!({"id": id, "generation_id": first.id, "metric_name": "accept", "value": true});
    assert_eq!(service.post("/v1/feedback", &body).await.0, 200);
    stored(&stack.pool, 3).await;
    body["value"] = false.into();
    let (status, problem) = service.post("/v1/feedback", &body).await;
    assert_eq!((status, &problem["type"]), (409, &json!("/problems/conflict")));

    // Another source may use the same event id, but not the same feedback id.
    body["source"] = "elsewhere".into();
    assert_eq!(service.post("/v1/feedback", &body).await.0, 200);
    let records = dead_letters(&stack, 2).await;
    assert_eq!(records[1].headers["reason"], "conflict");
    let user: String = sqlx::query_scalar("select user_key from generation")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(user, "user-1");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_after_a_conflict_in_one_batch_is_still_a_duplicate() {
    let stack = Stack::start("behind_conflict").await;
    let service = Service::start(&stack).await;
    let first = generation().into_event("default", SOURCE);
    send(&stack, std::slice::from_ref(&first)).await;
    stored(&stack.pool, 1).await;
    service.stop().await;
    // While the service is down: another body under the same id, then the stored one again.
    let mut other = first.clone();
    if let event::Body::Generation(body) = &mut other.body {
        body.user_key = "someone-else".to_owned();
    }
    send(&stack, &[other, first]).await;
    let service = Service::start(&stack).await;
    stored(&stack.pool, 3).await;
    let records = dead_letters(&stack, 1).await;
    assert_eq!(records[0].headers["offset"], "1");
    assert_eq!(number_of_dead_letters(&stack), 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_that_arrives_before_its_generation_counts() {
    let stack = Stack::start("early").await;
    let service = Service::start(&stack).await;
    let generation = generation();
    send(&stack, &[accept(generation.id, false)]).await;
    stored(&stack.pool, 1).await;
    let id = generation.id;
    send(&stack, &[generation.into_event("default", SOURCE)]).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(-0.25, "reject"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_about_an_episode_counts_for_its_generations() {
    let stack = Stack::start("episode").await;
    let service = Service::start(&stack).await;
    let episode_id = Uuid::now_v7();
    let [first, second] = [(); 2].map(|()| Generation {
        episode_id,
        ..generation()
    });
    let ids = [first.id, second.id];
    let mut feedback = accept(episode_id, true);
    let event::Body::Feedback(body) = &mut feedback.body else {
        panic!("not feedback");
    };
    body.target = Target::Episode(episode_id);
    let events = [first, second].map(|generation| generation.into_event("default", SOURCE));
    send(&stack, &events).await;
    send(&stack, &[feedback]).await;
    for id in ids {
        assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_record_becomes_a_dead_letter_and_the_next_records_are_stored() {
    let stack = Stack::start("poison").await;
    let service = Service::start(&stack).await;
    let topic = stack.kafka.topics().generation;
    let protobuf = "application/protobuf";
    let (partition, offset) = send_raw(&stack, &topic, protobuf, b"\xff\xff no event").await;
    let mut broken = generation();
    broken.logprobs.pop();
    let broken = broken.into_event("default", SOURCE).encode();
    send_raw(&stack, &topic, protobuf, &broken).await;
    send_raw(&stack, &topic, "application/json", b"{\"tenant\": 1}").await;
    let after = generation();
    let json = serde_json::to_vec(&after.clone().into_event("default", SOURCE)).unwrap();
    send_raw(&stack, &topic, "application/json; charset=utf-8", &json).await;
    stored(&stack.pool, 4).await;

    let records = dead_letters(&stack, 3).await;
    let headers = &records[0].headers;
    assert_eq!(headers["reason"], "undecodable");
    assert_eq!(headers["topic"], topic);
    assert_eq!(headers["partition"], partition.to_string());
    assert_eq!(headers["offset"], offset.to_string());
    assert_eq!(records[0].value, b"\xff\xff no event");
    assert_eq!(records[1].headers["reason"], "invalid");
    assert_eq!(records[1].headers["detail"], "logprobs: 2 for 3 sampled tokens");
    assert_eq!(records[2].headers["reason"], "undecodable");
    let ids: Vec<Uuid> = sqlx::query_scalar("select id from generation")
        .fetch_all(&stack.pool)
        .await
        .unwrap();
    assert_eq!(ids, [after.id], "the record after the undecodable ones is stored");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sink_fences_the_first_without_losing_or_duplicating_events() {
    const EVENTS: i64 = 400;
    let stack = Stack::start("fence").await;
    let first = Service::start(&stack).await;
    let events: Vec<Event> = (0..EVENTS)
        .map(|_| generation().into_event("default", SOURCE))
        .collect();
    let sending = {
        let (kafka, events) = (stack.kafka.clone(), events.clone());
        tokio::spawn(async move {
            let producer = Producer::new(&kafka).unwrap();
            for event in &events {
                producer.send_event(event).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    };
    let offsets = "select count(*) from generation";
    eventually("the first sink writes", SOON, async || {
        (count(&stack.pool, offsets).await > 20).then_some(())
    })
    .await;

    // Claims the partitions without the first sink's knowledge, as after a stall of its process.
    let slots: Vec<(String, i32, String, i64)> =
        sqlx::query_as("select topic, partition, cluster_id, fence from consumer_offset where consumer = 'sink'")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    let taken: Vec<(String, i32)> = slots.iter().map(|slot| (slot.0.clone(), slot.1)).collect();
    let claims = ingest::offset::claim(&stack.pool, &slots[0].2, &taken).await.unwrap();
    for (topic, partition, _, fence) in &slots {
        assert_eq!(claims[&(topic.clone(), *partition)].fence, fence + 1);
    }
    eventually("the first sink notices and claims again", SOON, async || {
        let again = "select count(*) from consumer_offset where consumer = 'sink' and fence >= 3";
        (count(&stack.pool, again).await == slots.len() as i64).then_some(())
    })
    .await;

    let second = Service::start(&stack).await;
    sending.await.unwrap();
    stored(&stack.pool, EVENTS).await;
    first.stop().await;
    send(&stack, &[generation().into_event("default", SOURCE)]).await;
    stored(&stack.pool, EVENTS + 1).await;
    assert_eq!(count(&stack.pool, offsets).await, EVENTS + 1);
    no_dead_letters(&stack).await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trajectories_without_a_usable_signal_are_censored_and_a_decline_is_worth_zero() {
    let stack = Stack::start("censored").await;
    let service = Service::start(&stack).await;
    let silent = generation();
    let refused = Generation {
        consent: false,
        ..generation()
    };
    let measured = Generation {
        purpose: Purpose::Evaluation,
        ..generation()
    };
    let declined = Generation {
        declined: true,
        decline_suppressed: false,
        ..generation()
    };
    let foreign = Generation {
        surface: "undefined".to_owned(),
        ..generation()
    };
    let ids = [silent.id, refused.id, measured.id, declined.id, foreign.id];
    let events =
        [silent, refused, measured, declined, foreign].map(|generation| generation.into_event("default", SOURCE));
    send(&stack, &events).await;
    send(&stack, &[accept(ids[1], true), accept(ids[2], true)]).await;
    let expected = [
        Trajectory::censored("no_feedback"),
        Trajectory::censored("no_consent"),
        Trajectory::censored("evaluation"),
        Trajectory::rewarded(0.0, "decline"),
        Trajectory::censored("unknown_surface"),
    ];
    for (id, expected) in ids.into_iter().zip(expected) {
        assert_eq!(trajectory(&stack.pool, id).await, expected);
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_feedback_is_stored_as_late_without_effect() {
    let stack = Stack::start("late").await;
    let service = Service::start(&stack).await;
    let generation = generation();
    let id = generation.id;
    send(&stack, &[generation.into_event("default", SOURCE)]).await;
    let censored = Trajectory::censored("no_feedback");
    assert_eq!(trajectory(&stack.pool, id).await, censored);
    send(&stack, &[accept(id, true)]).await;
    stored(&stack.pool, 2).await;
    let late: bool = sqlx::query_scalar("select late from feedback")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert!(late);
    assert_eq!(trajectory(&stack.pool, id).await, censored);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_starts_after_the_horizon_still_counts_timely_feedback() {
    let stack = Stack::start("lag").await;
    let generation = generation();
    let id = generation.id;
    send(&stack, &[generation.into_event("default", SOURCE), accept(id, true)]).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let service = Service::start(&stack).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_closes_when_its_grade_arrives() {
    let stack = Stack::start("rollout").await;
    let service = Service::start(&stack).await;
    let rollout = || Generation {
        surface: "rollout".to_owned(),
        purpose: Purpose::Rollout,
        run_id: Some(Uuid::now_v7()),
        ..generation()
    };
    let [before, after] = [rollout(), rollout()];
    let ids = [before.id, after.id];
    let reward = |id| about(id, "reward", Value::Float(0.5));
    send(&stack, &[before.into_event("default", SOURCE)]).await;
    send(&stack, &[reward(ids[0]), reward(ids[1])]).await;
    stored(&stack.pool, 3).await;
    send(&stack, &[after.into_event("default", SOURCE)]).await;
    for id in ids {
        assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.5, "value"));
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_without_a_generation_becomes_a_dead_letter_and_still_joins_a_late_generation() {
    let stack = Stack::start("orphan").await;
    let service = Service::start_with(
        &stack,
        ingest::Options {
            orphan_ttl_seconds: 1.0,
            ..options()
        },
    )
    .await;
    let generation = generation();
    let id = generation.id;
    let orphan = accept(id, true);
    send(&stack, std::slice::from_ref(&orphan)).await;
    let records = dead_letters(&stack, 1).await;
    assert_eq!(records[0].headers["reason"], "orphan");
    let copy = Event::decode(&records[0].value).unwrap();
    assert_eq!(copy.body, orphan.body);
    assert_eq!(copy.time, orphan.time);
    eventually("the row is marked", SOON, async || {
        let marked = "select count(*) from feedback where orphaned_at is not null";
        (count(&stack.pool, marked).await == 1).then_some(())
    })
    .await;
    send(&stack, &[generation.into_event("default", SOURCE)]).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_were_filled_from_another_cluster_are_refused() {
    let stack = Stack::start("cluster").await;
    let service = Service::start(&stack).await;
    send(&stack, &[generation().into_event("default", SOURCE)]).await;
    stored(&stack.pool, 1).await;
    service.stop().await;
    sqlx::query("update consumer_offset set cluster_id = 'another' where consumer = 'sink'")
        .execute(&stack.pool)
        .await
        .unwrap();
    let refused = Service::start(&stack).await.running.await.unwrap();
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("Kafka cluster another"), "{error}");

    let accepted = ingest::Options {
        accept_other_log: true,
        ..options()
    };
    let service = Service::start_with(&stack, accepted).await;
    eventually("the log is read again", SOON, async || {
        let reached = "select coalesce(sum(next_offset), 0)::bigint from consumer_offset \
                 where consumer = 'sink' and cluster_id <> 'another'";
        (count(&stack.pool, reached).await == 1).then_some(())
    })
    .await;
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_breaks_a_rule_gets_the_name_of_the_field() {
    let stack = Stack::start("rules").await;
    let service = Service::start(&stack).await;
    let id = Uuid::now_v7();
    let valid = json!({"generation_id": id, "metric_name": "accept", "value": true});
    let mut dry = valid.clone();
    dry["dryrun"] = true.into();
    assert_eq!(service.post("/v1/feedback", &dry).await.0, 200);
    for (change, value, field) in [
        ("value", json!("yes"), "value"),
        ("generation_id", json!(Uuid::from_u128(7)), "generation_id"),
        ("metric_name", json!(""), "metric_name"),
        ("time", json!("2199-01-01T00:00:00Z"), "time"),
    ] {
        let mut body = valid.clone();
        body[change] = value;
        let (status, problem) = service.post("/v1/feedback", &body).await;
        assert_eq!((status, &problem["field"]), (400, &json!(field)), "{problem}");
    }
    let mut both = valid.clone();
    both["episode_id"] = json!(id);
    assert_eq!(service.post("/v1/feedback", &both).await.0, 400);
    stored(&stack.pool, 0).await;

    let generation = serde_json::to_value(generation()).unwrap();
    let (status, answer) = service.post("/v1/generations", &generation).await;
    assert_eq!((status, &answer["generation_id"]), (200, &generation["generation_id"]));
    stored(&stack.pool, 1).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn if_keys_are_required_the_key_determines_tenant_and_role() {
    let stack = Stack::start("keys").await;
    let required = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    let service = Service::start_behind(&stack, options(), required).await;
    let serving = create_key(&stack.pool, "acme", Role::Serving, "app").await;
    let release = create_key(&stack.pool, "acme", Role::Release, "ops").await;
    let body = json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true}).to_string();
    let url = format!("http://{}/v1/feedback", service.address);
    for (key, status) in [
        (None, 401),
        (Some("spring_wrong"), 401),
        (Some(&*release), 403),
        (Some(&*serving), 200),
    ] {
        let mut request = reqwest::Client::new()
            .post(&url)
            .header("content-type", "application/json");
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let response = request.body(body.clone()).send().await.unwrap();
        assert_eq!(response.status(), status);
    }
    let tenant = eventually("the feedback is stored", SOON, async || {
        let tenant = sqlx::query_scalar("select tenant_id from feedback");
        tenant.fetch_optional(&stack.pool).await.unwrap()
    });
    let tenant: String = tenant.await;
    assert_eq!(tenant, "acme");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_generation_has_exactly_one_disposition_in_the_ledger() {
    let stack = Stack::start("ledger").await;
    let service = Service::start(&stack).await;
    let mut events = Vec::new();
    for index in 0..60 {
        let generation = Generation {
            declined: index % 5 == 4,
            decline_suppressed: index % 5 != 4,
            ..generation()
        };
        let id = generation.id;
        events.push(generation.into_event("default", SOURCE));
        match index % 3 {
            0 => events.push(accept(id, index % 2 == 0)),
            1 => events.extend([accept(id, true), accept(id, false)]),
            _ => {}
        }
    }
    let rollout = Generation {
        surface: "rollout".to_owned(),
        ..generation()
    };
    events.push(rollout.into_event("default", SOURCE));
    send(&stack, &events).await;
    send(&stack, &events).await;
    stored(&stack.pool, 2 * events.len() as i64).await;
    eventually("every horizon passes", SOON, async || {
        (count(&stack.pool, "select count(*) from open_generation").await == 1).then_some(())
    })
    .await;
    let ledger: Vec<(String, Option<String>, i64)> =
        sqlx::query_as("select disposition, code, count(*) from ledger group by 1, 2 order by 1, 2")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    // Of twenty without feedback, four were declined.
    let expected = [
        ("censored".to_owned(), Some("no_feedback".to_owned()), 16),
        ("open".to_owned(), None, 1),
        ("queued".to_owned(), None, 44),
    ];
    assert_eq!(ledger, expected);
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 61);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sending_to_an_unavailable_log_fails_within_seconds() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let kafka = event_log::ClientOptions {
        brokers: nobody.to_string(),
        ..Default::default()
    };
    let producer = Producer::new(&kafka).unwrap();
    let started = std::time::Instant::now();
    let refused = producer.send_event(&accept(Uuid::now_v7(), true)).await;
    assert!(matches!(refused, Err(event_log::Error::Unavailable(_))), "{refused:?}");
    assert!(started.elapsed() < Duration::from_secs(10));
}

/// Collects the spans of one trace.
#[derive(Debug, Clone, Default)]
struct Trace(Arc<Mutex<Vec<SpanData>>>);

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

impl SpanExporter for Trace {
    async fn export(&self, spans: Vec<SpanData>) -> OTelSdkResult {
        let mine = |span: &SpanData| span.span_context.trace_id().to_string() == TRACE_ID;
        self.0.lock().unwrap().extend(spans.into_iter().filter(mine));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_spans_the_request_the_log_and_the_row() {
    let trace = Trace::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(trace.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("tests"));
    // The sink has its own threads, so the subscriber must be global. No other test sets one.
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(LevelFilter::INFO));
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let stack = Stack::start("trace").await;
    let service = Service::start(&stack).await;
    let body = json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
    let response = reqwest::Client::new()
        .post(format!("http://{}/v1/feedback", service.address))
        .header("content-type", "application/json")
        .header("traceparent", format!("00-{TRACE_ID}-00f067aa0ba902b7-01"))
        .body(body.to_string())
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let spans = eventually("the row's span ends", SOON, async || {
        let spans = trace.0.lock().unwrap().clone();
        spans.iter().any(|span| span.name == "ingest.store").then_some(spans)
    })
    .await;
    let find = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let (request, row) = (find("POST /v1/feedback"), find("ingest.store"));
    assert_eq!(request.parent_span_id.to_string(), "00f067aa0ba902b7");
    assert_eq!(row.parent_span_id, request.span_context.span_id());
    service.stop().await;
}
