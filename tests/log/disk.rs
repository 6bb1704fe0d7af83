//! Full disks: the spool's, Postgres' and the broker's. No acknowledged event is lost, and work
//! continues once there is room. SPRINGTIDE_DISK_FILLS=50 is the full size (default 3). Needs root
//! to mount small file systems.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rand::Rng;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tokio::net::TcpListener;
use uuid::Uuid;

use crate::spool::{Collector, ingest};
use fixture::broker::Broker;
use fixture::disk::Disk;
use fixture::ingest::{Service, no_dead_letters, options};
use fixture::{Stack, eventually};

const LONG: Duration = Duration::from_secs(600);
/// Concurrent callers.
const CALLERS: usize = 8;

fn fills() -> u32 {
    std::env::var("SPRINGTIDE_DISK_FILLS").map_or(3, |fills| fills.parse().unwrap())
}

/// An incompressible comment of `bytes` bytes.
fn comment(id: Uuid, bytes: usize) -> Value {
    let mut random = rand::rng();
    let text: String = (0..bytes)
        .map(|_| char::from(random.random_range(b'0'..=b'z')))
        .collect();
    json!({"id": id, "generation_id": Uuid::now_v7(), "metric_name": "comment", "value": text})
}

/// The answers to one caller.
#[derive(Default)]
struct Answers {
    acknowledged: BTreeSet<Uuid>,
    refused: u64,
}

/// Several callers post comments until `enough`. Every answer must be an acknowledgement, or a
/// refusal with Retry-After.
async fn post_until(url: &str, bytes: usize, enough: impl Fn(&Answers) -> bool + Clone + Send + 'static) -> Answers {
    let client = reqwest::Client::new();
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..CALLERS {
        let (client, url, enough) = (client.clone(), format!("{url}/v1/feedback"), enough.clone());
        callers.spawn(async move {
            let mut answers = Answers::default();
            let started = Instant::now();
            while !enough(&answers) {
                assert!(started.elapsed() < LONG, "{} acknowledged", answers.acknowledged.len());
                let id = Uuid::now_v7();
                // After a broken connection the outcome is unknown.
                let Ok(answer) = client.post(&url).json(&comment(id, bytes)).send().await else {
                    continue;
                };
                let status = answer.status().as_u16();
                if answer.status().is_success() {
                    answers.acknowledged.insert(id);
                } else {
                    assert!(
                        [429, 503].contains(&status),
                        "{status}: {}",
                        answer.text().await.unwrap()
                    );
                    assert!(answer.headers().contains_key("retry-after"), "{status}");
                    answers.refused += 1;
                }
            }
            answers
        });
    }
    let mut total = Answers::default();
    while let Some(answers) = callers.join_next().await {
        let answers = answers.unwrap();
        total.acknowledged.extend(answers.acknowledged);
        total.refused += answers.refused;
    }
    total
}

async fn stored(pool: &PgPool) -> BTreeSet<Uuid> {
    let ids: Vec<Uuid> = sqlx::query_scalar("select id from feedback")
        .fetch_all(pool)
        .await
        .unwrap();
    ids.into_iter().collect()
}

