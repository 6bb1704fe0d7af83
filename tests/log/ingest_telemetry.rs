//! The telemetry of an ingest process: traces, metrics and logs, none of which may contain user
//! text. The process and its exporter are real; a collector keeps what it gets. Longer than 500 lines
//! because all tests observe the same process.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Mutex;

use edge::auth::Role;
use event_log::event::Event;
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::trace::v1::Span;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use uuid::Uuid;

use fixture::ingest::{SOON, accept, count, generation, send};
use fixture::telemetry::Collector;
use fixture::{SPRINGTIDE, Stack, create_key, eventually};

const CONFIG: &str = "\
[ingest]
orphan_ttl_seconds = 3600.0
[[ingest.surface]]
name = \"completion\"
horizon_seconds = 8.0
";

fn attribute(span: &Span, key: &str) -> Option<String> {
    let attribute = span.attributes.iter().find(|attribute| attribute.key == key)?;
    match attribute.value.as_ref()?.value.as_ref()? {
        any_value::Value::StringValue(text) => Some(text.clone()),
        any_value::Value::IntValue(number) => Some(number.to_string()),
        _ => None,
    }
}

fn links_to(from: &Span, to: &Span) -> bool {
    from.links
        .iter()
        .any(|link| (&link.trace_id, &link.span_id) == (&to.trace_id, &to.span_id))
}

/// A `springtide ingest` process.
struct Process {
    address: SocketAddr,
    log: PathBuf,
    collector: Collector,
    process: Child,
}

impl Process {
    async fn start(stack: &Stack, key_required: bool) -> Self {
        let (collector, endpoint) = Collector::start().await;
        fs::write(stack.dir.path().join("springtide.toml"), CONFIG).unwrap();
        let log = stack.dir.path().join("ingest.log");
        let [port] = edge::bind::free_ports().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let process = Command::new(&*SPRINGTIDE)
            .arg("ingest")
            .current_dir(stack.dir.path())
            .env("SPRINGTIDE__LISTEN__INGEST", address.to_string())
            .env("SPRINGTIDE__POSTGRES__URL", &stack.database_url)
            .env("SPRINGTIDE__POSTGRES__URLS__INGEST", stack.url_of("ingest"))
            .envs(stack.kafka_environment())
            .env("SPRINGTIDE__AUTH__REQUIRED", key_required.to_string())
            .env("SPRINGTIDE__SERVE__API_KEY", format!("spring_{CANARY}-serve"))
            .env("SPRINGTIDE__TRAINER__API_KEY", format!("spring_{CANARY}-trainer"))
            .env("SPRINGTIDE__TELEMETRY__FILTER", "debug")
            .env(
                "SPRINGTIDE__TELEMETRY__OTLP_ENDPOINT",
                format!("http://{endpoint}/v1/traces"),
            )
            .env("OTEL_BSP_SCHEDULE_DELAY", "200")
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let process = Self {
            address,
            log,
            collector,
            process,
        };
        eventually("ingest answers", SOON, async || process.get("/health").await).await;
        process
    }

    async fn get(&self, path: &str) -> Option<String> {
        let answer = reqwest::get(format!("http://{}{path}", self.address)).await.ok()?;
        answer.text().await.ok()
    }

    async fn post(&self, path: &str, headers: &[(&str, &str)], body: impl Into<reqwest::Body>) -> u16 {
        let mut request = reqwest::Client::new()
            .post(format!("http://{}{path}", self.address))
            .body(body);
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap().status().as_u16()
    }

    /// The samples of `/metrics` by name and labels, without the role.
    async fn samples(&self) -> BTreeMap<String, f64> {
        let text = self.get("/metrics").await.unwrap();
        let samples = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let samples = samples.map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let name = name.replace("role=\"ingest\",", "").replace("{role=\"ingest\"}", "");
            (name, value.parse().unwrap())
        });
        samples.collect()
    }

    /// Waits until the sample has the value. An absent sample counts as 0.
    async fn becomes(&self, name: &str, value: f64) {
        let last = Mutex::new(BTreeMap::new());
        let within = eventually("", SOON, async || {
            *last.lock().unwrap() = self.samples().await;
            let found = last.lock().unwrap().get(name).copied().unwrap_or(0.0);
            (found == value).then_some(())
        });
        // For the error message.
        let within = std::panic::AssertUnwindSafe(within);
        if futures::FutureExt::catch_unwind(within).await.is_err() {
            panic!("{name} is not {value}: {:#?}", last.lock().unwrap());
        }
    }
}

