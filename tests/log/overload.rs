//! `springtide ingest` under ten times its maximum load, with a memory limit and a broker that
//! pauses for a while.
//!
//! A hostile tenant opens many connections, sends large batches without pauses, decompression bombs
//! and endless bodies. Another tenant sends little. SPRINGTIDE_OVERLOAD_SECONDS (of each of the
//! four phases, default 3) and SPRINGTIDE_OVERLOAD_TIMES (default 10) set the size.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use edge::auth::Role;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::ingest_http::zstd_zeros;
use fixture::broker::Broker;
use fixture::ingest::{JSON, no_dead_letters};
use fixture::memory::Limit;
use fixture::{SPRINGTIDE, Stack, create_key, eventually, process};

const LONG: Duration = Duration::from_secs(600);
/// The process's memory limit: bodies in flight (64 MiB), the producer's queue (64 MiB), records
/// fetched by the sink (32 MiB), and their events.
const MEMORY_MIB: u64 = 768;
/// So many callers fill a tenant's share of the budget without being refused.
const FULL_LOAD_CALLERS: usize = 24;
/// A batch of a little more than 1 MiB.
const BATCH_EVENTS: usize = 18;
const COMMENT_BYTES: usize = 60_000;
const SLOW_BODIES: usize = 4;
const BOMBERS: usize = 4;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |number| number.parse().unwrap())
}

/// The answers to one kind of caller.
#[derive(Debug, Default)]
struct Answers {
    by_status: BTreeMap<u16, u64>,
    /// Connections that ended without an answer.
    broken: u64,
    acknowledged: BTreeSet<Uuid>,
}

impl Answers {
    fn add(&mut self, other: Self) {
        for (status, count) in other.by_status {
            *self.by_status.entry(status).or_default() += count;
        }
        self.broken += other.broken;
        self.acknowledged.extend(other.acknowledged);
    }
}

#[derive(Clone)]
struct Caller {
    http: reqwest::Client,
    address: SocketAddr,
    key: String,
}

impl Caller {
    async fn post(&self, path: &str, encoding: Option<&str>, body: Vec<u8>, answers: &mut Answers) -> Option<u16> {
        let mut request = self.http.post(format!("http://{}{path}", self.address));
        request = request.bearer_auth(&self.key).header(JSON.0, JSON.1);
        if let Some(encoding) = encoding {
            request = request.header("content-encoding", encoding);
        }
        let Ok(answer) = request.body(body).send().await else {
            answers.broken += 1;
            return None;
        };
        let status = answer.status().as_u16();
        if [429, 503].contains(&status) {
            assert!(
                answer.headers().contains_key("retry-after"),
                "{status} without Retry-After"
            );
        }
        *answers.by_status.entry(status).or_default() += 1;
        Some(status)
    }

    /// Sends batches without pauses and ignores Retry-After.
    async fn batches(self, text: Arc<str>, stop: CancellationToken) -> Answers {
        let mut answers = Answers::default();
        while !stop.is_cancelled() {
            let mut ids = Vec::new();
            let mut body = String::from("[");
            for index in 0..BATCH_EVENTS {
                let id = Uuid::now_v7();
                let comma = if index == 0 { "" } else { "," };
                body += &format!(
                    r#"{comma}{{"source":"hostile","id":"{id}","time":"2026-01-01T00:00:00Z","feedback":{{"feedback_id":"{id}","generation_id":"{id}","metric_name":"comment","value":"{text}"}}}}"#
                );
                ids.push(id);
            }
            body.push(']');
            if self
                .post("/v1/events:batch", None, body.into_bytes(), &mut answers)
                .await
                == Some(200)
            {
                answers.acknowledged.extend(ids);
            }
        }
        answers
    }

    async fn bombs(self, stop: CancellationToken) -> Answers {
        let mut answers = Answers::default();
        let bomb = zstd_zeros(1 << 30);
        while !stop.is_cancelled() {
            self.post("/v1/events:batch", Some("zstd"), bomb.clone(), &mut answers)
                .await;
        }
        answers
    }

