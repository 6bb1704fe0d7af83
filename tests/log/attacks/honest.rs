//! Honest traffic at a fixed rate: batches of generations with their feedback, and completions with
//! theirs. A latency counts from the moment at which the request was due.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use event_log::event::{self, Generation};
use reqwest::Client;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::report::Latencies;
use super::{HORIZON_SECONDS, LONG, World, id_ahead};
use fixture::eventually;
use fixture::ingest::generation;

/// Generations of a batch, each with its feedback.
const GENERATIONS: usize = 5;
const SOURCE: &str = "tests/honest";
/// An honest client gives up after this.
const PATIENCE: Duration = Duration::from_secs(60);
/// A request whose connection broke is sent again, so often. Events have ids, so that is harmless.
const TRIES: usize = 5;
/// Feedback that took longer may come after the horizon.
const FEEDBACK_IN_TIME: Duration = Duration::from_millis((HORIZON_SECONDS * 500.0) as u64);

/// A batch of a client whose clock is ahead by `seconds`: ids of its generations, and its JSON.
pub fn batch(seconds: i64) -> (Vec<Uuid>, String) {
    let mut ids = Vec::new();
    let mut items = Vec::new();
    let mut item = |id: Uuid, kind: &str, body: Value| {
        let time = event::now() + time::Duration::seconds(seconds);
        let time = time.format(&Rfc3339).unwrap();
        items.push(json!({"source": SOURCE, "id": id, "time": time, kind: body}));
    };
    for _ in 0..GENERATIONS {
        let id = id_ahead(seconds);
        let generation = Generation {
            id,
            episode_id: id,
            ..generation()
        };
        item(id, "generation", json!(generation));
        let feedback = id_ahead(seconds);
        let body = json!({"feedback_id": feedback, "generation_id": id, "metric_name": "accept", "value": true});
        item(feedback, "feedback", body);
        ids.push(id);
    }
    (ids, Value::Array(items).to_string())
}

/// The honest clients.
pub struct Honest {
    caller: Arc<Caller>,
    rate: f64,
    completions: f64,
}

struct Caller {
    ingest: String,
    serve: String,
    key: String,
    /// Keeps its connections open, as most clients do.
    kept: Client,
    /// Opens a connection for each request.
    fresh: Client,
    broken: AtomicUsize,
}

/// A generation that must close.
struct Acknowledged {
    id: Uuid,
    at: OffsetDateTime,
    /// With the reward of its feedback.
    rewarded: bool,
}

/// What became of one request that was due.
struct Answer {
    is_completion: bool,
    due: Instant,
    answered: Instant,
    acknowledged: Result<Vec<Acknowledged>, String>,
}

/// What became of all.
pub struct Sent {
    pub batches: Latencies,
    pub completions: Latencies,
    /// Honest requests that did not succeed, by what happened.
    pub failed: BTreeMap<String, usize>,
    /// Connections that broke. Their requests were sent again.
    pub broken: usize,
    acknowledged: Vec<Acknowledged>,
}

impl Caller {
    async fn post(&self, index: usize, url: &str, body: String) -> Result<Value, String> {
        // Every other request needs a new connection.
        let client = if index.is_multiple_of(2) {
            &self.kept
        } else {
            &self.fresh
        };
        let mut why = String::new();
        for _ in 0..TRIES {
            match self.try_post(client, url, body.clone()).await {
                Ok((200, text)) => return Ok(serde_json::from_str(&text).unwrap()),
                Ok((status, text)) => return Err(format!("{status} {text}")),
                Err(error) => why = format!("{error:?}"),
            }
            self.broken.fetch_add(1, Ordering::Relaxed);
        }
        Err(why)
    }

    async fn try_post(&self, client: &Client, url: &str, body: String) -> reqwest::Result<(u16, String)> {
        let request = client
            .post(url)
            .bearer_auth(&self.key)
            .header("content-type", "application/json");
        let answer = request.timeout(PATIENCE).body(body).send().await?;
        let status = answer.status().as_u16();
        Ok((status, answer.text().await?))
    }

    async fn batch(&self, index: usize, due: Instant) -> Answer {
        let (ids, body) = batch(0);
        let answer = self
            .post(index, &format!("{}/v1/events:batch", self.ingest), body)
            .await;
        let (answered, at) = (Instant::now(), OffsetDateTime::now_utc());
        let acknowledged = |id| Acknowledged { id, at, rewarded: true };
        Answer {
            is_completion: false,
            due,
            answered,
            acknowledged: answer.map(|_| ids.into_iter().map(acknowledged).collect()),
        }
    }

