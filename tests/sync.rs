//! From the bytes of a step to the last follower serving them: the publisher's commit, the release loop, the log, the followers of
//! two clusters and their engines, while callers stream tokens. Small here; `make bench-sync` runs it at length and prints where the
//! time went (`SPRINGTIDE_SYNC_MIB` of weights, `_FOLLOWERS`, `_STEPS`, `_THREADS`, `_JSON`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use edge::auth::{Auth, AuthOptions};
use futures::StreamExt as _;
use policy::config::{Family, ModelConfig};
use policy::image::{Image, TensorData};
use policy::kernel::Threads;
use policy::network::random_image;
use policy::sign::{SigningKey, TrustedKeys};
use policy::store::Store;
use serde_json::{Value, json};
use serving::ServeOptions;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use trainer::publish::{External, Publisher, Timings, import_image, publish_external};

use crate::serving::{Role, control, desk};
use crate::support::{Stack, eventually};

pub const POLICY: &str = "demo";
pub const LINE: &str = "realtime";
/// A version of the full size takes minutes to get everywhere on a machine that is busy otherwise.
const LIMIT: Duration = Duration::from_secs(600);
/// E|Δ| of a step of AdamW in its steady state at a learning rate of 1e-6: see policy/benches/delta/pairs.rs.
const STEP: f32 = 1.83e-7;

fn parameter<T: std::str::FromStr>(name: &str, default: T) -> T {
    let set = std::env::var(format!("SPRINGTIDE_SYNC_{name}")).ok();
    set.map_or(default, |text| text.parse().ok().unwrap())
}

/// A Qwen3 of about so many MiB of bf16.
fn model(mib: i64) -> ModelConfig {
    let hidden = if mib >= 256 { 2048 } else { 256 };
    // attention takes four squares and the SwiGLU nine
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
        // caches for whole contexts count among what may be resident
        max_position_embeddings: 512,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}