    /// Declares 8 MiB and sends a byte now and then.
    async fn slow_body(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let Ok(mut stream) = TcpStream::connect(self.address).await else {
                continue;
            };
            let head = format!(
                "POST /v1/events:batch HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n",
                self.key,
                8 << 20
            );
            let mut sent = stream.write_all(head.as_bytes()).await;
            while sent.is_ok() && !stop.is_cancelled() {
                sent = stream.write_all(b" ").await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    /// Sends twenty small feedback events per second, each once.
    async fn quietly(self, stop: CancellationToken, accepted: Arc<AtomicU64>) -> Answers {
        let mut answers = Answers::default();
        while !stop.is_cancelled() {
            let id = Uuid::now_v7();
            let body = json!({"id": id, "generation_id": id, "metric_name": "accept", "value": true}).to_string();
            if self.post("/v1/feedback", None, body.into_bytes(), &mut answers).await == Some(200) {
                answers.acknowledged.insert(id);
                accepted.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        answers
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_times_the_load_under_a_memory_limit_is_refused_without_losing_events() {
    let part = Duration::from_secs(number("SPRINGTIDE_OVERLOAD_SECONDS", 3));
    let times = usize::try_from(number("SPRINGTIDE_OVERLOAD_TIMES", 10)).unwrap();
    let mut stack = Stack::start("overload").await;
    let state = stack.dir.path().join("broker");
    std::fs::create_dir(&state).unwrap();
    let broker = Broker::start(&stack, &state).await;
    let shared = stack.use_broker(&broker);
    let limit = Limit::new("overload", MEMORY_MIB << 20);
    let [port] = edge::bind::free_ports().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut command = std::process::Command::new(&*SPRINGTIDE);
    command
        .arg("ingest")
        .current_dir(stack.dir.path())
        .env("SPRINGTIDE__LISTEN__INGEST", address.to_string())
        .env("SPRINGTIDE__AUTH__REQUIRED", "true")
        // The keys of other roles, which the configuration needs.
        .env("SPRINGTIDE__SERVE__API_KEY", "spring_unused")
        .env("SPRINGTIDE__TRAINER__API_KEY", "spring_unused")
        .env("SPRINGTIDE__INGEST__ORPHAN_TTL_SECONDS", "86400")
        .envs(stack.kafka_environment())
        .env("SPRINGTIDE__POSTGRES__URL", &stack.database_url)
        .env("SPRINGTIDE__POSTGRES__URLS__INGEST", stack.url_of("ingest"));
    let log = stack.dir.path().join("ingest.log");
    let mut ingest = process::start(limit.hold(&command), address, &log).await;
    let pid = ingest.id().unwrap();
    let caller = async |tenant: &str| Caller {
        http: reqwest::Client::new(),
        address,
        key: create_key(&stack.pool, tenant, Role::Serving, "test").await,
    };
    let (hostile, quiet) = (caller("hostile").await, caller("quiet").await);
    let text: Arc<str> = "x".repeat(COMMENT_BYTES).into();
    let idle_kib = process::rss_kib(pid);

    // The maximum load without refusals.
    let stop = CancellationToken::new();
    let mut callers = JoinSet::new();
    for _ in 0..FULL_LOAD_CALLERS {
        callers.spawn(hostile.clone().batches(text.clone(), stop.clone()));
    }
    tokio::time::sleep(part * 2).await;
    stop.cancel();
    let mut normal = Answers::default();
    while let Some(answers) = callers.join_next().await {
        normal.add(answers.unwrap());
    }
    let normal_kib = process::rss_peak_kib(pid);
    assert_eq!(
        normal.by_status.keys().collect::<Vec<_>>(),
        [&200],
        "{:?}",
        normal.by_status
    );

    // Ten times that, with hostile requests. The broker pauses in the middle phase.
    process::forget_peak(pid);
    let stop = CancellationToken::new();
    for _ in 0..FULL_LOAD_CALLERS * times {
        callers.spawn(hostile.clone().batches(text.clone(), stop.clone()));
    }
    let mut bombs = JoinSet::new();
    for _ in 0..BOMBERS {
        bombs.spawn(hostile.clone().bombs(stop.clone()));
    }
    let mut slow = JoinSet::new();
    for _ in 0..SLOW_BODIES {
        slow.spawn(hostile.clone().slow_body(stop.clone()));
    }
    let accepted = Arc::new(AtomicU64::new(0));
    let patient = tokio::spawn(quiet.quietly(stop.clone(), accepted.clone()));
    // The quiet tenant succeeds before and after.
    let quiet_succeeds = async || {
        let before = accepted.load(Ordering::Relaxed);
        tokio::time::sleep(part).await;
        eventually("the quiet tenant succeeds", LONG, async || {
            (accepted.load(Ordering::Relaxed) > before).then_some(())
        })
        .await;
    };
    quiet_succeeds().await;
    broker.pause();
    tokio::time::sleep(part).await;
    broker.go_on();
    quiet_succeeds().await;
    stop.cancel();
    let mut overload = Answers::default();
    while let Some(answers) = callers.join_next().await {
        overload.add(answers.unwrap());
    }
    let mut bombed = Answers::default();
    while let Some(answers) = bombs.join_next().await {
        bombed.add(answers.unwrap());
    }
    let quiet = patient.await.unwrap();
    let overload_kib = process::rss_peak_kib(pid);

    let mib = |kib: u64| kib as f64 / 1024.0;
    let ratio = overload_kib as f64 / normal_kib as f64;
    println!(
        "overload: {times} x {FULL_LOAD_CALLERS} callers of {} KiB, four parts of {part:?}, limit {MEMORY_MIB} MiB by {}\n\
         resident: idle {:.0} MiB, at full load {:.0} MiB, at overload {:.0} MiB, {ratio:.2} times\n\
         full load {:?}\noverload  {:?}, {} broken\nbombs     {:?}, {} broken\nquiet     {:?}, {} broken",
        BATCH_EVENTS * COMMENT_BYTES / 1024,
        limit.kind(),
        mib(idle_kib),
        mib(normal_kib),
        mib(overload_kib),
        normal.by_status,
        overload.by_status,
        overload.broken,
        bombed.by_status,
        bombed.broken,
        quiet.by_status,
        quiet.broken
    );
    let allowed = |answers: &Answers, allowed: &[u16]| {
        assert!(
            answers.by_status.keys().all(|status| allowed.contains(status)),
            "{:?}",
            answers.by_status
        );
    };
    allowed(&overload, &[200, 429, 503]);
    allowed(&bombed, &[413, 429, 503]);
    // A tenant that holds nothing always has room. It is refused only while the log is unavailable.
    allowed(&quiet, &[200, 503]);
    assert!(overload.by_status.contains_key(&429), "there was no overload");
    assert!(ingest.try_wait().unwrap().is_none(), "ingest has ended");
    assert!(matches!(limit.kills(), None | Some(0)));

    let mut acknowledged = normal.acknowledged;
    acknowledged.extend(overload.acknowledged);
    acknowledged.extend(quiet.acknowledged);
    let started = Instant::now();
    eventually("all acknowledged events are stored", LONG, async || {
        let query = "select id from feedback";
        let stored: Vec<Uuid> = sqlx::query_scalar(query).fetch_all(&stack.pool).await.unwrap();
        let stored: BTreeSet<Uuid> = stored.into_iter().collect();
        acknowledged.is_subset(&stored).then_some(())
    })
    .await;
    no_dead_letters(&stack).await;
    println!(
        "{} events acknowledged, 0 lost; stored {:?} after the last",
        acknowledged.len(),
        started.elapsed()
    );
    ingest.kill().await.unwrap();
    (stack.kafka, stack.kafka_file) = shared;
    drop((limit, broker));
}