async fn send_record(stack: &Stack, topic: &str, headers: &[(&str, &str)], key: &[u8], value: &[u8]) {
    let producer: FutureProducer = stack.kafka.config(&[]).create().unwrap();
    let mut owned = OwnedHeaders::new();
    for (key, value) in headers {
        owned = owned.insert(Header {
            key,
            value: Some(*value),
        });
    }
    let record = FutureRecord::to(topic).key(key).payload(value).headers(owned);
    producer.send(record, SOON).await.unwrap();
}

const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4737-00f067aa0ba902b7-01";
const PRODUCER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4738-00f067aa0ba902b8-01";

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_reaches_from_the_request_to_the_transaction_that_wrote_the_row() {
    let stack = Stack::start("otlp").await;
    let ingest = Process::start(&stack, false).await;
    let id = Uuid::now_v7();
    let body = json!({"id": id, "generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
    let status = ingest
        .post("/v1/feedback", &[("traceparent", CALLER)], body.to_string())
        .await;
    assert_eq!(status, 200);

    let collector = &ingest.collector;
    let request = collector.span("POST /v1/feedback", |_| true).await;
    assert_eq!(hex(&request.trace_id), CALLER[3..35]);
    assert_eq!(hex(&request.parent_span_id), CALLER[36..52]);
    let named = |id: Uuid| move |span: &Span| attribute(span, "cloudevents.event_id") == Some(id.to_string());
    let row = collector.span("ingest.store", named(id)).await;
    assert_eq!(row.trace_id, request.trace_id);
    assert_eq!(row.parent_span_id, request.span_id);
    assert_eq!(
        attribute(&row, "cloudevents.event_type").unwrap(),
        "springtide.feedback.v1"
    );
    let transaction = collector.span("ingest.transaction", |span| links_to(span, &row)).await;
    assert!(
        links_to(&row, &transaction),
        "the row's span leads to the transaction: {row:?}"
    );
    assert_eq!(attribute(&transaction, "messaging.batch.message_count").unwrap(), "1");
    let stored = "select count(*) from event_key k join feedback f on f.id::text = k.event_id";
    assert_eq!(count(&stack.pool, stored).await, 1);

    // A producer that writes directly to the log with its own trace.
    let event = generation().into_event("default", "tests/telemetry");
    let topic = stack.kafka.topics().generation;
    let headers = [("content-type", "application/protobuf"), ("traceparent", PRODUCER)];
    send_record(&stack, &topic, &headers, &event.key(), &event.encode()).await;
    let row = collector.span("ingest.store", named(event.id.parse().unwrap())).await;
    assert_eq!(hex(&row.trace_id), PRODUCER[3..35]);
    assert_eq!(hex(&row.parent_span_id), PRODUCER[36..52]);

    // A record that cannot be stored appears in its own trace.
    send_record(&stack, &topic, &headers, b"any", b"\xff\xff").await;
    let dead = collector
        .span("ingest.store", |span| attribute(span, "springtide.outcome").is_some())
        .await;
    assert_eq!(attribute(&dead, "springtide.outcome").unwrap(), "undecodable");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn feedback(generation: Uuid) -> Value {
    json!({"id": Uuid::now_v7(), "generation_id": generation, "metric_name": "accept", "value": true})
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_accepted_and_refused_events_and_their_outcomes() {
    let stack = Stack::start("metrics").await;
    let ingest = Process::start(&stack, false).await;
    let [answered, silent, early] = [generation(), generation(), generation()];

    // Feedback before its generation, then generations, then feedback after.
    let before = feedback(early.id);
    assert_eq!(ingest.post("/v1/feedback", &[], before.to_string()).await, 200);
    ingest
        .becomes("springtide_ingest_records_total{outcome=\"feedback\"}", 1.0)
        .await;
    for generation in [&answered, &silent, &early] {
        let body = serde_json::to_string(generation).unwrap();
        assert_eq!(ingest.post("/v1/generations", &[], body).await, 200);
    }
    let after = feedback(answered.id);
    assert_eq!(ingest.post("/v1/feedback", &[], after.to_string()).await, 200);
    ingest
        .becomes("springtide_ingest_records_total{outcome=\"feedback\"}", 2.0)
        .await;

    // A conflict, invalid events alone and in a batch, malformed JSON, and an undecodable record in
    // the log.
    let mut other = after.clone();
    other["value"] = json!(false);
    assert_eq!(ingest.post("/v1/feedback", &[], other.to_string()).await, 409);
    let mut wrong = feedback(answered.id);
    wrong["value"] = json!("yes");
    assert_eq!(ingest.post("/v1/feedback", &[], wrong.to_string()).await, 400);
    assert_eq!(ingest.post("/v1/feedback", &[], "{").await, 400);
    let mut good = accept(answered.id, true);
    good.time -= time::Duration::seconds(30);
    let mut items = [
        serde_json::to_value(&good).unwrap(),
        serde_json::to_value(&good).unwrap(),
    ];
    for item in &mut items {
        item.as_object_mut().unwrap().remove("tenant");
    }
    items[1]["feedback"]["value"] = json!("yes");
    items[1]["id"] = json!("another");
    assert_eq!(
        ingest.post("/v1/events:batch", &[], json!(items).to_string()).await,
        207
    );
    assert_eq!(
        ingest
            .post("/v1/feedback", &[("content-type", "text/plain")], "x")
            .await,
        415
    );
    send_record(&stack, &stack.kafka.topics().feedback, &[], b"any", b"\xff\xff").await;

    let accepted = "springtide_ingest_accepted_total";
    let refused = "springtide_ingest_refused_total";
    for (name, value) in [
        (format!("{accepted}{{kind=\"springtide.generation.v1\"}}"), 3.0),
        (format!("{accepted}{{kind=\"springtide.feedback.v1\"}}"), 3.0),
        (format!("{refused}{{reason=\"conflict\",status=\"409\"}}"), 1.0),
        (format!("{refused}{{reason=\"bad-request\",status=\"400\"}}"), 3.0),
        (
            format!("{refused}{{reason=\"unsupported-media-type\",status=\"415\"}}"),
            1.0,
        ),
        (
            "springtide_ingest_dead_letters_total{reason=\"undecodable\"}".to_owned(),
            1.0,
        ),
        (
            "springtide_ingest_records_total{outcome=\"generation\"}".to_owned(),
            3.0,
        ),
        (
            "springtide_ingest_trajectories_total{outcome=\"accept\"}".to_owned(),
            2.0,
        ),
        (
            "springtide_ingest_trajectories_total{outcome=\"no_feedback\"}".to_owned(),
            1.0,
        ),
        (
            "springtide_ingest_join_seconds_count{first=\"feedback\"}".to_owned(),
            1.0,
        ),
    ] {
        ingest.becomes(&name, value).await;
    }
    let samples = ingest.samples().await;
    let share = samples["springtide_ingest_unscored_share{surface=\"completion\"}"];
    assert!((share - 1.0 / 3.0).abs() < 1e-9, "{share}");
    assert!(samples["springtide_ingest_join_seconds_count{first=\"generation\"}"] >= 1.0);
    assert_eq!(
        samples["springtide_ingest_unscored_alarm{surface=\"completion\"}"], 0.0,
        "too few for an alarm"
    );
}

/// Combines a metric over all partitions.
fn over_partitions(samples: &BTreeMap<String, f64>, name: &str, fold: fn(f64, f64) -> f64) -> f64 {
    let partitions = samples.iter().filter(|(key, _)| key.starts_with(name));
    partitions.map(|(_, value)| *value).fold(0.0, fold)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_sink_shows_as_lag_in_records_and_seconds() {
    const EVENTS: usize = 12;
    let stack = Stack::start("lag_metrics").await;
    let ingest = Process::start(&stack, false).await;
    let lag = async || {
        let samples = ingest.samples().await;
        (
            over_partitions(&samples, "springtide_ingest_lag_records", |a, b| a + b),
            over_partitions(&samples, "springtide_ingest_lag_seconds", f64::max),
        )
    };
    send(&stack, &[generation().into_event("default", "tests/telemetry")]).await;
    eventually("it is stored", SOON, async || {
        (count(&stack.pool, "select count(*) from generation").await == 1).then_some(())
    })
    .await;

    // Only the sink is blocked by the lock.
    let mut held = edge::database::begin(&stack.pool).await.unwrap();
    sqlx::query("select from consumer_offset for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let events: Vec<Event> = (0..EVENTS)
        .map(|_| generation().into_event("default", "tests/telemetry"))
        .collect();
    send(&stack, &events).await;
    eventually("the lag shows and grows", SOON, async || {
        let (records, seconds) = lag().await;
        (records == EVENTS as f64 && seconds > 3.0).then_some(())
    })
    .await;
    held.rollback().await.unwrap();
    eventually("the lag is gone", SOON, async || {
        let (records, seconds) = lag().await;
        (records == 0.0 && seconds < 3.0).then_some(())
    })
    .await;
}

/// Texts that must not appear in logs, spans or metrics.
const CANARY: &str = "canary-7f3a";

#[tokio::test(flavor = "multi_thread")]
async fn user_text_and_keys_never_reach_logs_spans_or_metrics() {
    let stack = Stack::start("canary").await;
    let key = create_key(&stack.pool, "acme", Role::Serving, "app").await;
    let ingest = Process::start(&stack, true).await;
    let bearer = format!("Bearer {key}");
    let authorized = [("authorization", bearer.as_str()), ("traceparent", CALLER)];
    let about = Uuid::now_v7();
    let comment = json!({
        "id": Uuid::now_v7(), "generation_id": about, "metric_name": "comment", "value": format!("{CANARY}-comment"),
        "tags": {"where": format!("{CANARY}-tag"), format!("{CANARY}-tag-name"): "x"},
    });
    let generation = event_log::event::Generation {
        user_key: format!("{CANARY}-user"),
        ..generation()
    };
    let mut canonical = serde_json::to_value(accept(about, true)).unwrap();
    canonical.as_object_mut().unwrap().remove("tenant");
    canonical["feedback"]["tags"] = json!({"note": format!("{CANARY}-batch")});
    canonical["feedback"]["value"] = json!(format!("{CANARY}-not-a-boolean"));
    let mut conflict = comment.clone();
    conflict["value"] = json!(format!("{CANARY}-another"));
    let mut unknown = comment.clone();
    unknown[format!("{CANARY}-field")] = json!(1);
    for (path, body, expected) in [
        ("/v1/feedback", comment.to_string(), 200),
        ("/v1/generations", serde_json::to_string(&generation).unwrap(), 200),
        ("/v1/events:batch", json!([canonical]).to_string(), 207),
        ("/v1/feedback", unknown.to_string(), 400),
        ("/v1/feedback", format!("{{\"{CANARY}-broken"), 400),
        ("/v1/feedback?dryrun=true", conflict.to_string(), 200),
    ] {
        let status = ingest.post(path, &authorized, body).await;
        // A dry run may report the conflict already.
        assert!(
            status == expected || (path.contains("dryrun") && status == 409),
            "{path}: {status}"
        );
    }
    let data = json!({"feedback_id": Uuid::now_v7(), "generation_id": about, "metric_name": "comment",
        "value": format!("{CANARY}-cloudevent")});
    let binary = [
        ("authorization", bearer.as_str()),
        ("ce-specversion", "1.0"),
        ("ce-type", "springtide.feedback.v1"),
        ("ce-source", "app"),
        ("ce-id", "2"),
    ];
    assert_eq!(ingest.post("/v1/events", &binary, data.to_string()).await, 200);
    let wrong_key = [("authorization", "Bearer spring_canary-7f3a-key")];
    assert_eq!(ingest.post("/v1/feedback", &wrong_key, comment.to_string()).await, 401);
    ingest
        .post(&format!("/v1/feedback?{CANARY}-parameter=1"), &authorized, "{}")
        .await;
    ingest.post(&format!("/v1/{CANARY}-path"), &authorized, "{}").await;

    // Directly to the log: an undecodable record, an invalid event, a conflict.
    let topic = stack.kafka.topics().feedback;
    let json_type = [("content-type", "application/json"), ("traceparent", PRODUCER)];
    let mut broken = serde_json::to_value(accept(about, true)).unwrap();
    broken["feedback"]["value"] = json!(format!("{CANARY}-kafka-value"));
    let mut stored = serde_json::to_value(accept(about, true)).unwrap();
    stored["id"] = comment["id"].clone();
    stored["source"] = json!("springtide/api");
    stored["tenant"] = json!("acme");
    stored["feedback"]["feedback_id"] = comment["id"].clone();
    stored["feedback"]["tags"] = json!({"note": format!("{CANARY}-kafka-conflict")});
    for value in [format!("{CANARY}-poison"), broken.to_string(), stored.to_string()] {
        send_record(&stack, &topic, &json_type, b"any", value.as_bytes()).await;
    }
    ingest
        .becomes("springtide_ingest_dead_letters_total{reason=\"conflict\"}", 1.0)
        .await;
    ingest
        .becomes("springtide_ingest_dead_letters_total{reason=\"undecodable\"}", 1.0)
        .await;
    ingest
        .becomes("springtide_ingest_dead_letters_total{reason=\"invalid\"}", 1.0)
        .await;
    ingest
        .becomes("springtide_ingest_trajectories_total{outcome=\"no_feedback\"}", 1.0)
        .await;
    let metrics = ingest.get("/metrics").await.unwrap();

    // The last spans are exported at the end.
    let mut process = ingest.process;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(process.id().unwrap()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(process.wait().await.unwrap().success());
    let log = fs::read_to_string(&ingest.log).unwrap();
    let spans = String::from_utf8_lossy(&ingest.collector.bytes.lock().unwrap()).into_owned();
    assert!(log.contains("dead letter") && spans.contains("ingest.store"), "{log}");
    for (place, text) in [("a log line", &log), ("a metric", &metrics), ("a span", &spans)] {
        for secret in [CANARY, &*key] {
            let found = text
                .find(secret)
                .map(|at| text[at.saturating_sub(200)..].chars().take(300).collect::<String>());
            assert_eq!(found, None, "{secret} in {place}");
        }
    }
}
