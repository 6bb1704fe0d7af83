//! A client whose clock is wrong sends at the honest clients' rate, over HTTP and, with access to the
//! broker, into the log.

use std::time::{Duration, Instant};

use event_log::ClientOptions;
use event_log::event::{Event, Generation};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::attacker::{Did, Place};
use super::{LONG, honest, id_ahead};
use fixture::ingest::generation;

/// Events per second into the log.
const RECORDS_PER_SECOND: f64 = 20.0;

pub async fn run(ahead: i64, place: Place, stop: CancellationToken) -> Did {
    let mut did = Did::default();
    let client = reqwest::Client::new();
    let producer: FutureProducer = place.kafka.config(&[]).create().unwrap();
    let started = Instant::now();
    let (mut batches, mut records) = (0_u32, 0_u32);
    while !stop.is_cancelled() {
        let (ids, body) = honest::batch(ahead);
        let request = client
            .post(format!("http://{}/v1/events:batch", place.ingest))
            .bearer_auth(&place.keys[0])
            .header("content-type", "application/json");
        let answer = request.body(body).send().await.unwrap();
        let status = answer.status().as_u16();
        let answer: Value = answer.json().await.unwrap();
        if ahead > 0 {
            // Every event is refused.
            assert_eq!(status, 207, "{answer}");
            let results = answer["results"].as_array().unwrap();
            assert!(results.iter().all(|result| result["status"] == 400), "{answer}");
        } else {
            assert_eq!(status, 200, "{answer}");
            did.closes.extend(ids);
        }
        batches += 1;
        if f64::from(records) < started.elapsed().as_secs_f64() * RECORDS_PER_SECOND {
            let position = send(&producer, &place.kafka, ahead).await;
            records += 1;
            if ahead > 0 {
                did.dead_letters.insert(position);
            }
        }
        let next = started + Duration::from_secs_f64(f64::from(batches) / place.rate);
        tokio::time::sleep_until(next.into()).await;
    }
    did.text = format!("{batches} batches over HTTP, {records} records into the log");
    did
}

async fn send(producer: &FutureProducer, kafka: &ClientOptions, ahead: i64) -> (String, i32, i64) {
    let id = id_ahead(ahead);
    let generation = Generation {
        id,
        episode_id: id,
        ..generation()
    };
    let event = generation.into_event("hostile", "tests/clock");
    let event = Event {
        time: event.time + time::Duration::seconds(ahead),
        ..event
    };
    let topic = kafka.topics().generation;
    let (key, value) = (event.key(), event.encode());
    let record = FutureRecord::to(&topic).key(&key[..]).payload(&value);
    let delivery = producer.send(record, LONG).await.unwrap();
    (topic.clone(), delivery.partition, delivery.offset)
}
