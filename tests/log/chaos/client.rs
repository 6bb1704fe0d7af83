//! The client: sends in an open loop, independent of the answers, over several connections and
//! directly to the log, compressed with each codec. It resends each event under the same id until the answer is final.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use event_log::ClientOptions;
use event_log::Producer;
use event_log::event::{Body, Event, Target};
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;
use tokio::sync::mpsc;

use super::ledger::{EntryIndex, Ledger};

const CONNECTIONS: usize = 10;
/// How the connections compress what they send to the log, in turn.
const CODECS: [&str; 5] = ["none", "gzip", "snappy", "lz4", "zstd"];
/// Events per request.
const BATCH_MAX: usize = 16;
/// Longer than the service's timeout for the log.
const TIMEOUT: Duration = Duration::from_secs(8);
const RETRY_MS: std::ops::Range<u64> = 50..400;

pub struct Item {
    pub index: EntryIndex,
    pub event: Arc<Event>,
}

#[derive(Clone)]
pub struct Client {
    ledger: Arc<Ledger>,
    queue: mpsc::UnboundedSender<Item>,
    waiting: Arc<AtomicUsize>,
}

impl Client {
    /// `services` are base URLs.
    pub fn start(ledger: Arc<Ledger>, services: &[String], log: &ClientOptions, seed: u64) -> Self {
        let (queue, sends) = mpsc::unbounded_channel();
        let sends = Arc::new(tokio::sync::Mutex::new(sends));
        let waiting = Arc::new(AtomicUsize::new(0));
        for nth in 0..CONNECTIONS {
            let mut log = log.clone();
            let codec = CODECS[nth % CODECS.len()].to_owned();
            log.librdkafka.insert("compression.type".to_owned(), codec);
            let connection = Connection {
                ledger: ledger.clone(),
                http: reqwest::Client::builder().timeout(TIMEOUT).build().unwrap(),
                services: services.to_vec(),
                log: Producer::new(&log).unwrap(),
                rng: StdRng::seed_from_u64(seed.wrapping_add(nth as u64)),
                waiting: waiting.clone(),
            };
            tokio::spawn(connection.run(sends.clone()));
        }
        Self { ledger, queue, waiting }
    }

    /// Sends after `delay`.
    pub fn send(&self, index: EntryIndex, event: Arc<Event>, delay: Duration) {
        self.ledger.sent(index);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let queue = self.queue.clone();
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            // Fails once the test is over.
            let _ = queue.send(Item { index, event });
        });
    }

    /// Number of sends without a final answer.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

struct Connection {
    ledger: Arc<Ledger>,
    http: reqwest::Client,
    services: Vec<String>,
    log: Producer,
    rng: StdRng,
    waiting: Arc<AtomicUsize>,
}

impl Connection {
    async fn run(mut self, queue: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Item>>>) {
        loop {
            let mut batch = Vec::new();
            let most = self.rng.random_range(1..=BATCH_MAX);
            if queue.lock().await.recv_many(&mut batch, most).await == 0 {
                return;
            }
            self.send_until_answered(batch).await;
        }
    }

    /// Resends until every item has a final answer.
    async fn send_until_answered(&mut self, mut batch: Vec<Item>) {
        while !batch.is_empty() {
            let before = batch.len();
            let one_feedback = matches!(&*batch, [one] if matches!(one.event.body, Body::Feedback(_)));
            batch = match self.rng.random_range(0..10) {
                0 => self.produce(batch).await,
                1..=6 if one_feedback => self.feedback(batch).await,
                _ => self.batch(batch).await,
            };
            self.waiting.fetch_sub(before - batch.len(), Ordering::SeqCst);
            if !batch.is_empty() {
                let pause = self.rng.random_range(RETRY_MS);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
        }
    }

    async fn produce(&mut self, batch: Vec<Item>) -> Vec<Item> {
        // Together, so that the client library has something to compress.
        let sends = batch.iter().map(|send| self.log.send_event(&send.event));
        let results = join_all(sends).await;
        let mut again = Vec::new();
        for (send, result) in batch.into_iter().zip(results) {
            match result {
                Ok(()) => self.ledger.answered(send.index, 200),
                Err(_) => again.push(send),
            }
        }
        self.ledger.retried("log", again.len());
        again
    }

    async fn batch(&mut self, batch: Vec<Item>) -> Vec<Item> {
        let items = batch.iter().map(|send| {
            let mut item = serde_json::to_value(&*send.event).unwrap();
            item.as_object_mut().unwrap().remove("tenant");
            item
        });
        let items = Value::Array(items.collect());
        let Some((status, answer)) = self.post("/v1/events:batch", &items).await else {
            self.ledger.retried("unknown", batch.len());
            return batch;
        };
        if !matches!(status, 200 | 207) {
            self.ledger.retried(&status.to_string(), batch.len());
            return batch;
        }
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), batch.len(), "{answer}");
        for (send, result) in batch.iter().zip(results) {
            let status = result["status"].as_u64().unwrap();
            self.ledger.answered(send.index, u16::try_from(status).unwrap());
        }
        Vec::new()
    }

    /// Sends the event as a single feedback request.
    async fn feedback(&mut self, batch: Vec<Item>) -> Vec<Item> {
        let [send] = &*batch else { return batch };
        let Body::Feedback(feedback) = &send.event.body else {
            return batch;
        };
        let mut body = json!({
            "id": feedback.id, "metric_name": feedback.metric_name, "value": feedback.value, "tags": feedback.tags,
            "source": send.event.source, "time": send.event.time.format(&Rfc3339).unwrap(),
        });
        match feedback.target {
            Target::Generation(id) => body["generation_id"] = json!(id),
            Target::Episode(id) => body["episode_id"] = json!(id),
        }
        match self.post("/v1/feedback", &body).await {
            None => self.ledger.retried("unknown", 1),
            Some((status @ (408 | 429 | 500 | 503), _)) => self.ledger.retried(&status.to_string(), 1),
            Some((status, _)) => {
                self.ledger.answered(send.index, status);
                return Vec::new();
            }
        }
        batch
    }

    /// `None`: no answer, so the outcome is unknown.
    async fn post(&mut self, path: &str, body: &Value) -> Option<(u16, Value)> {
        let service = &self.services[self.rng.random_range(0..self.services.len())];
        let answer = self
            .http
            .post(format!("{service}{path}"))
            .json(body)
            .send()
            .await
            .ok()?;
        let status = answer.status().as_u16();
        let body = answer.bytes().await.ok()?;
        Some((status, serde_json::from_slice(&body).ok()?))
    }
}
