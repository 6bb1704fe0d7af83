//! `springtide dlq` with a real broker, and an ingest service that writes dead letters and stores
//! replayed events. The same over HTTP, and on the page of `control`.

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use edge::auth::{Auth, AuthOptions, Role};
use event_log::Producer;
use event_log::event::{self, Event, Feedback, Target, Value};
use ingest::reward::{Definition, MetricType};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use fixture::control::Control;
use fixture::{SPRINGTIDE, Stack, create_key, eventually};

const SOON: Duration = Duration::from_secs(90);
const SECRET: &str = "what the user wrote";

struct Service {
    stop: DropGuard,
    running: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Service {
    async fn start(stack: &Stack, metric_type: MetricType) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stop = CancellationToken::new();
        let options = ingest::Options {
            surface: vec![Definition {
                metric_type,
                ..Definition::completion()
            }],
            orphan_ttl_seconds: 1.0,
            ..ingest::Options::default()
        };
        let running = tokio::spawn(ingest::run(
            options,
            stack.kafka.clone(),
            stack.pool_of("ingest"),
            Auth::new(AuthOptions::default(), stack.pool_of("ingest")),
            listener.into(),
            axum::Router::new(),
            stop.clone(),
        ));
        Self {
            stop: stop.drop_guard(),
            running,
        }
    }

    async fn stop(self) {
        drop(self.stop);
        self.running.await.unwrap().unwrap();
    }
}

fn feedback(metric: &str, value: Value) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target: Target::Generation(Uuid::now_v7()),
        metric_name: metric.to_owned(),
        value,
        tags: Default::default(),
    };
    feedback.into_event("default", "tests/dlq", event::now())
}

async fn send_raw(stack: &Stack, content_type: &str, value: &[u8]) {
    let producer: FutureProducer = stack.kafka.config(&[]).create().unwrap();
    let headers = OwnedHeaders::new().insert(Header {
        key: "content-type",
        value: Some(content_type),
    });
    let topic = stack.kafka.topics().feedback;
    let record = FutureRecord::to(&topic).key("any").payload(value).headers(headers);
    producer.send(record, SOON).await.unwrap();
}

