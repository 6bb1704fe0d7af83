//! `make bench NAME=ingest`: measures how many events per second become durable rows in Postgres over
//! HTTP and how fast they are acknowledged, compared with a bare producer and sink on the same
//! broker and Postgres.

mod events;
mod floor;
mod host;
mod load;
mod ways;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use serde::Serialize;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use bench::stack::{Room, Stack};
use events::Events;
use host::{Ingest, Meter, Usage};
use load::{ClosedLoop, OpenLoop, Way};
use ways::{Bare, Http};

const SENDERS: u64 = 16;

#[derive(Debug, Clone, Parser, Serialize)]
struct Args {
    /// The binary to measure. It needs no libtorch.
    #[arg(long, default_value = "target/release/springtide")]
    springtide: PathBuf,
    /// Offered load, events per second. One event in four is a generation.
    #[arg(long, default_value_t = 5000.0)]
    rate: f64,
    /// Duration of the offered load, seconds.
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Events per request. Several sizes run one after the other; the capacity is measured with the
    /// last.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 50])]
    batch: Vec<u64>,
    /// Offered load with one event per request, events per second. 0 skips it.
    #[arg(long, default_value_t = 500.0)]
    single_rate: f64,
    /// Events of the capacity measurement.
    #[arg(long, default_value_t = 150_000)]
    capacity_events: u64,
    /// Partitions of each topic.
    #[arg(long, default_value_t = 4)]
    partitions: i32,
    #[arg(long, default_value = "target/bench/ingest.json")]
    json: PathBuf,
}

/// The results of one path.
#[derive(Debug, Serialize)]
struct Figures {
    capacity: ClosedLoop,
    capacity_usage: BTreeMap<&'static str, Usage>,
    open: Vec<OpenLoop>,
    /// Of the last run with batches.
    open_usage: BTreeMap<&'static str, Usage>,
    rows: BTreeMap<&'static str, i64>,
}

#[derive(Debug, Serialize)]
struct Report {
    args: Args,
    mean_generation_bytes: usize,
    mean_feedback_bytes: usize,
    springtide: Figures,
    floor: Figures,
    /// Springtide's capacity divided by the baseline's.
    ratio: f64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let springtide = args.springtide.canonicalize().with_context(|| {
        format!(
            "{}: build it first (`make bench NAME=ingest` does)",
            args.springtide.display()
        )
    })?;
    let folder = tempfile::tempdir()?;
    let stack = Stack::start(&springtide).await?;

    let room = stack.room("floor", args.partitions).await?;
    let stop = CancellationToken::new();
    let mut sink = tokio::spawn(floor::run(
        room.kafka.clone(),
        args.partitions,
        room.pool.clone(),
        room.database_url.clone(),
        stop.clone(),
    ));
    let bare = Bare::new(&room.kafka)?;
    let floor = tokio::select! {
        floor = measure(&args, &stack, None, &room, &bare) => floor?,
        ended = &mut sink => return ended?.and_then(|()| bail!("the floor's sink ended")),
    };
    stop.cancel();
    sink.await??;

    let room = stack.room("springtide", args.partitions).await?;
    let ingest = Ingest::start(&springtide, &room, folder.path(), args.partitions).await?;
    let way = Http::new(&ingest.url)?;
    way.upload(&ingest.url, &Events::new(1).payloads).await?;
    let figures = measure(&args, &stack, Some(&ingest), &room, &way).await?;
    ingest.stop().await?;
    stack.stop().await?;

    let (mean_generation_bytes, mean_feedback_bytes) = Events::new(1).mean_bytes();
    let report = Report {
        ratio: figures.capacity.events_per_s / floor.capacity.events_per_s,
        args,
        mean_generation_bytes,
        mean_feedback_bytes,
        springtide: figures,
        floor,
    };
    print(&report);
    if let Some(parent) = report.args.json.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(&report.args.json, serde_json::to_string_pretty(&report)?)?;
    println!("{}", report.args.json.display());
    Ok(())
}

