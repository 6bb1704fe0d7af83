//! The two paths that are compared: the product's HTTP API, and a bare producer to the log.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use event_log::ClientOptions;
use event_log::event::PayloadRef;
use event_log::payload::TOKEN_IDS;
use futures::future::try_join_all;
use rdkafka::producer::{FutureProducer, FutureRecord};
use uuid::Uuid;

use crate::events::Events;
use crate::load::{Refused, Way};

/// `POST /v1/events:batch`.
#[derive(Clone)]
pub struct Http {
    client: reqwest::Client,
    url: String,
}

impl Http {
    pub fn new(base: &str) -> anyhow::Result<Self> {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(30)).build()?;
        Ok(Self {
            client,
            url: format!("{base}/v1/events:batch"),
        })
    }

    /// Uploads the payloads that events will reference.
    pub async fn upload(&self, base: &str, payloads: &[Vec<u8>]) -> anyhow::Result<()> {
        for bytes in payloads {
            let digest = hex::encode(PayloadRef::of(bytes, TOKEN_IDS).digest);
            let request = self.client.put(format!("{base}/v1/payloads/{digest}"));
            let request = request.header("content-type", "application/octet-stream");
            request.body(bytes.clone()).send().await?.error_for_status()?;
        }
        Ok(())
    }
}

impl Way for Http {
    type Batch = Vec<u8>;

    fn make(&self, events: &mut Events, count: u64) -> (Vec<u8>, Uuid) {
        let mut body = vec![b'['];
        let mut last = Uuid::nil();
        for index in 0..count {
            if index > 0 {
                body.push(b',');
            }
            last = events.append_json(&mut body);
        }
        body.push(b']');
        (body, last)
    }

    async fn send(&self, batch: &Vec<u8>) -> Result<(), Refused> {
        let request = self.client.post(&self.url).header("content-type", "application/json");
        let answer = request.body(batch.clone()).send().await.map_err(|_| Refused)?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(|_| Refused)?;
        match status.as_u16() {
            200 => Ok(()),
            429 | 503 => Err(Refused),
            // An error of this benchmark, which makes the figures meaningless.
            other => panic!("{other}: {}", String::from_utf8_lossy(&body)),
        }
    }
}

/// A bare producer with the product's settings.
#[derive(Clone)]
pub struct Bare {
    producer: FutureProducer,
    topics: Arc<event_log::Topics>,
}

impl Bare {
    pub fn new(options: &ClientOptions) -> anyhow::Result<Self> {
        let config = options.config(event_log::PRODUCER_SETTINGS);
        Ok(Self {
            producer: config.create().context("create producer")?,
            topics: Arc::new(options.topics()),
        })
    }
}

impl Way for Bare {
    type Batch = Vec<(bool, [u8; 16], Vec<u8>)>;

    fn make(&self, events: &mut Events, count: u64) -> (Self::Batch, Uuid) {
        let mut last = Uuid::nil();
        let batch = (0..count).map(|_| {
            let (is_generation, key, value, id) = events.encode();
            last = id;
            (is_generation, key, value)
        });
        (batch.collect(), last)
    }

    async fn send(&self, batch: &Self::Batch) -> Result<(), Refused> {
        let sends = batch.iter().map(|(is_generation, key, value)| {
            let topic = match is_generation {
                true => &self.topics.generation,
                false => &self.topics.feedback,
            };
            let record = FutureRecord::to(topic).key(&key[..]).payload(&value[..]);
            self.producer.send(record, Duration::ZERO)
        });
        try_join_all(sends).await.map(drop).map_err(|_| Refused)
    }
}
