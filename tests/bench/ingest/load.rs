//! Two kinds of load. Open loop: requests come at fixed times independent of the answers, and
//! latency counts from the time when a request was due. Closed loop: as fast as requests are
//! answered, which measures the capacity.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use sqlx::PgPool;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::events::Events;

/// A path of events into the tables.
pub trait Way: Clone + Send + Sync + 'static {
    type Batch: Send;

    fn make(&self, events: &mut Events, count: u64) -> (Self::Batch, Uuid);

    /// Returns `Ok` once all events are acknowledged, and `Err` if they must be sent again.
    fn send(&self, batch: &Self::Batch) -> impl Future<Output = Result<(), Refused>> + Send;
}

/// The batch was not acknowledged.
#[derive(Debug, Clone, Copy)]
pub struct Refused;

/// Latencies, milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    pub samples: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
    pub max_ms: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct OpenLoop {
    pub offered_events_per_s: f64,
    pub seconds: f64,
    pub batch_events: u64,
    pub acknowledged: u64,
    pub refused: u64,
    /// From the due time of a request to its answer.
    pub acknowledge: Latency,
    /// From the due time of a request until its last event is visible in the tables. Sampled.
    pub end_to_end: Latency,
    /// Acknowledged events per second of the whole run, including the wait for the last rows.
    pub stored_events_per_s: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct ClosedLoop {
    pub events: u64,
    pub acknowledge_seconds: f64,
    /// Until the last row is committed.
    pub stored_seconds: f64,
    pub events_per_s: f64,
    pub refused: u64,
}

/// Requests per second that are followed to their rows.
const PROBES_PER_SECOND: f64 = 10.0;
const PROBE_PAUSE: Duration = Duration::from_millis(4);
/// Longer latencies count as this.
const LATENCY_US_MAX: u64 = 300_000_000;
const STORED_LIMIT: Duration = Duration::from_secs(120);

/// Requests of `batch` events arrive as a Poisson process with `rate` events per second.
pub async fn open_loop<W: Way>(
    way: &W,
    pool: &PgPool,
    events: &mut Events,
    rate: f64,
    duration: Duration,
    batch: u64,
) -> anyhow::Result<OpenLoop> {
    let before = stored(pool).await?;
    let mut random = StdRng::seed_from_u64(7);
    let tally = Arc::new(Tally::new()?);
    let (probes, probed) = mpsc::unbounded_channel();
    let prober = tokio::spawn(probe(pool.clone(), tally.clone(), probed));
    let mut sends = JoinSet::new();
    let started = Instant::now();
    let mut due = Duration::ZERO;
    let mut probe_at = Duration::ZERO;
    while due < duration {
        tokio::time::sleep_until((started + due).into()).await;
        let (request, last) = way.make(events, batch);
        let probes = (due >= probe_at).then(|| probes.clone());
        if probes.is_some() {
            probe_at = due + Duration::from_secs_f64(1.0 / PROBES_PER_SECOND);
        }
        let (way, tally) = (way.clone(), tally.clone());
        let due_at = started + due;
        sends.spawn(async move {
            if way.send(&request).await.is_err() {
                tally.refused.fetch_add(batch, Ordering::Relaxed);
                return;
            }
            tally.acknowledged.fetch_add(batch, Ordering::Relaxed);
            record(&tally.acknowledge, due_at.elapsed());
            if let Some(probes) = probes {
                // The prober only ends if it failed, which the caller then sees.
                let _ = probes.send((last, due_at));
            }
        });
        // Exponential gaps by inversion.
        due += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() * batch as f64 / rate);
    }
    while let Some(sent) = sends.join_next().await {
        sent?;
    }
    drop(probes);
    prober.await??;
    let acknowledged = tally.acknowledged.load(Ordering::Relaxed);
    wait_until_stored(pool, before + acknowledged).await?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(OpenLoop {
        offered_events_per_s: rate,
        seconds: duration.as_secs_f64(),
        batch_events: batch,
        acknowledged,
        refused: tally.refused.load(Ordering::Relaxed),
        acknowledge: latency(&tally.acknowledge),
        end_to_end: latency(&tally.end_to_end),
        stored_events_per_s: acknowledged as f64 / seconds,
    })
}

