//! Retention on many rows: old weeks are dropped beside a reader that holds their tables, and beside
//! honest traffic. `make bench NAME=expiry` fills 10⁷ generations, a plain test run 10⁵.

use std::time::{Duration, Instant};

use reqwest::Client;
use serde_json::json;
use sqlx::PgPool;
use tokio::task::JoinSet;

use crate::attacks::honest::batch;
use crate::attacks::report::{Latencies, Summary};
use crate::plans::{self, fill};
use fixture::ingest::{Service, count, options};
use fixture::{Stack, eventually};

/// The tables hold eight weeks.
const RETENTION_DAYS: u32 = 28;
/// Batches of ten events a second.
const RATE: f64 = 20.0;
const LONG: Duration = Duration::from_secs(3600);

/// Weeks that are to go: name and estimated generations, oldest first.
async fn old_weeks(pool: &PgPool) -> Vec<(String, f32)> {
    let sql = "select c.relname::text, c.reltuples from pg_inherits i join pg_class c on c.oid = i.inhrelid
               where i.inhparent = 'generation'::regclass and c.relname < (
                   select to_char((now() at time zone 'utc') - make_interval(days => $1), '\"generation_\"IYYY\"w\"IW'))
               order by 1";
    let days = i32::try_from(RETENTION_DAYS).unwrap();
    sqlx::query_as(sql).bind(days).fetch_all(pool).await.unwrap()
}

/// Sends batches at the rate until `done`. Latencies count from when a batch was due.
async fn traffic(service: &Service, done: impl Future<Output = ()>) -> (Summary, i64) {
    let (client, url) = (Client::new(), format!("http://{}/v1/events:batch", service.address));
    let mut requests = JoinSet::new();
    let mut every = tokio::time::interval(Duration::from_secs_f64(1.0 / RATE));
    let mut generations = 0;
    tokio::pin!(done);
    loop {
        tokio::select! {
            () = &mut done => break,
            due = every.tick() => {
                let (ids, body) = batch(0);
                generations += i64::try_from(ids.len()).unwrap();
                let request = client.post(&url).header("content-type", "application/json").body(body);
                requests.spawn(async move {
                    let answer = request.send().await.unwrap();
                    assert_eq!(answer.status(), 200, "an honest batch");
                    due.elapsed().as_secs_f64()
                });
            }
        }
    }
    let mut latencies = Latencies::default();
    while let Some(seconds) = requests.join_next().await {
        latencies.add(seconds.unwrap());
    }
    (latencies.summary(), generations)
}

fn line(what: &str, latencies: Summary) {
    let [p50, p99, max] = [latencies.p50, latencies.p99, latencies.max].map(|seconds| 1000.0 * seconds);
    println!("| {what} | {} | {p50:.1} | {p99:.1} | {max:.0} |", latencies.number);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_weeks_are_dropped_beside_a_long_reader_and_honest_traffic() {
    let stack = Stack::start("expiry").await;
    let pool = &stack.pool;
    let (rows, filling) = (plans::rows("SPRINGTIDE_EXPIRY_ROWS"), Instant::now());
    fill(pool, rows).await;
    println!("{rows} generations, filled in {:.0?}", filling.elapsed());
    let seconds = if rows > 1_000_000 { 20 } else { 2 };
    let pause = || tokio::time::sleep(Duration::from_secs(seconds));
    let kept = |retention_days| ::ingest::Options {
        retention_days,
        ..options()
    };
    let weeks = old_weeks(pool).await;
    assert!(weeks.len() >= 4, "{weeks:?}");
    let size = "select pg_database_size(current_database())";
    let before = count(pool, size).await;

    println!("| acknowledgements, ms | batches | p50 | p99 | max |\n|---|---|---|---|---|");
    let service = Service::start_with(&stack, kept(0)).await;
    let (undisturbed, sent) = traffic(&service, pause()).await;
    line("nothing expires", undisturbed);
    service.stop().await;

    // A report, a backup.
    let mut reader = edge::database::begin(pool).await.unwrap();
    let read = "select count(*) from (select from generation limit 1) g, (select from trajectory limit 1) t";
    sqlx::query(read).execute(&mut *reader).await.unwrap();
    let service = Service::start_with(&stack, kept(RETENTION_DAYS)).await;
    let (beside_reader, more) = traffic(&service, pause()).await;
    let sent = sent + more;
    line("a reader holds every week", beside_reader);
    assert_eq!(old_weeks(pool).await.len(), weeks.len(), "the reader was in the way");
    service.stop().await;
    reader.rollback().await.unwrap();

    let service = Service::start_with(&stack, kept(RETENTION_DAYS)).await;
    let started = Instant::now();
    let mut gone = Vec::new();
    let (dropping, more) = traffic(&service, async {
        eventually("all old weeks are dropped", LONG, async || {
            let left = old_weeks(pool).await.len();
            while gone.len() < weeks.len() - left {
                gone.push(started.elapsed().as_secs_f64());
            }
            (left == 0).then_some(())
        })
        .await;
    })
    .await;
    let sent = sent + more;
    line("weeks are counted and dropped", dropping);
    let (sweeping, more) = traffic(&service, async {
        eventually("what belonged to them is deleted", LONG, async || {
            let left = "select count(*) from feedback
                        where generation_id < (select until_id from generation_horizon) and generation_id is not null";
            let trajectories =
                "select count(*) from trajectory where generation_id < (select until_id from generation_horizon)";
            (count(pool, left).await + count(pool, trajectories).await == 0).then_some(())
        })
        .await;
    })
    .await;
    let sent = sent + more;
    line("their feedback is deleted", sweeping);
    let swept = started.elapsed().as_secs_f64();

    println!("\n| week | generations, about | gone after, s |\n|---|---|---|");
    for ((name, generations), seconds) in weeks.iter().zip(&gone) {
        println!("| {name} | {generations:.0} | {seconds:.1} |");
    }
    let generations: f64 = weeks.iter().map(|(_, generations)| f64::from(*generations)).sum();
    let each = gone.last().unwrap() / generations * 1e6;
    println!(
        "{each:.1} s per million generations; with what belonged to them {:.1} s",
        swept / generations * 1e6
    );
    let after = count(pool, size).await;
    println!("{} MiB before, {} MiB after", before >> 20, after >> 20);

    eventually(
        "all that was acknowledged is stored, and no total is lost",
        LONG,
        async || {
            let remaining = count(pool, "select count(*) from ledger").await;
            let expired = count(
                pool,
                "select coalesce(sum(generations), 0)::bigint from expired_generation",
            )
            .await;
            (remaining + expired == rows + sent).then_some(())
        },
    )
    .await;
    if let Ok(path) = std::env::var("SPRINGTIDE_EXPIRY_JSON") {
        let latencies = [undisturbed, beside_reader, dropping, sweeping].map(Summary::json);
        let report = json!({"generations": rows, "weeks": weeks, "gone_after_seconds": gone, "swept_after_seconds": swept,
                            "bytes_before": before, "bytes_after": after,
                            "acknowledgements": {"undisturbed": latencies[0], "beside_reader": latencies[1],
                                                 "dropping": latencies[2], "sweeping": latencies[3]}});
        std::fs::write(path, serde_json::to_string_pretty(&report).unwrap()).unwrap();
    }
    service.stop().await;
}
