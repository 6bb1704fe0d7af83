//! From a training step's weights to the last follower that serves them: publisher, release loop,
//! log, and the followers of two clusters with their engines, while a caller streams tokens. Small
//! here; `make bench NAME=sync` runs it at full size and prints where the time went
//! (`SPRINGTIDE_SYNC_MIB` of weights, `_FOLLOWERS`, `_STEPS`, `_THREADS`, `_JSON`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use artifact::checkpoint::Checkpoint;
use artifact::sign::SigningKey;
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use axum::Router;
use edge::auth::{Auth, AuthOptions};
use futures::StreamExt as _;
use model::config::{Family, ModelConfig};
use model::exact::Compute;
use model::random_checkpoint;
use runs::publish::{External, Publisher, Timings, import_checkpoint, publish_external};
use serde_json::{Value, json};
use serving::ServeOptions;
use serving::serve::Replica;
use store::Store;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use fixture::serving::{Role, control, releases};
use fixture::{Stack, eventually};

pub const POLICY: &str = "demo";
pub const LINE: &str = "realtime";
/// A full-size version may take minutes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(600);
/// Mean change E|Δ| of a steady-state AdamW step at a learning rate of 1e-6; see
/// policy/artifact/benches/delta/pairs.rs.
const STEP: f32 = 1.83e-7;

fn parameter<T: std::str::FromStr>(name: &str, default: T) -> T {
    let set = std::env::var(format!("SPRINGTIDE_SYNC_{name}")).ok();
    set.map_or(default, |text| text.parse().ok().unwrap())
}