/// Each of `senders` sends its next request once the previous one is answered, until `total` events
/// are acknowledged.
pub async fn closed_loop<W: Way>(
    way: &W,
    pool: &PgPool,
    events: Events,
    total: u64,
    batch: u64,
    senders: u64,
) -> anyhow::Result<(ClosedLoop, Events)> {
    let before = stored(pool).await?;
    let events = Arc::new(Mutex::new(events));
    let refused = Arc::new(AtomicU64::new(0));
    let left = Arc::new(AtomicU64::new(total / batch));
    let started = Instant::now();
    let mut sends = JoinSet::new();
    for _ in 0..senders {
        let (way, events, refused, left) = (way.clone(), events.clone(), refused.clone(), left.clone());
        sends.spawn(async move {
            let take = |left: u64| left.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                let (request, _) = way.make(&mut events.lock().unwrap_or_else(PoisonError::into_inner), batch);
                while way.send(&request).await.is_err() {
                    refused.fetch_add(batch, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        });
    }
    while let Some(sent) = sends.join_next().await {
        sent?;
    }
    let acknowledge_seconds = started.elapsed().as_secs_f64();
    let sent = total / batch * batch;
    wait_until_stored(pool, before + sent).await?;
    let stored_seconds = started.elapsed().as_secs_f64();
    let events = Arc::try_unwrap(events).map_err(|_| anyhow::anyhow!("a sender is still there"))?;
    let result = ClosedLoop {
        events: sent,
        acknowledge_seconds,
        stored_seconds,
        events_per_s: sent as f64 / stored_seconds,
        refused: refused.load(Ordering::Relaxed),
    };
    Ok((result, events.into_inner().unwrap_or_else(PoisonError::into_inner)))
}

struct Tally {
    acknowledged: AtomicU64,
    refused: AtomicU64,
    acknowledge: Mutex<Histogram<u64>>,
    end_to_end: Mutex<Histogram<u64>>,
}

impl Tally {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            acknowledged: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            acknowledge: Mutex::new(Histogram::new_with_bounds(1, LATENCY_US_MAX, 3)?),
            end_to_end: Mutex::new(Histogram::new_with_bounds(1, LATENCY_US_MAX, 3)?),
        })
    }
}

fn record(histogram: &Mutex<Histogram<u64>>, latency: Duration) {
    let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
    histogram
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .saturating_record(micros);
}

fn latency(histogram: &Mutex<Histogram<u64>>) -> Latency {
    let histogram = histogram.lock().unwrap_or_else(PoisonError::into_inner);
    let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e3;
    Latency {
        samples: histogram.len(),
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        p999_ms: at(0.999),
        max_ms: histogram.max() as f64 / 1e3,
    }
}

/// Number of stored records. Offsets are committed with their rows.
pub async fn stored(pool: &PgPool) -> anyhow::Result<u64> {
    let offsets = sqlx::query_scalar!(r#"select coalesce(sum(next_offset), 0)::bigint as "sum!" from consumer_offset"#);
    Ok(u64::try_from(offsets.fetch_one(pool).await?)?)
}

async fn wait_until_stored(pool: &PgPool, records: u64) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let now = stored(pool).await?;
        if now >= records {
            return Ok(());
        }
        anyhow::ensure!(
            started.elapsed() < STORED_LIMIT,
            "{now} of {records} records stored after {STORED_LIMIT:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Notes when the row of each id is there. Asks for all of them at once: if each waited by itself, a
/// sink that has fallen behind would be asked so often that it could not catch up.
async fn probe(pool: PgPool, tally: Arc<Tally>, mut probes: UnboundedReceiver<(Uuid, Instant)>) -> anyhow::Result<()> {
    let mut awaited: HashMap<Uuid, Instant> = HashMap::new();
    while let Some((id, due_at)) = probes.recv().await {
        awaited.insert(id, due_at);
        while !awaited.is_empty() {
            while let Ok((id, due_at)) = probes.try_recv() {
                awaited.insert(id, due_at);
            }
            let ids: Vec<Uuid> = awaited.keys().copied().collect();
            let there = sqlx::query_scalar!(
                r#"select id as "id!" from unnest($1::uuid[]) as awaited (id)
                   where exists (select from generation g where g.id = awaited.id)
                      or exists (select from feedback f where f.id = awaited.id)"#,
                &ids
            );
            for id in there.fetch_all(&pool).await? {
                let due_at = awaited.remove(&id);
                due_at
                    .into_iter()
                    .for_each(|due_at| record(&tally.end_to_end, due_at.elapsed()));
            }
            tokio::time::sleep(PROBE_PAUSE).await;
        }
    }
    Ok(())
}
