//! A collector in front of a real ingest: every event that it acknowledges is finally stored, even
//! if it is killed.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use edge::auth::{Auth, AuthOptions};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use fixture::{SPRINGTIDE, Stack, eventually};

const SOON: Duration = Duration::from_secs(90);

/// Runs an ingest role until dropped.
pub fn ingest(stack: &Stack, listener: TcpListener) -> DropGuard {
    let stop = CancellationToken::new();
    tokio::spawn(ingest::run(
        ingest::Options::default(),
        stack.kafka.clone(),
        stack.pool_of("ingest"),
        Auth::new(AuthOptions::default(), stack.pool_of("ingest")),
        listener.into(),
        axum::Router::new(),
        stop.clone(),
    ));
    stop.drop_guard()
}

pub struct Collector {
    pub process: Child,
    pub address: SocketAddr,
}

impl Collector {
    pub async fn start(folder: &Path, upstream: SocketAddr, key: Option<&str>) -> Self {
        let [port] = edge::bind::free_ports().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut command = Command::new(&*SPRINGTIDE);
        command
            .args(["ingest", "--upstream", &format!("http://{upstream}"), "--spool"])
            .arg(folder.join("spool"))
            .current_dir(folder)
            .env("SPRINGTIDE__LISTEN__INGEST", address.to_string())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        if let Some(key) = key {
            command.env("SPRINGTIDE__SPOOL__CALLER_KEY", key);
        }
        let process = command.spawn().unwrap();
        eventually("the collector answers", SOON, async || {
            let health = reqwest::get(format!("http://{address}/health")).await;
            health.is_ok_and(|answer| answer.status() == 200).then_some(())
        })
        .await;
        Self { process, address }
    }

    async fn post(&self, body: &Value, key: Option<&str>) -> reqwest::Response {
        let mut request = reqwest::Client::new()
            .post(format!("http://{}/v1/feedback", self.address))
            .json(body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        request.send().await.unwrap()
    }
}

fn feedback(id: Uuid) -> Value {
    json!({"id": id, "generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true})
}

async fn rows(stack: &Stack) -> i64 {
    sqlx::query_scalar("select count(*) from feedback")
        .fetch_one(&stack.pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_a_killed_collector_acknowledged_are_stored_once_and_refused_ones_are_kept() {
    const EVENTS: i64 = 30;
    let stack = Stack::start("spool").await;
    // The upstream is not running yet.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    drop(listener);
    let mut collector = Collector::start(stack.dir.path(), upstream, None).await;
    let first = Uuid::now_v7();
    for index in 0..EVENTS {
        let id = if index == 0 { first } else { Uuid::now_v7() };
        let answer = collector.post(&feedback(id), None).await;
        assert_eq!(answer.status(), 202);
        assert_eq!(answer.headers()["springtide-acknowledged"], "spooled");
    }
    collector.process.kill().await.unwrap();

    let _ingest = ingest(&stack, TcpListener::bind(upstream).await.unwrap());
    let collector = Collector::start(stack.dir.path(), upstream, None).await;
    eventually("everything is stored", SOON, async || {
        (rows(&stack).await == EVENTS).then_some(())
    })
    .await;
    let source: String = sqlx::query_scalar("select distinct source from event_key")
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(source, "springtide/api");

    // Another body under a stored id: only the upstream can detect the conflict.
    let answer = collector.post(&feedback(first), None).await;
    assert_eq!(answer.status(), 202);
    let refused = stack.dir.path().join("spool/refused.jsonl");
    let line = eventually("the refusal is kept", SOON, async || {
        std::fs::read_to_string(&refused)
            .ok()
            .filter(|text| text.ends_with('\n'))
    })
    .await;
    let line: Value = serde_json::from_str(line.trim()).unwrap();
    assert_eq!((&line["status"], &line["event"]["id"]), (&json!(409), &json!(first)));
    assert_eq!(rows(&stack).await, EVENTS);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_checks_events_and_requires_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = SocketAddr::from(([127, 0, 0, 1], 9));
    let key = Some("spring_caller");
    let collector = Collector::start(folder.path(), nobody, key).await;
    let valid = feedback(Uuid::now_v7());
    assert_eq!(collector.post(&valid, None).await.status(), 401);
    assert_eq!(collector.post(&valid, key).await.status(), 202);
    let mut dry = valid.clone();
    dry["dryrun"] = true.into();
    let answer = collector.post(&dry, key).await;
    assert_eq!(answer.status(), 501, "a collector has no tables");
    assert!(!answer.headers().contains_key("springtide-acknowledged"));
    let mut wrong = valid.clone();
    wrong["value"] = "yes".into();
    assert_eq!(collector.post(&wrong, key).await.status(), 400);
    let metrics = reqwest::get(format!("http://{}/metrics", collector.address))
        .await
        .unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(metrics.contains("springtide_spool_oldest_event_seconds"), "{metrics}");
}