    async fn completion(&self, index: usize, due: Instant) -> Answer {
        let body = json!({"model": "demo@champion", "prompt": [5, 6, 7], "max_tokens": 4});
        let answer = self
            .post(index, &format!("{}/v1/completions", self.serve), body.to_string())
            .await;
        let (answered, at) = (Instant::now(), OffsetDateTime::now_utc());
        let acknowledged = async {
            let id: Uuid = answer?["choices"][0]["generation_id"]
                .as_str()
                .unwrap()
                .parse()
                .unwrap();
            let body = json!({"generation_id": id, "metric_name": "accept", "value": true});
            let url = format!("{}/v1/feedback", self.ingest);
            self.post(index / 2, &url, body.to_string()).await?;
            let rewarded = answered.elapsed() < FEEDBACK_IN_TIME;
            Ok(vec![Acknowledged { id, at, rewarded }])
        };
        Answer {
            is_completion: true,
            due,
            answered,
            acknowledged: acknowledged.await,
        }
    }
}

impl Honest {
    pub fn new(world: &World) -> Self {
        let fresh = Client::builder().pool_max_idle_per_host(0);
        Self {
            caller: Arc::new(Caller {
                ingest: format!("http://{}", world.ingest.address),
                serve: format!("http://{}", world.serve.address),
                key: world.honest_key.clone(),
                kept: Client::new(),
                fresh: fresh.build().unwrap(),
                broken: AtomicUsize::new(0),
            }),
            rate: world.size.rate,
            completions: world.size.completions,
        }
    }

    /// Sends each request when it is due, whatever becomes of the others. Returns when all are
    /// answered.
    pub async fn send_for(&self, seconds: f64) -> Sent {
        let times = |rate: f64, is_completion: bool| {
            let count = (seconds * rate).ceil() as usize;
            (0..count).map(move |index| (index as f64 / rate, index, is_completion))
        };
        let mut plan: Vec<_> = times(self.rate, false).chain(times(self.completions, true)).collect();
        plan.sort_by(|a, b| a.0.total_cmp(&b.0));
        let started = Instant::now();
        let mut requests = JoinSet::new();
        for (after, index, is_completion) in plan {
            let due = started + Duration::from_secs_f64(after);
            tokio::time::sleep_until(due.into()).await;
            let caller = self.caller.clone();
            requests.spawn(async move {
                match is_completion {
                    false => caller.batch(index, due).await,
                    true => caller.completion(index, due).await,
                }
            });
        }
        let mut sent = Sent {
            batches: Latencies::default(),
            completions: Latencies::default(),
            failed: BTreeMap::new(),
            broken: 0,
            acknowledged: Vec::new(),
        };
        while let Some(answer) = requests.join_next().await {
            sent.add(answer.unwrap());
        }
        sent.broken = self.caller.broken.load(Ordering::Relaxed);
        sent
    }
}

impl Sent {
    fn add(&mut self, answer: Answer) {
        let latencies = match answer.is_completion {
            false => &mut self.batches,
            true => &mut self.completions,
        };
        latencies.add(answer.answered.duration_since(answer.due).as_secs_f64());
        match answer.acknowledged {
            Ok(acknowledged) => self.acknowledged.extend(acknowledged),
            Err(why) => *self.failed.entry(why).or_default() += 1,
        }
    }

    /// Waits until everything that was acknowledged is closed, with its reward. Returns how long that
    /// took, from the acknowledgement.
    pub async fn closed(&self, world: &World) -> Latencies {
        let ids: Vec<Uuid> = self.acknowledged.iter().map(|generation| generation.id).collect();
        let query = "select generation_id, closed_at, reward from trajectory where generation_id = any($1)";
        let rows = eventually("all that was acknowledged closes", LONG, async || {
            let query = sqlx::query_as::<_, (Uuid, OffsetDateTime, Option<f64>)>(query).bind(&ids);
            let rows = query.fetch_all(&world.stack.pool).await.unwrap();
            (rows.len() == ids.len()).then_some(rows)
        })
        .await;
        let rows: BTreeMap<_, _> = rows.into_iter().map(|(id, at, reward)| (id, (at, reward))).collect();
        let mut closings = Latencies::default();
        for generation in &self.acknowledged {
            let (closed_at, reward) = rows[&generation.id];
            if generation.rewarded {
                assert_eq!(reward, Some(0.75), "{}", generation.id);
            }
            closings.add((closed_at - generation.at).as_seconds_f64());
        }
        closings
    }
}
