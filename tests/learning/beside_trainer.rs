//! A replica on the trainer's machine, with all roles as processes: rollouts that always have work use
//! its slots while the trainer waits, and none while it is dead.
//!
//! While it computes: a unit test of `serving`, and this with `SPRINGTIDE_BESIDE_STEPS`, which makes it
//! a measurement. Then it has runs of so many steps, without other rollouts, beside rollouts on a
//! replica that knows nothing of the trainer, and on one that does. The figures are also in
//! `target/chaos/beside_trainer.json`.

use crate::spine::Fleet;
use fixture::{Stack, eventually, write_figures};
use reqwest::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const DEADLINE: Duration = Duration::from_secs(300);
const SLOTS: usize = 8;
const STREAMS: usize = 2 * SLOTS;
const TOKENS: usize = 48;
/// Ids that end an answer.
const STOP_IDS: [u32; 3] = [0, 2, 3];
const SAMPLED_EVERY: Duration = Duration::from_millis(150);
/// Longer than a look, a pass, and the look after it, which counts the pass.
const TAKEN_BACK: Duration = Duration::from_secs(3);
const PROMPT_LINES: usize = 6;

/// One computation or one wait of the trainer, and what the replica counted meanwhile.
#[derive(Debug)]
struct Span {
    computing: bool,
    began: Instant,
    /// By its own clock.
    seconds: f64,
    /// What was read during this span alone.
    samples: Vec<(Duration, Replica)>,
}

/// What the replica says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Replica {
    lendable_slots: f64,
    background_slots: f64,
    /// That rollouts used.
    slot_ms: f64,
}

#[derive(Debug, Serialize)]
struct Figures {
    what: &'static str,
    steps: i64,
    tokens: i64,
    seconds: f64,
    computing_seconds: f64,
    computing_seconds_per_step: f64,
    /// Slot-seconds of rollouts, of all those while the trainer waited.
    idle_used: f64,
    rollouts_finished: usize,
}

async fn get(url: &str) -> Option<Value> {
    reqwest::get(url).await.ok()?.json().await.ok()
}

async fn replica(serve: &str) -> Option<Replica> {
    let text = reqwest::get(format!("{serve}/metrics")).await.ok()?.text().await.ok()?;
    let value = |name: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit_once(' ')?.1.parse().ok()
    };
    Some(Replica {
        lendable_slots: value("springtide_tide_lendable_slots{")?,
        background_slots: value("springtide_tide_background_slots{")?,
        slot_ms: value("springtide_tide_slot_milliseconds_total{")?,
    })
}

/// Whether the trainer computes, and since when.
async fn computing(train: &str) -> Option<(bool, String)> {
    let answer = get(&format!("{train}/computing")).await?;
    Some((answer["computing"].as_bool()?, answer["since"].as_str()?.to_owned()))
}

/// Watches trainer and replica until `stop`.
fn watch(train: String, serve: String, stop: CancellationToken) -> JoinHandle<Vec<Span>> {
    tokio::spawn(async move {
        let mut spans: BTreeMap<String, Span> = BTreeMap::new();
        while !stop.is_cancelled() {
            tokio::time::sleep(SAMPLED_EVERY).await;
            let Some(before) = computing(&train).await else {
                continue;
            };
            let span = spans.entry(before.1.clone()).or_insert_with(|| Span {
                computing: before.0,
                began: Instant::now(),
                seconds: 0.0,
                samples: vec![],
            });
            let now = span.began.elapsed();
            let read = replica(&serve).await;
            // nothing has begun or ended in between
            if let (Some(read), true) = (read, computing(&train).await.as_ref() == Some(&before)) {
                span.samples.push((now, read));
            }
        }
        let began: Vec<f64> = spans.keys().map(|since| seconds(since)).collect();
        let mut spans: Vec<Span> = spans.into_values().collect();
        for (span, times) in spans.iter_mut().zip(began.windows(2)) {
            span.seconds = times[1] - times[0];
        }
        spans
    })
}

fn seconds(rfc3339: &str) -> f64 {
    let format = &time::format_description::well_known::Rfc3339;
    let at = time::OffsetDateTime::parse(rfc3339, format).unwrap();
    at.unix_timestamp_nanos() as f64 / 1e9
}

/// Rollouts that always have work.
#[derive(Default)]
struct Counts {
    finished: AtomicUsize,
    lost: AtomicUsize,
}

struct Rollouts {
    counts: Arc<Counts>,
    stop: CancellationToken,
    streams: Vec<JoinHandle<()>>,
}