/// A Qwen3 model with about `mib` MiB of bf16 weights.
fn model(mib: i64) -> ModelConfig {
    let hidden = if mib >= 256 { 2048 } else { 256 };
    // per layer, attention has 4 hidden² weights and the SwiGLU 9 hidden²
    let layers = (mib << 19) / (13 * hidden * hidden);
    ModelConfig {
        vocab_size: 4096,
        hidden_size: hidden,
        intermediate_size: 3 * hidden,
        num_hidden_layers: layers.max(1),
        num_attention_heads: hidden / 128,
        num_key_value_heads: hidden / 128,
        head_dim: 128,
        rms_norm_eps: 1e-6,
        // caches for whole contexts count toward resident_bytes_max
        max_position_embeddings: 512,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}

/// Simulates a step: each weight moves to a neighboring bf16 value with probability E|Δ| ÷
/// (distance to it).
fn step(checkpoint: &Checkpoint, seed: u64) -> Checkpoint {
    let mut state = seed;
    let mut random = move || {
        // SplitMix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let mut next = checkpoint.clone();
    for tensor in next.tensors.values_mut() {
        let mut bytes = tensor.bytes.to_vec();
        for weight in bytes.as_chunks_mut::<2>().0 {
            let bits = u16::from_le_bytes(*weight);
            let exponent = i32::from(bits >> 7 & 0xff) - 127;
            let drawn = random();
            let chance = STEP / 2f32.powi(exponent - 7);
            if ((drawn >> 40) as f32) < chance * (1u64 << 24) as f32 {
                let toward = if drawn & 1 == 0 {
                    bits.wrapping_add(1)
                } else {
                    bits.saturating_sub(1)
                };
                *weight = toward.to_le_bytes();
            }
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    next
}

/// A publisher as the trainer has it, with announcements.
pub fn publisher(stack: &Stack, threads: usize) -> Publisher {
    let key = SigningKey::load_or_create(&stack.keys_dir, "trainer").unwrap();
    let store = Store::open(&stack.store_url).unwrap();
    Publisher {
        pool: stack.pool_of("train"),
        store: store.with_threads(Threads::new(threads).unwrap()),
        keys_dir: stack.keys_dir.clone(),
        key: Arc::new(key),
        announce: Some(event_log::Producer::new(&stack.kafka).unwrap()),
        policy: POLICY.into(),
        checkpoint_every: 1_000,
        run_states_kept: 2,
        quantized: runs::publish::QuantizedCopies::default(),
    }
}

async fn follower(stack: &Stack, number: usize, mib: u64, threads: usize, control_url: &str) -> Role {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let options = ServeOptions {
        replica: format!("replica-{number}"),
        cluster: format!("cluster-{number}"),
        state_dir: stack.dir.path().join(format!("serve-{number}")),
        heartbeat_interval_ms: 100,
        // three versions (checkpoint and packed weights), caches, and the spare memory of a fourth
        resident_bytes_max: (mib << 20) * 12 + (4 << 30),
        ..ServeOptions::default()
    };
    let store = Store::open(&stack.store_url).unwrap();
    let replica = Replica {
        options,
        policy: POLICY.into(),
        compute: Compute::Bf16,
        kafka: stack.kafka.clone(),
        store: store.with_threads(Threads::new(threads).unwrap()),
        payloads: None,
        keys_dir: stack.keys_dir.clone(),
        sampler: edge::sampler::SamplerKey::from_seed(&[number as u8; 32]),
        auth: Auth::new(AuthOptions::default(), stack.pool_of("serve")),
        control_url: Some(control_url.into()),
        extra_routes: Router::new(),
    };
    let task = tokio::spawn(replica.run(listener.into(), stop.clone()));
    Role { url, stop, task }
}

/// A caller that streams without pause and measures when tokens arrive. The time between two
/// requests does not count.
#[derive(Default)]
struct Caller {
    /// When a token arrived, and the time since the previous one.
    gaps: Mutex<Vec<(Instant, Duration)>>,
    errors: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Caller {
    async fn stream(&self, url: &str) {
        let client = reqwest::Client::new();
        let mut seed = 0;
        while !self.stop.load(Ordering::Relaxed) {
            seed += 1;
            let body = json!({"model": "demo@champion", "prompt": [5, 6, 7], "max_tokens": 256, "seed": seed,
                "stream": true, "return_token_ids": true});
            let sent = client.post(format!("{url}/v1/completions")).json(&body).send().await;
            let response = match sent {
                Ok(response) if response.status() == 200 => response,
                Ok(response) => {
                    let error = response.text().await.unwrap_or_default();
                    self.errors.lock().unwrap().push(error);
                    continue;
                }
                Err(error) => {
                    self.errors.lock().unwrap().push(error.to_string());
                    continue;
                }
            };
            let mut last = None;
            let mut chunks = response.bytes_stream();
            while let Some(chunk) = chunks.next().await {
                let now = Instant::now();
                match chunk {
                    Ok(chunk) if chunk.windows(7).any(|part| part == b"\"error\"") => {
                        let error = String::from_utf8_lossy(&chunk).into_owned();
                        self.errors.lock().unwrap().push(error);
                    }
                    Ok(_) => {
                        if let Some(before) = last {
                            self.gaps.lock().unwrap().push((now, now - before));
                        }
                        last = Some(now);
                    }
                    Err(error) => self.errors.lock().unwrap().push(error.to_string()),
                }
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
    }

    /// The longest gap that overlaps the time from `from` to `to`, in milliseconds.
    fn longest_gap_ms(&self, from: Instant, to: Instant) -> f64 {
        let gaps = self.gaps.lock().unwrap();
        let touching = gaps.iter().filter(|(at, gap)| *at >= from && *at - *gap <= to);
        touching.map(|(_, gap)| gap.as_secs_f64() * 1e3).fold(0.0, f64::max)
    }
}

/// Where the time of one version went, in seconds. For followers, the slowest one in each phase.
#[derive(Debug, serde::Serialize)]
struct SyncTimes {
    version: i64,
    delta_bytes: u64,
    encode: f64,
    upload: f64,
    commit: f64,
    /// From the commit until followers knew the assignment: the rest of `commit_to_served`.
    assign: f64,
    fetch: f64,
    verify: f64,
    stage: f64,
    pause: f64,
    /// From the commit until the last follower served the version.
    commit_to_served: f64,
    /// From the start of the encoding until the last follower served the version.
    encode_to_served: f64,
    /// The longest time between two tokens of the caller meanwhile, in milliseconds.
    caller_gap_ms: f64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_reaches_every_follower_while_callers_keep_receiving_tokens() {
    let (mib, followers, steps) = (parameter("MIB", 4), parameter("FOLLOWERS", 2), parameter("STEPS", 2));
    let threads = parameter("THREADS", 1);
    let stack = Stack::start("sync").await;
    let publisher = publisher(&stack, threads);
    let mut checkpoint = tokio::task::spawn_blocking(move || random_checkpoint(&model(mib as i64), 5))
        .await
        .unwrap();
    let weights = checkpoint.tensor_bytes() / 2;
    let mut head = import_checkpoint(&publisher, Arc::new(checkpoint.clone()), LINE)
        .await
        .unwrap();

    let releases = releases(&stack);
    let control = control(&stack, &releases).await;
    let stop = CancellationToken::new();
    let released = tokio::spawn(release::run(releases, stop.clone()));
    let mut replicas = vec![];
    for number in 1..=followers {
        replicas.push(follower(&stack, number, mib, threads, &control.url).await);
    }
    swaps_to(&control.url, head, followers).await;

    let caller = Arc::new(Caller::default());
    let calling = tokio::spawn({
        let (caller, url) = (caller.clone(), replicas[0].url.clone());
        async move { caller.stream(&url).await }
    });
    let calm = Instant::now();
    eventually("the caller receives tokens", DEADLINE, async || {
        (caller.gaps.lock().unwrap().len() > 20).then_some(())
    })
    .await;
    let calm_ms = caller.longest_gap_ms(calm, Instant::now());

    let mut versions = vec![];
    for seed in 1..=steps {
        let (next, before) = (checkpoint.clone(), checkpoint);
        checkpoint = tokio::task::spawn_blocking(move || step(&before, seed)).await.unwrap();
        drop(next);
        let times = publish_and_wait(&publisher, &checkpoint, head, &control.url, followers, &caller).await;
        head = times.version;
        versions.push(times);
    }
    eventually(
        "a retired version leaves its memory to the next",
        DEADLINE,
        async || (artifact::memory::kept_bytes() > 0).then_some(()),
    )
    .await;
    caller.stop.store(true, Ordering::Relaxed);
    calling.await.unwrap();
    assert_eq!(*caller.errors.lock().unwrap(), Vec::<String>::new());
    stop.cancel();
    released.await.unwrap().unwrap();
    for replica in replicas {
        replica.stop().await;
    }
    control.stop().await;
    report(weights, followers, threads, calm_ms, &versions);
}

/// Publishes a step and waits until every follower serves it.
async fn publish_and_wait(
    publisher: &Publisher,
    checkpoint: &Checkpoint,
    parent: i64,
    control_url: &str,
    followers: usize,
    caller: &Caller,
) -> SyncTimes {
    let started = Instant::now();
    let external = External {
        line: LINE.into(),
        parent,
        weights: runs::publish::Weights::All(checkpoint.clone()),
        with_checkpoint: false,
        reference: None,
    };
    let outcome = publish_external(publisher, external).await.unwrap();
    let version = outcome.manifest.version;
    let swaps = swaps_to(control_url, version, followers).await;
    let slowest = |field: &str| {
        swaps
            .iter()
            .map(|swap| swap[field].as_f64().unwrap())
            .fold(0.0, f64::max)
            / 1e3
    };
    let served = swaps
        .iter()
        .map(|swap| OffsetDateTime::parse(swap["at"].as_str().unwrap(), &Rfc3339).unwrap());
    let served = served.max().unwrap();
    let committed: OffsetDateTime =
        sqlx::query_scalar("select created_at from version where policy = $1 and serial = $2")
            .bind(POLICY)
            .bind(version)
            .fetch_one(&publisher.pool)
            .await
            .unwrap();
    let Timings { encode, upload, commit } = outcome.timings;
    let commit_to_served = (served - committed).as_seconds_f64();
    let (fetch, verify, stage, pause) = (
        slowest("fetch_ms"),
        slowest("verify_ms"),
        slowest("stage_ms"),
        slowest("pause_ms"),
    );
    SyncTimes {
        version,
        delta_bytes: outcome.manifest.delta.unwrap().size_bytes,
        encode,
        upload,
        commit,
        assign: commit_to_served - fetch - verify - stage - pause,
        fetch,
        verify,
        stage,
        pause,
        commit_to_served,
        encode_to_served: encode + upload + commit + commit_to_served,
        caller_gap_ms: caller.longest_gap_ms(started, Instant::now()),
    }
}

/// The swaps of all followers to a version, once each has reported its own.
async fn swaps_to(control_url: &str, version: i64, followers: usize) -> Vec<Value> {
    eventually("every follower serves the version", DEADLINE, async || {
        let swaps: Value = reqwest::get(format!("{control_url}/v1/swaps"))
            .await
            .ok()?
            .json()
            .await
            .ok()?;
        let mut swaps = swaps["swaps"].as_array()?.clone();
        swaps.retain(|swap| swap["version"] == version);
        (swaps.len() >= followers).then_some(swaps)
    })
    .await
}

fn report(weights: u64, followers: usize, threads: usize, calm_ms: f64, versions: &[SyncTimes]) {
    println!(
        "\n{weights} weights in bf16, {followers} followers, {threads} threads; longest gap between tokens before: {calm_ms:.0} ms"
    );
    println!(
        "version  delta bytes  encode  upload  commit  assign   fetch  verify   stage   pause ms  commit to served  whole s  caller's gap ms"
    );
    for times in versions {
        println!(
            "{:7} {:12} {:7.3} {:7.3} {:7.3} {:7.3} {:7.3} {:7.3} {:7.3} {:10.3} {:17.3} {:8.3} {:16.1}",
            times.version,
            times.delta_bytes,
            times.encode,
            times.upload,
            times.commit,
            times.assign,
            times.fetch,
            times.verify,
            times.stage,
            times.pause * 1e3,
            times.commit_to_served,
            times.encode_to_served,
            times.caller_gap_ms
        );
    }
    if let Ok(path) = std::env::var("SPRINGTIDE_SYNC_JSON") {
        let json = json!({"weights": weights, "followers": followers, "threads": threads, "calm_gap_ms": calm_ms, "versions": versions});
        std::fs::create_dir_all(std::path::Path::new(&path).parent().unwrap()).unwrap();
        std::fs::write(&path, serde_json::to_vec_pretty(&json).unwrap()).unwrap();
        println!("{path}");
    }
}