async fn dlq(stack: &Stack, words: &[&str]) -> Output {
    Command::new(&*SPRINGTIDE)
        .arg("dlq")
        .args(words)
        .current_dir(stack.dir.path())
        .envs(stack.kafka_environment())
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a command that must succeed, and returns its output.
async fn ok(stack: &Stack, words: &[&str]) -> String {
    let output = dlq(stack, words).await;
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that must fail, and returns its error.
async fn refused(stack: &Stack, words: &[&str]) -> String {
    let output = dlq(stack, words).await;
    assert!(!output.status.success(), "{words:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

/// Waits for `count` dead letters and returns the list.
async fn listed(stack: &Stack, words: &[&str], count: usize) -> Vec<serde_json::Value> {
    let words = [&["list", "--json"], words].concat();
    let started = Instant::now();
    loop {
        let rows: Vec<serde_json::Value> = serde_json::from_str(&ok(stack, &words).await).unwrap();
        if rows.len() == count {
            return rows;
        }
        assert!(
            started.elapsed() < SOON,
            "expected {count} dead letters, found {rows:#?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn rows(stack: &Stack) -> i64 {
    sqlx::query_scalar("select count(*) from feedback")
        .fetch_one(&stack.pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_can_be_replayed_unchanged_and_replaying_twice_is_harmless() {
    let stack = Stack::start("dlq_replay").await;
    let service = Service::start(&stack, MetricType::Boolean).await;
    let event = feedback("accept", Value::Float(0.5));
    Producer::new(&stack.kafka).unwrap().send_event(&event).await.unwrap();
    let records = listed(&stack, &["--open", "--cause", "invalid", "--topic", "feedback"], 1).await;
    let place = records[0]["letter"].as_str().unwrap();
    assert_eq!(records[0]["id"], event.id);
    assert_eq!(records[0]["kind"], "feedback");
    service.stop().await;

    // The surface accepts floats now.
    let service = Service::start(&stack, MetricType::Float).await;
    let unasked = refused(&stack, &["replay", "--cause", "invalid"]).await;
    assert!(
        unasked.contains("records to put back: 1") && unasked.contains("--yes"),
        "{unasked}"
    );
    let done = ok(&stack, &["replay", "--cause", "invalid", "--yes"]).await;
    assert!(done.starts_with(place), "{done}");
    eventually("the feedback is stored", SOON, async || {
        (rows(&stack).await == 1).then_some(())
    })
    .await;
    assert!(listed(&stack, &["--open", "--cause", "invalid"], 0).await.is_empty());
    let replayed = listed(&stack, &["--cause", "invalid"], 1).await;
    assert_eq!(replayed[0]["replayed"]["topic"], stack.kafka.topics().feedback);
    assert_eq!(replayed[0]["replayed"]["edited"], false);

    // Replaying by cause finds nothing more. Replaying by place sends it again, without effect.
    assert_eq!(ok(&stack, &["replay", "--cause", "invalid", "--yes"]).await, "");
    ok(&stack, &["replay", place, "--yes"]).await;
    ok(&stack, &["replay", place, "--yes"]).await;
    let after = feedback("comment", Value::Text("last".to_owned()));
    Producer::new(&stack.kafka).unwrap().send_event(&after).await.unwrap();
    eventually("the sink has read it", SOON, async || {
        (rows(&stack).await == 2).then_some(())
    })
    .await;
    assert_eq!(listed(&stack, &["--cause", "conflict"], 0).await.len(), 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repaired_event_is_stored_instead_of_the_dead_letter() {
    let stack = Stack::start("dlq_edit").await;
    let service = Service::start(&stack, MetricType::Boolean).await;
    let mut broken = serde_json::to_value(feedback("comment", Value::Text(SECRET.to_owned()))).unwrap();
    broken["feedback"]["tags"] = json!(SECRET);
    send_raw(&stack, "application/json", broken.to_string().as_bytes()).await;
    let records = listed(&stack, &[], 1).await;
    let place = records[0]["letter"].as_str().unwrap();
    for words in [&["list"][..], &["list", "--json"]] {
        let list = ok(&stack, words).await;
        assert!(list.contains("undecodable") && !list.contains(SECRET), "{list}");
    }

    let shown = ok(&stack, &["show", place]).await;
    let mut event: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(event, broken);
    let raw = stack.dir.path().join("raw");
    ok(&stack, &["show", place, "--raw", raw.to_str().unwrap()]).await;
    assert_eq!(std::fs::read(&raw).unwrap(), broken.to_string().as_bytes());

    let file = stack.dir.path().join("event.json");
    let edit = ["replay", place, "--yes", "--edit", file.to_str().unwrap()];
    std::fs::write(&file, "{").unwrap();
    assert!(refused(&stack, &edit).await.contains("springtide dlq show"));
    event["feedback"]["tags"] = json!({});
    std::fs::write(&file, event.to_string()).unwrap();
    ok(&stack, &edit).await;
    eventually("the repaired feedback is stored", SOON, async || {
        (rows(&stack).await == 1).then_some(())
    })
    .await;
    // Its generation never arrives, so another dead letter with another reason will follow.
    let replayed = listed(&stack, &["--cause", "undecodable"], 1).await;
    assert_eq!(replayed[0]["replayed"]["edited"], true);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_replay_explains_what_to_do() {
    let stack = Stack::start("dlq_errors").await;
    let empty = refused(&stack, &["show", "0/0"]).await;
    assert!(empty.contains("holds no"), "{empty}");
    assert_eq!(ok(&stack, &["list"]).await, "");

    let service = Service::start(&stack, MetricType::Boolean).await;
    let orphan = feedback("accept", Value::Bool(true));
    Producer::new(&stack.kafka).unwrap().send_event(&orphan).await.unwrap();
    let records = listed(&stack, &["--cause", "orphan"], 1).await;
    assert_eq!(records[0]["topic"], serde_json::Value::Null);
    let output = dlq(&stack, &["replay", "--cause", "orphan", "--yes"]).await;
    let error = text(&output.stderr);
    assert!(
        output.status.success() && error.contains("send the generation"),
        "{error}"
    );
    let unknown = refused(&stack, &["replay", "0/99", "--yes"]).await;
    assert!(unknown.contains("0/99"), "{unknown}");
    let unknown = refused(&stack, &["show", "7/0"]).await;
    assert!(unknown.contains("no partition 7"), "{unknown}");
    service.stop().await;
}

/// The control role, with a key.
struct Caller<'a> {
    control: &'a Control,
    key: String,
}

impl Caller<'_> {
    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.control.port)
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let request = reqwest::Client::new().get(self.url(path)).bearer_auth(&self.key);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn list(&self, query: &str) -> serde_json::Value {
        let (status, answer) = self.get(&format!("/v1/dead-letters?{query}")).await;
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    async fn replay(&self, body: serde_json::Value) -> (u16, serde_json::Value) {
        let request = reqwest::Client::new().post(self.url("/v1/dead-letters/replay"));
        let answer = request.bearer_auth(&self.key).json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_administrator_lists_dead_letters_and_puts_them_back_over_http_and_the_audit_says_why() {
    let stack = Stack::start("dlq_http").await;
    let required = [
        ("SPRINGTIDE__AUTH__REQUIRED", "true"),
        ("SPRINGTIDE__SERVE__API_KEY", "unused"),
        ("SPRINGTIDE__TRAINER__API_KEY", "unused"),
    ];
    let control = Control::start(&stack, &required).await;
    let admin = Caller {
        control: &control,
        key: create_key(&stack.pool, "default", Role::Admin, "ada").await,
    };
    let release = Caller {
        control: &control,
        key: create_key(&stack.pool, "default", Role::Release, "bob").await,
    };
    assert_eq!(admin.list("open=true").await["records"], json!([]));

    let service = Service::start(&stack, MetricType::Boolean).await;
    let event = feedback("accept", Value::Float(0.5));
    Producer::new(&stack.kafka).unwrap().send_event(&event).await.unwrap();
    let mut broken = serde_json::to_value(feedback("comment", Value::Text(SECRET.to_owned()))).unwrap();
    broken["feedback"]["tags"] = json!(SECRET);
    send_raw(&stack, "application/json", broken.to_string().as_bytes()).await;
    let found = eventually("both are listed", SOON, async || {
        let found = admin.list("open=true").await;
        (found["matching"] == 2).then_some(found)
    })
    .await;
    assert!(!found.to_string().contains(SECRET), "{found}");
    assert_eq!(found["causes"]["invalid"], json!({"all": 1, "open": 1}));
    assert_eq!(found["truncated"], false);
    for limit in [0, 201] {
        assert_eq!(admin.get(&format!("/v1/dead-letters?limit={limit}")).await.0, 400);
    }
    let found = admin.list("cause=invalid&topic=feedback&since=1h&limit=1").await;
    assert_eq!(found["records"][0]["id"], event.id);
    let letter = found["records"][0]["letter"].as_str().unwrap();
    let (status, page) = admin.get("/feedback/dead-letters").await;
    assert_eq!(status, 200, "{page}");
    for part in [
        letter,
        "undecodable",
        &event.id,
        "Put back all (invalid)",
        "/v1/dead-letters/replay",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains(SECRET), "{page}");

    // a key without the scope sees and changes nothing, and what cannot be done says why
    for path in ["/v1/dead-letters", "/feedback/dead-letters"] {
        assert_eq!(release.get(path).await.0, 403, "{path}");
    }
    let request = json!({"records": [letter], "reason": "the surface takes floats now"});
    assert_eq!(release.replay(request.clone()).await.0, 403);
    for (wrong, status) in [
        (json!({"records": [letter]}), 400),
        (json!({"records": [letter], "reason": " "}), 400),
        (json!({"reason": "which?"}), 400),
        (json!({"records": ["0/99"], "reason": "a typo"}), 404),
        (json!({"cause": "conflict", "reason": "there is none"}), 404),
    ] {
        let (answered, problem) = admin.replay(wrong).await;
        assert_eq!(answered, status, "{problem}");
    }

    service.stop().await;
    let service = Service::start(&stack, MetricType::Float).await;
    let (status, answer) = admin.replay(request).await;
    assert_eq!(
        (status, &answer["count"], &answer["left"]),
        (200, &1.into(), &0.into()),
        "{answer}"
    );
    assert_eq!(answer["put_back"][0]["topic"], stack.kafka.topics().feedback);
    eventually("the feedback is stored", SOON, async || {
        (rows(&stack).await == 1).then_some(())
    })
    .await;
    let found = admin.list("cause=invalid&open=true").await;
    assert_eq!(
        (&found["records"], &found["causes"]["invalid"]),
        (&json!([]), &json!({"all": 1, "open": 0}))
    );
    let found = admin.list("cause=invalid").await;
    let (put_back, replayed) = (&answer["put_back"][0], &found["records"][0]["replayed"]);
    assert_eq!(
        (&replayed["partition"], &replayed["offset"]),
        (&put_back["partition"], &put_back["offset"]),
        "{found}"
    );
    let (status, problem) = admin.replay(json!({"cause": "invalid", "reason": "again"})).await;
    assert_eq!(status, 404, "{problem}");

    // its generation never arrives, and the dead letter about that is made from a row
    eventually("the orphan is listed", SOON, async || {
        (admin.list("cause=orphan").await["matching"] == 1).then_some(())
    })
    .await;
    let (status, problem) = admin.replay(json!({"cause": "orphan", "reason": "try"})).await;
    let detail = problem["detail"].as_str().unwrap();
    assert!(status == 409 && detail.contains("send the generation"), "{problem}");
    let audit = "select actor, subject, reason from audit where action = 'dead_letter.replay' order by id";
    let audit: Vec<(String, String, String)> = sqlx::query_as(audit).fetch_all(&stack.pool).await.unwrap();
    let expected = (
        "ada".to_owned(),
        letter.to_owned(),
        "the surface takes floats now".to_owned(),
    );
    assert_eq!(audit, [expected]);
    service.stop().await;
}
