//! Ingest detects a broker that returns with another log at the same address, whether ingest was
//! running or not, and even if the new log is longer than the old one.

use std::time::Duration;

use event_log::Producer;
use event_log::event::Event;
use sqlx::PgPool;

use super::audit::{behind, number};
use super::{CONFIG, end_of, parameter};
use fixture::eventually;
use fixture::ingest::generation;
use fixture::servers::Servers;

const SOON: Duration = Duration::from_secs(90);
const EVENTS: i64 = 40;

async fn send(servers: &Servers, count: i64) {
    let producer = Producer::new(&servers.client()).unwrap();
    for _ in 0..count {
        let event: Event = generation().into_event("default", "tests/log/chaos/cluster");
        producer.send_event(&event).await.unwrap();
    }
}

async fn stored(pool: &PgPool, rows: i64) {
    eventually("the rows are stored", SOON, async || {
        let stored = number(pool, "select count(*) from generation").await;
        assert!(stored <= rows, "{stored} rows, not {rows}");
        (stored == rows).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_recreated_cluster_is_detected() {
    let swaps: usize = parameter("SWAPS", 1);
    let mut servers = Servers::start(CONFIG, &[]).await;
    let pool = servers.pool();
    let mut rows = 0;
    let mut in_log = 0;
    let mut known: Vec<String> = Vec::new();
    for swap in 0..swaps {
        let allowed = if swap == 0 { "false" } else { "true" };
        let running = servers.ingest(2 * swap, &[("SPRINGTIDE__INGEST__ACCEPT_OTHER_LOG", allowed)]);
        running.answers().await;
        if swap == 0 {
            in_log = EVENTS;
            send(&servers, in_log).await;
            rows += in_log;
        }
        stored(&pool, rows).await;
        running.process.stop().await;

        // With the default configuration: an ingest that finds another log stops.
        let running = servers.ingest(2 * swap + 1, &[]);
        running.answers().await;
        servers = servers.recreate_cluster().await;
        // More records than the old log had, so offsets alone do not reveal the change.
        in_log += EVENTS;
        send(&servers, in_log).await;
        eventually("ingest stops", SOON, async || {
            (!running.process.ended_by_itself().is_empty()).then_some(())
        })
        .await;
        let cluster: String = eventually("it logs the reason", SOON, async || {
            let output = running.process.output();
            let (_, error) = output.split_once("these tables were filled from the Kafka cluster ")?;
            let (_, found) = error.split_once(" are the cluster ")?;
            Some(found.split(':').next()?.to_owned())
        })
        .await;
        assert!(!known.contains(&cluster), "{}", end_of(&running.process.output()));
        known.push(cluster);
        // After a restart it refuses again, always for this reason.
        eventually("it refuses again", SOON, async || {
            (running.process.ended_by_itself().len() >= 2).then_some(())
        })
        .await;
        let ended = running.process.ended_by_itself().len();
        let reasons = running
            .process
            .output()
            .matches("these tables were filled from")
            .count();
        assert!(reasons >= ended, "{ended} ends:\n{}", end_of(&running.process.output()));
        rows += in_log;
        drop(running);
    }
    // With accept_other_log the new log is read from its beginning.
    let running = servers.ingest(2 * swaps, &[("SPRINGTIDE__INGEST__ACCEPT_OTHER_LOG", "true")]);
    stored(&pool, rows).await;
    running.process.stop().await;
    assert!(behind(&pool, &servers.client()).await >= 0);
    println!("{swaps} recreated clusters, each detected by a running ingest and at every later start");
}
