//! Disks that fill: the spool's of a collector, Postgres' and the broker's. Nothing is acknowledged that would be lost, and
//! with room again everything goes on. SPRINGTIDE_DISK_FILLS=50 is the full size (default 3); needs root, to mount small
//! file systems.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rand::Rng;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tokio::net::TcpListener;
use uuid::Uuid;

use crate::ingest::{Service, no_dead_letters, options};
use crate::spool::{Collector, ingest};
use crate::support::broker::Broker;
use crate::support::disk::Disk;
use crate::support::{Stack, eventually};

const LONG: Duration = Duration::from_secs(600);
/// Feedback posted at once.
const CALLERS: usize = 8;

fn fills() -> u32 {
    std::env::var("SPRINGTIDE_DISK_FILLS").map_or(3, |fills| fills.parse().unwrap())
}

/// A comment that does not compress, `bytes` long.
fn comment(id: Uuid, bytes: usize) -> Value {
    let mut random = rand::rng();
    let text: String = (0..bytes)
        .map(|_| char::from(random.random_range(b'0'..=b'z')))
        .collect();
    json!({"id": id, "generation_id": Uuid::now_v7(), "metric_name": "comment", "value": text})
}

/// What one caller was told.
#[derive(Default)]
struct Told {
    acknowledged: BTreeSet<Uuid>,
    refused: u64,
}

/// Posts comments until `enough`, several at once, and holds every answer to the promise: taken, or refused with when to
/// come again.
async fn post_until(url: &str, bytes: usize, enough: impl Fn(&Told) -> bool + Clone + Send + 'static) -> Told {
    let client = reqwest::Client::new();
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..CALLERS {
        let (client, url, enough) = (client.clone(), format!("{url}/v1/feedback"), enough.clone());
        callers.spawn(async move {
            let mut told = Told::default();
            let started = Instant::now();
            while !enough(&told) {
                assert!(started.elapsed() < LONG, "{} taken", told.acknowledged.len());
                let id = Uuid::now_v7();
                // A broken connection says nothing about the event.
                let Ok(answer) = client.post(&url).json(&comment(id, bytes)).send().await else {
                    continue;
                };
                let status = answer.status().as_u16();
                if answer.status().is_success() {
                    told.acknowledged.insert(id);
                } else {
                    assert!(
                        [429, 503].contains(&status),
                        "{status}: {}",
                        answer.text().await.unwrap()
                    );
                    assert!(answer.headers().contains_key("retry-after"), "{status}");
                    told.refused += 1;
                }
            }
            told
        });
    }
    let mut all = Told::default();
    while let Some(told) = callers.join_next().await {
        let told = told.unwrap();
        all.acknowledged.extend(told.acknowledged);
        all.refused += told.refused;
    }
    all
}

async fn stored(pool: &PgPool) -> BTreeSet<Uuid> {
    let ids: Vec<Uuid> = sqlx::query_scalar("select id from feedback")
        .fetch_all(pool)
        .await
        .unwrap();
    ids.into_iter().collect()
}

async fn all_stored(stack: &Stack, acknowledged: &BTreeSet<Uuid>) {
    eventually("everything that was acknowledged is stored", LONG, async || {
        acknowledged.is_subset(&stored(&stack.pool).await).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collectors_full_disk_refuses_before_it_acknowledges_and_goes_on_with_room() {
    let Some(disk) = Disk::mount(2) else { return };
    let stack = Stack::start("disk_spool").await;
    // Nobody listens there yet, so that nothing leaves the spool.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    drop(listener);
    let mut collector = Collector::start(disk.path(), upstream, None).await;
    let mut acknowledged = BTreeSet::new();
    let fills = fills();
    for fill in 0..fills {
        disk.resize(2 * (fill + 1));
        let url = format!("http://{}", collector.address);
        // Larger and smaller events than what is left.
        for bytes in [40_000, 400] {
            let told = post_until(&url, bytes, |told| told.refused >= 3).await;
            assert!(
                bytes < 40_000 || !told.acknowledged.is_empty(),
                "it took nothing at fill {fill}"
            );
            acknowledged.extend(told.acknowledged);
        }
        if fill % 2 == 0 {
            // Also what finds a full disk when it starts.
            collector.process.kill().await.unwrap();
            collector = Collector::start(disk.path(), upstream, None).await;
        }
    }
    let _ingest = ingest(&stack, TcpListener::bind(upstream).await.unwrap());
    all_stored(&stack, &acknowledged).await;
    // Its own room is enough again.
    let url = format!("http://{}", collector.address);
    let told = post_until(&url, 400, |told| told.acknowledged.len() >= 3).await;
    all_stored(&stack, &told.acknowledged).await;
    println!(
        "{fills} fills of a collector's disk: {} acknowledged, 0 lost",
        acknowledged.len()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_of_postgres_holds_up_the_tables_and_loses_nothing() {
    let Some(disk) = Disk::mount(1) else { return };
    let stack = Stack::start("disk_postgres").await;
    let folder = disk.path().join("tablespace");
    std::fs::create_dir(&folder).unwrap();
    // Run by root, Postgres is `nobody`.
    std::os::unix::fs::chown(&folder, Some(65534), Some(65534)).unwrap();
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
        // More than there is room for; all of it is in the log.
        let told = post_until(&url, 40_000, |told| told.acknowledged.len() >= 10).await;
        acknowledged.extend(told.acknowledged);
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
    let gone = format!("drop tablespace {tablespace}");
    admin.execute(AssertSqlSafe(gone)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_of_the_broker_is_a_503_and_not_a_loss() {
    let Some(disk) = Disk::mount(96) else { return };
    let mut stack = Stack::start("disk_broker").await;
    let shared = stack.kafka.brokers.clone();
    let state = disk.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let broker = Broker::start(&stack, &state).await;
    stack.kafka.brokers = broker.address.clone();
    let service = Service::start_with(&stack, options()).await;
    let url = format!("http://{}", service.address);
    let mut acknowledged = BTreeSet::new();
    // Each time the broker gives up its only disk, and is started again until there is room.
    let fills = fills().min(10);
    for _ in 0..fills {
        let told = post_until(&url, 40_000, |told| told.acknowledged.len() >= 3).await;
        acknowledged.extend(told.acknowledged);
        let ballast = disk.fill();
        let told = post_until(&url, 40_000, |told| told.refused >= 3).await;
        acknowledged.extend(told.acknowledged);
        std::fs::remove_file(ballast).unwrap();
    }
    let told = post_until(&url, 400, |told| told.acknowledged.len() >= 3).await;
    acknowledged.extend(told.acknowledged);
    all_stored(&stack, &acknowledged).await;
    service.stop().await;
    println!(
        "{fills} fills of the broker's disk: {} acknowledged, 0 lost",
        acknowledged.len()
    );
    stack.kafka.brokers = shared;
}
