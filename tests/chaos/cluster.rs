//! A broker that comes back with another log under the same address is noticed, whether ingest was running meanwhile or not,
//! also where the new log is longer than the old one was.

use std::time::Duration;

use ingest::event::Event;
use ingest::log::Producer;
use sqlx::PgPool;

use super::audit::{behind, number};
use super::servers::Servers;
use super::{CONFIG, end_of, parameter};
use crate::ingest::generation;
use crate::support::eventually;

const SOON: Duration = Duration::from_secs(90);
const EVENTS: i64 = 40;

async fn send(servers: &Servers, count: i64) {
    let producer = Producer::new(&servers.client()).unwrap();
    for _ in 0..count {
        let event: Event = generation().into_event("default", "tests/chaos/cluster");
        producer.send_event(&event).await.unwrap();
    }
}

async fn stored(pool: &PgPool, rows: i64) {
    eventually("the rows are there", SOON, async || {
        let stored = number(pool, "select count(*) from generation").await;
        assert!(stored <= rows, "{stored} rows, not {rows}");
        (stored == rows).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_recreated_cluster_is_noticed_and_not_skipped() {
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

        // As an operator would run it: whoever finds another log under the tables stops.
        let running = servers.ingest(2 * swap + 1, &[]);
        running.answers().await;
        servers = servers.recreate_cluster().await;
        // More than the old one had: offsets alone would not tell.
        in_log += EVENTS;
        send(&servers, in_log).await;
        eventually("ingest stops", SOON, async || {
            (!running.process.ended_by_itself().is_empty()).then_some(())
        })
        .await;
        let cluster: String = eventually("it says why", SOON, async || {
            let said = running.process.said();
            let (_, error) = said.split_once("these tables were filled from the Kafka cluster ")?;
            let (_, found) = error.split_once(" are the cluster ")?;
            Some(found.split(':').next()?.to_owned())
        })
        .await;
        assert!(!known.contains(&cluster), "{}", end_of(&running.process.said()));
        known.push(cluster);
        // Started again, it goes on refusing, for this reason alone.
        eventually("it refuses again", SOON, async || {
            (running.process.ended_by_itself().len() >= 2).then_some(())
        })
        .await;
        let ended = running.process.ended_by_itself().len();
        let reasons = running.process.said().matches("these tables were filled from").count();
        assert!(reasons >= ended, "{ended} ends:\n{}", end_of(&running.process.said()));
        rows += in_log;
        drop(running);
    }
    // The operator decides to go on: all of the new log is read, from its beginning.
    let running = servers.ingest(2 * swaps, &[("SPRINGTIDE__INGEST__ACCEPT_OTHER_LOG", "true")]);
    stored(&pool, rows).await;
    running.process.stop().await;
    assert!(behind(&pool, &servers.client()).await >= 0);
    println!("{swaps} recreated clusters, each noticed by a running ingest and by every start after it");
}
