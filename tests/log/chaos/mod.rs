//! No event is lost or duplicated while ingest, the broker and Postgres are killed at random under
//! load. A client records what it sent and which answers it got, a driver kills processes, and
//! finally the tables are compared with the record.
//!
//! `make chaos NAME=ingest` runs it longer: `SPRINGTIDE_CHAOS_KILLS`, `_MINUTES`, `_RATE` (events per
//! second), `_SEED`, `_SWAPS` (recreated clusters), and `_REPLICATED` for three brokers and a Postgres with a standby, as in
//! production: `make chaos NAME=replicated`. The figures are also in
//! `target/chaos/ingest.json`.

mod audit;
mod client;
mod cluster;
mod driver;
mod ledger;
mod report;
mod stories;

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio_util::sync::CancellationToken;

use audit::{ORPHANS_UNMARKED, audit, behind, number};
use client::Client;
use driver::Driver;
use fixture::eventually;
use fixture::servers::{Ingest, Servers};
use ledger::Ledger;
use report::Report;

const SETTLE: Duration = Duration::from_secs(180);
const INGESTS: usize = 2;
/// Horizons and waits end while the load runs.
const CONFIG: &str = "\
[ingest]
orphan_ttl_seconds = 6.0
[[ingest.surface]]
name = \"completion\"
horizon_seconds = 2.0
[[ingest.surface]]
name = \"session\"
trajectory = \"episode\"
horizon_seconds = 2.0
turn_reward = \"accept == null ? null : (accept ? 1.0 : 0.0)\"
[[ingest.surface]]
name = \"ending\"
trajectory = \"episode\"
horizon_seconds = 4.0
close_on_episode_end = true
[[ingest.surface]]
name = \"deciding\"
trajectory = \"episode\"
horizon_seconds = 4.0
close_on_feedback = true
[telemetry]
filter = \"warn,springtide=info\"
";
/// Slow commits, so that kills hit them.
const POSTGRES: [&str; 2] = ["commit_delay=3000", "commit_siblings=0"];

struct Size {
    kills: usize,
    time: Duration,
    /// Events per second.
    rate: f64,
    seed: u64,
}

fn parameter<T: FromStr>(name: &str, default: T) -> T {
    match std::env::var(format!("SPRINGTIDE_CHAOS_{name}")) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("SPRINGTIDE_CHAOS_{name}={text} is no number")),
        Err(_) => default,
    }
}

impl Size {
    fn from_environment() -> Self {
        Self {
            kills: parameter("KILLS", 6),
            time: Duration::from_secs_f64(60.0 * parameter("MINUTES", 0.35)),
            rate: parameter("RATE", 150.0),
            seed: parameter("SEED", rand::random::<u32>().into()),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_acknowledged_event_is_lost_or_duplicated_while_processes_are_killed() {
    let size = Size::from_environment();
    println!("SPRINGTIDE_CHAOS_SEED={}", size.seed);
    let servers = match parameter("REPLICATED", 0) {
        0 => Servers::start(CONFIG, &POSTGRES).await,
        _ => Servers::start_replicated(CONFIG, &POSTGRES).await,
    };
    let ingests: Vec<Ingest> = (0..INGESTS).map(|nth| servers.ingest(nth, &[])).collect();
    for ingest in &ingests {
        ingest.answers().await;
    }
    let ledger = Arc::new(Ledger::default());
    let urls: Vec<String> = ingests
        .iter()
        .map(|ingest| format!("http://{}", ingest.address))
        .collect();
    let client = Client::start(ledger.clone(), &urls, &servers.client(), size.seed);

    let began = Instant::now();
    let driver = Driver::new(&servers, &ingests, size.seed);
    let over = CancellationToken::new();
    let killing = async {
        let (kills, ()) = tokio::join!(driver.run(size.kills, size.time), tokio::time::sleep(size.time));
        over.cancel();
        kills
    };
    let (kills, (), poison) = tokio::join!(
        killing,
        load(&size, &ledger, &client, &over),
        poison(&size, &servers, &over)
    );
    let settling = Instant::now();
    settle(&servers, &client).await;
    let settled_in = settling.elapsed();
    let entries = ledger.entries();
    let by_itself: Vec<String> = ingests
        .iter()
        .flat_map(|ingest| ingest.process.ended_by_itself())
        .collect();
    for ingest in &ingests {
        ingest.process.stop().await;
    }
    let audit = audit(&entries, &poison, &servers.pool(), &servers.client()).await;
    let report = Report {
        size: &size,
        took: began.elapsed(),
        settled_in,
        kills: &kills,
        ledger: &ledger,
        logs: ingests.iter().map(|ingest| ingest.process.output()).collect(),
        ended_by_itself: by_itself,
        audit: &audit,
    };
    report.publish();
    let failures = audit.failures();
    if !failures.is_empty() {
        for ingest in &ingests {
            println!("--- {}\n{}", ingest.process.name, end_of(&ingest.process.output()));
        }
    }
    assert!(failures.is_empty(), "seed {}: {failures:?}\n{audit:#?}", size.seed);
    assert_eq!(kills.len(), size.kills, "every kill hit a process");
    assert!(audit.episodes > 0 && audit.late_turns > 0, "{audit:#?}");
}

/// Sends stories at the given rate until the kills are over.
async fn load(size: &Size, ledger: &Ledger, client: &Client, over: &CancellationToken) {
    let mut rng = StdRng::seed_from_u64(size.seed);
    let between = Duration::from_secs_f64(stories::EVENTS_PER_STORY / size.rate);
    let mut tick = tokio::time::interval(between);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    while !over.is_cancelled() {
        tick.tick().await;
        stories::send_story(&mut rng, ledger, client);
    }
}

/// Sends one undecodable record per second. Returns those that the log has acknowledged.
async fn poison(size: &Size, servers: &Servers, over: &CancellationToken) -> Vec<Vec<u8>> {
    let kafka = servers.client();
    let producer: FutureProducer = kafka
        .config(&[])
        .set("enable.idempotence", "true")
        .set("message.timeout.ms", "5000")
        .create()
        .unwrap();
    let mut rng = StdRng::seed_from_u64(size.seed);
    let mut acknowledged = Vec::new();
    while !over.is_cancelled() {
        let value = [&[0xff, 0xff][..], &rng.random::<[u8; 16]>()].concat();
        let topics = kafka.topics();
        let topic = if rng.random() {
            topics.generation
        } else {
            topics.feedback
        };
        let key: [u8; 16] = rng.random();
        let record = FutureRecord::to(&topic).key(&key[..]).payload(&value);
        if producer.send(record, Duration::ZERO).await.is_ok() {
            acknowledged.push(value);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    acknowledged
}

/// Waits until everything is answered, read, joined and closed.
async fn settle(servers: &Servers, client: &Client) {
    servers.answer().await;
    eventually("every send has its answer", SETTLE, async || {
        (client.waiting() == 0).then_some(())
    })
    .await;
    let (pool, kafka) = (servers.pool(), servers.client());
    eventually("the tables catch up", SETTLE, async || {
        (behind(&pool, &kafka).await == 0).then_some(())
    })
    .await;
    for (what, query) in [
        (
            "everything closes",
            "select (select count(*) from open_generation) + (select count(*) from open_episode)",
        ),
        ("orphans are reported", ORPHANS_UNMARKED),
    ] {
        eventually(what, SETTLE, async || (number(&pool, query).await == 0).then_some(())).await;
    }
}

fn end_of(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