/// A step: every weight goes to a neighbouring value with the probability E|Δ| ÷ (distance to it).
fn step(image: &Image, seed: u64) -> Image {
    let mut state = seed;
    let mut random = move || {
        // SplitMix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let mut next = image.clone();
    for tensor in next.tensors.values_mut() {
        let mut bytes = tensor.bytes.to_vec();
        for weight in bytes.as_chunks_mut::<2>().0 {
            let bits = u16::from_le_bytes(*weight);
            let exponent = i32::from(bits >> 7 & 0xff) - 127;
            let drawn = random();
            let chance = STEP / 2f32.powi(exponent - 7);
            if ((drawn >> 40) as f32) < chance * (1u64 << 24) as f32 {
                let towards = if drawn & 1 == 0 {
                    bits.wrapping_add(1)
                } else {
                    bits.saturating_sub(1)
                };
                *weight = towards.to_le_bytes();
            }
        }
        *tensor = TensorData::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
    }
    next
}

/// What a trainer publishes with, announcing included.
pub fn publisher(stack: &Stack, threads: usize) -> Publisher {
    let key = SigningKey::load_or_create(&stack.keys_dir, "trainer").unwrap();
    let store = Store::open(&stack.store_url).unwrap();
    Publisher {
        pool: stack.pool.clone(),
        store: store.with_threads(Threads::new(threads).unwrap()),
        trusted: Arc::new(TrustedKeys::load(&stack.keys_dir).unwrap()),
        key: Arc::new(key),
        announce: Some(ingest::log::Producer::new(&stack.kafka).unwrap()),
        policy: POLICY.into(),
        image_every: 1_000,
        checkpoints_kept: 2,
        copies: trainer::publish::Copies::default(),
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
        // three versions of weights, each as published and as the engine has it, caches, and what is kept of a fourth
        resident_bytes_max: (mib << 20) * 12 + (4 << 30),
        ..ServeOptions::default()
    };
    let store = Store::open(&stack.store_url).unwrap();
    let task = tokio::spawn(serving::serve::run(
        options,
        POLICY.into(),
        policy::model::Compute::Bf16,
        stack.kafka.clone(),
        store.with_threads(Threads::new(threads).unwrap()),
        None,
        stack.keys_dir.clone(),
        Auth::new(AuthOptions::default(), stack.pool.clone()),
        Some(control_url.into()),
        listener,
        Router::new(),
        stop.clone(),
    ));
    Role { url, stop, task }
}

/// When tokens came, as a caller that streams all the while sees it. A request that ends is followed by the next; the time
/// between the two does not count.
#[derive(Default)]
struct Caller {
    /// When a token came, and how long after the one before it.
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
            let asked = client.post(format!("{url}/v1/completions")).json(&body).send().await;
            let response = match asked {
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

    /// The longest gap that touches the time from `from` to `to`, in milliseconds.
    fn longest(&self, from: Instant, to: Instant) -> f64 {
        let gaps = self.gaps.lock().unwrap();
        let touching = gaps.iter().filter(|(at, gap)| *at >= from && *at - *gap <= to);
        touching.map(|(_, gap)| gap.as_secs_f64() * 1e3).fold(0.0, f64::max)
    }
}

/// Where the time of one version went, seconds; of followers, the slowest in each.
#[derive(Debug, serde::Serialize)]
struct Way {
    version: i64,
    delta_bytes: u64,
    encode: f64,
    upload: f64,
    commit: f64,
    /// From the commit until the assignment and until followers knew it: what is left of the whole.
    assign: f64,
    fetch: f64,
    verify: f64,
    stage: f64,
    pause: f64,
    /// From the commit until the last follower served it.
    commit_to_served: f64,
    /// From the first look at the step's bytes.
    whole: f64,
    /// The longest time between two tokens of the caller of the first follower until then, milliseconds.
    caller_gap_ms: f64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_reaches_every_follower_and_callers_get_their_tokens_all_the_while() {
    let (mib, followers, steps) = (parameter("MIB", 4), parameter("FOLLOWERS", 2), parameter("STEPS", 2));
    let threads = parameter("THREADS", 1);
    let stack = Stack::start("sync").await;
    let publisher = publisher(&stack, threads);
    let mut image = tokio::task::spawn_blocking(move || random_image(&model(mib as i64), 5))
        .await
        .unwrap();
    let weights = image.tensor_bytes() / 2;
    let mut head = import_image(&publisher, Arc::new(image.clone()), LINE).await.unwrap();

    let desk = desk(&stack);
    let control = control(&stack, &desk).await;
    let stop = CancellationToken::new();
    let released = tokio::spawn(serving::release::follow(desk, stop.clone()));
    let mut replicas = vec![];
    for number in 1..=followers {
        replicas.push(follower(&stack, number, mib, threads, &control.url).await);
    }
    swapped(&control.url, head, followers).await;

    let caller = Arc::new(Caller::default());
    let calling = tokio::spawn({
        let (caller, url) = (caller.clone(), replicas[0].url.clone());
        async move { caller.stream(&url).await }
    });
    let calm = Instant::now();
    eventually("tokens come", LIMIT, async || {
        (caller.gaps.lock().unwrap().len() > 20).then_some(())
    })
    .await;
    let calm_ms = caller.longest(calm, Instant::now());

    let mut ways = vec![];
    for seed in 1..=steps {
        let (next, before) = (image.clone(), image);
        image = tokio::task::spawn_blocking(move || step(&before, seed)).await.unwrap();
        drop(next);
        let way = travel(&publisher, &image, head, &control.url, followers, &caller).await;
        head = way.version;
        ways.push(way);
    }
    eventually("a version that left leaves its memory to the next", LIMIT, async || {
        (policy::memory::kept_bytes() > 0).then_some(())
    })
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
    report(weights, followers, threads, calm_ms, &ways);
}

/// Publishes a step and waits until every follower serves it.
async fn travel(
    publisher: &Publisher,
    image: &Image,
    parent: i64,
    control_url: &str,
    followers: usize,
    caller: &Caller,
) -> Way {
    let begun = Instant::now();
    let external = External {
        line: LINE.into(),
        parent,
        image: image.clone(),
        whole: false,
    };
    let outcome = publish_external(publisher, external).await.unwrap();
    let version = outcome.manifest.version;
    let swaps = swapped(control_url, version, followers).await;
    let longest = |field: &str| {
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
        longest("fetch_ms"),
        longest("verify_ms"),
        longest("stage_ms"),
        longest("pause_ms"),
    );
    Way {
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
        whole: encode + upload + commit + commit_to_served,
        caller_gap_ms: caller.longest(begun, Instant::now()),
    }
}

/// The swaps of all followers to a version, once each has told of its own.
async fn swapped(control_url: &str, version: i64, followers: usize) -> Vec<Value> {
    eventually("every follower serves the version", LIMIT, async || {
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

fn report(weights: u64, followers: usize, threads: usize, calm_ms: f64, ways: &[Way]) {
    println!(
        "\n{weights} weights in bf16, {followers} followers, {threads} threads; longest gap between tokens before: {calm_ms:.0} ms"
    );
    println!(
        "version  delta bytes  encode  upload  commit  assign   fetch  verify   stage   pause ms  commit to served  whole s  caller's gap ms"
    );
    for way in ways {
        println!(
            "{:7} {:12} {:7.3} {:7.3} {:7.3} {:7.3} {:7.3} {:7.3} {:7.3} {:10.3} {:17.3} {:8.3} {:16.1}",
            way.version,
            way.delta_bytes,
            way.encode,
            way.upload,
            way.commit,
            way.assign,
            way.fetch,
            way.verify,
            way.stage,
            way.pause * 1e3,
            way.commit_to_served,
            way.whole,
            way.caller_gap_ms
        );
    }
    if let Ok(path) = std::env::var("SPRINGTIDE_SYNC_JSON") {
        let told = json!({"weights": weights, "followers": followers, "threads": threads, "calm_gap_ms": calm_ms, "versions": ways});
        std::fs::create_dir_all(std::path::Path::new(&path).parent().unwrap()).unwrap();
        std::fs::write(&path, serde_json::to_vec_pretty(&told).unwrap()).unwrap();
        println!("{path}");
    }
}