impl Rollouts {
    fn start(serve: &str) -> Self {
        let (counts, stop) = (Arc::new(Counts::default()), CancellationToken::new());
        let (run, client) = (Uuid::now_v7(), reqwest::Client::new());
        let streams = (0..STREAMS).map(|stream| {
            let (url, client) = (format!("{serve}/v1/completions"), client.clone());
            let (counts, stop) = (counts.clone(), stop.clone());
            tokio::spawn(async move {
                let bias: Value = STOP_IDS.iter().map(|id| (id.to_string(), json!(-100))).collect();
                let body = json!({
                    "model": "demo", "prompt": (0..16).map(|n| 10 + n * (stream + 1)).collect::<Vec<_>>(),
                    "max_tokens": TOKENS, "logit_bias": bias, "return_token_ids": true,
                    "metadata": {"purpose": "rollout", "run_id": run, "task_id": "beside"},
                });
                while !stop.is_cancelled() {
                    match rollout(&client, &url, &body).await {
                        Ok(true) => {
                            counts.finished.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(false) => tokio::time::sleep(Duration::from_millis(100)).await,
                        Err(error) => {
                            eprintln!("a rollout was lost: {error}");
                            counts.lost.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            })
        });
        Rollouts {
            streams: streams.collect(),
            counts,
            stop,
        }
    }

    fn finished(&self) -> usize {
        self.counts.finished.load(Ordering::Relaxed)
    }

    /// Waits for the last ones. Returns how many were lost.
    async fn stop(self) -> usize {
        self.stop.cancel();
        for stream in self.streams {
            tokio::time::timeout(DEADLINE, stream).await.unwrap().unwrap();
        }
        self.counts.lost.load(Ordering::Relaxed)
    }
}

/// False: it has to be asked for again.
async fn rollout(client: &reqwest::Client, url: &str, body: &Value) -> Result<bool, String> {
    let response = match client.post(url).json(body).send().await {
        Ok(response) => response,
        // the replica has not seen it
        Err(error) if error.is_connect() => return Ok(false),
        Err(error) => return Err(format!("{error:?}")),
    };
    match response.status() {
        StatusCode::OK => {}
        StatusCode::TOO_MANY_REQUESTS => return Ok(false),
        status => return Err(status.to_string()),
    }
    let answer: Value = response.json().await.map_err(|error| error.to_string())?;
    let tokens = answer["choices"][0]["token_ids"].as_array().map_or(0, Vec::len);
    match tokens == TOKENS {
        true => Ok(true),
        false => Err(format!("{tokens} tokens instead of {TOKENS}: {answer}")),
    }
}

/// A run whose rollouts are made by this replica too. Returns it once all of its steps are made.
async fn run(control: &str, steps: i64) -> Value {
    let prompt = "pub fn sum(values: &[u64]) -> u64 {\n    values.iter().sum()\n}\n".repeat(PROMPT_LINES);
    let task = |n| json!({"id": format!("t{n}"), "prompt": format!("{prompt}fn f{n}("), "answer": "values: &[u64])"});
    let request = json!({
        "kind": "grpo", "tasks": (0..4).map(task).collect::<Vec<_>>(), "group_size": 8, "tasks_per_step": 2,
        "grader": {"type": "text_similarity", "evaluation_metric": "fuzzy_match",
                   "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"},
        "steps": steps, "max_tokens": 64, "learning_rate": 1e-5,
    });
    let url = format!("{control}/v1/runs");
    let answer = reqwest::Client::new().post(&url).json(&request).send().await.unwrap();
    let created: Value = answer.json().await.unwrap();
    let url = format!(
        "{url}/{}",
        created["id"].as_str().unwrap_or_else(|| panic!("{created}"))
    );
    eventually("the run ends", DEADLINE, async || {
        get(&url).await.filter(|run| run["finished_at"].is_string())
    })
    .await
}

/// Rollouts have used slots since `before`.
async fn goes_on(serve: &str, before: f64) {
    eventually("rollouts go on", DEADLINE, async || {
        replica(serve).await.filter(|now| now.slot_ms > before)
    })
    .await;
}

/// Makes a run, and says what it cost.
async fn measure(what: &'static str, fleet: &Fleet, stack: &Stack, steps: i64, beside: bool) -> (Figures, Vec<Span>) {
    eventually("the replica serves", DEADLINE, async || fleet.complete("someone").await).await;
    let rollouts = beside.then(|| Rollouts::start(&fleet.serve));
    if beside {
        goes_on(&fleet.serve, 0.0).await;
    }
    let stop = CancellationToken::new();
    let watching = watch(fleet.train.clone(), fleet.serve.clone(), stop.clone());
    let before = replica(&fleet.serve).await.unwrap();
    let began = Instant::now();
    let done = run(&fleet.control, steps).await;
    let took = began.elapsed().as_secs_f64();
    let after = replica(&fleet.serve).await.unwrap();
    stop.cancel();
    let spans = watching.await.unwrap();
    assert_eq!(
        (&done["status"], &done["steps_done"]),
        (&json!("succeeded"), &json!(steps)),
        "{done}"
    );
    let tokens: i64 = sqlx::query_scalar(
        "select coalesce(sum((metrics ->> 'tokens')::bigint), 0)::bigint from step where run_id = $1::uuid",
    )
    .bind(done["id"].as_str())
    .fetch_one(&stack.pool)
    .await
    .unwrap();
    let computed = spans.iter().filter(|span| span.computing);
    let computing_seconds: f64 = computed.map(|span| span.seconds).sum();
    let idle = (took - computing_seconds) * SLOTS as f64;
    let finished = rollouts.as_ref().map_or(0, Rollouts::finished);
    let figures = Figures {
        what,
        steps,
        tokens,
        seconds: took,
        computing_seconds,
        computing_seconds_per_step: computing_seconds / steps as f64,
        idle_used: (after.slot_ms - before.slot_ms) / 1e3 / idle,
        rollouts_finished: finished,
    };
    println!("{}", serde_json::to_string(&figures).unwrap());
    if let Some(rollouts) = rollouts {
        assert_eq!(rollouts.stop().await, 0, "rollouts were lost");
    }
    (figures, spans)
}

/// While the trainer computes, rollouts get no slot and use none. On a machine with other work a look
/// may come later than this allows.
fn check(spans: &[Span]) {
    let of_computations = spans.iter().filter(|span| span.computing);
    let mut compared = 0;
    for span in of_computations {
        let late = span.samples.iter().filter(|(at, _)| *at >= TAKEN_BACK);
        let late: Vec<Replica> = late.map(|(_, now)| *now).collect();
        for pair in late.windows(2) {
            assert_eq!(
                pair[0], pair[1],
                "rollouts used slots while the trainer computed: {span:#?}"
            );
            assert_eq!((pair[1].lendable_slots, pair[1].background_slots), (0.0, 0.0));
            compared += 1;
        }
    }
    println!("{compared} pairs of readings within computations");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollouts_use_the_trainers_machine_while_it_waits_and_not_while_it_is_silent() {
    let steps = std::env::var("SPRINGTIDE_BESIDE_STEPS")
        .ok()
        .map(|steps| steps.parse::<i64>().unwrap());
    let stack = Stack::start("beside_trainer").await;
    let mut fleet = Fleet::start(&stack);
    fleet.configure(&format!(
        "[serve]\nslots = {SLOTS}\nslots_reserved_for_production = 0\n[serve.tide]\nrelease_slots_per_s = 8.0\n\
         forecast_weight = 0.0"
    ));
    let mut all = Vec::new();
    if let Some(steps) = steps {
        fleet.kill_and_restart("serve");
        all.push(measure("no other rollouts", &fleet, &stack, steps, false).await.0);
        all.push(measure("rollouts, not told", &fleet, &stack, steps, true).await.0);
    }
    fleet.configure(&format!("beside_trainer = '{}'", fleet.train));
    fleet.kill_and_restart("serve");
    if let Some(steps) = steps {
        let (figures, spans) = measure("rollouts, beside_trainer", &fleet, &stack, steps, true).await;
        all.push(figures);
        write_figures("beside_trainer.json", &all);
        check(&spans);
    }
    eventually("the replica serves", DEADLINE, async || fleet.complete("someone").await).await;

    // a trainer that does not answer may compute
    let rollouts = Rollouts::start(&fleet.serve);
    goes_on(&fleet.serve, replica(&fleet.serve).await.unwrap().slot_ms).await;
    fleet.kill("train");
    eventually("the replica reports why it lends nothing", DEADLINE, async || {
        let tide = get(&format!("{}/v1/tide", fleet.control)).await?;
        let engine = &tide["engines"][0];
        (engine["why"] == "trainer_silent" && engine["slot_limit"] == 0).then_some(())
    })
    .await;
    // what the last pass took is counted by the look after it
    let before = eventually("rollouts use nothing for two looks", DEADLINE, async || {
        let before = replica(&fleet.serve).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        replica(&fleet.serve).await.filter(|now| *now == before)
    })
    .await;
    fleet.spawn("train");
    goes_on(&fleet.serve, before.slot_ms).await;
    assert_eq!(rollouts.stop().await, 0, "rollouts were lost");
}