async fn all_stored(stack: &Stack, acknowledged: &BTreeSet<Uuid>) {
    eventually("all acknowledged events are stored", LONG, async || {
        acknowledged.is_subset(&stored(&stack.pool).await).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_with_a_full_disk_refuses_events_until_there_is_room() {
    let Some(disk) = Disk::mount(2) else { return };
    let stack = Stack::start("disk_spool").await;
    // The upstream is not running, so no event leaves the spool.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    drop(listener);
    let mut collector = Collector::start(disk.path(), upstream, None).await;
    let mut acknowledged = BTreeSet::new();
    let fills = fills();
    for fill in 0..fills {
        disk.resize(2 * (fill + 1));
        let url = format!("http://{}", collector.address);
        // Events that are larger and smaller than the remaining room.
        for bytes in [40_000, 400] {
            let answers = post_until(&url, bytes, |answers| answers.refused >= 3).await;
            assert!(
                bytes < 40_000 || !answers.acknowledged.is_empty(),
                "no event was accepted at fill {fill}"
            );
            acknowledged.extend(answers.acknowledged);
        }
        if fill % 2 == 0 {
            // A collector also starts with a full disk.
            collector.process.kill().await.unwrap();
            collector = Collector::start(disk.path(), upstream, None).await;
        }
    }
    let _ingest = ingest(&stack, TcpListener::bind(upstream).await.unwrap());
    all_stored(&stack, &acknowledged).await;
    // The freed space is enough again.
    let url = format!("http://{}", collector.address);
    let answers = post_until(&url, 400, |answers| answers.acknowledged.len() >= 3).await;
    all_stored(&stack, &answers.acknowledged).await;
    println!(
        "{fills} fills of a collector's disk: {} acknowledged, 0 lost",
        acknowledged.len()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_of_postgres_delays_the_sink_without_losing_events() {
    let Some(disk) = Disk::mount(1) else { return };
    let stack = Stack::start("disk_postgres").await;
    let folder = disk.path().join("tablespace");
    std::fs::create_dir(&folder).unwrap();
    // Started by root, Postgres runs as this user.
    std::os::unix::fs::chown(&folder, Some(65530), Some(65530)).unwrap();
    let tablespace = format!("small_{}", Uuid::now_v7().simple());
    let make = format!("create tablespace {tablespace} location '{}'", folder.display());
    stack.pool.execute(AssertSqlSafe(make)).await.unwrap();
    let moved = format!("alter table feedback set tablespace {tablespace}");
    stack.pool.execute(AssertSqlSafe(moved)).await.unwrap();
    let service = Service::start_with(&stack, options()).await;
    let url = format!("http://{}", service.address);
    let mut acknowledged = BTreeSet::new();
    let fills = fills();
    for fill in 0..fills {
        disk.resize(2 * (fill + 1));
        // More than fits on the disk. All of it is in the log.
        let answers = post_until(&url, 40_000, |answers| answers.acknowledged.len() >= 10).await;
        acknowledged.extend(answers.acknowledged);
        let full = nix::sys::statvfs::statvfs(disk.path()).unwrap();
        println!(
            "fill {fill}: {} of {} blocks free",
            full.blocks_available(),
            full.blocks()
        );
        let waiting = acknowledged.len() - stored(&stack.pool).await.len();
        assert!(waiting > 0, "the disk is not full");
    }
    disk.resize(64 + 8 * fills);
    all_stored(&stack, &acknowledged).await;
    service.stop().await;
    no_dead_letters(&stack).await;
    println!(
        "{fills} fills of Postgres' disk: {} acknowledged, 0 lost",
        acknowledged.len()
    );
    let url = stack.database_url.clone();
    drop(stack);
    let (server, _) = url.rsplit_once('/').unwrap();
    let mut admin = PgConnection::connect(&format!("{server}/postgres")).await.unwrap();
    let drop_tablespace = format!("drop tablespace {tablespace}");
    admin.execute(AssertSqlSafe(drop_tablespace)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_of_the_broker_is_a_503_without_losing_events() {
    let Some(disk) = Disk::mount(96) else { return };
    let mut stack = Stack::start("disk_broker").await;
    let state = disk.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let broker = Broker::start(&stack, &state).await;
    let shared = stack.use_broker(&broker);
    let service = Service::start_with(&stack, options()).await;
    let url = format!("http://{}", service.address);
    let mut acknowledged = BTreeSet::new();
    // The broker ends each time its only disk is full, and is restarted until there is room.
    let fills = fills().min(10);
    for _ in 0..fills {
        let answers = post_until(&url, 40_000, |answers| answers.acknowledged.len() >= 3).await;
        acknowledged.extend(answers.acknowledged);
        let ballast = disk.fill();
        let answers = post_until(&url, 40_000, |answers| answers.refused >= 3).await;
        acknowledged.extend(answers.acknowledged);
        std::fs::remove_file(ballast).unwrap();
    }
    let answers = post_until(&url, 400, |answers| answers.acknowledged.len() >= 3).await;
    acknowledged.extend(answers.acknowledged);
    all_stored(&stack, &acknowledged).await;
    service.stop().await;
    println!(
        "{fills} fills of the broker's disk: {} acknowledged, 0 lost",
        acknowledged.len()
    );
    (stack.kafka, stack.kafka_file) = shared;
}