async fn measure<W: Way>(
    args: &Args,
    stack: &Stack,
    ingest: Option<&Ingest>,
    room: &Room,
    way: &W,
) -> anyhow::Result<Figures> {
    let events = Events::new(1);
    let batch = args.batch.last().copied().context("--batch takes a number")?;
    // Warms up connections, query plans and topic leaders.
    let (warm_up, events) = load::closed_loop(way, &room.pool, events, 5_000, batch, SENDERS).await?;
    let meter = Meter::start(stack, ingest)?;
    let (capacity, mut events) =
        load::closed_loop(way, &room.pool, events, args.capacity_events, batch, SENDERS).await?;
    let capacity_usage = meter.stop()?;
    let duration = Duration::from_secs_f64(args.seconds);
    let mut open = Vec::new();
    let mut open_usage = BTreeMap::new();
    for &batch in &args.batch {
        let meter = Meter::start(stack, ingest)?;
        open.push(load::open_loop(way, &room.pool, &mut events, args.rate, duration, batch).await?);
        open_usage = meter.stop()?;
    }
    if args.single_rate > 0.0 {
        open.push(load::open_loop(way, &room.pool, &mut events, args.single_rate, duration / 2, 1).await?);
    }
    let acknowledged = warm_up.events + capacity.events + open.iter().map(|open| open.acknowledged).sum::<u64>();
    let rows = rows(&room.pool).await?;
    let stored = rows["generation"] + rows["feedback"];
    ensure!(
        stored == i64::try_from(acknowledged)? && rows["event_key"] == stored,
        "{acknowledged} events were acknowledged, and the tables hold {rows:?}"
    );
    Ok(Figures {
        capacity,
        capacity_usage,
        open,
        open_usage,
        rows,
    })
}

async fn rows(pool: &PgPool) -> anyhow::Result<BTreeMap<&'static str, i64>> {
    let counts = sqlx::query!(
        r#"select (select count(*) from event_key) as "keys!", (select count(*) from generation) as "generations!",
                  (select count(*) from feedback) as "feedback!""#
    );
    let counts = counts.fetch_one(pool).await?;
    Ok(BTreeMap::from([
        ("event_key", counts.keys),
        ("generation", counts.generations),
        ("feedback", counts.feedback),
    ]))
}

fn print(report: &Report) {
    println!(
        "generations of {} bytes of JSON and feedback of {} on average, 1:3; {} partitions",
        report.mean_generation_bytes, report.mean_feedback_bytes, report.args.partitions
    );
    let ways = [("Springtide", &report.springtide), ("floor", &report.floor)];
    println!("\ncapacity                    events/s    acknowledged    stored");
    for (name, figures) in ways {
        let capacity = &figures.capacity;
        println!(
            "{name:<24} {:>11.0} {:>13.1} s {:>7.1} s   {}",
            capacity.events_per_s,
            capacity.acknowledge_seconds,
            capacity.stored_seconds,
            usage(&figures.capacity_usage)
        );
    }
    println!("Springtide / floor       {:>11.2}", report.ratio);
    println!(
        "\nopen loop                  offered/s   acked    refused   ack p50, p99, p99.9, max ms        to the row p50, p99 ms"
    );
    for (name, figures) in ways {
        for load in &figures.open {
            println!(
                "{name:<10} {:>4} a request {:>9.0} {:>9} {:>8}   {:>7.1} {:>7.1} {:>7.1} {:>7.1}   {:>12.1} {:>7.1}",
                load.batch_events,
                load.offered_events_per_s,
                load.acknowledged,
                load.refused,
                load.acknowledge.p50_ms,
                load.acknowledge.p99_ms,
                load.acknowledge.p999_ms,
                load.acknowledge.max_ms,
                load.end_to_end.p50_ms,
                load.end_to_end.p99_ms,
            );
        }
        println!("{:>26} {}", "", usage(&figures.open_usage));
    }
    println!(
        "\nrows: every acknowledged event is there once, {:?}",
        report.springtide.rows
    );
}

fn usage(parts: &BTreeMap<&'static str, Usage>) -> String {
    let parts = parts
        .iter()
        .map(|(part, usage)| format!("{part} {:.2} cores {:.0} MiB", usage.cores, usage.memory_mib));
    parts.collect::<Vec<_>>().join(", ")
}
